"""`rdmaconnect.abi` against the real headers (see `abi_header`), and what of it needs no header."""

from __future__ import annotations

import ctypes
import pickle
import re
from enum import IntEnum, IntFlag
from typing import Any

import pytest
from abi_header import (
    CC,
    HERE,
    Check,
    Header,
    Target,
    as_of,
    checks,
    enum_checks,
    every_target,
    headers,
    members,
    prototype_check,
    refuted,
    struct_checks,
    structs,
)
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect import abi
from rdmaconnect.abi import AccessFlags, Fails, Mtu, QpAttrMask, QpState, Rate, WcOpcode, WcStatus, bits
from rdmaconnect.abi.cenum import CEnum, CFlag
from rdmaconnect.abi.cstruct import scope
from rdmaconnect.abi.ctext import declarations

HEADERS = headers()
MISSING = "a C compiler" if CC is None else "infiniband/verbs.h: install libibverbs-dev or set RDMACONNECT_HEADERS"
every_header = pytest.mark.parametrize(
    "header", HEADERS or [pytest.param(None, marks=pytest.mark.skip(f"needs {MISSING}"), id="none")], ids=repr
)

ENUM_CLASSES = sorted(abi.ENUMS, key=lambda cls: cls.__name__)
FLAGS = [cls for cls in ENUM_CLASSES if issubclass(cls, CFlag)]
PLAIN = [cls for cls in ENUM_CLASSES if issubclass(cls, CEnum)]

LEFT_OUT = r"flow_action_esp|flow_action$|comp_cntr|dmah|tph|_buf|fd_arr|wr_opcode_str|ind_table_init_attr_mask"
"""Topics of the header that this package leaves alone: IPsec, completion counters, DMA handles, allocated buffers."""

GONE = {"IBV_FLOW_ATTR_FLAGS_ALLOW_LOOP_BACK", "IBV_REREG_MR_KEEP_VALID"}
"""Enumerators of older headers that the newest has no more."""

NOT_OPS = {
    "__ibv_reg_mr": "calls ibv_reg_mr or ibv_reg_mr_iova2",
    "__ibv_reg_mr_iova": "calls ibv_reg_mr_iova or ibv_reg_mr_iova2",
    "ibv_cq_ex_to_cq": "a cast",
    "ibv_flow_label_to_udp_sport": "arithmetic",
    "ibv_inc_rkey": "arithmetic",
    "ibv_is_qpt_supported": "arithmetic",
    "ibv_query_gid_ex": "calls _ibv_query_gid_ex",
    "ibv_query_gid_table": "calls _ibv_query_gid_table",
    "verbs_get_ctx": "finds the table",
}
"""Inline functions of the header that go through no table."""

TABLES: dict[str, Any] = {
    "context": abi.ibv_context_ops,
    "verbs_context": abi.verbs_context,
    "cq_ex": abi.ibv_cq_ex,
    "qp_ex": abi.ibv_qp_ex,
    "wq": abi.ibv_wq,
    "dm": abi.ibv_dm,
}


# ------------------------------------------------------------------------------------------- with a header


@every_header
@every_target
def test_the_compiler_agrees(target: Target, header: Header, capsys: pytest.CaptureFixture[str]) -> None:
    assert target.there, f"install {target.package}: in the lab no compiler may be missing"
    statements = checks(header, target)
    kinds = [check.what.split()[0] for check in statements]
    count = {kind: kinds.count(kind) for kind in ("sizeof", "offset", "size", "type", "prototype")}
    count["enumerator"] = sum(kind.startswith("IBV_") for kind in kinds)
    with capsys.disabled():
        details = ", ".join(f"{number} {kind}" for kind, number in count.items())
        print(f"\nABI of rdma-core {header.label} on {target}: {len(statements)} assertions ({details})")

    assert refuted(header, statements, target) == []
    assert len(statements) > 2000


@every_header
def test_since_is_the_release_that_brought_it(header: Header) -> None:
    there = {name: header.has(name) for name in abi.SINCE}
    newest = max((abi.SINCE[name] for name in there if there[name]), default=abi.OLDEST)
    release = header.release or newest
    assert {name for name in there if there[name] != (abi.SINCE[name] <= release)} == set()


@every_header
def test_what_has_changed_was_otherwise_before(header: Header) -> None:
    was = [name for name, release in abi.CHANGED.items() if release > (header.release or abi.CHANGED[name])]
    now = {check.what.removeprefix("type "): check for check in checks(Header("", header.include))}
    assert [refuted(header, [now[name]]) for name in was] == [[now[name].what] for name in was]


@every_header
def test_no_enumerator_of_the_header_is_missing(header: Header) -> None:
    for cls, (c_name, prefix) in abi.ENUMS.items():
        ours = {prefix + name for name in cls.__members__}
        theirs = set(header.enums.get(c_name or "", [])) if c_name and c_name.startswith("ibv_") else set()
        assert theirs - GONE <= ours, cls


@every_header
def test_structs_have_the_members_of_the_header_in_order(header: Header) -> None:
    for name in (abi.STRUCTS.keys() & header.structs.keys()) - {"timespec"}:
        theirs = [path for path, _ in members(header.structs[name])]
        ours = [path for path, _ in members(abi.STRUCTS[name]._c_) if header.should_have(f"{name}.{path}")]
        assert ours == theirs, name
    absent = abi.STRUCTS.keys() - header.structs.keys() - {"timespec"}
    assert [name for name in absent if header.should_have(name)] == []


@every_header
def test_what_is_left_out_is_left_out_on_purpose(header: Header) -> None:
    ours = {c_name for c_name, _ in abi.ENUMS.values()} | set(abi.STRUCTS) | set(abi.PROTOTYPES)
    theirs = {*header.enums, *header.structs, *header.functions}
    missing = {name for name in theirs if re.match(r"_?(ibv|verbs|mult_to|mbps_to)_", name)} - ours
    assert [name for name in sorted(missing) if not re.search(LEFT_OUT, name)] == []


@every_header
def test_ops_are_what_the_inlines_do(header: Header) -> None:
    inlines = {name.replace("___ibv_query_port", "ibv_query_port"): body for name, body in header.inlines.items()}
    ours = {f"ibv_{n.removeprefix('ibv_')}" for n in inlines} - set(abi.OPS) - set(NOT_OPS)
    assert [name for name in sorted(ours & set(inlines)) if not re.search(LEFT_OUT, name)] == []
    for op in abi.OPS.values():
        if not header.should_have(f"{TABLES[op.table].__name__}.{op.field}"):
            continue
        body = inlines[op.name]
        holder = {"context": r"ops\.", "verbs_context": "vctx->"}.get(op.table, r"\w+->")
        assert re.search(rf"{holder}{op.field}\(", body), op
        if "return NULL;" in body:
            assert op.fails is Fails.NULL_ERRNO, op
        elif "return EOPNOTSUPP;" in body or "return EINVAL;" in body:
            assert op.fails is Fails.ERRNO_RETURNED, op


@every_header
def test_structs_have_only_grown(header: Header) -> None:
    """What an older library has is where the newest header says: at the same offset, or as far from the end."""
    for name, old in structs(header, HERE.mutex).items():
        cls = abi.STRUCTS[name]
        shift = ctypes.sizeof(cls) - ctypes.sizeof(old) if cls is abi.verbs_context else 0
        for field, *_ in old._fields_:
            assert getattr(cls, field).offset == getattr(old, field).offset + shift, f"{name}.{field}"


def planted(header: Header) -> dict[str, list[Check]]:
    """Errors of each kind, by the statement that the compiler must refuse."""

    class ibv_sge(ctypes.Structure):
        _c_ = "uint64_t addr; uint32_t lkey; uint32_t length;"

    class ibv_recv_wr(ctypes.Structure):
        _c_ = "uint64_t wr_id; struct ibv_recv_wr *next; struct ibv_sge *sg_list; int num_sge; uint64_t more;"

    class ibv_qp_cap(ctypes.Structure):
        _c_ = abi.ibv_qp_cap._c_.replace("uint32_t max_recv_wr", "int max_recv_wr")

    class ibv_context_ops(ctypes.Structure):
        _c_ = abi.ibv_context_ops._c_.replace("int num_entries", "unsigned int num_entries")

    class ReadyState(IntEnum):
        RTR = 3

    def prototype(text: str) -> Check:
        name = re.findall(r"(\w+)\(", text)[0]
        return prototype_check(abi.PROTOTYPES["ibv_open_device"]._replace(name=name, text=text))

    def struct(cls: Any) -> list[Check]:
        return list(struct_checks(cls.__name__, as_of(header, cls.__name__, cls)))

    return {
        "offset ibv_sge.length": struct(ibv_sge),
        "sizeof ibv_recv_wr": struct(ibv_recv_wr),
        "type ibv_qp_cap.max_recv_wr": struct(ibv_qp_cap),
        "type ibv_context_ops.poll_cq": struct(ibv_context_ops),
        "IBV_QPS_RTR": list(enum_checks(header, ReadyState, None, "IBV_QPS_")),
        "prototype ibv_modify_qp": [
            prototype("int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, unsigned int attr_mask)")
        ],
        "prototype ibv_close_device": [prototype("void ibv_close_device(struct ibv_context *context)")],
        "prototype ibv_invented": [prototype("int ibv_invented(void)")],
    }


@every_header
@every_target
def test_a_planted_error_is_caught(target: Target, header: Header) -> None:
    errors = planted(header)
    found = refuted(header, [check for statements in errors.values() for check in statements], target)
    assert [what for what in errors if what not in found] == []


@every_header
@every_target
def test_the_size_of_a_lock_is_the_machine_s(target: Target, header: Header) -> None:
    other = Check("sizeof pthread_mutex_t", f'_Static_assert(sizeof(pthread_mutex_t) == {88 - target.mutex}, "");')
    assert refuted(header, [other], target) == [other.what]


# ---------------------------------------------------------------------------------------- without a header


@given(cls=st.sampled_from(PLAIN), number=st.integers(-(2**31), 2**32))
def test_any_number_is_a_value(cls: type[CEnum], number: int) -> None:
    value = cls(number)
    assert isinstance(value, cls)
    assert value == number
    assert hash(value) == hash(number)
    assert str(value) == (value.name if value.known else f"unknown ({number})")
    assert pickle.loads(pickle.dumps(value)) == value


@given(cls=st.sampled_from(FLAGS), number=st.integers(0, 2**40))
def test_any_number_is_a_set_of_flags(cls: type[CFlag], number: int) -> None:
    value = cls(number)
    assert int(value) == number
    parts = str(value).split("|")
    assert sum(int(cls[p]) if p in cls.__members__ else int(p, 16) for p in parts) == number
    assert sum(bits(value)) == sum(int(cls[p]) for p in parts if p in cls.__members__)


def test_how_values_print() -> None:
    assert [str(QpState.RTR), str(QpState(99)), str(WcStatus(-5))] == ["RTR", "unknown (99)", "unknown (-5)"]
    assert f"{QpState.RTR}|{QpState.RTR:>5}|{QpState.RTR:d}|{QpState.RTR:#x}" == "RTR|  RTR|2|0x2"
    assert "unknown (99)" in repr(QpState(99))
    assert str(QpAttrMask.PORT | QpAttrMask.STATE) == "STATE|PORT"
    assert str(QpAttrMask(1 << 30 | 1)) == "STATE|0x40000000"
    assert f"{QpAttrMask(0)} {QpAttrMask(1 << 30)} {QpAttrMask.PORT:#x}" == "0 0x40000000 0x20"
    assert str(Rate(5)) == "RATE_5_GBPS"
    with pytest.raises(ValueError, match="QpState"):
        QpState("RTR")  # type: ignore[arg-type]


def test_flags_combine_and_come_apart() -> None:
    mask = QpAttrMask.STATE | QpAttrMask.AV
    assert bits(mask | QpAttrMask(1 << 30)) == [QpAttrMask.STATE, QpAttrMask.AV]
    assert mask & ~QpAttrMask.AV == QpAttrMask.STATE
    assert bits(abi.ReregMrFlags.FLAGS_SUPPORTED) == list(abi.ReregMrFlags.__members__.values())[:3]
    assert AccessFlags.REMOTE_READ not in AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def test_numbers_that_the_documentation_gives() -> None:
    assert [128 << mtu for mtu in Mtu] == [256, 512, 1024, 2048, 4096]
    assert WcOpcode.RECV_RDMA_WITH_IMM & WcOpcode.RECV


def test_every_enum_is_registered_and_exported() -> None:
    found = {v for v in vars(abi).values() if isinstance(v, type) and issubclass(v, (IntEnum, IntFlag))}
    assert found - {CEnum, CFlag} == set(abi.ENUMS)
    assert sorted(abi.__all__) == sorted(set(abi.__all__))
    assert all(hasattr(abi, name) for name in abi.__all__)


def test_everything_is_documented() -> None:
    for thing in [*abi.ENUMS, *abi.STRUCTS.values()]:
        assert thing.__doc__, thing
        assert not thing.__doc__.startswith("An enumeration"), thing


C_TEXT = {
    "uint64_t wr_id;": ("wr_id", ctypes.c_uint64),
    "enum ibv_wc_status status;": ("status", ctypes.c_int),
    "char name[64];": ("name", ctypes.c_char * 64),
    "void *addr;": ("addr", ctypes.c_void_p),
    "void **where;": ("where", ctypes.POINTER(ctypes.c_void_p)),
    "const char *text;": ("text", ctypes.c_char_p),
    "struct ibv_sge *list;": ("list", ctypes.POINTER(abi.ibv_sge)),
    "struct ibv_sge **list;": ("list", ctypes.POINTER(ctypes.POINTER(abi.ibv_sge))),
    "struct ibv_buf *opaque;": ("opaque", ctypes.c_void_p),
    "unsigned int flags;": ("flags", ctypes.c_uint),
}


@pytest.mark.parametrize("text", C_TEXT)
def test_c_text(text: str) -> None:
    (found,) = declarations(text, scope(abi.STRUCTS))
    assert (found.name, found.ctype) == C_TEXT[text]
    assert found.argtypes is None
    assert found.text == text[:-1]


def test_c_text_of_functions() -> None:
    field, function = declarations("int (*f)(struct ibv_cq *cq, int); void g(void);", scope(abi.STRUCTS))
    assert field.ctype._restype_ is ctypes.c_int
    assert field.ctype._argtypes_ == (ctypes.POINTER(abi.ibv_cq), ctypes.c_int)
    assert (function.name, function.ctype, function.argtypes) == ("g", None, ())


@pytest.mark.parametrize(
    "text",
    [
        "uint64_t wr_id",  # no semicolon
        "uint64_t;;",
        "uint64_t 9lives;",
        "uint65_t x;",
        "struct ibv_unheard_of *x;",
        "struct ibv_buf by_value;",
        "void nothing;",
        "char name[SIZE];",
        "char name[4;",
        "int (*f)(int, );",
        "int (f)(int);",
        "int f(struct ibv_buf flow);",
        "int f(int",
        "int f(void",
        "union { int x;",
        "int x:3;",
    ],
)
def test_bad_c_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="C text"):
        declarations(text, scope(abi.STRUCTS))


def test_anonymous_members_belong_to_the_struct_around_them() -> None:
    wr = abi.ibv_send_wr(imm_data=0x01020304)
    assert wr.invalidate_rkey == 0x01020304
    wr.wr.rdma.remote_addr, wr.wr.atomic.swap = 7, 9
    assert (wr.wr.atomic.remote_addr, wr.wr.atomic.swap) == (7, 9)
    wr.tso.mss = 1500
    assert wr.bind_mw.rkey == 1500 << 16


def test_prototypes_fit_their_failure_convention() -> None:
    for prototype in abi.PROTOTYPES.values():
        if prototype.fails is Fails.NULL_ERRNO:
            assert issubclass(prototype.restype, ctypes._Pointer), prototype
        elif prototype.fails is not Fails.NEVER:
            assert prototype.restype in (ctypes.c_int, ctypes.c_ssize_t), prototype
        assert re.fullmatch(r"IBVERBS_1\.\d+", prototype.since), prototype


def test_ops_name_function_pointers() -> None:
    for op in abi.OPS.values():
        field = dict(TABLES[op.table]._fields_)[op.field]
        restype = field._restype_
        if op.fails is Fails.NULL_ERRNO:
            assert issubclass(restype, ctypes._Pointer), op
        elif op.fails is not Fails.NEVER:
            assert restype is ctypes.c_int, op
