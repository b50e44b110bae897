"""Pipeline stages in plans that cannot be run, and optimizer state in host memory."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dtft.planner.cluster.topology import Cluster
from dtft.planner.memory.peak import RESERVE
from dtft.planner.plan import Plan
from dtft.planner.report import text
from dtft.planner.report.replan import why_not
from dtft.planner.search.decision import Decision, best_of, decide
from dtft.planner.workload import Workload, of_loss
from tests.support.deciding_zoo import with_memory
from tests.support.zoo import MODELS


@pytest.fixture(scope="module")
def question() -> Workload:
    model = MODELS["gpt"](
        batch=16, time=512, width=1024, layers=8, heads=8, vocabulary=4096
    )
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def staged(question: Workload, **pins: object) -> Decision:
    fixed = {"replica": 4, "stage": 4, "microbatches": 4, "remat": "none"}
    return best_of(question, Cluster.parse("2x8xH100"), {**fixed, **pins}, what_if=True)


def test_stages_share_the_layers_and_wait_for_one_another(question: Workload) -> None:
    alone = best_of(
        question,
        Cluster.parse("4xH100"),
        {"replica": 4, "microbatches": 4, "remat": "none"},
    ).plan
    plan = staged(question, virtual_stages=1).plan
    assert not plan.runnable
    terms, whole = plan.prediction.terms, alone.prediction.terms
    assert terms["compute"] == pytest.approx(whole["compute"] / 4, rel=1e-6)
    # 4 microbatches on 4 equal stages: 3 of 7 rounds; head and sending make it more.
    busy = sum(terms[name] for name in ("compute", "collectives", "launch"))
    assert 3 / 4 * busy < terms["bubble"] < 1.5 * busy
    layers = 8 * 12 * 1024**2 * 4
    assert plan.memory["parameters"] == pytest.approx(
        layers / 4 + 4096 * 1024 * 4, rel=0.05
    )
    (sent,) = (one for one in plan.collectives if one.kind == "permute")
    assert sent.num_bytes == 16 * 512 * 1024 * 4 // 4 // 4  # replicas, microbatches
    assert sent.trips == 2 * 4


@pytest.mark.parametrize("stages", [4, 8])
def test_stages_share_scanned_layers_too(stages: int) -> None:
    sizes = {"batch": 16, "time": 512, "width": 1024, "layers": 8, "heads": 8}
    model = MODELS["gpt_scan"](**sizes, vocabulary=4096)
    asked = of_loss(model.loss, model.optimizer, model.params, model.batch)
    pins = {"microbatches": 4, "remat": "none", "replica": 16 // stages}
    alone = best_of(asked, Cluster.parse(f"{16 // stages}xH100"), pins).plan
    plan = staged(asked, **pins, stage=stages, virtual_stages=1).plan
    terms, whole = plan.prediction.terms, alone.prediction.terms
    assert terms["compute"] == pytest.approx(whole["compute"] / stages, rel=1e-6)
    # Fill and drain of 4 microbatches; head and sending make it more.
    busy = terms["compute"] + terms["launch"]
    assert (stages - 1) / 4 * busy < terms["bubble"] < stages / 2 * busy
    assert _sent(plan) == 2 * 4


def test_stages_have_their_own_layers_of_weights_that_are_scaled() -> None:
    sizes = {"batch": 16, "time": 8, "width": 16, "layers": 4, "heads": 2}
    model = MODELS["gpt_scan"](**sizes, vocabulary=64)

    def loss(params, batch):
        layers = jax.tree.map(lambda w: w * 0.5, params["layers"])
        return model.loss({**params, "layers": layers}, batch)

    whole, scaled = (
        staged(of_loss(one, model.optimizer, model.params, model.batch)).plan
        for one in (model.loss, loss)
    )
    assert scaled.memory["parameters"] == whole.memory["parameters"]
    assert _sent(scaled) == _sent(whole)


def test_chunks_wait_less_and_send_more(question: Workload) -> None:
    plain, chunks = (staged(question, virtual_stages=n).plan for n in (1, 2))
    assert chunks.prediction.terms["bubble"] < plain.prediction.terms["bubble"]
    assert _sent(chunks) == 2 * _sent(plain)
    assert chunks.memory["activations"] >= plain.memory["activations"]
    taken = min(plain, chunks, key=lambda plan: plan.prediction.step_s)
    assert staged(question).plan.knobs == taken.knobs
    assert "virtual_stages=2" in text.explain(chunks)


def _sent(plan: Plan) -> int:
    return sum(one.trips for one in plan.collectives if one.kind == "permute")


def test_gpipe_keeps_all_microbatches(question: Workload) -> None:
    pins = {"microbatches": 2, "virtual_stages": 1, "stage": 2, "replica": 8}
    ours, gpipe = (
        staged(question, **pins, schedule=name).plan for name in ("1f1b", "gpipe")
    )
    assert gpipe.memory == ours.memory  # as many microbatches as stages
    pins["microbatches"] = 1
    assert staged(question, **pins).plan.prediction.terms["bubble"] > 0
    with pytest.raises(ValueError, match="1f1b, gpipe, circular"):
        staged(question, schedule="zigzag")


def test_stages_have_the_layers_that_are_pinned(question: Workload) -> None:
    equal, alike, uneven = (
        staged(question, **pins)
        for pins in (
            {"virtual_stages": 1},
            {"stage_layers": (2, 2, 2, 2)},
            {"stage_layers": [1, 3, 3, 1]},
        )
    )
    assert alike.plan.prediction.terms == equal.plan.prediction.terms
    assert alike.plan.memory == equal.plan.memory
    terms, whole = (one.plan.prediction.terms for one in (uneven, equal))
    assert terms["bubble"] > whole["bubble"]  # the longest stage makes others wait
    assert terms["compute"] == pytest.approx(whole["compute"], rel=1e-9)
    assert uneven.plan.knobs.stage_layers == (1, 3, 3, 1)
    assert Plan.from_json(uneven.plan.to_json()) == uneven.plan
    assert "stage_layers=(1, 3, 3, 1)" in text.explain(uneven.plan)
    assert "the plan has it" in why_not(uneven, stage_layers=(1, 3, 3, 1))
    assert "possible and slower" in why_not(equal, stage_layers=(1, 3, 3, 1))


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"stage_layers": (2, 3, 2, 2)}, "has the sum 9, but the step has 8 equal"),
        ({"stage_layers": (4, 2, 2)}, "stage=4 are pinned. Allowed: stage=3"),
        ({"stage_layers": (1,) * 8, "stage": 8}, "stage_layers=.* cannot be met on 16"),
    ],
)
def test_layers_of_stages_that_cannot_be_say_why(
    question: Workload, pins: dict, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        staged(question, **pins)


def test_a_plan_file_has_a_number_of_layers_for_each_stage(question: Workload) -> None:
    plan = staged(question, stage_layers=(1, 3, 3, 1)).plan
    broken = replace(plan, knobs=replace(plan.knobs, stage_layers=(4, 4)))
    said = r"knobs.stage_layers=\[4, 4\]. Allowed: .* each of the 4 stages"
    with pytest.raises(ValueError, match=said):
        Plan.from_json(broken.to_json())


def test_more_microbatches_than_the_search_looks_at_can_be_pinned() -> None:
    model = MODELS["gpt"](
        batch=256, time=64, width=256, layers=2, heads=4, vocabulary=512
    )
    asked = of_loss(model.loss, model.optimizer, model.params, model.batch)
    cluster = Cluster.parse("2xH100")
    plan = best_of(asked, cluster, {"microbatches": 128}).plan
    assert plan.knobs.microbatches == 128 and plan.runnable
    with pytest.raises(ValueError, match="96 does not divide the batch of 256"):
        best_of(asked, cluster, {"microbatches": 96})
    with pytest.raises(ValueError, match="at most 256 are possible here"):
        best_of(asked, cluster, {"microbatches": 512})


def test_without_what_if_there_are_no_stages(question: Workload) -> None:
    found = decide(question, Cluster.parse("2x8xH100"), {"remat": "none"})
    assert "stage" not in found.plan.mesh
    assert "not searched here" in why_not(found, stage=4)
    assert "not searched here" in why_not(found, stage_layers=(2, 2, 2, 2))
    assert Plan.from_json(found.plan.to_json()) == found.plan


def test_state_goes_to_the_host_where_it_has_no_room(question: Workload) -> None:
    pins = {"replica": 8, "microbatches": 2, "remat": "none"}
    cluster = Cluster.parse("8xH100")
    there = best_of(question, cluster, pins).plan
    away = best_of(question, cluster, {**pins, "offload": True}).plan
    assert away.runnable and not there.host
    assert set(away.host) < set(away.optimizer)
    link = cluster.uniform.host_link
    assert link is not None
    least = 2 * away.host_bytes / link.curve.bandwidth * link.shared_by
    took = away.prediction.terms["offload"]
    assert least < took < 1.2 * least
    relief = there.memory["optimizer"] - away.memory["optimizer"]
    assert 0 < relief < away.host_bytes
    assert "rests in host memory" in text.explain(away)
    # Where only the state is too much the search finds it by itself.
    needed = there.memory_bytes - there.memory["reserve"] - relief / 2
    tight = with_memory("8xH100", round(needed / (1 - RESERVE)))
    found = best_of(question, tight, pins).plan
    assert found.knobs.offload and found.fits
    assert found.host == away.host


def test_a_host_without_room_takes_nothing(question: Workload) -> None:
    pool = replace(Cluster.parse("8xH100").uniform, host_memory_bytes=2**20)
    pins = {"replica": 8, "remat": "none", "offload": True}
    plan = best_of(question, Cluster(pools=(pool,)), pins)
    priced = plan.found["none"].priced
    assert np.all(priced.host > priced.host_capacity) and not priced.fits.any()
    pool = replace(pool, host_link=None)
    with pytest.raises(ValueError, match="no link to the host"):
        best_of(question, Cluster(pools=(pool,)), pins)


def test_virtual_stages_that_cannot_be_say_which_can(question: Workload) -> None:
    with pytest.raises(
        ValueError, match=r"virtual_stages=5 cannot be met.*Allowed"
    ) as e:
        decide(question, Cluster.parse("8xh100"), {"virtual_stages": 5}, what_if=True)
    allowed = str(e.value).rpartition(": ")[2].removesuffix(".").split(", ")
    for number in map(int, allowed):
        pins = {"virtual_stages": number}
        plan = decide(question, Cluster.parse("8xh100"), pins, what_if=True).plan
        assert plan.knobs.virtual_stages == number
