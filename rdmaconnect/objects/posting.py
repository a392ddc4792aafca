"""How work gets into the queues of a queue pair."""

from __future__ import annotations

from ctypes import byref
from functools import partial
from typing import Any

from .. import verbs
from ..abi import QpState
from ..errors import PostError, StateError
from .context import Context
from .locks import holding
from .memory_window import MW
from .operations import check_fits, check_open, too_long_inline
from .owned import Owned
from .srq import SRQ
from .work_request import RecvList, RecvRequest, SendList, SendRequest, post, post_error

__all__ = ["Posting"]

#: looking up an enum's member costs as much as posting
_RESET, _INIT, _RTS = QpState.RESET, QpState.INIT, QpState.RTS


class Posting(Owned):
    """The posting side of :class:`~rdmaconnect.objects.queuepair.QueuePair`.

    A request is looked at under the lock when it is first posted, and each time if it names other objects. One that
    is plain is marked then, and goes to the provider at once the next time, without the lock: the verb is shut where
    that may not be.
    """

    context: Context
    state: QpState
    srq: SRQ | None
    target: Any
    max_inline_data: int
    #: what the plain requests are marked with that it can carry
    _mark: object
    #: what posts those, once there was one; and the state from which on each of ``_shuttable`` may be used
    _send: Any = None
    _recv: Any = None
    _since: tuple[QpState, ...] = ()

    def post_send(self, request: SendRequest | SendList, *more: SendRequest) -> None:
        """Post a send work request, or several as one list; a :class:`SendList` comes alone.

        It costs least to post one again that ``fill`` or ``fill_inline`` has filled.

        Raises:
            PostError: ENOMEM when the queue is full, among others; those before the first bad one were posted.
            StateError: the queue pair cannot send in its state, or an object that a request names is closed.
            ValueError: a request does not fit this queue pair, or comes twice.

        Source: ibv_post_send(3).
        """
        if request.mark is not self._mark or more:
            with self.lock:
                self._check_sends()
                if isinstance(request, SendList) and self.target is None:
                    self._post_once("ibv_post_send", request)
                    return
                if more or request.work is not None or self.target is not None:
                    self._post_checked((request, *more))
                    return
                if request.inline > self.max_inline_data:
                    raise too_long_inline(request.inline, self)
                request.keep_for(self._mark, self._send or self._unlocked("ibv_post_send"))
        if number := request.post():
            with self.lock:
                self._check_sends()
                self._failed("ibv_post_send", number, request)

    def post_recv(self, request: RecvRequest | RecvList, *more: RecvRequest) -> None:
        """Post a receive work request, or several as one list; a :class:`RecvList` comes alone.

        Raises:
            PostError: ENOMEM when the queue is full, EINVAL for too many pieces; those before it were posted.
            StateError: the queue pair is in RESET, or receives from a shared queue; or a region is closed.
            ValueError: a request comes twice, or a region of another protection domain.

        Source: ibv_post_recv(3).
        """
        if request.mark is not self._mark or more:
            with self.lock:
                self._check_receives()
                if more or request.regions:
                    requests: tuple[Any, ...] = (request, *more)
                    for region in {region for one in requests for region in one.regions}:
                        check_open(region, self)
                    self._post_list("ibv_post_recv", requests)
                    return
                if isinstance(request, RecvList):
                    self._post_once("ibv_post_recv", request)
                    return
                request.keep_for(self._mark, self._recv or self._unlocked("ibv_post_recv"))
        if number := request.post():
            with self.lock:
                self._check_receives()
                self._failed("ibv_post_recv", number, request)

    def _check_sends(self) -> None:
        self.pointer  # noqa: B018
        if self.state < _RTS:
            raise StateError(f"post to {self.name}: it is in {self.state} and sends from RTS on.")

    def _check_receives(self) -> None:
        self.pointer  # noqa: B018
        if self.state == _RESET or self.srq is not None:
            why = "it is in RESET" if self.srq is None else f"it receives from {self.srq.name}"
            raise StateError(f"post a receive to {self.name}: {why}.")

    def _failed(self, verb: str, number: int, request: Any) -> None:
        """A single request could not be posted. The lock is held."""
        if number == verbs.SHUT:  # it was being moved: now it is not
            number = request.post()
        if number:
            raise post_error(number, (request,), request.bad, verb, self._doing)

    def _post_checked(self, requests: tuple[SendRequest | SendList, ...]) -> None:
        works = [request.work for request in requests]
        bound: list[tuple[int, MW, int, Any]] = []
        with holding(thing for work in works if work is not None for thing in work.holds()):
            for request, work in zip(requests, works, strict=True):
                check_fits(work, self, request.inline)
            try:
                for index, work in enumerate(works):
                    if work is not None and work.bind is not None:
                        (mw, mr), (_, rkey, info) = work.bind, work.args
                        bound.append((index, mw, rkey, mw.note_bound(mr, info, rkey)))
                self._post_list("ibv_post_send", requests)
            except BaseException as e:
                posted = (e.posted if isinstance(e, PostError) else 0) or 0
                for index, mw, _, before in reversed(bound):
                    if index >= posted:
                        mw.note_unbound(before)
                bound = [one for one in bound if one[0] < posted]
                raise
            finally:
                for _, mw, rkey, _ in bound:
                    mw.rkey = rkey

    def _post_once(self, verb: str, request: SendList | RecvList) -> None:
        """Post a list that is one for many queue pairs, each of which posts it but once. The lock is held."""
        if number := self.context.op(verb)(self._pointer, request.wr, byref(request.bad)):
            raise post_error(number, (request,), request.bad, verb, self._doing)

    def _post_list(self, verb: str, requests: tuple[Any, ...]) -> None:
        post(self.context.op(verb), self.pointer, requests, verb, self._doing)

    @property
    def _doing(self) -> str:
        return f"to {self.name} in {self.state}"

    # ---- without the lock

    def _unlocked(self, name: str) -> Any:
        """A verb to post to it without the lock, which is held. First used where it may be."""
        verb = verbs.shuttable(self.context.op(name))
        self._shuttable = (*self._shuttable, verb)
        post = partial(verb, byref(self.pointer.contents))
        if name == "ibv_post_send":
            self._send = post
            self._since = (*self._since, _RTS)
        else:
            self._recv = post
            self._since = (*self._since, _INIT)
        return post

    def _reopen(self) -> None:
        for verb, since in zip(self._shuttable, self._since, strict=True):
            if self.state >= since:
                verb.reopen()
