"""The command line and the examples, as processes of their own on two nodes."""

from __future__ import annotations

import json
import os
import sys

from nodes import LONG, NETNS, Node, both


def _cli(node: Node, *words: str) -> list[str]:
    device = [] if NETNS else ["-d", node.device]
    return node.command(sys.executable, "-m", "rdmaconnect", *words, *device)


def test_pingpong_prints_one_json_object(node1: Node, node2: Node) -> None:
    options = ["pingpong", "-s", "5000", "-n", "20", "-p", "18600", "--deadline", str(LONG), "--json", "--trace"]
    served, pinged = both(_cli(node2, *options), _cli(node1, *options, node2.address))
    report, other = json.loads(pinged), json.loads(served)
    assert (report["qp_type"], report["op"], report["connections"], report["path_mtu"]) == ("RC", "send", 1, 4096)
    assert (other["op"], other["sizes"], other["iters"], other["connections"]) == ("send", [5000], 20, 1)
    (row,) = report["rows"]
    assert (row["size"], row["iters"]) == (5000, 20)
    assert 0 < row["min_us"] <= row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["max_us"]
    assert {mark["end"] for mark in report["trace"]} == {mark["end"] for mark in other["trace"]} == {"local", "peer"}
    assert report["connect_us"] > 0
    for end, node in (("local", node1), ("remote", node2)):
        assert report[end]["device"] == node.device
        assert report[end]["gid"] == f"::ffff:{node.address}"
        assert set(report[end]) == {"device", "port_num", "gid_index", "gid", "lid", "qp_num", "psn"}
    assert (other["local"], other["remote"]) == (report["remote"], report["local"])


def test_examples(node1: Node, node2: Node) -> None:
    python, address = [sys.executable], f"{node2.address}:18601"
    server = node2.command(*python, "examples/messages.py", "-l", address, *([] if NETNS else ["-d", node2.device]))
    client = node1.command(*python, "examples/messages.py", address, *([] if NETNS else ["-d", node1.device]))
    served, got = both(server, client)
    assert "hello from" in served
    assert "verified" in got


def test_devices_listsboth(node1: Node) -> None:
    shown = node1.run(sys.executable, "-m", "rdmaconnect", "devices")
    assert "rxe1" in shown
    assert f"::ffff:{node1.address}" in shown
    assert "RoCE v2" in shown
    assert "ACTIVE, Ethernet" in shown
    assert os.environ["RDMACONNECT_LAB_LAYOUT"] in ("netns", "rig")
