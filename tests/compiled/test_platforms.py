"""One update lowers for every platform, from one source and without custom calls."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft.optim import max_adabelief

DONATING = ("cpu", "cuda", "rocm", "tpu")
# JAX 0.10 does not donate on oneAPI: the update works there, but not in place.
ALL = (*DONATING, "oneapi")


def _lower(platforms: tuple[str, ...], donated: tuple[int, ...]) -> str:
    solver = max_adabelief(1e-3, weight_decay=0.1)
    params = {"matrix": jnp.ones((8, 4)), "half": jnp.ones(3, jnp.bfloat16)}
    state = solver.init(params)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # add_decayed_weights needs it
            updates, state = solver.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    traced = jax.jit(step, donate_argnums=donated).trace(params, state, params)
    return traced.lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("platform", DONATING)
def test_a_donated_update_lowers_with_every_leaf_aliased(platform: str) -> None:
    text = _lower((platform,), (0, 1))
    assert text.count("tf.aliasing_output") == 2 + 1 + 3 * 2
    assert "custom_call" not in text


def test_one_module_lowers_for_all_platforms() -> None:
    text = _lower(ALL, ())
    assert "custom_call" not in text and "stablehlo.case" not in text


def test_oneapi_lowers_to_the_same_operations_as_cuda() -> None:
    assert _lower(("oneapi",), ()) == _lower(("cuda",), ())
