"""What two ends agree on."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import IB, V1, V2, end, ends, gid, infiniband, roce, wishes

from rdmaconnect.abi import AccessFlags, GidType, LinkLayer, Mtu, QpType
from rdmaconnect.agreement.candidates import Candidate, candidates, find_gid, narrow, rank_pairs
from rdmaconnect.agreement.endpoint import Endpoint, GidEntry, GidKey, PortAddress
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Agreement, Path, Wish, agree, make_path
from rdmaconnect.agreement.unproven import between, unproven
from rdmaconnect.errors import PeerMismatch, RemoteProtocolError

HERE = end(roce(gid("10.0.0.1", gid_index=3)), qp_num=0x11, psn=0x111111)
THERE = end(roce(gid("10.0.0.2", gid_index=7), device="rxe1"), qp_num=0x22, psn=0x222222)


def paths(connector: Endpoint, listener: Endpoint, wish: Wish | None = None) -> tuple[Path, Path]:
    """Both ends' paths, each made by its own end."""
    agreement = agree(connector, listener, wish or Wish())
    return (
        make_path(connector, listener, agreement, Options(), connector=True),
        make_path(listener, connector, agreement, Options(), connector=False),
    )


def differences(connector: Endpoint, listener: Endpoint, wish: Wish | None = None) -> tuple[str, ...]:
    with pytest.raises(PeerMismatch) as caught:
        agree(connector, listener, wish or Wish())
    assert str(caught.value) == f"join the two ends: {'; '.join(caught.value.differences)}."
    return caught.value.differences


# ---- both ends


def test_each_end_sends_from_its_own_psn_and_expects_the_peers() -> None:
    mine, theirs = paths(HERE, THERE)
    assert (mine.sq_psn, mine.rq_psn) == (0x111111, 0x222222)
    assert (theirs.sq_psn, theirs.rq_psn) == (0x222222, 0x111111)
    assert (mine.dest_qp_num, theirs.dest_qp_num) == (0x22, 0x11)


@given(ends(), ends(), wishes)
@settings(max_examples=60)
def test_both_ends_derive_mirrored_paths(ours: tuple[Endpoint, ...], theirs: tuple[Endpoint, ...], wish: Wish) -> None:
    common = {
        "link_layer": ours[0].port.link_layer,
        "gids": (*theirs[0].port.gids, gid("10.0.0.1")),
        "pkeys": (0xFFFF,),
    }
    a, b = (replace(e[0], qp_type=QpType.RC, port=replace(e[0].port, **common)) for e in (ours, theirs))
    a, b = (replace(e, port=replace(e.port, lid=e.port.lid or 1)) for e in (a, b))
    mine, yours = paths(a, b, replace(wish, pkey=None))
    assert (mine.rq_psn, mine.sq_psn, mine.dest_qp_num) == (yours.sq_psn, yours.rq_psn, b.qp_num)
    assert yours.dest_qp_num == a.qp_num
    assert mine.path_mtu == yours.path_mtu == min(a.port.active_mtu, b.port.active_mtu, wish.path_mtu)
    assert mine.max_rd_atomic == yours.max_dest_rd_atomic == min(a.port.max_rd_atomic, b.port.max_dest_rd_atomic)
    assert mine.max_dest_rd_atomic == yours.max_rd_atomic == min(a.port.max_dest_rd_atomic, b.port.max_rd_atomic)
    assert (mine.ah_attr.dlid, yours.ah_attr.dlid) == (b.port.lid, a.port.lid)
    assert (mine.port_num, yours.port_num) == (a.port.port_num, b.port.port_num)
    for path in (mine, yours):
        assert path.ah_attr.port_num == path.port_num
        assert path.ah_attr.sl == (wish.sl or 0)
    assert mine.ah_attr.is_global == yours.ah_attr.is_global
    if mine.ah_attr.is_global:
        assert mine.local_gid is not None
        assert yours.local_gid is not None
        assert mine.ah_attr.dgid == yours.local_gid.gid.raw
        assert yours.ah_attr.dgid == mine.local_gid.gid.raw
        assert mine.local_gid.gid_type == yours.local_gid.gid_type
        for path in (mine, yours):
            assert path.ah_attr.flow_label == (wish.flow_label or 0)
            assert path.ah_attr.traffic_class == (wish.traffic_class or 0)
    else:
        assert mine.local_gid is mine.remote_gid is yours.local_gid is yours.remote_gid is None


def test_the_wish_of_the_connector_applies_to_both_ends() -> None:
    for path in paths(HERE, THERE, Wish(Mtu.MTU_512, sl=3, traffic_class=96, flow_label=0xABCDE)):
        assert path.path_mtu is Mtu.MTU_512
        assert (path.ah_attr.sl, path.ah_attr.traffic_class, path.ah_attr.flow_label) == (3, 96, 0xABCDE)


def test_the_wishes_of_both_ends_are_met_together() -> None:
    here, there = Wish(Mtu.MTU_2048, sl=3), Wish(Mtu.MTU_512, traffic_class=96, flow_label=0)
    for mine, theirs in ((here, there), (there, here)):
        agreement = agree(HERE, THERE, mine, own=theirs)
        assert (agreement.path_mtu, agreement.sl, agreement.traffic_class) == (Mtu.MTU_512, 3, 96)
        why = make_path(HERE, THERE, agreement, Options(), connector=True).why
        assert why[-1] == "sl 3, traffic_class 96: as wished"
    assert agree(HERE, THERE, Wish(sl=3), own=Wish(sl=3)).sl == 3
    pkeys = (0xFFFF, 0x8005)
    both = [end(roce(gid(f"10.0.0.{n}"), pkeys=pkeys)) for n in (1, 2)]
    assert agree(both[0], both[1], Wish(), own=Wish(pkey=5)).pkey == 5
    assert agree(both[0], both[1], Wish(pkey=0x8005), own=Wish(pkey=5)).pkey == 5, "membership is no difference"


def test_wishes_that_differ_are_told_all_at_once() -> None:
    mine, theirs = Wish(Mtu.MTU_256, 0, 1, 2, 0xFFFF), Wish(Mtu.MTU_512, 7, 8, 9, 0x8005)
    with pytest.raises(PeerMismatch) as caught:
        agree(HERE, THERE, mine, own=theirs)
    assert caught.value.differences[:4] == (
        "sl: the connector wishes 0x0, the listener 0x7",
        "traffic_class: the connector wishes 0x1, the listener 0x8",
        "flow_label: the connector wishes 0x2, the listener 0x9",
        "pkey: the connector wishes 0xffff, the listener 0x8005",
    )


def test_a_wish_is_the_part_of_the_options_that_concerns_both() -> None:
    options = Options(path_mtu=2048, sl=1, traffic_class=2, flow_label=3, pkey=0x8001, timeout=20)
    assert Wish.of(options) == Wish(Mtu.MTU_2048, 1, 2, 3, 0x8001)
    assert Wish.of(Options()) == Wish()
    assert Wish.of(Options(probe=False)) == Wish(probe=False)


@pytest.mark.parametrize(
    "fields", [{"sl": 16}, {"traffic_class": 256}, {"flow_label": 2**20}, {"pkey": 0}, {"path_mtu": Mtu(6)}]
)
def test_a_wish_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} is "):
        Wish(**fields)


@pytest.mark.parametrize(("here", "there", "wish"), [(5, 3, 5), (3, 5, 5), (5, 5, 3), (1, 2, 3), (4, 4, 4)])
def test_the_smallest_mtu_counts_and_a_difference_is_told(here: int, there: int, wish: int) -> None:
    a = end(roce(gid("10.0.0.1"), active_mtu=Mtu(here)))
    b = end(roce(gid("10.0.0.2"), active_mtu=Mtu(there)))
    for path in paths(a, b, Wish(Mtu(wish))):
        assert path.path_mtu == min(here, there, wish)
        assert any("path_mtu" in line for line in path.why) is (len({here, there, min(here, there, wish)}) > 1)


def test_reads_outstanding_are_those_that_the_other_end_answers() -> None:
    a = end(roce(gid("10.0.0.1"), max_rd_atomic=16, max_dest_rd_atomic=4))
    b = end(roce(gid("10.0.0.2"), max_rd_atomic=1, max_dest_rd_atomic=8))
    mine, theirs = paths(a, b)
    assert (mine.max_rd_atomic, mine.max_dest_rd_atomic) == (8, 1)
    assert (theirs.max_rd_atomic, theirs.max_dest_rd_atomic) == (1, 8)


def test_the_timers_are_each_ends_own() -> None:
    agreement = agree(HERE, THERE, Wish())
    options = Options(timeout=20, retry_cnt=1, rnr_retry=2, min_rnr_timer=3, hop_limit=4)
    path = make_path(HERE, THERE, agreement, options, connector=True)
    assert (path.timeout, path.retry_cnt, path.rnr_retry, path.min_rnr_timer, path.ah_attr.hop_limit) == (
        20,
        1,
        2,
        3,
        4,
    )


def test_a_peer_may_do_what_the_type_of_queue_pair_can() -> None:
    remote = {QpType.RC: "REMOTE_WRITE|REMOTE_READ|REMOTE_ATOMIC", QpType.UC: "REMOTE_WRITE", QpType.UD: ""}
    for qp_type, words in remote.items():
        path, _ = paths(replace(HERE, qp_type=qp_type), replace(THERE, qp_type=qp_type))
        assert str(path.qp_access_flags) == "|".join(filter(None, ["LOCAL_WRITE", words]))
        assert AccessFlags.LOCAL_WRITE in path.qp_access_flags


def test_the_qkey_is_the_queue_pairs_own() -> None:
    a, b = replace(HERE, qp_type=QpType.UD, qkey=0xA), replace(THERE, qp_type=QpType.UD, qkey=0xB)
    mine, theirs = paths(a, b)
    assert (mine.qkey, theirs.qkey) == (0xA, 0xB)


def test_a_path_can_be_turned_to_another_pair_on_the_same_ports() -> None:
    mine, theirs = paths(HERE, THERE)
    a, b = replace(HERE, qp_num=0x33, psn=3, qkey=0xA), replace(THERE, qp_num=0x44, psn=4, qkey=0xB)
    assert mine.toward(a, b) == paths(a, b)[0]
    assert theirs.toward(b, a) == paths(a, b)[1]


# ---- GIDs


def ranked(mine: list[GidEntry], theirs: list[GidEntry], port: Any = roce) -> list[tuple[int, int]]:
    """The slots of the pairs, the best first."""
    return [(a.gid_index, b.gid_index) for a, b in rank_pairs(port(*mine), port(*theirs))]


def infiniband_gids(*gids: GidEntry) -> PortAddress:
    return infiniband(1, *gids)


def test_v2_comes_before_v1_whatever_the_slots() -> None:
    mine = [gid("10.0.0.1", V1, 0), gid("10.0.0.1", V2, 1)]
    theirs = [gid("10.0.0.2", V1, 4), gid("10.0.0.2", V2, 5)]
    assert ranked(mine, theirs) == [(1, 5), (0, 4)]


def test_v1_and_v2_never_meet() -> None:
    assert ranked([gid("10.0.0.1", V1)], [gid("10.0.0.2", V2)]) == []


@pytest.mark.parametrize("kind", [V1, V2])
def test_ipv4_and_ipv6_never_meet_on_ethernet(kind: GidType) -> None:
    assert ranked([gid("10.0.0.1", kind)], [gid("2001:db8::1", kind)]) == []
    assert ranked([gid("2001:db8::1", kind), gid("10.0.0.1", kind, 1)], [gid("10.0.0.2", kind, 7)]) == [(1, 7)]


def test_the_same_subnet_comes_first() -> None:
    mine = [gid("10.0.0.1", V2, 0), gid("192.168.5.1", V2, 1), gid("2001:db8::1", V2, 2)]
    theirs = [gid("192.168.5.2", V2, 4), gid("10.9.0.2", V2, 5), gid("2001:db8::2", V2, 6)]
    assert ranked(mine, theirs) == [(2, 6), (1, 4), (0, 5), (0, 4), (1, 5)]


def test_an_ipv6_subnet_comes_before_unrelated_ipv4_networks() -> None:
    mine = [gid("10.0.0.1", V2, 0), gid("2001:db8::5054:ff:fe01:1", V2, 1)]
    theirs = [gid("192.168.5.2", V2, 4), gid("2001:db8::9a03:9bff:fe8e:2", V2, 5)]
    assert ranked(mine, theirs) == [(1, 5), (0, 4)]


def test_an_ipv4_subnet_comes_before_the_addresses_that_ipv6_hosts_gave_themselves() -> None:
    mine = [gid("2001:db8::5054:ff:fe01:1", V2, 0), gid("10.0.0.1", V2, 1)]
    theirs = [gid("2001:db8::9a03:9bff:fe8e:2", V2, 4), gid("10.0.0.9", V2, 5)]
    assert ranked(mine, theirs) == [(1, 5), (0, 4)]


def test_routable_comes_before_link_local() -> None:
    mine = [gid("fe80::1", V2, 0), gid("2001:db8:1::1", V2, 1), gid("169.254.0.1", V2, 2)]
    theirs = [gid("fe80::2", V2, 4), gid("2001:db8:2::1", V2, 5), gid("169.254.0.2", V2, 6)]
    assert ranked(mine, theirs) == [(1, 5), (0, 4), (2, 6)]


def test_link_local_reaches_only_link_local_on_ethernet() -> None:
    assert ranked([gid("fe80::1", V2)], [gid("2001:db8::1", V2)]) == []
    assert ranked([gid("169.254.0.1", V2)], [gid("10.0.0.1", V2)]) == []
    assert ranked([gid("127.0.0.1", V2)], [gid("10.0.0.1", V2)]) == []
    assert ranked([gid("fe80::1", V1)], [gid("fe80::2", V1)]) == [(0, 0)]


def test_fe80_is_a_plain_prefix_on_infiniband() -> None:
    fe80, fec0 = gid("fe80::2:c903:1", IB, 0), gid("2001:db8::2:c903:1", IB, 1)
    assert ranked([fe80], [fec0], infiniband_gids) == [(0, 1)]
    assert ranked([fe80], [fe80], infiniband_gids) == [(0, 0)]


def test_routable_comes_before_link_local_on_infiniband_too() -> None:
    mine, theirs = [gid("fe80::1", IB, 0), gid("2001:db8::1", IB, 1)], [gid("fd00::2", IB, 4)]
    assert ranked(mine, theirs, infiniband_gids) == [(1, 4), (0, 4)]


@given(ends(), ends())
@settings(max_examples=50)
def test_pairs_are_the_same_whichever_end_ranks_them(a: tuple[Endpoint, ...], b: tuple[Endpoint, ...]) -> None:
    here, there = a[0].port, replace(b[0].port, gids=b[0].port.gids + a[0].port.gids)
    assert sorted(map(str, rank_pairs(here, there))) == sorted(str((x, y)) for y, x in rank_pairs(there, here))


def test_the_best_pair_is_chosen_and_told() -> None:
    mine, theirs = paths(HERE, THERE)
    assert mine.why == ("by GID: rxe0 port 1 gid_index 3 (::ffff:10.0.0.1, RoCE v2) "
                        "to rxe1 port 1 gid_index 7 (::ffff:10.0.0.2, RoCE v2)",)  # fmt: skip
    assert (mine.ah_attr.sgid_index, theirs.ah_attr.sgid_index) == (3, 7)
    assert mine.ah_attr.is_global == 1
    assert mine.ah_attr.hop_limit == 64


def test_the_slot_used_is_where_the_value_is_now_not_where_the_peer_says() -> None:
    agreement = agree(HERE, THERE, Wish())
    moved = replace(THERE, port=roce(gid("10.0.0.9", gid_index=7), gid("10.0.0.2", gid_index=1)))
    path = make_path(moved, HERE, agreement, Options(), connector=False)
    assert path.ah_attr.sgid_index == 1
    liar = replace(agreement, listener_gid=gid("10.0.0.2", gid_index=200))
    assert make_path(THERE, HERE, liar, Options(), connector=False).ah_attr.sgid_index == 7


# ---- InfiniBand


def test_infiniband_in_one_subnet_goes_by_lid() -> None:
    mine, theirs = paths(end(infiniband(5)), end(infiniband(9)))
    plain = {"sl": 0, "src_path_bits": 0, "static_rate": 0, "is_global": 0, "dgid": bytes(16), "flow_label": 0}
    plain |= {"sgid_index": 0, "hop_limit": 0, "traffic_class": 0}
    assert asdict(mine.ah_attr) == {"port_num": 1, "dlid": 9, **plain}
    assert asdict(theirs.ah_attr) == {"port_num": 1, "dlid": 5, **plain}
    assert mine.why == ("by LID 0x5 to 0x9: InfiniBand, one subnet, no GRH required",)


def test_lid_0_on_infiniband_is_refused() -> None:
    for a, b in ((0, 9), (5, 0), (0, 0)):
        (found,) = differences(end(infiniband(a)), end(infiniband(b)))
        assert found == f"LID: connector {a:#x}, listener {b:#x}; 0 means no subnet manager"


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
def test_a_grh_is_used_where_a_port_demands_it(which: tuple[bool, bool]) -> None:
    a, b = (
        end(infiniband(lid, gid(f"fe80::{lid}", IB, 0), grh_required=demands))
        for lid, demands in zip((5, 9), which, strict=True)
    )
    mine, theirs = paths(a, b)
    assert mine.ah_attr.is_global == theirs.ah_attr.is_global == 1
    assert (mine.ah_attr.dlid, mine.ah_attr.dgid) == (9, gid("fe80::9").gid.raw)


def test_a_grh_is_used_between_subnets_and_not_within_one() -> None:
    one, other, far = (end(infiniband(5, gid(text, IB))) for text in ("fe80::1", "fe80::2", "2001:db8::2"))
    assert paths(one, other)[0].ah_attr.is_global == 0
    assert paths(one, far)[0].ah_attr.is_global == 1
    assert paths(far, one)[0].ah_attr.dgid == gid("fe80::1").gid.raw
    assert paths(one, end(infiniband(9)))[0].ah_attr.is_global == 0


def test_a_grh_that_no_gid_can_fill_is_refused() -> None:
    (found,) = differences(end(infiniband(5, grh_required=True)), end(infiniband(9)))
    assert found == (
        "GIDs: none of the connector's (none) matches one of the listener's (none) in type and address family"
    )


# ---- partitions


@pytest.mark.parametrize(
    ("mine", "theirs", "wish", "key"),
    [
        ((0xFFFF,), (0xFFFF,), None, 0x7FFF),
        ((0xFFFF,), (0x7FFF,), None, 0x7FFF),
        ((0x7FFF,), (0xFFFF,), None, 0x7FFF),
        ((0x7FFF,), (0x7FFF,), None, None),
        ((0, 0x8001), (0x8002, 0x0001), None, 0x0001),
        ((0xFFFF, 0x8005), (0xFFFF, 0x8005), 0x8005, 0x0005),
        ((0xFFFF, 0x8005), (0xFFFF, 0x8005), 0x0005, 0x0005),
        ((0xFFFF,), (0xFFFF,), 0x8005, None),
        ((0x8005, 0xFFFF), (0xFFFF, 0x8005), None, 0x0005),
        ((0x8000,), (0x8000,), None, None),
        ((), (0xFFFF,), None, None),
        ((0, 0), (0, 0), None, None),
        ((0x7FFF, 0xFFFF), (0x7FFF, 0xFFFF), None, 0x7FFF),
    ],
)
def test_a_partition_needs_both_ends_and_one_full_member(
    mine: tuple[int, ...], theirs: tuple[int, ...], wish: int | None, key: int | None
) -> None:
    a, b = end(infiniband(5, pkeys=mine)), end(infiniband(9, pkeys=theirs))
    if key is None:
        (found,) = differences(a, b, Wish(pkey=wish))
        assert found.startswith("P_Key: none in common with a full member")
        assert all(f"{pkey:#06x}" in found for pkey in (*mine, *theirs) if pkey)
        assert wish is None or f"({wish:#06x} wished)" in found
    else:
        assert agree(a, b, Wish(pkey=wish)).pkey == key
        for ours, path in zip((mine, theirs), paths(a, b, Wish(pkey=wish)), strict=True):
            assert ours[path.pkey_index] & 0x7FFF == key


@given(
    st.lists(st.sampled_from([0, 1, 0x8001, 2, 0x8002, 0x7FFF, 0xFFFF]), max_size=4).map(tuple),
    st.lists(st.sampled_from([0, 1, 0x8001, 2, 0x8002, 0x7FFF, 0xFFFF]), max_size=4).map(tuple),
)
@settings(max_examples=60)
def test_the_slots_used_are_never_both_of_limited_members(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    a, b = end(infiniband(5, pkeys=mine)), end(infiniband(9, pkeys=theirs))
    talk = [x for x in mine for y in theirs if x & 0x7FFF == y & 0x7FFF != 0 and (x | y) & 0x8000]
    if talk:
        here, there = paths(a, b)
        x, y = mine[here.pkey_index], theirs[there.pkey_index]
        assert x & 0x7FFF == y & 0x7FFF
        assert (x | y) & 0x8000
    else:
        differences(a, b)


# ---- every way between two hosts

A1, A2 = roce(gid("10.0.0.1", V2, 1), gid("fe80::1", V2, 2), device="a1"), roce(gid("10.9.0.1", V2, 3), device="a2")
B1, B2 = roce(gid("10.9.0.2", V2, 4), gid("fe80::2", V2, 5), device="b1"), roce(gid("10.0.0.2", V1, 6), device="b2")


def ways(here: list[PortAddress], there: list[PortAddress]) -> list[str]:
    return [
        " ".join(f"{p.device}:{p.gids[0].gid_index if p.gids else p.lid}" for p in (way.here, way.there))
        for way in candidates(here, there)
    ]


def test_all_ways_are_found_the_best_first() -> None:
    assert ways([A1, A2], [B1, B2]) == ["a2:3 b1:4", "a1:1 b1:4", "a1:2 b1:5"]
    assert ways([A1], [B2]) == ways([], [B1]) == ways([A1], []) == []


def test_the_best_way_between_two_ports_is_what_they_would_agree_on() -> None:
    for a, b in ((A1, B1), (A2, B1), (A1, roce(gid("10.0.0.9", V2, 7), gid("10.9.0.9", V2, 8)))):
        best = candidates([a], [b])[0]
        agreement = agree(end(a), end(b), Wish())
        assert (best.here.gids, best.there.gids) == ((agreement.connector_gid,), (agreement.listener_gid,))
        narrowed = agree(end(best.here), end(best.there), Wish())
        assert narrowed == agreement


def test_between_infiniband_ports_of_one_subnet_there_is_one_way_by_lid() -> None:
    a, b = infiniband(5, gid("fe80::5", IB), gid("fe80::55", IB, 1)), infiniband(9, gid("fe80::9", IB))
    (way,) = candidates([a], [b])
    assert way == Candidate(replace(a, gids=()), replace(b, gids=()))
    assert str(way) == "mlx5_0 port 1 to mlx5_0 port 1"
    assert ways([a, A1], [b]) == ["mlx5_0:5 mlx5_0:9"]
    far = infiniband(9, gid("2001:db8::9", IB))
    assert len(candidates([a], [far])) == 2


def test_a_way_says_its_ports_and_gids() -> None:
    assert str(candidates([A2], [B1])[0]) == (
        "a2 port 1 gid_index 3 (::ffff:10.9.0.1, RoCE v2) to b1 port 1 gid_index 4 (::ffff:10.9.0.2, RoCE v2)"
    )


@given(st.lists(ends(), max_size=3), st.lists(ends(), max_size=3))
@settings(max_examples=50)
def test_each_way_is_there_once_and_can_be_agreed_on(
    here: list[tuple[Endpoint, ...]], there: list[tuple[Endpoint, ...]]
) -> None:
    found = candidates(
        *([replace(e[0].port, pkeys=(0xFFFF,), lid=1, device=str(i)) for i, e in enumerate(s)] for s in (here, there))
    )
    for way in found:
        agreement = agree(end(way.here), end(way.there), Wish())
        pair = way.here.gids[:1], way.there.gids[:1]
        assert (
            pair == ((), ())
            or pair == ((agreement.connector_gid,), (agreement.listener_gid,))
            or len(way.here.gids + way.there.gids) > 2
        )  # one value under several types or slots


def test_a_port_can_be_narrowed_to_the_gid_of_a_value() -> None:
    both = roce(gid("10.0.0.1", V1, 0), gid("10.0.0.1", V2, 1), gid("10.0.0.2", V2, 2))
    assert narrow(both, None) is both
    assert [entry.gid_index for entry in narrow(both, GidKey(gid("10.0.0.1").gid.raw)).gids] == [0, 1]
    assert narrow(both, GidKey(gid("10.0.0.2").gid.raw)) == both.only(both.gids[2])
    with pytest.raises(
        PeerMismatch, match=r"GID fe80::9 is not one of rxe0 port 1: gid_index 0 \(::ffff:10\.0\.0\.1, "
    ):
        narrow(both, GidKey(gid("fe80::9").gid.raw))


def test_a_gid_is_told_from_those_of_its_value_by_type_and_network_device() -> None:
    """A VLAN has the link-local address of its parent; RoCE v1 and v2 have the same; and slots move."""
    parent, vlan = gid("fe80::1", V2, 1, "eth0"), gid("fe80::1", V2, 3, "eth0.100")
    port = roce(gid("fe80::1", V1, 0), parent, gid("fe80::1", V1, 2, "eth0.100"), vlan)
    assert narrow(port, vlan.key).gids == (vlan,)
    assert narrow(port, parent.key).gids == (parent,)
    there = end(roce(gid("fe80::2", V2, 7, "eth9.100")))
    for chosen in (parent, vlan, replace(vlan, gid_index=200)):
        agreement = replace(agree(end(port), there, Wish()), connector_gid=chosen)
        path = make_path(end(port), there, agreement, Options(), connector=True)
        assert path.ah_attr.sgid_index == (1 if chosen is parent else 3)
    gone = replace(vlan, netdev="eth7")  # renamed: by its slot
    assert find_gid(port.gids, gone.key, 3) == vlan


# ---- which pair comes first


def test_the_addresses_of_the_exchange_come_first_among_equals() -> None:
    """Two network devices in one subnet: the one that the exchange goes over is known to carry packets."""
    mine = roce(gid("10.0.0.1", V2, 1, "eth0"), gid("10.0.0.2", V2, 2, "eth1"))
    theirs = roce(gid("10.0.0.11", V2, 1, "eth0"), gid("10.0.0.12", V2, 2, "eth1"))
    for over in [(a.gid, b.gid) for a in mine.gids for b in theirs.gids]:
        exchange = str(over[0].address), str(over[1].address)
        (first, *_) = rank_pairs(mine, theirs, exchange)
        assert (first[0].gid, first[1].gid) == over
        agreement = agree(end(mine), end(theirs), Wish(), exchange)
        assert (agreement.connector_gid, agreement.listener_gid) == first
        (way, *_) = candidates([mine], [theirs], exchange)
        assert (way.here.gids, way.there.gids) == ((first[0],), (first[1],))
    v1 = roce(*(replace(entry, gid_type=V1) for entry in mine.gids), gid("10.9.0.1", V2, 7))
    other = roce(*(replace(entry, gid_type=V1) for entry in theirs.gids), gid("10.8.0.1", V2, 7))
    assert rank_pairs(v1, other, ("10.0.0.1", "10.0.0.11"))[0][0].gid_index == 7  # v2 is no equal of v1


def test_one_address_on_both_hosts_comes_last_and_a_host_reaches_itself() -> None:
    docker = gid("172.17.0.1", V2, 1, "docker0")
    mine, theirs = roce(docker, gid("10.0.0.1", V2, 2)), roce(docker, gid("10.8.0.9", V2, 2))
    assert [(a.gid_index, b.gid_index) for a, b in rank_pairs(mine, theirs)][-1] == (1, 1)
    assert rank_pairs(mine, mine, ("172.17.0.1", "172.17.0.1"))[0] == (docker, docker)


def test_an_address_of_another_namespace_comes_last() -> None:
    """A pod with a macvlan sees its host's GIDs before its own."""
    hosts, own = gid("10.0.0.1", V2, 1), gid("10.0.0.99", V2, 5, "net1")
    mine, theirs = roce(replace(hosts, here=False), own), roce(gid("10.0.0.2", V2, 1))
    assert [a.gid_index for a, _ in rank_pairs(mine, theirs)] == [5, 1]
    assert [b.gid_index for _, b in rank_pairs(theirs, mine)] == [5, 1]
    local = gid("fe80::5", V2, 6, "net1")
    mine, theirs = replace(mine, gids=(mine.gids[0], local)), roce(gid("10.0.0.2", V2, 1), gid("fe80::2", V2, 0))
    assert [a.gid_index for a, _ in rank_pairs(mine, theirs)] == [6, 1]


def test_of_equals_the_ones_named_first_come_first() -> None:
    mine = roce(gid("10.0.0.1", V2, 4, "eth1"), gid("10.0.0.1", V2, 1, "eth0"))
    assert [a.netdev for a, _ in rank_pairs(mine, THERE.port)] == ["eth1", "eth0"]


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (gid("10.0.0.1"), gid("10.0.0.2"), ["UDP port 4791", "arp_ignore, arp_announce and rp_filter"]),
        (gid("10.0.0.1"), gid("10.0.0.1"), ["both hosts have the address 10.0.0.1", "4791"]),
        (gid("fe80::1"), gid("fe80::2"), ["UDP port 4791"]),
        (gid("fe80::1", V1), gid("fe80::2", V1), ["EtherType 0x8915"]),
        (replace(gid("10.0.0.1"), here=False), gid("10.0.0.2"), ["10.0.0.1 is no address of this network namespace"]),
        (gid("10.0.0.1"), replace(gid("10.0.0.2"), here=False), ["10.0.0.2 is no address of the peer's"]),
        (None, None, ["Causes that fit: the peer's queue pair is gone"]),
    ],
)
def test_a_path_that_carries_nothing_is_explained_by_all_that_fits(
    mine: GidEntry | None, theirs: GidEntry | None, words: list[str]
) -> None:
    said = unproven(mine, theirs)
    assert all(word in said for word in words)
    assert ("arp_ignore" in said) is (mine is not None and mine.gid.is_ipv4)
    assert ("4791" in said) is (mine is not None and mine.gid_type == V2)
    if mine is not None and theirs is not None:
        assert str(mine.gid) in between(mine, theirs)
        assert str(theirs.gid) in between(mine, theirs)


@pytest.mark.parametrize(
    "fields", [{"sl": 16}, {"traffic_class": 256}, {"flow_label": 2**20}, {"path_mtu": Mtu(6)}, {"path_mtu": Mtu(0)}]
)
def test_an_agreement_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} is "):
        replace(agree(HERE, THERE, Wish()), **fields)


# ---- what cannot be joined


def test_all_differences_are_listed_at_once() -> None:
    a = end(roce(gid("10.0.0.1"), pkeys=(0x8001,)), qp_type=QpType.RC)
    b = end(infiniband(0, pkeys=(0x8002,)), qp_type=QpType.UD)
    assert differences(a, b) == (
        "qp_type: connector RC, listener UD",
        "P_Key: none in common with a full member: connector has 0x8001 and listener has 0x8002",
        "link layer: connector ETHERNET, listener INFINIBAND",
    )
    c = end(roce(gid("fe80::1", V1), pkeys=(0x8002,)), qp_type=QpType.UC)
    found = differences(a, c)
    assert len(found) == 3
    assert found[2] == (
        "GIDs: none of the connector's (gid_index 0 (::ffff:10.0.0.1, RoCE v2)) matches one of the listener's "
        "(gid_index 0 (fe80::1, RoCE v1)) in type and address family"
    )


@given(ends(), ends(), wishes)
@settings(max_examples=60)
def test_any_two_ends_are_joined_or_refused_in_words(
    a: tuple[Endpoint, ...], b: tuple[Endpoint, ...], wish: Wish
) -> None:
    try:
        found = agree(a[0], b[0], wish)
    except PeerMismatch as error:
        words = error.differences
    else:
        words = ("joined",)
        assert 0 < found.pkey < 0x8000
        assert (found.connector_gid is None) == (found.listener_gid is None)
        assert found.connector_gid is None or found.connector_gid in a[0].port.gids
        assert found.listener_gid is None or found.listener_gid in b[0].port.gids
        assert found.connector_gid is not None or a[0].port.link_layer != LinkLayer.ETHERNET
    assert words
    assert all(words)


# ---- an agreement from a peer is not trusted


AGREED = agree(HERE, THERE, Wish())


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            replace(AGREED, connector_gid=gid("10.0.0.99")),
            r"the peer chose ::ffff:10\.0\.0\.99, which rxe0 port 1 does not",
        ),
        (replace(AGREED, connector_gid=gid("10.0.0.1", V1)), r"which rxe0 port 1 does not have\. It has gid_index 3"),
        (replace(AGREED, connector_gid=None, listener_gid=None), "lacks a GID. Both ends need one on Ethernet"),
        (replace(AGREED, listener_gid=None), "lacks a GID"),
        (replace(AGREED, connector_gid=None), "lacks a GID"),
        (replace(AGREED, path_mtu=Mtu.MTU_4096), r"chose MTU 4096, above rxe0 port 1 \(1024 bytes\)"),
        (replace(AGREED, pkey=0x1234), "chose P_Key 0x1234, which rxe0 port 1 does not have"),
        (replace(AGREED, pkey=0), "chose P_Key 0x0000"),
    ],
)
def test_what_this_end_does_not_have_is_refused(changed: Agreement, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        make_path(HERE, THERE, changed, Options(), connector=True)


def test_a_gid_on_one_side_only_is_refused_on_infiniband_too() -> None:
    a, b = end(infiniband(5, gid("fe80::5", IB))), end(infiniband(9, gid("fe80::9", IB)))
    agreement = replace(agree(a, b, Wish()), connector_gid=gid("fe80::5", IB))
    with pytest.raises(RemoteProtocolError, match="lacks a GID"):
        make_path(a, b, agreement, Options(), connector=True)


# ---- remembered


def test_what_two_ports_agree_on_is_worked_out_once_and_is_of_these_two() -> None:
    here, there = (replace(e, port=replace(e.port, device=f"once {e.port.device}")) for e in (HERE, THERE))
    agreement = agree(here, there, Wish())
    assert agree(replace(here, qp_num=5), replace(there, psn=6), Wish()) is agreement
    assert agree(here, there, Wish(sl=3)).sl == 3
    moved = replace(there, port=replace(there.port, gids=(gid("10.0.0.9"),)))
    assert agree(here, moved, Wish()).listener_gid == gid("10.0.0.9")
    one, two = (make_path(here, replace(there, psn=n), agreement, Options(), connector=True) for n in (1, 2))
    assert (one.rq_psn, two.rq_psn) == (1, 2)
    assert one.ah_attr is two.ah_attr


def test_ports_with_many_gids_are_not_compared_with_each_other() -> None:
    """They are a peer's to choose: dozens of hundreds that are alike but for the last would cost much."""
    many = replace(THERE, port=replace(THERE.port, gids=tuple(gid(f"10.0.1.{n}", gid_index=n) for n in range(200))))
    assert agree(HERE, many, Wish()) == agree(HERE, many, Wish())
    assert agree(HERE, many, Wish()) is not agree(HERE, many, Wish())
