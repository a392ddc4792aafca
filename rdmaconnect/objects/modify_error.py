"""Why a queue pair was not moved: all that is known."""

from __future__ import annotations

import errno
from typing import Any

from ..abi import QpAttrMask, QpState
from ..agreement import transitions
from ..agreement.path import AhAttr
from ..errors import ModifyError, hint_for
from .address import route_words

__all__ = ["modify_error"]


def modify_error(
    qp: Any,
    number: int,
    mask: QpAttrMask,
    to: QpState,
    path: object,
    change: transitions.Change | None = None,
    ah: object = None,
) -> ModifyError:
    """The error for a refused ``ibv_modify_qp``.

    Args:
        qp: the ``QueuePair``.
        number: the errno.
        mask: the bits that were given.
        to: the state it was to enter.
        path: where the attributes came from, or None.
        change: where the table refused it, before the device was asked.
        ah: the address vector that was given, or None.
    """
    frm = qp.state if change is None else change.frm
    wrong = transitions.diagnose(qp.qp_type, frm, to, mask) if change is None else change.wrong
    hint = hint_for(f"ibv_modify_qp {to}", number, **route_words(qp.context, path, ah))
    if wrong:
        hint = f"The table says: {wrong}."
    elif mask & QpAttrMask.RATE_LIMIT and number in (errno.EINVAL, errno.EOPNOTSUPP):
        hint = hint_for("ibv_modify_qp RATE_LIMIT", number)
    elif mask & QpAttrMask.ALT_PATH and number == errno.EINVAL:
        hint = hint_for("ibv_modify_qp ALT_PATH", number)
    elif number == errno.EINVAL and isinstance(ah, AhAttr) and not ah.is_global:
        hint = hint_for("ibv_modify_qp AV", number)
    elif qp.found_in() != frm:
        hint = f"The device has it in {qp.state} by now."
    port = getattr(path, "port_num", None)
    where = f" port {port}" if port is not None else ""
    return ModifyError(
        number,
        f"move {qp.name}{where} {frm}->{to}",
        qp_num=qp.qp_num,
        frm=frm,
        to=to,
        mask=mask,
        missing=wrong.missing,
        not_allowed=wrong.not_allowed,
        path=path,
        hint=hint,
    )
