"""Connections of queue pairs that somebody else has made, with whatever library."""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from exchange_ends import until
from software import Device, End, Port, Software, connected, end_on
from software.ends import PATIENCE_S

import rdmaconnect
from rdmaconnect.abi import PortState, QpAttrMask, QpState, QpType, WcOpcode
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.errors import DeviceError, ModifyError, PeerMismatch, PeerRejected, StateError, VerbsError
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.memory import FULL_ACCESS
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.work_request import SendRequest
from rdmaconnect.protocol.health import HealthState

INIT = {"qp_state": QpState.INIT, "pkey_index": 0, "port_num": 1}


# ---- libraries in place of those that need a device: what they offer, on a queue pair of ours


class Plain:
    """A queue pair that somebody has wrapped by hand."""

    device = "soft0"

    def __init__(self, qp: QueuePair) -> None:
        self._qp, self.qp_num, self.qp_type = qp, qp.qp_num, int(qp.qp_type)
        self.error: Exception | None = None

    def query(self, attr_mask: QpAttrMask) -> Any:
        if self.error is not None:
            raise self.error
        return self._qp.query(attr_mask)

    def modify(self, attr: Mapping[str, Any], mask: QpAttrMask) -> None:
        if self.error is not None:
            raise self.error
        self._qp.modify(attr, mask)


class Attr:
    """``pyverbs.qp.QPAttr``."""


class PyverbsContext:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PyverbsPD:
    __slots__ = ("ctx",)

    def __init__(self, ctx: PyverbsContext) -> None:
        self.ctx = ctx


class PyverbsQP:
    __slots__ = ("pd", "qp")

    def __init__(self, qp: QueuePair) -> None:
        self.qp, self.pd = qp, PyverbsPD(PyverbsContext("soft0"))

    @property
    def qp_num(self) -> int:
        return self.qp.qp_num

    @property
    def qp_type(self) -> int:
        return int(self.qp.qp_type)

    def query(self, attr_mask: int) -> tuple[Any, None]:
        assert type(attr_mask) is int
        return self.qp.query(QpAttrMask(attr_mask)), None

    def modify(self, attr: Attr, comp_mask: int) -> None:
        assert type(comp_mask) is int
        given = dict(vars(attr))
        if "ah_attr" in given:
            ah = given.pop("ah_attr")
            route = ah.pop("gr")
            dgid = bytes.fromhex(route.pop("dgid").replace(":", ""))
            given["ah_attr"] = AhAttr(**ah, **route, dgid=dgid)
        self.qp.modify(given, QpAttrMask(comp_mask))


class IbverbsQP:
    def __init__(self, qp: QueuePair) -> None:
        self._qp, self.qp_num, self.qp_type = qp, qp.qp_num, int(qp.qp_type)
        self.pd = SimpleNamespace(context=SimpleNamespace(name="soft0"))

    def query(self) -> tuple[dict[str, Any], None]:
        attr = self._qp.query()
        return {name: getattr(attr, name) for name in ("qp_state", "port_num", "qkey")}, None

    def modify(self, attr_mask: int, ah_attr: Any = None, **fields: int) -> None:
        assert type(attr_mask) is int
        self._qp.modify(fields | ({} if ah_attr is None else {"ah_attr": AhAttr(**ah_attr)}), QpAttrMask(attr_mask))


PyverbsContext.__module__, PyverbsPD.__module__, PyverbsQP.__module__ = "pyverbs.device", "pyverbs.pd", "pyverbs.qp"
PyverbsContext.__name__, PyverbsPD.__name__, PyverbsQP.__name__ = "Context", "PD", "QP"
IbverbsQP.__module__, IbverbsQP.__name__ = "ibverbs._ibverbs", "QP"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of the libraries is called by name."""
    offered: dict[str, dict[str, Any]] = {
        "pyverbs": {}, "pyverbs.qp": {"QPAttr": Attr}, "ibverbs": {"AHAttr": dict},
        "pyverbs.addr": {"GID": str, "GlobalRoute": dict, "AHAttr": dict},
    }  # fmt: skip
    for name, names in offered.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)


def address_of(qp: QueuePair) -> int:
    return ctypes.addressof(qp.pointer.contents)


GIVEN: dict[str, Callable[[QueuePair], Any]] = {
    "QueuePair": lambda qp: qp, "address": address_of, "like": Plain, "pyverbs": PyverbsQP, "ibverbs": IbverbsQP,
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", GIVEN)
TYPES = pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])


@contextmanager
def mine(kind: str, qp_type: str = "RC", device: str = "soft0") -> Iterator[tuple[End, Any]]:
    """A queue pair with all that it stands on, and what is given of it."""
    with end_on(device, QpType[qp_type]) as end:
        yield end, GIVEN[kind](end.qp)


def send(end: End, conn: rdmaconnect.Connection, data: bytes) -> None:
    request = SendRequest()
    if conn.local.qp_type is not QpType.UD:
        end.qp.post_send(request.send(2, inline=data))
        return
    with AddressHandle(end.pd, conn.path.ah_attr) as ah:  # where the protection domain is not known: made by hand
        to = UdAddress(conn.ah or ah, conn.peer.qp_num, conn.peer.qkey)
        qp = end.qp if conn.ah is None else conn.qp  # each with its own idea of the protection domain
        qp.post_send(request.send(2, inline=data, to=to))
        end.wait()


def exchange(end: End, conn: rdmaconnect.Connection, plain: rdmaconnect.Connection) -> None:
    """Messages each way, checked."""
    end.qp.found_in()  # its owner's object does not see what others do to it
    grh = 40 if conn.local.qp_type is QpType.UD else 0
    end.recv(1, length=1024)
    plain.send(b"to whoever made it")
    (wc,) = end.wait()
    assert (wc.wr_id, wc.opcode, wc.byte_len) == (1, WcOpcode.RECV, 18 + grh)
    assert end.memory[grh : grh + 18] == b"to whoever made it"
    send(end, conn, b"and back")
    assert plain.recv() == b"and back"


@KINDS
@TYPES
@pytest.mark.parametrize("listens", [False, True])
def test_each_way_between_it_and_a_plain_peer(software: Software, kind: str, qp_type: str, listens: bool) -> None:
    with mine(kind, qp_type) as (end, given):
        own: dict[str, Any] = {"qp": given}
        with connected(qp_type, own if listens else {}, **({} if listens else own)) as ends:
            conn, plain = reversed(ends) if listens else ends
            assert conn.local.qp_num == end.qp.qp_num
            assert end.qp.found_in() == QpState.RTS
            assert conn.health.state is HealthState.ALIVE
            if kind == "address":
                assert isinstance(conn.qp, QueuePair)
            else:
                assert conn.qp is given
            exchange(end, conn, plain)
            with pytest.raises(StateError, match=r"the application's own \(qp was given\)\. Post to conn\.qp"):
                conn.send(b"x")
        assert not end.qp.closed
        assert end.qp.found_in() == QpState.RTS  # it is left as it was
        assert end.qp.query().qp_state == QpState.RTS


@contextmanager
def by_bytes(given: Any, **options: Any) -> Iterator[tuple[rdmaconnect.Connection, rdmaconnect.Connection]]:
    """The same connection where nobody listens: its end, and a plain one's. Neither waits for the other."""
    with rdmaconnect.bind(qp=given) as one, rdmaconnect.bind(**options) as other:
        conn = one.connect(other.to_bytes(), deadline_s=PATIENCE_S)
        with conn, other.connect(one.to_bytes(), deadline_s=PATIENCE_S) as plain:
            yield conn, plain


@KINDS
@TYPES
def test_by_bytes_between_it_and_a_plain_end(software: Software, kind: str, qp_type: str) -> None:
    with mine(kind, qp_type) as (end, given), by_bytes(given, qp_type=qp_type) as (conn, plain):
        assert (conn.local.qp_num, end.qp.found_in()) == (end.qp.qp_num, QpState.RTS)
        exchange(end, conn, plain)
        with pytest.raises(StateError, match=r"the application's own \(qp was given\)\. Post to conn\.qp"):
            conn.send(b"x")
        end.recv(5, length=1024)
        plain.close()  # nothing but the application's messages comes: no good-bye
        time.sleep(0.05)
        assert 5 not in [wc.wr_id for wc in end.cq.wcs[: end.cq.poll()]]
        assert conn.health.state is HealthState.ALIVE
    assert software.alive["qp"] == 0


@TYPES
def test_by_bytes_between_two_of_them(software: Software, qp_type: str) -> None:
    with mine("QueuePair", qp_type) as (one, given), mine("like", qp_type) as (other, like):
        for end in (one, other):
            end.qp.modify(INIT | ({"qkey": 0x11} if qp_type == "UD" else {"qp_access_flags": FULL_ACCESS}))
        with rdmaconnect.bind(qp=given) as here, rdmaconnect.bind(qp=like) as there:
            other.recv(4, length=1024)  # when the other end cannot send yet
            with here.connect(there.to_bytes()) as conn, there.connect(here.to_bytes()):
                send(one, conn, b"first")
                assert other.wait()[0].wr_id == 4
        assert one.qp.found_in() == other.qp.found_in() == QpState.RTS


@KINDS
@TYPES
def test_what_was_posted_in_init_is_there_for_the_first_message(software: Software, kind: str, qp_type: str) -> None:
    with mine(kind, qp_type) as (end, given):
        more = {"qkey": 0x5151} if qp_type == "UD" else {"qp_access_flags": FULL_ACCESS}
        end.qp.modify(INIT | more)
        end.recv(7, length=1024)
        with connected(qp_type, qp=given) as (conn, plain):
            plain.send(b"first")
            assert end.wait()[0].wr_id == 7
            if qp_type == "UD":
                assert conn.local.qkey == 0x5151


@KINDS
def test_memory_is_registered_where_the_protection_domain_is_known(software: Software, kind: str) -> None:
    with mine(kind) as (end, given), connected(qp=given) as (conn, plain):
        if kind in ("QueuePair", "address"):
            mr = conn.register(bytearray(64))
            plain.write(b"hello", mr.region)
            assert conn.pd.pointer.contents.handle == end.pd.pointer.contents.handle
        else:
            for ask in (lambda: conn.pd, lambda: conn.register(bytearray(64))):
                with pytest.raises(StateError, match=r"protection domain of a queue pair that was given \(qp\)"):
                    ask()
        with pytest.raises(StateError, match="completion queue of a queue pair that was given"):
            conn.cq  # noqa: B018
        plain.write(b"by hand", end.mr.region)
        assert end.memory[:7] == b"by hand"
    assert software.left() == {}


def test_named_regions_need_it_too(software: Software) -> None:
    with mine("QueuePair") as (_, given), connected(qp=given, regions={"m": bytearray(8)}) as (_, plain):
        plain.write(b"12345678", "m")
    with mine("like") as (end, given), rdmaconnect.listen("127.0.0.1:0") as listener:
        with pytest.raises(StateError, match="protection domain"):
            rdmaconnect.connect(listener.url, qp=given, regions={"m": bytearray(8)}, deadline_s=5)
        assert end.qp.found_in() == QpState.RESET


@KINDS
def test_it_is_connected_anew_and_once_more_after_a_close(software: Software, kind: str) -> None:
    with mine(kind) as (end, given), rdmaconnect.listen("127.0.0.1:0") as listener:
        for _ in range(2):
            with rdmaconnect.connect(listener.url, qp=given) as conn, listener.accept() as plain:
                exchange(end, conn, plain)
                plain.close()
                conn.reconnect(deadline_s=5)
                with listener.accept() as anew:
                    exchange(end, conn, anew)
                assert conn.generation == 2
            end.qp.modify({"qp_state": QpState.RESET})


# ---- what is wrong with it


@KINDS
@pytest.mark.parametrize("call", [rdmaconnect.connect, rdmaconnect.listen])
def test_one_in_the_wrong_state(software: Software, kind: str, call: Any) -> None:
    with mine(kind) as (end, given), connected(qp=given), pytest.raises(StateError, match=r"it is in RTS. Move it to"):
        call("127.0.0.1:0" if call is rdmaconnect.listen else "127.0.0.1:1", qp=given)
    assert end.qp.closed


@KINDS
def test_one_of_the_wrong_port(kind: str) -> None:
    ports = [Port(gids=["127.0.0.1"]), Port(state=PortState.DOWN), Port(gids=["127.0.0.2"])]
    with Software([Device("soft0", ports)]) as software:
        with mine(kind) as (end, given), rdmaconnect.listen("127.0.0.1:0", port_num=1) as listener:
            end.qp.modify(INIT | {"port_num": 3, "qp_access_flags": FULL_ACCESS})
            with pytest.raises(ValueError, match="port_num is 1, and qp in INIT on port 3"):
                rdmaconnect.connect(listener.url, qp=given, port_num=1)
            with rdmaconnect.connect(listener.url, qp=given) as conn:  # nothing else is meant
                assert (conn.local.port.port_num, conn.path.port_num) == (3, 3)
            end.qp.modify({"qp_state": QpState.RESET})
            end.qp.modify(INIT | {"port_num": 2, "qp_access_flags": FULL_ACCESS})
            with pytest.raises(DeviceError, match="soft0 port 2 DOWN"):
                rdmaconnect.connect(listener.url, qp=given)
            assert end.qp.found_in() == QpState.INIT
        assert software.problems() == []


@KINDS
def test_a_listener_finds_it_moved_to_another_port(kind: str) -> None:
    with Software([Device("soft0", [Port(gids=["127.0.0.1"]), Port(gids=["127.0.0.2"])])]) as software:
        with mine(kind) as (end, given), rdmaconnect.listen("127.0.0.1:0", qp=given) as listener:
            end.qp.modify(INIT | {"port_num": 2, "qp_access_flags": FULL_ACCESS})
            with rdmaconnect.connect(listener.url, port_num=1, deadline_s=5) as plain, listener.accept() as conn:
                assert "in INIT on port 2, and the connection goes by port 1 of soft0" in " ".join(plain.path.why)
                assert conn.path.port_num == 2
                exchange(end, conn, plain)
        assert software.problems() == []


MOVED = r"it is in {}, and was made ready in INIT on port 1: it was moved meanwhile\. Leave it alone"


@KINDS
def test_an_end_finds_that_it_was_moved(kind: str) -> None:
    with Software([Device("soft0", [Port(gids=["127.0.0.1"]), Port(gids=["127.0.0.2"])])]) as software:
        with mine(kind) as (end, given), rdmaconnect.bind() as other:
            moves: list[tuple[dict[str, Any], str]] = [
                ({"qp_state": QpState.RESET}, MOVED.format("RESET")),
                (INIT | {"port_num": 2, "qp_access_flags": FULL_ACCESS}, MOVED.format("INIT on port 2")),
                ({"qp_state": QpState.ERR}, "it is in ERR. Move it to RESET"),
            ]
            for to, words in moves:
                with rdmaconnect.bind(qp=given) as bound:
                    assert [str(port) for port in bound.ports] == ["soft0 port 1"]
                    end.qp.found_in()
                    for step in ({"qp_state": QpState.RESET}, to)[to["qp_state"] != QpState.INIT :]:
                        end.qp.modify(step)
                    with pytest.raises(StateError, match=words):
                        bound.connect(other.to_bytes())
                end.qp.found_in()
                end.qp.modify({"qp_state": QpState.RESET})
                with rdmaconnect.bind() as other:  # its bytes are used
                    pass
        assert (software.left(), software.problems()) == ({}, [])


@KINDS
def test_an_end_is_on_the_port_that_it_is_on(kind: str) -> None:
    ports = [Port(gids=["127.0.0.1"]), Port(state=PortState.DOWN), Port(gids=["127.0.0.2"])]
    with Software([Device("soft0", ports)]) as software:
        with mine(kind) as (end, given):
            end.qp.modify(INIT | {"port_num": 3, "qp_access_flags": FULL_ACCESS})
            with pytest.raises(ValueError, match="port_num is 1, and qp in INIT on port 3"):
                rdmaconnect.bind(qp=given, port_num=1)
            with rdmaconnect.bind(qp=given) as bound:
                assert [port.port_num for port in bound.ports] == [3]
                for call in (rdmaconnect.bind, partial(rdmaconnect.connect, "127.0.0.1:1")):
                    with pytest.raises(StateError, match=r"is another connection's, or that of an end of bind\(\)"):
                        call(qp=given)
            assert end.qp.found_in() == QpState.INIT  # as it came
            end.qp.modify({"qp_state": QpState.RESET})
            with rdmaconnect.bind(qp=given, port_num=3) as bound:
                assert [port.port_num for port in bound.ports] == [3]
            assert end.qp.found_in() == QpState.RESET
            end.qp.modify(INIT | {"port_num": 2, "qp_access_flags": FULL_ACCESS})
            with pytest.raises(DeviceError, match="soft0 port 2 DOWN"):
                rdmaconnect.bind(qp=given)
        assert (software.left(), software.problems()) == ({}, [])


@KINDS
def test_an_end_takes_none_in_the_wrong_state(software: Software, kind: str) -> None:
    with mine(kind) as (_, given), connected(qp=given), pytest.raises(StateError, match=r"it is in RTS. Move it to"):
        rdmaconnect.bind(qp=given)


@pytest.mark.parametrize("kind", ["QueuePair", "address", "like"])
def test_an_end_finds_it_destroyed(software: Software, kind: str) -> None:
    with mine(kind) as (end, given), rdmaconnect.bind() as other, rdmaconnect.bind(qp=given) as bound:
        end.qp.close()
        if isinstance(given, Plain):
            given.error = RuntimeError("it was closed")
        with pytest.raises(StateError, match=r"is closed|destroyed meanwhile, by who made it|Was it destroyed\?"):
            bound.connect(other.to_bytes())


@KINDS
def test_an_end_that_comes_to_nothing_leaves_it_in_reset(software: Software, kind: str) -> None:
    with mine(kind) as (end, given):
        end.qp.modify(INIT | {"qp_access_flags": FULL_ACCESS})
        with rdmaconnect.bind(qp=given) as bound, rdmaconnect.bind(qp_type="UD") as other:
            with pytest.raises(PeerMismatch):
                bound.connect(other.to_bytes())
            assert end.qp.found_in() == QpState.INIT
            hook = software.on("ibv_modify_qp", to=QpState.RTS, fail=errno.EINVAL)
            with rdmaconnect.bind() as third, pytest.raises(ModifyError, match="RTR->RTS"):
                bound.connect(third.to_bytes())
            hook.remove()
        assert end.qp.found_in() == QpState.RESET
        with by_bytes(given) as (conn, plain):
            exchange(end, conn, plain)


@pytest.mark.parametrize("kind", ["QueuePair", "address"])
def test_one_that_was_destroyed_before_the_peer_came(software: Software, kind: str) -> None:
    with mine(kind) as (end, given), rdmaconnect.listen("127.0.0.1:0", qp=given) as listener:
        end.qp.close()
        if kind == "address":  # here what was freed looks as it did, and so is asked
            software.expects("use after free")
        with pytest.raises(PeerRejected, match=r"is closed|no struct ibv_qp|Was it destroyed\?"):
            rdmaconnect.connect(listener.url, deadline_s=5)
        with pytest.raises((StateError, ValueError), match=r"is closed|no struct ibv_qp|Was it destroyed\?"):
            rdmaconnect.connect(listener.url, qp=given, deadline_s=5)


@pytest.mark.parametrize("kind", ["QueuePair", "address", "like"])
def test_one_that_is_destroyed_meanwhile(software: Software, kind: str) -> None:
    with mine(kind) as (end, given):

        def destroy(call: Any) -> None:
            if not end.qp.closed:
                end.qp.close()
                if isinstance(given, Plain):
                    given.error = RuntimeError("it was closed")

        with rdmaconnect.listen("127.0.0.1:0") as listener:
            # the other side goes to RTR before it replies: then this one is gone
            software.on("ibv_modify_qp", to=QpState.RTR, times=1, after=destroy)
            with pytest.raises(StateError, match=r"destroyed|is closed"):
                rdmaconnect.connect(listener.url, qp=given, deadline_s=5)
    until(lambda: software.left() == {})  # the listener's half goes in the background


def test_a_closed_one_of_pyverbs_is_not_asked_for_anything(software: Software) -> None:
    with mine("pyverbs") as (_, given):
        given.pd = None  # as its close() does
        with pytest.raises(StateError, match="use a pyverbs QP: it is closed"):
            rdmaconnect.connect("127.0.0.1:1", qp=given)


def test_a_closed_one_of_ibverbs_says_so_itself(software: Software) -> None:
    with mine("ibverbs") as (_, given):
        given.pd = None  # as its close() does
        with pytest.raises(StateError, match=r"use a queue pair of ibverbs: .*Was it destroyed\?"):
            rdmaconnect.connect("127.0.0.1:1", qp=given)


def test_what_its_library_says_is_told(software: Software) -> None:
    with mine("like") as (end, given), rdmaconnect.listen("127.0.0.1:0") as listener:
        for error, kind, words in (
            (VerbsError("ibv_modify_qp", errno.EINVAL), ModifyError, "RESET->INIT: ibv_modify_qp: EINVAL"),
            (RuntimeError("no such handle."), StateError, "no such handle. Was it destroyed?"),
            (ValueError(), StateError, "ValueError. Was it destroyed?"),
        ):

            def modify(attr: Any, mask: Any, error: Exception = error) -> None:
                raise error

            given.modify = modify
            with pytest.raises(kind, match=words):
                rdmaconnect.connect(listener.url, qp=given, deadline_s=5)
        given.error = OSError(errno.EBADF, "gone")
        with pytest.raises(StateError, match=r"ask RC QP .* for its STATE: .*gone. Was it destroyed?"):
            rdmaconnect.connect(listener.url, qp=given)
        assert end.qp.found_in() == QpState.RESET


@KINDS
def test_after_a_failure_it_is_as_it_came_or_in_reset(software: Software, kind: str) -> None:
    with mine(kind) as (end, given):
        with rdmaconnect.listen("127.0.0.1:0", qp_types=["UD"]) as listener:
            with pytest.raises(PeerMismatch):
                rdmaconnect.connect(listener.url, qp=given, deadline_s=5)
            assert end.qp.found_in() == QpState.RESET
            end.qp.modify(INIT | {"qp_access_flags": FULL_ACCESS})
            end.recv(9)
            with pytest.raises(PeerMismatch):
                rdmaconnect.connect(listener.url, qp=given, deadline_s=5)
            assert end.qp.found_in() == QpState.INIT
        hook = software.on("ibv_modify_qp", to=QpState.RTS, fail=errno.EINVAL)
        with rdmaconnect.listen("127.0.0.1:0") as listener, pytest.raises(ModifyError, match="RTR->RTS"):
            rdmaconnect.connect(listener.url, qp=given, deadline_s=5)  # once, as its receives are gone then
        assert end.qp.found_in() == QpState.RESET
        hook.remove()
        with connected(qp=given) as (conn, plain):
            exchange(end, conn, plain)


def test_a_listener_does_not_go_on_with_one_whose_receives_are_gone(software: Software) -> None:
    with mine("QueuePair") as (end, given), rdmaconnect.listen("127.0.0.1:0", qp=given) as listener:
        end.qp.modify(INIT | {"qp_access_flags": FULL_ACCESS})
        hook = software.on("ibv_modify_qp", to=QpState.RTS, fail=errno.EINVAL)
        with pytest.raises((PeerRejected, ModifyError)):
            rdmaconnect.connect(listener.url, deadline_s=5)
        hook.remove()
        end_s = time.monotonic() + 5
        while end.qp.found_in() != QpState.RESET:
            assert time.monotonic() < end_s
        with pytest.raises(PeerRejected, match="what had been posted to it went"):
            rdmaconnect.connect(listener.url, deadline_s=5)
        end.qp.modify(INIT | {"qp_access_flags": FULL_ACCESS})
        with rdmaconnect.connect(listener.url, deadline_s=5) as plain, listener.accept() as conn:
            exchange(end, conn, plain)


def test_a_listener_connects_it_to_one_at_a_time(software: Software) -> None:
    with mine("QueuePair") as (end, given), rdmaconnect.listen("127.0.0.1:0", qp=given) as listener:
        with rdmaconnect.connect(listener.url), listener.accept() as conn:
            with pytest.raises(rdmaconnect.ConnectTimeout, match=r"busy: RC QP .* is another connection's"):
                rdmaconnect.connect(listener.url, deadline_s=0.5)
            assert conn.lost is None
        with pytest.raises(PeerMismatch, match="this listener takes RC"):
            rdmaconnect.connect(listener.url, qp_type="UC", deadline_s=5)
        end.qp.modify({"qp_state": QpState.RESET})
        with rdmaconnect.connect(listener.url) as plain, listener.accept() as conn:
            exchange(end, conn, plain)
        end.qp.modify({"qp_state": QpState.RESET})
        with pytest.raises(PeerRejected, match="this is the only one"):
            rdmaconnect.connect_many(listener.url, 2, deadline_s=5)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ("qp", TypeError, r"qp is 'qp': give a QueuePair.*QueuePairLike"),
        (True, TypeError, "qp is True"),
        (0, ValueError, "qp is 0x0: no struct ibv_qp"),
        (-8, ValueError, "qp is -0x8: no struct"),
        (1 << 70, ValueError, "no struct ibv_qp"),
        (id(object), ValueError, "no struct ibv_qp of a device that this process has open lies there"),
    ],
)
def test_what_is_none(software: Software, given: Any, kind: type[Exception], words: str) -> None:
    for call in (rdmaconnect.connect, rdmaconnect.listen):
        with pytest.raises(kind, match=words):
            call("127.0.0.1:0" if call is rdmaconnect.listen else "127.0.0.1:1", qp=given)


def test_what_does_not_go_with_it(software: Software) -> None:
    with mine("QueuePair", "UD") as (end, given):
        refused: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
            (rdmaconnect.connect, {"qp_type": "RC"}, "qp_type is RC, and qp of type UD"),
            (rdmaconnect.connect, {"send_cq": end.cq}, "qp with send_cq: a queue pair has its queues already"),
            (rdmaconnect.connect, {"probe": True}, "probe=True with qp"),
            (rdmaconnect.connect, {"auto_reconnect": 5}, "auto_reconnect with qp"),
            (rdmaconnect.connect, {"device": "soft7"}, "device is 'soft7', and qp of soft0"),
            (rdmaconnect.listen, {"qp_types": ["RC"]}, "qp is of type UD, which is not among qp_types"),
            (rdmaconnect.listen, {"share_ud": True}, "qp with share_ud"),
        ]
        for call, options, words in refused:
            with pytest.raises(ValueError, match=words):
                call("127.0.0.1:0" if call is rdmaconnect.listen else "127.0.0.1:1", qp=given, **options)
        with pytest.raises(
            ValueError, match=r"qp with a count of 2: give it to connect\(\), listen\(\) or bind\(\), for"
        ):
            rdmaconnect.bind(count=2, qp=given)
        with pytest.raises(ValueError, match="qp with connect_many"):
            rdmaconnect.connect_many("127.0.0.1:1", 2, qp=given)
        with pytest.raises(ValueError, match="qp with meet"):
            rdmaconnect.meet("127.0.0.1:0", "127.0.0.1:1", qp=given)
        with pytest.raises(ValueError, match="qp with a Pool"):
            rdmaconnect.Pool("127.0.0.1:1", qp=given)


def test_ours_is_like_one() -> None:
    with Software() as software:
        with mine("QueuePair") as (_, given):
            assert isinstance(given, rdmaconnect.QueuePairLike)
            assert given.device == "soft0"
        assert software.problems() == []
