"""What type checkers say of a program that uses the package: of one with mistakes each of them, of a right one nothing.

mypy is among the extra ``test``. pyright needs Node.js, which is no small thing to fetch, and so it is not: where
``pyright`` can be run it is asked too, for example after ``pip install pyright`` on a machine with Node.js, or
``pip install 'pyright[nodejs]'`` on another.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rdmaconnect

ROOT = Path(rdmaconnect.__file__).parents[1]

RIGHT = """
import array
import asyncio
import mmap
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import rdmaconnect
from rdmaconnect import AccessFlags, Connection, Mark, Options, QpType, RemoteRegion


def serve(key: Path) -> None:
    options = Options(device="mlx5_0", path_mtu=4096)
    board = bytearray(64)
    with rdmaconnect.listen("*:0", options=options, regions={"board": board}, key=key, peer_keys="known") as listener:
        port: int = listener.port
        for conn in listener:
            with conn:
                conn.send(b"port %d" % port)
                answer: bytes = conn.recv(deadline_s=None)
                print(answer, conn.path.why, conn.closed, conn.lost, conn.connect_s)
                marks: tuple[Mark, ...] = conn.trace
                print(marks[0].at_s)
    rdmaconnect.listen(qp_types=("UD", QpType.RC), share_ud=True, max_half_open=8, max_qps=64, recv_size=4096).close()
    rdmaconnect.listen(qp_types=["UD"], secret="a secret of one job", private_data=b"draw", probe=False).close()


def use(peer: str, key: str | None = None) -> None:
    with rdmaconnect.connect(peer, qp_type="RC", deadline_s=5, path_mtu=2048, key=key, peer_key=key) as conn:
        remote: Mapping[str, RemoteRegion] = conn.remote
        for data in (b"x", bytearray(1), memoryview(b"x"), array.array("i", [1])):
            conn.send(data, deadline_s=1)
        conn.write(mmap.mmap(-1, 8), remote["board"], offset=3, imm=7)
        first: bytes = conn.read("board", 5)
        into = bytearray(8)
        count: int = conn.read_into(into, "board") + conn.recv_into(into) + conn.recv_imm()
        with conn.register(SharedMemory("weights"), AccessFlags.LOCAL_WRITE) as mr:
            conn.send(mr)
            conn.read_into(mr, RemoteRegion.from_bytes(conn.recv()), 8, offset=2)
        conn.register((1 << 20, 4096)).close()
        sent: rdmaconnect.Transfer = conn.post_send(b"x", deadline_s=None)
        with conn.batch(deadline_s=5) as batch, conn.recv_view() as view:
            sent = batch.post_write(view, remote["board"], offset=3, imm=7)
            batch.post_read(into, "board", 4).wait(deadline_s=1)
        print(sent.done(), sent.length, view[0] + 1)
        print(first, count, conn.local.qp_num, conn.private_data.decode())
    many: list[Connection] = rdmaconnect.connect_many(peer, 3, qp_type=QpType.UC, options=Options(sl=1), sl=2)
    one = rdmaconnect.connect(peer, qp_type="UD")
    two = rdmaconnect.connect(peer, qp_type="UD", via=one)
    with rdmaconnect.bind(count=2, tag="ring", expires_s=None, qp_type="UC", secret=b"s" * 16, sl=1) as end:
        many += end.connect_many(end.to_bytes(), deadline_s=None)
    met = rdmaconnect.meet("*:18516", peer, regions={"board": memoryview(bytearray(8))}, traffic_class=96)
    with rdmaconnect.Pool(peer, 4, qp_type="RC", timeout=16, deadline_s=None) as pool:
        pool.warm(deadline_s=5)
        pooled: Connection = pool.acquire(deadline_s=None)
        print(pool.idle, pool.spare, pool.closed)
    for conn in (*many, one, two, met, pooled):
        conn.reconnect(deadline_s=3)
        conn.close()
    try:
        rdmaconnect.connect(peer)
    except rdmaconnect.PeerRejected as e:
        print(e.stage, e.reason)
    except rdmaconnect.CompletionError as e:
        print(e.status == rdmaconnect.WcStatus.RETRY_EXC_ERR)


async def use_async(peer: str) -> None:
    async with await rdmaconnect.aconnect(peer, qp_type="RC", timeout=16) as conn:
        await conn.send(b"x")
        first: bytes = await conn.recv()
        await conn.write(first, "board")
        second: bytes = await conn.read("board")
        count: int = await conn.read_into(bytearray(5), "board")
        print(second, count)
    async with rdmaconnect.AsyncPool(peer, spare=2, secret="a secret of one job") as pool:
        async with await pool.acquire() as pooled:
            await pooled.send(b"x")
        transfer: rdmaconnect.AsyncTransfer = await conn.post_read(bytearray(5), "board")
        async with conn.batch() as batch, conn.recv_view() as view:
            await asyncio.gather(await batch.post_send(view), transfer, (await conn.post_write(b"x", "board")).wait())
    many = await rdmaconnect.aconnect_many(peer, 2)
    async with await rdmaconnect.alisten("*:0", share_ud=True) as listener:
        async for other in listener:
            await other.close()
    await asyncio.gather(*(conn.close() for conn in many), (await rdmaconnect.ameet("*:1", peer, sl=3)).close())
"""

#: what is wrong -> the line
WRONG = {
    "a name that there is not": 'rdmaconnect.conect("peer")',
    "a keyword that there is not": 'rdmaconnect.connect("peer", gid_idx=3)',
    "the name of a device as a number": 'rdmaconnect.connect("peer", device=0)',
    "a port number as text": 'rdmaconnect.connect("peer", port_num="1")',
    "a type that cannot be connected": 'rdmaconnect.connect("peer", qp_type="TCP")',
    "an option of the wrong side": 'rdmaconnect.connect("peer", share_ud=True)',
    "seconds as text": 'rdmaconnect.connect("peer", deadline_s="soon")',
    "an option that a pool has not": 'rdmaconnect.Pool("peer", 4, max_size=8)',
    "a connection that was not awaited": 'rdmaconnect.AsyncPool("peer").acquire().close()',
    "many from the call that makes one": 'rdmaconnect.connect("peer", count=3)',
    "one from the call that makes many": 'rdmaconnect.connect_many("peer", 3).send(b"x")',
    "regions without names": "rdmaconnect.listen(regions=[bytearray(8)])",
    "a region without memory": 'rdmaconnect.listen(regions={"board": 8})',
    "a folder of keys for one peer's": 'rdmaconnect.listen(key="own.key_secret", peer_key="known/")',
    "private data as text": 'rdmaconnect.listen(private_data="draw")',
    "one type for a list of types": 'rdmaconnect.listen(qp_types="RC")',
    "text as a message": 'conn.send("hello")',
    "seconds by position": "conn.recv(5)",
    "a message for text": "conn.recv().encode()",
    "a buffer that read returns no more": 'conn.read("board", into=bytearray(8))',
    "an attribute of the queue pair": "use(conn.qp_num)",
    "a path before there is a peer": "use(listener.path)",
    "an option of asyncio's twin": 'await rdmaconnect.ameet("*", "peer", mtu=4096)',
    "a transfer for its end": 'use(conn.post_send(b"x") + 1)',
    "a view without with": "use(conn.recv_view()[0])",
    "a transfer that was not awaited": 'use(aconn.post_send(b"x").done())',
    "an answer that was not awaited": 'use(aconn.recv().decode("ascii"))',
    "an iteration without async": "use([conn for conn in alistener])",
}
_HEAD = """
import rdmaconnect


def use(thing: object) -> None:
    print(thing)


async def wrong(
    conn: rdmaconnect.Connection,
    aconn: rdmaconnect.AsyncConnection,
    listener: rdmaconnect.Listener,
    alistener: rdmaconnect.AsyncListener,
) -> None:
"""


def mypy(folder: Path, name: str) -> set[int]:
    """The lines of a file of which mypy has an error."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install '.[test]'")
    argv = ["--strict", "--config-file", "", "--follow-imports", "silent", "--cache-dir", str(folder / "cache"), name]
    said = run([sys.executable, "-m", "mypy", *argv], folder)
    assert said.splitlines()[-1].startswith(("Success", "Found ")), said
    return {int(line) for line in re.findall(rf"^{re.escape(name)}:(\d+): error:", said, re.MULTILINE)}


def pyright(folder: Path, name: str) -> set[int]:
    """The lines of a file of which pyright has an error."""
    command = [shutil.which("pyright") or ""]
    if not command[0]:
        if importlib.util.find_spec("pyright") is None:
            pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
        command = [sys.executable, "-m", "pyright"]
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}))
    said = json.loads(run([*command, "--pythonpath", sys.executable, "--outputjson", name], folder))
    found = [one for one in said["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in found}


def run(argv: list[str], folder: Path) -> str:
    variables = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, env=variables).stdout


CHECKERS = pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
Checker = Callable[[Path, str], "set[int]"]


@CHECKERS
def test_each_mistake_is_seen(checker: Checker, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(_HEAD + "".join(f"    {line}\n" for line in WRONG.values()))
    first = len(_HEAD.splitlines()) + 1
    lines = checker(tmp_path, "wrong.py")
    missed = {what for at, what in enumerate(WRONG, first) if at not in lines}
    assert len(missed) <= len(WRONG) - 17, missed  # all of them by the versions of 2026, but CI takes the newest
    assert lines <= set(range(first, first + len(WRONG)))
    assert len(WRONG) >= 20
    print(f"{checker.__name__}: {len(WRONG) - len(missed)} of {len(WRONG)} mistakes seen")


@CHECKERS
def test_nothing_is_said_of_a_program_that_is_right(checker: Checker, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    assert checker(tmp_path, "right.py") == set()
