"""Processes that end or fork with connections open: quietly, and at once."""

from __future__ import annotations

import json
import time

import pytest

from .campaign import Campaign, aside, scaled
from .children import Child

SECRET = {"secret": "a secret of thirty-two characters"}
PLAIN_AND_PROTECTED = pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "protected"])

# ---- the end of Python

OPEN = """
import asyncio
def pair():
    listener = rdmaconnect.listen("127.0.0.1:0", **options)
    box = []
    thread = threading.Thread(target=lambda: box.append(listener.accept()))
    thread.start()
    here = rdmaconnect.connect(listener.url, **options)
    thread.join()
    return listener, here, box[0]
async def apair():
    listener = await rdmaconnect.alisten("127.0.0.1:0", **options)
    there = asyncio.create_task(listener.accept())
    here = await rdmaconnect.aconnect(listener.url, **options)
    return listener, here, await there
def daemon(function, *args, **named):
    threading.Thread(target=function, args=args, kwargs=named, daemon=True).start()
    time.sleep(0.1)
"""
ENDS = {
    "open": "keep = pair(); say('end')",
    "a listener only": "keep = rdmaconnect.listen('127.0.0.1:0', **options); say('end')",
    "a daemon in recv": "keep = pair(); daemon(keep[1].recv, deadline_s=None); say('end')",
    "a daemon in accept": "keep = pair(); daemon(keep[0].accept, deadline_s=None); say('end')",
    "a daemon in connect": "daemon(rdmaconnect.connect, '127.0.0.1:1', deadline_s=None, **options); say('end')",
    "a daemon in connect to a silent host": """
import socket
silent = socket.create_server(("127.0.0.1", 0))
daemon(rdmaconnect.connect, "127.0.0.1:%d" % silent.getsockname()[1], deadline_s=None, **options)
say("end")
""",
    "a daemon in a slow RTR": """
keep = pair()
software.on("ibv_modify_qp", to=rdmaconnect.QpState.RTR if hasattr(rdmaconnect, "QpState") else 2, delay=30)
daemon(rdmaconnect.connect, keep[0].url, deadline_s=None, **options)
say("end")
""",
    "a deadline that is over": """
listener = rdmaconnect.listen("127.0.0.1:0", **options)
try: listener.accept(deadline_s=0.1)
except rdmaconnect.ConnectTimeout: say("end")
""",
    "asyncio": "keep = asyncio.run(apair()); say('end')",
    "a task that waits": """
async def main():
    keep = await apair()
    tasks = [asyncio.create_task(keep[1].recv(deadline_s=None)), asyncio.create_task(keep[0].accept(deadline_s=None))]
    await asyncio.sleep(0.1)
    return keep, tasks
keep = asyncio.run(main())
say("end")
""",
    "a loop that is closed": """
loop = asyncio.new_event_loop()
keep = loop.run_until_complete(apair())
loop.close()
async def other():
    for one in reversed(keep): await one.close()
asyncio.run(other())
say("end", software.left() or "")
""",
    "closed": "keep = pair(); [one.close() for one in keep]; say('end', software.left() or '')",
    "an unfinished frame": """
import socket
silent = socket.create_server(("127.0.0.1", 0))
try: rdmaconnect.connect("127.0.0.1:%d" % silent.getsockname()[1], deadline_s=0.2, **options)
except rdmaconnect.ConnectTimeout: say("end")
""",
}


@PLAIN_AND_PROTECTED
def test_python_ends_quietly_and_at_once(counted: Campaign, options: dict[str, str]) -> None:
    def see(how: str) -> tuple[str, int, str]:
        with Child(OPEN + ENDS[how], options=options) as child:
            first = child.line()
            began = time.monotonic()
            status, said = child.end()
            counted.took("the end", time.monotonic() - began, 1.7)
        counted.count("ends")
        return first, status, said

    for _ in range(scaled(1, 10)):
        for some in (list(ENDS)[i : i + 4] for i in range(0, len(ENDS), 4)):
            ending = {how: aside(see, how) for how in some}
            for how, one in ending.items():
                assert one.result() == ("end", 0, ""), how
    assert counted.counts["ends"] == len(ENDS) * scaled(1, 10)


# ---- fork

FORK = (
    OPEN
    + """
import gc, json, select, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # Python 3.12 and later: which is the point here
listener, here, there = pair()
def anew():
    made = pair()
    made[1].send(b"x")
    assert made[2].recv(deadline_s=5) == b"x"
    for one in made[::-1]: one.close()
def forget():
    global here, there, listener
    del here, there, listener
    gc.collect()
modes = {
    "accept": lambda: listener.accept(deadline_s=1),
    "accept for ever": lambda: listener.accept(deadline_s=None),
    "recv": lambda: here.recv(deadline_s=1),
    "send": lambda: there.send(b"x", deadline_s=1),
    "reconnect": lambda: there.reconnect(deadline_s=1),
    "reconnect there": lambda: here.reconnect(deadline_s=1),
    "lost": lambda: here.lost,
    "close here": lambda: here.close(),
    "close there": lambda: there.close(),
    "close the listener": lambda: listener.close(),
    "close all": lambda: (there.close(), here.close(), listener.close()),
    "forget": forget,
    "end": lambda: sys.exit(0),
    "anew": anew,
    "repr": lambda: repr((listener, here, there)),
}
for name, do in modes.items():
    start, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        began = time.monotonic()
        try:
            do()
            words = "ok"
        except SystemExit:
            words = "ok"
            os.write(end, json.dumps([0, words]).encode())
            raise
        except BaseException as e:
            words = f"{type(e).__name__}: {e}"
        os.write(end, json.dumps([time.monotonic() - began, words]).encode())
        os._exit(0)
    os.close(end)
    ready, _, _ = select.select([start], [], [], 8)
    said = json.loads(os.read(start, 10000)) if ready else [None, "hangs"]
    if not ready: os.kill(pid, 9)
    os.close(start)
    began = time.monotonic()
    _, status = os.waitpid(pid, 0)
    say(json.dumps([name, *said, status, time.monotonic() - began]))
    here.send(b"still")
    assert there.recv(deadline_s=2) == b"still"
time.sleep(1.2)
say(json.dumps([repr(here.lost), repr(there.lost)]))
accepted = []
thread = threading.Thread(target=lambda: accepted.append(listener.accept(deadline_s=5)))
thread.start()
rdmaconnect.connect(listener.url, deadline_s=5, **options).close()
thread.join()
for one in (*accepted, there, here, listener): one.close()
say(software.problems())
"""
)
REFUSED = {"accept", "accept for ever", "recv", "send", "reconnect", "reconnect there"}


@PLAIN_AND_PROTECTED
def test_a_child_refuses_what_it_inherited_and_leaves_its_parent_alone(
    counted: Campaign, options: dict[str, str]
) -> None:
    with Child(FORK, options=options) as child:
        said = child.end(90)
    lines = said[1].splitlines()
    assert said[0] == 0, said[1]
    for name, seconds, words, status, until_end in map(json.loads, lines[:-2]):
        kind = words.partition(":")[0]
        counted.count(f"{name}: {kind}")
        assert words != "hangs", name
        assert status == 0, (name, words)
        assert until_end < 2, (name, until_end)
        if name in REFUSED:
            assert kind == "StateError", (name, words)
            assert "process that forked" in words, (name, words)
            counted.took("refusal", seconds, 0)
        else:
            assert words == "ok", (name, words)
    assert len(lines) == 17
    assert json.loads(lines[-2]) == ["None", "None"]
    assert lines[-1] == "[]"
