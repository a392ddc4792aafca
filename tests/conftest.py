"""What every test shares: where the device tests may run, and that a slow machine is no failure."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# tests/rdma needs two rxe devices; `docker/lab test` sets this variable where they are.
collect_ignore = [] if os.environ.get("RDMACONNECT_LAB") else ["rdma"]
