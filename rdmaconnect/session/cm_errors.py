"""What an event of rdma_cm means that ends a connection, or the attempt at one, as an error. Pure."""

from __future__ import annotations

import errno

from ..abi.rdma_cma import CmEventType
from ..errors import DeviceError, PeerClosed, PeerRejected, RdmaConnectError, VerbsError, hint_for
from ..objects.cm import CmEvent
from ..protocol.cm_message import read_refusal
from ..protocol.handshake import Role
from .admission import AGAIN_MS

__all__ = ["LAST", "error_of"]

_E = CmEventType
#: after these nothing more comes of an identifier
LAST = frozenset(
    (
        _E.ADDR_ERROR, _E.ROUTE_ERROR, _E.CONNECT_ERROR, _E.UNREACHABLE, _E.REJECTED, _E.DISCONNECTED,
        _E.DEVICE_REMOVAL,
    )
)  # fmt: skip
#: the function that each says the failure of; on the side that was asked it is rdma_accept
_FAILED = {
    _E.ADDR_ERROR: "rdma_resolve_addr",
    _E.ROUTE_ERROR: "rdma_resolve_route",
    _E.CONNECT_ERROR: "rdma_connect",
    _E.UNREACHABLE: "rdma_connect",
}
#: why a request was rejected, where the connection manager says so and not the application (kernel: rdma/ib_cm.h,
#: ib_cm_rej_reason; IBTA 12.6.7.2)
_REASONS = {
    1: "it has no queue pair left",
    3: "it has no resources left",
    4: "it got no answer to its own answer in time",
    5: "it does not support what was asked for",
    6: "it does not know the communication identifier",
    8: "nobody listens there on that port of rdma_cm",
    9: "it does not have that type of queue pair",
    10: "it still holds an earlier connection of the same queue pair number",
    12: "it does not have that GID",
    13: "it does not have that LID",
    26: "it does not carry that MTU",
    27: "it cannot answer so many RDMA reads at once: lower max_rd_atomic",
    28: "its application refused",
    29: "it does not take that rnr_retry",
    30: "the communication identifier is in use",
    31: "it speaks another version of the connection manager's protocol",
    35: "it does not take the vendor's options",
}
#: those after which the same may be asked again: nobody listens (iWARP: connection refused), what was is not over
_AGAIN = (8, 10, -errno.ECONNREFUSED)


def _rejected(status: int, private_data: bytes) -> PeerRejected:
    said, again = read_refusal(private_data)
    words, again = said or _REASONS.get(status), again or status in _AGAIN
    if words is None:
        words = _REASONS[8] if status in _AGAIN else "it gave no reason that is known here"
    again_ms = AGAIN_MS if again else 0
    number = -status if status < 0 else 0
    return PeerRejected(
        "rdma_connect", number, f"{words.rstrip('.')} (status {status}).", again_ms=again_ms, private_data=private_data
    )


def error_of(event: CmEvent, doing: str, role: Role) -> RdmaConnectError:
    """The error that an event of :data:`LAST` stands for.

    Args:
        event: the event.
        doing: what was being done, in words.
        role: on which side it came.
    """
    kind, asked = event.kind, role is Role.LISTENER
    # -1 is librdmacm's own, which keeps the reason to itself
    number = abs(event.status) if event.status not in (0, -1) else errno.EIO
    if kind is _E.REJECTED and asked:
        return PeerClosed(f"{doing}: the peer gave its request up (status {event.status}).")
    if kind is _E.REJECTED:
        return _rejected(event.status, event.param.private_data)
    if kind is _E.DISCONNECTED:
        return PeerClosed("the peer closed the connection (rdma_disconnect), or its process ended.")
    if kind is _E.DEVICE_REMOVAL:
        return DeviceError(f"{doing}: the device is not there any more: it was removed. Connect anew.")
    if kind is _E.UNREACHABLE:
        number = errno.ETIMEDOUT if number == errno.EIO else number
    if kind is _E.ADDR_ERROR and number == errno.ENODEV:
        return DeviceError(f"{doing}: rdma_resolve_addr: ENODEV. {hint_for('rdma_resolve_addr', number)}")
    return VerbsError("rdma_accept" if asked else _FAILED[kind], number, doing)
