"""From one life of a connection to the next: how it ends, and how it is connected anew, asked to or by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..agreement.endpoint import Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import CompletionError, ConnectTimeout, PeerClosed, RdmaConnectError, StateError
from ..exchange import service
from ..objects.address import AddressHandle, UdAddress
from ..protocol.health import Health
from ..runtime.deadline import Deadline
from ..runtime.procedure import Interrupt, Procedure, Wait
from ..runtime.unattended import run_unattended
from ..runtime.wakeup import weakly
from ..runtime.workers import Workers
from .conversation import Conversation
from .data_path import DataPath
from .life import UNBORN, Life

__all__ = ["Established", "Renewing", "all_stand"]

#: from an attempt that failed to the next: at first, doubled each time, and at most, s
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0


@dataclass(slots=True)
class Established:
    """What joins one queue pair to one peer."""

    peer: Endpoint
    path: Path
    conversation: Conversation
    remote: Mapping[str, RemoteRegion]
    private_data: bytes
    ah: AddressHandle | None
    token: bytes = field(default=b"", repr=False)


def all_stand(ends: Sequence[Renewing]) -> None:
    """The data path of ends that were made together is proven: from here on they are used."""
    for end in ends:
        end.stand()
    ends[0].engine.changed.notify()


class Renewing(DataPath):
    """One queue pair, and its connections to a peer, one after the other.

    Attributes:
        life: the present one, or the last.
        again: how it is connected anew; None where it cannot be.
        reconnect_s: seconds for which that is tried after each loss, without being asked; 0 for not at all.
        given_up: in words, why that has come to nothing; "" while it has not.
    """

    private_data: bytes
    token: bytes
    known_as: bytes
    # what few ends ever set is of the class until then: an object of at most 30 attributes shares their names
    reconnect_s, given_up = 0.0, ""
    _workers: Workers | None = None
    #: whether it is being connected anew, and whether by itself
    _renewing = _unattended = False
    life, generation = UNBORN, 0
    again: Callable[[Any, float | None], Procedure[None]] | None = None
    #: breaks into the last renewal that it began by itself
    _interrupt: Interrupt | None = None

    @property
    def remote(self) -> Mapping[str, RemoteRegion]:
        """The named regions of the peer of this life, or the last."""
        return self.life.remote

    def turned(self, health: Health) -> None:
        """This is what is known of the peer now; who watches is told."""
        raise NotImplementedError

    # ---- a life

    def join(self, established: Established) -> None:
        """Take the place of one end of a connection that both sides have agreed on.

        Raises:
            StateError, DeviceError: it was closed meanwhile, or its device is gone; what was for it is freed.
        """
        with self.engine.lock:
            try:
                self.check_open()
            except RdmaConnectError:
                if established.ah is not None:
                    established.ah.close()
                raise
            established.conversation.lend()
            # there before the conversation: see replaced, _joining
            self.token = self.known_as = established.token
            self.life = self.transceiver.life = Life(self.generation + 1, established.remote)
            self.conversation = established.conversation
            self.local, self.peer, self.path, self.ah = (
                self.transceiver.endpoint,
                established.peer,
                established.path,
                established.ah,
            )
            self.private_data = established.private_data
            if self.ah is not None:
                gid = self.path.remote_gid
                self._source = (self.peer.qp_num, gid.gid.raw if gid else b"")
                self.transceiver.open(self._source)
                self.to = UdAddress(self.ah, self.peer.qp_num, self.peer.qkey)
            self._begin()

    def stand(self) -> None:
        """Its data path is proven: from here on it is used. Who waits is told by :func:`all_stand`."""
        with self.engine.lock:
            if self._closed:
                return
            life = self.life
            self.generation, life.stands = life.generation, True
            if self.given_up:
                self.given_up = ""
            self._let_read()
            self.transceiver.go_on()
        if self.reconnect_s:
            self._attend()
        if self.generation > 1:
            service.soon(self.turned, self.conversation.health)

    def part(self, probe: bytes = b"") -> None:
        """End this life: give up what joined it to its old peer, and take the queue pair back to INIT. Blocks.

        Args:
            probe: the id of an exchange that came to nothing, whose probes may have come all the same.

        Raises:
            StateError: it was closed.
        """
        with self.engine.lock:
            self.check_open()
            why = self.loss() or "it is connected anew."
            self.life.end(why)
        self.conversation.close(why, lost=True)
        self.transceiver.stop()
        if self.ah is not None:
            self.ah.close()
        self._end()
        with self.engine.lock:
            self.check_open()
            self.transceiver.restart(probe=probe or self.conversation.id)
            self._inbox = self.transceiver.unread
        self.engine.changed.notify()

    # ---- anew, asked to

    def reconnect(self, deadline_s: float | None) -> Procedure[None]:
        """Connect it anew; where that is under way, wait for it."""
        self.check_open()
        if self.again is None:
            raise StateError(f"reconnect {self!r}: it shares its exchange, or goes by rdma_cm or bind(). Connect anew.")
        deadline = Deadline(deadline_s, ConnectTimeout)
        life = self.life
        while not self._claim():
            seen = self.engine.changed.count
            if not self._renewing:
                continue
            deadline.check("reconnect", "It is being connected anew by itself.")
            yield Wait(deadline, changes=((self.engine.changed, seen),))
            self.check_open()
        self.given_up = ""
        try:
            if life is self.life or not self.life.stands:
                yield from self.again(self, deadline.left_s)
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._renewing = self._unattended = False
        self.engine.changed.notify()
        self._notice()  # it may have been lost once more meanwhile

    def _claim(self) -> bool:
        """Be the one who connects it anew; False if somebody does already."""
        with self.engine.lock:
            claimed, self._renewing = not self._renewing, True
            return claimed

    # ---- anew, by itself

    def renew_for(self, seconds: float, workers: Workers) -> None:
        """Have it connected anew after each loss, without being asked.

        Args:
            seconds: how long that is tried.
            workers: who do it.
        """
        self.reconnect_s, self._workers = seconds, workers
        self._attend()

    def _attend(self) -> None:
        """See when it is lost, whether anybody waits for anything of it or not."""
        self.conversation.on_change = weakly(self._notice)
        self.transceiver.on_broken = weakly(self._notice)
        self._notice()

    @property
    def _joining(self) -> bool:
        """Whether it has joined a peer, and who connects it anew has yet to say that it stands.

        A peer that is quick has sent and closed by then: who waits is to have what it sent.
        """
        life = self.life
        return self._renewing and not life.stands and not life.ended

    @property
    def _is_lost(self) -> bool:
        return self.transceiver.broken is not None or self.conversation.left is not None

    def _notice(self) -> None:
        if self._is_lost:
            self.comes_back()

    def comes_back(self) -> bool:
        if not self.reconnect_s or self.given_up or self._closed:
            return False
        if self.engine.gone is not None:  # the queue pair, and all that is registered, went with its device
            return False
        if self.conversation.farewell and not self._joining:
            return False
        if not self._renewing and self._workers is not None:
            self._workers.start(self._renew)  # one step: Ctrl-C leaves nothing half begun
        return True

    def _renew(self) -> None:
        """Begin to connect it anew, unless that has begun. In a worker."""
        with self.engine.lock:
            if self._closed or not (self._is_lost or self.life.ended) or not self._claim():
                return
            self._unattended, self._interrupt = True, (interrupt := Interrupt())
            self.transceiver.hold()  # what is posted from here on waits for the next life
        try:
            assert self._workers is not None
            service.start(run_unattended(self._renewal(), self._workers, interrupt))
        except Exception as e:  # noqa: BLE001  whoever waits is to know
            self._stay_lost(self.loss(), str(e))

    def _renewal(self) -> Procedure[None]:
        """Connect it anew, until that succeeds or the time is over."""
        deadline, pause_s, lost = Deadline(self.reconnect_s, ConnectTimeout), _PAUSE_S, self.loss()
        try:
            assert self.again is not None
            while True:
                try:
                    yield from self.again(self, deadline.left_s)
                    break
                except RdmaConnectError as e:
                    if isinstance(e, StateError) or self.engine.gone is not None or deadline.left_s <= pause_s:
                        raise
                over = Deadline(pause_s)
                while over.left_s > 0:
                    yield Wait(over)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        except BaseException as e:
            self._stay_lost(lost, str(e) or type(e).__name__)
            raise
        self._end_turn()

    def _stay_lost(self, lost: str, why: str) -> None:
        """It stays lost."""
        with self.engine.lock:
            self.life.end(lost)
            self.given_up = f"{lost} Connecting anew, tried for {self.reconnect_s:g} s, has failed: {why}"
        if not self._closed:
            service.soon(self.turned, self.conversation.health)
        self._end_turn()

    def _over(self, doing: str, error: CompletionError | None) -> RdmaConnectError:
        return PeerClosed(f"{doing}: {self.given_up}") if self.given_up else super()._over(doing, error)
