"""Devices that a step has no use for are left idle, and never make it slower."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster
from dtft.planner.report.lints import batch as batch_lints
from dtft.planner.report.replan import why_not
from dtft.planner.search.decision import decide
from dtft.planner.search.enumerate import worthwhile
from dtft.planner.workload import of_loss
from tests.support import reading
from tests.support.deciding_zoo import mlp


def test_more_devices_never_make_the_plan_slower() -> None:
    model = mlp(batch=512, widths=(1024, 4096, 256))
    plans = [decide(model, Cluster.parse(f"{n}xcpu")).plan for n in range(1, 17)]
    for fewer, more in itertools.pairwise(plans):
        assert more.prediction.step_s <= fewer.prediction.step_s
    assert [math.prod(plan.mesh.values()) for plan in plans[3:]] == (
        [4] * 4 + [8] * 8 + [16]
    )


@pytest.mark.parametrize("words", ["15xcpu", "3x5xcpu", "3x8xh100"])
def test_no_axis_is_there_for_devices_that_are_of_no_use(words: str) -> None:
    found = decide(mlp(batch=512, widths=(1024, 4096, 256)), Cluster.parse(words))
    assert not found.idle
    used, there = math.prod(found.plan.mesh.values()), found.cluster.num_devices
    assert used < there
    (text,) = (one.text for one in batch_lints(found) if "devices are used" in one.text)
    assert f"{used} of {there} devices are used" in text
    assert f"(all {there} take " in text


def test_what_fewer_devices_would_take_has_a_price() -> None:
    found = decide(mlp(batch=512, widths=(1024, 4096, 256)), Cluster.parse("15xcpu"))
    text = why_not(found, replica=8)
    assert "replica=8 is possible and slower: the best plan with it (replica=8," in text
    alone = decide(found.question, Cluster.parse("8xcpu"), {"replica": 8}).plan
    errors = (one.prediction.relative_error for one in (found.plan, alone))
    shown = wording.seconds(alone.prediction.step_s, max(errors))
    assert reading.rows(text, "Step time")["step"][1] == shown
    assert "8 of 15 devices are used (replica=8)" in text
    assert "replica=16 is not possible" in why_not(found, replica=16)


def test_devices_of_several_processes_are_all_used() -> None:
    model = mlp(batch=512, widths=(1024, 4096, 256))
    plan = decide(model, Cluster.parse("3x5xcpu"), whole=True).plan
    assert math.prod(plan.mesh.values()) == 15


def test_numbers_that_a_batch_and_the_weights_can_share() -> None:
    model = mlp(batch=96, widths=(1024, 4096, 256))
    assert worthwhile(model, {}, 100, 96) == (96, 64, 48)
    assert worthwhile(model, {"replica": 3}, 100, 96) == (96, 48, 24)
    assert worthwhile(model, {"replica": 101}, 100, 96) == ()


def test_an_axis_that_divides_nearly_nothing_counts_as_idle() -> None:
    # Along time a recurrent model is one loop; the second dim of its targets is all
    # that `sequence` divides: the last layer.
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ params["x"] + h @ params["h"]), None

        first = jnp.zeros((batch["x"].shape[0], 64))
        last, _ = jax.lax.scan(cell, first, batch["x"].transpose(1, 0, 2))
        return jnp.mean((last @ params["out"] - batch["y"]) ** 2)

    params = {"x": shape((32, 64)), "h": shape((64, 64)), "out": shape((64, 8))}
    batch = {"x": shape((64, 100, 32)), "y": shape((64, 8))}
    model = of_loss(loss, optax.adamw(1e-3), params, batch)
    found = decide(model, Cluster.parse("8xh100"))
    assert all(use.work > 0.99 for use in found.plan.axes.values())
    other = decide(model, Cluster.parse("8xh100"), {"sequence": 4})
    assert 0 < other.plan.axes["sequence"].work < 0.01 and other.idle
