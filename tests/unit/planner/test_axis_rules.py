"""Rules for Flax's logical names: Flax makes the plan's specs of them again."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.core import spmd
from jax.sharding import PartitionSpec

import dtft
from dtft.planner.report.logical_axes import axis_rules

WIDTH, HIDDEN = 2048, 8192  # shapes only: no array of these is made
INIT = nnx.initializers.normal()


class Mlp(nnx.Module):
    """Two layers with named dims, and a norm without."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def named(*names: str) -> Any:
            return nnx.with_partitioning(INIT, names)

        up, down = named("embed", "mlp"), named("mlp", "embed")
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, kernel_init=up)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, kernel_init=down)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(self.norm(x_BD))))


def planned(bare: bool) -> tuple[Any, Any]:
    """A plan with tensor=4, and the variables with their names."""
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    definition, state = nnx.split(model)
    params = nnx.to_pure_dict(state) if bare else state

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        known = nnx.eval_shape(lambda: state)
        if bare:
            nnx.replace_by_pure_dict(known, params)
        else:
            known = params
        return jnp.mean(nnx.merge(definition, known)(batch) ** 2)

    plan = dtft.plan(
        loss=loss,
        optimizer=optax.sgd(0.1),
        params=params,
        batch=jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32),
        cluster="8xH100",
        tensor=4,
        replica=2,
    )
    return plan, state


@pytest.mark.parametrize("bare", [True, False])
def test_flax_makes_the_plan_of_the_rules(bare: bool) -> None:
    plan, state = planned(bare)
    found = plan.axis_rules(state)
    assert dict(found.rules) == {"embed": None, "mlp": "tensor"}
    assert not found.exceptions
    with spmd.logical_axis_rules(found.rules):
        specs = nnx.get_partition_spec(state)
    assert specs["up"]["kernel"].get_value() == PartitionSpec(None, "tensor")
    assert specs["down"]["kernel"].get_value() == PartitionSpec("tensor", None)


def test_linen_boxes_have_names_too() -> None:
    plan, _ = planned(bare=True)
    boxed = linen.with_partitioning(linen.initializers.ones, ("embed", "mlp"))
    kernel = jax.eval_shape(lambda: boxed(jax.random.key(0), (WIDTH, HIDDEN)))
    assert plan.axis_rules({"up": {"kernel": kernel}}).rules == (
        ("embed", None),
        ("mlp", "tensor"),
    )


def test_most_elements_decide_and_the_rest_is_named() -> None:
    specs = {"large": ((), ("tensor",)), "small": ((), ("fsdp",))}
    names = {"large": ("embed", "mlp"), "small": ("embed", "mlp")}
    found = axis_rules(specs, names, {"large": (4, 400), "small": (4, 8)})
    assert found.rules == (("embed", None), ("mlp", "tensor"))
    assert found.exceptions == ("small",)


def test_a_dim_without_a_name_must_be_whole() -> None:
    names = {"w": (None, "mlp")}
    found = axis_rules({"w": (("fsdp",), ("tensor",))}, names, {"w": (8, 8)})
    assert found.exceptions == ("w",)
    both = axis_rules({"w": ((), ("fsdp", "tensor"))}, names, {"w": (8, 8)})
    assert both.rules == (("mlp", ("fsdp", "tensor")),)


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' has 1 logical names"):
        axis_rules({"w": ((), ())}, {"w": ("mlp",)}, {"w": (8, 8)})
    with pytest.raises(ValueError, match="'w' has logical names but no spec"):
        axis_rules({}, {"w": ("mlp",)}, {"w": (8,)})
    with pytest.raises(ValueError, match="no array with logical names"):
        planned(bare=True)[0].axis_rules({"w": jnp.ones(3)})
