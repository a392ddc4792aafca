"""Queue pairs that somebody else made: what they must offer to be connected, and how they are moved by the table."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from ..abi import QpAttrMask, QpState, QpType
from ..agreement import transitions
from ..errors import ModifyError, RdmaConnectError, StateError
from .context import Context
from .modify_error import modify_error
from .transition import Transition

__all__ = ["Foreign", "QueuePairLike"]

_STATE = QpAttrMask.STATE


@runtime_checkable
class QueuePairLike(Protocol):
    """What a queue pair must offer to be connected (``connect(qp=...)``), whoever made it, and by whatever library.

    It is asked and moved, and nothing else: it stays with who made it, who posts to it, polls its completion queues and
    destroys it. Our own :class:`~rdmaconnect.objects.queuepair.QueuePair` is one. What the two methods raise becomes a
    ``ModifyError`` where it has an ``errno`` or an ``error_code``, else a ``StateError``, with the words of it.
    """

    @property
    def qp_num(self) -> int:
        """Its number, 24 bits."""

    @property
    def qp_type(self) -> int:
        """Its type, an ``enum ibv_qp_type``: RC, UC or UD."""

    @property
    def device(self) -> str:
        """The name of the RDMA device that it is on, as ``rdmaconnect devices`` lists it."""

    def query(self, attr_mask: QpAttrMask) -> Any:
        """Its attributes now: ``ibv_query_qp``.

        Args:
            attr_mask: which are wanted, of ``STATE``, ``PORT`` and ``QKEY``.

        Returns:
            An object that has them by their C names: ``qp_state``, ``port_num``, ``qkey``.
        """

    def modify(self, attr: Mapping[str, Any], mask: QpAttrMask) -> Any:
        """Change attributes: ``ibv_modify_qp``. It may block for seconds, and is called in any thread.

        Args:
            attr: field of ``struct ibv_qp_attr`` -> an integer; ``ah_attr`` is an
                :class:`~rdmaconnect.agreement.path.AhAttr`, whose fields are those of ``struct ibv_ah_attr``, with
                those of ``grh`` beside them: ``dgid`` (16 bytes), ``sgid_index``, ``hop_limit``, ...
            mask: the bits of all of them.
        """


class Foreign:
    """A queue pair of somebody else's with the state machine of our own; it is never destroyed here.

    Args:
        like: the queue pair.
        context: the device that it is on, opened here.

    Attributes:
        like, context: as given.
        qp_num, qp_type: its own.
        state: the state that it was last moved to or found in here.

    Raises:
        StateError: it does not answer.
    """

    #: nothing is posted here
    max_inline_data = 0
    closed = False

    def __init__(self, like: QueuePairLike, context: Context) -> None:
        self.like, self.context = like, context
        self.qp_num, self.qp_type = int(like.qp_num), QpType(int(like.qp_type))
        self.name = f"{self.qp_type} QP {self.qp_num:#08x} of {context.name}"
        self.state = QpState(self.query(_STATE).qp_state)

    def found_in(self) -> QpState:
        """Ask for the state, which others may have changed, and note it in :attr:`state`."""
        with suppress(StateError):
            self.state = QpState(self.query(_STATE).qp_state)
        return self.state

    def query(self, attr_mask: QpAttrMask) -> Any:
        """Its attributes; see :class:`QueuePairLike`.

        Raises:
            StateError: it does not answer, with what its library says.
        """
        try:
            return self.like.query(attr_mask)
        except Exception as e:
            raise StateError(f"ask {self.name} for its {attr_mask.name}: {_words(e)}. Was it destroyed?") from e

    def move(self, to: QpState, path: object = None, optional: QpAttrMask = transitions.NONE) -> None:
        """Take the next step of the state machine, as ``QueuePair.move``."""
        self.take(Transition(self.qp_type, self.state, to, path, optional), path)

    def take(self, step: Transition, path: object, struct: object = None) -> None:
        """The same by a step that was made ready, as ``QueuePair.take``.

        Raises:
            StateError: it is a step of another type, or from another state; or it was destroyed.
            ModifyError: its library, or the device, refused.
        """
        if step.frm != self.state or step.qp_type != self.qp_type:
            raise StateError(f"move {self.name} {step.frm}->{step.to} as {step.qp_type}: it is in {self.state}.")
        attr = step.values(path)
        try:
            self.like.modify(attr, step.mask)
        except ModifyError:
            raise
        except Exception as e:
            raise self._refused(e, attr, step, path) from e
        self.state = step.to

    def _refused(self, error: Exception, attr: Mapping[str, Any], step: Transition, path: object) -> RdmaConnectError:
        number = getattr(error, "errno", None) or getattr(error, "error_code", None)
        if isinstance(number, int) and number:
            return modify_error(self, abs(number), step.mask, step.to, path, ah=attr.get("ah_attr"))
        return StateError(f"move {self.name} {step.frm}->{step.to}: {_words(error)}. Was it destroyed?")

    def close(self) -> None:
        """It is not ours."""


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
