"""Dims found by following operators: dividing along one divides the whole program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from dtft.planner.ir.dim_propagation import factor_groups
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.tracing import trace


def follow(fn: Callable[..., Any], *args: Any) -> tuple[Graph, list, list, set, set]:
    """Dims of arguments and results of a program; those summed, those needed whole."""
    graph = trace(fn, *args)
    ins = [graph.values[index].dims for index in graph.inputs.values()]
    outs = [graph.values[index].dims for index in graph.outputs.values()]
    summed = {dim for operator in graph.operators for dim in operator.summed}
    whole = {dim for operator in graph.operators for dim in operator.whole}
    return graph, ins, outs, summed, whole


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def ids(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, high, shape).astype(np.int32)


GROUPS = np.array([1, 3], np.int32)
OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
OF_WEIGHTS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
OF_BATCH = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    # name: function, arguments, how many dims may be divided at least
    "elementwise": (lambda x, y: jnp.sin(x) * y, (f32(4, 6), f32(4, 6)), 2),
    "scalar": (lambda x: x * 2.0 + 1.0, (f32(4, 6),), 2),
    "broadcast": (lambda x, y: x + y[None, :], (f32(4, 6), f32(6)), 2),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (f32(2, 4, 6),), 3),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None),
            (f32(4, 6),), 1),
    "max": (lambda x: lax.reduce_max(x, (0,)), (f32(4, 6),), 1),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), (f32(4, 6),), 1),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (f32(4, 1, 6),), 2),
    "dot": (lambda x, y: x @ y, (f32(4, 6), f32(6, 8)), 2),
    "batched dot": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        (f32(2, 4, 6), f32(2, 6, 8)), 3),
    "ragged dot": (lax.ragged_dot, (f32(4, 6), f32(2, 6, 8), GROUPS), 1),
    "ragged dot, gradient of rows": (
        lambda y, w, sizes: lax.ragged_dot_general(y, w, sizes, OF_ROWS),
        (f32(4, 8), f32(2, 6, 8), GROUPS), 1),
    "ragged dot, gradient of weights": (
        lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, OF_WEIGHTS),
        (f32(4, 6), f32(4, 8), GROUPS), 2),
    "ragged dot of a batch": (
        lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, OF_BATCH),
        (f32(2, 4, 6), f32(2, 2, 6, 8), GROUPS), 2),
    "conv": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (f32(2, 8, 8, 4), f32(3, 3, 4, 6)), 2),
    "depthwise": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=x.shape[-1]),
        (f32(2, 8, 4), f32(3, 1, 4)), 2),
    "embedding": (lambda t, i: jnp.asarray(t).at[i].get(mode="fill", fill_value=0.0),
                  (f32(8, 6), ids(8, 2, 4)), 3),
    "cumsum": (lambda x: lax.cumsum(x, 1), (f32(4, 6),), 1),
    "sort": (lambda x: lax.sort(x, dimension=0), (f32(4, 6),), 1),
    "top_k": (lambda x: lax.top_k(x, 2)[0], (f32(4, 6),), 1),
    "slice": (lambda x: lax.slice_in_dim(x, 1, 3, axis=1), (f32(4, 6),), 1),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 0))),
            (f32(4, 6),), 1),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (f32(4, 6), f32(4, 2)), 1),
    "reverse": (lambda x: lax.rev(x, (0,)), (f32(4, 6),), 1),
    "pool": (lambda x: lax.reduce_window_max_p.bind(
        x, window_dimensions=(1, 2, 1), window_strides=(1, 2, 1),
        padding=((0, 0),) * 3, base_dilation=(1,) * 3, window_dilation=(1,) * 3),
        (f32(2, 8, 4),), 2),
    "merge": (lambda x: x.reshape(x.shape[0] * x.shape[1], x.shape[2]),
              (f32(4, 3, 6),), 2),
    "select": (lambda x, y: lax.select(x > y, x, y), (f32(4, 6), f32(4, 6)), 2),
    "convert": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (f32(4, 6),), 2),
    "cholesky": (
        lambda x: lax.linalg.cholesky(
            x @ lax.transpose(x, (0, 2, 1)), symmetrize_input=False),
        (f32(2, 4, 4) + 3 * np.eye(4, dtype=np.float32),), 1),
    "fft": (lambda x: jnp.abs(lax.fft(x + 0j, lax.FftType.FFT, (8,))), (f32(4, 8),), 1),
    "two layers": (lambda x, a, b: jnp.tanh(x @ a) @ b,
                   (f32(4, 6), f32(6, 8), f32(8, 6)), 2),
}  # fmt: skip


def part(array: np.ndarray, numbers: tuple[int, ...], number: int, half: int) -> Any:
    """One half along the dim, wherever the array has it."""
    for place, other in enumerate(numbers):
        if other == number:
            array = np.split(array, 2, axis=place)[half]
    return array


@pytest.mark.parametrize("name", CASES)
def test_halves_computed_apart_are_the_halves_of_the_result(name: str) -> None:
    fn, args, least = CASES[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        graph, ins, outs, summed, whole = follow(fn, *args)
        expected = np.asarray(fn(*args))
        held = {number for numbers in ins for number in numbers}
        free = [
            number
            for number in sorted(held - summed - whole)
            if graph.dims[number].divisible_by(2) and number in outs[0]
        ]
        for number in free:
            halves = [
                fn(*(part(a, d, number, half) for a, d in zip(args, ins, strict=True)))
                for half in (0, 1)
            ]
            joined = np.concatenate(halves, axis=outs[0].index(number))
            np.testing.assert_allclose(joined, expected, rtol=1e-5, atol=1e-6)
    assert len(free) >= least


@pytest.mark.parametrize(
    "name",
    [
        "dot", "sum", "batched dot", "embedding", "ragged dot",
        "ragged dot, gradient of rows",
    ],
)  # fmt: skip
def test_partial_results_of_halves_of_a_summed_dim_add_up(name: str) -> None:
    fn, args, _ = CASES[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _, ins, _, summed, _ = follow(fn, *args)
        (number,) = summed
        if name == "embedding":  # indices that another half has give zeros
            halves = [
                fn(half, np.where((i := args[1] - n) < 0, 99, i))
                for n, half in ((0, args[0][:4]), (4, args[0][4:]))
            ]
        else:
            halves = [
                fn(*(part(a, d, number, half) for a, d in zip(args, ins, strict=True)))
                for half in (0, 1)
            ]
        np.testing.assert_allclose(halves[0] + halves[1], fn(*args), rtol=1e-4)


def test_gradients_of_a_ragged_product_have_the_dims_of_its_operands() -> None:
    def gradients(x, w, sizes, y):
        return jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](y)

    graph, (x, w, sizes, y), (dx, dw), summed, whole = follow(
        gradients, f32(4, 6), f32(2, 6, 8), GROUPS, f32(4, 8)
    )
    rows, depth, columns = *x, w[2]
    assert dx == (rows, depth) and dw == w == (sizes[0], depth, columns)
    assert y == (rows, columns) and len({rows, depth, columns, sizes[0]}) == 4
    assert graph.dims[depth].sizes == (6,) and graph.dims[columns].sizes == (8,)
    assert summed == {rows, depth, columns} and whole == {rows, sizes[0]}


def test_heads_are_divided_as_the_projection_that_makes_them() -> None:
    def heads(x, w):
        return (x @ w).reshape(2, 4, 3, 8)

    graph, (x, w), (out,), _, _ = follow(heads, f32(2, 4, 6), f32(6, 24))
    assert out[:3] == (*x[:2], w[1])
    assert graph.dims[w[1]].sizes == (3, 24)
    assert graph.dims[w[1]].divisible_by(3) and not graph.dims[w[1]].divisible_by(2)


def test_scores_have_the_position_twice_and_the_residual_width_is_one() -> None:
    def scores(x, q, k):
        return jnp.einsum("btd,bsd->bts", x @ q, x @ k)

    _, (x, q, k), (out,), summed, _ = follow(scores, f32(2, 4, 6), f32(6, 8), f32(6, 8))
    assert out == (x[0], x[1], x[1])
    assert q[1] == k[1]
    assert summed == {x[2], q[1]}


def test_unrelated_dims_stay_apart() -> None:
    graph, (a, b), _, _, _ = follow(lambda a, b: (a * 2, b * 2), f32(4, 6), f32(4, 6))
    assert not {*a} & {*b}
    assert graph.dims[a[0]].sizes == (4,)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms())
def test_runs_of_a_reshape_cover_every_dim_and_keep_sizes(shape, random) -> None:
    primes = [p for size in shape for p in _primes(size)]
    after: list[int] = []
    for prime in primes:
        if after and random.random() < 0.5:
            after[-1] *= prime
        else:
            after.append(prime)
    groups = factor_groups(shape, after)
    for left, right in groups:
        assert np.prod([shape[i] for i in left]) == np.prod([after[j] for j in right])
    lefts = [i for left, _ in groups for i in left]
    assert [i for i in range(len(shape)) if i not in lefts and shape[i] != 1] == []


def _primes(size: int) -> list[int]:
    return {1: [], 2: [2], 3: [3], 4: [2, 2], 5: [5], 6: [2, 3]}[size]
