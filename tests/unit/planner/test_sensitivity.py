"""The effect of another machine is that of planning for it."""

from dataclasses import replace

import pytest

from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster, Pool
from dtft.planner.plan import Plan
from dtft.planner.report.hardware_sensitivity import (
    Effect,
    effects,
    sensitivity_section,
)
from dtft.planner.search.decision import Decision, best_of, decide
from dtft.planner.search.ranking import IDLE
from dtft.planner.search.tensor_sharding import NEARLY_NONE
from tests.support.deciding_zoo import mlp


@pytest.fixture(scope="module")
def found() -> tuple[Decision, tuple[Effect, ...]]:
    decision = decide(mlp(), Cluster.parse("2x4xH100"))
    return decision, effects(decision)


@pytest.fixture(scope="module")
def rows(found: tuple[Decision, tuple[Effect, ...]]) -> dict[str, tuple[str, ...]]:
    decision, changed = found
    return {row[0]: row for row in sensitivity_section(decision.plan, changed).rows}


def test_every_kind_of_resource_is_changed(rows: dict[str, tuple[str, ...]]) -> None:
    assert {
        "none", "NVLink: twice the bandwidth", "twice the memory", "twice the peak",
        "twice the memory's bandwidth", "twice the hosts (4)", "half the hosts (1)",
    } <= rows.keys()  # fmt: skip
    assert any("InfiniBand" in change for change in rows)


def test_numbers_are_those_of_planning_again(
    found: tuple[Decision, tuple[Effect, ...]], rows: dict[str, tuple[str, ...]]
) -> None:
    decision, changed = found
    for change, pool in (
        ("twice the peak", _faster(decision.cluster.uniform)),
        ("half the hosts (1)", Cluster.parse("4xH100").uniform),
    ):
        again = best_of(
            decision.question, Cluster(pools=(pool,))
        ).plan.prediction.step_s
        here = decision.plan.prediction.step_s
        error = decision.plan.prediction.relative_error
        (effect,) = (one for one in changed if one.change == change)
        assert effect.plan is not None
        assert effect.plan.prediction.step_s == again
        assert rows[change][1:4] == (
            wording.seconds(again, error),
            wording.signed(wording.seconds(again - here, error)),
            wording.change(again, here, error),
        )


def test_no_faster_part_makes_the_plan_slower(
    found: tuple[Decision, tuple[Effect, ...]],
) -> None:
    decision, changed = found
    for effect in changed:
        if "hosts" not in effect.change:  # so small a model gains nothing from more
            assert effect.plan is not None
            assert worth_s(effect.plan) <= worth_s(decision.plan) * 1.0001


def worth_s(plan: Plan) -> float:
    """Seconds by which plans are ranked."""
    idle = any(use.work < NEARLY_NONE for use in plan.axes.values())
    return plan.prediction.step_s * (IDLE if idle else 1.0)


def test_what_has_no_plan_says_why() -> None:
    tight = decide(mlp(), Cluster.parse("4xH100"), {"replica": 4})
    rows = sensitivity_section(tight.plan, effects(tight)).rows
    halved = next(row for row in rows if row[0].startswith("half"))
    assert "4 does not divide 2 devices" in halved[-1]


def _faster(pool: Pool) -> Pool:
    peaks = {dtype: 2 * peak for dtype, peak in pool.device.peak_flops.items()}
    return replace(pool, device=replace(pool.device, peak_flops=peaks))
