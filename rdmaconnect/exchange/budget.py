"""What one peer may ask of this process: who asks for much has to rest. Pure.

A peer has something to spend, and earns more as time passes: more than any honest one needs. One that has spent
all of it is not read for a while, the longer the more such peers there are: so all of them together cost little,
and those who ask for little do not wait for them.
"""

from __future__ import annotations

__all__ = ["BYTES", "Budget"]

#: what a peer may have, and what it earns each second; a message costs 1, and 1 more for so many bytes, B
CREDIT, EARNED, BYTES = 32.0, 4.0, 32 * 1024
#: for so long a peer rests that has overspent by 1, and at most, s
EACH_S, REST_MAX_S = 0.1, 5.0


class Budget:
    """What one peer has left.

    Args:
        now: the clock, s.
    """

    def __init__(self, now: float) -> None:
        self._credit, self._at = CREDIT, now

    def charge(self, cost: float, others: int, now: float) -> float:
        """Take what it has cost.

        Args:
            cost: see above.
            others: how many peers rest now.
            now: the clock, s.

        Returns:
            For how many seconds it has to rest; 0 if it need not.
        """
        self._credit = min(CREDIT, self._credit + (now - self._at) * EARNED) - cost
        self._at = now
        if self._credit >= 0:
            return 0.0
        owed, self._credit = -self._credit, 0.0
        return min(owed * EACH_S * (others + 1), REST_MAX_S)
