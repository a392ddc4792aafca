"""The procedure of connect and accept, on devices in software: which way is tried after which, and what is said."""

from __future__ import annotations

import errno
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from exchange_ends import channels, until
from hosts import CROSS, ONE, PATIENCE_S, TWO, World, pair_of, settle, world
from software import Device, Port, Software

from rdmaconnect.abi import Mtu
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.errors import ConnectTimeout, ModifyError, PeerMismatch, PeerRejected, RdmaConnectError
from rdmaconnect.protocol.messages import Hello, Joined, Ready, Reject, Reply
from rdmaconnect.session import fallback
from rdmaconnect.session.terms import check_count, make_terms, parse_qp_type

__all__ = ["world"]  # a fixture of hosts


# ---- which way


def test_where_the_first_choice_carries_one_hello_is_enough(world: World) -> None:
    here, there = world.both()
    assert world.targets() == [None]
    assert [len(world.tap.of(kind)) for kind in (Hello, Reply, Ready, Joined, Reject)] == [1, 1, 1, 0, 0]
    assert pair_of(here) == ONE == pair_of(there)[::-1]
    (reply,) = world.tap.of(Reply)
    assert len(reply.ports) == 1  # type: ignore[attr-defined]
    assert here._end.conversation.id == there._end.conversation.id
    here.send(b"there")
    assert there.recv() == b"there"


def test_who_waits_for_a_proof_is_told_that_the_listener_is_in_rts(world: World) -> None:
    world.both(probe=True)
    until(lambda: len(world.tap.of(Joined)) == 1)


def test_hundreds_of_queue_pairs_cost_one_exchange(world: World) -> None:
    here, first = world.both(count=300)
    theirs = [first, *(world.listener.accept(deadline_s=PATIENCE_S) for _ in range(299))]
    assert [len(world.tap.of(kind)) for kind in (Hello, Reply, Ready)] == [1, 1, 1]
    for mine, other in zip(here, theirs, strict=True):
        assert mine.path.dest_qp_num == other.local.qp_num
        assert mine.path.sq_psn == other.path.rq_psn
    here[299].send(b"the last")
    assert theirs[299].recv() == b"the last"
    for end in theirs:
        end.close()


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", sorted(fallback.PATH_ERRNOS))
def test_where_rtr_fails_on_either_side_the_next_pair_is_tried(world: World, side: str, number: int) -> None:
    world.refuse(side, ONE, ONE[::-1], number=number)
    here, there = world.both()
    assert world.targets() == [None, TWO]
    assert pair_of(here) == TWO == pair_of(there)[::-1]
    until(lambda: len(world.tap.of(Reject)) == 1)
    assert len({hello.id for hello in world.hellos}) == 2
    assert any(line.startswith("rejected") and "INIT->RTR" in line for line in here.path.why), here.path.why


@pytest.mark.parametrize("side", ["here", "there"])
def test_each_way_is_tried_once_and_then_it_ends_with_all_that_was_tried(world: World, side: str) -> None:
    hook = world.refuse(side)
    error = world.fails(ModifyError if side == "here" else PeerRejected)
    assert world.targets()[:2] == [None, TWO]
    assert sorted(world.targets()[2:]) == sorted(CROSS)  # type: ignore[type-var]
    assert hook.seen == 4
    assert "Tried before: " in str(error)
    for mine, theirs in [ONE, TWO, *CROSS]:
        pair = (mine, theirs) if side == "here" else (theirs, mine)
        assert all(address in str(error) for address in pair)


def test_a_partition_key_that_neither_has_is_no_reason_to_try_other_ways(world: World) -> None:
    error = world.fails(PeerMismatch, pkey=0x1234)
    assert "P_Key: none in common with a full member (0x1234 wished)" in str(error)
    assert world.targets() == [None]


def test_a_peer_that_does_not_use_what_was_wanted_does_not_make_it_try_for_ever(world: World) -> None:
    world.refuse("here")
    world.listen()
    world.tap.change = lambda message, connector: [
        replace(message, target=None) if isinstance(message, Hello) else message
    ]
    with pytest.raises(ModifyError):
        world.connect()
    assert len(world.hellos) == 4


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM, errno.EIO])
def test_what_no_other_pair_would_mend_is_not_tried_again(world: World, side: str, number: int) -> None:
    world.refuse(side, number=number)
    error = world.fails(ModifyError if side == "here" else PeerRejected)
    assert error.errno == number
    assert world.targets() == [None]
    until(lambda: world.tap.of(Reject))
    (reject,) = world.tap.of(Reject)
    assert isinstance(reject, Reject)
    assert (reject.errno, reject.stage) == (number, "agreed" if side == "here" else "heard")
    assert "INIT->RTR" in reject.why


def test_after_the_deadline_nothing_more_is_tried(world: World) -> None:
    hook = world.refuse("here", delay=1.0)
    before = time.monotonic()
    error = world.fails(ConnectTimeout, deadline_s=1.8)
    assert time.monotonic() - before < 1.8 + 3
    assert error.stage == "move to RTR"
    assert "Tried before: " in str(error)
    assert len(world.hellos) == hook.seen == 2


def test_another_port_of_this_host_is_tried(world: World) -> None:
    world.software.devices[0].ports = [Port(gids=["fe80::1"]), Port(gids=["10.0.1.1"])]
    here, _ = world.both()
    assert pair_of(here)[0] == "10.0.1.1"
    assert [hello.ends[0].port.port_num for hello in world.hellos] == [1, 2] or here.local.port.port_num == 2


def test_another_port_of_the_peer_is_tried(world: World) -> None:
    world.software.devices[1].ports = [Port(gids=["fe80::9"]), Port(gids=["10.0.1.2"])]
    world.software.devices[0].ports = [Port(gids=["10.0.1.1"])]
    here, there = world.both()
    (*_, hello) = world.hellos
    assert hello.target is None or (hello.target.device, hello.target.port_num) == ("there", 2)
    assert there.local.port.port_num == 2
    assert pair_of(here) == TWO


def test_what_both_wish_is_agreed_on(world: World) -> None:
    here, there = world.both({"path_mtu": 512, "sl": 3, "flow_label": 0}, traffic_class=96)
    for end in (here, there):
        ah = end.path.ah_attr
        assert (end.path.path_mtu, ah.sl, ah.traffic_class, ah.flow_label) == (Mtu.MTU_512, 3, 96, 0)
        assert "sl 3, traffic_class 96: as wished" in end.path.why


def test_wishes_that_differ_are_a_mismatch_on_both_ends_and_tried_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    error = world.fails(PeerMismatch, {"sl": 3, "pkey": 0x8005, "traffic_class": 1}, sl=0, pkey=0xFFFF)
    assert error.differences[:2] == (
        "sl: the connector wishes 0x0, the listener 0x3",
        "pkey: the connector wishes 0xffff, the listener 0x8005",
    )
    assert len(world.hellos) == 1
    with pytest.raises(PeerMismatch) as there:
        world.listener.accept(deadline_s=PATIENCE_S, tolerant=False)
    assert there.value.differences == error.differences


def test_a_listener_of_an_older_version_counts_the_connectors_wishes(world: World) -> None:
    """It sends no differences, and knows no wishes of its own."""
    world.listen(sl=3)
    world.tap.change = lambda message, connector: [
        replace(message, wish=replace(message.wish, sl=message.wish.sl or 0)) if isinstance(message, Hello) else
        replace(message, differences=()) if isinstance(message, Reject) else message
    ]  # fmt: skip
    with pytest.raises(PeerRejected, match="sl: the connector wishes 0x0, the listener 0x3"):
        world.connect()


def test_hosts_that_nothing_joins_are_told_why_on_both_sides(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.software.devices[0].ports = [Port(gids=["10.0.1.1"])]
    world.software.devices[1].ports = [Port(gids=["fe80::9"])]
    error = world.fails(PeerMismatch)
    assert "GIDs: none of the connector's" in str(error)
    assert len(world.hellos) == 1
    until(lambda: "GIDs: none of the connector's" in caplog.text)


# ---- what was asked for explicitly


@pytest.mark.parametrize("side", ["here", "there"])
def test_an_explicit_gid_index_of_the_connector_is_never_replaced(world: World, side: str) -> None:
    world.software.devices[0].ports.append(Port(gids=[None, None, "10.0.0.77"]))
    world.refuse(side)
    world.fails(gid_index=2)
    for hello in world.hellos:
        assert hello.ends[0].port.port_num == 1
        assert [entry.gid_index for entry in hello.ends[0].port.gids] == [2]
        assert hello.target is None or hello.target.connector_gid.raw == Gid.parse("10.0.1.1").raw
    assert len(world.hellos) == 2


def test_an_explicit_gid_index_of_the_listener_is_never_replaced(world: World) -> None:
    world.software.devices[1].ports += [Port(gids=[None] * 6 + ["10.0.1.78"]), Port(gids=[])]
    world.refuse("there")
    world.fails(PeerRejected, theirs={"gid_index": 6})
    for reject in world.tap.of(Reject):
        assert isinstance(reject, Reject)
        assert [(p.port_num, [entry.gid_index for entry in p.gids]) for p in reject.ports] == [(1, [6])]
    assert len(world.hellos) == 2  # from each address that has a way there


def test_an_explicit_device_is_never_replaced() -> None:
    devices = [Device(name, [Port(gids=[gid])]) for name, gid in
               [("a", "10.0.0.1"), ("b", "10.0.0.77"), ("there", "10.0.0.2")]]  # fmt: skip
    with Software(devices) as software:
        try:
            with ExitStack() as stack:
                world = World(software, stack)
                hook = world.refuse("b")
                world.fails(ModifyError, device="b")
                assert {hello.ends[0].port.device for hello in world.hellos} == {"b"}
                assert hook.seen == 1
            until(lambda: channels() == 0 and not software.left())
            assert software.problems() == []
        finally:
            settle(software)


def test_ports_of_the_listener_without_an_address_keep_nobody_out(world: World) -> None:
    world.software.devices[1].ports.append(Port(gids=[]))
    world.both()
    (reply,) = world.tap.of(Reply)
    assert isinstance(reply, Reply)
    assert [p.port_num for p in reply.ports] == [1]


# ---- what is asked for


@pytest.mark.parametrize("given", ["RC", "rc", 2])
def test_a_type_is_named_or_numbered(given: Any) -> None:
    assert parse_qp_type(given).name == "RC"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("RAW_PACKET", "it has no two ends to connect by this exchange"),
        ("XRC_SEND", "one with XRC domains"),
        ("TCP", "give 'RC', 'UC' or 'UD'"),
        (99, "give 'RC', 'UC' or 'UD'"),
    ],
)
def test_a_type_that_cannot_be_connected_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_qp_type(given)


def test_what_cannot_be_meant_is_refused_by_name() -> None:
    words = r"^gid_idx \(gid_index\?\), mtu \(path_mtu\?\), wolf: there is no such option\. The options are device"
    with pytest.raises(TypeError, match=words):
        make_terms({"mtu": 1, "gid_idx": 2, "wolf": 3})
    with pytest.raises(ValueError, match="private_data is 4097 bytes long: give at most 4096"):
        make_terms({"private_data": bytes(4097)})
    for count in (0, -1, 4097):
        with pytest.raises(ValueError, match=f"count is {count}: give 1 to 4096"):
            check_count(count)
    for odd in (None, True, 2.0):
        with pytest.raises(TypeError, match=f"count is {odd}: give an integer"):
            check_count(odd)  # type: ignore[arg-type]
    assert check_count(4096) == 4096
    made = make_terms({"secret": "a secret of one job"})
    assert made.keys is not None
    assert made.keys.secret.decode() not in repr(made)


@pytest.mark.parametrize(
    "error", [PeerMismatch(["a difference"]), ModifyError(110, "move", qp_num=1, frm=1, to=2, mask=0)], ids=type
)
def test_more_can_be_said_on_any_error(error: RdmaConnectError) -> None:
    before = str(error)
    fallback.say_more(error, "Tried before: this.")
    assert str(error) == f"{before} Tried before: this."
    assert str(error) in repr(error) or isinstance(error, OSError)
