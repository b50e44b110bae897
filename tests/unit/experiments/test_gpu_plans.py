"""What `experiments/gpu_plans.py` and `gpu_elementwise.py` measure and compare."""

import json
import sys
from dataclasses import replace
from typing import Any

import gpu_elementwise
import gpu_plans
import gpu_steps
import jax
import pytest

from dtft.parallel.planning import in_turns
from dtft.planner.workload import of_loss

SMALL = gpu_steps.Case(
    name="small", width=64, layers=2, heads=2, length=32, batch=8, vocabulary=100
)


def given() -> dict[str, Any]:
    params, batch = gpu_steps.arrays(SMALL)[0], gpu_steps.tokens_of(SMALL)
    loss = gpu_steps.loss_of(SMALL, cudnn=False)
    optimizer = gpu_steps.optimizer()
    return {"loss": loss, "optimizer": optimizer, "params": params, "batch": batch}


def test_every_policy_is_run_and_the_best_five() -> None:
    cluster = gpu_plans.cluster_of("NVIDIA H100 80GB HBM3")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = gpu_plans.plans(of_loss(**given()), cluster)
    times = [plan.prediction.step_s for plan in found.values()]
    assert times == sorted(times) and len(found) > gpu_plans.BEST
    run = gpu_plans.to_run(found)
    assert run[: gpu_plans.BEST] == list(found.values())[: gpu_plans.BEST]
    assert {plan.knobs.remat for plan in run} == {"none", "dots", "full"}


def test_plans_are_measured_where_jax_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plans, "models", lambda: {"GPT": given()})
    monkeypatch.setattr(gpu_plans, "BEST", 1)
    monkeypatch.setattr(gpu_plans, "in_turns", lambda some: in_turns(some, 2, 0.01))
    cluster = gpu_plans.cluster_of("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_plans, "cluster_of", lambda _: cluster)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = gpu_plans.measure()
    assert {one.remat for one in made} == {"none", "dots", "full"}
    assert all(0 < one.step_s < 60 for one in made)


def test_the_verdict_is_of_the_plan_predicted_fastest() -> None:
    cluster = gpu_plans.cluster_of("NVIDIA H100 80GB HBM3")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        best, other, *_ = gpu_plans.plans(of_loss(**given()), cluster).values()
    one = gpu_plans.Measurement(
        model="GPT", microbatches=1, remat="none", turns_s=(2.0, 9.0, 2.2),
        device="NVIDIA H100 80GB HBM3", jax="0",
    )  # fmt: skip
    rows = [
        gpu_plans.Row(measured=one, plan=best),
        gpu_plans.Row(measured=replace(one, turns_s=(1.1,)), plan=other),
    ]
    text = gpu_plans.verdict("GPT", "H100", rows)
    assert "takes 2.000 times the time of the fastest" in text
    assert "of 1 pairs more than 5% apart 0% are in the right order" in text
    assert [line[-1] for line in gpu_plans.cells(rows)] == ["2.000", "1.000"]


def test_element_wise_work_is_measured_and_counted() -> None:
    works = gpu_elementwise.works()
    table = map(json.loads, gpu_elementwise.TABLE.read_text().splitlines())
    assert [row["work"] for row in table] == list(works)
    work = works["layer norm"]
    small = tuple(
        jax.ShapeDtypeStruct(tuple(min(n, 8) for n in each.shape), each.dtype)
        for each in work.arguments
    )
    work = replace(work, arguments=small)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        seconds, size = gpu_elementwise.measured(work)
        assert 0 < seconds < 1 and size > 0
        assert work.counted_bytes() == 2 * 2 * 8**3 + 4 * 8


@pytest.mark.parametrize("script", [gpu_plans, gpu_elementwise])
def test_measuring_needs_a_gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--measure"])
    with pytest.raises(SystemExit, match="error: this needs a GPU"):
        script.main()
