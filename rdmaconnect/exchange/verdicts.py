"""Why an exchange ended, as errors that blame what is known. Pure."""

from __future__ import annotations

from ..errors import AuthenticationError, PeerClosed, RdmaConnectError, RemoteProtocolError
from .zmtp import Fault, Filter, ZmtpError

__all__ = ["foreign", "why_over"]


def foreign(error: ZmtpError, listens: bool) -> RdmaConnectError:
    """What bytes that do not fit mean to this side."""
    here, there = ("listener", "connector") if listens else ("connector", "listener")
    both = "Give both sides the same secret, or keys."
    if error.fault is Fault.UNPROTECTED:
        return AuthenticationError(f"this {here}'s exchange is protected, the {there}'s is not. {both}")
    if error.fault is Fault.PROTECTED:
        return AuthenticationError(f"the {there}'s exchange is protected, this {here}'s is not. {both}")
    if error.fault in (Fault.TRAFFIC, Fault.LONG):
        return RemoteProtocolError(f"the {there} {error}: it was cut off.".replace("it sends", "sends"))
    verb = "calls" if listens else "listens"
    hint = f"Is it rdmaconnect that {verb}?"
    return RemoteProtocolError(f"what {verb} there does not speak this protocol: {error}. {hint}")


def why_over(address: str, filter_: Filter, *, hung_up: bool, protected: bool) -> RdmaConnectError:
    """Why no more will come.

    Args:
        address: the peer's.
        filter_: what it has said.
        hung_up: whether this side's ZeroMQ hung up, and not the peer.
        protected: whether this side has keys.
    """
    if filter_.refused:
        return AuthenticationError(f"the listener does not know the key of this side ({filter_.refused}).")
    if hung_up and not filter_.shaken:
        failed = f"the handshake with the peer at {address} failed"
        if not protected:
            return PeerClosed(f"{failed}, or took too long: is it rdmaconnect there?")
        hint = "it has another key than this side expects, another secret, or a key that is not known here."
        return AuthenticationError(f"{failed}: {hint}")
    if hung_up:
        return RemoteProtocolError(
            f"the peer at {address} broke ZeroMQ's protocol, or sent more than {filter_.max_frame} bytes at once."
        )
    return PeerClosed(
        f"the peer at {address} is gone: it closed its side, its process ended, or the network to it broke."
    )
