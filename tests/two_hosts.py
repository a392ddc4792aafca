"""Two hosts in one process: the devices in software ``here`` and ``there``, on one network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from exchange_ends import channels, until
from software import Call, Device, Hook, Network, Port, Software
from software.gid import raw_gid

from rdmaconnect.abi import GidType, QpState


@contextmanager
def two_hosts(
    here: Sequence[str | tuple[str, GidType] | None],
    there: Sequence[str | tuple[str, GidType] | None],
    network: Network | None = None,
) -> Iterator[Software]:
    """Both devices, each with one port; at the end nothing of them may be left.

    Args:
        here, there: their GID tables, as ``Port`` takes them.
        network: as ``Software`` takes it.
    """
    devices = [Device(name, [Port(list(gids))]) for name, gids in (("here", here), ("there", there))]
    with Software(devices, network) as software:
        try:
            yield software
        finally:
            with suppress(AssertionError):  # what goes on in the background must not meet the next device
                until(lambda: channels() == 0 and not software.left(), 5)
        assert software.problems() == []


def refuse(software: Software, device: str, pair: tuple[str, str], number: int) -> Hook:
    """Let RTR fail on one of the devices, from one GID to another.

    Args:
        software: that has it.
        device: its name.
        pair: its own GID, and the other's.
        number: the errno.
    """

    def hits(call: Call) -> bool:
        ah, context = call["attr"].ah_attr, call["qp"].context
        if context.device.name != device:
            return False
        local = context.port(ah.port_num).slots()[ah.grh.sgid_index][0]
        return (local, call.dgid) == (raw_gid(pair[0]), raw_gid(pair[1]))

    return software.on("ibv_modify_qp", to=QpState.RTR, where=hits, fail=number)
