"""What a plan says that its program communicates is what the compiled program does.

One small program for each rule of XLA's partitioner that is not plain from the
operators; `experiments/plan_bytes.py` does the same with whole models.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dtft._jax_internals import compile_module
from dtft.parallel.planning.verify import candidate_of
from dtft.planner.aot.check import agreements
from dtft.planner.aot.compile import LoweredStep
from dtft.planner.aot.hlo import collectives
from dtft.planner.aot.worker import _CPU_OPTIONS
from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Plan
from dtft.planner.search import write_plan
from dtft.planner.search.enumerate import enumerate_space
from dtft.planner.search.search import PlanSearch
from dtft.planner.search.space import Choices
from dtft.planner.workload import Workload, of_loss, of_step
from tests.support.zoo_parts import ADAM, array, ints

CLUSTER = Cluster.parse("8xH100")
TOKENS = {"x": ints(64, 16)}
TIED = {"embed": array(64, 32), "up": array(32, 64), "down": array(64, 32)}


def tied(params: Any, batch: Any) -> jax.Array:
    """One table for the lookup and for the head."""
    x = params["embed"][batch["x"]]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(jnp.square(x @ params["embed"].T))


def images(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(lax.conv(batch["x"], params["kernel"], (1, 1), "SAME") ** 2)


def chosen(params: Any, batch: Any) -> jax.Array:
    """The two best of every row, as a layer of experts finds them."""
    return jnp.mean(lax.top_k(batch["x"] @ params["gate"], 2)[0])


def recurrent(params: Any, batch: Any) -> jax.Array:
    """Weights that every turn of a scan reads as they are."""

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ params["in"] + h @ params["hidden"]), None

    rows = batch["x"].swapaxes(0, 1)
    return jnp.mean(lax.scan(cell, jnp.zeros_like(rows[0]), rows)[0] @ params["out"])


CASES: Mapping[str, tuple[Callable[..., Any], Any, Any, Mapping[str, int]]] = {
    "tied": (tied, TIED, TOKENS, {"replica": 2, "fsdp": 4, "zero": 3}),
    "lookup": (tied, TIED, TOKENS, {"fsdp": 4, "tensor": 2, "zero": 3}),
    "convolution": (
        images,
        {"kernel": array(16, 8, 3, 3)},
        {"x": array(64, 8, 8, 8)},
        {"replica": 2, "fsdp": 4, "zero": 3},
    ),
    "top_k": (
        chosen,
        {"gate": array(16, 8)},
        {"x": array(64, 16, 16)},
        {"replica": 8},
    ),
    "recurrent": (
        recurrent,
        {"in": array(32, 32), "hidden": array(32, 32), "out": array(32, 8)},
        {"x": array(256, 4, 32)},
        {"fsdp": 8, "zero": 3},
    ),
}


def plan_of(question: Workload, pins: Mapping[str, int]) -> Plan:
    """The only plan that has these pins, for a compiler without reduce-scatter."""
    axes = [axis for axis in pins if axis != "zero"]
    space = enumerate_space(
        Choices(
            num_devices=math.prod(pins[axis] for axis in axes),
            batch=question.batch_size,
            divides=dict.fromkeys(axes, ()),
            zero=(pins.get("zero", 0),),
        ),
        pins,
    )
    search = PlanSearch(question, CLUSTER.uniform, scatters=False)
    priced = search.price(space)
    return write_plan.as_plan(search, priced, int(priced.ranking[0]), CLUSTER)


def differences(plan: Plan, candidate: LoweredStep) -> dict[Any, tuple[int, int]]:
    """Bytes predicted and found, where these differ."""
    program = compile_module(candidate.module, jax.devices(), _CPU_OPTIONS)
    found = collectives(program.hlo_modules()[0].to_string(), plan.mesh)
    compiled: Any = SimpleNamespace(collectives=found)
    return {
        (one.kind, one.axes): (one.predicted_bytes, one.found_bytes)
        for one in agreements(plan.collectives, compiled)
        if one.predicted_bytes != one.found_bytes
    }


@pytest.mark.parametrize("name", CASES)
def test_a_loss_communicates_as_planned(name: str) -> None:
    loss, params, batch, pins = CASES[name]
    plan = plan_of(of_loss(loss, ADAM, params, batch), pins)
    given = {"loss": loss, "optimizer": ADAM, "params": params, "batch": batch}
    candidate = candidate_of(plan, given)
    assert plan.collectives
    assert differences(plan, candidate) == {}


def test_a_users_step_communicates_as_planned() -> None:
    """Gradients are summed over `fsdp`, cut, and their parts over `replica`."""
    params = {"up": array(3, 32, 64), "down": array(3, 64, 32)}
    batch = {"x": array(256, 4, 32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jnp.square(lax.scan(layer, batch["x"], params)[0]))

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    pins = {"replica": 2, "fsdp": 4, "zero": 3}
    plan = plan_of(of_step(step, params, batch), pins)
    given = {"step": step, "state": params, "batch": batch}
    candidate = candidate_of(plan, given)
    assert plan.collectives
    assert differences(plan, candidate) == {}
