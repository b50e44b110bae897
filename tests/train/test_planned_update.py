"""Which leaf of an optimizer state tells how a parameter's update is divided."""

from typing import Any

import jax
import optax
import pytest

from dtft.checkpoint import tree
from dtft.optim import max_adabelief, shampoo, skip_outlier_gradients
from dtft.train.planned_update import update_specs

DIVIDED, WHOLE = (("replica",), ()), ((), ())


def _params(*paths: str) -> Any:
    leaf = jax.ShapeDtypeStruct((4, 4), "float32")
    return tree.nested({path: leaf for path in paths})


def _specs(optimizer: Any, params: Any, divided: str) -> dict[str, Any]:
    """The spec of each update if one parameter's moments are divided."""
    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(optimizer.init, params)
    of_optimizer = {
        path: DIVIDED if path.endswith(divided) else ((),) * len(leaf.shape)
        for path, leaf in tree.to_paths(state).items()
    }
    of_params = {path: WHOLE for path in tree.to_paths(params)}
    return update_specs(params, state, of_params, of_optimizer)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), max_adabelief(1e-3)),
    "guarded": skip_outlier_gradients(max_adabelief(1e-3)),
    "shampoo": shampoo(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_parameter_whose_path_ends_another_one_keeps_its_own_spec(
    optimizer: Any,
) -> None:
    found = _specs(optimizer, _params("layer/w", "w"), "layer/w")
    assert found == {"layer/w": DIVIDED, "w": WHOLE}


def test_a_parameter_named_like_a_field_of_the_state() -> None:
    found = _specs(optax.adam(1e-3), _params("mu/w", "w"), "mu/mu/w")
    assert found == {"mu/w": DIVIDED, "w": WHOLE}


def test_parameters_without_a_moment_keep_their_own_spec() -> None:
    mask = {"layer": {"w": True}, "w": False}
    masked = optax.masked(optax.adam(1e-3), mask)
    found = _specs(masked, _params("layer/w", "w"), "layer/w")
    assert found == {"layer/w": DIVIDED, "w": WHOLE}


def test_a_model_without_parameters() -> None:
    assert update_specs({}, optax.adam(1e-3).init({}), {}, {"0/count": ()}) == {}
