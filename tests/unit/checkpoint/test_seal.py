"""Seals: nothing but the very next frame of the very same connection is accepted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.protocol import FRAME_START_BYTES, Opener, Sealer

values = st.integers(-(2**63), 2**63) | st.binary()
headers = st.dictionaries(st.text(), values, max_size=3)


def frames(*headers: dict, key: bytes = b"k") -> list[bytes]:
    sealer, sent = Sealer(key), []
    for header in headers:
        sent.append(sealer.frame(header, 7))
        sealer.advance()
    return sent


def take(opener: Opener, frame: bytes | bytearray) -> dict:
    length, payload_bytes = opener.start(frame[:FRAME_START_BYTES])
    assert payload_bytes == 7
    assert length == len(frame) - FRAME_START_BYTES - protocol.SEAL_BYTES
    return opener.header(frame[FRAME_START_BYTES:])


@given(st.lists(headers, max_size=4))
@settings(deadline=None)
def test_frames_in_order_are_accepted(sent: list[dict]) -> None:
    opener = Opener(b"k")
    assert [take(opener, frame) for frame in frames(*sent)] == sent


@given(headers, st.data())
@settings(max_examples=300, deadline=None)
def test_no_flipped_bit_is_accepted(header: dict, choose: st.DataObject) -> None:
    frame = bytearray(frames(header)[0])
    bit = choose.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(protocol.WireError):
        take(Opener(b"k"), frame)


def test_every_single_bit_of_one_frame_is_covered() -> None:
    (frame,) = frames({"op": "push", "step": 7})
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(protocol.WireError):
            take(Opener(b"k"), flipped)


def test_skipped_repeated_and_foreign_frames_are_refused() -> None:
    first, second = frames({"n": 1}, {"n": 2})
    opener = Opener(b"k")
    with pytest.raises(protocol.WireError, match="frame 0 has a wrong seal"):
        take(opener, second)
    take(opener, first)
    with pytest.raises(protocol.WireError, match="not the next frame"):
        take(opener, first)
    with pytest.raises(protocol.WireError):
        take(opener, frames({"n": 1}, {"n": 2}, key=b"other direction")[1])
    take(opener, second)


def test_a_frame_that_was_not_sent_leaves_no_gap() -> None:
    sealer, opener = Sealer(b"k"), Opener(b"k")
    sealer.frame({"given": "up"}, 7)
    assert take(opener, sealer.frame({"sent": 1}, 7)) == {"sent": 1}
