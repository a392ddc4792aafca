"""What every test shares: where the device tests may run, and that a slow machine is no failure."""

from __future__ import annotations

import os

# tests/rdma needs two rxe devices; `docker/lab test` sets this variable where they are.
ON_DEVICES = bool(os.environ.get("RDMACONNECT_LAB"))
collect_ignore = [] if ON_DEVICES else ["rdma"]

if not ON_DEVICES:  # under emulation the import alone takes 20 s, and nothing there uses it
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
