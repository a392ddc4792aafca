"""The bytes of the messages: MessagePack, read with distrust. ``docs/wire.md`` is the specification."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
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
    Resume,
    Stages,
    Unlisted,
)
from .reading import (
    MAX_FRAME,
    bytes_of,
    columns_of,
    flag_of,
    get,
    int_of,
    list_of,
    once,
    optional_bytes,
    row_of,
    short,
    text_of,
    unpack,
    value_of,
)
from .wanted import put_kinds, put_target, take_target

__all__ = [
    "MAX_FRAME", "MAX_PORTS", "MAX_PRIVATE", "MAX_QPS", "VERSION", "check_names", "decode", "encode", "put_hello",
    "take_hello",
]  # fmt: skip

VERSION = 1
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
MAX_DIFFERENCES = 16
MAX_DIFFERENCE = 512
#: characters of the parts of a remark
REMARK = {"verdict": 16, "name": 64, "words": 512, "fix": 512}
MAX_US = 2**53
MAX_MS = 2**31 - 1
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
    body = unpack(frame, "Is it rdmaconnect that listens on that port?")
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


def _take_gid(value: Any, here: bool = True) -> GidEntry:
    raw, kind, index, netdev = row_of(value, bytes, int, int, str)
    kind = int_of({"gid_type": kind}, "gid_type", 255)
    return GidEntry(Gid(raw), GidType(kind), index, text_of({"netdev": netdev}, "netdev", 64), here)


@lru_cache(maxsize=64)
def _put_port(port: PortAddress) -> dict[str, Any]:
    """Whoever packs it changes nothing in it: this host says the same of its ports in each message."""
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
        **_put_given(msz=port.max_msg_sz, away=[at for at, entry in enumerate(port.gids) if not entry.here]),
    }


@once
def _take_port(body: Any) -> PortAddress:
    away = {int_of({"away": at}, "away", 255) for at in (list_of(body, "away", 256) if "away" in body else ())}
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
        gids=tuple(_take_gid(value, at not in away) for at, value in enumerate(list_of(body, "gids", 256))),
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
    ends = Endpoint.several(qp_type, port, rsz, *columns_of(list_of(body, "qps", MAX_QPS, 1), int, int, int))
    mem = get(body, "mem", dict)
    if len(mem) > MAX_REGIONS:
        raise ValueError(f"mem has {len(mem)} entries: at most {MAX_REGIONS} are allowed")
    regions = {}
    for name, value in mem.items():
        addr, length, rkey = row_of(value, int, int, int)
        regions[text_of({"name": name}, "name", MAX_NAME)] = RemoteRegion(addr, rkey, length)
    return ends, regions, bytes_of(body, "data", 0, MAX_PRIVATE)


def _put_wish(wish: Wish) -> dict[str, Any]:
    classes = {"sl": wish.sl, "tc": wish.traffic_class, "fl": wish.flow_label}
    return {
        "mtu": int(wish.path_mtu),
        **{name: value or 0 for name, value in classes.items()},
        "pkey": wish.pkey,
        "probe": wish.probe,
        **_put_given(zero=[name for name, value in classes.items() if value == 0]),
    }


@once
def _take_wish(body: Any) -> Wish:
    pkey = None if value_of(body, "pkey") is None else get(body, "pkey", int)
    zero = [text_of({"zero": name}, "zero", 64) for name in (list_of(body, "zero", 256) if "zero" in body else ())]
    mtu, *values = _take_classes(body)
    named = zip(("sl", "tc", "fl"), values, strict=True)
    sl, tc, fl = (value if value or name in zero else None for name, value in named)
    return Wish(mtu, sl, tc, fl, pkey, get(body, "probe", bool))


def _take_classes(body: Any) -> tuple[Mtu, int, int, int]:
    return Mtu(int_of(body, "mtu", 5, 1)), get(body, "sl", int), get(body, "tc", int), get(body, "fl", int)


def _put_agreement(a: Agreement) -> dict[str, Any]:
    return {
        "cg": _put_gid(a.connector_gid), "lg": _put_gid(a.listener_gid),
        "mtu": int(a.path_mtu), "sl": a.sl, "tc": a.traffic_class, "fl": a.flow_label, "pkey": a.pkey,
        **({} if a.probe else {"probe": False}),
    }  # fmt: skip


@once
def _take_agreement(body: Any) -> Agreement:
    values = [value_of(body, key) for key in ("cg", "lg")]
    mine, theirs = (None if value is None else _take_gid(value) for value in values)
    probe = get(body, "probe", bool) if "probe" in body else True
    return Agreement(mine, theirs, *_take_classes(body), int_of(body, "pkey", 0x7FFF, 1), probe)


def _errno(number: int) -> int:
    return number if 0 <= number <= MAX_ERRNO else 0


def _put_given(**values: Any) -> dict[str, Any]:
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


def put_hello(m: Hello) -> dict[str, Any]:
    """What a hello says besides its id."""
    last = {"prev": m.prev, "want": put_target(m.target), "meet": m.meet}
    more = _put_given(beat=m.beat_ms, patience=min(m.patience_ms, MAX_MS), kinds=put_kinds(m.target))
    return {**_put_side(m), "wish": _put_wish(m.wish), **last, **more}


def take_hello(ident: bytes, body: Any) -> Hello:
    """The same hello, with its id.

    Raises:
        ValueError, TypeError, OverflowError: it is invalid.
    """
    ends, regions, data = _take_side(body)
    kinds = list_of(body, "kinds", 256, 2)[:2] if "kinds" in body else []
    prev, target = optional_bytes(body, "prev", 16), take_target(value_of(body, "want"), kinds)
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
    token = _token(body) if "token" in body else b""
    return Reply(
        ident, ends, agreement, regions, data, _take_ports(body), _take_stages(body), token,
        _take_given(body, "beat", 60_000, 100),
    )  # fmt: skip


def _token(body: Any) -> bytes:
    return bytes_of(body, "token", TOKEN, TOKEN)


def _put_reject(m: Reject) -> dict[str, Any]:
    words = {"stage": m.stage[:64], "errno": _errno(m.errno), "why": m.why[:MAX_TEXT]}
    differences = [text[:MAX_DIFFERENCE] for text in m.differences[:MAX_DIFFERENCES]]
    ports = [_put_port(port) for port in m.ports]
    return {**words, "ports": ports, **_put_given(again=m.again_ms, differences=differences)}


def _take_reject(ident: bytes, body: Any) -> Reject:
    words = text_of(body, "stage", 64), int_of(body, "errno", MAX_ERRNO), text_of(body, "why", MAX_TEXT)
    rows = list_of(body, "differences", MAX_DIFFERENCES) if "differences" in body else ()
    differences = tuple(text_of({"difference": row}, "difference", MAX_DIFFERENCE) for row in rows)
    return Reject(ident, *words, _take_ports(body), _take_given(body, "again", 60_000), differences)


def _put_bye(m: Bye) -> dict[str, Any]:
    return {"why": m.why[:MAX_TEXT], **_put_given(lost=m.lost)}


def _take_bye(ident: bytes, body: Any) -> Bye:
    return Bye(ident, text_of(body, "why", MAX_TEXT), "lost" in body and get(body, "lost", bool))


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
    (Hello, "hello", put_hello, take_hello),
    (Reply, "reply", _put_reply, _take_reply),
    (Ready, "ready", lambda m: _put_stages(m.stages), lambda ident, body: Ready(ident, _take_stages(body))),
    (Joined, "joined", lambda m: {}, lambda ident, body: Joined(ident)),
    (Proof, "proof", lambda m: _put_stages(m.stages), lambda ident, body: Proof(ident, _take_stages(body))),
    (Beat, "beat", lambda m: _put_given(ask=m.ask), lambda ident, body: Beat(ident, flag_of(body, "ask"))),
    (Resume, "resume", lambda m: {"token": m.token}, lambda ident, body: Resume(ident, _token(body))),
    (Unlisted, "unlisted", lambda m: {}, lambda ident, body: Unlisted(ident)),
    (Reject, "reject", _put_reject, _take_reject),
    (Bye, "bye", _put_bye, _take_bye),
    (Question, "question", lambda m: {}, lambda ident, body: Question(ident)),
    (Answer, "answer", _put_answer, _take_answer),
)
_ENCODERS = {kind: (name, put) for kind, name, put, _ in _KINDS}
_DECODERS = {name: take for _, name, _, take in _KINDS}
