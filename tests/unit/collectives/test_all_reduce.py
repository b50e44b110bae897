"""Ring, tree and gather against native and numpy: every p, shape and dtype."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from dtft.collectives import (
    Algorithm,
    Op,
    all_reduce,
    all_reduce_symmetric,
    broadcast,
    bytes_sent,
    reduce_factors,
    reduce_in_backward,
    ring_reduce_scatter,
)
from tests.support.shard_maps import over_devices

OWN: tuple[Algorithm, ...] = ("ring", "tree", "gather")
ALL: tuple[Algorithm, ...] = ("native", *OWN)
CASES: tuple[tuple[Any, tuple[int, ...], Op], ...] = (
    (jnp.float32, (), "mean"),
    (jnp.float32, (2, 0), "max"),
    (jnp.float32, (7, 5), "max"),
    (jnp.bfloat16, (3,), "mean"),
    (jnp.float16, (2, 3, 4), "sum"),
    (jnp.int32, (11,), "sum"),
    (jnp.int8, (3, 3), "max"),
    (jnp.complex64, (5,), "mean"),
    (jnp.bool_, (4,), "max"),
)
"""One program for all of them: programs are what takes time here."""


def rows(num: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """One array of small numbers for each of num devices."""
    values = np.random.default_rng(seed).normal(size=(num, *shape)) * 8
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def expected(x: np.ndarray, op: str) -> np.ndarray:
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    return {"sum": np.sum, "mean": np.mean, "max": np.max}[op](wide, axis=0)


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_equal_to_numpy_within_rounding(num: int) -> None:
    x = [rows(num, shape, dtype) for dtype, shape, _ in CASES]

    def reduce_all(own: list[jax.Array]) -> dict[str, list[jax.Array]]:
        return {
            algorithm: [
                all_reduce(value, "replica", op=case[2], algorithm=algorithm)
                for value, case in zip(own, CASES, strict=True)
            ]
            for algorithm in ALL
        }

    for algorithm, results in over_devices(reduce_all, num)(x).items():
        for value, (dtype, shape, op), result in zip(x, CASES, results, strict=True):
            assert result.dtype == dtype and result.shape == shape
            exact = jnp.issubdtype(dtype, jnp.integer) or op == "max"
            unit = 0.0 if exact else float(jnp.finfo(dtype).eps)
            error = np.abs(
                np.asarray(result, complex) - expected(np.asarray(value), op)
            )
            assert (error <= 40 * num * unit).all(), (algorithm, dtype, shape, op)


@settings(max_examples=12, deadline=None)
@given(
    num=st.sampled_from([5, 6]),
    algorithm=st.sampled_from(OWN),
    seed=st.integers(0, 2**32 - 1),
)
def test_integer_sums_and_maxima_are_exact_on_every_device(
    num: int, algorithm: Any, seed: int
) -> None:
    shape = (num + 4,)
    tree = {
        "sum": rows(num, shape, jnp.int32, seed),
        "max": rows(num, shape, jnp.float32, seed),
    }
    results = per_device(num, algorithm)(tree)
    for op, result in results.items():
        for own in np.asarray(result).reshape(num, *shape):
            assert (own == expected(np.asarray(tree[op]), op)).all()


@cache
def per_device(num: int, algorithm: Any) -> Any:
    """Every device's own result, [num * rows]."""
    mesh = Mesh(np.array(jax.devices()[:num]), ("replica",))
    return jax.jit(
        jax.shard_map(
            lambda tree: {
                op: all_reduce(x[0], "replica", op=op, algorithm=algorithm)
                for op, x in tree.items()
            },
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec("replica"),
            check_vma=False,
        )
    )


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("num", [3, 8])
def test_every_device_has_the_same_bits(num: int, algorithm: Any) -> None:
    x = {"mean": rows(num, (33,), jnp.float32), "sum": rows(num, (5, 5), jnp.bfloat16)}
    for result in per_device(num, algorithm)(x).values():
        same = np.asarray(result).reshape(num, -1)
        assert (same == same[0]).all()


@pytest.mark.parametrize("num", [3, 4])
def test_the_ring_is_summed_in_the_documented_order(num: int) -> None:
    """And both typings, and two runs, give the same bits."""
    x = rows(num, (num * 50,), jnp.float32, seed=1)
    programs = [
        over_devices(
            lambda own: all_reduce(own, "replica", op="sum", algorithm="ring"),
            num,
            check_vma=check,
        )
        for check in (True, False)
    ]
    parts = np.asarray(x).reshape(num, num, 50)
    for program in (*programs, *programs):
        result = np.asarray(program(x)).reshape(num, 50)
        for chunk in range(num):
            total = parts[(chunk + 1) % num, chunk]
            for hop in range(2, num + 1):
                total = total + parts[(chunk + hop) % num, chunk]
            assert (result[chunk] == total).all()


def test_the_tree_folds_what_is_beyond_a_power_of_two() -> None:
    x = rows(5, (50,), jnp.float32)
    program = over_devices(
        lambda own: all_reduce(own, "replica", op="sum", algorithm="tree"), 5
    )
    a = np.asarray(x)
    assert (np.asarray(program(x)) == ((a[0] + a[4]) + a[1]) + (a[2] + a[3])).all()


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(algorithm: Any, check_vma: bool) -> None:
    """The gradient of |mean|^2 with respect to every device's x is 2 mean / p."""
    x = rows(3, (4,), jnp.float32)
    loss = over_devices(
        lambda own: (
            all_reduce(own, "replica", op="mean", algorithm=algorithm) ** 2
        ).sum(),
        3,
        check_vma=check_vma,
    )
    wanted = np.broadcast_to(2 / 3 * np.asarray(x).mean(0), (3, 4))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), wanted, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ALL)
def test_two_axes_are_used_as_one(algorithm: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("replica", "fsdp"))
    axes = ("replica", "fsdp")
    program = jax.shard_map(
        lambda x: all_reduce(x, axes, op="sum", algorithm=algorithm),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
    )
    assert jax.jit(program)(jnp.arange(6)).tolist() == [15]


@pytest.mark.parametrize("algorithm", ALL)
def test_replicated_values_count_once_per_device(algorithm: Any) -> None:
    program = over_devices(
        lambda _: all_reduce(jnp.ones(2), "replica", op="sum", algorithm=algorithm), 3
    )
    assert program(jnp.zeros((3, 1))).tolist() == [3.0, 3.0]


def test_one_device_and_no_axis_are_the_identity() -> None:
    x = {"a": jnp.arange(3.0), "b": jnp.asarray(2.5)}
    for algorithm in ALL:
        assert all_reduce(x, None, algorithm=algorithm)["b"] == 2.5
        one = over_devices(
            partial(all_reduce, axis_name="replica", algorithm=algorithm), 1
        )
        assert one({"a": x["a"][None]})["a"].tolist() == [0.0, 1.0, 2.0]


def test_gather_sums_narrow_floats_in_float32() -> None:
    """256 + 1 + ... + 1 in bfloat16 stays 256 when rounded after every addition."""
    x = jnp.asarray(np.array([1, 256, 1, 1, 1, 1, 1, 1], jnp.bfloat16))
    ring, gather = (
        over_devices(
            partial(all_reduce, axis_name="replica", op="sum", algorithm=algorithm), 8
        )(x)
        for algorithm in OWN[::2]
    )
    assert gather == 264 and ring == 256  # 263 is not a bfloat16


def test_the_mean_by_gather_does_not_overflow_a_narrow_float() -> None:
    large = jnp.full(5, 60000, jnp.float16)
    mean = partial(all_reduce, axis_name="replica", op="mean", algorithm="gather")
    assert over_devices(mean, 5)(large) == jnp.float16(60000)


@pytest.mark.parametrize("root", [0, 2, 4])
def test_broadcast(root: int) -> None:
    x = rows(5, (3, 2), jnp.bfloat16)
    result = over_devices(lambda own: broadcast(own, root, "replica"), 5)(x)
    assert (result == x[root]).all()
    with pytest.raises(ValueError, match="root=5 .*0 to 4"):
        over_devices(lambda own: broadcast(own, 5, "replica"), 5)(x)


def test_sums_by_default_as_psum_does() -> None:
    x = rows(3, (4,), jnp.float32)
    total, psum = over_devices(
        lambda own: (all_reduce(own, "replica"), jax.lax.psum(own, "replica")), 3
    )(x)
    np.testing.assert_array_equal(total, psum)


def test_an_unbound_axis_is_named() -> None:
    for function in (
        partial(all_reduce, axis_name="replicas"),
        partial(all_reduce, axis_name="replicas", algorithm="ring"),
        partial(broadcast, root=0, axis_name="replicas"),
        partial(ring_reduce_scatter, axis_name="replicas"),
        partial(reduce_in_backward, axis_name="replicas"),
        lambda x: all_reduce_symmetric(x[:, None], "replicas", wire="packed"),
        lambda x: all_reduce_symmetric(x[:, None], "replicas", wire="cholesky"),
        lambda x: reduce_factors(x[:, None], "replicas"),
    ):
        with pytest.raises(ValueError, match="axis_name='replicas' is not bound here"):
            over_devices(function, 2)(rows(2, (1,), jnp.float32))


def test_a_root_is_a_static_index() -> None:
    traced = jax.jit(lambda root: broadcast(jnp.ones(2), root, None))
    with pytest.raises(ValueError, match="root is a traced .*int32.* a Python int"):
        traced(0)
    for root in (True, 0.0, "0"):
        with pytest.raises(ValueError, match="root=.* is not an index"):
            broadcast(jnp.ones(2), root, None)  # pyright: ignore[reportArgumentType]


def test_a_list_in_the_place_of_an_array_is_refused() -> None:
    values: Any = [1.0, 2.0]
    with pytest.raises(ValueError, match="x is a list. Allowed: one array"):
        broadcast(values, 0, None)
    ring = jax.vmap(lambda _: ring_reduce_scatter(values, "r"), axis_name="r")
    with pytest.raises(ValueError, match="chunks is a list. Allowed: one array"):
        ring(jnp.ones(2))


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        (0, "axis_name=0 is no name. Allowed: a str"),
        (("r", 1), "axis_name=.* is no name"),
        (("r", "r"), "axis_name=.* names an axis twice. Allowed"),
    ],
)
def test_an_axis_has_a_name(axis_name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda v: all_reduce(v, axis_name), axis_name="r")(jnp.ones(2))


def test_a_leaf_that_cannot_be_reduced_is_named() -> None:
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "on": jnp.array([True])}
    with pytest.raises(ValueError, match=r"op='mean' of int32 \(x\['n'\]\) is not def"):
        all_reduce(tree, None, op="mean")
    with pytest.raises(ValueError, match=r"op='sum' of bool \(x\['on'\]\) is not def"):
        all_reduce(tree, None)
    with pytest.raises(ValueError, match=r"x\['name'\]='a' is no array. Allowed"):
        all_reduce({"name": "a"}, None)


def test_undefined_reductions_are_refused() -> None:
    with pytest.raises(ValueError, match="op='mean' of int32"):
        all_reduce(jnp.arange(2), None, op="mean")
    with pytest.raises(ValueError, match="op='sum' of bool"):
        all_reduce(jnp.array([True]), None, op="sum")
    with pytest.raises(ValueError, match="op='max' of complex64"):
        all_reduce(jnp.array([1j]), None, op="max")
    with pytest.raises(ValueError, match="algorithm='star' is unknown. Allowed"):
        all_reduce(1.0, None, algorithm="star")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="op='min' is unknown. Allowed"):
        all_reduce(1.0, None, op="min")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one chunk|number of devices"):
        jax.vmap(lambda x: ring_reduce_scatter(x, "r"), axis_name="r")(jnp.ones((2, 3)))


@given(num_bytes=st.integers(0, 10**9), num=st.integers(2, 64))
def test_cost_of_a_ring_is_never_above_two_arrays(num_bytes: int, num: int) -> None:
    ring = bytes_sent(num_bytes, num, "ring")
    assert ring <= 2 * num_bytes + 2 * num
    assert bytes_sent(num_bytes, num, "native") == ring
    assert bytes_sent(num_bytes, 1, "tree") == 0
