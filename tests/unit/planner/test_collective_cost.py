"""The formulas of reference section 7, which algorithm wins, how axes lie on levels."""

import itertools
import math
from functools import partial
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.cluster.catalog import link
from dtft.planner.cluster.hardware import CollectiveKind, Curve, Link
from dtft.planner.cluster.topology import Cluster, Level, Pool
from dtft.planner.cost.collectives import Algorithm, collective_s, collectives_s
from dtft.planner.cost.mesh_topology import (
    DeviceGroup,
    DeviceGroups,
    _counted,
    group_of,
    members,
)
from dtft.planner.search.meshes import divisors

KINDS = get_args(CollectiveKind)
FAST = Link(
    kind="NVLink",
    curve=Curve(latency_s=2e-6, bandwidth=200e9, half_bytes=1e6),
    source="",
)
SLOW = Link(kind="InfiniBand", curve=Curve(latency_s=9e-6, bandwidth=25e9), source="")
HOSTS = Cluster.parse("4x8xa100").uniform
FLAT = DeviceGroup(sizes=(8,), links=(SLOW,))
TWO = DeviceGroup(sizes=(8, 4), links=(FAST, SLOW))


def test_formulas_of_one_level() -> None:
    alpha, bandwidth, n, size = 9e-6, 25e9, 8, 1e8
    seconds: dict[tuple[CollectiveKind, Algorithm], float] = {
        ("all_reduce", "ring"): 2 * 7 * alpha + 2 * 7 / 8 * size / bandwidth,
        ("all_reduce", "tree"): 2 * 3 * alpha + 2 * size / bandwidth,
        ("all_reduce", "gather"): 2 * alpha + 2 * n * size / bandwidth,
        ("all_gather", "ring"): 7 * alpha + 7 / 8 * size / bandwidth,
        ("reduce_scatter", "ring"): 7 * alpha + 7 / 8 * size / bandwidth,
        ("all_to_all", "direct"): 7 * alpha + 7 / 8 * size / bandwidth,
        ("permute", "direct"): alpha + size / bandwidth,
    }
    for (kind, algorithm), expected in seconds.items():
        assert collective_s(kind, size, FLAT, algorithm) == pytest.approx(expected)


def test_hierarchical_is_scatter_inside_reduce_between_and_gather_inside() -> None:
    inside = DeviceGroup(sizes=(8,), links=(FAST,))
    between = DeviceGroup(sizes=(4,), links=(SLOW,))
    for size in (1e4, 1e7, 1e9):
        parts = (
            collective_s("reduce_scatter", size, inside, "ring")
            + collective_s("all_reduce", size / 8, between, "ring")
            + collective_s("all_gather", size, inside, "ring")
        )
        whole = collective_s("all_reduce", size, TWO, "hierarchical")
        assert whole == pytest.approx(parts)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_ring_beats_tree_above_the_size_of_the_reference(n: int) -> None:
    curve = SLOW.curve
    group = DeviceGroup(sizes=(n,), links=(SLOW,))
    crossover = n * curve.bandwidth * curve.latency_s * ((n - 1) - math.log2(n))
    for size, ring_wins in ((crossover * 0.99, False), (crossover * 1.01 + 1, True)):
        ring = collective_s("all_reduce", size, group, "ring")
        tree = collective_s("all_reduce", size, group, "tree")
        assert (ring < tree) == ring_wins


def test_hierarchical_wins_small_and_the_ring_large() -> None:
    """A ring over all hosts pays the slow hop in each round, but fills both levels."""
    for size, faster in ((1e4, "hierarchical"), (1e10, "ring")):
        times = {
            way: collective_s("all_reduce", size, TWO, way)
            for way in ("ring", "hierarchical")
        }
        assert min(times, key=lambda way: times[way]) == faster


def test_host_gather_is_best_for_tiny_arrays_and_worst_for_large() -> None:
    ways: tuple[Algorithm, ...] = ("ring", "tree", "gather")
    small = [collective_s("all_reduce", 8, FLAT, way) for way in ways]
    large = [collective_s("all_reduce", 1e9, FLAT, way) for way in ways]
    assert min(small) == small[2] and max(large) == large[2]


@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(2, 16), min_size=1, max_size=3),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
)
def test_more_bytes_never_take_less_time(
    kind: CollectiveKind, sizes: list[int], a: float, b: float
) -> None:
    group = DeviceGroup(sizes=tuple(sizes), links=(FAST, SLOW, SLOW)[: len(sizes)])
    low, high = sorted((a, b))
    assert collective_s(kind, low, group) <= collective_s(kind, high, group)


@given(st.sampled_from(KINDS), st.integers(2, 64), st.floats(1, 1e11))
def test_more_devices_never_take_less_time(
    kind: CollectiveKind, n: int, size: float
) -> None:
    small, large = (DeviceGroup(sizes=(k,), links=(SLOW,)) for k in (n, n + 1))
    assert collective_s(kind, size, small) <= collective_s(kind, size, large)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_sizes_gives_what_each_size_gives(kind: CollectiveKind) -> None:
    sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9, 1e11])
    together = collective_s(kind, sizes, TWO)
    alone = [collective_s(kind, size, TWO) for size in sizes]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert together[0] == 0 and together.shape == sizes.shape


@pytest.mark.parametrize("kind", KINDS)
def test_best_is_the_fastest_way(kind: CollectiveKind) -> None:
    ways: dict[str, tuple[Algorithm, ...]] = {
        "all_reduce": ("ring", "tree", "gather", "hierarchical"),
        "all_to_all": ("direct", "hierarchical"),
        "permute": ("direct",),
    }
    for size in (1e2, 1e5, 1e8, 1e10):
        times = [
            collective_s(kind, size, TWO, way)
            for way in ways.get(kind, ("ring", "hierarchical"))
        ]
        assert collective_s(kind, size, TWO) == min(times)


def test_one_device_and_no_bytes_cost_nothing() -> None:
    alone = group_of(HOSTS, {"replica": 32, "tensor": 1}, "tensor")
    assert alone.sizes == () and alone.num_devices == 1
    assert collective_s("all_reduce", 1e9, alone) == 0
    assert (collective_s("all_reduce", np.array([1e9, 1]), alone) == 0).all()
    assert collective_s("all_gather", 0, FLAT) == 0


def test_a_shared_port_gives_each_device_its_part() -> None:
    shared = Link(kind="PCIe", curve=SLOW.curve, shared_by=4, source="")
    alone, together = (
        DeviceGroup(sizes=(8,), links=(port,)) for port in (SLOW, shared)
    )
    size = 1e10
    assert collective_s("all_gather", size, together) == pytest.approx(
        4 * collective_s("all_gather", size, alone), rel=1e-3
    )


def test_a_ring_over_hosts_uses_every_port_of_a_host() -> None:
    """8 devices of a host with a port each: the hosts' ring carries 8 times as much."""
    strided = group_of(HOSTS, {"replica": 4, "tensor": 8}, "replica")
    whole = group_of(HOSTS, {"replica": 32}, "replica")
    alone = collective_s("all_reduce", 1e10, strided, "ring") / (2 * 3 / 4)
    together = collective_s("all_reduce", 1e10, whole, "ring") / (2 * 31 / 32)
    assert alone / together == pytest.approx(8, rel=0.02)


def test_collectives_with_a_curve_of_their_own() -> None:
    switch = link("nvlink-4")
    group = DeviceGroup(sizes=(8,), links=(switch,))
    half = collective_s("reduce_scatter", 1e10, group)
    assert collective_s("all_reduce", 1e10, group) < 2 * half * 0.8


def test_a_torus_uses_its_dimensions_at_once() -> None:
    pool = Cluster.parse("16x16xv5e").uniform
    mesh = {"fsdp": 256}
    both = group_of(pool, mesh, "fsdp")
    one = group_of(pool, {"fsdp": 16, "tensor": 16}, "fsdp")
    ratio = collective_s("all_gather", 1e9, one) / collective_s("all_gather", 1e9, both)
    assert 1.7 < ratio < 2.0


def test_published_figures_of_h200_hosts_are_met() -> None:
    """Reference section 5: bus bandwidth of all-reduce, one host and four."""
    pool = Cluster.parse("4x8xh200").uniform
    mesh = {"replica": 4, "tensor": 8}
    cases = [
        ("tensor", 8, 2**20, 39.9, 0.5), ("tensor", 8, 2**27, 401.9, 0.1),
        ("tensor", 8, 2**30, 463.6, 0.05), ("tensor", 8, 2**34, 482.3, 0.05),
        ("both", 32, 2**24, 64.4, 0.5), ("both", 32, 2**29, 326.9, 0.1),
        ("both", 32, 2**34, 381.8, 0.05),
    ]  # fmt: skip
    for axes, n, size, published, tolerance in cases:
        group = group_of(pool, mesh, tuple(mesh) if axes == "both" else axes)
        seconds = collective_s("all_reduce", size, group)
        bandwidth = 2 * (n - 1) / n * size / seconds / 1e9
        assert bandwidth == pytest.approx(published, rel=tolerance), (axes, size)


LAYOUTS = [
    ({"replica": 4, "tensor": 8}, "tensor", (8,), ["NVLink"]),
    ({"replica": 4, "tensor": 8}, "replica", (4,), ["InfiniBand"]),
    ({"tensor": 8, "replica": 4}, "replica", (4,), ["NVLink"]),
    ({"tensor": 8, "replica": 4}, "tensor", (2, 4), ["NVLink", "InfiniBand"]),
    ({"replica": 2, "fsdp": 16}, "fsdp", (8, 2), ["NVLink", "InfiniBand"]),
    ({"replica": 2, "fsdp": 4, "tensor": 4}, "fsdp", (2, 2), ["NVLink", "InfiniBand"]),
    ({"a": 2, "b": 4, "c": 4}, ("a", "c"), (4, 2), ["NVLink", "InfiniBand"]),
    ({"a": 2, "b": 4, "c": 4}, ("a", "b", "c"), (8, 4), ["NVLink", "InfiniBand"]),
]


@pytest.mark.parametrize("mesh, axes, sizes, kinds", LAYOUTS)
def test_how_axes_lie_on_hosts_of_eight(
    mesh: dict[str, int], axes: str, sizes: tuple[float, ...], kinds: list[str]
) -> None:
    group = group_of(HOSTS, mesh, axes)
    assert group.sizes == sizes and [port.kind for port in group.links] == kinds


def test_an_axis_that_does_not_fill_hosts_reaches_the_farthest_group() -> None:
    group = group_of(HOSTS, {"replica": 10, "tensor": 3}, "tensor")  # 6, 7 and 8
    assert group.sizes == (1.5, 2.0) and group.num_devices == 3
    assert [port.kind for port in group.links] == ["NVLink", "InfiniBand"]


@given(st.data())
def test_members_multiply_to_the_axes_however_they_lie(data: st.DataObject) -> None:
    levels = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    total = math.prod(levels)
    mesh, left = {}, total
    for name in "abc":
        mesh[name] = data.draw(st.integers(1, left))
        left //= mesh[name]
    axes = data.draw(st.sets(st.sampled_from("abc"), min_size=1))
    ports = [Level(size=size, link=SLOW) for size in levels]
    group = group_of(Pool(device=HOSTS.device, levels=tuple(ports)), mesh, [*axes])
    members = math.prod(mesh[axis] for axis in axes)
    assert math.prod(group.sizes) == pytest.approx(members)
    assert all(size > 1 for size in group.sizes)


@pytest.mark.parametrize("name", ["2x8xH100", "3x4xV100", "4x4x4xv5e", "5x2xA100"])
def test_many_groups_cost_what_each_costs(name: str) -> None:
    pool = Cluster.parse(name).uniform
    levels = tuple(level.size for level in pool.levels)
    ways = itertools.product(divisors(pool.num_devices), repeat=3)
    full = [way for way in ways if math.prod(way) == pool.num_devices]
    sizes = np.array([*full, (2, 1, 3), (3, 3, 1)])
    for chosen in ((True, False, False), (False, True, True)):
        found = members(levels, sizes, chosen)
        groups = DeviceGroups(sizes=found, links=tuple(one.link for one in pool.levels))
        axes = [
            axis for axis, is_chosen in zip("abc", chosen, strict=True) if is_chosen
        ]
        alone = [
            group_of(pool, dict(zip("abc", map(int, row), strict=True)), axes)
            for row in sizes
        ]
        num_bytes = np.geomspace(1, 1e9, len(sizes))
        for kind in KINDS:
            each = list(map(partial(collective_s, kind), num_bytes.tolist(), alone))
            together = collectives_s(kind, num_bytes, groups, np.arange(len(sizes)))
            assert together == pytest.approx(each, rel=1e-12)


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 3))
def test_alignment_by_arithmetic_is_alignment_by_counting(
    order: list[str], chosen: int
) -> None:
    sizes = {"a": 2, "b": 2, "c": 4, "d": 2}
    mesh = {axis: sizes[axis] for axis in order}
    group = group_of(HOSTS, mesh, order[chosen])
    wanted = tuple(axis == order[chosen] for axis in mesh)
    counted = _counted([1, 8, 32], tuple(mesh.values()), wanted)
    assert group.sizes == tuple(size for size in counted if size > 1)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="has no expert. Allowed: replica"):
        group_of(HOSTS, {"replica": 32}, "expert")
    with pytest.raises(ValueError, match="has 64 devices, the pool 4x8xa100 has 32"):
        group_of(HOSTS, {"replica": 64}, "replica")
    with pytest.raises(ValueError, match="kind='reduce' is no collective"):
        collective_s("reduce", 1, FLAT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'tree' of all_gather is unknown. Allowed"):
        collective_s("all_gather", 1, FLAT, "tree")


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_link_is_never_faster_than_its_bandwidth(a: int, b: int) -> None:
    curve = Curve(latency_s=1e-6, bandwidth=1e9, half_bytes=1e5)
    assert curve.seconds(a) >= a / 1e9
    assert (curve.seconds(a) < curve.seconds(b)) == (a < b)
    assert curve.seconds(1e5) == pytest.approx(1e-6 + 2 * 1e5 / 1e9)
