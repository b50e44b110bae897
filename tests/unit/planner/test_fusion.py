"""Fusion: which kernels move what; each rule on the smallest program that shows it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from dtft.planner.ir import CHEAP, LONGEST_ROW, group_operators, moved_bytes
from dtft.planner.ir.tracing import trace


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def moved(fn: Callable[..., Any], *args: Any) -> float:
    return sum(moved_bytes(trace(fn, *args)).values())


X = array(64, 256)
SIZE = 4 * 64 * 256


@given(st.integers(1, 12))
def test_a_chain_of_cheap_operators_is_one_kernel(length: int) -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = jnp.sin(x) + 1.0
        return x

    assert moved(chain, X) == 2 * SIZE


def test_operands_of_products_are_written_and_read_once() -> None:
    w = array(256, 256)
    assert moved(lambda x, w: x @ w, X, w) == 0.0
    assert moved(lambda x, w: jnp.tanh(x) @ w, X, w) == 2 * SIZE
    assert moved(lambda x, w: jnp.tanh(x @ w) + x, X, w) == 3 * SIZE


def test_what_only_casts_read_is_written_in_their_dtype() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x).astype(jnp.bfloat16) @ w

    assert moved(fn, X, array(256, 256, dtype=jnp.bfloat16)) == 1.5 * SIZE


def test_a_softmax_is_one_kernel_while_its_rows_fit() -> None:
    def softmax(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=-1)

    assert moved(softmax, X) == 2 * SIZE
    long = array(2, 2 * LONGEST_ROW)
    passes = 4 * 4 * 2 * 2 * LONGEST_ROW  # largest, sum, result
    assert moved(softmax, long) > passes - 100


def test_a_norm_is_one_kernel() -> None:
    def norm(x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return centred * lax.rsqrt(variance + 1e-5)

    assert moved(norm, X) == 2 * SIZE


def test_reductions_of_the_same_columns_read_once() -> None:
    def both(x: jax.Array) -> Any:
        return jnp.sum(x, axis=0), jnp.sum(jnp.square(x), axis=0)

    assert moved(both, X) == SIZE + 4 * 256


def test_a_reduction_that_waits_for_another_reads_again() -> None:
    def variance(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x - jnp.mean(x, axis=0, keepdims=True)), axis=0)

    assert moved(variance, X) >= 2 * SIZE


def test_what_many_kernels_need_is_written_if_that_moves_less() -> None:
    w = array(256, 256)

    def fn(x: jax.Array, y: jax.Array, z: jax.Array, w: jax.Array) -> Any:
        total = x + y + z
        return [jnp.tanh(total * (i + 1)) @ w for i in range(4)]

    # Once: three read, one written. Then four kernels read it and write one each.
    assert moved(fn, X, X, X, w) == (4 + 4 * 2) * SIZE


def test_a_product_copies_an_operand_whose_batch_dim_is_not_first() -> None:
    heads = array(8, 16, 4, 32)
    size = 4 * 8 * 16 * 4 * 32

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("btnh,bsnh->bnts", q, k)

    assert moved(scores, heads, heads) == 2 * 2 * size
    first = array(8, 4, 16, 32)
    assert moved(lambda q, k: jnp.einsum("bnth,bnsh->bnts", q, k), first, first) == 0


def test_a_gather_moves_what_it_takes() -> None:
    table, rows = array(50_000, 16), array(8, dtype=jnp.int32)
    assert moved(lambda t, i: t[i], table, rows) < 4 * 8 * 16 * 4


def test_a_gradient_of_a_lookup_changes_the_sum_in_place() -> None:
    def loss(x: jax.Array, labels: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(x, labels[:, None], axis=1)
        return jnp.sum(jax.nn.logsumexp(x, axis=1) - chosen[:, 0])

    # Reads: the row sums in the forward pass, and the gradient's; it writes that.
    grad = moved(jax.grad(loss), X, array(64, dtype=jnp.int32))
    assert SIZE * 2 <= grad <= SIZE * 3.1


def test_a_broadcast_of_a_loop_is_made_before_it() -> None:
    def run(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            mask = jnp.broadcast_to(jnp.arange(256)[None] < 7, x.shape)
            return jnp.where(mask, x, 0.0), None

        return lax.scan(body, x, None, length=5)[0]

    before = 5 * 2 * SIZE  # the carry is read and written
    hoisted = 64 * 256 + SIZE  # the mask, and zeros in float32
    assert moved(run, X) == pytest.approx(before + 6 * hoisted, rel=0.02)


def test_groups_have_the_bytes_of_their_kernels() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jax.nn.softmax(x @ w, axis=-1)) ** 2)

    graph = trace(jax.grad(fn), X, array(256, 256))
    groups = group_operators(graph, {})
    before = [g for g in groups if g.region != "update" and not g.copies]
    total = sum(
        g.moved * g.times * graph.bytes_of(g.operator)
        for g in before
        if g.operator.kind in (*CHEAP, "reduction")
    )
    assert total == pytest.approx(sum(moved_bytes(graph).values()))


def test_each_result_of_a_barrier_is_its_own_operand() -> None:
    w = array(256, 256)

    def fn(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        x, y = lax.optimization_barrier((jnp.tanh(x), jnp.sin(y)))
        return x @ w, y @ w

    assert moved(fn, X, array(32, 256), w) == 2 * (SIZE + SIZE // 2)


def test_constants_of_a_loop_are_found_in_one_pass() -> None:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = jnp.float32(1.5) + jnp.arange(256, dtype=jnp.float32)
        for _turn in range(60):  # 2**60 paths
            c = c + c
        return x + c[None], None

    def run(x: jax.Array) -> jax.Array:
        return lax.scan(body, x, None, length=3)[0]

    assert moved(run, X) > 0
