"""What both sides of a connection by rdma_cm do: a queue pair of our own on the device that it has chosen, moved along.

rdma_cm chooses device, port, GIDs, P_Key, MTU and PSN by the kernel's routes, and carries them to the peer; the timers
of the queue pair, and what it stands on, are as for every other connection.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from weakref import ref

from ..abi import QpState, QpType, TransportType
from ..agreement.endpoint import Endpoint, Gid, GidEntry, PortAddress, RemoteRegion
from ..agreement.options import Options
from ..agreement.path import ACCESS, AhAttr, Path
from ..errors import DeviceError
from ..objects.cm import CmId, CmParam
from ..objects.context import open_device
from ..objects.qp_attr import QpAttr
from ..protocol.cm_message import CmMessage
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure
from ..runtime.workers import here
from .cm_conversation import CmConversation
from .end import End, Established
from .prepared import Prepared, bring_up
from .renewing import all_stand
from .terms import Terms
from .watch import attend

__all__ = [
    "Peer", "check_room", "check_terms", "is_iwarp", "message_of", "param_of", "path_of", "prepare_for",
    "raise_queue_pair", "raised_by_kernel", "stand",
]  # fmt: skip

#: bytes of a message to a peer that does not say how many its receives take: it is for the application to know
_ANY = 2**31
#: stands for the peer's queue pair over iWARP, where it is not told
_NO_NUMBER = 1
#: options that rdma_cm leaves no choice of
_CHOSEN = ("gid_index", "path_mtu", "sl", "flow_label", "pkey", "hop_limit")
_DEFAULT = Options()


class Peer(NamedTuple):
    """What the other side has said in its private data.

    Attributes:
        ours: whether it was written with this library.
        recv_size: bytes that its receives take, as far as it says.
        private_data: of its application; a stranger's as it came, filled up with zeros.
        regions: its named memory.
    """

    ours: bool
    recv_size: int
    private_data: bytes
    regions: dict[str, RemoteRegion]

    @classmethod
    def of(cls, data: bytes) -> Peer:
        """Read it.

        Raises:
            RemoteProtocolError: it begins as a message of this library and is none.
        """
        message = CmMessage.read(data)
        if message is None:
            return cls(False, _ANY, data, {})
        return cls(True, message.recv_size, message.private_data, dict(message.regions))


def check_terms(terms: Terms) -> None:
    """Refuse what rdma_cm does not have.

    Raises:
        ValueError: says what, and what to do.
    """
    if terms.qp_type is not QpType.RC:
        raise ValueError(f"qp_type is {terms.qp_type}: by rdma:// only RC is connected. Use a tcp:// url")
    if terms.keys is not None:
        raise ValueError(
            "secret, key or RDMACONNECT_SECRET is given: rdma_cm protects nothing. Leave it out, or use a tcp:// url"
        )
    if terms.reconnect_s:
        raise ValueError("auto_reconnect is given: by rdma:// nothing is connected anew. Use a tcp:// url")
    if terms.own is not None:
        raise ValueError(f"{terms.own.name} is given: by rdma:// completions are ours. Use a tcp:// url")
    given = [name for name in _CHOSEN if getattr(terms.options, name) != getattr(_DEFAULT, name)]
    if given:
        raise ValueError(
            f"{' and '.join(given)}: rdma_cm chooses by the kernel's routes alone. Leave it out, or use a tcp:// url"
        )


def check_room(terms: Terms, most: int) -> None:
    """Refuse what rdma_cm does not carry to the peer, before anything is done.

    Args:
        terms: what the caller asked for.
        most: bytes that there is room for.

    Raises:
        ValueError: says what takes how many.
    """
    if not terms.plain:
        CmMessage(1, terms.private_data, dict.fromkeys(terms.regions, RemoteRegion(0, 0, 0))).to_bytes(most)
    elif len(terms.private_data) > most:
        raise ValueError(f"private_data is {len(terms.private_data)} bytes: rdma_cm carries {most} this way")


def message_of(prepared: Prepared, terms: Terms, most: int) -> bytes:
    """What a peer of this library is told.

    Raises:
        ValueError: it is longer than ``most`` bytes.
    """
    end = prepared.ends[0]
    return CmMessage(end.recv_size, terms.private_data, prepared.offered()).to_bytes(most)


def prepare_for(cm_id: CmId, terms: Terms) -> Prepared:
    """A queue pair in INIT, with receives posted, on the device and port that rdma_cm has chosen. Blocks.

    Raises:
        DeviceError: it is another one than was asked for.
        VerbsError: the device refused something.
    """
    device, port_num, asked = cm_id.device, cm_id.port_num, terms.options
    for name, wanted, found in (("device", asked.device, device), ("port_num", asked.port_num, port_num)):
        if wanted is not None and wanted != found:
            raise DeviceError(
                f"use {name} {wanted}: rdma_cm goes by {device} port {port_num}, where the kernel's route to "
                f"{cm_id.peer} leads. Change the route, or leave {name} out."
            )
    context = open_device(device)
    try:
        port = context.port(port_num)
    except BaseException:
        context.close()
        raise
    return Prepared(context, port, QpType.RC, asked, terms.regions)


def param_of(prepared: Prepared, options: Options, data: bytes, theirs: CmParam | None = None) -> CmParam:
    """What rdma_cm is to tell the peer of this end.

    Args:
        prepared: the queue pair.
        options: timers.
        data: private data.
        theirs: what the peer has said.
    """
    end = prepared.ends[0]
    answers, starts = end.port.max_dest_rd_atomic, end.port.max_rd_atomic
    if theirs is not None:
        answers, starts = min(answers, theirs.responder_resources), min(starts, theirs.initiator_depth)
    retry_cnt = options.timers.retry_cnt
    return CmParam(end.qp_num, answers, starts, retry_cnt, options.rnr_retry, data)


def path_of(port: PortAddress, init: QpAttr, rtr: QpAttr, rts: QpAttr, options: Options, limits: CmParam) -> Path:
    """The path that rdma_cm has chosen, with this end's own timers. Pure.

    Args:
        port: this end's.
        init, rtr, rts: what a queue pair needs to enter these states.
        options: timers.
        limits: the depths, which the peer may have told higher than this end's are.
    """
    vector = rtr.ah_attr
    local = remote = None
    if vector.is_global:
        local = next((entry for entry in port.gids if entry.gid_index == vector.sgid_index), None)
        if local is not None and any(vector.dgid):
            remote = GidEntry(Gid(vector.dgid), local.gid_type, 0)
    timeout, retry_cnt = options.timers
    return Path(
        port_num=port.port_num,
        pkey_index=init.pkey_index,
        qp_access_flags=ACCESS[QpType.RC],
        qkey=0,
        path_mtu=rtr.path_mtu,
        dest_qp_num=rtr.dest_qp_num,
        rq_psn=rtr.rq_psn,
        sq_psn=rts.sq_psn,
        ah_attr=vector,
        max_rd_atomic=limits.initiator_depth,
        max_dest_rd_atomic=limits.responder_resources,
        min_rnr_timer=options.min_rnr_timer,
        timeout=timeout,
        retry_cnt=retry_cnt,
        rnr_retry=options.rnr_retry,
        local_gid=local,
        remote_gid=remote,
        why=(f"by rdma_cm, along the kernel's route: {port} {local or ''} to {remote.gid if remote else 'its LID'}",),
    )


def is_iwarp(prepared: Prepared) -> bool:
    """Whether the device is one of iWARP: there the kernel takes the queue pair from INIT to RTS when it connects."""
    return prepared.engine.context.transport_type is TransportType.IWARP


def raised_by_kernel(prepared: Prepared, theirs: CmParam, options: Options) -> Path:
    """What there is to say of the path where the kernel has taken the queue pair to RTS. Pure, but for its state.

    Source: rdma_connect(3), librdmacm/cma.c: over iWARP no queue pair is modified beyond INIT.
    """
    prepared.transceivers[0].qp.state = QpState.RTS
    port = prepared.address
    timeout, retry_cnt = options.timers
    return Path(
        port_num=port.port_num, pkey_index=0, qp_access_flags=ACCESS[QpType.RC], qkey=0, path_mtu=port.active_mtu,
        dest_qp_num=theirs.qp_num or _NO_NUMBER, rq_psn=0, sq_psn=0, ah_attr=AhAttr(port.port_num),
        max_rd_atomic=theirs.initiator_depth, max_dest_rd_atomic=theirs.responder_resources,
        min_rnr_timer=options.min_rnr_timer, timeout=timeout, retry_cnt=retry_cnt, rnr_retry=options.rnr_retry,
        why=(f"by rdma_cm, along the kernel's route: {port}, iWARP",),
    )  # fmt: skip


def raise_queue_pair(
    conversation: CmConversation, prepared: Prepared, terms: Terms, deadline: Deadline, limits: CmParam
) -> Procedure[Path]:
    """The queue pair to RTR and RTS, with what rdma_cm knows of the peer, and depths within limits."""
    cm_id = conversation.cm_id

    def ask() -> Path:
        doing = "connect: ask rdma_cm for the path"
        init, rtr, rts = (cm_id.attr(state, doing) for state in (QpState.INIT, QpState.RTR, QpState.RTS))
        return path_of(prepared.address, init, rtr, rts, terms.options, limits)

    def go_on() -> None:
        deadline.check("move to RTR")
        conversation.check("connect: move to RTR")

    path: Path = yield Call(ask)
    conversation.trace.mark("path", "%s", "; ".join(path.why))
    prepared.lend()
    yield Call(
        partial(bring_up, prepared, [path], rts=True, go_on=go_on), deadline, "move to RTR", finally_=prepared.close
    )
    conversation.trace.mark("joined", "RTR, RTS")
    return path


def stand(
    conversation: CmConversation, prepared: Prepared, path: Path, peer: Peer, deadline: Deadline, address: str
) -> End:
    """The connection, which stands.

    Args:
        conversation, prepared, path, peer: what joins it to its peer.
        deadline: since when it was being made.
        address: the peer's, for words.
    """
    there = PortAddress(address, 1, prepared.address.link_layer, 0, path.path_mtu)
    remote = Endpoint(QpType.RC, path.dest_qp_num, path.rq_psn, there, peer.recv_size)
    established = Established(remote, path, conversation, peer.regions, peer.private_data, None)
    end = End(prepared, prepared.transceivers[0], established)
    end.connect_s = deadline.waited_s
    kept, workers = ref(end), here()

    def removed(error: DeviceError) -> None:
        there = kept()
        if there is not None:
            workers.start(partial(there.lose, error))

    conversation.holds(removed)
    conversation.stand([end], b"")
    all_stand([end])
    attend([end])
    conversation.trace.mark("connected", "by rdma_cm in %.1f ms", deadline.waited_s * 1000)
    return end
