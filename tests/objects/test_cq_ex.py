"""The extended completion queue over a provider made of Python functions: also what no software device has."""

from __future__ import annotations

import ctypes
import errno
import gc
import re
import socket
import threading
from collections.abc import Callable, Iterator
from ctypes import pointer, sizeof
from typing import Any

import pytest
from forking import in_a_fork

from rdmaconnect import abi, verbs
from rdmaconnect.abi import CqInitAttrMask, CqWcFlags, CreateCqAttrFlags, WcFlags, WcOpcode, WcStatus, bits
from rdmaconnect.errors import LibraryError, StateError, VerbsError
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, _Device
from rdmaconnect.objects.current_completion import STANDARD_WC_FLAGS, TmInfo
from rdmaconnect.objects.owned import Owned

#: function of the struct -> what it answers, the flag that it needs, the method, and what that answers
READS: dict[str, tuple[int, CqWcFlags | None, Callable[[CQEx], Any], Any]] = {
    "read_opcode": (128, None, CQEx.read_opcode, WcOpcode.RECV),
    "read_vendor_err": (7, None, CQEx.read_vendor_err, 7),
    "read_wc_flags": (3, None, CQEx.read_wc_flags, WcFlags.GRH | WcFlags.WITH_IMM),
    "read_byte_len": (40, CqWcFlags.BYTE_LEN, CQEx.read_byte_len, 40),
    "read_imm_data": (socket.htonl(0x1234), CqWcFlags.IMM, CQEx.read_imm_data, 0x1234),
    "read_qp_num": (17, CqWcFlags.QP_NUM, CQEx.read_qp_num, 17),
    "read_src_qp": (18, CqWcFlags.SRC_QP, CQEx.read_src_qp, 18),
    "read_slid": (19, CqWcFlags.SLID, CQEx.read_slid, 19),
    "read_sl": (5, CqWcFlags.SL, CQEx.read_sl, 5),
    "read_dlid_path_bits": (6, CqWcFlags.DLID_PATH_BITS, CQEx.read_dlid_path_bits, 6),
    "read_completion_ts": (2**40, CqWcFlags.COMPLETION_TIMESTAMP, CQEx.read_completion_ts, 2**40),
    "read_cvlan": (100, CqWcFlags.CVLAN, CQEx.read_cvlan, 100),
    "read_flow_tag": (0x123456, CqWcFlags.FLOW_TAG, CQEx.read_flow_tag, 0x123456),
    "read_completion_wallclock_ns": (
        2**60, CqWcFlags.COMPLETION_TIMESTAMP_WALLCLOCK, CQEx.read_completion_wallclock_ns, 2**60
    ),
}  # fmt: skip
ALL = CqWcFlags(sum(CqWcFlags))


class Provider:
    """A device whose queues hold (wr_id, status) pairs; ``calls`` tells what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pending: list[tuple[int, int]] = []
        self.fault = 0
        self.attr = abi.ibv_cq_init_attr_ex()
        self.table = abi.verbs_context(sz=sizeof(abi.verbs_context))
        self.table.context.abi_compat = ctypes.c_void_p(-1)
        self.table.context.num_comp_vectors = 2
        self.table.create_cq_ex = self._bind(abi.verbs_context, "create_cq_ex", self.create)
        self.table.context.ops.poll_cq = self._bind(abi.ibv_context_ops, "poll_cq", lambda *_: 0)
        self.cq = abi.ibv_cq_ex(cqe=64, context=pointer(self.table.context))
        self.at = 0
        for name, function in (("start_poll", self.start), ("next_poll", self.next), ("end_poll", self.end)):
            setattr(self.cq, name, self._bind(abi.ibv_cq_ex, name, function))
        for name, (answer, _, _, _) in READS.items():
            setattr(self.cq, name, self._bind(abi.ibv_cq_ex, name, lambda _, answer=answer: answer))
        self.cq.read_tm_info = self._bind(abi.ibv_cq_ex, "read_tm_info", self.tm_info)

    def _bind(self, struct: Any, name: str, function: Callable[..., Any]) -> Any:
        kind = dict(struct._fields_)[name]
        if issubclass(kind._restype_ or int, ctypes._Pointer):  # ctypes makes no callback that returns one
            kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *kind._argtypes_)
            self._held = getattr(self, "_held", [])
            self._held.append(kind(function))
            return ctypes.cast(self._held[-1], dict(struct._fields_)[name])
        return kind(function)

    def create(self, _: Any, attr: Any) -> int:
        ctypes.memmove(ctypes.addressof(self.attr), attr, sizeof(self.attr))
        return ctypes.addressof(self.cq)

    def start(self, _: Any, attr: Any) -> int:
        self.calls.append("start")
        assert attr.contents.comp_mask == 0
        self.at = -1
        return self.fault or self._go()

    def next(self, _: Any) -> int:
        self.calls.append("next")
        return self.fault or self._go()

    def _go(self) -> int:
        if self.at + 1 >= len(self.pending):
            return errno.ENOENT
        self.at += 1
        self.cq.wr_id, self.cq.status = self.pending[self.at]
        return 0

    def end(self, _: Any) -> None:
        self.calls.append("end")
        del self.pending[: self.at + 1]

    def tm_info(self, _: Any, info: Any) -> None:
        info.contents.tag, info.contents.priv = 2**50, 3


class Domain(Owned):
    """A parent domain."""

    def __init__(self, pointer: Any, context: Context) -> None:
        self.context = context
        super().__init__(lambda: pointer, f"parent domain of {context.name}", (context,))

    def _release(self, pointer: Any) -> None:
        pass


def opened(provider: Provider, name: str) -> Context:
    """The device of a provider, without a library."""
    return Context(_Device(lambda: pointer(provider.table.context), name))


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def context(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(verbs, "ibv_destroy_cq", lambda _: provider.calls.append("destroy"))
    monkeypatch.setattr(verbs, "ibv_close_device", lambda _: None)
    with opened(provider, "fake0") as made:
        yield made


@pytest.fixture
def cq(context: Context, provider: Provider) -> Iterator[CQEx]:
    provider.pending = [(1, 0), (2, 0), (3, 5)]
    with CQEx(context, 10, wc_flags=ALL) as made:
        yield made


def during_a_batch(cq: CQEx, call: Callable[[], object]) -> None:
    """Do something at each completion of a batch."""
    for _ in cq.poll_batch():
        call()


def test_every_field_of_the_attributes_goes_to_the_provider(context: Context, provider: Provider) -> None:
    with CQEx(context, 10) as cq:
        assert cq.cqe == 64
        assert (provider.attr.cqe, provider.attr.comp_vector, provider.attr.comp_mask) == (10, 0, 0)
        assert provider.attr.wc_flags == STANDARD_WC_FLAGS == 0x7F
        assert not provider.attr.channel
    flags = CreateCqAttrFlags.SINGLE_THREADED | CreateCqAttrFlags.IGNORE_OVERRUN
    pd = abi.ibv_pd()
    domain = Domain(pointer(pd), context)
    with domain, CQEx(context, 11, comp_vector=1, wc_flags=CqWcFlags.CVLAN, flags=flags, parent_domain=domain) as cq:
        assert (provider.attr.cqe, provider.attr.comp_vector, provider.attr.wc_flags) == (11, 1, CqWcFlags.CVLAN)
        assert provider.attr.comp_mask == CqInitAttrMask.FLAGS | CqInitAttrMask.PD
        assert provider.attr.flags == 3
        assert ctypes.addressof(provider.attr.parent_domain.contents) == ctypes.addressof(pd)
        domain.close()
        assert cq.closed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cqe": 0}, "cqe is 0"),
        ({"cqe": 2**32 + 1}, "cqe is 4294967297"),
        ({"comp_vector": 2}, "comp_vector is 2: fake0 has 2, give 0 to 1"),
        ({"comp_vector": -1}, "comp_vector is -1"),
        ({"wc_flags": 1 << 64}, "wc_flags is 18446744073709551616: give 0 to"),
        ({"flags": 1 << 32}, "^flags is 4294967296: give 0 to 4294967295"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(context: Context, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CQEx(context, **{"cqe": 1, **wrong})


def test_objects_of_another_device_are_refused(context: Context, cq: CQEx) -> None:
    with (
        opened(Provider(), "fake1") as other,
        pytest.raises(ValueError, match=r"parent_domain is the .* of fake0: give one of fake1"),
    ):
        CQEx(other, 1, parent_domain=cq)


def test_a_batch_goes_over_all_and_is_ended(cq: CQEx, provider: Provider) -> None:
    assert [(wc.wr_id, wc.status) for wc in cq.poll_batch()] == [
        (1, WcStatus.SUCCESS), (2, WcStatus.SUCCESS), (3, WcStatus.WR_FLUSH_ERR)
    ]  # fmt: skip
    assert provider.calls == ["start", "next", "next", "next", "end"]
    assert list(cq.poll_batch()) == []
    assert provider.calls[5:] == ["start"]  # nothing to end


def test_a_batch_is_ended_however_it_is_left(cq: CQEx, provider: Provider) -> None:
    for wc in cq.poll_batch():
        assert wc.wr_id == 1
        break
    assert provider.calls == ["start", "end"]
    with pytest.raises(KeyError):
        during_a_batch(cq, lambda: {}["nothing"])
    assert provider.calls[2:] == ["start", "end"]
    assert provider.pending == [(3, 5)]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_batch_takes_no_more_than_it_was_told(cq: CQEx, provider: Provider, most: int) -> None:
    assert [wc.wr_id for wc in cq.poll_batch(most)] == [1, 2, 3][:most]
    assert provider.calls[-1] == "end"
    assert len(provider.pending) == max(0, 3 - most)
    with pytest.raises(ValueError, match="most is 0"):
        cq.poll_batch(0)


def test_a_kept_iterator_ends_its_batch_when_closed_or_let_go(cq: CQEx, provider: Provider) -> None:
    batch = cq.poll_batch()
    next(batch)
    batch.close()  # type: ignore[attr-defined]
    assert provider.calls == ["start", "end"]
    batch = cq.poll_batch()
    next(batch)
    del batch
    gc.collect()
    assert provider.calls[2:] == ["start", "end"]


def test_a_broken_queue_is_an_error_and_its_batch_is_ended(cq: CQEx, provider: Provider) -> None:
    provider.fault = errno.EINVAL
    with pytest.raises(VerbsError, match="poll extended CQ of fake0: ibv_start_poll: EINVAL"):
        cq.start_poll()
    assert provider.calls == ["start"]  # the start failed: no batch
    provider.fault = 0
    with pytest.raises(VerbsError, match="ibv_next_poll: EINVAL"):
        during_a_batch(cq, lambda: setattr(provider, "fault", errno.EINVAL))
    assert provider.calls == ["start", "start", "next", "end"]
    provider.fault = 0
    assert len(list(cq.poll_batch())) == 2


def test_the_raw_calls_do_the_same(cq: CQEx, provider: Provider) -> None:
    assert cq.start_poll()
    assert cq.wr_id == 1
    assert cq.next_poll()
    assert cq.wr_id == 2
    assert cq.next_poll()
    assert not cq.next_poll()
    with pytest.raises(StateError, match="wr_id on extended CQ of fake0: no completion is current"):
        _ = cq.wr_id
    cq.end_poll()
    assert not cq.start_poll()
    for call in (cq.next_poll, cq.end_poll):
        with pytest.raises(StateError, match="no batch is open"):
            call()


@pytest.mark.parametrize("name", READS)
def test_a_field_is_read_if_it_was_asked_for(context: Context, provider: Provider, name: str) -> None:
    _, flag, read, value = READS[name]
    provider.pending = [(1, 0)]
    with CQEx(context, 1, wc_flags=flag or CqWcFlags(0)) as cq:
        with pytest.raises(StateError, match="no completion is current"):
            read(cq)
        assert [read(wc) for wc in cq.poll_batch()] == [value]
        with pytest.raises(StateError, match="no completion is current"):
            read(cq)
    if flag is None:
        return
    provider.pending = [(1, 0)]
    with CQEx(context, 1, wc_flags=ALL & ~flag) as cq:
        for wc in cq.poll_batch():
            with pytest.raises(StateError, match=rf"ibv_wc_{name} .* made without CqWcFlags\.{flag}\."):
                read(wc)
    with pytest.raises(StateError):
        read(cq)


def test_every_flag_has_its_reader() -> None:
    needed = {flag for _, flag, _, _ in READS.values() if flag is not None}
    assert needed | {CqWcFlags.TM_INFO} == set(bits(ALL))


def test_the_head_of_a_tag_matched_message(cq: CQEx, context: Context) -> None:
    assert [wc.read_tm_info() for wc in cq.poll_batch(1)] == [TmInfo(2**50, 3)]
    with pytest.raises(StateError, match="no completion is current"):
        cq.read_tm_info()
    with CQEx(context, 1) as other, pytest.raises(StateError, match=r"without CqWcFlags\.TM_INFO"):
        other.read_tm_info()


def test_an_rkey_is_read_as_it_is(cq: CQEx) -> None:
    assert [wc.read_invalidated_rkey() for wc in cq.poll_batch(1)] == [socket.htonl(0x1234)]


def test_a_function_that_the_provider_lacks_is_an_error(context: Context, provider: Provider) -> None:
    provider.cq.read_cvlan = type(provider.cq.read_cvlan)()
    provider.pending = [(1, 0)]
    with CQEx(context, 1, wc_flags=ALL) as cq:
        for wc in cq.poll_batch():
            with pytest.raises(LibraryError, match="ibv_wc_read_cvlan") as caught:
                wc.read_cvlan()
            assert caught.value.errno == errno.EOPNOTSUPP


def test_the_functions_of_the_verbs_room_answer_the_same(cq: CQEx, provider: Provider) -> None:
    ex = cq._ex
    assert verbs.ibv_start_poll(ex)
    for name, (_, _, _, value) in READS.items():
        assert getattr(verbs, f"ibv_wc_{name}")(ex) == value
    assert verbs.ibv_wc_read_invalidated_rkey(ex) == socket.htonl(0x1234)
    info = verbs.ibv_wc_read_tm_info(ex)
    assert (info.tag, info.priv) == (2**50, 3)
    assert verbs.ibv_next_poll(ex)
    assert verbs.ibv_next_poll(ex)
    assert not verbs.ibv_next_poll(ex)
    verbs.ibv_end_poll(ex)
    assert not verbs.ibv_start_poll(ex)
    provider.fault = errno.EIO
    with pytest.raises(VerbsError, match="ibv_start_poll: EIO"):
        verbs.ibv_start_poll(ex)


def test_a_provider_whose_next_poll_ends_the_batch_is_asked_one_by_one(
    context: Context, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "next_poll_ends_batch", lambda _: True)
    provider.pending = [(1, 0), (2, 0)]
    with CQEx(context, 10) as cq:
        assert [wc.wr_id for wc in cq.poll_batch()] == [1, 2]
        assert provider.calls == ["start", "end", "start", "end", "start"]
        provider.pending = [(3, 0)]
        assert cq.start_poll()
        assert not cq.next_poll()
        assert not cq.next_poll()
        cq.end_poll()
        assert provider.calls[5:] == ["start", "end", "start", "start"]
        assert list(cq.poll_batch()) == []


def test_a_process_that_was_forked_within_a_batch_reads_nothing(cq: CQEx) -> None:
    assert cq.start_poll()
    for call in (cq.read_opcode, cq.next_poll, cq.end_poll, lambda: cq.wr_id, cq.poll, lambda: next(cq.poll_batch())):
        assert re.match("StateError: .* belongs to the process that forked this one", in_a_fork(call))


# ---- within a batch


def test_within_a_batch_the_same_thread_may_not_wait_for_itself(cq: CQEx) -> None:
    for _ in cq.poll_batch(1):
        for call in (cq.start_poll, cq.poll, lambda: cq.resize(5), lambda: list(cq.poll_batch())):
            with pytest.raises(StateError, match=r"this thread is within a batch of it. Call end_poll\(\) first"):
                call()
    assert cq.poll() == 0


def test_another_thread_waits_until_the_batch_ends(cq: CQEx) -> None:
    got: list[int] = []
    assert cq.start_poll()
    thread = threading.Thread(target=lambda: got.extend(wc.wr_id for wc in cq.poll_batch()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    cq.end_poll()
    thread.join(10)
    assert got == [2, 3]


def test_closing_ends_the_batch_of_the_thread_that_closes(cq: CQEx, provider: Provider) -> None:
    with pytest.raises(StateError, match="extended CQ of fake0 is closed"):
        during_a_batch(cq, cq.close)
    assert provider.calls == ["start", "end", "destroy"]
    for call in (cq.start_poll, cq.end_poll, cq.poll, cq.read_opcode, lambda: cq.wr_id):
        with pytest.raises(StateError, match="is closed"):
            call()


def test_closing_under_a_thread_that_reads_is_refused(cq: CQEx, provider: Provider) -> None:
    inside, go = threading.Event(), threading.Event()

    def read() -> None:
        for _ in cq.poll_batch():
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait(10)
    with pytest.raises(StateError, match="another thread is within a batch"):
        cq.close()
    assert not cq.closed
    go.set()
    thread.join(10)
    cq.close()
    assert provider.calls[-1] == "destroy"


def test_a_batch_that_a_dead_thread_left_open_is_ended(cq: CQEx, provider: Provider) -> None:
    thread = threading.Thread(target=cq.start_poll)
    thread.start()
    thread.join(10)
    cq.close()
    assert provider.calls == ["start", "end", "destroy"]
