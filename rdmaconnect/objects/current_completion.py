"""The current completion of an extended queue, field by field."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import verbs
from ..abi import CqWcFlags, WcFlags, WcOpcode, WcStatus
from ..errors import StateError
from .locks import this
from .owned import Owned

__all__ = ["STANDARD_WC_FLAGS", "CurrentCompletion", "TmInfo"]

#: the fields of ``struct ibv_wc``, which every provider has: ``IBV_WC_STANDARD_FLAGS``
STANDARD_WC_FLAGS = (
    CqWcFlags.BYTE_LEN
    | CqWcFlags.IMM
    | CqWcFlags.QP_NUM
    | CqWcFlags.SRC_QP
    | CqWcFlags.SLID
    | CqWcFlags.SL
    | CqWcFlags.DLID_PATH_BITS
)


class TmInfo(NamedTuple):
    """The head of a tag-matched message: ``tag``, 64 bits, and ``priv``, 32 bits of the sender's."""

    tag: int
    priv: int


class CurrentCompletion(Owned):
    """What can be read of the current completion; for :class:`~rdmaconnect.objects.completion_ex.CQEx`.

    Attributes:
        fields: what the queue was made for.
    """

    fields: CqWcFlags
    #: the thread whose batch has a current completion, and the verbs that it has been found to be made for
    _reader: threading.Thread | None
    _asked: set[Any]
    _struct: Any

    def _within(self, doing: str) -> None:
        """Raise if the current batch is another thread's."""
        raise NotImplementedError

    def _read(self, verb: Callable[[Any], Any], flag: CqWcFlags | None = None) -> Any:
        """Call a verb that reads the current completion, if the queue was made for it."""
        with self.lock:
            if self._reader is not this.thread or verb not in self._asked:
                self._check_asked(verb, flag)
            return verb(self._struct)

    def _check_asked(self, verb: Callable[[Any], Any], flag: CqWcFlags | None) -> None:
        name = verb.__name__
        if flag is not None and not self.fields & flag:
            raise StateError(f"{name} on {self.name}: it was made without CqWcFlags.{flag}. Add it to wc_flags.")
        self._check_current(name)
        self._asked.add(verb)

    def _check_current(self, doing: str) -> None:
        self.pointer  # noqa: B018
        if self._reader is None:
            raise StateError(f"{doing} on {self.name}: no completion is current. It is within poll_batch().")
        self._within(doing)

    @property
    def wr_id(self) -> int:
        """The work request's id, 64 bits."""
        with self.lock:
            if self._reader is not this.thread:
                self._check_current("wr_id")
            number: int = self._struct.wr_id
            return number

    @property
    def status(self) -> WcStatus:
        """How it ended."""
        with self.lock:
            if self._reader is not this.thread:
                self._check_current("status")
            return WcStatus(self._struct.status)

    def read_opcode(self) -> WcOpcode:
        """What has completed."""
        return WcOpcode(self._read(verbs.ibv_wc_read_opcode))

    def read_vendor_err(self) -> int:
        """The vendor's own code for a failure, 32 bits."""
        return int(self._read(verbs.ibv_wc_read_vendor_err))

    def read_wc_flags(self) -> WcFlags:
        """Whether there is immediate data, an invalidated rkey, a GRH."""
        return WcFlags(self._read(verbs.ibv_wc_read_wc_flags))

    def read_byte_len(self) -> int:
        """Bytes that came in, on UD with the 40 of the GRH. Needs ``BYTE_LEN``."""
        return int(self._read(verbs.ibv_wc_read_byte_len, CqWcFlags.BYTE_LEN))

    def read_imm_data(self) -> int:
        """The immediate data, 32 bits, host order; valid with ``WcFlags.WITH_IMM``. Needs ``IMM``."""
        return int(self._read(verbs.ibv_wc_read_imm_data, CqWcFlags.IMM))

    def read_invalidated_rkey(self) -> int:
        """The rkey that the sender invalidated; valid with ``WcFlags.WITH_INV``. Needs ``IMM``."""
        return int(self._read(verbs.ibv_wc_read_invalidated_rkey, CqWcFlags.IMM))

    def read_qp_num(self) -> int:
        """The local queue pair, 24 bits. Needs ``QP_NUM``."""
        return int(self._read(verbs.ibv_wc_read_qp_num, CqWcFlags.QP_NUM))

    def read_src_qp(self) -> int:
        """The sender's queue pair, 24 bits; UD. Needs ``SRC_QP``."""
        return int(self._read(verbs.ibv_wc_read_src_qp, CqWcFlags.SRC_QP))

    def read_slid(self) -> int:
        """The sender's LID; UD on InfiniBand. Needs ``SLID``."""
        return int(self._read(verbs.ibv_wc_read_slid, CqWcFlags.SLID))

    def read_sl(self) -> int:
        """The service level, 0 to 15; UD. Needs ``SL``."""
        return int(self._read(verbs.ibv_wc_read_sl, CqWcFlags.SL))

    def read_dlid_path_bits(self) -> int:
        """The low bits of the LID it was sent to, 7 bits; UD unicast. Needs ``DLID_PATH_BITS``."""
        return int(self._read(verbs.ibv_wc_read_dlid_path_bits, CqWcFlags.DLID_PATH_BITS))

    def read_completion_ts(self) -> int:
        """When it completed, in ticks of ``hca_core_clock`` (kHz). Needs ``COMPLETION_TIMESTAMP``."""
        return int(self._read(verbs.ibv_wc_read_completion_ts, CqWcFlags.COMPLETION_TIMESTAMP))

    def read_completion_wallclock_ns(self) -> int:
        """When it completed, wall clock, ns. Needs ``COMPLETION_TIMESTAMP_WALLCLOCK``."""
        return int(self._read(verbs.ibv_wc_read_completion_wallclock_ns, CqWcFlags.COMPLETION_TIMESTAMP_WALLCLOCK))

    def read_cvlan(self) -> int:
        """The stripped VLAN tag, 16 bits; RAW_PACKET. Needs ``CVLAN``."""
        return int(self._read(verbs.ibv_wc_read_cvlan, CqWcFlags.CVLAN))

    def read_flow_tag(self) -> int:
        """The tag of the steering rule that the packet met, 24 bits; RAW_PACKET. Needs ``FLOW_TAG``."""
        return int(self._read(verbs.ibv_wc_read_flow_tag, CqWcFlags.FLOW_TAG))

    def read_tm_info(self) -> TmInfo:
        """The head of a tag-matched message. Needs ``TM_INFO``."""
        info = self._read(verbs.ibv_wc_read_tm_info, CqWcFlags.TM_INFO)
        return TmInfo(info.tag, info.priv)
