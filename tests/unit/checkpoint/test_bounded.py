"""Values are counted before they are made, and hostile ones take little memory."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.transport import protocol

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner),
    max_leaves=60,
)


def number(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(number, value))
    if isinstance(value, dict):
        return 1 + sum(number(k) + number(v) for k, v in value.items())
    return 1


def packb(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


@given(values)
def test_every_value_is_counted(value: Any) -> None:
    packed = packb(value)
    assert protocol.count(packed, limit=10_000) == number(value)
    assert protocol.unpack(packed, limit=10_000) == value


@pytest.mark.parametrize("size", [15, 16, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("kind", [list, dict, bytes, str])
def test_every_length_is_read(kind: type, size: int) -> None:
    made: dict[type, Any] = {
        list: [None] * size,
        dict: dict.fromkeys(range(size)),
        bytes: bytes(size),
        str: "x" * size,
    }
    packed = packb([made[kind], 1])
    expected = 3 + {list: size, dict: 2 * size}.get(kind, 0)
    assert protocol.count(packed, limit=expected) == expected
    with pytest.raises(ValueError, match="packs more than"):
        protocol.count(packb([[None] * 9, made[kind], 1]), limit=9)


HOSTILE = {
    "empty lists": b"\x81\x00\xdd\x00\x0f\xff\xf0" + b"\x90" * 0xFFFF0,
    "empty maps": b"\x81\x00\xdd\x00\x0f\xff\xf0" + b"\x80" * 0xFFFF0,
    "maps of one": b"\x81\x00\xdd\x00\x05\x55\x50" + b"\x81\xc0\xc0" * 0x55550,
    "two letters": b"\x81\x00\xdd\x00\x05\x55\x50" + b"\xa2ab" * 0x55550,
    "announced, not there": b"\xdd\x00\x0f\xff\xff" * 0x30000,
    "deep": b"\x91" * 0xFFFFF,
    "deep maps": b"\x81\x00" * 0x7FFFF,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_refused_takes_no_memory(name: str) -> None:
    data = HOSTILE[name]
    assert len(data) <= protocol.MAX_DATA_HEADER
    tracemalloc.start()
    try:
        with pytest.raises(protocol.WireError):
            protocol.decode_header(data, len(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_what_is_taken_is_bounded_by_the_header() -> None:
    """The worst that passes: as many of the costliest values as are allowed."""
    limit = 1 << 20
    allowed = protocol.max_items(limit)
    data = b"\x81\x00\xdd" + (allowed - 3).to_bytes(4, "big") + b"\x80" * (allowed - 3)
    tracemalloc.start()
    try:
        (found,) = protocol.decode_header(data, limit).values()
        assert len(found) == allowed - 3
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * limit


def test_the_sender_is_told_too() -> None:
    with pytest.raises(ValueError, match="packs more than"):
        protocol.encode_header(
            {"x": [None] * (protocol.max_items(protocol.MAX_HEADER))}, 0
        )
