"""The five verbs that the package started from, line by line of their manual pages: described, and working.

``data/five_verbs.md`` is a table of all that the pages name and say: each field, flag, function and note, the words of
the docstring that describe it, and the test that shows it at work.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from places import TESTS
from software import Call, Software

from rdmaconnect import abi, verbs
from rdmaconnect.abi import (
    CqInitAttrMask,
    CqWcFlags,
    CreateCqAttrFlags,
    OdpTransportCaps,
    QpAttrMask,
    QpCreateFlags,
    QpInitAttrMask,
    QpSendOpsFlags,
    QpState,
    QpType,
    RxHashFields,
)
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.agreement.transitions import FIELDS, TABLE
from rdmaconnect.errors import ModifyError, StateError, VerbsError
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.device_attr import DeviceAttr
from rdmaconnect.objects.domain import ParentDomain
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.queuepair_ex import QueuePairEx, RxHash
from rdmaconnect.objects.srq import SRQ
from rdmaconnect.objects.workqueue import WQ, RwqIndTable

M = QpAttrMask


# ---- the table


class Line(NamedTuple):
    """One line of the table: what a page has, the function whose docstring describes it, its words, the test."""

    page: str
    what: str
    verb: str
    words: str
    test: str


def table() -> list[Line]:
    """All lines; an empty verb or test is that of the line before."""
    found: list[Line] = []
    page = verb = test = ""
    for line in (TESTS / "data/five_verbs.md").read_text().splitlines():
        if line.startswith("## "):
            page = verb = line[3:].strip()
        elif line.startswith("| ") and not line.startswith(("| of the page", "| ---")):
            what, where, named = (cell.strip() for cell in line.strip("|\n").split("|"))
            function, _, words = where.rpartition(":: ")
            verb, test = function or page, named or test
            found.append(Line(page, what.strip("`"), verb, words, test))
    return found


LINES = table()
PAGES = ["ibv_ack_cq_events", "ibv_create_cq_ex", "ibv_create_qp_ex", "ibv_modify_qp", "ibv_query_device_ex"]
#: page -> the structs and enums whose members it must name, all of them
NAMES: dict[str, list[Any]] = {
    "ibv_ack_cq_events": [],
    "ibv_create_cq_ex": [
        abi.ibv_cq_init_attr_ex, CqWcFlags, CqInitAttrMask, CreateCqAttrFlags, abi.ibv_wc_tm_info,
    ],
    "ibv_create_qp_ex": [
        abi.ibv_qp_init_attr_ex, abi.ibv_qp_cap, QpCreateFlags, abi.ibv_rx_hash_conf, RxHashFields, QpSendOpsFlags,
        QpInitAttrMask,
    ],
    "ibv_modify_qp": [abi.ibv_qp_attr, QpAttrMask],
    "ibv_query_device_ex": [
        abi.ibv_device_attr_ex, abi.ibv_odp_caps, abi.OdpGeneralCaps, OdpTransportCaps, abi.ibv_tso_caps,
        abi.ibv_rss_caps, abi.ibv_packet_pacing_caps, abi.RawPacketCaps, abi.TmCaps, abi.ibv_tm_caps,
        abi.ibv_cq_moderation_caps, abi.PciAtomicOpSize, abi.ibv_pci_atomic_caps,
    ],
}  # fmt: skip


def names(thing: Any) -> set[str]:
    """The members of a struct, those of structs within it included, or of an enum by their C names."""
    if thing in abi.ENUMS:
        return {abi.ENUMS[thing][1] + name for name in thing.__members__}
    return {name for name, *_ in thing._fields_}


def test_the_table_has_the_five_pages_and_every_name_of_theirs() -> None:
    assert [page for page in PAGES if page not in {line.page for line in LINES}] == []
    for page, things in NAMES.items():
        there = {line.what for line in LINES if line.page == page}
        assert set().union(*map(names, things)) - there == set(), page
    functions = {name for name, op in abi.OPS.items() if op.table == "cq_ex"}
    assert functions <= {line.what for line in LINES if line.page == "ibv_create_cq_ex"}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.page}-{line.what}"[:70])
def test_a_line_is_described_and_tested(line: Line) -> None:
    text = " ".join(inspect.getdoc(getattr(verbs, line.verb)).split())  # type: ignore[union-attr]
    assert len(line.words.split()) >= 2, "a description has words"
    assert line.words in text
    if re.fullmatch(r"\w+", line.what):  # a name: it is there, in C's short form at least
        prefixes = [prefix for _, prefix in abi.ENUMS.values()]
        short = {line.what, *(line.what.removeprefix(p) for p in prefixes)} - {""}
        assert line.what == line.verb or any(re.search(rf"\b{name}\b", text) for name in short)
    file, _, test = line.test.partition("::")
    assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.M), line.test


# ---- at work


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


class Taken:
    """Copies of a struct that a verb was given."""

    def __init__(self, name: str) -> None:
        self.name, self.structs = name, list[Any]()

    def __call__(self, call: Call) -> None:
        self.structs.append(type(call[self.name]).from_buffer_copy(call[self.name]))


def test_every_field_of_an_extended_queue_s_attributes_arrives(software: Software, context: Context) -> None:
    taken = Taken("attr")
    with (
        CompChannel(context) as channel,
        PD(context) as pd,
        ParentDomain(pd) as domain,
        software.on("ibv_create_cq_ex", before=taken),
    ):
        flags = CreateCqAttrFlags.SINGLE_THREADED | CreateCqAttrFlags.IGNORE_OVERRUN
        wanted = CqWcFlags.BYTE_LEN | CqWcFlags.COMPLETION_TIMESTAMP_WALLCLOCK
        with CQEx(
            context, 9, channel, comp_vector=1, wc_flags=wanted, flags=flags, parent_domain=domain, cq_context=2**64 - 1
        ) as cq:
            (attr,) = taken.structs
            assert (attr.cqe, attr.comp_vector, attr.wc_flags, attr.flags) == (9, 1, wanted, 3)
            assert attr.comp_mask == CqInitAttrMask.FLAGS | CqInitAttrMask.PD
            assert attr.cq_context == cq.cq_context == cq.pointer.contents.cq_context == 2**64 - 1
            for pointer, owned in ((attr.channel, channel), (attr.parent_domain, domain)):
                assert ctypes.addressof(pointer.contents) == ctypes.addressof(owned.pointer.contents)
        with CQEx(context, 1):
            assert (taken.structs[1].comp_mask, taken.structs[1].cq_context) == (0, None)


@pytest.mark.parametrize("kind", [CQ, CQEx])
def test_an_event_brings_the_queue_and_its_context(context: Context, kind: Any) -> None:
    with CompChannel(context) as channel:
        os.set_blocking(channel.pointer.contents.fd, False)
        assert verbs.ibv_get_cq_event(channel.pointer) is None
        with kind(context, 4, channel, cq_context=0xABC) as one, kind(context, 4, channel) as two, PD(context) as pd:
            for cq in (one, two):
                cq.arm()
                with QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
                    _flush_one(qp)
                    pointer, given = verbs.ibv_get_cq_event(channel.pointer)  # type: ignore[misc]
                    assert ctypes.addressof(pointer.contents) == ctypes.addressof(cq.pointer.contents)
                    assert given == cq.cq_context == (0xABC if cq is one else 0)
                    verbs.ibv_ack_cq_events(pointer, 1)
                    assert verbs.ibv_get_cq_event(channel.pointer) is None


def _flush_one(qp: QueuePair) -> None:
    from rdmaconnect.objects.work_request import RecvRequest

    values = SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0)
    qp.move(QpState.INIT, values)
    qp.post_recv(RecvRequest(1))
    qp.move(QpState.ERR)


def test_destroying_waits_until_every_event_is_acknowledged(software: Software, context: Context) -> None:
    with CompChannel(context) as channel, PD(context) as pd:
        cq = CQ(context, 4, channel)
        cq.arm()
        with QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
            _flush_one(qp)
            assert channel.drain() == [cq]
            assert (cq.unacked, cq.pointer.contents.comp_events_completed) == (1, 0)
        with software.on("ibv_destroy_cq", before=lambda call: seen.append(software.calls["ibv_ack_cq_events"])):
            seen: list[int] = []
            cq.close()
        assert seen == [1]


def test_every_field_of_an_extended_queue_pair_s_attributes_arrives(software: Software, context: Context) -> None:
    taken = Taken("qp_init_attr_ex")
    with (
        PD(context) as pd,
        CQ(context, 4) as one,
        CQ(context, 4) as two,
        SRQ(pd, 4) as srq,
        WQ(pd, one, 4) as wq,
        RwqIndTable(context, [wq]) as wqs,
        software.on("ibv_create_qp_ex", before=taken, fail=errno.EOPNOTSUPP),
    ):
        everything: dict[str, Any] = {
            "max_send_wr": 3, "max_recv_wr": 5, "max_send_sge": 7, "max_recv_sge": 9, "max_inline_data": 11,
            "sq_sig_all": True, "srq": srq, "send_ops_flags": QpSendOpsFlags.SEND | QpSendOpsFlags.ATOMIC_WRITE,
            "create_flags": QpCreateFlags.SCATTER_FCS, "max_tso_header": 64, "rwq_ind_tbl": wqs,
            "rx_hash_conf": RxHash(bytes(range(40)), RxHashFields.DST_IPV6 | RxHashFields.INNER),
            "source_qpn": 0xABCDEF, "qp_context": 2**63,
        }  # fmt: skip
        with pytest.raises(VerbsError, match="ibv_create_qp_ex: EOPNOTSUPP"):
            QueuePairEx(pd, one, two, QpType.RAW_PACKET, **everything)
        (attr,) = taken.structs
        cap = attr.cap
        sizes = [cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data]
        assert sizes == [3, 5, 7, 9, 11]
        assert (attr.qp_type, attr.sq_sig_all, attr.max_tso_header) == (QpType.RAW_PACKET, 1, 64)
        assert attr.create_flags == QpCreateFlags.SCATTER_FCS | QpCreateFlags.SOURCE_QPN
        assert (attr.source_qpn, attr.qp_context) == (0xABCDEF, 2**63)
        assert attr.send_ops_flags == QpSendOpsFlags.SEND | QpSendOpsFlags.ATOMIC_WRITE
        assert attr.comp_mask == int(sum(QpInitAttrMask)) & ~QpInitAttrMask.XRCD
        conf = attr.rx_hash_conf
        assert (conf.rx_hash_function, conf.rx_hash_key_len, conf.rx_hash_fields_mask) == (1, 40, 1 << 3 | 1 << 31)
        owned = {"pd": pd, "send_cq": one, "recv_cq": two, "srq": srq, "rwq_ind_tbl": wqs}
        for name, thing in owned.items():
            assert ctypes.addressof(getattr(attr, name).contents) == ctypes.addressof(thing.pointer.contents)


def test_what_was_given_comes_back_in_the_capabilities(software: Software, context: Context) -> None:
    def more(call: Call) -> None:
        call["qp_init_attr_ex"].cap.max_send_wr = 64

    with PD(context) as pd, CQ(context, 4) as cq, software.on("ibv_create_qp_ex", after=more):
        ops = QpSendOpsFlags.SEND
        with QueuePairEx(pd, cq, cq, QpType.RC, max_send_wr=3, send_ops_flags=ops, qp_context=5) as qp:
            assert qp.cap.max_send_wr == 64
            assert (qp.qp_num, qp.qp_context) == (qp.pointer.contents.qp_num, qp.pointer.contents.qp_context)
            assert qp.qp_context == 5
        with QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1, qp_context=2**64 - 1) as plain:
            assert plain.pointer.contents.qp_context == plain.qp_context == 2**64 - 1


@pytest.mark.parametrize(("kind", "name"), [(CQ, "cq_context"), (CQEx, "cq_context")])
def test_a_context_has_64_bits(context: Context, kind: Any, name: str) -> None:
    for wrong in (2**64, -1):
        with pytest.raises(ValueError, match=f"{name} is {wrong}: give 64 bits"):
            kind(context, 1, **{name: wrong})


def test_a_queue_pair_in_a_multicast_group_is_not_destroyed_under_it(software: Software, context: Context) -> None:
    """``ibv_destroy_qp`` answers EBUSY; closing leaves the groups first."""
    from rdmaconnect.agreement.endpoint import Gid

    with PD(context) as pd, CQ(context, 4) as cq:
        qp = QueuePair(pd, cq, cq, QpType.UD, max_send_wr=1, max_recv_wr=1)
        qp.attach_mcast(Gid.parse("ff0e::1"))
        with pytest.raises(VerbsError, match="ibv_destroy_qp: EBUSY"):
            verbs.ibv_destroy_qp(qp.pointer)
        qp.close()
        assert software.calls["ibv_detach_mcast"] == 1


# ---- ibv_modify_qp


def row_with(bit: QpAttrMask) -> tuple[QpType, QpState, QpState]:
    """A step that takes a bit."""
    for qp_type, rows in TABLE.items():
        for (frm, to), row in rows.items():
            if bit & (row.required | row.optional) and frm != to:
                return qp_type, frm, to
    raise AssertionError(f"no step takes {bit}")


#: field -> another value than 0, and not the same in two
VALUES = {
    name: 1 + index % 5
    for index, name in enumerate(n for names in FIELDS.values() for n in names)
    if name not in ("ah_attr", "alt_ah_attr", "cap", "qp_state", "cur_qp_state")
} | {"path_mig_state": 1, "en_sqd_async_notify": 1, "port_num": 1, "alt_port_num": 1}


@pytest.mark.parametrize("bit", [bit for bit in QpAttrMask if bit not in (M.STATE, M.CAP)], ids=str)
def test_every_attribute_arrives_with_its_bit(software: Software, context: Context, bit: QpAttrMask) -> None:
    qp_type, frm, to = (QpType.RC, QpState.RTR, QpState.RTS) if bit == M.RATE_LIMIT else row_with(bit)
    taken = Taken("attr")
    software.devices[0].ports[0].pkeys = [0xFFFF] * 8
    fields = [n for b, ns in FIELDS.items() if b & (bit | TABLE[qp_type][frm, to].required) for n in ns]
    attr: dict[str, Any] = {name: VALUES[name] for name in fields if name in VALUES}
    attr |= {"qp_state": to, "ah_attr": AhAttr(port_num=1, dlid=7), "alt_ah_attr": AhAttr(port_num=1, dlid=9)}
    attr |= {"cur_qp_state": frm}
    attr = {name: value for name, value in attr.items() if name in (*fields, "qp_state")}
    with PD(context) as pd, CQ(context, 4) as cq, QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
        qp.qp_type, qp.state = qp_type, frm
        hook = software.on("ibv_modify_qp", before=taken, fail=errno.EINVAL)
        with hook, pytest.raises(ModifyError) as caught:
            qp.modify(attr)
        qp.qp_type, qp.state = QpType.RC, QpState.RESET
    assert caught.value.mask == TABLE[qp_type][frm, to].required | M.STATE | bit
    for name in FIELDS[bit]:
        found, given = getattr(taken.structs[0], name), attr[name]
        assert getattr(found, "dlid", found) == getattr(given, "dlid", given)


def test_nothing_is_changed_by_what_is_refused(software: Software, context: Context) -> None:
    with PD(context) as pd, CQ(context, 4) as cq, QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
        with pytest.raises(ModifyError) as caught:
            qp.modify({"qp_state": QpState.INIT, "port_num": 9, "pkey_index": 0, "qp_access_flags": 0})
        assert caught.value.errno == errno.EINVAL
        assert qp.query().qp_state == qp.state == QpState.RESET
        with pytest.raises(ModifyError) as caught:
            qp.modify({"qp_state": QpState.INIT, "port_num": 1, "cap": abi.ibv_qp_cap()}, M.STATE | M.PORT | M.CAP)
        assert (caught.value.missing, caught.value.not_allowed) == (M.PKEY_INDEX | M.ACCESS_FLAGS, M.CAP)


def test_a_mask_of_nothing_changes_nothing(software: Software, context: Context) -> None:
    with PD(context) as pd, CQ(context, 4) as cq, QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        assert verbs.ibv_modify_qp(qp.pointer, abi.ibv_qp_attr(), 0) == 0
        qp.modify({})
        assert qp.query().qp_state == QpState.INIT


# ---- ibv_query_device_ex


def filled(kind: Any) -> Any:
    """A struct with another number in each field."""
    struct = kind()
    for index in range(ctypes.sizeof(kind)):
        ctypes.c_uint8.from_address(ctypes.addressof(struct) + index).value = 1 + index % 7
    return struct


def test_every_extended_property_is_decoded(software: Software, context: Context) -> None:
    pattern = filled(abi.ibv_device_attr_ex)

    def fill(call: Call) -> None:
        ctypes.memmove(ctypes.addressof(call["attr"]), ctypes.addressof(pattern), ctypes.sizeof(pattern))

    with software.on("ibv_query_device_ex", after=fill):
        raw, value = verbs.ibv_query_device_ex(context.pointer), context.query_device()
    assert bytes(raw) == bytes(pattern)
    for name, *_ in abi.ibv_device_attr_ex._fields_:
        if name in ("orig_attr", "comp_mask"):
            continue
        given, found = getattr(pattern, name), getattr(value, name)
        assert found is not None, name
        if isinstance(given, int):
            assert int(found) == given, name
            continue
        for part, *_ in given._fields_:
            if part == "supported_qpts":
                assert {int(t) for t in found.supported_qpts} == {b for b in range(32) if given.supported_qpts >> b & 1}
            elif part == "per_transport_caps":
                for transport, *_ in given.per_transport_caps._fields_:
                    assert int(getattr(found, transport)) == getattr(given.per_transport_caps, transport)
            else:
                assert int(getattr(found, part)) == getattr(given, part), (name, part)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_an_extended_query_the_plain_one_answers(software: Software, context: Context, number: int) -> None:
    with software.on("ibv_query_device_ex", fail=number):
        attr = verbs.ibv_query_device_ex(context.pointer)
        value = context.query_device()
    plain = verbs.ibv_query_device(context.pointer)
    assert bytes(attr.orig_attr) == bytes(plain)
    assert not any(bytes(attr)[ctypes.sizeof(plain) :])
    assert value == DeviceAttr.of(plain)
    assert value.phys_port_cnt_ex is None


def test_a_library_without_the_op_answers_by_the_plain_query(software: Software, context: Context) -> None:
    table = abi.verbs_context.from_address(
        ctypes.addressof(context.pointer.contents) - abi.verbs_context.context.offset
    )
    table.query_device_ex = type(table.query_device_ex)()
    attr = verbs.ibv_query_device_ex(context.pointer)
    assert bytes(attr.orig_attr) == bytes(verbs.ibv_query_device(context.pointer))
    assert software.calls["ibv_query_device_ex"] == 0


def test_another_failure_is_a_failure(software: Software, context: Context) -> None:
    with (
        software.on("ibv_query_device_ex", fail=errno.EIO),
        pytest.raises(VerbsError, match="query the device: ibv_query_device_ex: EIO"),
    ):
        verbs.ibv_query_device_ex(context.pointer)


def test_the_input_is_handed_over_and_its_mask_must_be_0(software: Software, context: Context) -> None:
    seen: list[Any] = []

    def look(call: Call) -> None:
        given = call["input"]
        seen.append(None if given is None else given.comp_mask)

    with software.on("ibv_query_device_ex", before=look):
        verbs.ibv_query_device_ex(context.pointer)
        verbs.ibv_query_device_ex(context.pointer, abi.ibv_query_device_ex_input())
        with pytest.raises(VerbsError, match=r"EINVAL.* input\.comp_mask is 0x1, and must be 0") as caught:
            verbs.ibv_query_device_ex(context.pointer, abi.ibv_query_device_ex_input(comp_mask=1))
    assert caught.value.errno == errno.EINVAL
    assert seen == [None, 0]


def test_a_batch_is_begun_gone_through_and_ended(software: Software, context: Context) -> None:
    with PD(context) as pd, CQEx(context, 4) as cq:
        assert not verbs.ibv_start_poll(cq._ex)  # ENOENT: empty, and there is no batch to end
        with QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
            _flush_one(qp)
            assert verbs.ibv_start_poll(cq._ex)
            assert (cq._ex.contents.wr_id, cq._ex.contents.status) == (1, abi.WcStatus.WR_FLUSH_ERR)
            assert not verbs.ibv_next_poll(cq._ex)
            verbs.ibv_end_poll(cq._ex)
            for _ in cq.poll_batch():
                raise AssertionError("it is empty")
            with pytest.raises(StateError, match="no completion is current"):
                _ = cq.wr_id
