"""The connector's side by rdma_cm: resolve the address and the route, make a queue pair there, ask, and join."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle

from ..abi.rdma_cma import CmEventType
from ..errors import ConnectTimeout, PeerClosed, PeerRejected, say_more
from ..exchange.url import Address
from ..objects.cm import CmId, sockaddr
from ..protocol.cm_message import REQUEST_MAX
from ..protocol.handshake import Role
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, Wait
from .cm_conversation import CmConversation, CmReader
from .cm_ends import (
    Peer,
    check_room,
    check_terms,
    is_iwarp,
    message_of,
    param_of,
    prepare_for,
    raise_queue_pair,
    raised_by_kernel,
    stand,
)
from .end import End
from .prepared import Prepared
from .terms import Terms
from .trace import Trace

__all__ = ["connect_by_cm"]

_E = CmEventType
#: the longest time that the kernel takes in, ms
_MOST_MS = 2**31 - 1
#: it is to be the caller's deadline that passes, and not the kernel's, ms
_LATER_MS = 1000


def connect_by_cm(url: str, addresses: Sequence[Address], terms: Terms, deadline: Deadline) -> Procedure[End]:
    """Connect to a listener of rdma_cm: of this library, or of any program.

    One that is not there yet is asked again until the deadline.

    Args:
        url: ``rdma://host:port``.
        addresses: the same, looked up; one after the other is tried.
        terms: what the caller asked for.
        deadline: for all of it.

    Raises:
        ValueError: something that rdma_cm does not have.
        ConnectTimeout, PeerRejected, DeviceError, VerbsError, LibraryError, RemoteProtocolError: as ``connect``.
    """
    check_terms(terms)
    check_room(terms, REQUEST_MAX)
    trace = Trace(Role.CONNECTOR, deadline)
    seen = ""
    for address in cycle(addresses):
        try:
            return (yield from _attempt(url, address, terms, trace, deadline))
        except PeerRejected as e:
            if not e.again_ms:
                raise
            seen = f"{url}: {e.reason}"
            over = Deadline(min(e.again_ms / 1000, deadline.left_s))
            while over.left_s > 0:
                yield Wait(over)
            deadline.check("connect: wait for the peer's reply", seen)
        except ConnectTimeout as e:
            if seen:
                say_more(e, f"Before: {seen}")
            raise
    raise AssertionError("a name stands for at least one address")


def _attempt(url: str, address: Address, terms: Terms, trace: Trace, deadline: Deadline) -> Procedure[End]:
    doing = f"connect to rdma://{address}"
    reader: CmReader = yield Call(CmReader, deadline, "connect: open rdma_cm", undo=CmReader.close)
    try:
        conversation = CmConversation(reader, CmId(reader.channel), Role.CONNECTOR, trace, doing)
    except BaseException:
        reader.close()
        raise
    try:
        asking = _ask(conversation, url, address, terms, deadline, doing)
        return (yield from conversation.explained(asking, deadline, doing))
    except BaseException:
        conversation.end()
        raise


def _ask(
    conversation: CmConversation, url: str, address: Address, terms: Terms, deadline: Deadline, doing: str
) -> Procedure[End]:
    trace, cm_id = conversation.trace, conversation.cm_id
    prepared = yield from _prepare(conversation, address, terms, deadline, doing)
    try:
        data = terms.private_data if terms.plain else message_of(prepared, terms, REQUEST_MAX)
        param = param_of(prepared, terms.options, data)
        trace.mark("hello", "sent to %s by rdma_connect", url)
        yield Call(partial(cm_id.connect, param, doing))
        hint = f"{url}: its connection manager does not answer, or the application that listens there does not."
        answers = (_E.CONNECT_RESPONSE, _E.ESTABLISHED)
        reply = yield from conversation.until(answers, deadline, "connect: wait for the peer's reply", hint)
        trace.mark("reply", "came")
        peer = Peer.of(reply.param.private_data)
        if is_iwarp(prepared):
            path = raised_by_kernel(prepared, reply.param, terms.options)
        else:
            limits = param_of(prepared, terms.options, b"", reply.param)
            path = yield from raise_queue_pair(conversation, prepared, terms, deadline, limits)
            deadline.check("move to RTS")
            yield Call(partial(cm_id.establish, doing))
            trace.mark("ready", "sent by rdma_establish")
        if not isinstance(conversation.error, PeerClosed):  # who has closed since may have sent something before
            conversation.check(doing)
        return stand(conversation, prepared, path, peer, deadline, str(address))
    finally:
        prepared.close()


def _prepare(
    conversation: CmConversation, address: Address, terms: Terms, deadline: Deadline, doing: str
) -> Procedure[Prepared]:
    """The queue pair, on the device that leads to the peer; one use of it is the caller's."""
    cm_id, where = conversation.cm_id, sockaddr(address.family, address.sockaddr)
    if terms.options.traffic_class is not None:
        yield Call(partial(cm_id.set_traffic_class, terms.options.traffic_class))
    left_ms = deadline.left_ms
    timeout_ms = _MOST_MS if left_ms is None else min(_MOST_MS, left_ms + _LATER_MS)
    yield Call(partial(cm_id.resolve_addr, where, timeout_ms, doing))
    hint = f"{address}: it does not answer on that network (`ip neigh`: FAILED if not)."
    yield from conversation.until((_E.ADDR_RESOLVED,), deadline, "connect: resolve the address", hint)
    yield Call(partial(cm_id.resolve_route, timeout_ms, doing))
    hint = f"{address}: rdma_cm found no path there: on InfiniBand the subnet manager tells it."
    yield from conversation.until((_E.ROUTE_RESOLVED,), deadline, "connect: resolve the route", hint)
    conversation.trace.mark("port", "%s port %d for %s", cm_id.device, cm_id.port_num, address)
    make = partial(_lent, cm_id, terms)
    prepared: Prepared = yield Call(make, deadline, "connect: make the queue pairs", undo=Prepared.close)
    conversation.trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
    return prepared


def _lent(cm_id: CmId, terms: Terms) -> Prepared:
    prepared = prepare_for(cm_id, terms)
    prepared.lend()
    return prepared
