"""The enums of `verbs.h` for packet steering and its counters, in the manner of `enums`."""

from __future__ import annotations

from .cenum import CEnum, CFlag, c_enum


@c_enum("ibv_flow_flags", "IBV_FLOW_ATTR_FLAGS_")
class FlowAttrFlags(CFlag):
    """`ibv_flow_attr.flags`. `DONT_TRAP`: later rules see the packet too. `EGRESS`: what is sent, not received."""

    DONT_TRAP = 1 << 1
    EGRESS = 1 << 2


@c_enum("ibv_flow_attr_type", "IBV_FLOW_ATTR_")
class FlowAttrType(CEnum):
    """What a steering rule catches.

    `NORMAL`: what its specs say. `ALL_DEFAULT`: all Ethernet packets that no other rule takes, `MC_DEFAULT`: the
    multicast ones among them. `SNIFFER`: a copy of all that the port sees.
    """

    NORMAL = 0
    ALL_DEFAULT = 1
    MC_DEFAULT = 2
    SNIFFER = 3


@c_enum("ibv_flow_spec_type", "IBV_FLOW_SPEC_")
class FlowSpecType(CEnum):
    """What a spec of a steering rule is about; `INNER` is added for the headers inside a tunnel."""

    ETH = 0x20
    IPV4 = 0x30
    IPV6 = 0x31
    IPV4_EXT = 0x32
    ESP = 0x34
    TCP = 0x40
    UDP = 0x41
    VXLAN_TUNNEL = 0x50
    GRE = 0x51
    MPLS = 0x60
    INNER = 0x100
    ACTION_TAG = 0x1000
    ACTION_DROP = 0x1001
    ACTION_HANDLE = 0x1002
    ACTION_COUNT = 0x1003


@c_enum("ibv_counter_description", "IBV_COUNTER_")
class CounterDescription(CEnum):
    """What a counter that is attached to a steering rule counts."""

    PACKETS = 0
    BYTES = 1


@c_enum("ibv_read_counters_flags", "IBV_READ_COUNTERS_ATTR_")
class ReadCountersFlags(CFlag):
    """`PREFER_CACHED`: the values that the driver read last will do; the device need not be asked."""

    PREFER_CACHED = 1 << 0
