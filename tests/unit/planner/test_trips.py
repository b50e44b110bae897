"""Trips of while loops that count, against running them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dtft.planner.ir.tracing import trace

COMPARE: dict[str, Any] = {
    "lt": lambda i, n: i < n, "le": lambda i, n: i <= n,
    "gt": lambda i, n: i > n, "ge": lambda i, n: i >= n,
    "ne": lambda i, n: i != n,
}  # fmt: skip


@given(
    st.sampled_from(sorted(COMPARE)), st.integers(-9, 9), st.integers(-9, 9),
    st.integers(-3, 3), st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_a_counter_runs_as_often_as_in_python(name, start, limit, step, turned) -> None:
    compare, count, i = COMPARE[name], 0, start
    while compare(i, limit) and count < 100:
        i, count = i + step, count + 1

    def loop(x: jax.Array) -> jax.Array:
        def goes(carry: Any) -> Any:
            other = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}[name]
            if turned:
                return COMPARE[other](limit, carry[0])
            return compare(carry[0], limit)

        return lax.while_loop(goes, lambda c: (c[0] + step, jnp.sin(c[1])), (start, x))[
            1
        ]

    graph = trace(loop, jnp.float32(1))
    trips = [op.trips for op in graph.operators if op.primitive == "sin"]
    if count < 100:
        assert trips == [count]
        assert not graph.unknown
    else:  # endless: passes are not known
        assert trips == [1]
        assert graph.unknown


def test_a_bound_that_is_carried_along_is_known() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1], jnp.sin(c[2])), (0, 7, x)
        )[2]

    graph = trace(loop, jnp.float32(1))
    assert graph.loops[0].length == 4 and graph.loops[0].primitive == "while"


def test_fori_loop_of_known_bounds_is_counted() -> None:
    graph = trace(
        lambda x: lax.fori_loop(2, 9, lambda i, c: jnp.sin(c), x), jnp.float32(1)
    )
    assert [op.trips for op in graph.operators if op.primitive == "sin"] == [7]


@pytest.mark.parametrize("kind", ["argument", "data", "two conditions", "doubles"])
def test_what_the_text_does_not_say_is_listed(kind: str) -> None:
    def loop(n: jax.Array, x: jax.Array) -> Any:
        goes = {
            "argument": lambda c: c[0] < n,
            "data": lambda c: c[1] < 0.5,
            "two conditions": lambda c: (c[0] < 5) & (c[1] < 0.5),
            "doubles": lambda c: c[0] < 64,
        }[kind]
        grown = (lambda i: i * 2) if kind == "doubles" else (lambda i: i + 1)
        return lax.while_loop(goes, lambda c: (grown(c[0]), jnp.sin(c[1])), (1, x))

    graph = trace(loop, jnp.int32(3), jnp.float32(1))
    assert graph.unknown["while"] > 0
    assert [op.trips for op in graph.operators if op.primitive == "sin"] == [1]
