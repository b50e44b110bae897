"""Any changed byte is found, in its chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.state.digests import (
    DIGEST_BYTES,
    chunk_digests,
    copy_and_digest,
    digest_root,
    verify_digests,
)

data = st.binary(max_size=300)
chunk_sizes = st.integers(1, 64)


@given(data, chunk_sizes)
def test_one_digest_per_chunk(buffer: bytes, chunk_bytes: int) -> None:
    digests = chunk_digests(buffer, chunk_bytes)
    assert len(digests) == DIGEST_BYTES * max(1, -(-len(buffer) // chunk_bytes))
    assert verify_digests(buffer, digests, chunk_bytes) == ()


@given(data, chunk_sizes)
def test_copy_and_digest_does_both(buffer: bytes, chunk_bytes: int) -> None:
    target = bytearray(len(buffer))
    digests = copy_and_digest(buffer, target, chunk_bytes)
    assert target == buffer
    assert digests == chunk_digests(buffer, chunk_bytes)


@given(st.binary(min_size=1, max_size=300), chunk_sizes, st.data())
def test_a_flipped_bit_is_found_in_its_chunk(
    buffer: bytes, chunk_bytes: int, choose: st.DataObject
) -> None:
    digests = chunk_digests(buffer, chunk_bytes)
    at = choose.draw(st.integers(0, len(buffer) - 1))
    bad = bytearray(buffer)
    bad[at] ^= 1 << choose.draw(st.integers(0, 7))
    assert verify_digests(bad, digests, chunk_bytes) == (at // chunk_bytes,)


@given(data, st.binary(max_size=100), chunk_sizes)
def test_foreign_digests_never_pass(
    buffer: bytes, digests: bytes, chunk_bytes: int
) -> None:
    assert verify_digests(buffer, digests, chunk_bytes)


@given(st.binary(min_size=3, max_size=100), chunk_sizes)
def test_cut_buffers_never_pass(buffer: bytes, chunk_bytes: int) -> None:
    assert verify_digests(buffer[:-1], chunk_digests(buffer, chunk_bytes), chunk_bytes)


def test_arrays_of_any_shape() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert chunk_digests(array.data, 16) == chunk_digests(array.tobytes(), 16)
    empty = np.zeros((0, 3)).data
    assert chunk_digests(empty, 16) == chunk_digests(b"", 16)
    assert copy_and_digest(empty, bytearray(), 16) == chunk_digests(b"", 16)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=20)), st.randoms())
def test_root_ignores_order(entries: dict[str, bytes], random) -> None:
    shuffled = list(entries.items())
    random.shuffle(shuffled)
    assert digest_root(shuffled) == digest_root(entries.items())


@given(*[st.dictionaries(st.text("ab", max_size=3), st.binary(max_size=3))] * 2)
def test_root_tells_entries_apart(a: dict[str, bytes], b: dict[str, bytes]) -> None:
    assert (digest_root(a.items()) == digest_root(b.items())) == (a == b)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="chunk_bytes=0"):
        chunk_digests(b"a", 0)
    with pytest.raises(ValueError, match="destination has 1 bytes, but source has 2"):
        copy_and_digest(b"ab", bytearray(1), 4)
