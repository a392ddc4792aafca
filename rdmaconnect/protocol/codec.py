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
            f"decode: the peer speaks version {_short(body['v'])} of the protocol, this side {VERSION}. "
            "Install the same major version of rdmaconnect on both."
        )
    try:
        kind = _get(body, "t", str)
        reader = _DECODERS.get(kind)
        ident = _bytes(body, "id", 16, 16)
        return None if reader is None else reader(ident, body)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise RemoteProtocolError(f"decode: the peer's message is invalid: {_short(e, 200)}.") from None


def _short(value: object, limit: int = 60) -> str:
    """What a peer sent, made safe for a line of text; of what may be nested too deep to print, the type."""
    text = type(value).__name__ if isinstance(value, list | dict) else str(value)
    return ascii(text)[1:-1][:limit]


def _value(body: Any, key: str) -> Any:
    if not isinstance(body, dict) or key not in body:
        raise ValueError(f"{key} is missing")
    return body[key]


def _get(body: Any, key: str, kind: type[Any]) -> Any:
    value = _value(body, key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _list(body: Any, key: str, most: int, least: int = 0) -> list[Any]:
    value = _get(body, key, list)
    if not least <= len(value) <= most:
        raise ValueError(f"{key} has {len(value)} entries: {least} to {most} are allowed")
    return list(value)


def _row(value: Any, *kinds: type[Any]) -> list[Any]:
    if not isinstance(value, list) or len(value) < len(kinds):
        raise ValueError(f"an entry is {_short(value)}: {len(kinds)} values are due")
    if tuple(map(type, value)) == kinds:
        return value
    return [_get({"entry": v}, "entry", kind) for v, kind in zip(value, kinds, strict=False)]


def _text(body: Any, key: str, most: int) -> str:
    value = _get(body, key, str)
    if len(value) > most:
        raise ValueError(f"{key} has {len(value)} characters: at most {most} are allowed")
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def _int(body: Any, key: str, most: int, least: int = 0) -> int:
    value: int = _get(body, key, int)
    if not least <= value <= most:
        raise ValueError(f"{key} is {value}: {least} to {most} are allowed")
    return value


def _bytes(body: Any, key: str, least: int, most: int) -> bytes:
    value: bytes = _get(body, key, bytes)
    if not least <= len(value) <= most:
        raise ValueError(f"{key} has {len(value)} bytes: {least} to {most} are allowed")
    return value


def _optional_bytes(body: Any, key: str, size: int) -> bytes | None:
    return None if _value(body, key) is None else _bytes(body, key, size, size)


# ---- one pair for each thing that a message carries


def _put_gid(entry: GidEntry | None) -> list[Any] | None:
    return None if entry is None else [entry.gid.raw, int(entry.gid_type), entry.gid_index, entry.netdev]


def _take_gid(value: Any) -> GidEntry:
    raw, kind, index, netdev = _row(value, bytes, int, int, str)
    return GidEntry(Gid(raw), GidType(kind), index, _text({"netdev": netdev}, "netdev", 64))


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


def _take_port(body: Any) -> PortAddress:
    return PortAddress(
        device=_text(body, "dev", 64),
        port_num=_get(body, "num", int),
        link_layer=LinkLayer(_int(body, "ll", 255)),
        lid=_get(body, "lid", int),
        active_mtu=Mtu(_int(body, "mtu", 5, 1)),
        grh_required=_get(body, "grh", bool),
        pkeys=tuple(_list(body, "pkeys", 256)),
        max_rd_atomic=_get(body, "ord", int),
        max_dest_rd_atomic=_get(body, "ird", int),
        gids=tuple(_take_gid(value) for value in _list(body, "gids", 256)),
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
    qp_type, port = QpType(_int(body, "qpt", 255)), _take_port(_get(body, "port", dict))
    rsz = _get(body, "rsz", int)
    qps = [_row(value, int, int, int) for value in _list(body, "qps", MAX_QPS, 1)]
    ends = tuple(Endpoint(qp_type, qp_num, psn, port, rsz, qkey) for qp_num, psn, qkey in qps)
    mem = _get(body, "mem", dict)
    if len(mem) > MAX_REGIONS:
        raise ValueError(f"mem has {len(mem)} entries: at most {MAX_REGIONS} are allowed")
    regions = {}
    for name, value in mem.items():
        addr, length, rkey = _row(value, int, int, int)
        regions[_text({"name": name}, "name", MAX_NAME)] = RemoteRegion(addr, rkey, length)
    return ends, regions, _bytes(body, "data", 0, MAX_PRIVATE)


def _put_wish(wish: Wish) -> dict[str, Any]:
    return {
        "mtu": int(wish.path_mtu), "sl": wish.sl, "tc": wish.traffic_class, "fl": wish.flow_label, "pkey": wish.pkey,
        "probe": wish.probe,
    }  # fmt: skip


def _take_wish(body: Any) -> Wish:
    pkey = None if _value(body, "pkey") is None else _get(body, "pkey", int)
    return Wish(*_take_classes(body), pkey, _get(body, "probe", bool))


def _take_classes(body: Any) -> tuple[Mtu, int, int, int]:
    return Mtu(_int(body, "mtu", 5, 1)), _get(body, "sl", int), _get(body, "tc", int), _get(body, "fl", int)


def _put_agreement(a: Agreement) -> dict[str, Any]:
    return {
        "cg": _put_gid(a.connector_gid), "lg": _put_gid(a.listener_gid),
        "mtu": int(a.path_mtu), "sl": a.sl, "tc": a.traffic_class, "fl": a.flow_label, "pkey": a.pkey,
    }  # fmt: skip


def _take_agreement(body: Any) -> Agreement:
    mine, theirs = (None if (gid := _value(body, key)) is None else _take_gid(gid) for key in ("cg", "lg"))
    return Agreement(mine, theirs, *_take_classes(body), _int(body, "pkey", 0x7FFF, 1))


def _errno(number: int) -> int:
    return number if 0 <= number <= MAX_ERRNO else 0


def _put_target(target: Target | None) -> list[Any] | None:
    return None if target is None else [target.device, target.port_num, target.connector_gid, target.listener_gid]


def _take_target(value: Any) -> Target | None:
    if value is None:
        return None
    device, port_num = _row(value, str, int)
    gids = [_optional_bytes({"gid": gid}, "gid", 16) for gid in value[2:4]]
    if len(gids) < 2:
        raise ValueError("want has fewer than 4 values")
    return Target(_text({"dev": device}, "dev", 64), _int({"num": port_num}, "num", 254, 1), *gids)


def _put_given(**values: int | bytes) -> dict[str, Any]:
    """Keys that may be missing: those without a value are."""
    return {key: value for key, value in values.items() if value}


def _take_given(body: Any, key: str, most: int, least: int = 0) -> int:
    return _int(body, key, most, least) if key in body else 0


def _take_ports(body: Any) -> tuple[PortAddress, ...]:
    return tuple(_take_port(value) for value in _list(body, "ports", MAX_PORTS))


def _put_stages(stages: Stages) -> dict[str, Any]:
    return {"doors": [[name[:MAX_STAGE], us] for name, us in stages[-MAX_STAGES:]]} if stages else {}


def _take_stages(body: Any) -> Stages:
    rows = [_row(value, str, int) for value in (_list(body, "doors", MAX_STAGES) if "doors" in body else ())]
    return tuple((_text({"stage": name}, "stage", MAX_STAGE), _int({"us": us}, "us", MAX_US)) for name, us in rows)


def _put_hello(m: Hello) -> dict[str, Any]:
    last = {"prev": m.prev, "want": _put_target(m.target), "meet": m.meet}
    more = _put_given(beat=m.beat_ms, patience=min(m.patience_ms, MAX_MS))
    return {**_put_side(m), "wish": _put_wish(m.wish), **last, **more}


def _take_hello(ident: bytes, body: Any) -> Hello:
    ends, regions, data = _take_side(body)
    prev, target = _optional_bytes(body, "prev", 16), _take_target(_value(body, "want"))
    return Hello(
        ident, ends, _take_wish(_get(body, "wish", dict)), regions, data, prev, target, _get(body, "meet", bool),
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
    agreement = _take_agreement(_get(body, "agree", dict))
    token = _bytes(body, "token", TOKEN, TOKEN) if "token" in body else b""
    return Reply(
        ident, ends, agreement, regions, data, _take_ports(body), _take_stages(body), token,
        _take_given(body, "beat", 60_000, 100),
    )  # fmt: skip


def _put_reject(m: Reject) -> dict[str, Any]:
    words = {"stage": m.stage[:64], "errno": _errno(m.errno), "why": m.why[:MAX_TEXT]}
    return {**words, "ports": [_put_port(port) for port in m.ports], **_put_given(again=m.again_ms)}


def _take_reject(ident: bytes, body: Any) -> Reject:
    words = _text(body, "stage", 64), _int(body, "errno", MAX_ERRNO), _text(body, "why", MAX_TEXT)
    return Reject(ident, *words, _take_ports(body), _take_given(body, "again", 60_000))


def _put_answer(m: Answer) -> dict[str, Any]:
    rows = [[text[:most] for text, most in zip(r, REMARK.values(), strict=True)] for r in m.remarks[:MAX_REMARKS]]
    return {"host": m.host[:MAX_NAME], "remarks": rows, "ports": [_put_port(port) for port in m.ports]}


def _take_answer(ident: bytes, body: Any) -> Answer:
    rows = [_row(value, str, str, str, str) for value in _list(body, "remarks", MAX_REMARKS)]
    texts = ((_text({n: text}, n, most) for text, (n, most) in zip(row, REMARK.items(), strict=False)) for row in rows)
    return Answer(ident, _text(body, "host", MAX_NAME), tuple(Remark(*row) for row in texts), _take_ports(body))


#: each type's name, how it is written, how it is read
_KINDS: tuple[tuple[type, str, Callable[[Any], dict[str, Any]], Callable[[bytes, Any], Message]], ...] = (
    (Hello, "hello", _put_hello, _take_hello),
    (Reply, "reply", _put_reply, _take_reply),
    (Ready, "ready", lambda m: _put_stages(m.stages), lambda ident, body: Ready(ident, _take_stages(body))),
    (Joined, "joined", lambda m: {}, lambda ident, body: Joined(ident)),
    (Proof, "proof", lambda m: _put_stages(m.stages), lambda ident, body: Proof(ident, _take_stages(body))),
    (Beat, "beat", lambda m: {}, lambda ident, body: Beat(ident)),
    (Reject, "reject", _put_reject, _take_reject),
    (Bye, "bye", lambda m: {"why": m.why[:MAX_TEXT]}, lambda ident, body: Bye(ident, _text(body, "why", MAX_TEXT))),
    (Question, "question", lambda m: {}, lambda ident, body: Question(ident)),
    (Answer, "answer", _put_answer, _take_answer),
)
_ENCODERS = {kind: (name, put) for kind, name, put, _ in _KINDS}
_DECODERS = {name: take for _, name, _, take in _KINDS}
