"""What peers of this library say in the private data of rdma_cm: golden bytes, every length, and bytes of strangers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import RemoteProtocolError
from rdmaconnect.protocol.cm_message import ANSWER_MAX, REFUSAL_MAX, REQUEST_MAX, CmMessage, read_refusal, refusal

#: what peers out there speak: these bytes stay as they are
VECTORS = {
    "72646d6163010001000000" + "00": CmMessage(65536),
    "72646d61630100001388026869" + "01016d" + "00000000000010000000000000000064" + "00000007": CmMessage(
        5000, b"hi", {"m": RemoteRegion(0x1000, 7, 100)}
    ),
}
REGIONS = st.dictionaries(
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8),
    st.builds(RemoteRegion, *[st.integers(0, 2**bits - 1) for bits in (64, 32, 64)]),
    max_size=4,
)


@pytest.mark.parametrize("text", VECTORS)
def test_golden_bytes(text: str) -> None:
    assert VECTORS[text].to_bytes(ANSWER_MAX).hex() == text
    assert CmMessage.read(bytes.fromhex(text)) == VECTORS[text]


@given(st.integers(1, 2**31), st.binary(max_size=40), REGIONS, st.integers(0, 60))
def test_what_is_written_is_read_whatever_zeros_follow(
    recv_size: int, data: bytes, regions: dict[str, RemoteRegion], zeros: int
) -> None:
    message = CmMessage(recv_size, data, regions)
    raw = message.to_bytes(10**6)
    assert CmMessage.read(raw + bytes(zeros)) == message
    assert message.to_bytes(len(raw)) == raw
    with pytest.raises(ValueError, match=f"rdma_cm carries {len(raw) - 1} bytes this way"):
        message.to_bytes(len(raw) - 1)
    for end in range(6, len(raw)):
        with pytest.raises(RemoteProtocolError):
            CmMessage.read(raw[:end])


@given(st.binary(max_size=REQUEST_MAX))
def test_bytes_of_strangers(data: bytes) -> None:
    if not data.startswith(b"rdmac\x01"):
        assert CmMessage.read(data) is None
    assert read_refusal(data) == ("", False) or data.startswith(b"rdmac\x01")
    try:
        found = CmMessage.read(b"rdmac\x01" + data)
    except RemoteProtocolError:
        return
    assert found is not None
    assert 1 <= found.recv_size <= 2**31


def test_another_version_is_a_stranger() -> None:
    assert CmMessage.read(b"rdmac\x02" + bytes(50)) is None


def test_a_name_that_would_spoil_a_log_is_refused() -> None:
    raw = CmMessage(1, b"", {"x": RemoteRegion(1, 2, 3)}).to_bytes(ANSWER_MAX).replace(b"\x01x", b"\x01\n")
    with pytest.raises(RemoteProtocolError, match="printable"):
        CmMessage.read(raw)


@given(st.text(max_size=400))
def test_words_of_a_refusal_are_cut_to_what_there_is_room_for(words: str) -> None:
    words = words.encode(errors="replace").decode()
    for again in (False, True):
        raw = refusal(words, again=again)
        assert len(raw) <= REFUSAL_MAX
        said, may = read_refusal(raw + bytes(REFUSAL_MAX - len(raw)))
        assert words.startswith(said)
        assert (may, len(said) >= min(len(words), 35)) == (again, True)
