"""The bytes of the messages: MessagePack, read with distrust. The specification is the head of this wing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgpack

from ..abi import GidType, LinkLayer, Mtu, QpType
from ..agreement.endpoint import Endpoint, Gid, GidEntry, PortAddress, RemoteRegion
from ..agreement.path import Agreement, Wish
from ..errors import RemoteProtocolError, shown
from .messages import (
    Answer,
    Beat,
    Bye,
    Hello,
    Joined,
    Message,
    Proof,
    Question,
    Ready,
    Reject,
    Remark,
    Reply,
    Stages,
    Target,
)
from .reading import bytes_of, columns_of, get, int_of, list_of, once, optional_bytes, row_of, short, text_of, value_of

__all__ = ["MAX_FRAME", "MAX_PORTS", "MAX_PRIVATE", "MAX_QPS", "VERSION", "check_names", "decode", "encode"]

VERSION = 1
MAX_FRAME = 512 * 1024
MAX_QPS = 4096
MAX_REGIONS = 256
MAX_PORTS = 16
MAX_PRIVATE = 4096
MAX_NAME = 256
MAX_TEXT = 2048
MAX_ERRNO = 4095
MAX_STAGES = 64
MAX_STAGE = 16
MAX_REMARKS = 32
#: characters of the parts of a remark
REMARK = {"verdict": 16, "name": 64, "words": 512, "fix": 512}
MAX_US = 2**53
MAX_MS = 2**31 - 1
#: first bytes of arrays and maps, and how many such bytes a frame may have: the longest sound ones have fewer, those
#: in their numbers and names counted
MAX_CONTAINERS = 128 * 1024
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
TOKEN = 16


def encode(message: Message) -> bytes:
    """The bytes of one message.

    Args:
        message: any of them.

    Returns:
        One frame.

    Raises:
        ValueError: if it would be larger than ``MAX_FRAME``, or names regions that the peer would refuse.
    """
    kind, put = _ENCODERS[type(message)]
    frame: bytes = msgpack.packb({"v": VERSION, "t": kind, "id": message.id, **put(message)}, unicode_errors="replace")
    if len(frame) > MAX_FRAME:
        raise ValueError(f"the {kind} is {len(frame)} bytes long: at most {MAX_FRAME} may be sent")
    return frame


def decode(frame: bytes) -> Message | None:
    """One message from its bytes.

    Args:
        frame: as it came; nothing in it is trusted.

    Returns:
        The message, every value in range; None for one of a type that this side does not know, which a later
        version may send.

    Raises:
        RemoteProtocolError: if it is too long, not MessagePack, of another version, or invalid in any part.
    """
    if len(frame) > MAX_FRAME:
        raise RemoteProtocolError(f"decode: the peer's frame has {len(frame)} bytes, at most {MAX_FRAME} are taken.")
    # these bytes begin the arrays and maps, of which each costs far more to make than to send; others may be like them
    if len(frame) - len(frame.translate(None, _CONTAINERS)) > MAX_CONTAINERS:
        raise RemoteProtocolError(f"decode: the peer's {len(frame)} bytes have too many arrays and maps in them.")
    try:
        body = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.UnpackException) as e:
        raise RemoteProtocolError(
            f"decode: the peer's {len(frame)} bytes are not a message ({type(e).__name__}). "
            "Is it rdmaconnect that listens on that port?"
        ) from None
    if not isinstance(body, dict) or "v" not in body:
        raise RemoteProtocolError("decode: the peer's frame has no version. Is it rdmaconnect on that port?")
    if body["v"] != VERSION or type(body["v"]) is not int:
        raise RemoteProtocolError(
            f"decode: the peer speaks version {short(body['v'])} of the protocol, this side {VERSION}. "
            "Install the same major version of rdmaconnect on both."
        )
    try:
        kind = get(body, "t", str)
        reader = _DECODERS.get(kind)
        ident = bytes_of(body, "id", 16, 16)
        return None if reader is None else reader(ident, body)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise RemoteProtocolError(f"decode: the peer's message is invalid: {short(e, 200)}.") from None


# ---- one pair for each thing that a message carries


def _put_gid(entry: GidEntry | None) -> list[Any] | None:
    return None if entry is None else [entry.gid.raw, int(entry.gid_type), entry.gid_index, entry.netdev]


def _take_gid(value: Any) -> GidEntry:
    raw, kind, index, netdev = row_of(value, bytes, int, int, str)
    return GidEntry(Gid(raw), GidType(kind), index, text_of({"netdev": netdev}, "netdev", 64))


def _put_port(port: PortAddress) -> dict[str, Any]:
    return {
        "dev": port.device,
        "num": port.port_num,
        "ll": int(port.link_layer),
        "lid": port.lid,
        "mtu": int(port.active_mtu),
        "grh": port.grh_required,
        "pkeys": list(port.pkeys),
        "ord": port.max_rd_atomic,
        "ird": port.max_dest_rd_atomic,
        "gids": [_put_gid(entry) for entry in port.gids],
        **_put_given(msz=port.max_msg_sz),
    }


@once
def _take_port(body: Any) -> PortAddress:
    return PortAddress(
        device=text_of(body, "dev", 64),
        port_num=get(body, "num", int),
        link_layer=LinkLayer(int_of(body, "ll", 255)),
        lid=get(body, "lid", int),
        active_mtu=Mtu(int_of(body, "mtu", 5, 1)),
        grh_required=get(body, "grh", bool),
        pkeys=tuple(list_of(body, "pkeys", 256)),
        max_rd_atomic=get(body, "ord", int),
        max_dest_rd_atomic=get(body, "ird", int),
        gids=tuple(_take_gid(value) for value in list_of(body, "gids", 256)),
        max_msg_sz=_take_given(body, "msz", 2**32 - 1),
    )


def check_names(regions: Collection[str]) -> None:
    """Refuse names of regions, or a number of them, that a peer would refuse.

    Raises:
        ValueError: more than 256, longer than 256 characters, or not printable text.
    """
    if len(regions) > MAX_REGIONS:
        raise ValueError(f"there are {len(regions)} regions: at most {MAX_REGIONS} may be named")
    for name in regions:
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"a region's name is {shown(name)}: give printable text of at most {MAX_NAME} characters")


def _put_side(message: Hello | Reply) -> dict[str, Any]:
    first, regions = message.ends[0], message.regions
    check_names(regions)
    if len(message.private_data) > MAX_PRIVATE:
        raise ValueError(f"private_data is {len(message.private_data)} bytes long: at most {MAX_PRIVATE} may be sent")
    return {
        "qpt": int(first.qp_type),
        "qps": [[end.qp_num, end.psn, end.qkey] for end in message.ends],
        "port": _put_port(first.port),
        "rsz": first.recv_size,
        "mem": {name: [r.addr, r.length, r.rkey] for name, r in regions.items()},
        "data": message.private_data,
    }


def _take_side(body: Any) -> tuple[tuple[Endpoint, ...], dict[str, RemoteRegion], bytes]:
    qp_type, port = QpType(int_of(body, "qpt", 255)), _take_port(get(body, "port", dict))
    rsz = get(body, "rsz", int)
    columns = columns_of(list_of(body, "qps", MAX_QPS, 1), int, int, int)
    ends = tuple(Endpoint(qp_type, n, psn, port, rsz, qkey) for n, psn, qkey in zip(*columns, strict=True))
    mem = get(body, "mem", dict)
    if len(mem) > MAX_REGIONS:
        raise ValueError(f"mem has {len(mem)} entries: at most {MAX_REGIONS} are allowed")
    regions = {}
    for name, value in mem.items():
        addr, length, rkey = row_of(value, int, int, int)
        regions[text_of({"name": name}, "name", MAX_NAME)] = RemoteRegion(addr, rkey, length)
    return ends, regions, bytes_of(body, "data", 0, MAX_PRIVATE)


def _put_wish(wish: Wish) -> dict[str, Any]:
    return {
        "mtu": int(wish.path_mtu), "sl": wish.sl, "tc": wish.traffic_class, "fl": wish.flow_label, "pkey": wish.pkey,
        "probe": wish.probe,
    }  # fmt: skip


@once
def _take_wish(body: Any) -> Wish:
    pkey = None if value_of(body, "pkey") is None else get(body, "pkey", int)
    return Wish(*_take_classes(body), pkey, get(body, "probe", bool))


def _take_classes(body: Any) -> tuple[Mtu, int, int, int]:
    return Mtu(int_of(body, "mtu", 5, 1)), get(body, "sl", int), get(body, "tc", int), get(body, "fl", int)


def _put_agreement(a: Agreement) -> dict[str, Any]:
    return {
        "cg": _put_gid(a.connector_gid), "lg": _put_gid(a.listener_gid),
        "mtu": int(a.path_mtu), "sl": a.sl, "tc": a.traffic_class, "fl": a.flow_label, "pkey": a.pkey,
    }  # fmt: skip


@once
def _take_agreement(body: Any) -> Agreement:
    values = [value_of(body, key) for key in ("cg", "lg")]
    mine, theirs = (None if value is None else _take_gid(value) for value in values)
    return Agreement(mine, theirs, *_take_classes(body), int_of(body, "pkey", 0x7FFF, 1))


def _errno(number: int) -> int:
    return number if 0 <= number <= MAX_ERRNO else 0


def _put_target(target: Target | None) -> list[Any] | None:
    return None if target is None else [target.device, target.port_num, target.connector_gid, target.listener_gid]


def _take_target(value: Any) -> Target | None:
    if value is None:
        return None
    device, port_num = row_of(value, str, int)
    gids = [optional_bytes({"gid": gid}, "gid", 16) for gid in value[2:4]]
    if len(gids) < 2:
        raise ValueError("want has fewer than 4 values")
    return Target(text_of({"dev": device}, "dev", 64), int_of({"num": port_num}, "num", 254, 1), *gids)


def _put_given(**values: int | bytes) -> dict[str, Any]:
    """Keys that may be missing: those without a value are."""
    return {key: value for key, value in values.items() if value}


def _take_given(body: Any, key: str, most: int, least: int = 0) -> int:
    return int_of(body, key, most, least) if key in body else 0


def _take_ports(body: Any) -> tuple[PortAddress, ...]:
    return tuple(_take_port(value) for value in list_of(body, "ports", MAX_PORTS))


def _put_stages(stages: Stages) -> dict[str, Any]:
    return {"doors": [[name[:MAX_STAGE], us] for name, us in stages[-MAX_STAGES:]]} if stages else {}


def _take_stages(body: Any) -> Stages:
    rows = list_of(body, "doors", MAX_STAGES) if "doors" in body else []
    if not rows:
        return ()
    names, times = columns_of(rows, str, int)
    text_of({"stage": max(names, key=len)}, "stage", MAX_STAGE)
    for us in (min(times), max(times)):
        int_of({"us": us}, "us", MAX_US)
    if not "".join(names).isprintable():
        names = tuple(text_of({"stage": name}, "stage", MAX_STAGE) for name in names)
    return tuple(zip(names, times, strict=True))


def _put_hello(m: Hello) -> dict[str, Any]:
    last = {"prev": m.prev, "want": _put_target(m.target), "meet": m.meet}
    more = _put_given(beat=m.beat_ms, patience=min(m.patience_ms, MAX_MS))
    return {**_put_side(m), "wish": _put_wish(m.wish), **last, **more}


def _take_hello(ident: bytes, body: Any) -> Hello:
    ends, regions, data = _take_side(body)
    prev, target = optional_bytes(body, "prev", 16), _take_target(value_of(body, "want"))
    return Hello(
        ident, ends, _take_wish(get(body, "wish", dict)), regions, data, prev, target, get(body, "meet", bool),
        _take_given(body, "beat", 60_000, 100), _take_given(body, "patience", MAX_MS),
    )  # fmt: skip


def _put_reply(m: Reply) -> dict[str, Any]:
    return {
        **_put_side(m),
        "agree": _put_agreement(m.agreement),
        "ports": [_put_port(port) for port in m.ports],
        **_put_stages(m.stages),
        **_put_given(token=m.token, beat=m.beat_ms),
    }


def _take_reply(ident: bytes, body: Any) -> Reply:
    ends, regions, data = _take_side(body)
    agreement = _take_agreement(get(body, "agree", dict))
    token = bytes_of(body, "token", TOKEN, TOKEN) if "token" in body else b""
    return Reply(
        ident, ends, agreement, regions, data, _take_ports(body), _take_stages(body), token,
        _take_given(body, "beat", 60_000, 100),
    )  # fmt: skip


def _put_reject(m: Reject) -> dict[str, Any]:
    words = {"stage": m.stage[:64], "errno": _errno(m.errno), "why": m.why[:MAX_TEXT]}
    return {**words, "ports": [_put_port(port) for port in m.ports], **_put_given(again=m.again_ms)}


def _take_reject(ident: bytes, body: Any) -> Reject:
    words = text_of(body, "stage", 64), int_of(body, "errno", MAX_ERRNO), text_of(body, "why", MAX_TEXT)
    return Reject(ident, *words, _take_ports(body), _take_given(body, "again", 60_000))


def _put_answer(m: Answer) -> dict[str, Any]:
    rows = [[text[:most] for text, most in zip(r, REMARK.values(), strict=True)] for r in m.remarks[:MAX_REMARKS]]
    return {"host": m.host[:MAX_NAME], "remarks": rows, "ports": [_put_port(port) for port in m.ports]}


def _take_answer(ident: bytes, body: Any) -> Answer:
    rows = [row_of(value, str, str, str, str) for value in list_of(body, "remarks", MAX_REMARKS)]
    texts = (
        (text_of({n: text}, n, most) for text, (n, most) in zip(row, REMARK.items(), strict=False)) for row in rows
    )
    return Answer(ident, text_of(body, "host", MAX_NAME), tuple(Remark(*row) for row in texts), _take_ports(body))


#: each type's name, how it is written, how it is read
_KINDS: tuple[tuple[type, str, Callable[[Any], dict[str, Any]], Callable[[bytes, Any], Message]], ...] = (
    (Hello, "hello", _put_hello, _take_hello),
    (Reply, "reply", _put_reply, _take_reply),
    (Ready, "ready", lambda m: _put_stages(m.stages), lambda ident, body: Ready(ident, _take_stages(body))),
    (Joined, "joined", lambda m: {}, lambda ident, body: Joined(ident)),
    (Proof, "proof", lambda m: _put_stages(m.stages), lambda ident, body: Proof(ident, _take_stages(body))),
    (Beat, "beat", lambda m: {}, lambda ident, body: Beat(ident)),
    (Reject, "reject", _put_reject, _take_reject),
    (Bye, "bye", lambda m: {"why": m.why[:MAX_TEXT]}, lambda ident, body: Bye(ident, text_of(body, "why", MAX_TEXT))),
    (Question, "question", lambda m: {}, lambda ident, body: Question(ident)),
    (Answer, "answer", _put_answer, _take_answer),
)
_ENCODERS = {kind: (name, put) for kind, name, put, _ in _KINDS}
_DECODERS = {name: take for _, name, _, take in _KINDS}
