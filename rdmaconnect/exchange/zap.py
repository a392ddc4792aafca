"""ZeroMQ's question whether a public key may come in, answered in the service thread for every listener.

Source: RFC 27 (ZAP).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import zmq
from zmq.utils import z85

from ..runtime.fork import in_child
from ..runtime.peer_log import log
from . import link, service

__all__ = ["admit", "forget"]


#: what names a listener -> whether a public key (Z85) may come in there
_listeners: dict[str, Callable[[bytes], bool]] = {}
_handler: zmq.Socket[bytes] | None = None


def admit(knows: Callable[[bytes], bool]) -> str:
    """Begin to answer for one more listener. For the service thread.

    Args:
        knows: whether a public key may come in; one that raises lets this one peer not in.

    Returns:
        What names the listener to ZeroMQ (ZMQ_ZAP_DOMAIN).
    """
    global _handler
    if _handler is None or _handler.closed:
        handler: zmq.Socket[bytes] = link.context().socket(zmq.REP)
        handler.bind("inproc://zeromq.zap.01")
        handler.set(zmq.LINGER, 0)
        _handler = handler
        fd = handler.get(zmq.FD)
        assert isinstance(fd, int)
        service.loop().add_reader(fd, _answer)
    domain = secrets.token_hex(8)
    _listeners[domain] = knows
    return domain


def forget(domain: str) -> None:
    """Let nobody in there any more. For the service thread."""
    _listeners.pop(domain, None)


def _answer() -> None:
    assert _handler is not None
    while True:
        try:
            request = _handler.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            status, text, user = _decide(request)
        except Exception as e:  # noqa: BLE001  a key file that cannot be read, say: this one peer is not let in
            log.warning("the key of a peer could not be looked up: %s", e)
            status, text, user = b"500", b"the listener could not look the key up", b""
        # version, request id, status, text, user id, metadata
        _handler.send_multipart([b"1.0", request[1] if len(request) > 1 else b"", status, text, user, b""])


def _decide(request: list[bytes]) -> tuple[bytes, bytes, bytes]:
    # version, request id, domain, address, identity, mechanism, credentials
    if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE" or len(request[6]) != 32:
        return b"400", b"not a question about a key", b""
    knows, key = _listeners.get(request[2].decode("ascii", "replace")), z85.encode(request[6])
    if knows is None or not knows(key):
        return b"400", b"unknown key", b""
    return b"200", b"OK", key


def _forget() -> None:
    global _handler
    _handler = None
    _listeners.clear()


in_child(_forget)
