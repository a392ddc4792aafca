"""The errors: what they are, what they hold, how they read."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import re

import pytest

import rdmaconnect
from rdmaconnect import abi, errors
from rdmaconnect.abi import EventType, QpAttrMask, QpState, WcStatus
from rdmaconnect.abi.rdma_cma import CM_PROTOTYPES
from rdmaconnect.errors import (
    HINTS,
    CompletionError,
    ConnectTimeout,
    DeadlineExceeded,
    DeviceError,
    LibraryError,
    LocalProtocolError,
    ModifyError,
    OutcomeUnknown,
    PeerClosed,
    PeerMismatch,
    PeerRejected,
    PostError,
    RdmaConnectError,
    RemoteProtocolError,
    StateError,
    VerbsError,
    errno_name,
    hint_for,
)

MODIFY = ModifyError(
    errno.ETIMEDOUT, "move QP 0x00011c INIT->RTR on mlx5_0 port 1", qp_num=0x11C, frm=QpState.INIT, to=QpState.RTR,
    mask=QpAttrMask.STATE, missing=QpAttrMask.AV, not_allowed=QpAttrMask.CAP, path="a path",
    hint="The route to ::ffff:10.0.0.7 did not resolve.",
)  # fmt: skip
EXAMPLES: dict[str, RdmaConnectError] = {
    "library": LibraryError("load libibverbs.so.1: not found. Install it."),
    "device": DeviceError("find an RDMA device: there is none."),
    "verbs": VerbsError("ibv_reg_mr", errno.ENOMEM, "register 64 bytes of memory"),
    "modify": MODIFY,
    "completion": CompletionError(WcStatus.RETRY_EXC_ERR, vendor_err=0x81, wr_id=7, qp_num=0x11C, opcode="SEND"),
    "unknown": OutcomeUnknown(
        WcStatus.WR_FLUSH_ERR,
        generation=3,
        why="the peer is gone.",
        wr_id=7,
        qp_num=0x11C,
        opcode="SEND",
        doing="send 5 bytes",
    ),
    "state": StateError("QP 0x11 is closed."),
    "mismatch": PeerMismatch(["qp_type: connector RC, listener UD", "LID: connector 0x0, listener 0x5"]),
    "rejected": PeerRejected("asked", 110, "the route did not resolve"),
    "post": PostError("ibv_post_send", errno.ENOMEM, "post to QP 0x11", posted=3, wr_id=7),
    "closed": PeerClosed("send: the peer closed the connection."),
    "local": LocalProtocolError("connector: a ready may not be sent while idle."),
    "remote": RemoteProtocolError("decode: the peer's frame has no version."),
    "deadline": DeadlineExceeded("recv", 1.5, "Is the peer alive?"),
    "timeout": ConnectTimeout("connect: wait for the peer's reply", 30.0),
}
each = pytest.mark.parametrize("error", EXAMPLES.values(), ids=EXAMPLES)


@pytest.mark.parametrize(
    ("cls", "also"),
    [
        (LibraryError, OSError), (VerbsError, OSError), (ModifyError, VerbsError), (PeerClosed, ConnectionError),
        (DeadlineExceeded, TimeoutError), (ConnectTimeout, DeadlineExceeded), (ConnectTimeout, TimeoutError),
        (LocalProtocolError, errors.ProtocolError), (RemoteProtocolError, errors.ProtocolError),
        (OutcomeUnknown, CompletionError),
    ],
)  # fmt: skip
def test_errors_are_also_what_callers_catch_elsewhere(cls: type[Exception], also: type[Exception]) -> None:
    assert issubclass(cls, also)


def test_every_class_is_public_has_one_base_and_the_drawing_shows_it() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for cls in classes:
        assert issubclass(cls, RdmaConnectError)
        assert cls.__name__ in errors.__all__
        assert getattr(rdmaconnect, cls.__name__, cls) is cls
        assert re.search(rf"\b{cls.__name__}\b", errors.__doc__ or ""), cls
    assert {type(error) for error in EXAMPLES.values()} | {
        RdmaConnectError, errors.ProtocolError, errors.AuthenticationError
    } == set(classes)  # fmt: skip


@each
def test_a_message_is_one_line_without_a_number_in_front(error: RdmaConnectError) -> None:
    assert str(error).isprintable()
    assert not str(error).startswith("[Errno")


@each
def test_an_error_survives_a_copy_and_the_way_to_another_process(error: RdmaConnectError) -> None:
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.args == error.args
        assert vars(twin) == vars(error)
        assert getattr(twin, "errno", None) == getattr(error, "errno", None)


def fail() -> None:
    raise EXAMPLES["modify"]


def test_an_error_comes_out_of_a_process_pool() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(ModifyError, match="INIT->RTR") as caught:
        pool.apply_async(fail).get(30)
    assert (caught.value.qp_num, caught.value.to) == (0x11C, QpState.RTR)


# ---- deed: verdict. Next step.


def test_a_verb_that_failed_is_named_with_its_errno_and_the_next_step() -> None:
    error = VerbsError("ibv_reg_mr", errno.ENOMEM, "register 64 bytes of memory")
    assert (error.verb, error.errno, error.doing) == ("ibv_reg_mr", errno.ENOMEM, "register 64 bytes of memory")
    assert str(error) == (
        "register 64 bytes of memory: ibv_reg_mr: ENOMEM (12), Cannot allocate memory. "
        "The locked-memory limit is too low (`ulimit -l` tells it, in KiB): in a shell `ulimit -l unlimited`, in a "
        "systemd unit LimitMEMLOCK=infinity, in Docker --ulimit memlock=-1, in Slurm "
        "PropagateResourceLimitsExcept=MEMLOCK."
    )


def test_a_verb_without_a_hint_ends_with_its_verdict() -> None:
    assert str(VerbsError("ibv_query_port", errno.EIO)) == "ibv_query_port: EIO (5), Input/output error."
    assert str(VerbsError("ibv_reg_mr", errno.ENOMEM, hint="")).endswith("Cannot allocate memory.")


def test_a_refused_step_holds_all_that_is_known() -> None:
    assert str(MODIFY) == (
        "move QP 0x00011c INIT->RTR on mlx5_0 port 1: ibv_modify_qp: ETIMEDOUT (110), Connection timed out. "
        "The route to ::ffff:10.0.0.7 did not resolve."
    )
    assert (MODIFY.verb, MODIFY.errno, MODIFY.qp_num, MODIFY.path) == ("ibv_modify_qp", 110, 0x11C, "a path")
    assert (MODIFY.frm, MODIFY.to, MODIFY.mask) == (QpState.INIT, QpState.RTR, QpAttrMask.STATE)
    assert (MODIFY.missing, MODIFY.not_allowed) == (QpAttrMask.AV, QpAttrMask.CAP)


def test_a_failed_completion_names_its_status_and_never_an_errno() -> None:
    error = CompletionError(WcStatus.RETRY_EXC_ERR, vendor_err=0x81, wr_id=7, qp_num=0x11C, opcode="SEND")
    assert str(error).startswith("SEND on QP 0x00011c: work completion RETRY_EXC_ERR (12), vendor_err 0x81. The peer ")
    assert (error.status, error.vendor_err, error.wr_id, error.qp_num, error.opcode) == (12, 0x81, 7, 0x11C, "SEND")
    assert not isinstance(error, OSError)
    unknown = CompletionError(WcStatus(99), doing="send 5 bytes")
    assert str(unknown) == "send 5 bytes: work completion unknown (99) (99), vendor_err 0x0."


def test_a_wait_that_ran_out_says_where_and_how_long() -> None:
    error = DeadlineExceeded("recv from QP 0x000011", 29.9999, "Is the peer alive?")
    assert str(error) == "recv from QP 0x000011: no success within 30 s. Is the peer alive?"
    assert (error.stage, error.waited_s, error.errno) == ("recv from QP 0x000011", 29.9999, errno.ETIMEDOUT)
    assert str(DeadlineExceeded("recv", 0.001)) == "recv: no success within 0.001 s."


def test_a_missing_function_is_told_from_a_missing_library() -> None:
    assert LibraryError("load libibverbs.so.1: no.").errno == errno.ENOENT
    assert LibraryError("ibv_x: absent.", errno.EOPNOTSUPP).errno == errno.EOPNOTSUPP


def test_all_differences_are_held_and_told() -> None:
    error = PeerMismatch(["a", "b"])
    assert error.differences == ("a", "b")
    assert str(error) == "join the two ends: a; b."


def test_a_rejection_holds_the_peers_own_words() -> None:
    error = PeerRejected("answered", 110, "no route")
    assert (error.stage, error.errno, error.reason) == ("answered", 110, "no route")
    assert str(error) == "connect: the peer refused at answered: no route"


# ---- errnos and hints


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (110, "ETIMEDOUT (110)"), (95, "EOPNOTSUPP (95)"), (11, "EAGAIN (11)"),
        (4095, "unknown errno (4095)"), (-1, "unknown errno (-1)"),
    ],
)  # fmt: skip
def test_an_errno_is_shown_by_name_and_number(number: int, words: str) -> None:
    assert errno_name(number) == words


def test_every_hint_belongs_to_something_that_can_happen() -> None:
    for (what, condition), text in HINTS.items():
        verb = what.partition(" ")[0]
        if what == "completion":
            assert condition in WcStatus.__members__
        elif what == "event":
            assert condition in EventType.__members__
        else:
            assert (
                what in ("any verb", "bind", "zmq_socket", "rdma link add")
                or verb in abi.PROTOTYPES.keys() | abi.OPS.keys() | CM_PROTOTYPES.keys()
            ), what
            assert getattr(errno, condition) in errno.errorcode
        steps = {"verb", "link add", *QpState.__members__, *QpAttrMask.__members__}
        assert verb == what or what.partition(" ")[2] in steps
        assert text.endswith((".", ")")), text
        if what not in ("completion", "event"):
            found = hint_for(what, getattr(errno, condition), gid_index=1, local_gid=2, remote_gid=3)
            assert found
            assert "{" not in found


@pytest.mark.parametrize("status", [status for status in WcStatus if status is not WcStatus.SUCCESS], ids=str)
def test_every_completion_status_that_is_an_error_has_a_hint(status: WcStatus) -> None:
    assert str(CompletionError(status)).endswith(HINTS["completion", status.name])


#: what the faults of the field gave on SoftRoCE, and what other hosts were seen to give
FIELD = """
ibv_modify_qp RTR: ENODATA EINVAL ETIMEDOUT ENETUNREACH ENODEV
ibv_create_ah: ETIMEDOUT EINVAL
ibv_post_recv: EINVAL
ibv_post_send: EINVAL ENOMEM
ibv_create_qp: EINVAL EOPNOTSUPP
ibv_create_cq: EINVAL
ibv_modify_qp RTS: EINVAL
ibv_modify_qp INIT: EINVAL
ibv_reg_mr: ENOMEM
ibv_create_comp_channel: EMFILE
ibv_open_device: ENOENT EACCES EPERM
rdma link add: EEXIST ENODEV
bind: EADDRINUSE
"""


def test_every_failure_seen_in_the_field_has_a_hint() -> None:
    lines = [line.partition(": ") for line in FIELD.strip().splitlines()]
    seen = {(verb, name) for verb, _, names in lines for name in names.split()}
    assert seen - HINTS.keys() == set()


def test_a_hint_is_filled_or_left_out() -> None:
    fields = {"gid_index": 3, "local_gid": "::ffff:10.0.0.4, RoCE v2", "remote_gid": "::ffff:10.0.0.7"}
    found = hint_for("ibv_modify_qp RTR", errno.ETIMEDOUT, **fields)
    assert found.startswith("The route to ::ffff:10.0.0.7 did not resolve from gid_index 3 (::ffff:10.0.0.4, RoCE v2):")
    assert hint_for("ibv_modify_qp RTR", errno.ETIMEDOUT) == ""
    assert hint_for("ibv_modify_qp RTR", 9999, **fields) == ""
    assert hint_for("ibv_create_qp", os.EX_OK) == ""
    assert hint_for("ibv_create_qp", errno.ENOTSUP) == HINTS["ibv_create_qp", "EOPNOTSUPP"]
