"""Compute seconds by kind of work, the dearest operators, and MFU."""

import json
from typing import Any

import optax
import pytest

from dtft.planner.cluster import Cluster
from dtft.planner.plan import Plan
from dtft.planner.report.text import explain
from dtft.planner.search import decide
from dtft.planner.workload import of_loss
from tests.support.zoo import MODELS, gpt_scan

SMALL: Any = {"time": 256, "width": 128, "layers": 4, "heads": 4, "vocabulary": 512}


def planned(cluster: str, remat: bool = False) -> Plan:
    model = gpt_scan(64, remat=remat, **SMALL)
    asked = of_loss(model.loss, optax.sgd(1e-3), model.params, model.batch)
    return decide(asked, Cluster.parse(cluster), {"remat": "none"}).plan


@pytest.mark.parametrize("cluster", ["8xH100", "8xcpu"])
def test_kinds_of_work_add_up_to_compute(cluster: str) -> None:
    plan = planned(cluster)
    compute_s = plan.prediction.terms["compute"]
    assert sum(plan.compute.values()) == pytest.approx(compute_s)
    assert set(plan.compute) == {"products", "attention", "element-wise", "other"}
    ranked = [one.seconds for one in plan.dearest]
    assert len(ranked) == 5 and ranked == sorted(ranked, reverse=True)
    assert 0 < sum(ranked) < compute_s
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("name", "sizes"), [("mlp", {}), ("resnet", {"depths": (1, 1, 1, 1)}), ("rnn", {})]
)
def test_models_without_attention_have_none(name: str, sizes: dict[str, Any]) -> None:
    model = MODELS[name](**sizes)
    asked = of_loss(model.loss, optax.sgd(1e-3), model.params, model.batch)
    plan = decide(asked, Cluster.parse("8xA100")).plan
    assert "attention" not in plan.compute
    assert plan.compute["products"] > 0


def test_products_are_named_by_their_parameters() -> None:
    model = MODELS["mlp"]()
    asked = of_loss(model.loss, optax.sgd(1e-3), model.params, model.batch)
    places = [one.where for one in decide(asked, Cluster.parse("a100")).plan.dearest]
    assert "params/1/kernel, forward" in places


def test_utilization_is_that_of_the_model() -> None:
    """Work that is done again is no work of the model."""
    once, again = planned("8xH100"), planned("8xH100", remat=True)
    assert again.at_peak_s == pytest.approx(once.at_peak_s)
    assert once.mfu == pytest.approx(once.at_peak_s / once.prediction.step_s)
    flops = 3 * gpt_scan(64, **SMALL).forward_flops  # and element-wise operations
    assert once.at_peak_s < flops / (8 * 494.7e12) < 1.5 * once.at_peak_s
    assert "examples per second; MFU" in explain(once)


def test_a_plan_of_an_older_file_has_no_split() -> None:
    fields = json.loads(planned("8xH100").to_json())
    for name in ("compute", "dearest", "examples", "at_peak_s"):
        del fields[name]
    old = Plan.from_json(json.dumps(fields))
    assert old.mfu == 0.0 and not old.compute
    text = explain(old)
    assert "MFU" not in text and "kind of work" not in text
