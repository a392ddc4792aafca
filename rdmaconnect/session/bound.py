"""One end of a connection, before the other end is known, and from there to a connection; ``bind`` has what users see.

Both ends do the same, each by itself: what they agree on comes of both ends' bytes, and of nothing else.
"""

from __future__ import annotations

import math
import secrets
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from time import time as now
from typing import TypeVar

from ..agreement.endpoint import PortAddress
from ..agreement.symmetric import agree_on_ways, seen_from_the_other
from ..errors import (
    LocalProtocolError,
    PeerMismatch,
    RdmaConnectError,
    RemoteProtocolError,
    StateError,
    say_more,
    shown,
    together,
)
from ..exchange.curve import shared_key
from ..protocol.blob import MAX_BLOB_PORTS, MAX_TAG, Blob, connection_id, open_blob, seal, shortened
from ..protocol.handshake import Role
from ..protocol.messages import Hello, Reply
from ..runtime.deadline import Deadline
from ..runtime.fork import process
from ..runtime.procedure import Call, Procedure
from ..runtime.workers import here
from .bare_end import make_end
from .connect import prepare, raise_ends
from .end import End
from .in_band import InBandConversation, InBandProber
from .own import OwnQueuePair
from .ports import Choice, choose_ports
from .prepared import Prepared
from .probe import prove
from .several_ways import Leader, best_of
from .terms import BindOptions, Terms, check_alone, check_count, make_terms
from .trace import Trace
from .watch import attend

__all__ = ["EXPIRES_S", "Asked", "BaseBoundEnd", "ask", "binding"]

#: seconds for which an end's bytes are good where nothing else is said
EXPIRES_S = 600.0
#: ids of ends that this process has connected with -> when their bytes expire; at most so many are remembered
_MOST_USED = 65536
_used: dict[bytes, float] = {}
_lock = Lock()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller of ``bind`` asked for, checked.

    Args:
        terms: of the queue pairs and their ports.
        key: authenticates the bytes, or None.
        count: queue pairs to connect.
        tag: what the application calls the connection.
        lasts_s: seconds for which the bytes are good, None for ever.
    """

    terms: Terms
    key: bytes | None = field(repr=False)
    count: int
    tag: str
    lasts_s: int | None


def ask(count: int, tag: str, expires_s: float | None, options: BindOptions) -> Asked:
    """Check what a caller asked for.

    Raises:
        ValueError, TypeError: naming what cannot be meant.
    """
    if not isinstance(tag, str):
        raise TypeError(f"tag is {shown(tag)}: give text of at most {MAX_TAG} characters")
    if len(tag) > MAX_TAG or not tag.isprintable():
        raise ValueError(f"tag is {shown(tag)}: give printable text of at most {MAX_TAG} characters")
    if expires_s is not None:
        if isinstance(expires_s, bool) or not isinstance(expires_s, int | float):
            raise TypeError(f"expires_s is {shown(expires_s)}: give seconds, or None for ever")
        if not 1 <= expires_s <= 2**31:
            raise ValueError(f"expires_s is {expires_s}: give 1 to {2**31} seconds, or None for ever")
    lasts = None if expires_s is None else math.ceil(expires_s)
    terms = make_terms(options, BindOptions)
    if check_count(count) > 1:
        check_alone(terms, f"a count of {count}")
    return Asked(terms, shared_key(options.get("secret")), count, tag, lasts)


class BaseBoundEnd:
    """What both fronts of an end share.

    Args:
        asked: what was asked for.
        prepared: the queue pairs on each port.
        trace: the stages on the way to here.
    """

    def __init__(self, asked: Asked, prepared: Sequence[Prepared], trace: Trace) -> None:
        self._asked, self._terms, self._key, self._trace = asked, asked.terms, asked.key, trace
        self._prepared, self._process, self._state = list(prepared), process.mark, ""
        #: of these what could not be freed yet
        self._rest: list[Prepared] = []
        ident, made, wish = secrets.token_bytes(16), int(now()), prepared[0].wish(self._terms.options)
        until = 0 if asked.lasts_s is None else made + asked.lasts_s
        hellos = tuple(Hello(ident, one.ends, wish, one.offered(), self._terms.private_data) for one in prepared)
        self._blob = shortened(Blob(ident, made, until, asked.tag, hellos, self._terms.own is not None), self._key)
        self._bytes = seal(self._blob, self._key)

    @property
    def ports(self) -> tuple[PortAddress, ...]:
        """The ports that the other end is told of, the best first."""
        return tuple(end.port for end in self._blob.ends)

    def to_bytes(self) -> bytes:
        """This end for the other one: the same bytes each time, whatever becomes of the end.

        At most 1024 bytes for up to 8 ports; the names and keys of ``regions``, ``private_data`` and further queue
        pairs come on top. Of a port's GIDs the least useful are left out where they would not fit; 16 at most are told.
        With a secret nobody else can make or change them (HMAC-SHA256); they are not encrypted: whoever reads them
        learns addresses, queue pair numbers and the keys of ``regions``. Without one a checksum tells damage, and
        nobody's malice.
        """
        return self._bytes

    def _check_open(self, doing: str) -> None:
        if self._process is not process.mark:
            raise StateError(f"{doing}: the end belongs to the process that forked this one: bind here.")
        if self._state:
            raise StateError(f"{doing}: the end {self._state}. Each end connects once: bind anew.")

    def _read(self, theirs: bytes) -> Blob:
        """The other end, if it is one to connect with.

        Raises:
            TypeError, RdmaConnectError: as :meth:`BoundEnd.connect`.
        """
        try:
            data = bytes(memoryview(theirs))
        except TypeError:
            raise TypeError(f"theirs is {shown(theirs)}: give the bytes of the other end's to_bytes()") from None
        blob = open_blob(data, self._key)
        if blob.id == self._blob.id:
            raise LocalProtocolError("connect: these are the bytes of this very end. Give those of the other one.")
        blob.check_time(now())
        with _lock:
            _check_unused(blob)
        return blob

    def _take(self, other: Blob) -> None:
        """From here on both are used."""
        with _lock:
            self._check_open("connect")
            _check_unused(other)
            self._state = "was connected before"
            while len(_used) >= _MOST_USED:
                del _used[next(iter(_used))]
            for ident in [ident for ident, until in _used.items() if until < now()]:
                del _used[ident]
            _used[other.id] = other.until or math.inf

    def _agree(self, other: Blob) -> list[tuple[Prepared, InBandConversation]]:
        """What both work out alike: the pairs of ports to try, the best first, and which end leads.

        Raises:
            PeerMismatch: with all differences.
        """
        role = Role.CONNECTOR if self._blob.id < other.id else Role.LISTENER
        one, two = (self._blob, other) if role is Role.CONNECTOR else (other, self._blob)
        differences = []
        if one.tag != two.tag:
            differences.append(f"tag: connector {one.tag!r}, listener {two.tag!r}: the bytes are meant for another end")
        counts = [len(blob.hellos[0].ends) for blob in (one, two)]
        if counts[0] != counts[1]:
            differences.append(f"count: connector {counts[0]} queue pairs, listener {counts[1]}")
        wish, own = (blob.hellos[0].wish for blob in (one, two))
        try:
            ways = agree_on_ways(one.ends, two.ends, wish, own, differences)
        except PeerMismatch as e:
            say_more(e, f"This end is the {role.value} here, by the ids of the two.")
            raise
        if not ways[0][2].probe:  # nothing tells one that carries
            del ways[1:]
        if role is Role.LISTENER:
            ways = [(mine, theirs, seen_from_the_other(agreement)) for theirs, mine, agreement in ways]
        ident, talks = connection_id(self._blob.id, other.id, self._key), not (self._blob.own or other.own)
        data, found = other.hellos[0].private_data, []
        for mine, theirs, agreement in ways:
            hello, said = replace(self._blob.hellos[mine], id=ident), other.hellos[theirs]
            reply = Reply(ident, said.ends, agreement, said.regions, data)
            leads = role is Role.CONNECTOR
            found.append((self._prepared[mine], InBandConversation(hello, reply, self._trace.branch(), leads, talks)))
        return found

    def connecting(self, theirs: bytes, deadline: Deadline) -> Procedure[list[End]]:
        """Connect, and have the data path proven, unless one end does without."""
        self._check_open("connect")
        other = self._read(theirs)
        ways = self._agree(other)
        self._take(other)
        leader = Leader(len(ways)) if ways[0][1].knocks and len(ways) > 1 else None
        try:
            made = yield from best_of(
                [self._joining(*way, deadline, leader, place) for place, way in enumerate(ways)], leader
            )
            conversation = made[0].conversation
            assert isinstance(conversation, InBandConversation)
            conversation.begin(made)
            attend(made)
        finally:
            with suppress(RdmaConnectError):  # what is refused stays for close()
                yield Call(self._free)
        for end in made:
            end.connect_s = deadline.waited_s
        conversation.trace.mark("connected", "%d in %.1f ms", len(made), deadline.waited_s * 1000)
        return made

    def _joining(
        self,
        prepared: Prepared,
        conversation: InBandConversation,
        deadline: Deadline,
        leader: Leader | None,
        place: int,
    ) -> Procedure[list[End]]:
        """By one pair of ports."""
        all_established = yield from raise_ends(conversation, prepared, self._terms, deadline)
        made = [
            make_end(prepared, transceiver, established)
            for transceiver, established in zip(prepared.transceivers, all_established, strict=True)
        ]
        may_tell = None if leader is None else partial(leader.goes_by, place)
        yield from prove(made, deadline, kind=partial(InBandProber, may_tell=may_tell))
        return made

    def _free(self) -> None:
        """Give back the queue pairs; what a connection stands on stays, and what is refused for the next time."""
        self._rest, self._prepared, refused = [*self._rest, *self._prepared], [], []
        for one in list(self._rest):
            try:
                one.close()
                self._rest.remove(one)
            except RdmaConnectError as e:
                refused.append(e)
        if refused:
            raise together(f"close {self!r}", refused)

    def free(self) -> None:
        """Free the queue pairs, unless they were connected. Twice is fine. Blocks."""
        if self._process is not process.mark:
            return
        with _lock:
            if self._state and not self._rest:
                return
            self._state = self._state or "is closed"
        self._free()

    def __del__(self) -> None:
        if not getattr(self, "_state", "never made") and self._process is process.mark and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            here().submit(self.free)

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.ports))
        return f"<{type(self).__name__} {self._terms.qp_type} on {where}{' ' + self._state if self._state else ''}>"


def _check_unused(blob: Blob) -> None:
    if blob.id in _used:
        raise RemoteProtocolError(
            "connect: these bytes were connected with before: they are used once. Have the other end bind anew."
        )


B = TypeVar("B", bound=BaseBoundEnd)


def binding(kind: Callable[[Asked, Sequence[Prepared], Trace], B], asked: Asked, deadline: Deadline) -> Procedure[B]:
    """Make queue pairs on each port that could be used, and an end of them."""
    trace, prepared, terms = Trace(Role.CONNECTOR, deadline), list[Prepared](), asked.terms
    try:
        choice: Choice = yield Call(partial(choose_ports, terms.options), deadline, "bind: find the ports of this host")
        told = {(address.device, address.port_num) for address in choice.addresses}
        # where none of them has an address the first one says what it lacks
        ports = [port for port in choice.ports if (port.device, port.port_num) in told] or choice.ports[:1]
        # one queue pair is on one port
        for port in ports[: 1 if isinstance(terms.own, OwnQueuePair) else MAX_BLOB_PORTS]:
            one = yield prepare(partial(Prepared.on, port, terms.qp_type, terms, asked.count), deadline)
            one.lend()
            prepared.append(one)
        trace.mark("prepared", "%d ports, %s, INIT, receives posted", len(prepared), prepared[0].ends[0])
        return kind(asked, prepared, trace)
    except BaseException:
        for one in prepared:
            one.close()
        raise
