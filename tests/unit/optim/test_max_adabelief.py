"""Max-AdaBelief against optax's AdaBelief and its own definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.optim import max_adabelief, scale_by_max_belief


def _params(dtype: str = "float32") -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (5, 3), dtype),
        "b": jax.random.normal(keys[1], (3,), dtype),
    }


def _gradients(params: Any, step: int) -> Any:
    key = jax.random.fold_in(jax.random.key(1), step)
    return jax.tree.map(lambda p: jax.random.normal(key, p.shape, p.dtype), params)


def _equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("nesterov", [False, True])
def test_moments_equal_adabelief_bit_for_bit(nesterov: bool) -> None:
    params = _params()
    ours: Any = scale_by_max_belief(nesterov=nesterov)
    theirs: Any = optax.scale_by_belief(nesterov=nesterov)
    state, reference = ours.init(params), theirs.init(params)
    for step in range(20):
        gradients = _gradients(params, step)
        _, state = jax.jit(ours.update)(gradients, state)
        with jax.numpy_dtype_promotion("standard"):
            _, reference = jax.jit(theirs.update)(gradients, reference)
        _equal(state.mu, reference.mu)
        _equal(state.nu, reference.nu)
        assert state.count == reference.count


def test_first_update_equals_adabelief_while_the_second_moment_grows() -> None:
    params = _params()
    ours: Any = scale_by_max_belief()
    theirs: Any = optax.scale_by_belief()
    update, _ = jax.jit(ours.update)(params, ours.init(params))
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = jax.jit(theirs.update)(params, theirs.init(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-7), update, expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12))
def test_maximum_never_falls_and_is_reached(values: list[float]) -> None:
    transform: Any = scale_by_max_belief()
    state, largest = transform.init(jnp.zeros(1)), 0.0
    for value in values:
        _, state = transform.update(jnp.full(1, value, jnp.float32), state)
        assert state.nu_max[0] >= largest and state.nu_max[0] >= state.nu[0]
        largest = float(max(largest, state.nu[0]))
        assert float(state.nu_max[0]) == largest > 0


@pytest.mark.parametrize(
    ("bias_correct_max", "first", "largest"), [(True, 1.11, 15.5), (False, 35.1, 35.1)]
)
def test_steady_gradient_has_a_bounded_step(
    bias_correct_max: bool, first: float, largest: float
) -> None:
    transform: Any = scale_by_max_belief(bias_correct_max=bias_correct_max)

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        update, state = transform.update(jnp.ones(1), state)
        return state, update[0]

    _, sizes = jax.lax.scan(step, transform.init(jnp.ones(1)), None, length=2000)
    assert sizes[0] == pytest.approx(first, rel=1e-2)
    assert sizes.max() <= largest * 1.01


def test_zero_b1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b1=0 .* Allowed: 0 < b1 < 1"):
        scale_by_max_belief(b1=0.0)


def test_state_keeps_its_dtypes_under_bfloat16() -> None:
    params = _params("bfloat16")
    solver: Any = max_adabelief(1e-3, weight_decay=0.1)
    state = solver.init(params)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    gradients = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    for given_gradients in (params, gradients):
        with jax.numpy_dtype_promotion("standard"):  # stock decay needs it
            _, after = solver.update(given_gradients, state, params)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == shapes
    assert state[0].nu["w"].dtype == state[0].nu_max["w"].dtype == jnp.float32
    assert state[0].mu["w"].dtype == jnp.bfloat16


def test_abstract_and_sharded_init() -> None:
    params = _params()
    abstract = jax.eval_shape(lambda: params)
    assert jax.tree.structure(max_adabelief(0.1).init(abstract)) == jax.tree.structure(
        max_adabelief(0.1).init(params)
    )
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    divided = jax.device_put(jnp.ones((4, 2)), sharding)
    state: Any = scale_by_max_belief().init(divided)
    assert state.mu.sharding == state.nu_max.sharding == sharding


def test_hyperparameters_can_be_injected() -> None:
    params = _params()
    with jax.numpy_dtype_promotion("standard"):
        solver: Any = optax.inject_hyperparams(max_adabelief)(learning_rate=0.1, b1=0.8)
        state = solver.init(params)
        injected, _ = jax.jit(solver.update)(params, state, params)
    plain: Any = max_adabelief(0.1, b1=0.8)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5), injected, expected
    )


def test_complex_gradients_have_a_real_second_moment() -> None:
    transform: Any = scale_by_max_belief()
    state = transform.init(jnp.zeros(2, jnp.complex64))
    update, state = transform.update(jnp.asarray([3 + 4j, 1j], jnp.complex64), state)
    assert state.nu_max.dtype == jnp.float32 and update.dtype == jnp.complex64
    np.testing.assert_allclose(jnp.abs(update), 1.11, 1e-2)


def test_none_leaves_pass_through() -> None:
    params = {"w": jnp.ones(2), "frozen": None}
    solver: Any = max_adabelief(0.1)
    updates, _ = solver.update(params, solver.init(params), params)
    assert updates["frozen"] is None


def _check_same(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), a, b)


def _one_update(solver: Any, params: Any) -> tuple[Any, Any]:
    return jax.jit(solver.update)(params, solver.init(params), params)


def test_apply_if_finite_and_scan() -> None:
    params = _params()
    solver: Any = optax.apply_if_finite(max_adabelief(0.1), 3)

    def step(state: Any, scale: jax.Array) -> Any:
        gradients = jax.tree.map(lambda p: p * scale, params)
        return solver.update(gradients, state, params)[1], None

    with jax.numpy_dtype_promotion("standard"):
        scales = jnp.array([1.0, jnp.nan, 2.0])
        state, _ = jax.lax.scan(step, solver.init(params), scales)
    belief = state.inner_state[0]
    assert belief.count == 2 and jnp.isfinite(belief.nu_max["w"]).all()


def test_masked_and_partition() -> None:
    params = _params()
    expected, _ = _one_update(max_adabelief(0.1), params)
    masked = optax.masked(max_adabelief(0.1), {"w": True, "b": False})
    updates, _ = _one_update(masked, params)
    _check_same(updates, {"w": expected["w"], "b": params["b"]})
    parts: Any = {"slow": optax.sgd(0.5), "fast": max_adabelief(0.1)}
    split = optax.partition(parts, {"w": "fast", "b": "slow"})
    updates, _ = _one_update(split, params)
    _check_same(updates, {"w": expected["w"], "b": -0.5 * params["b"]})


def test_weight_decay_is_decoupled_and_masked() -> None:
    params = _params()
    mask = {"w": True, "b": False}
    expected, plain = _one_update(max_adabelief(0.1), params)
    decayed = max_adabelief(0.1, weight_decay=0.5, weight_decay_mask=mask)
    updates, state = _one_update(decayed, params)
    _check_same(updates["w"], expected["w"] - 0.1 * 0.5 * params["w"])
    _check_same(updates["b"], expected["b"])
    _check_same(state[0].nu, plain[0].nu)


def test_mu_dtype_is_that_of_the_first_moment_alone() -> None:
    params = _params()
    transform: Any = scale_by_max_belief(mu_dtype="bfloat16")
    updates, after = _one_update(transform, params)
    for found in (transform.init(params), after):
        assert found.mu["w"].dtype == jnp.bfloat16
        assert found.nu["w"].dtype == found.nu_max["w"].dtype == jnp.float32
    assert updates["w"].dtype == jnp.float32


def test_schedule_and_traced_rate() -> None:
    params = _params()

    def rate(count: Any) -> Any:
        return 0.1 * 0.9 ** count.astype(float)

    first, _ = _one_update(max_adabelief(rate), params)
    expected, _ = _one_update(max_adabelief(jnp.asarray(0.1)), params)
    _check_same(first, expected)
