"""One table for all optimizers: every row runs for each of them.

Adding an optimizer is one line in OPTIMIZERS. Where stock optax differs from what dtft
asks for, the difference is written down in `drifts` and asserted, not skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.optim import max_adabelief, skip_outlier_gradients

Fields = frozenset[str]
NONE: Fields = frozenset()


class Optimizer(NamedTuple):
    """A column of the table."""

    make: Callable[..., Any]
    """Learning rate (and options) to a transform."""
    drifts: Fields = NONE
    """State that changes dtype when gradients are wider than parameters."""


OPTIMIZERS = {
    "adam": Optimizer(optax.adam, frozenset({"mu"})),
    "amsgrad": Optimizer(optax.amsgrad, frozenset({"mu", "nu", "nu_max"})),
    "adabelief": Optimizer(optax.adabelief, frozenset({"mu", "nu"})),
    "max_adabelief": Optimizer(max_adabelief),
    "guarded": Optimizer(
        lambda learning_rate: skip_outlier_gradients(max_adabelief(learning_rate))
    ),
}


@pytest.fixture(name="optimizer", params=list(OPTIMIZERS))
def _optimizer(request: pytest.FixtureRequest) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        yield OPTIMIZERS[request.param]


def _params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"w": jnp.ones((8, 3), dtype), "b": jnp.full(3, -2, dtype)}


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), tree)


# ------------------------------------------------------------------------ convergence


def _parabola(x: Any) -> jax.Array:
    return jnp.sum((x["w"] - 0.5) ** 2) + jnp.sum((x["b"] - 1.0) ** 2)


def _rosenbrock(x: jax.Array) -> jax.Array:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def _matrix(x: jax.Array) -> jax.Array:
    target = jnp.arange(12.0).reshape(3, 4) / 6 - 1
    return jnp.sum((x[:, :2] @ x[:, 2:].T @ target - target) ** 2)


TARGETS = {
    "parabola": (_parabola, _params(), 0.1, 600, 1e-3),
    "rosenbrock": (_rosenbrock, jnp.zeros(2), 0.02, 6000, 1e-2),
    "matrix": (_matrix, jnp.eye(3, 4) + 0.3, 0.02, 3000, 1e-3),
}


@pytest.mark.parametrize("target", TARGETS)
def test_converges(optimizer: Optimizer, target: str) -> None:
    loss, start, rate, steps, tolerance = TARGETS[target]
    solver = optimizer.make(rate)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        updates, state = solver.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run() -> Any:
        return jax.lax.scan(step, (start, solver.init(start)), None, steps)[0][0]

    assert loss(jax.jit(run)()) < tolerance


# --------------------------------------------------------------- shapes and dtypes


DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_are_stable(optimizer: Optimizer, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        params = _params(dtype)
        solver = optimizer.make(0.1)
        state = solver.init(params)
        updates, after = _through_cond(solver, params, state, params)
        assert _types(after) == _types(state)
        assert _types(updates) == _types(params)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, after)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_with_wider_gradients(optimizer: Optimizer, dtype: str) -> None:
    params, gradients = _params(dtype), _params()
    solver = optimizer.make(0.1)
    state = solver.init(params)
    _, after = jax.eval_shape(solver.update, gradients, state, params)
    drifted = {
        name
        for name in ("count", "mu", "nu", "nu_max")
        for leaf in optax.tree.get_all_with_path(state, name)
        if _types(leaf[1]) != _types(_like(after, leaf[0]))
    }
    assert drifted == optimizer.drifts
    if not drifted:
        _through_cond(solver, gradients, state, params)
        return
    with pytest.raises(TypeError):
        _through_cond(solver, gradients, state, params)


def _like(state: Any, path: Any) -> Any:
    found = [leaf for p, leaf in optax.tree.get_all_with_path(state, path[-1].name)]
    assert len(found) == 1
    return found[0]


def _through_cond(solver: Any, gradients: Any, state: Any, params: Any) -> Any:
    def skip() -> Any:
        return jax.tree.map(jnp.zeros_like, gradients), state

    def take() -> Any:
        return solver.update(gradients, state, params)

    return jax.jit(lambda flag: jax.lax.cond(flag, take, skip))(jnp.asarray(True))


# -------------------------------------------------------------------- compilation


def test_second_call_and_another_rate_compile_nothing(optimizer: Optimizer) -> None:
    def one(rate: jax.Array, params: Any, state: Any) -> Any:
        updates, state = optimizer.make(rate).update(params, state, params)
        return optax.apply_updates(params, updates), state

    step: Any = jax.jit(one)
    params = _params()
    state = optimizer.make(0.1).init(params)
    first, state = step(jnp.asarray(0.1), params, state)
    second, state = step(jnp.asarray(0.1), first, state)
    step(jnp.asarray(0.2), second, state)
    assert step._cache_size() == 1
    assert not np.array_equal(first["w"], second["w"])


# -------------------------------------------------------------- other people's wrappers


def _same(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), a, b)


def test_injected_hyperparameters(optimizer: Optimizer) -> None:
    params = _params()
    injected: Any = optax.inject_hyperparams(optimizer.make)(0.1)
    plain = optimizer.make(0.1)
    state, update = injected.init(params), jax.jit(injected.update)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    _same(update(params, state, params)[0], expected)
    state.hyperparams["learning_rate"] *= 2
    twice = jax.tree.map(lambda u: 2 * u, expected)
    _same(update(params, state, params)[0], twice)


def test_multi_steps(optimizer: Optimizer) -> None:
    params = _params()
    plain = optimizer.make(0.1)
    several: Any = optax.MultiSteps(plain, 2)
    state, update = several.init(params), jax.jit(several.update)
    halves = (
        jax.tree.map(lambda p: 0.5 * p, params),
        jax.tree.map(lambda p: 1.5 * p, params),
    )
    updates, state = update(halves[0], state, params)
    assert not updates["w"].any()
    updates, state = update(halves[1], state, params)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    _same(updates, expected)


def test_extra_arguments_are_ignored(optimizer: Optimizer) -> None:
    params = _params()
    solver: Any = optax.with_extra_args_support(optimizer.make(0.1))
    updates, _ = solver.update(params, solver.init(params), params, value=1.0)
    assert jnp.isfinite(updates["w"]).all()


# ------------------------------------------------------------------------- sharding


def test_abstract_init(optimizer: Optimizer) -> None:
    solver = optimizer.make(0.1)
    abstract = jax.eval_shape(_params)
    found = jax.eval_shape(solver.init, abstract)
    assert _types(found) == _types(solver.init(_params()))
    assert _types(solver.init(abstract)) == _types(found)


def test_state_is_divided_like_the_parameters(optimizer: Optimizer) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    divided = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    solver = optimizer.make(0.1)

    def sharding(leaf: Any) -> NamedSharding:
        return divided if leaf.shape == (8, 3) else everywhere

    params = {
        "w": jax.device_put(_params()["w"], divided),
        "b": jax.device_put(_params()["b"], everywhere),
    }
    wanted = jax.tree.map(sharding, jax.eval_shape(solver.init, params))
    state = jax.jit(solver.init, out_shardings=wanted)(params)
    assert jax.tree.map(lambda x: x.sharding, state) == wanted
    eager = solver.init(params)
    updates, after = jax.jit(solver.update)(params, state, params)
    for found in (eager, after):
        for name in ("mu", "nu"):
            moment = optax.tree.get(found, name)
            assert moment["w"].sharding.is_equivalent_to(divided, 2)
    assert updates["w"].sharding.is_equivalent_to(divided, 2)
