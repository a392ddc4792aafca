"""Address handles: made from a path, or back to where a message came from; and multicast groups."""

from __future__ import annotations

import dataclasses
import socket
from types import SimpleNamespace

import pytest
from ends import QKEY, end_on, ipv4_gid, joined
from nodes import Node

from rdmaconnect.abi import QpType, WcFlags
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.objects.address import AddressHandle, UdAddress, path_back
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import SendRequest

UD = QpType.UD


def own_path(node: Node, pd: PD) -> AhAttr:
    entry = ipv4_gid(pd.context)
    return AhAttr(port_num=1, is_global=1, dgid=entry.gid.raw, sgid_index=entry.gid_index, hop_limit=1)


def test_create_ah(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        attr = own_path(node1, pd)
        with node1.call(AddressHandle, pd, attr) as handle:
            assert handle.attr == attr
            assert not handle.closed


def test_destroy_ah(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        handle = node1.call(AddressHandle, pd, own_path(node1, pd))
        handle.close()
        handle.close()
        other = node1.call(AddressHandle, pd, own_path(node1, pd))
        pd.close()
        assert other.closed
        with pytest.raises(StateError, match="PD of rxe1 is closed"):
            AddressHandle(pd, other.attr)


def test_create_ah_roce_needs_a_grh(node1: Node) -> None:
    match = r"create an address handle: ibv_create_ah: EINVAL.*is_global must be 1"
    with open_device(node1.device) as context, PD(context) as pd, pytest.raises(VerbsError, match=match):
        AddressHandle(pd, AhAttr(port_num=1, dlid=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port_num", 0), ("port_num", 255), ("sl", 16), ("dlid", 2**16), ("src_path_bits", 128), ("is_global", 2),
        ("flow_label", 2**20), ("sgid_index", 256), ("hop_limit", 256), ("traffic_class", -1), ("static_rate", 256),
    ],
)  # fmt: skip
def test_what_c_would_cut_off_is_refused(node1: Node, field: str, value: int) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        attr = dataclasses.replace(own_path(node1, pd), **{field: value})
        with pytest.raises(ValueError, match=rf"^ah_attr\.{field} is {value}: give "):
            AddressHandle(pd, attr)
        with pytest.raises(ValueError, match=r"ah_attr\.dgid has 4 bytes: give 16"):
            AddressHandle(pd, dataclasses.replace(attr, dgid=bytes(4), **{field: 1}))


def test_a_message_is_answered_to_where_it_came_from(node1: Node, node2: Node) -> None:
    with joined(node1, node2, UD) as (here, there):
        to = here.address_of(there)
        there.recv(0, 0)
        here.recv(0, 1000)
        here.qp.post_send(SendRequest().send(1, inline=b"ask", to=to))
        here.wait()
        asked = there.wait()[0]
        assert asked.wc_flags & WcFlags.GRH
        attr = node2.call(path_back, there.context, 1, asked, there.memory)
        assert (attr.is_global, attr.port_num, attr.dgid) == (1, 1, here.gid.gid.raw)
        assert attr.sgid_index == there.gid.gid_index
        with node2.call(AddressHandle.reply_to, there.pd, 1, asked, there.memory[:40]) as back:
            assert back.attr == attr
            there.qp.post_send(SendRequest().send(2, inline=b"answer", to=UdAddress(back, asked.src_qp, QKEY)))
            there.wait()
            assert here.wait()[0].byte_len == 46
        assert here.memory[1040:1046] == b"answer"


def test_there_is_no_way_back_from_what_is_no_header(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        wc = SimpleNamespace(wc_flags=1, slid=0, sl=0, dlid_path_bits=0, src_qp=1)
        with pytest.raises(ValueError, match="a buffer of 39 bytes has no room for a GRH: give the first 40"):
            path_back(context, 1, wc, bytes(39))
        with pytest.raises(VerbsError, match=r"find the path back.*ibv_init_ah_from_wc"):
            path_back(context, 1, wc, bytes(40))
        with pytest.raises(VerbsError, match=r"ibv_create_ah_from_wc|ibv_init_ah_from_wc"):
            AddressHandle.reply_to(pd, 1, wc, bytes(40))


@pytest.mark.parametrize("name", ["remote_qpn", "remote_qkey"])
def test_whom_it_is_for_has_its_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is -1"):
        UdAddress(None, **{"remote_qpn": 1, "remote_qkey": 1, name: -1})  # type: ignore[arg-type]


def _in_the_group(address: str) -> socket.socket:
    """The IP stack takes a group's packets only while it is in the group: rdma_cm does this for its users."""
    member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    addresses = socket.inet_aton("239.1.2.3") + socket.inet_aton(address)
    member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, addresses)
    return member


def test_a_multicast_group_is_joined_and_left(node1: Node, node2: Node) -> None:
    group = Gid.parse("239.1.2.3")
    with joined(node1, node2, UD) as (here, there), node2.call(_in_the_group, node2.address):
        node2.call(there.qp.attach_mcast, group)
        there.recv(5, 0)
        path = dataclasses.replace(here.path_to(there), dgid=group.raw)
        with node1.call(AddressHandle, here.pd, path) as handle:
            here.qp.post_send(SendRequest().send(1, inline=b"all", to=UdAddress(handle, 0xFFFFFF, QKEY)))
            here.wait()
            assert there.wait()[0].wr_id == 5
        assert there.memory[40:43] == b"all"
        with pytest.raises(VerbsError, match="leave a multicast group"):
            there.qp.detach_mcast(Gid.parse("239.9.9.9"))
        node2.call(there.qp.detach_mcast, group)
        with pytest.raises(VerbsError, match="ibv_detach_mcast"):
            there.qp.detach_mcast(group)


def test_closing_leaves_the_groups_first(node1: Node) -> None:
    with end_on(node1, UD, 1) as end:
        node1.call(end.qp.attach_mcast, Gid.parse("239.1.2.3"))
        node1.call(end.qp.attach_mcast, Gid.parse("ff0e::5"))
        node1.call(end.qp.close)
        assert end.qp.closed
    match = "join a multicast group: ibv_attach_mcast: EINVAL"
    with end_on(node1, QpType.RC, 1) as end, pytest.raises(VerbsError, match=match):
        end.qp.attach_mcast(Gid.parse("239.1.2.3"))
    with end_on(node1, UD, 1) as end, pytest.raises(VerbsError, match="ibv_attach_mcast: EINVAL"):
        end.qp.attach_mcast(Gid.parse("10.9.0.1"))
