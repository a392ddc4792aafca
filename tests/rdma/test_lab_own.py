"""Queue pairs that other libraries have made, connected to a plain peer: RC and UD, each way, the data checked."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nodes import PATIENCE, Node, connected

import rdmaconnect
from rdmaconnect import Connection
from rdmaconnect.abi import QpType
from rdmaconnect.objects.address import UdAddress
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest

#: where Debian's own Python has its packages
DEBIAN = "/usr/lib/python3/dist-packages"
SIZE, GRH, DEPTH = 2048, 40, 4


def imported(name: str) -> Any:
    """A module of a library that the lab has beside its own Python; a test without it is skipped."""
    peers = os.environ.get("RDMACONNECT_LAB_PEERS", "")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [DEBIAN, str(Path(peers).parent.parent / "lib" / version / "site-packages")] if peers else [DEBIAN]
    sys.path += places
    try:
        return importlib.import_module(name)
    except ImportError as e:
        pytest.skip(f"{name} is not for this Python: {e}")
    finally:
        del sys.path[-len(places) :]


class Ours:
    """A queue pair of our objects, given as itself or by its address."""

    def __init__(self, device: str, qp_type: str, by_address: bool = False) -> None:
        self.context = open_device(device)
        self.pd, self.cq = PD(self.context), CQ(self.context, 2 * DEPTH)
        self.qp = QueuePair(self.pd, self.cq, self.cq, QpType[qp_type], max_send_wr=DEPTH, max_recv_wr=DEPTH)
        self.memory = mmap.mmap(-1, 2 * SIZE)
        self.mr = self.pd.register(self.memory)
        self.given: Any = ctypes.addressof(self.qp.pointer.contents) if by_address else self.qp

    def post_recv(self, conn: Connection) -> None:
        self.qp.found_in()  # who moved it was not always this object
        self.qp.post_recv(RecvRequest.scatter(1, self.mr.sge(0, SIZE)))

    def post_send(self, conn: Connection, data: bytes) -> None:
        self.memory[SIZE : SIZE + len(data)] = data
        to = UdAddress(conn.ah, conn.peer.qp_num, conn.peer.qkey) if conn.ah is not None else None
        request = SendRequest().send(2, sge=self.mr.sge(SIZE, len(data)), to=to)
        if to is not None and self.given is not self.qp:  # the address handle is of a domain that stands for this one
            mr = self.there = conn.register((self.mr.addr, 2 * SIZE))  # closed with the connection
            conn.qp.post_send(SendRequest().send(2, sge=mr.sge(SIZE, len(data)), to=to))
            return
        self.qp.post_send(request)

    def completed(self) -> list[tuple[int, int]]:
        return [(wc.status, wc.byte_len) for wc in self.cq.wcs[: self.cq.poll()]]

    def received(self, length: int) -> bytes:
        return self.memory[:length]

    def close(self) -> None:
        self.context.close()


class Pyverbs:
    """The same of Debian's pyverbs."""

    def __init__(self, device: str, qp_type: str) -> None:
        cq, qp, wr = (imported(f"pyverbs.{name}") for name in ("cq", "qp", "wr"))
        self.addr, self.wr = imported("pyverbs.addr"), wr
        self.context = imported("pyverbs.device").Context(name=device)
        self.pd = imported("pyverbs.pd").PD(self.context)
        self.cq = cq.CQ(self.context, 2 * DEPTH)
        self.mr = imported("pyverbs.mr").MR(self.pd, 2 * SIZE, 1)
        cap = qp.QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
        init = qp.QPInitAttr(qp_type=int(QpType[qp_type]), scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = self.given = qp.QP(self.pd, init)
        self.ah: Any = None

    def post_recv(self, conn: Connection) -> None:
        self.qp.post_recv(self.wr.RecvWR(1, 1, [self.wr.SGE(self.mr.buf, SIZE, self.mr.lkey)]))

    def post_send(self, conn: Connection, data: bytes) -> None:
        self.mr.write(data, len(data), SIZE)
        sge = self.wr.SGE(self.mr.buf + SIZE, len(data), self.mr.lkey)
        request = self.wr.SendWR(2, num_sge=1, sg=[sge])
        if conn.local.qp_type is QpType.UD:  # what conn.ah would be
            way = conn.path.ah_attr
            gid = self.addr.GID(":".join(way.dgid[at : at + 2].hex() for at in range(0, 16, 2)))
            route = self.addr.GlobalRoute(dgid=gid, sgid_index=way.sgid_index, hop_limit=way.hop_limit)
            self.ah = self.addr.AH(self.pd, attr=self.addr.AHAttr(gr=route, is_global=1, port_num=way.port_num))
            request.set_wr_ud(self.ah, conn.peer.qp_num, conn.peer.qkey)
        self.qp.post_send(request)

    def completed(self) -> list[tuple[int, int]]:
        return [(wc.status, wc.byte_len) for wc in self.cq.poll(2)[1]]

    def received(self, length: int) -> bytes:
        return bytes(self.mr.read(length, 0))

    def close(self) -> None:
        for one in (self.ah, self.qp, self.mr, self.cq, self.pd, self.context):
            if one is not None:
                one.close()


class Ibverbs:
    """The same of PyPI's ibverbs."""

    def __init__(self, device: str, qp_type: str) -> None:
        self.ib = ib = imported("ibverbs")
        self.context = next(one for one in ib.get_device_list() if one.name == device).open()
        self.pd, self.cq = self.context.alloc_pd(), self.context.create_cq(2 * DEPTH)
        self.memory = mmap.mmap(-1, 2 * SIZE)
        pinned = ctypes.c_char.from_buffer(self.memory)
        self.mr = self.pd.reg_mr(ctypes.addressof(pinned), 2 * SIZE, ib.AccessFlags.LOCAL_WRITE)
        self._pinned = pinned
        init = ib.QPInitAttr(
            send_cq=self.cq, recv_cq=self.cq, qp_type=ib.QPType[qp_type], max_send_wr=DEPTH, max_recv_wr=DEPTH
        )
        self.qp = self.given = self.pd.create_qp(init)
        self.ah: Any = None

    def post_recv(self, conn: Connection) -> None:
        self.qp.post_recv([self.ib.RecvWR(wr_id=1, sg_list=[self.mr.sge(SIZE, 0)])])

    def post_send(self, conn: Connection, data: bytes) -> None:
        self.memory[SIZE : SIZE + len(data)] = data
        to: dict[str, Any] = {}
        if conn.local.qp_type is QpType.UD:
            way = conn.path.ah_attr
            names = ("dgid", "sgid_index", "is_global", "port_num", "hop_limit")
            self.ah = self.pd.create_ah(self.ib.AHAttr(**{name: getattr(way, name) for name in names}))
            to = {"ah": self.ah, "remote_qpn": conn.peer.qp_num, "remote_qkey": conn.peer.qkey}
        sge, flags = self.mr.sge(len(data), SIZE), int(self.ib.SendFlags.SIGNALED)
        self.qp.post_send(
            [self.ib.SendWR(wr_id=2, sg_list=[sge], opcode=int(self.ib.WROpcode.SEND), send_flags=flags, **to)]
        )

    def completed(self) -> list[tuple[int, int]]:
        return [(int(wc.status), wc.byte_len) for wc in self.cq.poll(2)]

    def received(self, length: int) -> bytes:
        return self.memory[:length]

    def close(self) -> None:
        for one in (self.ah, self.qp, self.mr, self.cq, self.pd, self.context):
            if one is not None:
                one.close()


KINDS: dict[str, Callable[[str, str], Any]] = {
    "QueuePair": Ours,
    "address": lambda device, qp_type: Ours(device, qp_type, by_address=True),
    "pyverbs": Pyverbs,
    "ibverbs": Ibverbs,
}


def wait_for(made: Any) -> int:
    """The next completion, which succeeded; its bytes."""
    end = time.monotonic() + PATIENCE
    while not (found := made.completed()):
        assert time.monotonic() < end
    ((status, length),) = found
    assert status == 0
    return int(length)


def talk(made: Any, conn: Connection, plain: Connection) -> None:
    """A message each way."""
    made.post_recv(conn)
    plain.send(b"from a plain peer")
    length = wait_for(made)
    assert made.received(length)[GRH * (conn.local.qp_type is QpType.UD) :] == b"from a plain peer"
    made.post_send(conn, b"and back")
    wait_for(made)
    assert plain.recv(deadline_s=PATIENCE) == b"and back"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qp_type", ["RC", "UD"])
def test_each_way_to_a_plain_peer(node1: Node, node2: Node, kind: str, qp_type: str) -> None:
    for listens in (False, True):
        mine = node2 if listens else node1
        made = mine.call(KINDS[kind], mine.device, qp_type)
        try:
            own = {"qp": made.given}
            type_ = {} if not listens else {"qp_type": qp_type}
            with connected(node1, node2, type_ if listens else own, own if listens else {}) as ends:
                talk(made, *(reversed(ends) if listens else ends))
        finally:
            mine.call(made.close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qp_type", ["RC", "UD"])
def test_by_bytes_to_a_plain_end(node1: Node, node2: Node, kind: str, qp_type: str) -> None:
    made = node1.call(KINDS[kind], node1.device, qp_type)
    try:
        with (
            node1.call(rdmaconnect.bind, qp=made.given) as one,
            node2.call(rdmaconnect.bind, qp_type=qp_type, **node2.named) as other,
            node1.call(one.connect, other.to_bytes()) as conn,
            node2.call(other.connect, one.to_bytes()) as plain,
        ):
            talk(made, conn, plain)
    finally:
        node1.call(made.close)
