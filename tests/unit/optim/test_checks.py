"""Hyperparameters out of range are refused; what cannot be known passes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtft.optim import max_adabelief, scale_by_shampoo, shampoo, skip_outlier_gradients


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 0.0}, "b1=0 makes"),
        ({"b1": np.float32(0)}, "b1=0 makes"),
        ({"b1": jnp.array(0.0)}, "b1=0 makes"),
        ({"b1": 1.0}, "b1=1.0 is not a decay. Allowed: 0 < b1 < 1"),
        ({"b1": float("nan")}, "b1=nan is not a decay"),
        ({"b2": 1.5}, "b2=1.5 is not a decay"),
        ({"b2": "0.9x"}, "is not a number"),
        ({"eps": -1}, "eps=-1.0 is out of range"),
        ({"eps_root": float("inf")}, "eps_root=inf"),
        ({"mu_dtype": jnp.int32}, "mu_dtype=int32 cannot hold"),
        ({"weight_decay_mask": True}, "weight_decay_mask has no effect"),
        ({"b1": 1e-9}, r"b1=1e-09 \(1 - b1 is 1 in float32\) makes"),
        ({"b1": np.array([0.0])}, "b1=0 makes"),
        ({"b2": np.array([1.5])}, "b2=1.5 is not a decay"),
        ({"b2": jnp.array([0.9, 1.5])}, "b2=1.5 is not a decay"),
        ({"b2": np.array([1j])}, "is not a number"),
        ({"b2": np.array([])}, "is not a number"),
        ({"eps": np.array([-1.0])}, "eps=-1.0 is out of range"),
        ({"learning_rate": np.array([-0.1])}, "learning_rate=-0.1 is out of range"),
        ({"weight_decay": jnp.array([-1.0])}, "weight_decay=-1.0 is out of range"),
    ],
)
def test_what_max_adabelief_and_shampoo_refuse(options: Any, message: str) -> None:
    for make in (max_adabelief, shampoo):
        with pytest.raises(ValueError, match=message):
            make(**{"learning_rate": 1e-3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": -1}, "exponent=-1.0 is out of range"),
        ({"root_eps": -1}, "root_eps=-1.0 is out of range"),
        ({"root_eps": 1e-50}, "root_eps=1e-50 is 0 in float32"),
        ({"exchange": "mean"}, "exchange='mean' is not a function. Allowed"),
        ({"block_size": jnp.int32(256)}, "block_size=.* in static_args"),
        ({"exponent": 100}, "exponent=100 with root_eps=1e-06: .* is infinite"),
        ({"beta_preconditioner": np.array([1.5])}, "_preconditioner=.*1.5.* would let"),
        ({"beta_preconditioner": 2.0}, "beta_preconditioner=2.0 would let"),
        ({"beta_preconditioner": 0.0}, "beta_preconditioner=0 is out of range"),
        (
            {"precondition_frequency": np.int64(0)},
            "frequency=0 is not positive",
        ),
        (
            {"precondition_frequency": 2.5},
            "frequency=2.5 is not a whole number",
        ),
    ],
)
def test_what_only_shampoo_refuses(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_by_shampoo(**options)


def test_the_guard_reads_numbers_of_every_kind() -> None:
    ratios = (0.5, np.float32(0.5), jnp.float32(0.5), np.array([0.5]))
    for ratio in ratios:
        with pytest.raises(ValueError, match=r"max_norm_ratio=\[?0.5"):
            skip_outlier_gradients(optax.sgd(1.0), ratio)


def test_traced_values_pass() -> None:
    def step(b1: jax.Array) -> Any:
        solver = max_adabelief(0.1, b1=b1)
        return solver.update(jnp.ones(1), solver.init(jnp.ones(1)))[0]

    assert jnp.isfinite(jax.jit(step)(0.9)).all()
    assert jax.vmap(step)(jnp.array([0.5, 0.9])).shape == (2, 1)


def test_arrays_of_one_in_range_pass() -> None:
    one = {"b1": np.array([0.9]), "b2": jnp.array([0.99]), "eps": np.array([1e-8])}
    given: Any = max_adabelief(jnp.array([0.1]), **one)
    plain: Any = max_adabelief(0.1, b2=0.99, eps=1e-8)
    params = jnp.ones(2)
    found, expected = (
        solver.update(params, solver.init(params), params)[0]
        for solver in (given, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_small_numbers_that_float64_holds_pass_where_it_is_on() -> None:
    with jax.enable_x64(True):
        max_adabelief(0.1, b1=1e-9)
        scale_by_shampoo(root_eps=1e-50)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"w": "yes", "b": "no"}, r"mask\['b'\]='no' is not a boolean. Allowed: True"),
        ({"w": 1, "b": False}, r"mask\['w'\]=1 is not a boolean"),
        ({"w": abs, "b": abs}, r"mask\['b'\]=<built-in function abs> is not a bool"),
        (lambda _: "w", r"mask\(params\)='w' is not a boolean"),
        (np.True_, r"mask=np.True_ is no mask"),
    ],
)
def test_leaves_of_a_mask_are_booleans(mask: Any, message: str) -> None:
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    for make in (max_adabelief, shampoo):
        with pytest.raises(ValueError, match=message):
            make(0.1, weight_decay=0.1, weight_decay_mask=mask).init(params)


@pytest.mark.parametrize(
    "mask",
    [
        {"w": True, "b": False},
        {"w": np.True_, "b": np.False_},
        lambda params: {name: name == "w" for name in params},
        lambda params: {name: np.bool_(name == "w") for name in params},
    ],
)
def test_masks_as_optax_takes_them(mask: Any) -> None:
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    solver: Any = max_adabelief(0.1, weight_decay=0.5, weight_decay_mask=mask)
    for update in (solver.update, jax.jit(solver.update)):
        updates, _ = update(zeros, solver.init(params), params)
        np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
        np.testing.assert_array_equal(updates["b"], 0)


def test_a_mask_taken_for_a_schedule_says_static_args() -> None:
    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)

    wrapped: Any = optax.inject_hyperparams(max_adabelief)(
        1e-3, weight_decay=0.1, weight_decay_mask=matrices
    )
    with pytest.raises(ValueError, match="weight_decay_mask in static_args"):
        wrapped.init(jnp.ones((2, 2)))


def test_shampoo_injected_without_jit_says_what_is_static() -> None:
    wrapped: Any = optax.inject_hyperparams(shampoo)(1e-3)
    with pytest.raises(ValueError, match="block_size=.* name it in static_args"):
        wrapped.init(jnp.ones((2, 2)))


def test_the_guard_injected_under_jit_says_what_is_static() -> None:
    names = ("history", "warmup", "max_consecutive")

    def init(**static: Any) -> Any:
        wrapped: Any = optax.inject_hyperparams(skip_outlier_gradients, **static)(
            max_adabelief(0.1), max_norm_ratio=5.0
        )
        return jax.jit(wrapped.init)(jnp.ones(2))

    with pytest.raises(ValueError, match=r"static_args=\('history', 'warmup', 'max_"):
        init()
    init(static_args=names)


@pytest.mark.parametrize("inner", [max_adabelief, None, (max_adabelief(0.1),)])
def test_the_guard_is_around_a_transform(inner: Any) -> None:
    with pytest.raises(ValueError, match=r"inner=.* is no optax transform. Allowed"):
        skip_outlier_gradients(inner)
