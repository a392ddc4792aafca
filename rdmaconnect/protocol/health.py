"""Whether a peer is there, judged by what its two paths show. Pure.

A connection has two paths: the side channel, which is the TCP connection of the exchange, and the data path, which is
the queue pair. What they show is put down as :class:`Evidence`; :func:`judge` says what that means, and :func:`wishes`
what is to be asked next. One path that is broken ends nothing. A peer is dead if

- it said good-bye;
- its process is gone: its address refused twice, a second apart (half a second where the data path can say otherwise,
  or its kernel closed the side channel in order, as it does when a process ends), or who listens there does not know
  the connection; and the data path did not answer within 0.7 s, where its type does;
- it ended the side channel without a good-bye and is not back within 0.7 s, and the data path failed, did not answer,
  or is of a type that does not and has brought nothing since;
- neither path has brought anything for 15 s.

A type answers where the peer's device acknowledges what comes, without its process: RC. Of UC and UD what arrives is
all that tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Evidence", "Health", "HealthState", "Wishes", "is_quiet", "judge", "wishes"]

#: a peer of whom neither path has brought anything for so long is dead, and one whose side channel alone is silent for
#: so long suspect: then the side channel is made anew, s
SILENT_S, DOUBT_S = 15.0, 10.0
#: between two refusals that mean that nobody is there, s: an address may refuse while its listener begins anew; and
#: where something else speaks against the peer besides
APART_S, APART_SILENT_S = 1.0, 0.5
#: so long a peer has to dial again after its side channel ended, s: where only the data path could tell and does not;
#: and where that has failed besides
REDIAL_S, REDIAL_FAILED_S = 0.7, 0.3
#: so long after the side channel's end the data path is asked, again each second, and has so long to answer, s
ASK_AFTER_S, ASK_EACH_S, ANSWER_S = 0.05, 1.0, 0.7


class HealthState(Enum):
    """What is known of a connection's peer."""

    #: nothing speaks against it
    ALIVE = "alive"
    #: something does, and it is being asked
    SUSPECT = "suspect"
    #: the port or the address that the connection goes by is not there any more, or has changed
    MOVED = "moved"
    #: it does not come back by itself
    DEAD = "dead"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of a connection's peer, and why.

    Args:
        state: alive, suspect, moved or dead.
        why: in words; "" while it is alive.
        since: when it became so, seconds on the clock of ``time.monotonic()``.
    """

    state: HealthState
    why: str = ""
    since: float = 0.0

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else str(self.state)


@dataclass(slots=True)
class Evidence:
    """What both paths have shown. Times are seconds of one clock, None for what has not been.

    Args:
        dials: whether this side is the one to dial the side channel again.
        answers: whether the data path's type answers.
        silent_max_s: seconds of silence that mean something.
        heard: the last word over the side channel.
        broken: since when there is no side channel.
        ended: since when the peer's end of it is closed; not where this side hung up.
        in_order: whether it was closed by the peer or its kernel, and not reset on the way.
        how: in words, how the side channel ended.
        deaf: whether the peer cannot be dialled: that its address refuses, or is another's, says nothing of it.
        refusals: how often its address has refused since.
        first_refusal, last_refusal: when.
        unknown: in words, that who listens there does not know the connection.
        came: the last time that the data path answered or brought something.
        asked: since when it has been asked in vain.
        failed: in words, how it failed.
        answered: whether the peer has said a word since it failed.
        here: what the port or the address here has become for it: alive, suspect or moved.
        here_why: why, in words.
    """

    dials: bool = False
    answers: bool = True
    silent_max_s: float = SILENT_S
    heard: float = 0.0
    broken: float | None = None
    ended: float | None = None
    in_order: bool = False
    how: str = ""
    deaf: bool = False
    refusals: int = 0
    first_refusal: float = 0.0
    last_refusal: float = 0.0
    unknown: str = ""
    came: float | None = None
    asked: float | None = None
    failed: str = ""
    answered: bool = False
    here: HealthState = HealthState.ALIVE
    here_why: str = ""

    def mend(self, now: float) -> None:
        """There is a side channel again, over which the peer has said a word."""
        self.heard, self.broken, self.ended, self.in_order, self.how = now, None, None, False, ""
        self.refusals, self.unknown = 0, ""
        self.asked, self.answered = None, bool(self.failed)

    def refuse(self, now: float) -> None:
        """The peer's address has refused."""
        self.first_refusal = self.first_refusal if self.refusals else now
        self.last_refusal, self.refusals = now, self.refusals + 1


class Wishes(NamedTuple):
    """What is to be asked next.

    Args:
        dial: dial the side channel.
        hang_up: close the side channel, so that the peer dials it again.
        ask: have the data path answer.
        look: look again before long.
    """

    dial: bool
    hang_up: bool
    ask: bool
    look: bool


def is_quiet(e: Evidence, now: float) -> bool:
    """Whether the side channel is gone or silent: for thousands of connections each second, of which most are not."""
    return e.broken is not None or now - e.heard > DOUBT_S


def wishes(e: Evidence, now: float) -> Wishes:
    """What is to be asked next, of what is known ``now``."""
    silent = now - e.heard
    late = e.broken is None and silent > DOUBT_S
    doubtful = (
        e.refusals > 0
        or bool(e.unknown)
        or silent > e.silent_max_s
        or (e.ended is not None and not e.dials and now - e.ended > ASK_AFTER_S)
        or (e.deaf and e.broken is not None)
    )
    fresh = e.came is not None and now - e.came <= ASK_EACH_S
    return Wishes(
        dial=e.dials and (late or e.broken is not None),
        hang_up=late and not e.dials and not e.deaf,
        ask=e.answers and doubtful and not fresh and not e.failed and e.asked is None,
        look=late or e.broken is not None or (bool(e.failed) and not e.answered),
    )


def judge(e: Evidence, now: float) -> tuple[HealthState, str]:
    """What it all means ``now``.

    Returns:
        The state, and why in words, "" while it is alive. Dead is for ever.
    """
    sign = _sign(e, now)
    if sign is not None and _is_dead(e, sign, now):
        why = f"the peer is gone: {sign.words}{_data_words(e)}"
        return HealthState.DEAD, f"{why}: {sign.cause}, or the network to it broke."
    if e.here is not HealthState.ALIVE:
        return e.here, e.here_why
    if e.failed:
        return HealthState.SUSPECT, f"the data path failed ({e.failed}){_peer_words(e)}"
    if sign is not None:
        answers = ", but the data path answers" if e.came is not None else ": the data path is being asked"
        return HealthState.SUSPECT, f"{sign.words}{answers}"
    if e.broken is not None:
        who = "it is being dialled again" if e.dials else "the peer is to dial it again"
        return HealthState.SUSPECT, f"the side channel is broken ({e.how}): {who}"
    if now - e.heard > DOUBT_S:
        return HealthState.SUSPECT, f"nothing was heard of the peer for {DOUBT_S:g} s: its side channel is made anew"
    return HealthState.ALIVE, ""


class _Sign(NamedTuple):
    """What the side channel has against the peer.

    Args:
        words: what it is.
        since: since when; what the data path brought before says nothing.
        recent_s: of a data path that does not answer: seconds after which it says nothing any more that something
            came.
        cause: what that may mean, besides a network that is broken.
    """

    words: str
    since: float
    recent_s: float = REDIAL_S
    cause: str = "its process ended"


def _sign(e: Evidence, now: float) -> _Sign | None:
    ended = "its side channel ended without a good-bye"
    if e.broken is not None and e.dials and not e.deaf:
        if e.unknown:
            return _Sign(e.unknown, e.broken)
        apart = e.last_refusal - e.first_refusal
        enough_s = APART_SILENT_S if e.answers or e.in_order else APART_S
        if e.refusals and (apart >= enough_s or e.failed):
            since = f"has refused for {enough_s:g} s" if apart >= enough_s else "refuses"
            return _Sign(f"{ended}, and its address {since}", e.broken)
    if e.ended is not None and (e.failed or e.deaf or not e.dials):
        patience_s = REDIAL_FAILED_S if e.failed else REDIAL_S
        if now - e.ended > patience_s and (e.answers or not e.deaf):
            return _Sign(f"{ended}, and it is not back within {patience_s:g} s", e.ended)
    if now - e.heard > e.silent_max_s:
        words = f"nothing was heard of it for {e.silent_max_s:g} s"
        return _Sign(words, e.heard, e.silent_max_s, "its process ended or was stopped")
    return None


def _is_dead(e: Evidence, sign: _Sign, now: float) -> bool:
    """Whether the data path has nothing to say for a peer that the side channel speaks against."""
    if e.failed:
        return True
    if e.answers:
        return e.asked is not None and now - e.asked > ANSWER_S
    return e.came is None or e.came <= sign.since or now - e.came > sign.recent_s


def _data_words(e: Evidence) -> str:
    if e.failed:
        return f", and the data path failed ({e.failed})"
    if e.answers:
        return ", and the data path does not answer"
    return ", and nothing came over the data path"


def _peer_words(e: Evidence) -> str:
    return ", but the peer answers over its side channel: reconnect()" if e.answered else ": the peer is being asked"
