"""A config with a plan: chosen once, recorded, replayed, run as planned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dtft.checkpoint.state import tree
from dtft.config.experiment import Experiment, MeshConfig
from dtft.config.loading import ConfigError
from dtft.parallel.plan_shardings import mesh_of
from dtft.parallel.planning.auto import asked_of
from dtft.parallel.planning.calibration_log import past_run
from dtft.parallel.planning.choice import PlanChoice, choose
from dtft.parallel.planning.planned_experiment import planned_mesh
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.calibration import read_log
from dtft.planner.plan import Knobs, Plan
from dtft.planner.report.text import step_text
from dtft.planner.search.decision import decide
from dtft.planner.workload import Workload, of_loss
from dtft.train.loop import run, train_step_of
from dtft.train.single_process import LocalRuntime
from tests.support.plans import plan_of
from tests.support.tiny_experiment import MemoryRuntime, tiny


def planned(
    experiment: Experiment, mesh: Mapping[str, int], knobs: Knobs | None = None
) -> Plan:
    asked = asked_of(experiment)
    return plan_of(asked.params, asked.batch, asked.optimizer, mesh, knobs)


def on(plan: Plan, mesh: Mapping[str, int]) -> Plan:
    """The plan with another mesh, and nothing that is divided over the one before."""
    return replace(plan, mesh=mesh, batch={}, optimizer={})


def two() -> list[Any]:
    return jax.devices()[:2]


def never(*_: Any) -> Plan:
    raise AssertionError("asked to decide")


@pytest.fixture(name="plan", scope="module")
def a_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    experiment = tiny(tmp_path_factory.mktemp("plan"))
    return planned(experiment, {"replica": 2}, Knobs(zero=1))


def test_without_a_plan_the_config_decides(tmp_path: Path) -> None:
    assert choose(tiny(tmp_path), two(), {}, never) is None


def test_auto_is_decided_once_and_replayed(tmp_path: Path, plan: Plan) -> None:
    experiment = tiny(tmp_path, plan="auto")
    first = choose(experiment, two(), {}, lambda *_: plan)
    assert first is not None
    assert first.plan == plan
    items = json.loads(json.dumps(first.items))  # as a checkpoint keeps them
    again = choose(experiment, two(), items, never)
    assert again is not None
    assert again.items == first.items


def test_a_plan_file_is_replayed_though_it_has_gone(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    experiment = tiny(tmp_path, plan=str(path))
    first = choose(experiment, two(), {}, never)
    assert first is not None
    path.unlink()
    again = choose(experiment, two(), first.items, never)
    assert again is not None
    assert again.plan == plan


def test_another_wish_is_decided_anew(tmp_path: Path, plan: Plan) -> None:
    items = PlanChoice(asked="old.json", plan=plan).items
    other = replace(plan, mesh={"replica": 4})
    devices = jax.devices()[:4]
    found = choose(tiny(tmp_path, plan="auto"), devices, items, lambda *_: other)
    assert found is not None
    assert found.plan.mesh == {"replica": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{}", "schema=None"),
        ("{", "plan='.*': "),
        ('{"mesh": {}, "mesh": {}}', "plan='.*plan.json': .* key mesh stands more"),
    ],
)
def test_what_is_no_plan_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        choose(tiny(tmp_path, plan=str(path)), two(), {}, never)


def test_a_plan_and_a_mesh_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plan='auto' decides the mesh"):
        tiny(tmp_path, plan="auto", mesh=MeshConfig(fsdp=2))


def test_auto_is_decided_again_for_another_number_of_devices(
    tmp_path: Path, plan: Plan
) -> None:
    items = PlanChoice(asked="auto", plan=plan).items
    other = on(plan, {"fsdp": 3})
    asked = []

    def decide(_: Experiment, devices: Sequence[Any]) -> Plan:
        asked.append(len(devices))
        return other

    experiment, three = tiny(tmp_path, plan="auto"), jax.devices()[:3]
    found = choose(experiment, three, items, decide)
    assert found is not None
    assert asked == [3]
    assert found.plan == other
    assert "plan auto (decided again for 3 devices; was replica=2): fsdp=3" in (
        found.words
    )
    again = choose(experiment, three, found.items, never)
    assert again is not None
    assert again.plan.mesh == {"fsdp": 3}
    assert not again.before


def test_a_files_plan_gets_more_replicas_or_is_refused(
    tmp_path: Path, plan: Plan
) -> None:
    experiment = tiny(tmp_path, plan="x.json")
    items = PlanChoice(
        asked="x.json", plan=replace(plan, mesh={"replica": 2, "tensor": 2})
    )
    found = choose(experiment, jax.devices(), items.items, never)
    assert found is not None
    assert found.plan.mesh == {"replica": 4, "tensor": 2}
    assert "(replicas changed for 8 devices; was replica=2 x tensor=2)" in found.words
    assert dict(planned_mesh(found.plan, jax.devices()).shape) == {
        "stage": 1, "fsdp": 1, "replica": 4, "tensor": 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="does not fit 3 devices. Allowed: multiples"):
        choose(experiment, jax.devices()[:3], items.items, never)
    alone = PlanChoice(asked="x.json", plan=on(plan, {"fsdp": 2})).items
    with pytest.raises(ConfigError, match=r"fsdp=2 does not fit 8 devices.*Allowed: 2"):
        choose(experiment, jax.devices(), alone, never)


def test_a_files_plan_that_lost_replicas_gets_them_back(
    tmp_path: Path, plan: Plan
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(replace(on(plan, {"replica": 3}), cluster="3x1xcpu").to_json())
    experiment = tiny(tmp_path, plan=str(path))
    items: Mapping[str, Any] = {}
    for count in (3, 1, 3, 2):
        found = choose(experiment, jax.devices()[:count], items, never)
        assert found is not None and found.plan.mesh == {"replica": count}
        items = found.items


def test_a_plan_that_leaves_a_device_idle_is_taken_and_replayed(
    tmp_path: Path, plan: Plan
) -> None:
    idle, three = replace(plan, mesh={"replica": 2}), jax.devices()[:3]
    experiment = tiny(tmp_path, plan="auto")
    found = choose(experiment, three, {}, lambda *_: idle)
    assert found is not None and found.plan == idle
    assert "plan auto: replica=2 (2 of 3 devices), microbatches 1" in found.words
    assert list(planned_mesh(idle, three).devices.flat) == three[:2]
    assert choose(experiment, three, found.items, never) == found
    with pytest.raises(AssertionError, match="asked to decide"):
        choose(experiment, two(), found.items, never)
    # A file's plan too, on as many devices as it was made for.
    path = tmp_path / "plan.json"
    path.write_text(replace(idle, cluster="3xcpu").to_json())
    found = choose(tiny(tmp_path, plan=str(path)), three, {}, never)
    assert found is not None and found.plan.mesh == {"replica": 2}


def test_no_process_is_left_without_a_device(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(replace(plan, cluster="3xcpu").to_json())
    alone = [SimpleNamespace(process_index=index) for index in range(3)]
    with pytest.raises(ConfigError, match="uses 2 of 3 devices, and each of the 3 pro"):
        choose(tiny(tmp_path, plan=str(path)), alone, {}, never)


def test_auto_takes_what_the_devices_do_not_divide(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, steps=2, plan="auto")
    data = replace(experiment.data, global_batch=7)
    cluster = replace(experiment.cluster, hosts=3)
    experiment = replace(experiment, data=data, cluster=cluster)
    runtime = LocalRuntime(experiment)
    assert run(experiment, runtime).step == 2
    assert runtime.choice is not None
    assert runtime.choice.num_devices == 3


def test_a_batch_that_the_plan_does_not_divide_is_refused(
    tmp_path: Path, plan: Plan
) -> None:
    experiment = tiny(tmp_path, plan="auto")
    batch = replace(experiment.data, global_batch=97)
    three = replace(plan, mesh={"replica": 3}, knobs=Knobs(microbatches=2))
    with pytest.raises(ConfigError, match="not divisible by 6") as caught:
        choose(
            replace(experiment, data=batch),
            jax.devices()[:3],
            {},
            lambda *_: three,
        )
    assert "(the plan's replica, in 2 microbatches)" in str(caught.value)
    assert "Set --data.global_batch 102" in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "knobs"),
    [
        ({"replica": 2, "tensor": 2}, Knobs(microbatches=2, remat="full", zero=1)),
    ],
)
def test_a_planned_run_computes_what_the_config_alone_does(
    tmp_path: Path, mesh: Mapping[str, int], knobs: Knobs
) -> None:
    ends = []
    for name in ("alone", "planned"):
        experiment = tiny(tmp_path / name, steps=2)
        runtime = MemoryRuntime(tmp_path / name)
        if name == "planned":
            runtime.num_devices = 4
            runtime.choice = PlanChoice(
                asked="x", plan=planned(experiment, mesh, knobs)
            )
        ends.append(run(experiment, runtime))
        last = runtime.saved[2][1]
        assert ("plan" in last) == (name == "planned")
    alone, same = (tree.to_paths(jax.device_get(end.state)) for end in ends)
    for path, leaf in alone.items():
        np.testing.assert_allclose(leaf, same[path], rtol=5e-3, atol=3e-5, err_msg=path)
    assert ends[0].summary["test_loss"] == pytest.approx(
        ends[1].summary["test_loss"], rel=1e-3
    )


def test_a_run_writes_its_plan_and_what_a_step_took(
    tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "my_plan.json", tmp_path / "run"
    experiment = tiny(folder, steps=6, plan=str(path))
    known = _question(experiment).fingerprint
    plan = replace(plan, predicted_for="2xcpu by loopback", model_hash=known)
    path.write_text(plan.to_json())
    experiment = replace(experiment, cluster=replace(experiment.cluster, hosts=2))
    first = run(experiment, LocalRuntime(experiment))
    said = (
        f"plan {path}: replica=2, microbatches 1, remat none, zero 1; predicted "
        f"{step_text(plan.prediction)}, {plan.prediction.source}; "
    )
    assert said in capsys.readouterr().out
    assert Plan.from_json((folder / "plan.json").read_text()) == plan
    (past,) = read_log((folder / "plan_times.jsonl").read_text())
    assert past.step_s > 0
    assert past.terms == {"compute": 1.0}
    scaled = replace(plan.prediction, scales={"compute": 2.0})
    mesh = mesh_of(plan.mesh, jax.devices()[:2])
    again = past_run(replace(plan, prediction=scaled), mesh, [1.0])
    assert again is not None and again.terms == {"compute": 0.5}  # before level 2
    assert "replica=2 microbatches=1" in past.plan
    # Resumed, the recorded plan is in force, whatever the file says now.
    path.write_text(replace(plan, knobs=Knobs()).to_json())
    longer = replace(experiment, stop=replace(experiment.stop, steps=8))
    runtime = LocalRuntime(longer)
    assert first.step == 6
    state = train_step_of(longer, runtime).abstract_state
    assert runtime.choice is not None
    assert runtime.choice.plan.knobs == Knobs(zero=1)
    moments = jax.tree.leaves(state["opt_state"])
    assert any("replica" in leaf.sharding.spec for leaf in moments)  # as it says


def _question(experiment: Experiment) -> Workload:
    asked = asked_of(experiment)
    return of_loss(asked.loss, asked.optimizer, asked.params, asked.batch)


def test_nothing_is_predicted_or_learnt_of_another_batch(tmp_path: Path) -> None:
    path, folder = tmp_path / "plan.json", tmp_path / "run"
    experiment = tiny(folder, steps=4, plan=str(path))
    made = decide(_question(experiment), Cluster.parse("1xcpu")).plan
    path.write_text(made.to_json())
    larger = 2 * experiment.data.global_batch
    other = replace(experiment, data=replace(experiment.data, global_batch=larger))
    for asked, same in ((experiment, True), (other, False)):
        choice = choose(asked, jax.devices()[:1], {})
        assert choice is not None and choice.is_predicted == same
        assert ("batch or model changed since" in choice.words) != same


@pytest.mark.parametrize("cluster", ["2xh100", "1xcpu", "2x1xcpu", "2xcpu"])
def test_nothing_is_predicted_or_learnt_of_other_devices(
    tmp_path: Path, cluster: str
) -> None:
    """Of a file: two GPUs, one CPU device, two of a process each, or these of one."""
    path, folder = tmp_path / "plan.json", tmp_path / "run"
    experiment = tiny(folder, steps=4, plan=str(path))
    experiment = replace(experiment, cluster=replace(experiment.cluster, hosts=2))
    pin = min(2, Cluster.parse(cluster).num_devices)
    made = decide(_question(experiment), Cluster.parse(cluster), {"replica": pin}).plan
    path.write_text(made.to_json())
    runtime = LocalRuntime(experiment)
    run(experiment, runtime)
    choice = runtime.choice
    assert choice is not None and choice.here == "2xcpu by loopback"
    same = cluster == "2xcpu"
    assert choice.is_predicted == same == (folder / "plan_times.jsonl").exists()
    assert ("; predicted " in choice.words) == same
    known = {"2xh100": " by NVLink", "1xcpu": ", replicas, batch or model changed"}
    told = known.get(cluster, " by loopback, run on")
    assert same or f"made for {cluster}{told}" in choice.words
    assert same or "run on 2xcpu by loopback: no prediction" in choice.words
