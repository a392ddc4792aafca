"""What ends a connection by rdma_cm between any two lines of a call is named by that call, and by nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from software import RdmaCm, Software

import rdmaconnect
from rdmaconnect import DeviceError, PeerClosed, StateError
from rdmaconnect.abi.rdma_cma import CmEventType

URL = "rdma://127.0.0.1:7174"
PATIENCE_S = 10.0
Connection = rdmaconnect.Connection

#: what each call does, again and again
CALLS: dict[str, Callable[[Connection], object]] = {
    "recv": lambda end: end.recv(deadline_s=PATIENCE_S),
    "send": lambda end: end.send(b"x"),
    "post_send": lambda end: end.post_send(b"x"),
    "write": lambda end: end.write(b"abc", "m"),
    "read": lambda end: end.read("m", 4),
    "register": lambda end: end.register(bytearray(64)).close(),
    "batch": lambda end: post_in_batch(end),
    "lost": lambda end: raise_lost(end),
}


def post_in_batch(end: Connection) -> None:
    with end.batch() as batch:
        batch.post_send(b"x")


def raise_lost(end: Connection) -> None:
    if end.lost is not None:
        raise end.lost


def remove(cm: RdmaCm, here: Connection, there: Connection) -> None:
    with cm.lock:
        for about in [one for one in cm.ids.values() if not one.listens]:
            cm.tell(about, CmEventType.DEVICE_REMOVAL)


#: what happens, and what a call may raise for it, in words
HAPPENS: dict[str, tuple[Callable[[RdmaCm, Connection, Connection], None], type[Exception], str]] = {
    "the device is removed": (remove, DeviceError, "the device is not there any more: it was removed. Connect anew."),
    "the peer closes": (lambda cm, here, there: there.close(), PeerClosed, "the peer closed the connection"),
    "another thread closes": (lambda cm, here, there: here.close(), StateError, "closed"),
}


def until_it_fails(end: Connection, use: Callable[[Connection], object]) -> None:
    while True:
        use(end)


#: memory can be registered for a peer that is not there
CASES = [(what, call) for what in HAPPENS for call in CALLS if (what, call) != ("the peer closes", "register")]


@pytest.mark.parametrize(("happens", "call"), CASES)
def test_it_is_named_by_each_call(cm: RdmaCm, software: Software, happens: str, call: str) -> None:
    """Threads take turns after every few of the lines."""
    do, kind, words = HAPPENS[happens]
    interval, seen = sys.getswitchinterval(), []
    with rdmaconnect.listen(URL, regions={"m": bytearray(64)}) as door:
        for _ in range(15):
            with (
                rdmaconnect.connect(URL, deadline_s=PATIENCE_S) as here,
                door.accept(deadline_s=PATIENCE_S) as there,
                ThreadPoolExecutor(4) as threads,
            ):
                if call in ("send", "post_send", "batch"):
                    threads.submit(until_it_fails, there, CALLS["recv"])
                sys.setswitchinterval(1e-6)
                try:
                    using = [threads.submit(until_it_fails, here, CALLS[call]) for _ in range(2)]
                    time.sleep(0.01)
                    do(cm, here, there)
                    errors = [one.exception(PATIENCE_S) for one in using]
                finally:
                    sys.setswitchinterval(interval)
                there.close()
                seen += errors
    assert [error for error in seen if not (isinstance(error, kind) and words in str(error))] == []
