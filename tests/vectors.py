"""The messages of tests/data: explicit values whose bytes were written once, by ``python tests/vectors.py``.

A difference from those files means that peers of an earlier release would no longer be understood.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samples import IB, ID, V1, V2, end, gid, infiniband, roce

from rdmaconnect.abi import Mtu, QpType
from rdmaconnect.agreement.endpoint import GidKey, RemoteRegion
from rdmaconnect.agreement.path import Agreement, Wish
from rdmaconnect.protocol.codec import encode
from rdmaconnect.protocol.messages import (
    Answer,
    Beat,
    Bye,
    Hello,
    Joined,
    Message,
    Proof,
    Question,
    Ready,
    Reject,
    Remark,
    Reply,
    Resume,
    Target,
    Unlisted,
)

DATA = Path(__file__).parent / "data"

ROCE = roce(
    gid("fe80::5054:ff:fe12:3456", V1, 0, "eth0"), gid("10.0.0.7", V2, 3, "eth0"),
    device="rxe0", port_num=1, active_mtu=Mtu.MTU_1024, pkeys=(0xFFFF,), max_rd_atomic=128, max_dest_rd_atomic=16,
)  # fmt: skip
INFINIBAND = infiniband(
    0xC001, gid("fe80::2:c903:0:1491", IB, 0, ""),
    device="mlx5_0", port_num=2, active_mtu=Mtu.MTU_4096, pkeys=(0xFFFF, 0, 0x8005), grh_required=True,
    max_rd_atomic=0, max_dest_rd_atomic=255,
)  # fmt: skip

VALUES: dict[str, Message] = {
    "hello": Hello(
        id=ID,
        ends=(end(ROCE, qp_num=0x11C, psn=0xABCDEF, recv_size=65536),),
        wish=Wish(Mtu.MTU_2048, sl=3, traffic_class=106, flow_label=0xFFFFF, pkey=0xFFFF),
        regions={"ring": RemoteRegion(addr=0x7F0000001000, rkey=0xDEADBEEF, length=1 << 20)},
        private_data=b"rank 3",
    ),
    "hello-many": Hello(
        id=bytes.fromhex("ff" * 16),
        ends=tuple(
            end(INFINIBAND, qp_type=QpType.UD, qp_num=number, psn=psn, recv_size=0, qkey=qkey)
            for number, psn, qkey in ((1, 0, 0), (0xFFFFFF, 0xFFFFFF, 0xFFFFFFFF))
        ),
        wish=Wish(probe=False),
        regions={},
    ),
    "hello-again": Hello(
        id=ID,
        ends=(end(ROCE, qp_num=5, psn=6, recv_size=7),),
        wish=Wish(),
        regions={},
        private_data=bytes(range(256)) * 16,
        prev=bytes.fromhex("11" * 16),
        target=Target("rxe1", 254, GidKey(bytes.fromhex("22" * 16)), GidKey(bytes.fromhex("33" * 16))),
        meet=True,
    ),
    "hello-beats": Hello(
        id=ID,
        ends=(end(ROCE, qp_num=5, psn=6, recv_size=7),),
        wish=Wish(),
        regions={},
        prev=bytes.fromhex("44" * 16),
        beat_ms=1000,
        patience_ms=2**31 - 1,
    ),
    "hello-target": Hello(
        id=ID,
        ends=(end(replace(ROCE, gids=(replace(ROCE.gids[0], here=False), ROCE.gids[1])), qp_num=5, psn=6),),
        wish=Wish(sl=0, traffic_class=1, flow_label=0),
        regions={},
        target=Target("rxe1", 2, ROCE.gids[1].key, GidKey(bytes.fromhex("33" * 16), V2, "eth1.100")),
    ),
    "hello-target-lid": Hello(
        id=ID,
        ends=(end(INFINIBAND, qp_num=5, psn=6, recv_size=7),),
        wish=Wish(),
        regions={},
        target=Target("mlx5_1", 1),
    ),
    "reply": Reply(
        id=ID,
        ends=(end(ROCE, qp_num=0x200, psn=0, recv_size=1),),
        agreement=Agreement(gid("10.0.0.7", V2, 3), gid("10.0.0.8", V2, 255, "enp1s0"), Mtu.MTU_1024, 0, 0, 0, 0x7FFF),
        regions={
            "é 漢": RemoteRegion(addr=2**64 - 1, rkey=2**32 - 1, length=0),
            "": RemoteRegion(addr=0, rkey=0, length=2**64 - 1),
        },
        private_data=b"\x00",
        ports=(ROCE, INFINIBAND),
    ),
    "reply-lid": Reply(
        id=ID,
        ends=(end(INFINIBAND, qp_type=QpType.UC, qp_num=7, psn=8),),
        agreement=Agreement(None, None, Mtu.MTU_256, 15, 255, 0xFFFFF, 1),
        regions={},
    ),
    "reply-doors": Reply(
        id=ID,
        ends=(end(INFINIBAND, qp_num=7, psn=8),),
        agreement=Agreement(None, None, Mtu.MTU_256, 15, 255, 0xFFFFF, 1),
        regions={},
        stages=(("hello", 0), ("reply", 70_000)),
    ),
    "reply-beats": Reply(
        id=ID,
        ends=(end(ROCE, qp_num=7, psn=8),),
        agreement=Agreement(gid("10.0.0.7", V2, 3), gid("10.0.0.8", V2, 1, "eth1"), Mtu.MTU_4096, 0, 0, 0, 0x7FFF),
        regions={},
        stages=(("hello", 0), ("reply", 2)),
        token=bytes.fromhex("55" * 16),
        beat_ms=60_000,
    ),
    "reply-unproven": Reply(
        id=ID,
        ends=(end(ROCE, qp_num=7, psn=8),),
        agreement=Agreement(
            gid("10.0.0.7", V2, 3), gid("10.0.0.8", V2, 1, "eth1"), Mtu.MTU_4096, 0, 0, 0, 0x7FFF, probe=False
        ),
        regions={},
        beat_ms=5_000,
    ),
    "ready": Ready(ID),
    "ready-doors": Ready(ID, stages=(("port", 0), ("hello", 2_500), ("a door of 16 cha", 2**53))),
    "joined": Joined(ID),
    "proof": Proof(ID),
    "proof-doors": Proof(ID, stages=(("é 漢", 1),)),
    "beat": Beat(ID),
    "beat-ask": Beat(ID, ask=True),
    "resume": Resume(ID, token=bytes.fromhex("66" * 16)),
    "unlisted": Unlisted(ID),
    "reject": Reject(ID, stage="asked", errno=110, why="The route to ::ffff:10.0.0.7 did not resolve. “Sorry”."),
    "reject-ports": Reject(bytes(16), stage="", errno=0, why="", ports=(INFINIBAND, ROCE)),
    "reject-differences": Reject(
        ID, stage="heard", errno=0, why="join the two ends: sl, pkey.", differences=("sl: 3, 5", "pkey: é 漢")
    ),
    "reject-again": Reject(ID, stage="accept", errno=0, why="busy: 1024 connections are half open", again_ms=200),
    "bye": Bye(ID, why="close"),
    "bye-lost": Bye(ID, why="close", lost=True),
    "question": Question(ID),
    "answer": Answer(
        ID,
        host="node é 漢",
        remarks=(Remark("fail", "memlock", "Locked memory: 8 MiB at most.", "ulimit -l unlimited"), Remark("", "", "")),
        ports=(ROCE, INFINIBAND),
    ),
}


def read(name: str) -> bytes:
    """The bytes of one vector."""
    return bytes.fromhex((DATA / f"{name}.hex").read_text())


def write() -> None:
    """Write all vectors anew, 32 bytes a line."""
    DATA.mkdir(exist_ok=True)
    for name, value in VALUES.items():
        frame = encode(value)
        lines = [frame[at : at + 32].hex(" ", 4) for at in range(0, len(frame), 32)]
        (DATA / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
