"""Many transfers on their way at once, all one way: the two sides of a measurement of throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..agreement.endpoint import RemoteRegion
from ..errors import RdmaConnectError
from ..session.connection import Connection
from ..session.posted import Transfer
from .contents import Buffer, check

__all__ = ["flow", "take"]


def flow(
    conns: Sequence[Connection],
    op: str,
    buffer: Buffer,
    region: RemoteRegion | None,
    iters: int,
    outstanding: int,
    deadline_s: float | None,
    share: Callable[[int], None],
) -> None:
    """So many transfers of one buffer, over connections in turn, until the last of them is done.

    Args:
        conns: the connections.
        op: send, write or read.
        buffer: what goes, or where it comes.
        region: the peer's memory; None for messages.
        iters: how many.
        outstanding: on their way at once, on each connection.
        deadline_s: seconds for each step.
        share: told of each that is done.
    """
    data, many, most = buffer.data, len(conns), outstanding * len(conns)
    posts: list[Callable[[], Transfer]] = []
    for conn in conns:
        if region is None:
            posts.append(lambda conn=conn: conn.post_send(data, deadline_s=deadline_s))  # type: ignore[misc]
        elif op == "read":
            posts.append(lambda conn=conn: conn.post_read(data, region, deadline_s=deadline_s))  # type: ignore[misc]
        else:
            posts.append(lambda conn=conn: conn.post_write(data, region, deadline_s=deadline_s))  # type: ignore[misc]
    on_the_way: deque[Transfer] = deque()
    for i in range(iters):
        if len(on_the_way) == most:
            on_the_way.popleft().wait(deadline_s=deadline_s)
            share(i)
        on_the_way.append(posts[i % many]())
    for transfer in on_the_way:
        transfer.wait(deadline_s=deadline_s)


def take(conns: Sequence[Connection], size: int, first: int, iters: int, deadline_s: float | None) -> None:
    """Receive so many messages, and check each.

    Raises:
        PayloadError: one has other contents; all have been received.
    """
    many, wrong = len(conns), None
    for i in range(iters):
        with conns[i % many].recv_view(deadline_s=deadline_s) as view:
            try:
                check(view, size, first, len(view))
            except RdmaConnectError as e:
                wrong = wrong or e
    if wrong is not None:
        raise wrong
