"""Words, rates and the state of fork safety, as the libibverbs of this machine tells them; they need no device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from rdmaconnect import verbs
from rdmaconnect.abi import EventType, ForkStatus, NodeType, PortState, Rate, WcStatus
from rdmaconnect.errors import LibraryError

try:
    ctypes.CDLL("libibverbs.so.1")
    LACKING = ""
except OSError as e:
    LACKING = str(e)
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"needs libibverbs: {LACKING}")


@pytest.fixture(autouse=True)
def real() -> Iterator[None]:
    verbs.use(None)
    yield
    verbs.use(None)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (verbs.ibv_wc_status_str, WcStatus),
        (verbs.ibv_port_state_str, PortState),
        (verbs.ibv_event_type_str, EventType),
        (verbs.ibv_node_type_str, NodeType),
    ],
)
def test_the_library_has_words_of_its_own_for_what_it_knows(function: object, kind: type[WcStatus]) -> None:
    words = {member.name: function(member) for member in kind}  # type: ignore[operator]
    assert len(set(words.values())) > len(words) // 2
    assert function(250) == "unknown"  # type: ignore[operator]


def test_a_few_words() -> None:
    assert verbs.ibv_wc_status_str(WcStatus.SUCCESS) == "success"
    assert "retry" in verbs.ibv_wc_status_str(WcStatus.RETRY_EXC_ERR)
    assert "active" in verbs.ibv_port_state_str(PortState.ACTIVE).lower()
    assert verbs.ibv_event_type_str(EventType.PORT_ACTIVE) == "port active"
    assert "iWARP" in verbs.ibv_node_type_str(NodeType.RNIC)


def test_rates_as_numbers_and_back() -> None:
    assert verbs.ibv_rate_to_mbps(Rate.RATE_5_GBPS) == 5000
    assert verbs.ibv_rate_to_mult(Rate.RATE_5_GBPS) == 2
    assert verbs.ibv_rate_to_mbps(99) == verbs.ibv_rate_to_mult(99) == -1
    for rate in Rate:
        for to, back in (
            (verbs.ibv_rate_to_mbps, verbs.mbps_to_ibv_rate),
            (verbs.ibv_rate_to_mult, verbs.mult_to_ibv_rate),
        ):
            if to(rate) > 0:
                assert back(to(rate)) is rate
    assert verbs.mbps_to_ibv_rate(5) is verbs.mult_to_ibv_rate(7) is Rate.RATE_MAX


def test_whether_a_fork_is_safe_is_told() -> None:
    try:
        assert verbs.ibv_is_fork_initialized() in list(ForkStatus)
    except LibraryError as e:  # before rdma-core 35
        assert "does not export it" in str(e)  # noqa: PT017
