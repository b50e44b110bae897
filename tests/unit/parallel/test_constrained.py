"""Constraints inside a program: they hold where they are asked for, nothing changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dtft.parallel.plan_shardings import constrained, mesh_of
from dtft.planner.ir.jaxprs import CALLS, bodies, operators
from dtft.planner.types import Spec

MESH = mesh_of({"replica": 2, "fsdp": 2, "tensor": 2})
ONE = mesh_of({"replica": 1}, jax.devices()[:1])
ROWS: Spec = (("replica",), ("tensor",))


def weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32) / 3


def rows() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


@jax.custom_vjp
def doubled_gradient(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


doubled_gradient.defvjp(
    lambda x: (jnp.tanh(x), x), lambda x, ct: (2 * ct * (1 - jnp.tanh(x) ** 2),)
)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda c, w: (jax.nn.relu(c @ w), None))
    return jnp.sum(jax.nn.relu(lax.scan(body, x, w)[0]) ** 2)


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(i: Any, c: jax.Array) -> jax.Array:
        return jnp.sin(c @ w[0]) + i.astype(jnp.float32)

    return jnp.sum(
        lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, body(c[0], c[1])),
            (jnp.int32(0), x),
        )[1]
    )


def chosen(w: jax.Array, x: jax.Array) -> jax.Array:
    y = lax.cond(x[0, 0] > 0, lambda: x @ w[0], lambda: jnp.cos(x))
    return jnp.sum(jax.jit(doubled_gradient)(y) * 3)


def stepped(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(scanned)(w, x)


PROGRAMS = [scanned, looped, chosen, stepped]


def matrices(fn: Callable[..., Any]) -> dict[int, Spec]:
    """A constraint for every operator whose first result is like `rows`."""
    program = jax.make_jaxpr(fn)(weights(), rows())
    return {
        number: ROWS
        for number, eqn in enumerate(operators(program.jaxpr))
        if getattr(eqn.outvars[0].aval, "shape", ()) == (4, 8)
    }


@pytest.mark.parametrize("fn", PROGRAMS)
def test_on_one_device_results_are_the_same_bits(fn: Callable[..., Any]) -> None:
    # Over one device a program has nothing to divide: what is compiled is equal.
    changed = constrained(fn, {n: (("replica",), ()) for n in matrices(fn)}, ONE)
    before = jax.jit(fn)(weights(), rows())
    assert np.array_equal(before, jax.jit(changed)(weights(), rows()))


@pytest.mark.parametrize("fn", PROGRAMS)
def test_on_many_devices_results_are_the_same(fn: Callable[..., Any]) -> None:
    changed = constrained(fn, matrices(fn), MESH)
    assert matrices(fn)
    np.testing.assert_allclose(
        jax.jit(fn)(weights(), rows()),
        jax.jit(changed)(weights(), rows()),
        rtol=2e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("fn", [scanned, chosen])
def test_gradients_are_the_same(fn: Callable[..., Any]) -> None:
    changed = constrained(fn, matrices(fn), MESH)
    np.testing.assert_allclose(
        jax.jit(jax.grad(fn))(weights(), rows()),
        jax.jit(jax.grad(changed))(weights(), rows()),
        rtol=2e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("fn", PROGRAMS)
def test_every_constraint_is_at_its_operator(fn: Callable[..., Any]) -> None:
    for number in matrices(fn):
        changed = constrained(fn, {number: ROWS}, MESH)
        program = jax.make_jaxpr(changed)(weights(), rows()).jaxpr
        found = list(operators(program))
        assert found[number + 1].primitive.name == "sharding_constraint"
        assert found[number + 1].invars[0] is found[number].outvars[0]


def test_nested_calls_stay_nested() -> None:
    def names(jaxpr: Any) -> list[str]:
        called = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in CALLS]
        return [
            name
            for eqn in called
            for name in (
                eqn.primitive.name,
                *(n for body in bodies(eqn) for n in names(body)),
            )
        ]

    for fn in PROGRAMS:
        changed = constrained(fn, matrices(fn), MESH)
        assert names(jax.make_jaxpr(fn)(weights(), rows()).jaxpr) == names(
            jax.make_jaxpr(changed)(weights(), rows()).jaxpr
        )


def test_a_custom_rule_keeps_its_gradient_and_its_result_is_constrained() -> None:
    fn = doubled_gradient
    changed = constrained(fn, {0: ROWS}, MESH)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(changed(x))))
    expected = jax.grad(lambda x: jnp.sum(fn(x)))(rows())
    np.testing.assert_allclose(gradient(rows()), expected, rtol=1e-6)
    text = gradient.trace(rows()).jaxpr
    constraints = [
        eqn for eqn in operators(text.jaxpr) if "constraint" in eqn.primitive.name
    ]
    assert constraints


def compiled(fn: Callable[..., Any]) -> str:
    return jax.jit(fn).lower(weights(), rows()).compile().as_text() or ""


def test_the_compiled_program_has_the_shards() -> None:
    # 4 rows over replica and 8 columns over tensor, inside of the loop.
    assert "f32[2,4]" in compiled(constrained(scanned, {0: ROWS}, MESH))
    assert "f32[2,4]" not in compiled(scanned)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({99: ROWS}, "operator 99, but the program has only 5"),
        (
            {0: ((),)},
            r"for operator 'dot_general', whose result has the shape \(4, 8\)",
        ),
        ({0: (("replica", "fsdp", "tensor"), ())}, "divide it evenly"),
        ({0: (("stage",), ())}, "'stage', which the mesh does not have"),
    ],
)
def test_wrong_constraints_are_refused(constraints: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        constrained(scanned, constraints, MESH)(weights(), rows())


def test_inside_of_shard_map_there_is_nothing_to_constrain() -> None:
    spec = jax.sharding.PartitionSpec("replica")
    fn = jax.shard_map(
        lambda x: jax.jit(jnp.sin)(x), mesh=MESH, in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match="inside of jax.shard_map"):
        constrained(fn, {0: ROWS}, MESH)(rows())
