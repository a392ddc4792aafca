"""The other side of a pair: ``rdmaconnect doctor --serve``.

A listener like any other, with one thing more: it answers the doctor's question, what this host has and what is
wrong with it. So a doctor learns the ports before it tries them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..agreement.endpoint import PortAddress
from ..agreement.options import Options
from ..errors import ConnectTimeout, RdmaConnectError
from ..exchange import service
from ..exchange.channel import Channel
from ..exchange.url import tcp_url
from ..protocol.codec import encode
from ..protocol.messages import Answer, Question, Remark
from ..session.connection import Connection
from ..session.listen import TcpListener
from ..session.terms import ListenOptions, make_terms, parse_qp_type
from .checks import examine
from .finding import Verdict
from .gather import gather

__all__ = ["DoctorListener", "narrowed", "open_listener", "serve"]

#: seconds between two looks at who has gone
_ROUND_S = 1.0


class DoctorListener(TcpListener):
    """A listener that answers the doctor's question."""

    options: Options = Options()

    def questioned(self, channel: Channel, question: Question) -> None:
        """To examine a host takes a while: in a worker."""
        self._acceptor.know(channel)
        self.workers.submit(partial(self._tell, channel, question))

    def _tell(self, channel: Channel, question: Question) -> None:
        channel.send(encode(self.answer(question.id, channel)))
        service.soon(self._ask_again, channel)

    def answer(self, ident: bytes, channel: Channel) -> Answer:
        """What this host is, for who asks on that channel. Blocks."""
        host = gather(self.options)
        ports: tuple[PortAddress, ...] = ()
        with suppress(RdmaConnectError):
            ports = self._choice(channel).addresses
        bad = [f for f in examine(host) if f.verdict in (Verdict.FAIL, Verdict.WARN)]
        remarks = (Remark(f.verdict.value, f.name, f.words, f.fix) for f in bad)
        return Answer(ident, host.name, tuple(remarks), ports)

    def attend(self, say: Callable[[str], None]) -> None:
        """Hold each connection until its doctor leaves; never returns.

        Args:
            say: told of each.

        Raises:
            StateError: the listener was closed.
        """
        held: list[Connection] = []
        try:
            while True:
                held = _discharge(held)
                with suppress(ConnectTimeout):
                    held.append(self.accept(deadline_s=_ROUND_S))
                    say(f"connected: {held[-1].local} to {held[-1].peer}")
        finally:
            for connection in held:
                connection.close()


def open_listener(
    address: str, options: Options, key: str | None = None, peer_keys: str | None = None
) -> DoctorListener:
    """Listen for doctors; see :func:`serve`."""
    given = {"options": narrowed(options), "regions": {"doctor": bytearray(64)}, "key": key, "peer_keys": peer_keys}
    terms = make_terms(given, ListenOptions, listens=True)
    listener = DoctorListener(tcp_url(address, bind=True), terms, [parse_qp_type("RC")], False)
    listener.options = options
    return listener


def narrowed(options: Options) -> Options:
    """What a doctor connects with: the device, port and GID that were asked for."""
    return Options(device=options.device, port_num=options.port_num, gid_index=options.gid_index)


def serve(
    address: str,
    options: Options,
    say: Callable[[str], None],
    *,
    key: str | None = None,
    peer_keys: str | None = None,
) -> None:
    """Serve doctors until interrupted.

    Args:
        address: where to listen, as for ``listen``.
        options: ``device``, ``port_num`` and ``gid_index`` narrow what is offered.
        say: told the address, and what comes of each doctor's attempts.
        key, peer_keys: as for ``listen``.

    Raises:
        ValueError: an argument that cannot be meant.
        OSError: the address is taken or not one of this host.
    """
    listener = open_listener(address, options, key, peer_keys)
    with listener:
        say(f"listening on {listener.url}")
        listener.attend(say)


def _discharge(held: list[Connection]) -> list[Connection]:
    """Close those whose doctor has left."""
    for connection in held:
        if connection.lost is not None:
            connection.close()
    return [connection for connection in held if not connection.closed]
