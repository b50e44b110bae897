"""Leaves and hyperparameters as optax takes them: taken, or refused by name."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dtft.optim import (
    max_adabelief,
    scale_by_max_belief,
    shampoo,
    skip_outlier_gradients,
)

SOLVERS: dict[str, Any] = {
    "max_adabelief": max_adabelief(0.1),
    "guarded": skip_outlier_gradients(max_adabelief(0.1)),
    "shampoo": shampoo(0.1, precondition_frequency=1),
}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def _kinds(tree: Any) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@each_solver
def test_python_scalars(solver: Any) -> None:
    params = {"scale": 1.0, "w": jnp.ones((2, 2))}
    state = solver.init(params)
    updates, after = solver.update(params, state, params)
    assert _kinds(after) == _kinds(state)
    assert float(updates["scale"]) == pytest.approx(-0.111, rel=1e-2)


@each_solver
def test_float8_gradients_of_float8_parameters(solver: Any) -> None:
    params = jnp.ones((2, 2), jnp.float8_e4m3fn)
    state = solver.init(params)
    updates, after = jax.jit(solver.update)(params, state, params)
    assert updates.dtype == jnp.float8_e4m3fn and _kinds(after) == _kinds(state)
    np.testing.assert_allclose(jnp.abs(updates).astype(jnp.float32).max(), 0.11, 0.1)


@each_solver
def test_a_gradient_of_none_leaves_its_parameter_alone(solver: Any) -> None:
    params = {"w": jnp.ones((2, 2)), "frozen": {"w": jnp.full((2, 2), 2.0)}}
    state = solver.init(params)
    _, state = solver.update(params, state, params)
    updates, after = solver.update({**params, "frozen": None}, state, params)
    assert updates["frozen"] is None and (updates["w"] != 0).any()
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for moments in ("mu", "nu", "nu_max"):
        before, now = (
            optax.tree.get(s, moments)["frozen"]["w"] for s in (state, after)
        )
        np.testing.assert_array_equal(now, before)


@each_solver
def test_integer_leaves_are_named(solver: Any) -> None:
    params = {"layer": {"steps": jnp.zeros(2, jnp.int32)}, "w": jnp.ones(2)}
    named = re.escape("['layer']['steps'] has dtype int32")
    with pytest.raises(ValueError, match=f"params{named}"):
        solver.init(params)
    state = solver.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    with pytest.raises(ValueError, match=f"updates{named}"):
        solver.update(params, state)


@each_solver
def test_mesh_axes_may_be_explicit(solver: Any) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    divided = NamedSharding(mesh, PartitionSpec(None, "x"))
    with jax.set_mesh(mesh):
        params = jnp.ones((2, 8, 4), out_sharding=divided)
        state = solver.init(params)
        updates, after = solver.update(params, state, params)
        types = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, after) == types
        assert jax.tree.map(jax.typeof, jax.jit(solver.init)(params)) == types
        _, jitted = jax.jit(solver.update)(params, state, params)
        assert jax.tree.map(jax.typeof, jitted) == types
        assert jax.typeof(updates) == jax.typeof(params)


def test_a_real_first_moment_of_complex_parameters_is_refused() -> None:
    params = {"w": jnp.ones(2), "phase": jnp.ones(2, jnp.complex64)}
    message = "mu_dtype=float32 would drop .*params.*phase.* complex64"
    with pytest.raises(ValueError, match=message):
        scale_by_max_belief(mu_dtype=jnp.float32).init(params)
    state: Any = scale_by_max_belief(mu_dtype=jnp.complex64).init(params)
    assert state.mu["phase"].dtype == jnp.complex64


@pytest.mark.parametrize("jitted", [True, False])
def test_injected_hyperparameters_of_16_bits_are_refused(jitted: bool) -> None:
    params = jnp.ones(2, jnp.bfloat16)
    narrow: Any = optax.inject_hyperparams(max_adabelief)(learning_rate=0.1)
    init = jax.jit(narrow.init) if jitted else narrow.init
    with pytest.raises(ValueError, match="hyperparam_dtype=jnp.float32"):
        init(params)
    wide: Any = optax.inject_hyperparams(max_adabelief, hyperparam_dtype=jnp.float32)(
        learning_rate=0.1
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(wide.update)(params, jax.jit(wide.init)(params), params)
    np.testing.assert_allclose(updates.astype(jnp.float32), -0.111, 1e-2)


@pytest.mark.parametrize("make", [max_adabelief, shampoo])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": None}, "learning_rate=None is not a number"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1' is not a number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is out of range"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 is out of range"),
        ({"weight_decay": "no"}, "weight_decay='no' is not a number"),
        ({"weight_decay": 0.1, "weight_decay_mask": "x"}, "mask='x' is no mask"),
        ({"mu_dtype": "bloat16"}, "mu_dtype='bloat16' is no dtype"),
        ({"b2": 1 - 1e-9}, "b2=0.999999999 is 1 in float32"),
    ],
)
def test_what_was_accepted_silently(make: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"learning_rate": 0.1, **options})


@pytest.mark.parametrize("name", ["bias_correct_max", "nesterov"])
def test_flags_are_flags(name: str) -> None:
    options: Any = {name: "no"}
    with pytest.raises(ValueError, match=f"{name}='no' is not a flag. Allowed: True"):
        max_adabelief(0.1, **options)


def test_weight_decay_may_follow_a_schedule() -> None:
    params = jnp.ones(2)

    def decay(count: Any) -> Any:
        return jnp.where(count < 1, 1.0, 2.0)

    solver: Any = max_adabelief(0.1, weight_decay=decay)
    state, seen = solver.init(params), []
    for _ in range(2):
        updates, state = solver.update(jnp.zeros(2), state, params)
        seen.append(float(updates[0]))
    assert seen == pytest.approx([-0.1, -0.2])


def test_schedule_free_says_why_its_base_needs_a_first_moment() -> None:
    with pytest.raises(ValueError, match="schedule_free customarily has b1=0"):
        optax.contrib.schedule_free(max_adabelief(0.1, b1=0.0), 0.1)
    params = jnp.ones(2)
    with jax.numpy_dtype_promotion("standard"):
        solver: Any = optax.contrib.schedule_free(max_adabelief(0.1, b1=0.5), 0.1)
        updates, _ = solver.update(params, solver.init(params), params)
    assert (updates < 0).all()


def _one_eps(gradients: Any, eps: float, lr: float, decay: float) -> np.ndarray:
    """Three parameters after the steps of adabelief-pytorch, which has a single eps.

    Its options are amsgrad=True, rectify=False, weight_decouple=True.
    """
    b1, b2 = 0.9, 0.999
    params, m, s, s_max = np.ones(3), np.zeros(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, 1):
        params = params - lr * decay * params
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        s_max = np.maximum(s_max, s)
        divisor = np.sqrt(s_max) / np.sqrt(1 - b2**t) + eps
        params = params - lr / (1 - b1**t) * m / divisor
    return params


@pytest.mark.parametrize("eps", [1e-16, 1e-8])
def test_equals_the_authors_pytorch_code_with_one_eps(eps: float) -> None:
    gradients = np.random.default_rng(0).normal(size=(200, 3)) * [1.0, 1e-3, 1e3]
    with jax.enable_x64(True):
        solver: Any = max_adabelief(1e-2, eps=eps, eps_root=eps, weight_decay=0.1)

        def step(carry: Any, gradient: jax.Array) -> Any:
            params, state = carry
            updates, state = solver.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.ones(3)
        (found, _), _ = jax.lax.scan(
            step, (params, solver.init(params)), jnp.asarray(gradients)
        )
    expected = _one_eps(gradients, eps, 1e-2, 0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_a_real_gradient_of_a_complex_parameter_keeps_the_imaginary_moment() -> None:
    ours: Any = scale_by_max_belief()
    theirs: Any = optax.scale_by_belief()
    params = jnp.zeros(1, jnp.complex64)
    state, reference = ours.init(params), theirs.init(params)
    update: Any = None
    expected: Any = None
    for gradient in (jnp.array([1 + 2j]), jnp.array([1.0])):
        update, state = ours.update(gradient, state)
        with jax.numpy_dtype_promotion("standard"):
            expected, reference = theirs.update(gradient, reference)
    mu: Any = optax.tree.get(reference, "mu")
    assert state.mu.dtype == jnp.complex64 and abs(state.mu.imag[0]) > 0.1
    np.testing.assert_allclose(state.mu, mu, rtol=1e-6)
    np.testing.assert_allclose(update, expected, rtol=1e-6)
    assert update.dtype == jnp.complex64


@pytest.mark.parametrize("jitted", [True, False])
def test_a_complex_gradient_of_a_real_parameter_is_refused(jitted: bool) -> None:
    solver = scale_by_max_belief()
    params: Any = {"a": jnp.zeros(1), "b": None, "w": jnp.zeros(1)}
    state = solver.init(params)
    update = jax.jit(solver.update) if jitted else solver.update
    gradients: Any = {"a": None, "b": None, "w": jnp.array([1 + 2j])}
    message = r"updates\['w'\] is complex64, but .* the imaginary part would be dropped"
    with pytest.raises(ValueError, match=message):
        update(gradients, state)


@pytest.mark.parametrize("make", [max_adabelief, shampoo])
def test_flax_optimizers_train_with_each(make: Any) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    kwargs = {"precondition_frequency": 2} if make is shampoo else {}
    optimizer = nnx.Optimizer(model, make(0.1, **kwargs), wrt=nnx.Param)
    plain = make(0.1, **kwargs)
    params: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = plain.init(params)
    x = jnp.arange(12.0).reshape(4, 3) / 12

    def loss(model: nnx.Linear) -> jax.Array:
        return jnp.sum(jnp.square(model(x) - 1))

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer) -> None:
        optimizer.update(model, nnx.grad(loss)(model))

    def of_params(params: Any) -> jax.Array:
        return jnp.sum(jnp.square(x @ params["kernel"] + params["bias"][None] - 1))

    for _ in range(5):
        step(model, optimizer)
        updates, state = plain.update(jax.grad(of_params)(params), state, params)
        params = optax.apply_updates(params, updates)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(found[name], params[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "mu_dtype", "stops"),
    [
        (jnp.float8_e5m2, None, True),
        (jnp.float32, jnp.float8_e4m3fn, True),
        (jnp.float8_e5m2, jnp.bfloat16, False),
    ],
)
def test_first_moments_of_8_bits_stop_and_the_docstrings_say_so(
    dtype: Any, mu_dtype: Any, stops: bool
) -> None:
    solver: Any = scale_by_max_belief(mu_dtype=mu_dtype)
    scale = 0.5 if mu_dtype == jnp.float8_e4m3fn else 1e-3
    gradient = jnp.full(1, scale, dtype)
    state = solver.init(jnp.zeros(1, dtype))
    update = jax.jit(solver.update)
    for _ in range(200):
        _, state = update(gradient, state)
    share = state.mu[0].astype(jnp.float32) / gradient[0].astype(jnp.float32)
    assert (share < 0.9) == stops
    for documented in (scale_by_max_belief, max_adabelief):
        assert "float8" in (documented.__doc__ or "")
