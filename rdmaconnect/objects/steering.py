"""Packet steering: rules that say which packets a queue pair receives, and counters of what they catch."""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import abi, verbs
from ..abi import CounterDescription, FlowAttrFlags, FlowAttrType, FlowSpecType, ReadCountersFlags, ibv_flow_attr
from .context import Context
from .fields import bits, put
from .locks import exclusive
from .owned import Owned
from .queuepair import QueuePair

__all__ = ["Counters", "Flow", "Spec", "count", "drop", "match", "tag"]

#: kind of a spec that looks at a packet -> its struct
_MATCHES: dict[FlowSpecType, Any] = {
    FlowSpecType.ETH: abi.ibv_flow_spec_eth,
    FlowSpecType.IPV4: abi.ibv_flow_spec_ipv4,
    FlowSpecType.IPV6: abi.ibv_flow_spec_ipv6,
    FlowSpecType.IPV4_EXT: abi.ibv_flow_spec_ipv4_ext,
    FlowSpecType.ESP: abi.ibv_flow_spec_esp,
    FlowSpecType.TCP: abi.ibv_flow_spec_tcp_udp,
    FlowSpecType.UDP: abi.ibv_flow_spec_tcp_udp,
    FlowSpecType.VXLAN_TUNNEL: abi.ibv_flow_spec_tunnel,
    FlowSpecType.GRE: abi.ibv_flow_spec_gre,
    FlowSpecType.MPLS: abi.ibv_flow_spec_mpls,
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One part of a rule; :func:`match`, :func:`tag`, :func:`drop` and :func:`count` make them.

    Args:
        struct: ``struct ibv_flow_spec_*``, all of it.
        counters: the counters that it names, which must outlive the rule.
    """

    struct: Any = field(repr=False)
    counters: Counters | None = None


def match(
    kind: FlowSpecType, values: Mapping[str, Any], masks: Mapping[str, Any] | None = None, *, inner: bool = False
) -> Spec:
    """What a packet must have to be caught.

    Args:
        kind: the header that it is about.
        values: field of the header's filter in C (``abi.structs_steering``) -> value: numbers in host order,
            addresses as text, ``ipaddress`` objects or numbers, MAC addresses as 6 bytes or text.
        masks: which bits of a field count, by default all of those that are given. Most devices take only all or
            none.
        inner: it is about the header inside of a tunnel.

    Raises:
        ValueError: a kind that is no header, a field that it does not have, a value that does not fit.
    """
    struct_type = _MATCHES.get(kind)
    if struct_type is None:
        raise ValueError(f"match {kind}: give one of {', '.join(map(str, _MATCHES))}")
    struct = struct_type()
    names = [name for name, *_ in struct.val._fields_]
    for given, part in ((values, struct.val), (dict.fromkeys(values) | dict(masks or {}), struct.mask)):
        for name, value in given.items():
            if name not in names:
                raise ValueError(f"match {kind} by {name}: its fields are {', '.join(names)}")
            _set(part, name, value)
    return _spec(struct, kind | (FlowSpecType.INNER if inner else 0))


def _set(part: Any, name: str, value: Any) -> None:
    """Put a value into a filter, in network byte order; None stands for all bits."""
    place = getattr(type(part), name)
    data = b"\xff" * place.size if value is None else _in_network_order(name, value, place.size)
    ctypes.memmove(ctypes.addressof(part) + place.offset, data, place.size)


def _in_network_order(name: str, value: Any, size: int) -> bytes:
    if isinstance(value, str):
        value = bytes.fromhex(value.replace(":", "")) if "mac" in name else ipaddress.ip_address(value)
    if isinstance(value, ipaddress.IPv4Address | ipaddress.IPv6Address):
        value = value.packed
    data = bits(name, value, 8 * size).to_bytes(size, "big") if isinstance(value, int) else bytes(value)
    if len(data) != size:
        raise ValueError(f"{name} is {data.hex(':')}: give {size} bytes")
    return data


def tag(number: int) -> Spec:
    """Mark what is caught: completions of a queue with ``CqWcFlags.FLOW_TAG`` tell the number, 24 bits on most devices.

    Raises:
        ValueError: more than 32 bits.
    """
    return _spec(put(abi.ibv_flow_spec_action_tag(), tag_id=number), FlowSpecType.ACTION_TAG)


def drop() -> Spec:
    """Drop what is caught."""
    return _spec(abi.ibv_flow_spec_action_drop(), FlowSpecType.ACTION_DROP)


def count(counters: Counters) -> Spec:
    """Count what is caught."""
    struct = abi.ibv_flow_spec_counter_action()
    struct.counters = counters.pointer
    made = _spec(struct, FlowSpecType.ACTION_COUNT)
    return Spec(made.struct, counters)


def _spec(struct: Any, kind: int) -> Spec:
    struct.type, struct.size = int(kind), ctypes.sizeof(struct)
    return Spec(struct)


class Flow(Owned):
    """A steering rule: what it catches goes to a queue pair, until this is closed.

    Args:
        qp: the queue pair, RAW_PACKET or UD.
        specs: what a packet must have, and what is done with it; none for the types other than NORMAL.
        port_num: the port that packets come in on.
        flow_type: NORMAL, or a default rule, or a sniffer.
        priority: of rules that a packet fits, the one with the lowest number takes it; 16 bits.
        flags: ``FlowAttrFlags``.

    Raises:
        ValueError: a number that does not fit, counters of another device.
        VerbsError: EPERM without CAP_NET_RAW, EINVAL for what the device cannot match.
        LibraryError: EOPNOTSUPP where the provider has no steering (mlx5, mlx4 and bnxt_re do).

    Source: ibv_create_flow(3).
    """

    def __init__(
        self,
        qp: QueuePair,
        specs: Sequence[Spec] = (),
        *,
        port_num: int = 1,
        flow_type: FlowAttrType = FlowAttrType.NORMAL,
        priority: int = 0,
        flags: FlowAttrFlags | None = None,
    ) -> None:
        self.qp, self.context = qp, qp.context
        counters = dict.fromkeys(spec.counters for spec in specs if spec.counters is not None)
        for each in counters:
            if not each.context.is_same(qp.context):
                raise ValueError(f"steer packets to {qp.name}: {each.name} are of another device")
        size = ctypes.sizeof(ibv_flow_attr) + sum(ctypes.sizeof(spec.struct) for spec in specs)
        attr = put(ibv_flow_attr(), type=int(flow_type), size=size, priority=priority, num_of_specs=len(specs))
        put(attr, port=port_num, flags=int(flags or 0))
        # one piece of memory: the specs follow the head
        rule = ctypes.create_string_buffer(b"".join(bytes(part) for part in (attr, *(s.struct for s in specs))), size)
        head = ctypes.cast(rule, ctypes.POINTER(ibv_flow_attr))
        name = f"steering rule of {qp.name}"
        super().__init__(lambda: verbs.ibv_create_flow(qp.pointer, head), name, (qp, *counters))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_flow(pointer)


class Counters(Owned):
    """Counters of what steering rules catch, all 0 when made.

    Args:
        context: the device.
        what: what is counted, by place: PACKETS, BYTES.

    Attributes:
        what: as given.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none (mlx5 does), or cannot count that.

    Source: ibv_create_counters(3), ibv_attach_counters_point_flow(3).
    """

    def __init__(
        self,
        context: Context,
        what: Sequence[CounterDescription] = (CounterDescription.PACKETS, CounterDescription.BYTES),
    ) -> None:
        self.context, self.what = context, tuple(what)

        def make() -> Any:
            made = verbs.ibv_create_counters(context.pointer)
            try:
                for index, description in enumerate(what):
                    attr = abi.ibv_counter_attach_attr(counter_desc=int(description), index=index)
                    verbs.ibv_attach_counters_point_flow(made, attr)
            except BaseException:
                verbs.ibv_destroy_counters(made)
                raise
            return made

        super().__init__(make, f"counters of {context.name}", (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_counters(pointer)

    @exclusive
    def read(self, flags: ReadCountersFlags | None = None) -> tuple[int, ...]:
        """The values, in the order of :attr:`what`, 64 bits each.

        Args:
            flags: PREFER_CACHED: those that the driver read last will do.

        Source: ibv_read_counters(3).
        """
        return tuple(verbs.ibv_read_counters(self.pointer, len(self.what), int(flags or 0)))
