"""The kernel as an oracle: does it accept exactly the masks that the table allows?

For RC, UC and UD, for every pair of states, `ibv_modify_qp` is asked itself, without the checks of `QueuePair`:
the required mask, every mask that differs from it in one bit, and masks drawn at random. Its yes or no must be
the table's; where rxe or the kernel's core have a rule of their own, it is written down in RULES, with its place
in the source, and the answer must be what the rule says. Values are always valid, so the masks alone decide.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ends import KERNEL, End, attributes, end_on
from nodes import Node

from rdmaconnect import verbs
from rdmaconnect.abi import QpAttrMask, QpState, QpType, ibv_qp_attr
from rdmaconnect.agreement.transitions import DRIVERS, TABLE, diagnose
from rdmaconnect.errors import StateError
from rdmaconnect.objects.address import ah_struct

M, S = QpAttrMask, QpState
SEED = 20261128
#: masks drawn for each pair of states
DRAWN = 200
STATES = (S.RESET, S.INIT, S.RTR, S.RTS, S.SQD, S.ERR)
#: every bit that the table judges; bit 19 (CAP) is in no row of these types
BITS = [int(bit) for bit in QpAttrMask if bit not in DRIVERS]
STATE, CUR, AV = int(M.STATE), int(M.CUR_STATE), int(M.AV)


@dataclass(frozen=True)
class Trial:
    """One question. `frm` is the state it is in, or SQE: then it is in RTS and `cur_qp_state` claims SQE."""

    qp_type: QpType
    frm: QpState
    to: QpState
    mask: int

    def table(self) -> bool:
        """What the table says."""
        try:
            return not diagnose(self.qp_type, self.frm, self.to if self.mask & STATE else self.frm, self.mask)
        except StateError:
            return False


def _unchecked(trial: Trial, answer: bool) -> bool:
    return True if KERNEL >= (6, 4) and not trial.mask & STATE else answer


def _port_too(trial: Trial, answer: bool) -> bool:
    if trial.mask & AV and not (trial.mask & STATE and trial.to == S.RTR):
        return replace(trial, mask=trial.mask | int(M.PORT)).table()
    return answer


def _no_alternate_path(trial: Trial, answer: bool) -> bool:
    return answer and not trial.mask & int(M.ALT_PATH)


def _no_access_flags(trial: Trial, answer: bool) -> bool:
    return answer and not (trial.qp_type == QpType.UD and trial.mask & int(M.ACCESS_FLAGS))


#: what changes the answer after the table, in this order
RULES: dict[str, tuple[Callable[[Trial, bool], bool], str]] = {
    "the kernel adds IBV_QP_PORT to IBV_QP_AV, except on the way to RTR": (
        _port_too,
        "drivers/infiniband/core/uverbs_cmd.c, modify_qp: 'If only IP_QP_AV was set, add in IB_QP_PORT as well'",
    ),
    "rxe checks the mask only if IBV_QP_STATE is in it, since Linux 6.4": (
        _unchecked,
        "drivers/infiniband/sw/rxe/rxe_qp.c, rxe_qp_from_attr: __qp_chk_state under `if (mask & IB_QP_STATE)`",
    ),
    "the kernel has no alternate paths on RoCE": (
        _no_alternate_path,
        "drivers/infiniband/core/verbs.c, _ib_modify_qp: 'Ban them in roce mode'",
    ),
    "rxe has no access flags on UD": (
        _no_access_flags,
        "drivers/infiniband/sw/rxe/rxe_qp.c, rxe_qp_chk_attr: IB_QP_ACCESS_FLAGS only for RC and UC",
    ),
}


def expected(trial: Trial) -> tuple[bool, str]:
    """The answer that must come, and the rule that makes it differ from the table's."""
    answer = table = trial.table()
    why = ""
    for name, (rule, _) in RULES.items():
        changed = rule(trial, answer)
        if changed != answer:
            answer, why = changed, name
    return answer, why if answer != table else ""


def masks(trial: Trial, chance: random.Random) -> list[int]:
    """The required mask, its neighbours, and masks at random: near the row, and anywhere."""
    row = TABLE[trial.qp_type].get((trial.frm, trial.to))
    required = int(row.required) | STATE if row else STATE
    allowed = [bit for bit in BITS if bit & int(row.optional)] if row else []
    found = [required, *(required ^ bit for bit in BITS)]
    while len(found) < 1 + len(BITS) + DRAWN:
        if len(found) % 4:
            mask = required | sum(bit for bit in allowed if chance.random() < 0.5)
            for _ in range(chance.choice((0, 0, 1, 2))):
                mask ^= chance.choice(BITS)
        else:
            mask = sum(bit for bit in BITS if chance.random() < 0.3) | (STATE if chance.random() < 0.8 else 0)
        found.append(mask)
    return [mask | CUR for mask in found] if trial.frm == S.SQE else found


class Subject:
    """A queue pair connected to itself, and the one struct that all its changes are made with."""

    def __init__(self, end: End) -> None:
        self.end, self.qp_type, self.pointer = end, end.qp.qp_type, end.qp.pointer
        self.attr = ibv_qp_attr()
        values: dict[str, Any] = {
            "qkey": 5,
            "path_mig_state": 0,
            "min_rnr_timer": 12,
            "timeout": 14,
            "qp_access_flags": 1,
        }
        values |= {
            "path_mtu": 3,
            "dest_qp_num": end.qp.qp_num,
            "rq_psn": 5,
            "sq_psn": 5,
            "retry_cnt": 6,
            "rnr_retry": 7,
        }
        values |= {"max_rd_atomic": 1, "max_dest_rd_atomic": 1, "alt_port_num": 1, "alt_timeout": 14, "rate_limit": 1}
        for step in attributes(self.qp_type, end, end):
            values |= step
        path = ah_struct(end.path_to(end))
        for name, value in {**values, "ah_attr": path, "alt_ah_attr": path}.items():
            setattr(self.attr, name, value)
        self.state = S.RESET

    def ask(self, state: QpState, claimed: QpState, mask: int) -> int:
        self.attr.qp_state, self.attr.cur_qp_state = state, claimed
        return verbs.ibv_modify_qp(self.pointer, self.attr, mask)

    def go(self, state: QpState) -> None:
        """Take it there, from wherever it is."""
        if self.state == state:
            return
        way = [S.RESET, S.INIT, S.RTR, S.RTS, S.SQD]
        way = [S.RESET, S.INIT, S.ERR] if state == S.ERR else way[: way.index(state) + 1]
        for step in way:
            required = TABLE[self.qp_type][self.state, step].required | M.STATE
            number = self.ask(step, self.state, int(required))
            assert number == 0, (self.qp_type, self.state, step, number)
            self.state = step
        if state == S.SQD:
            self.drain()

    def drain(self) -> None:
        """A draining queue pair refuses all but ERR: wait (rxe_qp.c, __qp_chk_state)."""
        end = time.monotonic() + 30
        while verbs.ibv_query_qp(self.pointer, STATE)[0].sq_draining:
            assert time.monotonic() < end, "the send queue does not drain"

    def found_in(self) -> int:
        return int(verbs.ibv_query_qp(self.pointer, STATE)[0].qp_state)


@dataclass
class Verdicts:
    """Answers of the kernel.

    Attributes:
        trials, accepted: how many there were.
        surprises: those that neither table nor rules explain, with the errno.
        explained: rule -> answers that it makes differ from the table's.
    """

    trials: int = 0
    accepted: int = 0
    surprises: list[tuple[Trial, int]] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)


def consult(subject: Subject, frm: QpState, chance: random.Random, found: Verdicts) -> Verdicts:
    """All trials from one state."""
    real = S.RTS if frm == S.SQE else frm
    for to in (*STATES, S.SQE):
        for mask in masks(Trial(subject.qp_type, frm, to, 0), chance):
            trial = Trial(subject.qp_type, frm, to, mask)
            answer, why = expected(trial)
            subject.go(real)
            number = subject.ask(to, frm, mask)
            found.trials += 1
            found.accepted += number == 0
            if (number == 0) != answer or number not in (0, errno.EINVAL, errno.EOPNOTSUPP):
                found.surprises.append((trial, number))
            elif why:
                found.explained[why] += 1
            if number == 0 and mask & STATE:
                subject.state = to
                if to == S.SQD:
                    subject.drain()
        if not (subject.state == subject.found_in() or found.surprises):
            found.surprises.append((Trial(subject.qp_type, frm, to, 0), subject.found_in()))
    return found


def run(node: Node, qp_type: QpType, found: Verdicts) -> None:
    with end_on(node, qp_type, 5) as end:
        subject = Subject(end)
        for frm in (*STATES, S.SQE):
            consult(subject, frm, random.Random(f"{SEED} {qp_type} {frm}"), found)


def test_the_kernel_accepts_what_the_table_allows(node1: Node, capsys: pytest.CaptureFixture[str]) -> None:
    begun, found = time.monotonic(), Verdicts()
    for qp_type in (QpType.RC, QpType.UC, QpType.UD):
        node1.start(run, node1, qp_type, found).result(900)
    took, explained = time.monotonic() - begun, sum(found.explained.values())
    with capsys.disabled():
        print(f"\noracle: {found.trials} trials on Linux {os.uname().release} in {took:.0f} s, seed {SEED}")
        print(f"oracle: {found.accepted} accepted, {found.trials - found.accepted} refused by the kernel")
        print(f"oracle: {explained} answers other than the table's are explained, {len(found.surprises)} are not")
        for name, number in found.explained.most_common():
            print(f"oracle: {number:6} because {name}\n{'':15}({RULES[name][1]})")
        for trial, number in found.surprises[:20]:
            print(f"oracle: UNEXPLAINED {trial.qp_type} {trial.frm}->{trial.to} {QpAttrMask(trial.mask)}: {number}")
    assert found.surprises == []
    assert found.trials >= 20_000
    assert found.accepted > 1000


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=str)
def test_a_rate_limit_is_refused_by_the_driver_not_by_the_table(node1: Node, qp_type: QpType) -> None:
    """rxe has none, and its provider no way to hand one over: libibverbs/cmd.c, ibv_cmd_modify_qp."""
    with end_on(node1, qp_type, 5) as end:
        subject = Subject(end)
        subject.go(S.RTR)
        row = TABLE[qp_type][S.RTR, S.RTS]
        mask = row.required | M.STATE | M.RATE_LIMIT
        assert not diagnose(qp_type, S.RTR, S.RTS, mask)
        assert subject.ask(S.RTS, S.RTR, int(mask)) == errno.EOPNOTSUPP
        assert subject.found_in() == S.RTR


def test_the_oracle_can_tell_a_wrong_table(node1: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    row = TABLE[QpType.UD][S.RTR, S.RTS]
    wrong = replace(row, optional=row.optional | M.PKEY_INDEX)
    monkeypatch.setitem(TABLE[QpType.UD], (S.RTR, S.RTS), wrong)
    with end_on(node1, QpType.UD, 5) as end:
        subject = Subject(end)
        found = node1.start(consult, subject, S.RTR, random.Random(1), Verdicts()).result(300)
    assert found.surprises
    assert all((trial.frm, trial.to) == (S.RTR, S.RTS) and trial.mask & M.PKEY_INDEX for trial, _ in found.surprises)
