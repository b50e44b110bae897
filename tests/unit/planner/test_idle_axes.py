"""Meshes whose devices repeat work: what they drop, and what is said of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Plan
from dtft.planner.report.text import explain
from dtft.planner.search.decision import Decision, best_of
from dtft.planner.search.ranking import IDLE
from dtft.planner.search.tensor_sharding import NEARLY_NONE
from dtft.planner.workload import Workload, of_loss

PINS: list[dict[str, Any]] = [
    *({"remat": remat} for remat in ("none", "dots", "full")),
    *({axis: 2} for axis in ("replica", "fsdp", "tensor")),
    {"replica": 4},
    {"microbatches": 2},
    {"zero": 3},
    {"replica": 2, "tensor": 2},
]


def layers(
    widths: list[int], rows: int, activation: Any = jnp.tanh, targets: bool = True
) -> Workload:
    """Matmuls with an activation after each."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = activation(x @ w)
        return jnp.mean((x - batch.get("y", 0.0)) ** 2)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = [array(*sides) for sides in zip(widths, widths[1:], strict=False)]
    batch = {"x": array(rows, widths[0])}
    if targets:
        batch["y"] = array(rows, widths[-1])
    return of_loss(loss, optax.adam(1e-3), params, batch)


def is_idle(plan: Plan) -> bool:
    return any(use.work < NEARLY_NONE for use in plan.axes.values())


def check_no_pin_is_faster(question: Workload, cluster: Cluster) -> None:
    free = best_of(question, cluster)
    for pins in PINS:
        try:
            pinned = best_of(question, cluster, pins, fewer="never")
        except ValueError:
            continue
        if pinned.plan.fits and not (is_idle(pinned.plan) and not free.idle):
            assert free.plan.prediction.step_s <= pinned.plan.prediction.step_s


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu])
@pytest.mark.parametrize("targets", [True, False])
def test_a_cheaper_idle_axis_does_not_drop_its_mesh(
    activation: Any, targets: bool
) -> None:
    question = layers([1024] * 5, 1024, activation, targets)
    cluster = Cluster.parse("8xh100")
    plan = best_of(question, cluster).plan
    assert plan.mesh["tensor"] > 1 and plan.axes["tensor"].work > NEARLY_NONE
    across = best_of(question, cluster, {"replica": 8}).plan
    assert plan.prediction.step_s < 0.9 * across.prediction.step_s
    check_no_pin_is_faster(question, cluster)


@pytest.mark.more
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    widths=st.lists(st.sampled_from([31, 96, 256, 1024]), min_size=2, max_size=4),
    rows=st.sampled_from([8, 48, 1024]),
    cluster=st.sampled_from(["4xh100", "2x2xv100", "4xcpu", "2x4xa100"]),
)
def test_no_pin_gives_a_faster_plan(widths: list[int], rows: int, cluster: str) -> None:
    check_no_pin_is_faster(layers(widths, rows), Cluster.parse(cluster))


def odd() -> Decision:
    """No axis but those of the batch can divide these widths."""
    return best_of(layers([1021] * 5, 1024), Cluster.parse("8xh100"))


def test_explain_names_the_faster_mesh_with_idle_devices() -> None:
    found = odd()
    (one,) = found.plan.left_out
    assert not found.idle and one.fits
    assert one.step_s < found.plan.prediction.step_s < IDLE * one.step_s
    (line,) = (row for row in explain(found.plan).splitlines() if "left out:" in row)
    pins: dict[str, Any] = dict(one.mesh)
    pinned = best_of(found.question, found.cluster, pins).plan
    assert pinned.prediction.step_s == pytest.approx(one.step_s)
    for axis, size in pinned.mesh.items():
        assert f"{axis}={size}" in line


def test_a_plan_file_keeps_what_was_left_out() -> None:
    plan = odd().plan
    assert Plan.from_json(plan.to_json()) == plan


def test_nothing_is_left_out_where_no_idle_mesh_is_faster() -> None:
    plan = best_of(layers([1024] * 3, 2**18), Cluster.parse("8xh100")).plan
    assert not plan.left_out and "left out:" not in explain(plan)
