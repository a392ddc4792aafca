"""Steering rules and their counters: the bytes that the device gets, and what must outlive what."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from software import Software

from rdmaconnect.abi import (
    CounterDescription,
    FlowAttrFlags,
    FlowAttrType,
    FlowSpecType,
    QpType,
    ReadCountersFlags,
    ibv_flow_spec_eth,
    ibv_flow_spec_ipv4,
    ibv_flow_spec_tcp_udp,
)
from rdmaconnect.errors import LibraryError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.steering import Counters, Flow, count, drop, match, tag

T = FlowSpecType


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


@pytest.fixture
def qp(context: Context) -> Iterator[QueuePair]:
    with (
        PD(context) as pd,
        CQ(context, 8) as cq,
        QueuePair(pd, cq, cq, QpType.UD, max_send_wr=1, max_recv_wr=1) as made,
    ):
        yield made


def rules(software: Software) -> list[Any]:
    """The rules in the device."""
    from software.arena import ALIVE

    return [one for one in ALIVE.values() if one.kind == "flow" and one.world is software]


def test_a_rule_is_one_piece_of_memory_in_network_byte_order(software: Software, qp: QueuePair) -> None:
    specs = [
        match(T.ETH, {"dst_mac": "02:00:00:00:00:0a", "ether_type": 0x0800}),
        match(T.IPV4, {"dst_ip": "10.0.0.7", "src_ip": ipaddress.ip_address("10.0.0.1")}, {"src_ip": 0xFFFFFF00}),
        match(T.UDP, {"dst_port": 4791}, inner=True),
        tag(0x123456),
    ]
    with Flow(qp, specs, priority=7, flags=FlowAttrFlags.DONT_TRAP) as flow:
        (rule,) = rules(software)
        head = rule.attr
        assert (head.type, head.priority, head.num_of_specs, head.port, head.flags) == (0, 7, 4, 1, 2)
        kinds = [kind for kind, _ in rule.specs]
        assert kinds == [T.ETH, T.IPV4, T(T.UDP | T.INNER), T.ACTION_TAG]
        eth = ibv_flow_spec_eth.from_buffer_copy(rule.specs[0][1])
        assert bytes(eth.val.dst_mac) == bytes.fromhex("02000000000a")
        assert bytes(eth.mask.dst_mac) == b"\xff" * 6
        assert bytes(eth.mask.src_mac) == bytes(6)
        assert rule.specs[0][1][ibv_flow_spec_eth.val.offset + 12 :][:2] == b"\x08\x00"
        ipv4 = ibv_flow_spec_ipv4.from_buffer_copy(rule.specs[1][1])
        assert bytes(ctypes.c_uint32(ipv4.val.dst_ip)) == bytes([10, 0, 0, 7])
        assert bytes(ctypes.c_uint32(ipv4.val.src_ip)) == bytes([10, 0, 0, 1])
        assert bytes(ctypes.c_uint32(ipv4.mask.src_ip)) == bytes([255, 255, 255, 0])
        assert bytes(ctypes.c_uint32(ipv4.mask.dst_ip)) == b"\xff" * 4
        udp = ibv_flow_spec_tcp_udp.from_buffer_copy(rule.specs[2][1])
        assert bytes(ctypes.c_uint16(udp.val.dst_port)) == (4791).to_bytes(2, "big")
        assert (udp.mask.dst_port, udp.mask.src_port) == (0xFFFF, 0)
        assert rule.specs[3][1][8:12] == (0x123456).to_bytes(4, "little")
    assert flow.closed
    assert rules(software) == []


def test_an_ipv6_header_is_matched_by_its_address(software: Software, qp: QueuePair) -> None:
    with Flow(qp, [match(T.IPV6, {"dst_ip": "fe80::1", "flow_label": 0xABCDE, "hop_limit": 64}), drop()]):
        _, spec = rules(software)[0].specs[0]
        assert ipaddress.IPv6Address("fe80::1").packed in spec
        assert (0xABCDE).to_bytes(4, "big") in spec


def test_the_other_types_need_no_specs(software: Software, qp: QueuePair) -> None:
    with Flow(qp, flow_type=FlowAttrType.SNIFFER):
        assert (rules(software)[0].attr.type, rules(software)[0].specs) == (FlowAttrType.SNIFFER, [])


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (T.ACTION_TAG, {}, "match ACTION_TAG: give one of ETH, IPV4"),
        (T.TCP, {"port": 5}, "match TCP by port: its fields are dst_port, src_port"),
        (T.TCP, {"dst_port": 65536}, "dst_port is 65536: give 16 bits"),
        (T.ETH, {"dst_mac": "02:00"}, "dst_mac is 02:00: give 6 bytes"),
        (T.IPV4, {"dst_ip": "fe80::1"}, "dst_ip is fe:80:.*: give 4 bytes"),
        (T.IPV4, {"dst_ip": "nonsense"}, "nonsense"),
    ],
)
def test_what_cannot_be_matched_is_refused(kind: FlowSpecType, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        match(kind, values)


def test_counters_are_read_in_their_order(software: Software, context: Context, qp: QueuePair) -> None:
    from software.arena import ALIVE

    counters = Counters(context, [CounterDescription.BYTES, CounterDescription.PACKETS])
    (set_,) = [one for one in ALIVE.values() if one.kind == "counters" and one.world is software]
    assert set_.what == {0: CounterDescription.BYTES, 1: CounterDescription.PACKETS}
    assert counters.read() == (0, 0)
    set_.values = {0: 2**63, 1: 5}
    assert counters.read(ReadCountersFlags.PREFER_CACHED) == (2**63, 5)
    flow = Flow(qp, [match(T.ETH, {"ether_type": 0x0806}), count(counters)])
    counters.close()  # the rule that counts in it goes first
    assert flow.closed


def test_what_is_left_half_made_is_taken_back(software: Software, context: Context) -> None:
    with (
        software.on("ibv_attach_counters_point_flow", fail=errno.EOPNOTSUPP, nth=2),
        pytest.raises((VerbsError, LibraryError), match="attach a counter"),
    ):
        Counters(context)
    assert software.alive["counters"] == 0


def test_a_port_that_there_is_not_is_refused_by_the_device(qp: QueuePair) -> None:
    with pytest.raises(VerbsError, match="create a steering rule: ibv_create_flow: EINVAL"):
        Flow(qp, [drop()], port_num=9)
    with pytest.raises(ValueError, match="priority is 65536"):
        Flow(qp, [drop()], priority=65536)


def test_what_the_provider_lacks_is_said(software: Software, context: Context, qp: QueuePair) -> None:
    for verb, make in (("ibv_create_flow", lambda: Flow(qp)), ("ibv_create_counters", lambda: Counters(context))):
        with software.on(verb, fail=errno.EOPNOTSUPP), pytest.raises(LibraryError, match=f"{verb}: EOPNOTSUPP"):
            make()
