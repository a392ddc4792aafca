"""The device in software that the other tests run on: what it does, what it counts, and what it notices."""

from __future__ import annotations

import threading

import pytest
from software import Software

import rdmaconnect


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_connections_run_on_it(software: Software, qp_type: str) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        there: list[rdmaconnect.Connection] = []
        thread = threading.Thread(target=lambda: there.append(listener.accept(deadline_s=10)))
        thread.start()
        with rdmaconnect.connect(listener.url, qp_type=qp_type, deadline_s=10) as here:
            thread.join(10)
            with there[0] as end:
                here.send(b"there")
                assert end.recv() == b"there"
                end.send(b"here")
                assert here.recv() == b"here"
    assert software.made["qp"] == 2
