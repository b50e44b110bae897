"""Gradients are named by their parameter, through clipping, moments and loops."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft.planner.cluster import Cluster
from dtft.planner.ir import region
from dtft.planner.plan import Collective
from dtft.planner.report.text import collectives, layers_together
from dtft.planner.search import decide
from dtft.planner.workload import Workload, gradients, of_loss, of_step
from tests.support.zoo import MODELS

FEW: dict[str, Any] = {"resnet": {"depths": (1, 1, 1, 1)}, "vit": {"layers": 2}}
"""Sizes of models whose blocks are unrolled: all blocks are alike."""
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def asked(name: str) -> Workload:
    model = MODELS[name](**FEW.get(name, {}))
    return of_loss(model.loss, CLIPPED, model.params, model.batch)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient_with_its_elements(name: str) -> None:
    question = asked(name)
    graph, found = question.graph, gradients(question)
    parameters = {path for path, role in question.roles.items() if role == "parameter"}
    if name == "lora":  # the base is not trained
        parameters = {path for path in parameters if "base" not in path}
    assert set(found.values()) == parameters
    makers = {index: made for made in graph.operators for index in made.outputs}
    lengths = {loop.length for loop in graph.loops} | {1}
    for index, path in found.items():
        assert region(makers[index]) == "backward"
        whole = graph.values[graph.inputs[path]].size
        assert graph.values[index].size <= whole
        if makers[index].primitive == "dot_general" and "qkv" not in path:
            assert whole // graph.values[index].size in lengths


def test_a_step_of_the_user_names_its_state() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.square(batch["x"] @ params["w"] + params["b"][None]).mean()

        value, made = jax.value_and_grad(loss)(state["params"])
        updates, after = CLIPPED.update(made, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": after}, value

    shapes = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "b": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    with jax.numpy_dtype_promotion("standard"):
        state = {"params": shapes, "optimizer": jax.eval_shape(CLIPPED.init, shapes)}
        batch = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
        found = gradients(of_step(step, state, batch))
    assert sorted(found.values()) == ["state/params/b", "state/params/w"]


@pytest.mark.parametrize("name", ["gpt_scan", "mlp"])
def test_sums_of_gradients_are_named_in_a_plan(name: str) -> None:
    pins = {"replica": 8, "zero": 0}
    plan = decide(asked(name), Cluster.parse("8xH100"), pins).plan
    sums = [one for one in plan.collectives if one.kind == "all_reduce"]
    named = [one for one in sums if one.where.startswith("gradient of params/")]
    total = sum(one.num_bytes * one.trips for one in sums)
    assert sum(one.num_bytes * one.trips for one in named) > 0.99 * total
    if name == "mlp":
        assert any(one.where.startswith("gradient of ") for one in plan.dearest)


def test_equal_collectives_of_layers_share_a_row() -> None:
    found = [
        Collective(
            kind="all_gather", axes=("fsdp",), num_bytes=size, trips=2, where=where,
            seconds=0.5,
        )
        for where, size in (
            ("params/layers/0/up", 8), ("params/layers/1/up", 8),
            ("params/layers/2/up", 9), ("params/layers/1/down", 8),
        )
    ]  # fmt: skip
    rows = [(one.where, one.num_bytes, one.trips) for one in layers_together(found)]
    up, down = "params/layers/*/up", "params/layers/*/down"
    assert rows == [(up, 8, 4), (up, 9, 2), (down, 8, 2)]
    plan = decide(asked("mlp"), Cluster.parse("8xH100")).plan
    *_, total = collectives(replace(plan, collectives=tuple(found))).rows
    assert total[4:6] == ("66 B", "2 s")
