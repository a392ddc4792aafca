"""What every test shares: where the device tests may run."""

from __future__ import annotations

import os

# tests/rdma needs two rxe devices; `docker/lab test` sets this variable where they are.
collect_ignore = [] if os.environ.get("RDMACONNECT_LAB") else ["rdma"]
