"""Which leaf of an optimizer state tells how a parameter's update is divided."""

from typing import Any

import jax
import optax
import pytest

from dtft.checkpoint.state import tree
from dtft.optim import max_adabelief, shampoo, skip_outlier_gradients
from dtft.parallel.planning.planned_step import update_specs

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


@pytest.mark.parametrize("mask", [{"layer": False, "w": True}, {"layer": 0, "w": 1}])
def test_a_mask_may_leave_out_a_whole_subtree(mask: Any) -> None:
    masked = optax.masked(optax.adam(1e-3), {k: bool(v) for k, v in mask.items()})
    found = _specs(masked, _params("layer/w", "layer/v", "w"), "mu/w")
    assert found == {"layer/v": WHOLE, "layer/w": WHOLE, "w": DIVIDED}


def test_groups_of_an_optimizer_by_label_of_a_subtree() -> None:
    labels = {"layer": "slow", "w": "fast"}
    groups: dict[Any, Any] = {
        "slow": optax.sgd(1e-3, momentum=0.9),
        "fast": optax.adam(1e-3),
    }
    parted = optax.partition(groups, labels)
    assert _specs(parted, _params("layer/w", "w"), "mu/w")["w"] == DIVIDED
    found = _specs(parted, _params("layer/w", "w"), "trace/layer/w")
    assert found == {"layer/w": DIVIDED, "w": WHOLE}


def test_parameters_that_are_one_number_are_not_matched_with_a_count() -> None:
    scalar = jax.ShapeDtypeStruct((), "float32")
    state = jax.eval_shape(optax.adam(1e-3).init, scalar)
    of_optimizer = {path: ((path,),) for path in tree.to_paths(state)}
    (path,) = tree.to_paths(scalar)
    assert update_specs(scalar, state, {path: ()}, of_optimizer) == {path: (("0/mu",),)}


def test_a_model_without_parameters() -> None:
    assert update_specs({}, optax.adam(1e-3).init({}), {}, {"0/count": ()}) == {}
