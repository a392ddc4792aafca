"""Ends that close at any moment: listeners while others accept, connections while others use them, and at once."""

from __future__ import annotations

import threading

import pytest
from software import Software

import rdmaconnect

from .campaign import Campaign, scaled


@pytest.mark.parametrize("probe", [True, False])
def test_a_connection_that_is_closed_at_once_is_accepted_with_what_was_sent(
    software: Software, counted: Campaign, probe: bool
) -> None:
    rounds = scaled(60, 3000)
    with rdmaconnect.listen("127.0.0.1:0", probe=probe) as listener:

        def serve() -> None:
            for _ in range(rounds):
                connection = counted.call("accept", listener.accept, deadline_s=5, tolerant=False)
                if connection is None:
                    continue
                with connection:
                    counted.count("received", connection.recv(deadline_s=5) == b"all there is")

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(rounds):
            with rdmaconnect.connect(listener.url, deadline_s=10, probe=probe) as connection:
                connection.send(b"all there is")
        thread.join()
    assert counted.failures() == {}
    assert counted.counts["received"] == rounds
