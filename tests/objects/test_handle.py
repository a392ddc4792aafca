"""Ownership: children before parents, twice is fine, use after close fails, the forgotten too."""

from __future__ import annotations

import errno
import gc
import threading
import time
import warnings
from itertools import permutations
from typing import Any

import pytest
from forgetting import collect_together, forget
from forking import in_a_fork
from threads import running

from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.objects import owned as handle
from rdmaconnect.objects.locks import exclusive
from rdmaconnect.objects.owned import Owned


class Thing(Owned):
    """Notes what is freed, in which order."""

    freed: list[Any]
    #: an errno
    refuses = 0

    def __init__(self, pointer: Any, name: str, parents: tuple[Owned, ...] = ()) -> None:
        super().__init__(lambda: pointer, name, parents)

    def _release(self, pointer: Any) -> None:
        if self.refuses:
            raise VerbsError("ibv_destroy_thing", self.refuses, f"free {pointer}")
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
    child.refuses = errno.EBUSY
    with pytest.raises(VerbsError, match="EBUSY"):
        parent.close()
    assert not child.closed
    assert not parent.closed
    child.refuses = 0
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


def test_what_is_forgotten_warns_and_is_freed(freed: list[Any]) -> None:
    with pytest.warns(ResourceWarning, match="^MR of 64 bytes was never closed$"):
        Thing("x", "MR of 64 bytes")
    assert freed == ["x"]


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


def test_a_forked_process_may_not_use_it_and_frees_nothing(freed: list[Any]) -> None:
    thing = Thing("x", "QP 0x11 of rxe0")

    def close_it() -> str:
        thing.close()
        return f"{thing.closed} {thing.freed}"

    assert in_a_fork(lambda: thing.pointer).startswith("StateError: QP 0x11 of rxe0 belongs to ")
    assert in_a_fork(close_it) == "True []"
    assert in_a_fork(lambda: Thing("child", "c", (thing,))).startswith("StateError: QP 0x11 of rxe0 belongs to ")
    assert thing.pointer == "x"
    thing.close()
    assert freed == ["x"]


def test_a_forked_process_waits_for_no_thread_that_it_does_not_have(freed: list[Any]) -> None:
    thing = Thing("x", "x")
    inside, over = threading.Event(), threading.Event()

    def use() -> None:
        with thing.lock, thing._ending:
            inside.set()
            over.wait(30)

    with running(use):
        inside.wait(30)
        assert in_a_fork(lambda: thing.close() or exclusive(lambda one: one.closed)(thing)) == "True"
        over.set()
    thing.close()


def test_in_a_forked_process_the_forgotten_is_silent_and_stays_the_parent_s(freed: list[Any]) -> None:
    things = [Thing("x", "x")]

    def forget() -> str:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            things.clear()
            gc.collect()
        return f"{len(seen)} {Thing.freed}"

    assert in_a_fork(forget) == "0 []"
    things[0].close()


def test_each_kind_must_say_how_it_is_freed() -> None:
    thing = Owned(lambda: "x", "x")
    with pytest.raises(NotImplementedError):
        thing.close()
    assert handle._kept.popitem()[1] is thing


def test_an_object_whose_constructor_failed_can_be_shown_and_closed() -> None:
    class Failing(Owned):
        def __init__(self) -> None:
            raise ValueError

    half = Failing.__new__(Failing)
    assert repr(half) == "<Failing (not made) closed>"
    half.close()
    with pytest.raises(StateError, match=r"\(not made\) is closed"):
        half.pointer  # noqa: B018


# ---- threads


class Slow(Thing):
    """As the library does, it lets the interpreter's lock go while it frees."""

    def _release(self, pointer: Any) -> None:
        time.sleep(0.002)
        super()._release(pointer)


def test_two_threads_free_an_object_once(freed: list[Any]) -> None:
    for number in range(20):
        thing = Slow(number, "x")
        with running(thing.close, thing.close, thing.close):
            thing.close()
            assert thing.closed, "it waits until that is so"
    assert freed == list(range(20))


def test_parent_and_children_at_once_are_freed_once_and_in_order(freed: list[Any]) -> None:
    for _ in range(20):
        freed.clear()
        context = Slow("context", "c")
        pd, cq = Slow("pd", "p", (context,)), Slow("cq", "q", (context,))
        qp, mr = Slow("qp", "qp", (pd, cq)), Slow("mr", "mr", (pd,))
        with running(*(thing.close for thing in (context, pd, cq, qp, mr))):
            pass
        assert sorted(freed) == ["context", "cq", "mr", "pd", "qp"]
        assert freed[-1] == "context"
        assert freed.index("qp") < min(freed.index("pd"), freed.index("cq"))
        assert freed.index("mr") < freed.index("pd")


def test_a_call_in_progress_ends_before_the_object_is_freed(freed: list[Any]) -> None:
    thing = Thing("x", "x")
    inside = threading.Event()

    def use() -> None:
        with thing.lock:
            inside.set()
            time.sleep(0.05)
            freed.append("used")
            assert thing.pointer == "x"

    with running(use):
        inside.wait(30)
        thing.close()
    assert freed == ["used", "x"]


def test_a_parent_is_not_freed_under_a_constructor(freed: list[Any]) -> None:
    parent = Thing("parent", "p")
    inside, go = threading.Event(), threading.Event()

    class Child(Thing):
        def __init__(self) -> None:
            Owned.__init__(self, self.make, "c", (parent,))

        def make(self) -> str:
            inside.set()
            go.wait(30)
            assert parent.pointer == "parent"
            return "child"

    with running(Child, lambda: (inside.wait(30), parent.close())):
        inside.wait(30)
        time.sleep(0.05)
        assert freed == []
        with pytest.raises(StateError, match=r"make late: p is being closed\."):
            Thing("late", "late", (parent,))
        go.set()
    assert freed == ["child", "parent"]
    with pytest.raises(StateError, match=r"^p is closed\.$"):
        Thing("later", "later", (parent,))
    assert parent._children == {}


def test_a_constructor_that_fails_leaves_no_child(freed: list[Any]) -> None:
    parent = Thing("parent", "p")

    def fail() -> None:
        raise VerbsError("ibv_create_thing", errno.ENOMEM)

    with pytest.raises(VerbsError):
        Owned(fail, "c", (parent,))
    assert parent._children == {}
    parent.close()


# ---- what the library refuses


def test_all_that_can_be_freed_is_and_one_error_names_the_rest(freed: list[Any]) -> None:
    context = Thing("context", "rxe0")
    pd, cq = Thing("pd", "PD of rxe0", (context,)), Thing("cq", "CQ of rxe0", (context,))
    regions = [Thing(f"mr{i}", f"MR {i}", (pd,)) for i in range(4)]
    regions[1].refuses, regions[3].refuses = errno.EBUSY, errno.EINVAL
    with pytest.raises(VerbsError) as caught:
        context.close()
    assert caught.value.errno == errno.EINVAL
    assert str(caught.value) == (
        "close rxe0: ibv_destroy_thing: EINVAL (22), Invalid argument. 2 objects stay open: "
        "close MR 3: ibv_destroy_thing: EINVAL (22), Invalid argument. "
        "close MR 1: ibv_destroy_thing: EBUSY (16), Device or resource busy."
    )
    assert freed == ["cq", "mr2", "mr0"]
    assert [thing.closed for thing in (context, pd, cq, *regions)] == [False, False, True, True, False, True, False]
    with pytest.raises(VerbsError, match="2 objects stay open"):
        context.close()
    more = Thing("more", "more", (pd,))
    assert (more.pointer, pd.pointer) == ("more", "pd"), "what is open can be used"
    for region in regions:
        region.refuses = 0
    context.close()
    context.close()
    assert freed[3:] == ["more", "mr3", "mr1", "pd", "context"]


def test_one_refusal_is_an_error_of_that_object(freed: list[Any]) -> None:
    parent = Thing("parent", "PD of rxe0")
    child = Thing("child", "MR of 5 bytes", (parent,))
    child.refuses = errno.EBUSY
    with pytest.raises(
        VerbsError, match=r"^close MR of 5 bytes: ibv_destroy_thing: EBUSY \(16\), Device or resource bus"
    ):
        parent.close()
    child.refuses = 0
    parent.close()


class Asked(Thing):
    """A device that can be asked whether it is there."""

    there = True

    def _answers(self) -> bool:
        return self.there


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_of_a_device_that_is_gone_everything_is_free(freed: list[Any], number: int) -> None:
    device = Asked("device", "rxe0")
    pd = Thing("pd", "PD", (device,))
    region, given_back = Thing("mr", "MR", (pd,)), list[str]()
    region._freed = given_back.append  # type: ignore[method-assign]
    region.refuses, pd.refuses = number, errno.EBUSY  # the library counts what it has not freed
    with pytest.raises(VerbsError, match="close MR"):
        device.close()
    assert not region.closed, "EIO may mean something else where the device answers"
    device.there = False
    device.close()
    assert all(thing.closed for thing in (device, pd, region))
    assert (given_back, freed) == (["mr"], ["device"])


def test_an_interrupted_release_is_not_tried_again(freed: list[Any]) -> None:
    class Interrupted(Thing):
        def _release(self, pointer: Any) -> None:
            raise KeyboardInterrupt

    thing = Interrupted("x", "x")
    with pytest.raises(KeyboardInterrupt):
        thing.close()
    thing.close()
    assert handle._kept.popitem()[1] is thing, "nobody knows whether it is free: what belongs to it stays"


# ---- what is forgotten


def family() -> tuple[Thing, Thing, Thing]:
    a = Thing("a", "a")
    b = Thing("b", "b", (a,))
    return a, b, Thing("c", "c", (a, b))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_what_is_collected_together_is_freed_children_first(freed: list[Any], order: tuple[int, ...]) -> None:
    with pytest.warns(ResourceWarning) as warned:
        collect_together([*map(family().__getitem__, order)])
    assert freed == ["c", "b", "a"]
    assert sorted(str(w.message) for w in warned) == [f"{name} was never closed" for name in "abc"]


def test_closing_while_a_child_is_being_collected_ends_with_that(freed: list[Any]) -> None:
    parent = Thing("parent", "p")

    class Closer:
        def __init__(self) -> None:
            self.child, self.me = Thing("child", "c", (parent,)), self

        def __del__(self) -> None:
            parent.close()

    with pytest.warns(ResourceWarning, match="c was never closed"):
        collect_together([Closer()])
    assert freed == ["child", "parent"]
    assert parent.closed


def test_what_must_wait_is_kept_by_its_parents(freed: list[Any]) -> None:
    class InFlight(Thing):
        def _must_wait(self) -> bool:
            return not any(parent.due for parent in self._parents)

    parent = Thing("parent", "p")
    with pytest.warns(ResourceWarning, match="c was never closed"):
        forget([InFlight("child", "c", (parent,))])
    assert freed == []
    parent.close()
    assert freed == ["child", "parent"]
    with pytest.warns(ResourceWarning, match="c was never closed"):
        InFlight("child", "c", (Thing("parent", "p"),))
    with pytest.warns(ResourceWarning, match="p was never closed"):
        gc.collect()
    assert freed[2:] == ["child", "parent"]


@pytest.mark.parametrize("how", ["must wait", "busy", "refused"])
def test_what_is_closed_by_a_thread_while_it_is_being_forgotten_leaves_its_parents(freed: list[Any], how: str) -> None:
    """Else these would wait for it, and never be freed."""

    class Closed(Thing):
        def _closed_elsewhere(self) -> None:
            if not freed:
                with running(lambda: Thing.close(self)):
                    pass

        def _must_wait(self) -> bool:
            self._closed_elsewhere()
            return how == "must wait"

        def _close(self, refused: Any, wait: bool = True) -> None:
            super()._close(refused, wait)
            if not wait:
                refused += {"busy": [StateError("busy")], "refused": [VerbsError("x", errno.EBUSY)]}[how]

    parent = Thing("parent", "p")
    with pytest.warns(ResourceWarning, match="c was never closed|kept for good"):
        forget([Closed("child", "c", (parent,))])
    assert freed == ["child"]
    assert parent._children == {}
    parent.close()
    assert freed == ["child", "parent"]
    handle._later.clear()


def test_what_is_kept_for_good_is_still_closed_with_its_parents(freed: list[Any]) -> None:
    parent = Thing("parent", "p")
    things = [Thing("child", "c", (parent,))]
    things[0].refuses = errno.EBUSY
    with pytest.warns(ResourceWarning, match="c was never closed|kept for good: close c: ibv_destroy_thing: EBUSY"):
        collect_together(things)  # type: ignore[arg-type]
    with pytest.raises(VerbsError, match=r"close c: .*EBUSY"):
        parent.close()
    (child,) = handle._kept.values()
    child.refuses = 0  # type: ignore[attr-defined]
    parent.close()
    assert freed == ["child", "parent"]
    assert handle._kept == {}
