"""Operations of each primitive, against formulas and against each other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives

from dtft.planner.ir import flops
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.jaxprs import CALLS
from dtft.planner.ir.tracing import trace


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_kind(graph: Graph, kind: str) -> list[float]:
    return [op.flops for op in graph.operators if op.kind == kind]


@given(st.data())
@settings(max_examples=40)
def test_a_product_of_any_dims_takes_two_operations_per_multiplication(data) -> None:
    sizes = st.lists(st.integers(1, 5), max_size=2)
    batch, summed, left, right = (data.draw(sizes) for _ in range(4))
    names = [
        *(f"b{i}" for i in range(len(batch))),
        *(f"k{i}" for i in range(len(summed))),
    ]
    size = dict(zip(names, [*batch, *summed], strict=True))
    ins = [
        data.draw(st.permutations([*names, *(f"{side}{i}" for i in range(len(own)))]))
        for side, own in (("m", left), ("n", right))
    ]
    size |= {f"m{i}": n for i, n in enumerate(left)}
    size |= {f"n{i}": n for i, n in enumerate(right)}

    def places(which: str) -> Any:
        own = [name for name in names if name[0] == which]
        return tuple(tuple(order.index(name) for name in own) for order in ins)

    graph = trace(
        lambda x, y: lax.dot_general(x, y, (places("k"), places("b"))),
        *(array(*(size[name] for name in order)) for order in ins),
    )
    expected = 2 * np.prod([*batch, *summed, *left, *right])
    assert of_kind(graph, "matmul") == [expected]
    assert graph.flops == expected


CONVOLUTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "plain": ({"window_strides": (1, 1)}, (2, 8, 8, 4), (3, 3, 4, 6)),
    "strided": ({"window_strides": (2, 2)}, (2, 8, 8, 4), (2, 2, 4, 6)),
    "pointwise": ({"window_strides": (2, 2)}, (2, 8, 8, 4), (1, 1, 4, 6)),
    "groups": (
        {"window_strides": (1, 1), "feature_group_count": 2},
        (2, 8, 8, 4), (3, 3, 2, 6)),
    "depthwise": (
        {"window_strides": (1, 1), "feature_group_count": 4},
        (2, 8, 8, 4), (3, 3, 1, 4)),
    "dilated": (
        {"window_strides": (1, 1), "rhs_dilation": (2, 2)}, (2, 8, 8, 4), (3, 3, 4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_costs_the_same_in_each_direction(name: str) -> None:
    params, shape, kernel = CONVOLUTIONS[name]
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        padding = "VALID" if name in ("strided", "pointwise") else "SAME"
        return lax.conv_general_dilated(
            x, k, padding=padding, dimension_numbers=dims, **params
        )

    x, k = array(*shape), array(*kernel)
    y = jax.eval_shape(conv, x, k)
    expected = 2 * y.size * np.prod(kernel[:3])
    assert of_kind(trace(conv, x, k), "convolution") == [expected]

    def back(x: jax.Array, k: jax.Array, y: jax.Array) -> Any:
        return jax.vjp(conv, x, k)[1](y)

    assert of_kind(trace(back, x, k, y), "convolution") == [expected] * 3


def test_rows_of_groups_each_meet_one_matrix() -> None:
    x, w, sizes = array(32, 8), array(4, 8, 16), array(4, dtype=jnp.int32)
    expected = 2 * 32 * 8 * 16
    assert trace(lax.ragged_dot, x, w, sizes).flops == expected

    def back(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        return jax.grad(lambda x, w: lax.ragged_dot(x, w, sizes).sum(), (0, 1))(x, w)

    assert of_kind(trace(back, x, w, sizes), "matmul") == [expected] * 3


X, Y, INTEGERS = array(4, 6), array(4, 6), array(4, 6, dtype=jnp.int32)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "add": (lambda x, y: x + y, (X, Y), 24),
    "exp": (jnp.exp, (X,), 24),
    "square": (lambda x: lax.integer_pow(x, 2), (X,), 24),
    "power of five": (lambda x: lax.integer_pow(x, 5), (X,), 3 * 24),
    "reciprocal of a square": (lambda x: lax.integer_pow(x, -2), (X,), 2 * 24),
    "clamp": (lambda x: lax.clamp(np.float32(0), x, np.float32(1)), (X,), 48),
    "integers": (lambda i: i * i + 1, (INTEGERS,), 0),
    "comparison": (lambda x, y: x < y, (X, Y), 0),
    "select": (lambda x, y: lax.select(x < y, x, y), (X, Y), 0),
    "conversion": (lambda x: x.astype(jnp.bfloat16), (X,), 0),
    "complex product": (lambda x: x * x, (array(4, 6, dtype=jnp.complex64),), 6 * 24),
    "integer product": (lambda i: i @ i.T, (INTEGERS,), 2 * 4 * 6 * 4),
    "sum": (lambda x: lax.reduce_sum(x, (1,)), (X,), 24),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), (X,), 24),
    "cumulative sum": (lambda x: lax.cumsum(x, 1), (X,), 24),
    "embedding": (lambda x, i: x.at[i[0]].get(), (X, INTEGERS), 0),
    "scattered sum": (lambda x, i: x.at[i[0]].add(1.0), (X, INTEGERS), 36),
    "sort": (lambda x: lax.sort(x, dimension=0), (X,), 24 * 2),
    "top_k": (lambda x: lax.top_k(x, 4), (X,), 24 * 2),
    "pooling": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "VALID"),
        (X,), 24),
    "fft": (jnp.fft.fft, (array(3, 8, dtype=jnp.complex64),), 3 * 5 * 8 * 3),
    "real fft": (jnp.fft.rfft, (array(3, 8),), 3 * 5 * 8 * 3 / 2),
    "cholesky": (
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (array(2, 6, 6),),
        2 * 72),
    "triangular": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        (array(6, 6), array(6, 3)), 6 * 6 * 3),
    "eigenvalues": (lambda x: lax.linalg.eigh(x, symmetrize_input=False),
                    (array(6, 6),), 9 * 216),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_convention(name: str) -> None:
    fn, args, expected = CASES[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        graph = trace(fn, *args)
    assert graph.flops == pytest.approx(expected)
    assert not graph.unknown


def test_every_public_primitive_has_a_rule_or_is_a_call() -> None:
    names = {
        getattr(primitives, name).name
        for name in dir(primitives)
        if name.endswith("_p")
    }
    x = np.zeros((4, 4), np.float32)
    without = {
        name for name in names - set(CALLS)
        if name not in flops._RULES and flops.count(name, [x], [x], {})[0] == "opaque"
    }  # fmt: skip
    # Programs as parameters, and memory that is written to in place.
    assert without == {
        "custom_lin", "custom_linear_solve", "get", "swap", "select_and_scatter",
    }  # fmt: skip


def test_what_has_no_rule_is_listed_with_its_bytes_times_trips() -> None:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.pure_callback(np.sin, X, x), None

    graph = trace(lambda x: lax.scan(body, x, None, length=3)[0], X)
    assert graph.unknown == {"pure_callback": 3 * 2 * 24 * 4}
    assert graph.flops == 0


def test_random_numbers_are_no_floating_point_work() -> None:
    graph = trace(lambda: jax.random.uniform(jax.random.key(0), (8, 8)))
    kinds = {op.kind for op in graph.operators}
    assert "random" in kinds and not graph.unknown
    assert graph.flops <= 5 * 64
