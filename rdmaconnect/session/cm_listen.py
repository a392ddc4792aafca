"""The listener's side by rdma_cm: each request is taken as far as it gets, whether anybody accepts or not."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from ..abi import QpType
from ..abi.rdma_cma import CmEventType
from ..errors import ConnectTimeout, DeviceError, RdmaConnectError, StateError, shown
from ..exchange import service
from ..exchange.acceptor import descriptors_are_scarce
from ..exchange.url import Address, addresses, host_of, loopback_of, port_of, rdma_url
from ..objects.cm import CmEvent, CmId, sockaddr
from ..protocol.cm_message import ANSWER_MAX, is_ours, refusal
from ..protocol.handshake import Role
from ..runtime.deadline import Deadline
from ..runtime.peer_log import log
from ..runtime.procedure import Call, Interrupt, Procedure
from ..runtime.unattended import run_unattended
from ..runtime.workers import here
from .admission import MAX_HALF_OPEN, MAX_QPS, SILENT_S, Busy, Room
from .backlog import Backlog
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
from .listener import AsyncListener, Listener
from .prepared import Prepared
from .terms import ListenOptions, Terms, parse_qp_types
from .trace import Trace

__all__ = ["AsyncCmListener", "CmListener"]

_E = CmEventType
#: seconds that a peer has from its request until it says that the connection stands
_PATIENCE_S = 30.0


@dataclass(slots=True)
class _Request:
    """A request under way.

    Attributes:
        interrupt: breaks into what is done for it.
        answered: since when it is for the peer to go on; None before.
    """

    interrupt: Interrupt = field(default_factory=Interrupt)
    answered: Deadline | None = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the peer has not gone on."""
        answered = self.answered
        return 0.0 if answered is None else answered.waited_s


class _CmBacklog(Backlog):
    """A backlog that rdma_cm fills.

    Args:
        address: an ``rdma://`` url.
        terms: what every connection is to have.
        options: those of ``listen``.

    Raises:
        ValueError: something that rdma_cm does not have.
        VerbsError, DeviceError, LibraryError: it cannot listen there.
    """

    def __init__(self, address: str, terms: Terms, options: ListenOptions) -> None:
        super().__init__()
        check_terms(terms)
        check_room(terms, ANSWER_MAX)
        if QpType.RC not in parse_qp_types(options.get("qp_types", ("RC",))) or options.get("share_ud"):
            raise ValueError(f"qp_types is {shown(options.get('qp_types'))}: by rdma:// only RC is connected")
        if terms.options.traffic_class is not None:
            raise ValueError("traffic_class: by rdma:// it is the connector's to choose. Give it to connect()")
        self._terms = terms
        self._room = Room(options.get("max_half_open", MAX_HALF_OPEN), options.get("max_qps", MAX_QPS))
        #: those under way
        self._requests: dict[CmConversation, _Request] = {}
        #: why nobody comes any more: the device that it listened on is not there
        self._gone: DeviceError | None = None
        self._workers = here()
        url = rdma_url(address, bind=True)
        self.url, self._reader = url, CmReader()
        try:
            self._id = self._bound(url, options.get("max_half_open", MAX_HALF_OPEN))
        except BaseException:
            self._reader.close()
            raise
        self.url = f"{url.rpartition(':')[0]}:{self._id.port}"
        if not loopback_of(host_of(url)):
            logging.getLogger("rdmaconnect").warning(
                "listening on %s without protection, which rdma_cm does not have: whoever reaches it can connect.",
                self.url,
            )

    def _bound(self, url: str, backlog: int) -> CmId:
        """An identifier that listens, at the first of the host's addresses where that can be."""
        found = addresses(host_of(url), port_of(url), bind=True)
        for address in found:
            try:
                return self._bind(address, backlog, f"listen on rdma://{address}")
            except RdmaConnectError:
                if address is found[-1]:
                    raise
        raise AssertionError("a host has at least one address")

    def _bind(self, address: Address, backlog: int, doing: str) -> CmId:
        cm_id = CmId(self._reader.channel)
        self._reader.tell(cm_id, self._asked)  # before: somebody may ask at once
        try:
            cm_id.bind(sockaddr(address.family, address.sockaddr), backlog, doing)
        except BaseException:
            self._reader.forget(cm_id)
            cm_id.close()
            raise
        return cm_id

    # ---- in the service thread

    def _asked(self, event: CmEvent) -> None:
        request = event.request
        if request is None:
            log.warning("accept on %s: rdma_cm says %s (%d)", self.url, event.kind, event.status)
            if event.kind is _E.DEVICE_REMOVAL:
                words = f"accept on {self.url}: the device is not there any more: it was removed. Listen anew."
                self._gone = DeviceError(words)
                self._changed.notify()
            return
        trace = Trace(Role.LISTENER, Deadline(None))
        doing = f"accept on {self.url}"
        conversation = CmConversation(self._reader.lend(), request, Role.LISTENER, trace, doing)
        made = _Request()
        with self._lock:
            under_way = len(self._requests) + len(self._ready)
            lacks = self._room.lacks(1, under_way, under_way, scarce=descriptors_are_scarce())
            error = StateError("the listener was closed.") if self._closed else Busy(lacks) if lacks else None
            overdue = [one for one in self._requests.values() if lacks and one.silent_s > SILENT_S]
            if error is None:
                self._requests[conversation] = made
        for one in overdue:
            one.interrupt.set(Busy(f"it has not gone on for {one.silent_s:.0f} s, and others wait."))
        if error is not None:
            again = "refused" if self._closed else "told to try again"
            log.info("accept on %s: %s is %s: %s", self.url, conversation.address, again, error)
            self._workers.start(partial(_refuse, conversation, event, error))
            return
        service.start(run_unattended(self._take(conversation, event, made), self._workers, made.interrupt))

    # ---- a procedure for each request

    def _take(self, conversation: CmConversation, event: CmEvent, request: _Request) -> Procedure[None]:
        deadline, doing = Deadline(_PATIENCE_S, ConnectTimeout), f"accept on {self.url}"
        making = self._make(conversation, event, request, deadline, doing)
        try:
            end = yield from conversation.explained(making, deadline, doing)
        except BaseException as e:
            with self._lock:
                self._requests.pop(conversation, None)
            _refuse(conversation, event, e)
            if isinstance(e, RdmaConnectError) and not self._closed:
                words = f"{conversation.address or 'a peer'}: {e}"
                log.warning("accept on %s: %s", self.url, words)
                self._in_vain.failed(words, e)
                self._changed.notify()
            elif isinstance(e, Exception) and not isinstance(e, RdmaConnectError):
                log.exception("accept on %s: %s", self.url, conversation.address)
            raise
        with self._lock:
            self._requests.pop(conversation, None)
            closed = self._closed
            if not closed:
                self._ready.append(end)
        self._changed.notify()
        if closed:
            end.close()

    def _make(
        self, conversation: CmConversation, event: CmEvent, request: _Request, deadline: Deadline, doing: str
    ) -> Procedure[End]:
        terms, cm_id, trace = self._terms, conversation.cm_id, conversation.trace
        address = conversation.address
        trace.mark("hello", "came from %s", address)
        peer = Peer.of(event.param.private_data)
        prepared: Prepared = yield Call(partial(prepare_for, cm_id, terms))
        prepared.lend()
        try:
            trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
            data = message_of(prepared, terms, ANSWER_MAX) if peer.ours else terms.private_data
            param = param_of(prepared, terms.options, data, event.param)
            if not is_iwarp(prepared):
                path = yield from raise_queue_pair(conversation, prepared, terms, deadline, param)
            yield Call(partial(cm_id.accept, param, doing))
            request.answered = Deadline(None)
            trace.mark("reply", "sent by rdma_accept")
            hint = "The peer was answered, and has not said that the connection stands: it is stopped or gone."
            yield from conversation.until((_E.ESTABLISHED,), deadline, doing, hint)
            trace.mark("ready", "came")
            if is_iwarp(prepared):
                path = raised_by_kernel(prepared, param, terms.options)
            return stand(conversation, prepared, path, peer, deadline, address)
        finally:
            prepared.close()

    # ---- in any thread

    def _check_open(self) -> None:
        super()._check_open()
        if self._gone is not None and not self._ready:
            raise self._gone

    def _seen(self) -> str:
        with self._lock:
            under_way = [f"{one.address}, whose request is being taken" for one in list(self._requests)[-3:]]
        return self._in_vain.explain(under_way) or "nobody asked"

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            requests, ready = list(self._requests.values()), list(self._ready)
            self._ready.clear()
        self._reader.forget(self._id)
        with ExitStack() as closing:  # all of it, though one may fail
            closing.callback(self._reader.close)
            closing.callback(self._id.close)
            for end in ready:
                closing.callback(end.close)
            for request in requests:
                request.interrupt.set(StateError("the listener was closed."))
        self._changed.notify()


class CmListener(_CmBacklog, Listener):
    """A :class:`Listener` that takes connections by rdma_cm."""


class AsyncCmListener(_CmBacklog, AsyncListener):
    """An :class:`AsyncListener` that takes connections by rdma_cm."""


def _refuse(conversation: CmConversation, event: CmEvent, error: BaseException) -> None:
    """Tell the peer why nothing comes of its request, and give that up. Blocks."""
    with suppress(RdmaConnectError):
        words = refusal(str(error) or type(error).__name__, again=isinstance(error, Busy))
        conversation.cm_id.reject(words if is_ours(event.param.private_data) else b"")
    with suppress(RdmaConnectError):
        conversation.end()
