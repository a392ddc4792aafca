"""What two ends that are alike agree on: each works it out by itself, and both come to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import V1, V2, end, ends, gid, infiniband, roce, wishes

from rdmaconnect.abi import Mtu, QpType
from rdmaconnect.agreement.endpoint import Endpoint
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Wish, make_path
from rdmaconnect.agreement.symmetric import agree_on_ways, seen_from_the_other
from rdmaconnect.errors import PeerMismatch

NONE = Wish()
kinds = st.sampled_from([QpType.RC, QpType.UC, QpType.UD])


@st.composite
def sides(draw: st.DrawFn) -> list[Endpoint]:
    """The queue pairs of one end: all of one type, each on a port of its own."""
    kind, some = draw(kinds), [draw(ends())[0] for _ in range(draw(st.integers(1, 4)))]
    return [replace(one, qp_type=kind, port=replace(one.port, port_num=n)) for n, one in enumerate(some, 1)]


@given(sides(), sides(), wishes, wishes, st.data())
def test_both_come_to_the_same_path(
    one: list[Endpoint], other: list[Endpoint], wish: Wish, own: Wish, draw: st.DataObject
) -> None:
    try:
        ways = agree_on_ways(one, other, wish, own)
    except PeerMismatch:
        return
    assert len({here for here, _, _ in ways}) == len({there for _, there, _ in ways}) == len(ways)
    here, there, agreement = draw.draw(st.sampled_from(ways))
    a, b = one[here], other[there]
    mine = make_path(a, b, agreement, Options(), connector=True)
    # each takes itself for the connector
    theirs = make_path(b, a, seen_from_the_other(agreement), Options(), connector=True)
    assert theirs == make_path(b, a, agreement, Options(), connector=False)
    assert (mine.path_mtu, mine.rq_psn, mine.sq_psn) == (theirs.path_mtu, theirs.sq_psn, theirs.rq_psn)
    assert (mine.local_gid, mine.remote_gid) == (theirs.remote_gid, theirs.local_gid)
    assert (mine.dest_qp_num, theirs.dest_qp_num) == (b.qp_num, a.qp_num)


def test_the_best_pair_of_all_ports_is_taken() -> None:
    one = [end(roce(gid("10.0.0.1", V1), device="a")), end(roce(gid("10.0.1.1", V2), device="b"))]
    other = [end(roce(gid("10.0.2.2", V1), device="x")), end(roce(gid("10.0.1.2", V2), device="y", port_num=2))]
    (here, there, agreement), (next_, last, _) = agree_on_ways(one, other, NONE, NONE)
    assert (here, there, next_, last) == (1, 1, 0, 0)
    assert [str(g.gid) for g in (agreement.connector_gid, agreement.listener_gid) if g] == [
        "::ffff:10.0.1.1",
        "::ffff:10.0.1.2",
    ]


def test_a_pair_that_does_not_go_together_is_passed_over() -> None:
    best, next_ = roce(gid("10.0.1.1"), device="a", pkeys=(0x8001,)), roce(gid("10.0.2.1"), device="b")
    ((here, there, _),) = agree_on_ways([end(best), end(next_)], [end(roce(gid("10.0.1.2")))], NONE, NONE)
    assert (here, there) == (1, 0)


def test_all_differences_of_all_pairs_are_told_once() -> None:
    one = [end(infiniband(0)), end(roce(gid("10.0.0.1"), pkeys=(0x8001,)))]
    with pytest.raises(PeerMismatch) as caught:
        agree_on_ways(one, [end(roce(gid("fe80::1")))], Wish(sl=1), Wish(sl=2), ["tag: another"])
    words = [text.partition(":")[0] for text in caught.value.differences]
    assert words == ["tag", "sl", "link layer", "P_Key", "GIDs"]
    assert caught.value.ports == ()


def test_what_was_found_besides_refuses_what_goes_together() -> None:
    with pytest.raises(PeerMismatch, match="count: 1 and 2"):
        agree_on_ways([end()], [end(roce(gid("10.0.0.2"), active_mtu=Mtu.MTU_256))], NONE, NONE, ["count: 1 and 2"])
