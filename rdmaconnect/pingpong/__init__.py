"""A ping-pong over connections: there and back, contents checked, times measured.

The connecting side decides what is done, and says so first; the serving side takes part in it (:func:`ping`,
:func:`echo`). Both need no more than connections.
"""

from .contents import PayloadError, check_memory, payload
from .plan import LARGEST, OPS, Plan, PlanRefused, sweep
from .result import COLUMNS, Rate, Report, Row, Samples, describe_end, percentiles
from .rounds import Echoed, echo, most_size, ping

__all__ = [
    "COLUMNS",
    "LARGEST",
    "OPS",
    "Echoed",
    "PayloadError",
    "Plan",
    "PlanRefused",
    "Rate",
    "Report",
    "Row",
    "Samples",
    "check_memory",
    "describe_end",
    "echo",
    "most_size",
    "payload",
    "percentiles",
    "ping",
    "sweep",
]
