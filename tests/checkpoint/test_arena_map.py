"""Where slices lie: no two overlap, and all lie inside the arena."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.arena_map import HOSTED_VERSIONS, OWN_VERSIONS, ArenaMap
from dtft.checkpoint.placement import place
from tests.checkpoint.states import layout


def ranges(found: ArenaMap) -> list[tuple[int, int]]:
    own = [
        found.own_range(extent, piece)
        for extent in range(OWN_VERSIONS)
        for piece in found.own
    ]
    hosted = [
        found.hosted_range(extent, source)
        for extent in range(HOSTED_VERSIONS)
        for source in found.incoming
    ]
    return sorted(own + hosted)


@given(st.integers(0, 3), st.integers(1, 4))
@settings(deadline=None)
def test_versions_and_slices_lie_apart(slot: int, copies: int) -> None:
    whole = layout()
    found = ArenaMap.of(whole, slot, place(whole, copies, "abcd"))
    held = ranges(found)
    for (start, size), (after, _) in pairwise(held):
        assert start + size <= after
    assert held[0][0] == 0 and sum(held[-1]) <= found.size
    assert tuple(found.own) == whole.slices(slot)


def test_who_pushes_nothing_has_no_range() -> None:
    whole = layout()
    found = ArenaMap.of(whole, 0, place(whole, 1, "abcd"))
    assert not found.incoming and found.hosted_bytes == 0
    with pytest.raises(KeyError):
        found.hosted_range(0, 1)
