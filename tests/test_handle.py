"""Ownership: children before parents, twice is fine, use after close fails, finalisers only warn."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import pytest

from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.handle import Owned


class Thing(Owned):
    """Notes what is freed, in which order."""

    freed: list[Any]
    refuses = False

    def _release(self, pointer: Any) -> None:
        if self.refuses:
            raise VerbsError("ibv_destroy_thing", 16, f"free {pointer}")
        self.freed.append(pointer)


@pytest.fixture(autouse=True)
def freed() -> list[Any]:
    Thing.freed = []
    return Thing.freed


def test_a_parent_closes_its_children_first_the_last_made_first(freed: list[Any]) -> None:
    context = Thing("context", "c")
    pd = Thing("pd", "pd", (context,))
    cq = Thing("cq", "cq", (context,))
    qp = Thing("qp", "qp", (pd, cq))
    mr = Thing("mr", "mr", (pd,))
    context.close()
    assert freed == ["qp", "cq", "mr", "pd", "context"]
    assert all(thing.closed for thing in (context, pd, cq, qp, mr))


def test_closing_twice_is_fine_in_any_order(freed: list[Any]) -> None:
    parent = Thing("parent", "p")
    child = Thing("child", "c", (parent,))
    child.close()
    child.close()
    parent.close()
    parent.close()
    child.close()
    assert freed == ["child", "parent"]


def test_with_closes(freed: list[Any]) -> None:
    with pytest.raises(KeyError), Thing("x", "x") as thing:
        raise KeyError
    assert thing.closed
    assert freed == ["x"]


def test_use_after_close_fails_with_the_name() -> None:
    thing = Thing("pointer", "QP 0x11 of rxe0")
    assert thing.pointer == "pointer"
    assert repr(thing) == "<Thing QP 0x11 of rxe0>"
    thing.close()
    assert repr(thing) == "<Thing QP 0x11 of rxe0 closed>"
    with pytest.raises(StateError, match=r"^QP 0x11 of rxe0 is closed\.$"):
        _ = thing.pointer


def test_what_the_library_refuses_to_free_stays_open(freed: list[Any]) -> None:
    parent = Thing("parent", "p")
    child = Thing("child", "c", (parent,))
    child.refuses = True
    with pytest.raises(VerbsError, match="EBUSY"):
        parent.close()
    assert not child.closed
    assert not parent.closed
    child.refuses = False
    parent.close()
    assert freed == ["child", "parent"]


def test_a_child_keeps_its_parents_alive_and_not_the_other_way_round(freed: list[Any]) -> None:
    child = Thing("child", "c", (Thing("parent", "p"),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    child._parents[0].close()
    assert freed == ["child", "parent"]


def test_a_child_can_get_one_more_parent_or_another_one(freed: list[Any]) -> None:
    one, two, three = (Thing(name, name) for name in ("one", "two", "three"))
    child = Thing("child", "c", (one,))
    child._adopt_by(two)
    child._adopt_by(two)
    assert child._parents == (one, two)
    child._adopt_by(three, instead_of=two)
    assert child._parents == (one, three)
    two.close()
    assert not child.closed
    three.close()
    assert freed == ["two", "child", "three"]
    assert one._children == {}
    one.close()


def test_a_finaliser_warns_and_frees_nothing(freed: list[Any]) -> None:
    with pytest.warns(ResourceWarning, match="^MR of 64 bytes was never closed$"):
        Thing("x", "MR of 64 bytes")
    assert freed == []


def test_no_warning_for_what_was_closed_or_never_made() -> None:
    class Unmade(Thing):
        def __init__(self) -> None:
            raise VerbsError("ibv_create_thing", 12)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(VerbsError):
            Unmade()
        thing = Thing("x", "x")
        thing.close()
        del thing
        gc.collect()


def test_a_parent_forgets_a_child_that_was_closed(freed: list[Any]) -> None:
    parent = Thing("parent", "p")
    for i in range(100):
        Thing(i, "c", (parent,)).close()
    assert parent._children == {}
    parent.close()
    assert len(freed) == 101


def in_a_fork(work: Any) -> str:
    """What ``work`` returns in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(work()).encode())
        except BaseException as e:  # noqa: BLE001
            os.write(writer, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_process_may_not_use_it_and_frees_nothing(freed: list[Any]) -> None:
    thing = Thing("x", "QP 0x11 of rxe0")

    def close_it() -> str:
        thing.close()
        return f"{thing.closed} {thing.freed}"

    assert in_a_fork(lambda: thing.pointer).startswith("StateError: QP 0x11 of rxe0 belongs to ")
    assert in_a_fork(close_it) == "True []"
    assert thing.pointer == "x"
    thing.close()
    assert freed == ["x"]


def test_each_kind_must_say_how_it_is_freed() -> None:
    thing = Owned("x", "x")
    with pytest.raises(NotImplementedError):
        thing.close()
    thing._pointer = None


def test_an_object_whose_constructor_failed_can_be_shown_and_closed() -> None:
    class Failing(Owned):
        def __init__(self) -> None:
            raise ValueError

    half = Failing.__new__(Failing)
    assert repr(half) == "<Failing (not made) closed>"
    half.close()
    with pytest.raises(StateError, match=r"\(not made\) is closed"):
        half.pointer  # noqa: B018
