"""Orders of axes on the fabric: what lies inside a host, and which are dropped."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.cost.mesh_topology import extents, undominated_orders

AXES = ("replica", "fsdp", "sequence", "tensor")


def extent_by_hand(sizes: list[int], place: int, capacity: int) -> int:
    """The largest part of an axis whose aligned runs stay within one group."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    lines = np.moveaxis(devices, place, -1).reshape(-1, sizes[place])
    for part in range(sizes[place], 0, -1):
        if sizes[place] % part == 0:
            groups = lines.reshape(-1, part) // capacity
            if (groups == groups[:, :1]).all():
                return part
    raise AssertionError


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes of axes and of levels that hold them."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=2, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 96
        )
    )
    inner = draw(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=0, max_size=2))
    groups = -(-math.prod(sizes) // math.prod(inner))
    return sizes, [*inner, groups]


def parts_inside(sizes: list[int], levels: list[int], way: tuple[int, ...]) -> list:
    """By hand: for each level but the last, the extent of each axis."""
    ordered = [sizes[at] for at in way]
    return [
        [
            extent_by_hand(ordered, way.index(at), math.prod(levels[: level + 1]))
            for at in range(len(sizes))
        ]
        for level in range(len(levels) - 1)
    ]


@settings(max_examples=60)
@given(fabrics())
def test_extents_are_what_lies_in_one_group(
    fabric: tuple[list[int], list[int]],
) -> None:
    sizes, levels = fabric
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    for capacity in np.cumprod(levels).tolist():
        by_hand = [extent_by_hand(sizes, at, capacity) for at in range(len(sizes))]
        used = np.array(math.prod(sizes))
        found = extents(np.array(sizes), np.array(strides), capacity, used)
        assert found.tolist() == by_hand


@settings(max_examples=60)
@given(fabrics(), st.integers(0, 2**32 - 1))
def test_pruning_orders_never_removes_the_optimum(
    fabric: tuple[list[int], list[int]], seed: int
) -> None:
    """With any price of the extents that never falls when one of them falls."""
    sizes, levels = fabric
    rng = np.random.default_rng(seed)
    shape = (len(levels), len(sizes), 97)
    table = np.sort(rng.integers(0, 5, shape) * rng.random(shape), axis=2)[..., ::-1]
    both = rng.random(len(sizes))

    def price(way: tuple[int, ...]) -> float:
        inside = parts_inside(sizes, levels, way)
        own = sum(
            table[level, at, part]
            for level, parts in enumerate(inside)
            for at, part in enumerate(parts)
        )
        together = [
            both[at] / math.prod(p[at] for p in inside) for at in range(shape[1])
        ]
        return float(own) + max(together)

    axes = AXES[: len(sizes)]
    found = undominated_orders(axes, np.array([sizes]), levels)
    active = [at for at in range(len(sizes)) if sizes[at] > 1]
    idle = tuple(at for at in range(len(sizes)) if sizes[at] == 1)
    kept = {
        (*idle, *(axes.index(axis) for axis in found.named[at])) for at in found.order
    }
    everything = {(*idle, *way) for way in itertools.permutations(active)}
    assert kept <= everything
    assert min(map(price, kept)) == min(map(price, everything))
    features = [str(parts_inside(sizes, levels, way)) for way in kept]
    assert len(set(features)) == len(features)


def test_orders_that_only_differ_within_a_host_are_one() -> None:
    one_host = undominated_orders(AXES, np.array([[2, 2, 1, 2]]), (8,))
    assert [one_host.named[at] for at in one_host.order] == [
        ("replica", "fsdp", "tensor")
    ]
    two = undominated_orders(AXES, np.array([[1, 2, 4, 2]]), (8, 2))
    # One axis reaches over both hosts; which order the other two have is the same.
    assert {two.named[at][0] for at in two.order} == {"fsdp", "sequence", "tensor"}
    assert len(two.order) == 3


def test_an_order_that_straddles_hosts_is_dropped_for_one_that_does_not() -> None:
    found = undominated_orders(AXES, np.array([[3, 1, 1, 8]]), (8, 3))
    assert [found.named[at] for at in found.order] == [("replica", "tensor")]
    other = undominated_orders(AXES, np.array([[8, 1, 1, 3]]), (8, 3))
    assert [other.named[at] for at in other.order] == [("tensor", "replica")]


def test_first_of_equal_orders_is_the_usual_one() -> None:
    sizes = np.array([[2, 2, 2, 2], [16, 1, 1, 1], [1, 1, 1, 1], [4, 1, 1, 4]])
    found = undominated_orders(AXES, sizes, (4, 2, 2))
    first = [found.named[found.order[np.argmax(found.mesh == at)]] for at in range(4)]
    assert first == [AXES, ("replica",), (), ("replica", "tensor")]
    assert (np.diff(found.mesh) >= 0).all()


def test_orders_can_be_pinned() -> None:
    sizes = np.array([[2, 2, 1, 4]])
    found = undominated_orders(AXES, sizes, (4, 4), before=("tensor", "replica"))
    named = [found.named[at] for at in found.order]
    assert named
    assert all(order.index("tensor") < order.index("replica") for order in named)
    free = undominated_orders(AXES, sizes, (4, 4))
    assert len(found.order) < len(free.order)


@pytest.mark.parametrize("levels", [(8,), (4, 2), (2, 2, 2)])
def test_every_mesh_has_an_order(levels: tuple[int, ...]) -> None:
    sizes = [s for s in itertools.product([1, 2, 4, 8], repeat=4) if math.prod(s) == 8]
    found = undominated_orders(AXES, np.array(sizes), levels)
    assert sorted(set(found.mesh.tolist())) == list(range(len(sizes)))
    for mesh, order in zip(found.mesh, found.order, strict=True):
        sizes_named = dict(zip(AXES, sizes[mesh], strict=True))
        assert {a for a, size in sizes_named.items() if size > 1} == set(
            found.named[order]
        )
