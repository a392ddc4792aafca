"""The proof of the data path: messages both ways, checked, before anybody is handed a connection."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from .abi import AccessFlags, QpType, WcStatus, WrOpcode
from .deadline import Deadline
from .driver import Story, Wait
from .endpoint import MTU_BYTES
from .engine import Sent
from .errors import CompletionError, ConnectTimeout, PeerClosed, PeerRejected, RemoteProtocolError
from .memory import MR
from .messages import Proof
from .middle import Middle

__all__ = ["Prober", "contents"]

#: bytes of the first probe: it tells a dead path from one that only drops what is large
SMALL = 16
#: seconds without a probe of the peer after which the path is held to be dead
PATIENCE_S = 10.0
#: and for each queue pair besides
PATIENCE_EACH_S = 0.1
#: seconds after which probes are sent again over types that lose messages
AGAIN_S = 0.25


def contents(id: bytes, index: int, size: int) -> bytes:
    """What a probe carries: the connection's id and the queue pair's index, repeated, cut to ``size`` bytes."""
    unit = id + index.to_bytes(4, "big")
    return (unit * (size // len(unit) + 1))[:size]


class Prober:
    """Both halves of the proof, for connections that were made together. Never blocks.

    Args:
        connections: in the order of the hello; their conversation is joined.
        deadline: of the call that waits.
    """

    def __init__(self, connections: Sequence[Middle], deadline: Deadline) -> None:
        first = connections[0]
        self._connections, self._wire = connections, first._wire
        self._engine = first._engine
        self._sizes = tuple(sorted({min(SMALL, first.max_send_size), self._large(first, first.max_send_size)}))
        self._due = {
            index: {min(SMALL, c.local.recv_size), self._large(c, c.local.recv_size)}
            for index, c in enumerate(connections)
        }
        self._seen: set[int] = set()
        self._told = False
        self._call = deadline
        self._be_patient()
        self._sent: list[Sent] = []
        self._last: dict[int, Sent] = {}
        self._sent_at = time.monotonic()
        room = sum(self._sizes)
        memory = mmap.mmap(-1, room * len(connections))
        for index in range(len(connections)):
            memory[index * room : (index + 1) * room] = b"".join(contents(self._wire.id, index, n) for n in self._sizes)
        self._mr: MR = first._register(memory, AccessFlags(0))
        self._waiting = self._work()

    def _be_patient(self) -> None:
        """Wait anew: something came, so the path is not dead."""
        patience = PATIENCE_S + PATIENCE_EACH_S * len(self._connections)
        self._deadline = Deadline(min(self._call.left_s, patience), ConnectTimeout)

    @staticmethod
    def _large(connection: Middle, most: int) -> int:
        mtu = MTU_BYTES[connection.path.path_mtu]
        return min(most, mtu if connection.local.qp_type is QpType.UD else 2 * mtu + 1)

    def _work(self) -> list[tuple[int, int, int]]:
        """(connection, address, size) of each probe that is to be sent."""
        room, work = sum(self._sizes), []
        for index in range(len(self._connections)):
            addr = self._mr.addr + index * room
            for size in self._sizes:
                work.append((index, addr, size))
                addr += size
        return work

    def advance(self) -> bool:
        """Do what can be done now.

        Returns:
            Whether the data path is proven, both ways.

        Raises:
            CompletionError: a probe failed; with what that says of the path.
            RemoteProtocolError: a probe arrived changed.
            PeerClosed, PeerRejected: the peer gave up.
            ConnectTimeout: probes did not arrive; says which did.
        """
        self._post()
        self._engine.progress()
        for index, connection in enumerate(self._connections):
            if connection._lane.broken is not None:
                raise self._failed(connection)
            if self._due[index]:
                self._receive(index, connection)
        if not self._told and not any(self._due.values()):
            self._told = True
            self._wire.trace.mark("proof", "sent: the peer's probes are here")
            self._wire.say(Proof(self._wire.id, self._wire.trace.told()))
        self._wire.look()
        if self._told and self._wire.handshake.proved and not self._waiting:
            # over RC each probe's own completion has come too: the memory may go
            return all(sent.status is not None for sent in self._sent)
        if isinstance(self._wire.error, PeerRejected):
            raise self._wire.error
        if self._wire.left is not None:
            raise PeerClosed(f"prove the data path: {self._wire.left}")
        self._deadline.check("prove the data path", self._explain())
        return False

    def _post(self) -> None:
        lossy = self._wire.handshake.lossy
        if (
            lossy
            and not self._waiting
            and time.monotonic() - self._sent_at > AGAIN_S
            and not self._wire.handshake.proved
        ):
            self._waiting = self._work()
        left = []
        for work in self._waiting:
            index, addr, size = work
            c = self._connections[index]
            before = self._last.get(index)
            if before is not None and before.status is None:
                left.append(work)  # the small one first, so that a failure tells which of the two it was
                continue
            sent = Sent(WrOpcode.SEND, f"send a probe of {size} bytes", lambda: None)
            if c._lane.post(sent, (addr, size, self._mr.lkey), None, c._to):
                self._sent.append(sent)
                self._last[index] = sent
                self._sent_at = time.monotonic()
            else:
                left.append(work)
        self._waiting = left

    def _receive(self, index: int, connection: Middle) -> None:
        while True:
            with self._engine.lock:
                inbox = connection._inbox()
                if not inbox:
                    return
                slot, length = inbox.popleft()
                came = bytes(connection._lane.payload(slot, length))
                connection._lane.repost(slot)
            if came != contents(self._wire.id, index, length):
                raise RemoteProtocolError(
                    f"prove the data path: {length} bytes from {connection.peer} are not what was sent. "
                    "Do both ends mean the same queue pair?"
                )
            self._seen.add(length)
            if connection.local.qp_type is QpType.RC and any(size < length for size in self._due[index]):
                raise RemoteProtocolError(
                    f"prove the data path: {length} bytes from {connection.peer} arrived, and those sent before them "
                    f"did not, which RC forbids. The PSNs of the two ends do not fit (the peer's begin with "
                    f"{connection.peer.psn:#08x}), or the driver loses messages."
                )
            if length in self._due[index]:
                self._due[index].discard(length)
                self._be_patient()

    def _failed(self, connection: Middle) -> CompletionError:
        error = connection._lane.broken
        assert error is not None
        unanswered = error.status in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)
        small_arrived = unanswered and any(sent.status == WcStatus.SUCCESS for sent in self._sent)
        more = f" {self._mtu_words()}" if small_arrived else ""
        if error.status == WcStatus.WR_FLUSH_ERR and not small_arrived:
            more = " (this host did not send: its firewall drops RoCE, UDP port 4791, or its network device refuses)"
        return CompletionError(
            error.status, vendor_err=error.vendor_err, wr_id=error.wr_id, qp_num=error.qp_num, opcode=error.opcode,
            doing=f"prove the data path from {connection.local} to {connection.peer}{more}",
            hint="" if small_arrived else None,
        )  # fmt: skip

    def _mtu_words(self) -> str:
        return (
            f"({self._sizes[0]} bytes arrive, {self._sizes[-1]} do not: the network between carries less than "
            f"path_mtu {MTU_BYTES[self._connections[0].path.path_mtu]}; give a smaller path_mtu)"
        )

    def _explain(self) -> str:
        if self._seen and not self._told:
            return f"Some probes arrived and some did not. {self._mtu_words()}"
        if self._told:
            text = "The peer's probes arrived, but it has not said that ours did: packets are dropped in one direction."
        elif self._wire.handshake.proved:
            text = (
                "The peer has our probes, but its own do not arrive here: packets are dropped in one direction. "
                "Does a firewall on this side drop RoCE (UDP port 4791), or are its PSNs others than the peer sends?"
            )
        else:
            text = (
                "No probe arrived: a firewall between drops RoCE (UDP port 4791), "
                "or the two ends do not reach each other."
            )
        ud = self._connections[0].local.qp_type is QpType.UD
        return f"{text} UD also drops in silence what comes with another Q_Key." if ud else text

    def fds(self) -> tuple[int, ...]:
        """The descriptors to wait on between two steps."""
        self._engine.arm()
        return (self._engine.channel.fileno(), *self._wire.filenos())

    def story(self) -> Story[None]:
        """Advance until it is proven."""
        while True:
            if self.advance():
                return
            fds = self.fds()
            if self.advance():
                return
            yield Wait(fds, self._deadline, 50)

    def close(self) -> None:
        """Free the probes' memory, when the device is done with it."""
        self._mr.close()
