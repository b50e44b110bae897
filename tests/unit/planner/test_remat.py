"""Blocks of a loss: the cuts are good, and what is wrapped computes the same."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from dtft.planner.ir import remat
from dtft.planner.ir.jaxprs import REMAT, bodies, operators
from dtft.planner.ir.remat import POLICIES, best_cuts, rematerialized
from dtft.planner.ir.tracing import trace
from dtft.planner.types import Remat


def peak(
    inside: Sequence[float], crossing: Sequence[float], cuts: Sequence[int]
) -> float:
    ends = [0, *(cut + 1 for cut in cuts), len(inside)]
    widest = max(sum(inside[a:b]) for a, b in itertools.pairwise(ends))
    return sum(crossing[cut] for cut in cuts) + widest


@given(st.data())
def test_cuts_are_nearly_the_best_of_all(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 9))
    sizes = st.integers(1, 20).map(float)
    inside = data.draw(st.lists(sizes, min_size=num, max_size=num))
    crossing = data.draw(st.lists(sizes, min_size=num - 1, max_size=num - 1))
    places = range(num - 1)
    best = min(
        peak(inside, crossing, cuts)
        for length in range(num)
        for cuts in itertools.combinations(places, length)
    )
    found = best_cuts(inside, crossing)
    assert peak(inside, crossing, found) <= best * 2**0.25 + 1e-9


def test_equal_layers_are_cut_between_layers() -> None:
    # Of four operators a layer, one result is all that the next layer reads.
    cuts = best_cuts([4.0, 4.0, 4.0, 1.0] * 9, ([4.0, 4.0, 4.0, 1.0] * 9)[:-1])
    assert all(cut % 4 == 3 for cut in cuts)
    assert 2 <= len(cuts) <= 8


def weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 8)), jnp.float32) / 3


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(jax.nn.gelu(x @ w)) + jnp.cos(x)


def unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
    for index in range(6):
        x = layer(x, w[index])
    return jnp.sum(x**2)


def jitted(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(unrolled)(w, x) * 2


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    x = lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]
    return jnp.sum(x**2)


def wrapped(w: jax.Array, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda x, w: (layer(x, w), None))
    return jnp.sum(lax.scan(body, x, w)[0] ** 2)


def program_of(fn: Callable[..., Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(fn)(weights(), jnp.ones((4, 8)))


def num_wrapped(program: ClosedJaxpr) -> int:
    def count(jaxpr: Any) -> int:
        return sum(
            (eqn.primitive.name in REMAT) + sum(count(b) for b in bodies(eqn))
            for eqn in jaxpr.eqns
        )

    return count(program.jaxpr)


def gradient_program(program: ClosedJaxpr) -> tuple[Any, dict[str, int]]:
    """The gradient, and how often it runs each primitive."""
    fn = jax.grad(lambda *args: jaxpr_as_fun(program)(*args)[0])
    args = weights(), jnp.ones((4, 8))
    found: dict[str, int] = {}
    for op in trace(fn, *args).operators:
        found[op.primitive] = found.get(op.primitive, 0) + op.trips
    return jax.jit(fn)(*args), found


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("fn", [unrolled, jitted, scanned])
def test_blocks_are_computed_again_and_give_the_same_gradient(
    fn: Callable[..., Any], remat: Any
) -> None:
    before, once = gradient_program(program_of(fn))
    changed = rematerialized(program_of(fn), POLICIES[remat])
    after, again = gradient_program(changed)
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-5)
    assert again["tanh"] > once["tanh"]  # of gelu
    more = again["dot_general"] - once["dot_general"]
    assert more == 0 if remat == "dots" else more >= 3


def test_the_last_block_is_wrapped_only_when_asked() -> None:
    program = program_of(unrolled)
    without = num_wrapped(rematerialized(program, POLICIES["full"]))
    assert num_wrapped(rematerialized(program, POLICIES["full"], last=True)) == (
        without + 1
    )


def test_what_the_user_wraps_stays_as_it_is() -> None:
    changed = rematerialized(program_of(wrapped), POLICIES["full"])
    assert num_wrapped(changed) == num_wrapped(program_of(wrapped)) == 1


@pytest.mark.parametrize("fn", [unrolled, jitted, scanned, wrapped])
def test_the_tracer_numbers_operators_alike(fn: Callable[..., Any]) -> None:
    graph = trace(jax.grad(fn), weights(), jnp.ones((4, 8)))
    program = jax.make_jaxpr(jax.grad(fn))(weights(), jnp.ones((4, 8)))
    names = [eqn.primitive.name for eqn in operators(program.jaxpr)]
    assert names == [op.primitive for op in graph.operators]


def test_joined_equations_are_in_the_block_of_what_comes_after_them() -> None:
    def ends(joined: Callable[[Any], bool] | None) -> list[str]:
        changed = rematerialized(
            program_of(unrolled), POLICIES["full"], last=True, joined=joined
        )
        blocks = [eqn for eqn in changed.jaxpr.eqns if eqn.primitive.name in REMAT]
        return [one.params["jaxpr"].eqns[-1].primitive.name for one in blocks[:-1]]

    assert "add" in ends(None)
    apart = ends(lambda eqn: eqn.primitive.name == "add")
    assert apart
    assert "add" not in apart


def test_sharding_constraints_add_no_bytes_to_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("replica",)), PartitionSpec())

    def loss(w: jax.Array, x: jax.Array, pinned: bool) -> jax.Array:
        for each in w:
            scores = (x @ each) @ x.T
            if pinned:
                scores = lax.with_sharding_constraint(scores, sharding)
            x = jax.nn.softmax(scores) @ x
        return jnp.sum(x)

    def inside(pinned: bool) -> float:
        seen: list[float] = []

        def cuts(inside: Sequence[float], crossing: Sequence[float]) -> tuple[int, ...]:
            seen.extend(inside)
            return best_cuts(inside, crossing)

        monkeypatch.setattr(remat, "best_cuts", cuts)
        given = jnp.ones((6, 4, 4)), jnp.ones((64, 4))
        program = jax.make_jaxpr(loss, static_argnums=2)(*given, pinned)
        rematerialized(program, POLICIES["full"])
        return sum(seen)

    assert inside(True) == inside(False) > 0


@pytest.mark.parametrize("policy", list(POLICIES))
def test_complex_numbers_are_not_computed_again(policy: Remat) -> None:
    """`jax.checkpoint` cannot keep them; the rest is wrapped as before."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params["real"]:
            x = jnp.tanh(x @ w)
        z = jnp.fft.fft(x)
        for w in params["complex"]:
            z = jnp.tanh(z @ w)
        z, _ = lax.scan(lambda z, w: (jnp.tanh(z @ w), None), z, params["complex"])
        return jnp.mean(jnp.abs(z))

    params = {"real": weights(), "complex": weights().astype(jnp.complex64)}
    x = jnp.ones((4, 8), jnp.float32)
    program = jax.make_jaxpr(loss)(params, x)
    changed = rematerialized(program, POLICIES[policy])
    assert any(eqn.primitive.name in REMAT for eqn in changed.jaxpr.eqns)

    def again(params: Any, x: jax.Array) -> jax.Array:
        return jaxpr_as_fun(changed)(*jax.tree.leaves((params, x)))[0]

    for one, two in zip(
        *(jax.tree.leaves(jax.grad(f)(params, x)) for f in (loss, again)), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
