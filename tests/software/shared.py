"""A network that several processes of this host are on: what one cannot deliver itself goes over a Unix socket.

Each process has a number, which is the first byte of its queue pairs' numbers; so a message's target says which
process it is for. A process that is gone answers nothing, as a host that lost its power; nor does one that is
stopped, though a real device would.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

import msgpack

from .gid import is_multicast
from .network import ACK, DROP, PSN, RC, UD, Answer, Message, Network

_LENGTH = struct.Struct("!I")
#: what a frame is
_ASK, _ANSWER, _KICK = range(3)
_MOST = 255


class SharedNetwork(Network):
    """A network in a directory; made by ``Network.shared``.

    Losses and cuts are of this process: they meet what it sends. Every GID is known.

    Args:
        path: the directory, the same for all processes; it must be there.
        options: as :class:`Network`.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self._path = path
        super().__init__(**options)

    def renew(self) -> None:
        super().renew()
        for peer in getattr(self, "_peers", {}).values():
            peer.close()
        inherited: _Port | None = getattr(self, "_port", None)
        if inherited is not None:
            inherited.release()
        self._number = 0
        self._peers: dict[int, _Peer] = {}
        self._asked: dict[int, tuple[int, Callable[[Answer], None]]] = {}
        self._ids = count(1)
        self._port: _Port | None = None

    def close(self) -> None:
        super().close()
        port, self._port = self._port, None
        if port is not None:
            port.close()
        with self.lock:
            for peer in list(self._peers.values()):
                self._gone(peer)

    def _is_known(self, gid: bytes) -> bool:
        return True

    # ---- who is here

    def enter(self, qp: Any) -> int:
        if self._port is None:
            self._join()
        start = self._number << 16
        number = next(n for n in (start | n & 0xFFFF for n in self._qp_numbers) if n & 0xFFFF and n not in self.qps)
        self.qps[number] = qp
        return number

    def _join(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for number in range(1, _MOST):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(os.path.join(self._path, f"{number}.taken"), os.O_CREAT | os.O_EXCL))
                break
        else:
            listening.close()
            raise RuntimeError(f"{self._path}: {_MOST - 1} processes were on this network, there is room for no more")
        listening.bind(os.path.join(self._path, str(number)))
        listening.listen(128)
        self._number = number
        self._port = _Port(self, listening)

    # ---- out

    def carry(self, message: Message, answered: Callable[[Answer], None]) -> None:
        number = message.dest_qp_num >> 16
        everywhere = message.qp_type == UD and message.dgid and is_multicast(message.dgid)
        if number == self._number and not everywhere:
            super().carry(message, answered)
        elif any(loss.hits(message) for loss in list(self._losses)):
            answered(DROP if message.qp_type == RC else ACK)
        elif everywhere:
            for other in self._others():
                self._say(other, [_ASK, 0, list(message)])
            super().carry(message, answered)
        elif message.qp_type != RC:
            self._say(number, [_ASK, 0, list(message)])
            answered(ACK)
        else:
            asked = next(self._ids)
            self._asked[asked] = number, answered
            if not self._say(number, [_ASK, asked, list(message)]) and self._asked.pop(asked, None):
                answered(DROP)

    def kick(self, qp_num: int) -> None:
        if qp_num >> 16 == self._number:
            super().kick(qp_num)
        else:
            self._say(qp_num >> 16, [_KICK, qp_num])

    def _others(self) -> list[int]:
        names = [name for name in os.listdir(self._path) if name.isdigit()]
        return [int(name) for name in names if int(name) != self._number]

    def _say(self, number: int, frame: list[Any]) -> bool:
        """Send a frame to a process; False if it is not there. Called with the lock held; never blocks."""
        peer = self._peers.get(number)
        if peer is None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(os.path.join(self._path, str(number)))
            except OSError:
                link.close()
                return False
            if self._port is None:  # it is closing
                link.close()
                return False
            peer = self._peers[number] = _Peer(link, number)
            self._port.watch(peer)
        peer.out += _packed(frame)
        self._flush(peer)
        return True

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.link.send(peer.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._gone(peer)
            return
        if self._port is not None and bool(peer.out) is not peer.writing:
            self._port.watch(peer)

    def _gone(self, peer: _Peer) -> None:
        """A process is no more: nothing that it was asked will be answered."""
        if self._peers.get(peer.number) is peer:
            del self._peers[peer.number]
        if self._port is not None:
            self._port.forget(peer)
        peer.close()
        lost = [asked for asked, (number, _) in self._asked.items() if number == peer.number]
        for asked in lost:
            self._asked.pop(asked)[1](DROP)

    # ---- in

    def _came(self, peer: _Peer) -> None:
        """Take what a process has sent. Called by the port's thread, with the lock held."""
        try:
            data = peer.link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone(peer)
            return
        peer.come += data
        while len(peer.come) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(peer.come)
            if len(peer.come) < _LENGTH.size + size:
                return
            frame = msgpack.unpackb(bytes(peer.come[_LENGTH.size : _LENGTH.size + size]))
            del peer.come[: _LENGTH.size + size]
            self._read(peer, *frame)

    def _read(self, peer: _Peer, kind: int, what: int, *rest: Any) -> None:
        if kind == _KICK:
            super().kick(what)
        elif kind == _ANSWER:
            found = self._asked.pop(what, None)
            if found is not None:
                found[1](Answer(*rest))
        elif kind == _ASK:
            message = Message(*rest[0])
            if message.dgid and is_multicast(message.dgid):
                for qp in [qp for qp in self.qps.values() if message.dgid in qp.groups]:
                    self.receive(qp, message)
                return
            answer = self.receive(self.qps.get(message.dest_qp_num & PSN), message)
            if what:
                peer.out += _packed([_ANSWER, what, *answer])
                self._flush(peer)


def _packed(frame: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(packed)) + packed


class _Peer:
    """A connection with another process.

    Attributes:
        number: the process's; 0 where that one made the connection.
        out: what is to be sent.
        come: what has come and is not complete.
        writing: whether it is watched for room to send.
    """

    def __init__(self, link: socket.socket, number: int) -> None:
        link.setblocking(False)
        self.link, self.number = link, number
        self.out, self.come = bytearray(), bytearray()
        self.closed = self.writing = False

    def close(self) -> None:
        self.closed = True
        self.link.close()


class _Port:
    """The thread that reads and writes the sockets."""

    def __init__(self, network: SharedNetwork, listening: socket.socket) -> None:
        self._network, self._listening = network, listening
        self._selector = selectors.DefaultSelector()
        self._bell, self._far_bell = socket.socketpair()
        self._over = False
        self._changed: set[_Peer] = set()
        self._incoming: set[_Peer] = set()
        for readable in (listening, self._bell):
            readable.setblocking(False)
            self._selector.register(readable, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="software device's network", daemon=True)
        self._thread.start()

    def watch(self, peer: _Peer) -> None:
        """Read from it from now on, and write to it if there is something to write. Called with the lock held."""
        self._changed.add(peer)
        self._ring()

    def forget(self, peer: _Peer) -> None:
        """Its socket is about to be closed. Called with the lock held."""
        self._incoming.discard(peer)
        self._changed.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.link)

    def _ring(self) -> None:
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(BlockingIOError):
                self._far_bell.send(b"!", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the thread, and close all."""
        self._over = True
        self._ring()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Close all, without the thread: in a forked child it is not there."""
        for peer in self._incoming:
            peer.close()
        for one in (self._listening, self._bell, self._far_bell):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._over:
            with self._network.lock:
                for peer in self._changed:
                    self._register(peer)
                self._changed.clear()
            for key, events in self._selector.select():
                with self._network.lock:
                    try:
                        self._handle(key, events)
                    except Exception:  # noqa: BLE001  it is for the test to see
                        for world in self._network.worlds:
                            world.error(f"the network: {traceback.format_exc()}", stack=False)

    def _register(self, peer: _Peer) -> None:
        peer.writing = bool(peer.out)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        try:
            self._selector.modify(peer.link, events, peer)
        except KeyError:
            self._selector.register(peer.link, events, peer)

    def _handle(self, key: Any, events: int) -> None:
        peer = key.data
        if key.fileobj is self._listening:
            with contextlib.suppress(OSError):
                made = _Peer(self._listening.accept()[0], 0)
                self._incoming.add(made)
                self._register(made)
        elif key.fileobj is self._bell:
            with contextlib.suppress(OSError):
                self._bell.recv(4096)
        elif not peer.closed:
            if events & selectors.EVENT_WRITE:
                self._network._flush(peer)
            if events & selectors.EVENT_READ and not peer.closed:
                self._network._came(peer)
