"""The stages that both ends of a connection went through, each with its time; each is a line of the log at DEBUG too.

The two hosts' clocks are not compared. Each end tells the other its own times; what was sent came later than
it went, and between those bounds the peer's line is laid in the middle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..protocol.handshake import Role
from ..runtime.deadline import Deadline

__all__ = ["MAX_MARKS", "Mark", "Trace", "shift"]

log = logging.getLogger("rdmaconnect")

#: stages that are kept: after many failed ways the last ones
MAX_MARKS = 64
#: the stages that are a message, at both ends: who sends it
_SENDERS = {"hello": Role.CONNECTOR, "reply": Role.LISTENER, "ready": Role.CONNECTOR}


@dataclass(frozen=True, slots=True)
class Mark:
    """One stage of a handshake.

    Args:
        stage: its name: ``port``, ``prepared``, ``hello``, ``reply``, ``path``, ``joined``, ``ready``, ``proof``,
            ``proven``, ``connected``, and ``again`` where another way was tried.
        at_s: seconds since this end's start: the call of ``connect``, or the arrival of the hello. Of the
            peer's stages too; below 0 where the peer was there before.
        end: ``"local"`` or ``"peer"``.
        words: what was done there; empty for the peer's, which tells no more than names and times.
        within_s: the time may be wrong by so many seconds either way: 0 for this end's own.
    """

    stage: str
    at_s: float
    end: str
    words: str = ""
    within_s: float = 0.0


#: stage, seconds since this end's start, words and what stands in them
_Passed = tuple[str, float, str, tuple[object, ...]]


class Trace:
    """The stages of one handshake, as one end sees them.

    Args:
        role: which end this is.
        clock: counts from this end's start.
        begun: what this end has passed before.
    """

    def __init__(self, role: Role, clock: Deadline, begun: Iterable[_Passed] = ()) -> None:
        self._role, self._clock = role, clock
        self._mine = deque[_Passed](begun, maxlen=MAX_MARKS)
        self._theirs: tuple[tuple[str, int], ...] = ()

    def branch(self) -> Trace:
        """Another one that begins like this, for one of several ways to go on."""
        return Trace(self._role, self._clock, self._mine)

    def mark(self, stage: str, words: str, *values: object) -> None:
        """This end is at a stage: note the time, and log it.

        Args:
            stage: its name, at most 16 characters.
            words: what is done there, with places for ``values`` as ``%`` takes them.
            values: what does not change: it is put into words when somebody asks.
        """
        self._mine.append((stage, self._clock.waited_s, words, values))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s", stage, _text(words, values), stacklevel=2)

    def stages(self) -> tuple[tuple[str, int], ...]:
        """What the peer is told: (stage, microseconds since this end's start), in order."""
        return tuple([(stage, round(at_s * 1e6)) for stage, at_s, _, _ in self._mine])

    def hear(self, stages: Iterable[tuple[str, int]]) -> None:
        """Take what the peer told: all of its stages so far, or nothing."""
        self._theirs = tuple(stages) or self._theirs

    def marks(self) -> tuple[Mark, ...]:
        """Both ends' stages in the order of their times."""
        mine = [Mark(stage, at_s, "local", _text(words, values)) for stage, at_s, words, values in tuple(self._mine)]
        theirs = [(stage, us / 1e6) for stage, us in self._theirs]
        by, within = shift({mark.stage: mark.at_s for mark in mine}, dict(theirs), self._role)
        placed = [Mark(stage, at_s + by, "peer", "", within) for stage, at_s in theirs]
        return tuple(sorted((*mine, *placed), key=lambda mark: mark.at_s))


def _text(words: str, values: tuple[object, ...]) -> str:
    return words % values if values else words


def shift(mine: Mapping[str, float], theirs: Mapping[str, float], role: Role) -> tuple[float, float]:
    """How far the peer's clock is off from this end's.

    A message that this end sent cannot have come before it went, nor can one of the peer's. That bounds the
    shift from both sides, and the middle is taken: half of a round trip, as NTP does (RFC 5905).

    Args:
        mine, theirs: stage -> seconds on that end's own clock, the last time it was passed.
        role: which end this is.

    Returns:
        (seconds to add to the peer's times, seconds that this may be wrong by).
    """
    seen = {stage: mine[stage] - theirs[stage] for stage in _SENDERS if stage in mine and stage in theirs}
    least = max((by for stage, by in seen.items() if _SENDERS[stage] is role), default=None)
    most = min((by for stage, by in seen.items() if _SENDERS[stage] is not role), default=None)
    if least is None or most is None:
        only = least if most is None else most
        return (0.0 if only is None else only), 0.0
    return (least + most) / 2, abs(most - least) / 2
