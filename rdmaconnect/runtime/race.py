"""Several procedures at once, until one of them has come to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..errors import RdmaConnectError, StateError
from .deadline import Deadline
from .errand import Call, Errand
from .procedure import Procedure, Wait

__all__ = ["race"]

T = TypeVar("T")


def race(
    procedures: Sequence[Procedure[T]], lost: Callable[[int, BaseException], bool], undo: Callable[[T], object]
) -> Procedure[tuple[int, T]]:
    """Run several at once; the first that returns wins, and the others are ended by a ``StateError``.

    Args:
        procedures: one at least. A wait of theirs may end before its time; their calls are made by workers.
        lost: told of each that raises, by its place; whether the others are to go on without it.
        undo: takes back a result that comes too late.

    Returns:
        The place of the winner, and what it returned.

    Raises:
        What one raised, where the others were not to go on; or the first of them, where all did.
    """
    racers = {place: _Racer(procedure) for place, procedure in enumerate(procedures)}
    try:
        place, value = yield from _run(racers, lost)
    except BaseException as e:
        yield from _stop(racers, e, undo)
        raise
    try:
        yield from _stop(racers, StateError("another one was quicker."), undo)
    except BaseException:
        undo(value)
        raise
    return place, value


def _run(racers: dict[int, _Racer[T]], lost: Callable[[int, BaseException], bool]) -> Procedure[tuple[int, T]]:
    errors: dict[int, BaseException] = {}
    while racers:
        before = len(racers)
        for place, racer in list(racers.items()):
            try:
                racer.go_on()
            except StopIteration as end:
                del racers[place]
                return place, end.value
            except Exception as error:
                del racers[place]
                errors[place] = error
                if not lost(place, error):
                    raise
        if racers and len(racers) == before:
            yield _sooner([racer.awaits() for racer in racers.values()])
    raise errors[min(errors)]


def _sooner(waits: list[Wait]) -> Wait:
    """Until the first of several."""
    slices = [wait.slice_ms for wait in waits if wait.slice_ms is not None]
    return Wait(
        min((wait.deadline for wait in waits), key=lambda deadline: deadline.left_s),
        tuple(fd for wait in waits for fd in wait.fds),
        tuple(change for wait in waits for change in wait.changes),
        tuple(fd for wait in waits for fd in wait.writable),
        min(slices, default=None),
    )


def _stop(racers: dict[int, _Racer[T]], error: BaseException, undo: Callable[[T], object]) -> Procedure[None]:
    """End all that are left, whatever comes meanwhile, which is raised then."""
    later: BaseException | None = None
    while racers:
        _, racer = racers.popitem()
        try:
            yield from racer.stop(error, undo)
        except BaseException as e:  # noqa: BLE001  the others are to be ended too
            later = later if e is error or isinstance(e, RdmaConnectError) else e
    if later is not None:
        raise later


class _Racer(Generic[T]):
    """One of them, and what it waits for."""

    def __init__(self, procedure: Procedure[T]) -> None:
        self._procedure = procedure
        self._wait: Wait | None = None
        self._call: tuple[Call, Errand] | None = None

    def go_on(self) -> None:
        """Go on, unless a call of its own is still under way.

        Raises:
            StopIteration: it has come to its end, with its result.
        """
        if self._call is None:
            self._take(self._procedure.send(None if self._wait is None else set()))
            return
        call, errand = self._call
        try:
            if not errand.done:
                if call.deadline is None or call.deadline.left_s > 0:
                    return
                errand.give_up()
                call.deadline.check(call.stage)
            answer = errand.result()
        except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
            self._take(self._procedure.throw(e))
        else:
            self._take(self._procedure.send(answer))

    def _take(self, request: Wait | Call) -> None:
        self._call = None
        while isinstance(request, Call):
            try:
                self._call = request, Errand(request)
                return
            except Exception as e:  # noqa: BLE001  there was no worker to be had: likewise
                request = self._procedure.throw(e)
        self._wait = request

    def awaits(self) -> Wait:
        """What it waits for now."""
        if self._call is not None:
            call, errand = self._call
            return Wait(call.deadline or Deadline(None), changes=((errand.changed, 0),))
        assert self._wait is not None
        return self._wait

    def stop(self, error: BaseException, undo: Callable[[T], object]) -> Procedure[None]:
        """Raise an error in it, once a call without a deadline is over that it is amid, and have it come to its end."""
        given = error
        try:
            while self._call is not None and self._call[0].deadline is None:
                try:
                    yield self.awaits()
                except BaseException as e:  # noqa: BLE001  the call still uses what would be freed
                    error = e
                self.go_on()
            if self._call is not None:
                self._call[1].give_up()
            request = self._procedure.throw(error)
            while True:
                try:
                    answer: Any = yield request
                except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
                    request = self._procedure.throw(e)
                else:
                    request = self._procedure.send(answer)
        except StopIteration as end:
            undo(end.value)
            if error is not given:
                raise error from None
