"""Lengths and limits: nothing is cut off on its way into a C field, and no message is longer than a port may send."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from software import Device, Port, Software, connected, joined
from threads import running

from rdmaconnect import abi
from rdmaconnect.abi import QpState, QpType, SendFlags, SrqType, WrOpcode
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import CompletionError, PostError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.fields import bits, put
from rdmaconnect.objects.memory import MR, PD, Sge
from rdmaconnect.objects.qp_attr import Ece
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx, RxHash
from rdmaconnect.objects.srq import SRQ, XRCD
from rdmaconnect.session.transfer import Part, parts

RC, UD = QpType.RC, QpType.UD
REMOTE = RemoteRegion(0x1000, 7, 2**40)
SIZES = {"max_send_wr": 4, "max_recv_wr": 4}
GIB = 1 << 30
#: MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE: what nobody touches takes no memory
ONLY_MAPPED = 0x4022


# ---- fields

#: every struct of the ABI that has numbers in it, and those of its fields
NUMBERS = [
    (struct, name, kind)
    for struct in abi.STRUCTS.values()
    for name, kind, *width in struct._fields_
    if not width and isinstance(getattr(kind, "_type_", None), str) and kind._type_ in "bBhHiIlLqQ"
]


def test_there_are_numbers_to_try() -> None:
    assert len(NUMBERS) > 300
    assert (abi.ibv_qp_cap, "max_send_wr", ctypes.c_uint32) in NUMBERS


@pytest.mark.parametrize("sign", [-1, 1])
def test_every_number_of_every_struct_is_taken_whole_or_refused(sign: int) -> None:
    for struct, name, kind in NUMBERS:
        made, size = struct(), 8 * ctypes.sizeof(kind)
        least, greatest = (0, 2**size - 1) if kind(-1).value > 0 else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
        end = greatest if sign > 0 else least
        assert getattr(put(made, **{name: end}), name) == end
        for value in (end + sign, 2**64 + 8 if sign > 0 else -(2**63) - 1):
            with pytest.raises(ValueError, match=f"^{name} is {value}: give {least} to {greatest}$"):
                put(made, **{name: value})
            assert getattr(made, name) == end, "it is as it was"


@given(st.integers(), st.integers(1, 64))
def test_bits_are_counted(value: int, width: int) -> None:
    if 0 <= value < 2**width:
        assert bits("it", value, width) == value
    else:
        with pytest.raises(ValueError, match=f"it is {value}: give {width} bits, without a sign"):
            bits("it", value, width)


# ---- what the objects are made with


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as opened:
        yield opened


def extended(context: Context, **options: Any) -> Any:
    with PD(context) as pd, CQ(context, 4) as cq:
        kind = QueuePairEx if options.keys() - {"max_send_wr", "max_recv_sge", "max_inline_data"} else QueuePair
        return kind(pd, cq, cq, RC, **SIZES | options)


def with_qp(call: Callable[[QueuePair], Any]) -> Callable[[Context], Any]:
    def run(context: Context) -> Any:
        with PD(context) as pd, CQ(context, 4) as cq, QueuePair(pd, cq, cq, RC, **SIZES) as qp:
            return call(qp)

    return run


def with_srq(call: Callable[[SRQ], Any]) -> Callable[[Context], Any]:
    def run(context: Context) -> Any:
        with PD(context) as pd, SRQ(pd, 4) as srq:
            return call(srq)

    return run


#: what is refused -> how it is asked for, one number that does not fit: of each in C it would be another one
TOO_LARGE: dict[str, Callable[[Context], Any]] = {
    "max_send_wr is 4294967297": lambda c: extended(c, max_send_wr=2**32 + 1),
    "max_recv_sge is -1": lambda c: extended(c, max_recv_sge=-1),
    "max_inline_data is 4294967296": lambda c: extended(c, max_inline_data=2**32),
    "max_tso_header is 65600": lambda c: extended(c, max_tso_header=2**16 + 64),
    "create_flags is 4294967298": lambda c: extended(c, create_flags=2**32 + 2),
    "send_ops_flags is 18446744073709551617": lambda c: extended(c, send_ops_flags=2**64 + 1),
    "rx_hash_key_len is 300": lambda c: extended(c, rx_hash_conf=RxHash(bytes(300), 1)),  # type: ignore[arg-type]
    "cqe is 4294967297": lambda c: CQ(c, 2**32 + 1),
    "wc_flags is 18446744073709551616": lambda c: CQEx(c, 1, wc_flags=2**64),  # type: ignore[arg-type]
    "max_wr is 4294967297": lambda c: SRQ(PD(c), 2**32 + 1),
    "max_num_tags is 4294967297": lambda c: SRQ(PD(c), 1, srq_type=SrqType.TM, max_num_tags=2**32 + 1),
    "srq_limit is 4294967297": with_srq(lambda srq: srq.modify(srq_limit=2**32 + 1)),
    "fd is 4294967296": lambda c: XRCD(c, fd=2**32),
    "rate_limit is 4294967297": with_qp(lambda qp: qp.limit_rate(2**32 + 1)),
    "typical_pkt_sz is 65537": with_qp(lambda qp: qp.limit_rate(1, typical_pkt_sz=2**16 + 1)),
    "options is 4294967297": with_qp(lambda qp: qp.set_ece(Ece(1, 2**32 + 1))),
    "lid is 65537": with_qp(lambda qp: qp.attach_mcast(qp.context.port(1).gids[0].gid, 2**16 + 1)),
    "cq_count|count is 65537": lambda c: CQ(c, 1).moderate(2**16 + 1, 0),
    "a piece's length is 4294967304": lambda c: Sge(0, 2**32 + 8, 1),
    "a piece's addr is -1": lambda c: Sge(-1, 1, 1),
    "a piece's lkey is 4294967296": lambda c: Sge(0, 1, 2**32),
    "wr_id is 18446744073709551616": lambda c: RecvRequest(2**64),
}


@pytest.mark.filterwarnings("ignore:.* was never closed:ResourceWarning")
@pytest.mark.parametrize("words", TOO_LARGE)
def test_a_number_that_does_not_fit_is_refused_by_name(context: Context, software: Software, words: str) -> None:
    before = software.made.copy()
    with pytest.raises(ValueError, match=words):
        TOO_LARGE[words](context)
    made = {kind for kind, number in (software.made - before).items() if number}
    assert made <= {"pd", "cq", "qp", "srq"}


def test_a_rate_and_other_attributes_do_not_wrap(context: Context) -> None:
    with PD(context) as pd, CQ(context, 4) as cq, QueuePair(pd, cq, cq, QpType.RC, **SIZES) as qp:
        values = {"qp_state": QpState.INIT, "port_num": 1, "pkey_index": 2**16, "qp_access_flags": 0}
        with pytest.raises(ValueError, match="pkey_index is 65536"):
            qp.modify(values)
        with pytest.raises(ValueError, match="port_num is 257"):
            qp.modify(values | {"pkey_index": 0, "port_num": 257})
        with pytest.raises(ValueError, match="qp_access_flags is 4294967296"):
            qp.modify(values | {"pkey_index": 0, "qp_access_flags": 2**32})


# ---- work requests

#: argument of SendRequest.fill -> the number, and the bits that it has
FILLED = {"wr_id": 64, "addr": 64, "length": 32, "lkey": 32, "flags": 32}


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("over", [False, True])
def test_fill_takes_no_number_that_would_be_cut(name: str, over: bool) -> None:
    """2**32 + 8 bytes were 8, and the transfer a success."""
    request = SendRequest().fill(1, WrOpcode.RDMA_WRITE, 0x1000, 16, 3, remote=REMOTE)
    before = bytes(request._wr), bytes(request._sges)
    value = 2 ** FILLED[name] + 16 if over else -16
    given = {"wr_id": 2, "addr": 0x2000, "length": 32, "lkey": 4, "flags": 2} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}: give {FILLED[name]} bits, without a sign"):
        request.fill(opcode=WrOpcode.SEND, **given)  # type: ignore[arg-type]
    assert (bytes(request._wr), bytes(request._sges)) == before, "it is as it was"


def test_fill_takes_the_greatest_numbers_whole() -> None:
    far = RemoteRegion(2**64 - 1, 2**32 - 1, 1)
    wr = SendRequest().fill(2**64 - 1, WrOpcode.RDMA_READ, 2**64 - 1, 2**32 - 1, 2**32 - 1, remote=far).wr.contents
    sge = wr.sg_list[0]
    assert (wr.wr_id, wr.opcode, wr.send_flags, wr.num_sge) == (2**64 - 1, WrOpcode.RDMA_READ, SendFlags.SIGNALED, 1)
    assert (sge.addr, sge.length, sge.lkey) == (2**64 - 1, 2**32 - 1, 2**32 - 1)
    assert (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) == (2**64 - 1, 2**32 - 1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_fill_puts_each_number_into_its_field(addr: int, length: int, key: int, wr_id: int) -> None:
    remote = RemoteRegion(addr ^ 1, key ^ 1, 0)
    wr = SendRequest().fill(wr_id, WrOpcode.RDMA_WRITE, addr, length, key, remote=remote).wr.contents
    sge = wr.sg_list[0]
    assert (wr.wr_id, sge.addr, sge.length, sge.lkey, wr.num_sge) == (wr_id, addr, length, key, int(length > 0))
    assert (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey, bool(wr.next)) == (addr ^ 1, key ^ 1, False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.send(2**64), "wr_id is 18446744073709551616"),
        (lambda r: r.send(1, flags=2**32), "flags is 4294967296"),
        (lambda r: r.send_tso(1, bytes(2**16), 1), "the header's length is 65536"),
        (lambda r: r.send_tso(1, b"x", 2**16), "mss is 65536"),
        (lambda r: r.local_inv(1, 2**32), "invalidate_rkey is 4294967296"),
        (lambda r: r.atomic_cmp_swp(1, RemoteRegion(0, 1, 8), 2**64, 0, sge=Sge(0, 8, 1)), "compare is"),
    ],
)
def test_no_operation_is_cut(call: Callable[[SendRequest], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(SendRequest())


def test_four_gib_and_eight_bytes_are_refused_before_anything_moves(software: Software) -> None:
    with joined() as (here, there), mmap.mmap(-1, 4 * GIB + mmap.PAGESIZE, flags=ONLY_MAPPED) as memory:
        with MR(here.pd, memory, abi.AccessFlags(0)) as mr:
            with pytest.raises(ValueError, match="length is 4294967304: give 32 bits"):
                SendRequest().fill(1, WrOpcode.RDMA_WRITE, mr.addr, 4 * GIB + 8, mr.lkey, remote=REMOTE)
            with pytest.raises(ValueError, match="a piece's length is 4294967304"):
                mr.sge(0, 4 * GIB + 8)
        assert there.memory[:8] == bytes(8)


# ---- messages longer than a port may send


@given(st.integers(0, 5000), st.integers(1, 1000), st.none() | st.just(5))
def test_parts_cover_all_once_in_order_and_none_is_too_long(length: int, longest: int, imm: int | None) -> None:
    opcode = WrOpcode.RDMA_WRITE if imm is None else WrOpcode.RDMA_WRITE_WITH_IMM
    target = RemoteRegion(1 << 40, 7, length)
    made = list(parts(opcode, (1 << 20, length, 3), target, imm, longest))
    at = 0
    for part in made:
        addr, size, lkey = part.place
        assert part.target is not None
        assert (addr, lkey, part.target.addr, part.target.rkey) == ((1 << 20) + at, 3, (1 << 40) + at, 7)
        assert size <= longest
        at += size
    assert at == length
    assert [part.imm for part in made] == [None] * (len(made) - 1) + [imm]
    assert [part.opcode for part in made] == [WrOpcode.RDMA_WRITE] * (len(made) - 1) + [opcode]
    assert len(made) == max(1, -(-length // longest))


def test_a_message_is_never_divided() -> None:
    assert list(parts(WrOpcode.SEND, (0, 500, 1), None, None, 100)) == [Part(WrOpcode.SEND, (0, 500, 1), None, None)]


def short(**port: Any) -> list[Device]:
    return [Device(ports=[Port(max_msg_sz=4096, **port)])]


@pytest.mark.parametrize("kind", ["copied", "registered", "region"])
def test_writes_and_reads_are_divided(kind: str) -> None:
    size = {"copied": 4096, "registered": 100_000, "region": 100_000}[kind]
    data, far = bytearray(bytes(range(251)) * 400)[:size], bytearray(size + 7)
    with Software(short()) as software:
        lengths: list[int] = []
        with connected(listen={"regions": {"far": far}}) as (here, there):
            software.on("ibv_post_send", before=lambda call: lengths.extend(lengths_of(call["wr"])))
            source = here.register(data) if kind == "region" else data
            here.write(source, "far", offset=7, imm=9)
            assert there.recv_imm(deadline_s=5) == 9
            assert far[7:] == data
            count = -(-size // 4096)
            assert (len(lengths), max(lengths), sum(lengths)) == (count, min(size, 4096), size)
            lengths.clear()
            assert here.read("far", size, offset=7) == data
            assert (len(lengths), max(lengths)) == (count, min(size, 4096))
            into = here.register(bytearray(size)) if kind == "region" else bytearray(size)
            here.read_into(into, "far", size, offset=7)
        assert software.problems() == []


def listed(wr: Any) -> Iterator[Any]:
    """The work requests of one call."""
    yield wr
    while wr.next:
        wr = wr.next.contents
        yield wr


def lengths_of(wr: Any) -> list[int]:
    """Bytes of each of them."""
    return [sum(one.sg_list[i].length for i in range(one.num_sge)) for one in listed(wr)]


def test_more_parts_than_the_queue_has_room_for_wait_for_it() -> None:
    far = bytearray(200_000)
    with Software(short()) as software:
        with connected(listen={"regions": {"far": far}}, send_depth=2) as (here, _):
            here.write(b"x" * 200_000, "far")
            assert far == b"x" * 200_000
        assert software.problems() == []


@pytest.mark.parametrize("when", [1, 2])
def test_a_part_that_fails_is_the_error_of_the_whole_and_lets_the_memory_go(when: int) -> None:
    data = bytearray(20_000)
    with Software(short()) as software:
        with connected(listen={"regions": {"far": bytearray(20_000)}}, send_depth=2) as (here, _):
            with (
                software.on("ibv_post_send", fail=errno.ENOMEM, nth=when),
                pytest.raises(PostError, match=r"ENOMEM"),
            ):
                here.write(data, "far")
            here.write(b"the others complete", "far")
            data.extend(b"x")
            with pytest.raises(CompletionError, match="write 20001 bytes"):
                here.write(data, RemoteRegion(0x1000, 1, 1 << 20))
            data.extend(b"x")
        assert software.problems() == []


def test_a_send_longer_than_the_port_s_longest_message_is_refused() -> None:
    with Software(short()) as software:
        with connected(listen={"recv_size": 10_000}, recv_size=10_000) as (here, there):
            assert here.max_send_size == 4096
            here.send(b"x" * 4096)
            assert len(there.recv(deadline_s=5)) == 4096
            with pytest.raises(ValueError, match=r"4097 bytes: .* take at most 4096 in one message. Use write"):
                here.send(b"x" * 4097)
            with here.register(bytearray(5000)) as mr, pytest.raises(ValueError, match="at most 4096"):
                here.send(mr)
        assert software.problems() == []


def test_the_path_takes_no_longer_message_than_either_port() -> None:
    devices = [Device("soft0", [Port(max_msg_sz=1 << 20)]), Device("soft1", [Port(["127.0.0.2"], max_msg_sz=5000)])]
    far = bytearray(20_000)
    with Software(devices) as software:
        lengths: list[int] = []
        listen = {"device": "soft1", "regions": {"far": far}, "recv_size": 10_000}
        with connected(listen=listen, device="soft0") as (here, _):
            assert here.max_send_size == 5000
            software.on("ibv_post_send", before=lambda call: lengths.extend(lengths_of(call["wr"])))
            here.write(b"x" * 20_000, "far")
            assert (far, lengths) == (b"x" * 20_000, [5000] * 4)
            with pytest.raises(ValueError, match="soft0 port 1 and soft1 port 1 take at most 5000 in one message"):
                here.send(bytes(5001))
        assert software.problems() == []


def test_a_transfer_of_more_than_four_gib_is_divided(software: Software) -> None:
    """Nothing is posted that no device could do."""
    lengths: list[int] = []
    with connected() as (here, _):
        region = RemoteRegion(0x1000, 7, 5 * GIB)
        memory = mmap.mmap(-1, 4 * GIB + mmap.PAGESIZE, flags=ONLY_MAPPED)

        def posted(call: Any) -> None:
            lengths.extend(lengths_of(call["wr"]))
            for wr in listed(call["wr"]):
                wr.sg_list[0].length = 0  # it need not be moved

        with here.register(memory, abi.AccessFlags(0)) as mr:
            software.on("ibv_post_send", before=posted)
            here.write(mr, region)
        memory.close()
    assert lengths == [GIB] * 4 + [mmap.PAGESIZE]


def test_nobody_waits_for_a_thread_that_divides(software: Software) -> None:
    far = bytearray(1 << 20)
    with connected(listen={"regions": {"far": far}}) as (here, there):
        with running(lambda: here.write(b"a" * (1 << 20), "far"), lambda: here.send(b"meanwhile")):
            assert there.recv(deadline_s=10) == b"meanwhile"
        assert far == b"a" * (1 << 20)
