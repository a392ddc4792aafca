"""Those who are told of changes come and go in many threads at once, while the service thread counts them up."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from rdmaconnect.session import attendants

WHERE, ROUNDS = -1, 3000


class Attendant:
    device = "soft0"

    def changed(self, ports: object) -> None:
        raise AssertionError("nothing has changed")


def test_they_come_and_go_while_they_are_counted() -> None:
    interval, over = sys.getswitchinterval(), threading.Event()
    stays = [Attendant() for _ in range(50)]
    attendants.enter(WHERE, stays)

    def come_and_go() -> None:
        for _ in range(ROUNDS):
            one, forgotten = Attendant(), Attendant()
            attendants.enter(WHERE, [one, forgotten])
            attendants.leave(one)

    def count() -> int:
        least = len(stays)
        while not over.is_set():
            least = min(least, sum(one in stays for one in attendants.of(WHERE)))
        return least

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            counting = threads.submit(count)
            for coming in [threads.submit(come_and_go) for _ in range(3)]:
                coming.result()
            over.set()
            assert counting.result() == len(stays)
        assert len(attendants.of(WHERE)) == len(stays)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for one in stays:
            attendants.leave(one)
        attendants._attending.pop(WHERE)
