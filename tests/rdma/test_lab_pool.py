"""A pool on real devices: what is handed out works at once, and what is lost is replaced."""

from __future__ import annotations

import time
from typing import Any

import pytest
from nodes import PATIENCE, Node

from rdmaconnect import Pool, RdmaConnectError


def test_what_is_ready_works_at_once_and_is_replaced(node1: Node, node2: Node) -> None:
    sizes: dict[str, Any] = {"recv_size": 4096, "recv_depth": 4, "send_depth": 4}
    with node2.listening(**sizes) as listener:
        pool = node1.call(Pool, listener.url, 2, deadline_s=PATIENCE, **sizes, **node1.named)
        with pool:
            node1.call(pool.warm, deadline_s=PATIENCE)
            there = [node2.call(listener.accept, deadline_s=PATIENCE) for _ in range(2)]
            started = time.monotonic()
            here = node1.call(pool.acquire)
            print(f"handed out after {(time.monotonic() - started) * 1000:.1f} ms, made in {here.connect_s * 1000:.1f}")
            here.send(b"at once", deadline_s=PATIENCE)
            assert there[0].recv(deadline_s=PATIENCE) == b"at once"
            there[0].send(b"answer", deadline_s=PATIENCE)
            assert here.recv(deadline_s=PATIENCE) == b"answer"
            here.close()
            with pytest.raises(RdmaConnectError):  # over RC it may be the flush, before the word
                there[0].recv(deadline_s=PATIENCE)
            # its successor, and another one for that which the peer closes while nobody has it
            there.append(node2.call(listener.accept, deadline_s=PATIENCE))
            there[1].close()
            there.append(node2.call(listener.accept, deadline_s=PATIENCE))
            node1.call(pool.warm, deadline_s=PATIENCE)
            used = {here.local.qp_num}
            for _ in range(2):
                with node1.call(pool.acquire) as conn:
                    used.add(conn.local.qp_num)
                    peer = next(end for end in there if end.local.qp_num == conn.peer.qp_num)
                    conn.send(b"again", deadline_s=PATIENCE)
                    assert peer.recv(deadline_s=PATIENCE) == b"again"
            assert len(used) == 3
        for end in there:
            end.close()
