"""Every element is owned, and what a layout says survives JSON."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.state.slices import (
    ALIGNMENT,
    Layout,
    Leaf,
    MeshLayout,
    Slice,
    offsets_of,
    slice_at,
)

SPECS = [(), (("fsdp",),), (("replica", "fsdp"),), ((), ("tensor",))]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = tuple(draw(st.integers(1, 3)) for _ in range(3))
    num_devices = math.prod(sizes)
    per_slot = draw(st.sampled_from([n for n in (1, 2, 3) if num_devices % n == 0]))
    mesh = MeshLayout(
        axis_names=("replica", "fsdp", "tensor"),
        axis_sizes=sizes,
        slots=tuple(i // per_slot for i in range(num_devices)),
    )
    leaves = tuple(
        Leaf(
            path=f"params/{i}",
            shape=(36 * draw(st.integers(1, 2)), 6),
            dtype=draw(st.sampled_from(["float32", "bfloat16", "uint8"])),
            spec=draw(st.sampled_from(SPECS)),
        )
        for i in range(draw(st.integers(1, 4)))
    )
    return Layout(mesh=mesh, leaves=leaves, config='{"seed": 1}')


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_exactly_one_distinct_slice(layout: Layout) -> None:
    for leaf in layout.leaves:
        pieces = [piece for piece in layout.owners if piece.path == leaf.path]
        seen = [
            (i, j)
            for piece in pieces
            for i in range(piece.start[0], piece.stop[0])
            for j in range(piece.start[1], piece.stop[1])
        ]
        assert len(seen) == len(set(seen)) == math.prod(leaf.shape)


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_owners_and_slices_agree(layout: Layout) -> None:
    for slot in range(layout.mesh.num_slots):
        own = layout.slices(slot)
        assert len(set(own)) == len(own)
        assert {p for p, slots in layout.owners.items() if slot in slots} == set(own)


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_json_round_trip(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest
    assert again.owners == layout.owners


def test_offsets_are_aligned_and_apart() -> None:
    pieces = [Slice(path="a", start=(0,), stop=(n,), dtype="int8") for n in (0, 1, 65)]
    offsets, total = offsets_of(pieces)
    assert offsets == (0, 0, 64)
    assert total == 64 + 128
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_uneven_division_is_refused() -> None:
    mesh = MeshLayout(axis_names=("fsdp",), axis_sizes=(4,), slots=(0, 1, 2, 3))
    leaf = Leaf(path="w", shape=(6,), dtype="float32", spec=(("fsdp",),))
    with pytest.raises(ValueError, match="'w': dim 0 of size 6"):
        slice_at(mesh, leaf, (0,))


def test_mesh_needs_one_slot_per_device() -> None:
    with pytest.raises(ValueError, match="slots has 1 entries"):
        MeshLayout(axis_names=("fsdp",), axis_sizes=(2,), slots=(0,))
