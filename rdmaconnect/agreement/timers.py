"""How long RC waits for a peer that does not answer, and the timers for so many seconds. Pure.

The model: each of ``retry_cnt`` + 1 transmissions waits for its acknowledgement between 4.096 us x 2**``timeout`` and
four times that, as InfiniBand allows (SoftRoCE waits the shorter time), and at least for as long as the adapter's own
shortest wait: half a second was seen (RAMCloud, on ConnectX-2), whatever ``timeout`` says.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..errors import shown

__all__ = ["DETECT_S", "Timers", "timers_for"]

#: seconds of ``timeout`` 0, doubled by each code
TICK_S = 4.096e-6
#: how much longer an adapter may wait than it is told; and the longest of the shortest waits, seconds
SLACK, FLOOR_S = 4, 0.5
#: what is asked for where nothing is
DETECT_S = 2.0
#: 7 is for ever on some devices; with fewer than one a single lost packet would end a connection
RETRIES_MOST, RETRIES_LEAST = 6, 1
#: the greatest ``timeout``
CODE_MOST = 31
DETECT_LEAST_S, DETECT_MOST_S = FLOOR_S * (RETRIES_LEAST + 1), 100_000.0


class Timers(NamedTuple):
    """``timeout`` and ``retry_cnt`` of ``ibv_qp_attr``."""

    timeout: int
    retry_cnt: int

    @property
    def least_s(self) -> float:
        """Seconds until a peer that does not answer is given up, at least: what SoftRoCE takes."""
        return (self.retry_cnt + 1) * TICK_S * 2**self.timeout if self.timeout else math.inf

    @property
    def most_s(self) -> float:
        """The same at most."""
        return (self.retry_cnt + 1) * max(SLACK * TICK_S * 2**self.timeout, FLOOR_S) if self.timeout else math.inf


def timers_for(detect_s: float) -> Timers:
    """The timers that give a silent peer up within so many seconds, and no sooner than they need.

    Args:
        detect_s: seconds, 1 to 100000.

    Returns:
        As many retries as there is time for, 6 at most, and the longest wait for each.

    Raises:
        TypeError: it is no number.
        ValueError: it cannot be met.
    """
    if isinstance(detect_s, bool) or not isinstance(detect_s, int | float):
        raise TypeError(f"detect_s is {shown(detect_s)}: give seconds")
    if not DETECT_LEAST_S <= detect_s <= DETECT_MOST_S:
        raise ValueError(
            f"detect_s is {detect_s:g}: give {DETECT_LEAST_S:g} to {DETECT_MOST_S:g} seconds. Less cannot be met: some "
            f"adapters wait {FLOOR_S:g} s for each of at least {RETRIES_LEAST + 1} transmissions; for those that do "
            "not, give timeout and retry_cnt"
        )
    return _longest(float(detect_s))


@lru_cache(16)
def _longest(detect_s: float) -> Timers:
    retry_cnt = min(RETRIES_MOST, int(detect_s / FLOOR_S) - 1)
    each_s = detect_s / (retry_cnt + 1)
    return Timers(min(CODE_MOST, int(math.log2(each_s / SLACK / TICK_S))), retry_cnt)
