"""A ping-pong with rdma-core's own ``ibv_rc_pingpong``, ``ibv_uc_pingpong`` or ``ibv_ud_pingpong`` as the other side.

What they say and do is in ``docs/other-programs.md``. Only queue pair, PSN and address are exchanged: size, path MTU,
number of round trips and SL are the user's to give alike on both sides, and nobody proves the data path before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..abi import LinkLayer, QpType, WcStatus, WrOpcode
from ..agreement.candidates import gid_words, rank_pairs
from ..agreement.endpoint import MTU_BYTES, Endpoint, Gid, GidEntry, PortAddress
from ..agreement.options import Options
from ..agreement.path import Agreement, Path, make_path
from ..errors import CompletionError, ConnectTimeout, PeerMismatch, RemoteProtocolError, shown
from ..exchange.stream import Stream, StreamListener, dial
from ..objects.address import AddressHandle, UdAddress
from ..objects.context import open_device
from ..runtime.deadline import Deadline, wait_readable
from ..session.ports import choose_ports
from ..session.prepared import Prepared, bring_up, close_handles
from ..session.transfer import Part, Sent
from .contents import Buffer, PayloadError, check
from .dest import DONE, QKEY, Dest
from .result import Report, Row, Samples, describe_end
from .rounds import Echoed

__all__ = ["Game", "Served", "echo_tool", "ping_tool"]

T = TypeVar("T")
_READ, _WRITE, _DONE = "read the peer's address", "send the own address", "hear that the peer has the own address"
#: what both sides have to be given alike
_ALIKE = "Do both sides have the same -s, -n and, over RC and UC, -m?"
#: round trips between two calls of ``tick``
_TICK = 64


@dataclass(frozen=True)
class Game:
    """What is played; the other side has to be told the same on its own command line.

    Args:
        qp_type: RC, UC or UD.
        size: bytes of each message, 1 or more; over UD an MTU at most.
        iters: round trips.
        options: of the queue pair; ``path_mtu``, ``sl``, device, port and GID index count.
        deadline_s: seconds to connect, and for each message.
    """

    qp_type: QpType
    size: int
    iters: int
    options: Options
    deadline_s: float | None = 30

    @property
    def tool(self) -> str:
        """The other side's program."""
        return f"ibv_{str(self.qp_type).lower()}_pingpong"


@dataclass(frozen=True)
class Served:
    """What :func:`echo_tool` did.

    Args:
        echoed: what was served.
        local, remote: the two ends.
    """

    echoed: Echoed
    local: dict[str, object]
    remote: dict[str, object]


def ping_tool(url: str, game: Game, *, tick: Callable[[float], None] | None = None) -> Report:
    """Be the client of one of the programs: send first, check and time what comes back.

    Each message has other contents, and the program sends what it received: every byte is checked.

    Args:
        url: where it listens, ``tcp://host:port``.
        game: what is played.
        tick: called now and then with the share that is done, 0 to 1.

    Returns:
        What was measured.

    Raises:
        RemoteProtocolError: what it sent is no address.
        PeerMismatch: the two addresses do not go together; says which option to give.
        PayloadError: a message came back changed.
        CompletionError, DeadlineExceeded: a message did not get through.
        DeviceError, VerbsError: as ``connect``.
    """
    deadline = Deadline(game.deadline_s, ConnectTimeout)
    with dial(url, deadline) as stream, _prepared(game, stream) as prepared:
        mine = _own_gid(prepared.address, Gid.parse(stream.remote), stream, game.options)
        stream.write(_dest(prepared, mine).to_bytes(), deadline, _WRITE)
        theirs = Dest.from_bytes(stream.read(Dest.SIZE, deadline, _READ))
        with _Side(game, prepared, mine, theirs) as side:
            stream.write(DONE, deadline, _WRITE)
            connect_us = round(deadline.waited_s * 1e6, 1)
            samples = side.call(tick)
        return Report(
            qp_type=str(game.qp_type), op="send", connections=1, rows=(Row.of(game.size, samples, 2),),
            connect_us=connect_us, local=side.local, remote=side.remote,
            path_mtu=MTU_BYTES[side.path.path_mtu], why=list(side.path.why),
        )  # fmt: skip


def echo_tool(url: str, game: Game, *, listening: Callable[[int], None] = lambda port: None) -> Served:
    """Be the server of one of the programs: send back what comes. Waits for it without limit.

    Args:
        url: where to listen, ``tcp://host:port``, ``*`` for all addresses.
        game: what is played.
        listening: called with the TCP port, once there is one.

    Raises:
        PayloadError: the program sent other bytes than it received last.
        OSError: the address is taken; else as :func:`ping_tool`.
    """
    with StreamListener(url) as listener:
        listening(listener.port)
        stream = listener.accept(Deadline(None))
    deadline = Deadline(game.deadline_s, ConnectTimeout)
    with stream, _prepared(game, stream) as prepared:
        theirs = Dest.from_bytes(stream.read(Dest.SIZE, deadline, _READ))
        mine = _own_gid(prepared.address, theirs.gid, stream, game.options)
        with _Side(game, prepared, mine, theirs) as side:  # in RTS, receives posted: the program sends at once
            stream.write(_dest(prepared, mine).to_bytes(), deadline, _WRITE)
            said = stream.read(len(DONE), deadline, _DONE)
            if said != DONE:
                raise RemoteProtocolError(f"{_DONE}: the peer said {shown(said)}, not {shown(DONE)}.")
            side.answer()
        return Served(Echoed("send", (game.size,), game.iters, 1), side.local, side.remote)


@contextmanager
def _prepared(game: Game, stream: Stream) -> Iterator[Prepared]:
    """The queue pair in INIT, receives posted, on the port toward the peer."""
    port = choose_ports(game.options, stream.remote, stream.local).ports[0]
    most = MTU_BYTES[port.active_mtu]
    if game.qp_type is QpType.UD and game.size > most:
        words = f"a datagram of {port} has {most} bytes at most"
        raise ValueError(f"size is {game.size}: {words}. Give -s {most} here and to {game.tool}")
    if game.qp_type is not QpType.UD and game.options.mtu > port.active_mtu:
        wish = MTU_BYTES[game.options.mtu]
        raise ValueError(f"path_mtu is {wish}: {port} has {most}. Give -m {most} here and to {game.tool}")
    qkey = QKEY if game.qp_type is QpType.UD else None
    prepared = Prepared(open_device(port.device), port, game.qp_type, game.options, qkey=qkey)
    prepared.lend()
    try:
        yield prepared
    finally:
        prepared.close()


def _own_gid(address: PortAddress, toward: Gid, stream: Stream, options: Options) -> GidEntry | None:
    """The GID to be reached by: the one that goes best with the peer's; None to be reached by LID.

    Of the peer's GID only the value is known, not its type: RoCE v2 is tried first, as everywhere.
    """
    by_lid = address.link_layer != LinkLayer.ETHERNET and not address.grh_required and options.gid_index is None
    if by_lid or not address.gids:
        return None
    there = (
        tuple(GidEntry(toward, kind, 0) for kind in sorted({e.gid_type for e in address.gids})) if _set(toward) else ()
    )
    pairs = rank_pairs(address, replace(address, gids=there), (stream.local, stream.remote))
    return pairs[0][0] if pairs else address.gids[0]


def _set(gid: Gid) -> bool:
    """Whether these programs take it for one: they look at its last eight bytes alone."""
    return any(gid.raw[8:])


def _dest(prepared: Prepared, gid: GidEntry | None) -> Dest:
    (end,) = prepared.ends
    return Dest(prepared.address.lid, end.qp_num, end.psn, Gid(bytes(16)) if gid is None else gid.gid)


def _path(game: Game, prepared: Prepared, mine: GidEntry | None, theirs: Dest) -> tuple[Path, Endpoint]:
    """The path to the peer, and its end; what it does not tell is as on this side, as in these programs."""
    here, (end,) = prepared.address, prepared.ends
    ethernet, theirs_set = here.link_layer == LinkLayer.ETHERNET, _set(theirs.gid)
    if ethernet and not theirs_set:
        raise PeerMismatch([f"GID: {game.tool} has none, and {here} is Ethernet: give it one with -g, its index"])
    if not (theirs_set or (here.lid and theirs.lid)):
        raise PeerMismatch([f"LID: {here.lid:#x} here, {theirs.lid:#x} at {game.tool}; 0 means no subnet manager"])
    mine = (mine or next(iter(here.gids), None)) if theirs_set else None
    gid = None if mine is None else GidEntry(theirs.gid, mine.gid_type, 0)
    port = replace(
        here, device=game.tool, port_num=1, lid=theirs.lid, gids=() if gid is None else (gid,),
        max_rd_atomic=1, max_dest_rd_atomic=1,
    )  # fmt: skip
    if theirs_set and not rank_pairs(here.only(mine), port):
        raise PeerMismatch(
            [f"GID: {game.tool} has {theirs.gid}, and {mine or here} here does not go with it. Give one of them "
             f"another with -g; {here} has {gid_words(here.gids)}"]
        )  # fmt: skip
    qkey = QKEY if game.qp_type is QpType.UD else 0
    peer = Endpoint(game.qp_type, theirs.qpn, theirs.psn, port, game.size, qkey)
    # these programs take the P_Key with index 0
    agreement = Agreement(mine, gid, game.options.mtu, game.options.sl or 0, 0, 0, here.pkeys[0] & 0x7FFF)
    path = make_path(end, peer, agreement, game.options, connector=True)
    by = f"LID {here.lid:#x} to {theirs.lid:#x}" if mine is None else f"GID: {here} {mine} to {theirs.gid}"
    return replace(path, why=(f"by {by} of {game.tool}",)), peer


class _Side:
    """One side of the game, its queue pair in RTS; a context manager."""

    def __init__(self, game: Game, prepared: Prepared, mine: GidEntry | None, theirs: Dest) -> None:
        self._game, self._prepared = game, prepared
        (self._transceiver,) = prepared.transceivers
        self.path, peer = _path(game, prepared, mine, theirs)
        self.local = describe_end(prepared.ends[0], self.path.local_gid)
        self.remote = describe_end(peer, self.path.remote_gid) | {"port_num": None, "gid_index": None}
        self._handles: list[AddressHandle | None] = bring_up(prepared, [self.path], rts=True, go_on=lambda: None)
        (handle,) = self._handles
        self._to = None if handle is None else UdAddress(handle, theirs.qpn, QKEY)
        self._source = None if handle is None else (theirs.qpn, theirs.gid.raw if self.path.ah_attr.is_global else b"")
        if handle is not None:
            self._transceiver.open(self._source)
        try:
            self._out = Buffer(prepared.engine.pd, game.size)
        except BaseException:
            close_handles(self._handles)
            raise

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()
        close_handles(self._handles)

    def call(self, tick: Callable[[float], None] | None) -> Samples:
        """Send first, have it back; microseconds of each round trip."""
        game, out, clock, samples = self._game, self._out, time.perf_counter, Samples()
        for i in range(game.iters):
            out.fill(i)
            before = clock()
            sent = self._send(i)
            slot, length = self._take(i)
            samples.extend([(clock() - before) * 1e6])
            check(self._transceiver.payload(slot, length), game.size, i, length)
            self._give_back(slot)
            self._wait(sent.over, i)
            if tick is not None and i % _TICK == 0:
                tick(i / game.iters)
        return samples

    def answer(self) -> None:
        """Send back what comes: theirs is the first message each time, which goes to and fro."""
        view, size = self._out.view, self._game.size
        for i in range(self._game.iters):
            slot, length = self._take(i)
            came = self._transceiver.payload(slot, length)
            if length != size:
                raise PayloadError(f"check round trip {i}: {length} bytes came, and {size} are due. {_ALIKE}")
            if i and view != came:
                check(came, size, i)  # not what went out last: then it is no program of theirs, but ping_tool
            view[:] = came
            self._give_back(slot)
            self._wait(self._send(i).over, i)

    def _send(self, i: int) -> Sent:
        sent, mr = Sent(WrOpcode.SEND, self._game.size), self._out.mr
        assert mr is not None
        part = Part(WrOpcode.SEND, (mr.addr, self._game.size, mr.lkey))
        self._wait(lambda: self._transceiver.post(sent, part, self._to) or None, i)
        return sent

    def _take(self, i: int) -> tuple[int, int]:
        """Slot and bytes of the next message."""
        inbox = self._transceiver.inboxes[self._source]
        return self._wait(lambda: inbox.pop(0) if inbox else None, i)

    def _give_back(self, slot: int) -> None:
        with self._prepared.engine.lock:
            self._transceiver.repost(slot)

    def _wait(self, attempt: Callable[[], T | None], i: int) -> T:
        """Poll, then sleep on events, until an attempt gives something."""
        engine, polls = self._prepared.engine, self._game.options.spin or 1
        deadline: Deadline | None = None
        while True:
            with engine.lock:
                found = attempt()
                if found is None and engine.take(polls):
                    found = attempt()
            if found is not None:
                return found
            deadline = deadline or Deadline(self._game.deadline_s)
            engine.arm()
            engine.progress()
            with engine.lock:
                found = attempt()
            if found is not None:
                return found
            self._check(i, deadline)
            wait_readable((engine.channel.fileno(),), deadline)

    def _check(self, i: int, deadline: Deadline) -> None:
        """Raise if nothing more will come."""
        doing = f"round trip {i} with {self._game.tool} at QP {self.path.dest_qp_num:#08x}"
        error: Any = self._transceiver.broken
        if error is not None:
            hint = f"It ended or failed: its own output tells. {self._alike()}" if error.status in _OF_PEER else None
            raise CompletionError(
                error.status, vendor_err=error.vendor_err, wr_id=error.wr_id, qp_num=error.qp_num, opcode=error.opcode,
                doing=doing, hint=hint,
            )  # fmt: skip
        lost = "" if self._game.qp_type is QpType.RC else " What is lost stays lost: start both anew."
        deadline.check(doing, f"{self._alike()}{lost}")

    def _alike(self) -> str:
        """What both sides have to be given alike, in words: they do not tell each other."""
        own = self.path.local_gid
        return _ALIKE if own is None else f"{_ALIKE} And is the GID of its -g a {own.type_words} one, as here?"


#: what the other side makes of a queue pair
_OF_PEER = frozenset((
    WcStatus.RETRY_EXC_ERR, WcStatus.RNR_RETRY_EXC_ERR, WcStatus.REM_INV_REQ_ERR, WcStatus.REM_OP_ERR,
    WcStatus.LOC_LEN_ERR,
))  # fmt: skip
