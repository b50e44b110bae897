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
        ({"b1": 1.0}, "b1=1.0 is not a decay"),
        ({"b1": float("nan")}, "b1=nan is not a decay"),
        ({"b2": 1.5}, "b2=1.5 is not a decay"),
        ({"b2": "0.9x"}, "is not a number"),
        ({"eps": -1}, "eps=-1.0 is out of range"),
        ({"eps_root": float("inf")}, "eps_root=inf"),
        ({"mu_dtype": jnp.int32}, "mu_dtype=int32 cannot hold"),
        ({"weight_decay_mask": True}, "weight_decay_mask has no effect"),
    ],
)
def test_what_max_adabelief_and_shampoo_refuse(options: Any, message: str) -> None:
    for make in (max_adabelief, shampoo):
        with pytest.raises(ValueError, match=message):
            make(1e-3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": -1}, "exponent=-1.0 is out of range"),
        ({"root_eps": -1}, "root_eps=-1.0 is out of range"),
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
    for ratio in (0.5, np.float32(0.5), jnp.float32(0.5)):
        with pytest.raises(ValueError, match=r"max_norm_ratio=0.5"):
            skip_outlier_gradients(optax.sgd(1.0), ratio)


def test_traced_values_pass() -> None:
    def step(b1: jax.Array) -> Any:
        solver = max_adabelief(0.1, b1=b1)
        return solver.update(jnp.ones(1), solver.init(jnp.ones(1)))[0]

    assert jnp.isfinite(jax.jit(step)(0.9)).all()
    assert jax.vmap(step)(jnp.array([0.5, 0.9])).shape == (2, 1)
