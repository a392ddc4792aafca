"""What one side of a connection asks for. Pure, frozen, validated when made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from ..abi import Mtu
from ..errors import shown
from .endpoint import MTU_BYTES
from .ranges import AH_RANGES, RANGES, Span, within
from .timers import DETECT_S, Timers, timers_for

__all__ = ["Options", "OptionsDict", "Sizes", "check_fields"]

_OF_QP = ("port_num", "timeout", "retry_cnt", "rnr_retry", "min_rnr_timer", "max_rd_atomic")
#: what the fields of :class:`Options` can be
_SPANS: dict[str, Span] = {
    **{name: RANGES[name] for name in _OF_QP},
    **{name: AH_RANGES[name] for name in ("sl", "traffic_class", "flow_label")},
    "gid_index": AH_RANGES["sgid_index"],
    "pkey": (1, 0xFFFF, "16 bits, and 0 is no key"),
    "hop_limit": (1, 255, "a packet with 0 goes nowhere"),
    "recv_size": (1, 2**30, "bytes"),
    "recv_depth": (1, 2**15, "receives"),
    "send_depth": (1, 2**15, "sends"),
    "max_inline_data": (0, 2**15, "bytes"),
    "spin": (0, 2**31, "polls"),
}


def check_fields(of: object, names: Iterable[str]) -> None:
    """Refuse a value of those fields, named as in :class:`Options`, that is out of its range; None is passed over.

    Raises:
        TypeError, ValueError: as :func:`within`.
    """
    for name in names:
        value = getattr(of, name)
        if value is not None:
            within(name, value, *_SPANS[name])


class Sizes(NamedTuple):
    """What each queue pair has: bytes of a receive, receives posted, sends on their way, bytes that go inline."""

    recv_size: int
    recv_depth: int
    send_depth: int
    max_inline_data: int = 64


class OptionsDict(TypedDict, total=False):
    """The fields of :class:`Options`, which tells what they mean, as keywords of a call."""

    device: str | None
    port_num: int | None
    gid_index: int | None
    path_mtu: int | None
    sl: int | None
    traffic_class: int | None
    flow_label: int | None
    pkey: int | None
    timeout: int | None
    retry_cnt: int | None
    detect_s: float | None
    rnr_retry: int
    min_rnr_timer: int
    max_rd_atomic: int | None
    hop_limit: int
    recv_size: int | None
    recv_depth: int | None
    send_depth: int | None
    max_inline_data: int
    spin: int
    probe: bool | None


@dataclass(frozen=True, slots=True)
class Options:
    """What one side asks for. None leaves the choice to the library.

    Args:
        device: name of the RDMA device, as ``rdmaconnect devices`` lists it.
        port_num: its port, from 1.
        gid_index: the slot of its GID table to use.
        path_mtu: the largest path MTU wished, in bytes: 256, 512, 1024, 2048 or 4096. The smaller of both ends' counts.
        sl: service level, 0 to 15, applied on both ends. It is the wish of either end; two that differ are refused.
            0 where nobody wishes.
        traffic_class: 0 to 255, likewise.
        flow_label: 20 bits, likewise.
        pkey: partition key by value, 16 bits, likewise; the first in common where nobody wishes.
        timeout: the ACK-timeout *code*: 4.096 us x 2**timeout, 0 to 31; 14, which is 67 ms, where ``detect_s`` does
            not say otherwise. 0 waits for ever.
        retry_cnt: retries after a timeout, 0 to 7; 3 likewise. Some devices take 7 for ever.
        detect_s: instead of these two: the seconds, 1 to 100000, after which a peer that does not answer is given up
            at the latest, by the model of :mod:`~rdmaconnect.agreement.timers`; 2 by default.
        rnr_retry: retries while the peer has no receive posted, 0 to 6; 7 for ever.
        min_rnr_timer: the code of the pause asked of a peer that sends too early, 0 to 31. 12 is 0.64 ms.
        max_rd_atomic: most RDMA reads and atomics outstanding, 0 to 255.
        hop_limit: 1 to 255.
        recv_size: bytes of each posted receive, 1 to 2**30: the longest message that the peer may send.
            65536 by default, 16384 where several queue pairs are made at once, an MTU at most for UD.
        recv_depth: receives kept posted, 1 to 2**15; 16 by default, or 4.
        send_depth: sends that may be on their way at once, 1 to 2**15; 16 by default, or 4.
        max_inline_data: bytes wanted that a work request can carry itself, 0 to 2**15: what is so short and plain
            bytes is copied there and nowhere else. Where the device refuses there are none.
        spin: polls of the completion queue before a wait sleeps on its events; 0 sleeps at once.
        probe: whether messages are sent both ways and checked before the connection is handed out. It is done unless
            one of the two ends says False, or leaves its completions to its application (``send_cq``).
    """

    device: str | None = None
    port_num: int | None = None
    gid_index: int | None = None
    path_mtu: int | None = None
    sl: int | None = None
    traffic_class: int | None = None
    flow_label: int | None = None
    pkey: int | None = None
    timeout: int | None = None
    retry_cnt: int | None = None
    detect_s: float | None = None
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    max_rd_atomic: int | None = None
    hop_limit: int = 64
    recv_size: int | None = None
    recv_depth: int | None = None
    send_depth: int | None = None
    max_inline_data: int = 64
    spin: int = 500
    probe: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, str | None):
            raise TypeError(f"device is {shown(self.device)}: give its name, or None for any")
        if not isinstance(self.probe, bool | None):
            raise TypeError(f"probe is {shown(self.probe)}: give True or False")
        check_fields(self, _SPANS)
        if self.detect_s is not None:
            if self.timeout is not None or self.retry_cnt is not None:
                raise ValueError(
                    f"detect_s is {shown(self.detect_s)}, which sets timeout and retry_cnt, and they are given too: "
                    "give the one or the others"
                )
            timers_for(self.detect_s)
        sizes = MTU_BYTES.values()
        if self.path_mtu is not None and not (isinstance(self.path_mtu, int) and self.path_mtu in sizes):
            raise ValueError(f"path_mtu is {shown(self.path_mtu)}: give {', '.join(map(str, sizes))} bytes")

    def sizes(self, count: int = 1) -> Sizes:
        """The sizes for ``count`` queue pairs made at once, with what was left open filled in."""
        least = Sizes(65536, 16, 16) if count == 1 else Sizes(16384, 4, 4)
        return Sizes(
            self.recv_size or least.recv_size,
            self.recv_depth or least.recv_depth,
            self.send_depth or least.send_depth,
            self.max_inline_data,
        )

    @property
    def timers(self) -> Timers:
        """``timeout`` and ``retry_cnt``: as given, or by ``detect_s``."""
        timeout, retry_cnt = timers_for(DETECT_S if self.detect_s is None else self.detect_s)
        return Timers(
            timeout if self.timeout is None else self.timeout, retry_cnt if self.retry_cnt is None else self.retry_cnt
        )

    @property
    def mtu(self) -> Mtu:
        """``path_mtu`` as a code; the greatest if there is no wish."""
        return mtu_code(self.path_mtu or 4096)


def mtu_code(size: int) -> Mtu:
    """The code of an MTU of ``size`` bytes, one of 256, 512, 1024, 2048 and 4096."""
    return Mtu((size // 128).bit_length() - 1)
