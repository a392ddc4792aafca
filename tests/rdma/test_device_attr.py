"""What a device, its ports and tables say, against the kernel's files and rdma-core's own programs."""

from __future__ import annotations

import errno
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
from nodes import Node

from rdmaconnect import DeviceError, LibraryError, StateError, VerbsError, verbs
from rdmaconnect.abi import DeviceCapFlags, GidType, NodeType, OdpGeneralCaps, OdpTransportCaps, TransportType
from rdmaconnect.cli.devinfo import describe, lines
from rdmaconnect.objects.context import Context, device_names, open_device
from rdmaconnect.objects.device_attr import DeviceAttr, guid_text
from rdmaconnect.objects.port import LinkSpeed, LinkWidth, PhysState


@pytest.fixture
def context(node1: Node) -> Iterator[Context]:
    with open_device(node1.device) as opened:
        yield opened


def sysfs(context: Context, path: str) -> str:
    return FilePath(f"/sys/class/infiniband/{context.name}/{path}").read_text().strip()


def lacking(verb: str) -> Any:
    """A verb that the library does not have."""

    def call(*_: object, **__: object) -> None:
        raise LibraryError(f"{verb}: absent in this test", errno.EOPNOTSUPP)

    return call


# ---- the device


def test_dev_list_and_open_dev(node1: Node) -> None:
    assert {"rxe1", "rxe2"} <= set(device_names())
    for name in device_names():
        with open_device(name) as opened:
            assert opened.name == name
            assert opened.query_device().phys_port_cnt == 1


def test_query_device_and_query_device_ex(context: Context) -> None:
    attr = context.query_device()
    plain = DeviceAttr.of(verbs.ibv_query_device(context.pointer))
    extended = DeviceAttr.of_ex(verbs.ibv_query_device_ex(context.pointer))
    assert attr == extended
    names = DeviceAttr.__match_args__
    head = names[: names.index("odp_caps")]
    assert [getattr(attr, name) for name in head] == [getattr(plain, name) for name in head]
    for limit in ("max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "max_pkeys", "vendor_id"):
        assert getattr(attr, limit) > 0, limit
    assert attr.max_mr_size > mmap.PAGESIZE
    assert attr.page_size_cap & mmap.PAGESIZE
    assert guid_text(attr.node_guid) == sysfs(context, "node_guid")
    assert guid_text(attr.sys_image_guid) == sysfs(context, "sys_image_guid")
    assert DeviceCapFlags.MEM_WINDOW & attr.device_cap_flags
    assert attr.device_cap_flags_ex is not None
    assert attr.device_cap_flags_ex & 0xFFFFFFFF == attr.device_cap_flags


def test_query_device_ex_shows_what_there_is_and_what_is_not(context: Context) -> None:
    attr = context.query_device()
    absent = {name for name in DeviceAttr.__match_args__ if getattr(attr, name) is None}
    assert absent >= {
        "tso_caps", "rss_caps", "packet_pacing_caps", "tm_caps", "cq_mod_caps", "pci_atomic_caps", "max_dm_size",
        "completion_timestamp_mask", "hca_core_clock", "max_wq_type_rq", "raw_packet_caps",
    }  # fmt: skip
    if attr.odp_caps is not None:  # rxe has it since kernel 6.13
        assert attr.odp_caps.general_caps & OdpGeneralCaps.SUPPORT
        assert attr.odp_caps.rc_odp_caps & OdpTransportCaps.SEND


def test_phys_port_cnt_ex(context: Context) -> None:
    attr = context.query_device()
    assert attr.phys_port_cnt_ex == attr.phys_port_cnt == attr.port_count == len(context.ports()) == 1


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_query_device_ex_the_plain_one_answers(
    context: Context, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: object) -> None:
        raise VerbsError("ibv_query_device_ex", number)

    monkeypatch.setattr(verbs, "ibv_query_device_ex", refuse)
    attr = context.query_device()
    assert attr.max_qp > 0
    assert (attr.odp_caps, attr.device_cap_flags_ex, attr.phys_port_cnt_ex) == (None, None, None)
    assert attr.port_count == 1
    monkeypatch.setattr(verbs, "ibv_query_device_ex", lacking("ibv_query_device_ex"))
    assert context.query_device() == attr
    number = errno.EIO
    monkeypatch.setattr(verbs, "ibv_query_device_ex", refuse)
    with pytest.raises(VerbsError, match="EIO"):
        context.query_device()


def test_an_old_library_has_no_room_for_the_extended_verb(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that lies in front of the library's table is not called: its memory is not even read."""
    real = verbs.abi.verbs_context
    monkeypatch.setattr(real, "query_device_ex", _Offset(real.query_device_ex, -(1 << 20)))
    with pytest.raises(LibraryError, match="ibv_query_device_ex: this libibverbs is older than it") as caught:
        verbs.op("ibv_query_device_ex", context.pointer)
    assert caught.value.errno == errno.EOPNOTSUPP
    plain = verbs.ibv_query_device(context.pointer)
    assert bytes(verbs.ibv_query_device_ex(context.pointer).orig_attr) == bytes(plain)
    assert context.query_device().odp_caps is None


class _Offset:
    def __init__(self, field: Any, offset: int) -> None:
        self.offset, self.size = offset, field.size


def test_who_the_device_is(context: Context, node1: Node) -> None:
    assert guid_text(context.guid) == sysfs(context, "node_guid")
    shown = json.loads(node1.run("rdma", "-j", "dev", "show", node1.device))
    assert context.index == shown[0]["ifindex"]
    assert (context.node_type, context.transport_type) == (NodeType.CA, TransportType.IB)
    assert context.num_comp_vectors >= 1


def test_the_raw_clock_that_rxe_lacks(context: Context) -> None:
    with pytest.raises(LibraryError, match=r"ibv_query_rt_values_ex: .*provider does not have it.*mlx5") as caught:
        context.query_rt_values()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_after_close_the_device_says_so(node1: Node) -> None:
    context = open_device(node1.device)
    context.close()
    for call in (
        context.query_device, context.ports, context.gid_table, context.query_rt_values, lambda: context.guid,
        lambda: context.num_comp_vectors, lambda: context.pkey_index(1, 0xFFFF), lambda: describe(context),
    ):  # fmt: skip
        with pytest.raises(StateError, match=f"{node1.device} is closed"):
            call()


# ---- the port


def test_query_port(context: Context) -> None:
    port = context.port(1)
    base = "ports/1"
    assert f"{int(port.state)}: {port.state}" == sysfs(context, f"{base}/state")
    assert int(port.phys_state) == int(sysfs(context, f"{base}/phys_state").split(":")[0])
    assert port.phys_state == PhysState.LINK_UP
    rate = sysfs(context, f"{base}/rate")
    lanes, gbps = port.active_width.lanes, port.active_speed.gbps
    assert lanes
    assert gbps
    assert rate.startswith(f"{lanes * gbps:g} Gb/sec ({lanes}X")
    assert (port.active_width.known, port.active_speed.known) == (True, True)
    assert isinstance(port.active_width, LinkWidth)
    assert isinstance(port.active_speed, LinkSpeed)
    assert int(port.port_cap_flags) == int(sysfs(context, f"{base}/cap_mask"), 16)
    assert port.lid == int(sysfs(context, f"{base}/lid"), 16)
    assert port.sm_lid == int(sysfs(context, f"{base}/sm_lid"), 16)
    assert port.lmc == int(sysfs(context, f"{base}/lid_mask_count"))
    assert port.sm_sl == int(sysfs(context, f"{base}/sm_sl"))
    assert port.gid_tbl_len == len(list(FilePath(f"/sys/class/infiniband/{context.name}/{base}/gids").iterdir()))
    assert port.pkey_tbl_len == len(port.pkeys) == 1
    assert port.max_msg_sz > 0x1000
    assert port.active_mtu <= port.max_mtu


def test_query_port_bad_flow(context: Context) -> None:
    for number in (0, 2, 200, 257):
        with pytest.raises(DeviceError, match=f"use port {number} of rxe1: it has port 1"):
            context.port(number)
    for number in (0, 2, 200):
        with pytest.raises(VerbsError, match="ibv_query_port: EINVAL"):
            verbs.ibv_query_port(context.pointer, number)


def test_query_pkey(context: Context) -> None:
    port = context.port(1)
    assert [f"{pkey:#06x}" for pkey in port.pkeys] == [sysfs(context, "ports/1/pkeys/0")]
    assert context.pkey_index(1, port.pkeys[0]) == 0
    assert verbs.ibv_get_pkey_index(context.pointer, 1, 0xFFFF) == 0
    with pytest.raises(DeviceError, match="use P_Key 0x1234 on rxe1 port 1: the table has 0xffff"):
        context.pkey_index(1, 0x1234)
    with pytest.raises(DeviceError, match="use port 3 of rxe1"):
        context.pkey_index(3, 0xFFFF)
    with pytest.raises(ValueError, match="pkey is 0x10000"):
        context.pkey_index(1, 0x10000)
    with pytest.raises(VerbsError, match="ibv_query_pkey"):
        verbs.ibv_query_pkey(context.pointer, 1, 5)


def test_query_gid_and_query_gid_ex_and_query_gid_table(context: Context) -> None:
    table = context.gid_table()
    assert len(table) >= 2
    for slot in table:
        assert slot.raw.hex() == sysfs(context, f"ports/1/gids/{slot.gid_index}").replace(":", "")
        assert verbs.ibv_query_gid(context.pointer, 1, slot.gid_index) == slot.raw
        entry = verbs.ibv_query_gid_ex(context.pointer, 1, slot.gid_index)
        assert (bytes(entry.gid.raw), entry.gid_index, entry.port_num) == (slot.raw, slot.gid_index, 1)
        assert GidType(entry.gid_type) == slot.gid_type == GidType.ROCE_V2
        assert entry.ndev_ifindex > 0
    assert [slot.gid_index for slot in table] == [gid.gid_index for gid in context.port(1).gids]


def test_query_gid_ex_bad_flow_an_empty_slot(context: Context) -> None:
    port = context.port(1)
    empty = next(i for i in range(port.gid_tbl_len) if i not in {slot.gid_index for slot in context.gid_table()})
    with pytest.raises(VerbsError, match="ENODATA") as caught:
        verbs.ibv_query_gid_ex(context.pointer, 1, empty)
    assert caught.value.errno == errno.ENODATA
    assert verbs.ibv_query_gid(context.pointer, 1, empty) == bytes(16)
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_query_gid_ex(context.pointer, 1, port.gid_tbl_len)


def test_query_gid_table_bad_flow_too_small_a_buffer(context: Context) -> None:
    with pytest.raises(VerbsError, match="read the GID table: _ibv_query_gid_table: EINVAL"):
        verbs.ibv_query_gid_table(context.pointer, 0)


@pytest.mark.parametrize("absent", [["ibv_query_gid_table"], ["ibv_query_gid_table", "ibv_query_gid_ex"]])
def test_the_gid_table_is_the_same_slot_by_slot(
    context: Context, monkeypatch: pytest.MonkeyPatch, absent: list[str]
) -> None:
    table, ports = context.gid_table(), context.ports()
    for verb in absent:
        monkeypatch.setattr(verbs, verb, lacking(verb))
    assert context.gid_table() == table
    assert context.ports() == ports


# ---- ibv_devinfo -v


def parsed(text: list[str]) -> dict[str, list[str]]:
    """Key, with the port's in front where it has one -> its value and the lines that hang on it."""
    found: dict[str, list[str]] = {}
    part = key = ""
    for line in text:
        match = re.match(r"(\t*)([^\t:][^:]*(?:\[ *\d+\])?):(?:\t+(.*))?$", line)
        if match and not line.startswith("\t" * 4):
            tabs, key, value = len(match[1]), match[2], match[3]
            if tabs == 1 and not value:
                part = key
            key = f"{part}.{key}" if tabs == 2 and key != "port" else key
            found[key] = [value] if value else []
        elif line.strip() and line.startswith("\t" * 4):
            found[key].append(line.strip())
        elif line.strip():
            found[line.strip()] = []
    return found


def test_devices_v_says_all_that_ibv_devinfo_v_says(context: Context, node1: Node) -> None:
    theirs = parsed(node1.run("ibv_devinfo", "-v", "-d", context.name).splitlines())
    ours = parsed(lines(describe(context)))
    assert len(theirs) > 80
    # counters came with a header that this package does not know yet
    assert set(theirs) - set(ours) <= {"max_comp_cntr", "comp_cntr_caps"}
    different = {key: (value, ours[key]) for key, value in theirs.items() if ours.get(key, value) != value}
    # bits that the program of rdma-core 44 has no name for
    unnamed = {key for key, (value, _) in different.items() if any(line.startswith("Unknown") for line in value)}
    assert set(different) == unnamed <= {"rc_odp_caps", "ud_odp_caps"}
    for value, mine in (different[key] for key in unnamed):
        known, rest = value[:-1], int(value[-1].split("0x")[1], 16)
        assert mine[: len(known)] == known
        named = sum(int(OdpTransportCaps[line.removeprefix("SUPPORT_")]) for line in mine[len(known) :])
        assert named == rest


def test_the_lines_are_laid_out_as_those_of_ibv_devinfo(context: Context, node1: Node) -> None:
    theirs = node1.run("ibv_devinfo", "-v", "-d", context.name).splitlines()
    ours = lines(describe(context))
    assert [line for line in theirs if line not in ours and "Unknown flags" not in line] == []
    assert [line for line in ours if line not in theirs and "SUPPORT_" not in line] == []
    order = [line for line in ours if line in theirs]
    assert order == [line for line in theirs if "Unknown flags: 0xC0" not in line]


def test_the_description_is_json_and_says_the_rest(context: Context) -> None:
    info = json.loads(json.dumps(describe(context)))
    assert info["hca_id"] == context.name
    port = info["ports"][0]
    assert port["pkeys"] == ["0xffff"]
    assert port["state"] == {"code": 4, "name": "PORT_ACTIVE"}
    assert port["gids"][1]["type"] == "RoCE v2"
    assert info["device_cap_flags"]["value"] == int(context.query_device().device_cap_flags)
    assert info["pci_atomic_caps"] is None
