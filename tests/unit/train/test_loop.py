"""The loop: same result however it is divided, interrupted or resumed."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.config.experiment import CheckpointConfig, MeshConfig, StopConfig
from dtft.config.loading import ConfigError
from dtft.models.base import CNNConfig
from dtft.train.loop import run
from dtft.train.stop import NonFinite, Plateau, observe
from tests.support.tiny_experiment import MemoryRuntime, as_bytes, tiny


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(replica=2, fsdp=2, tensor=2),
    ],
)
def test_eight_devices_train_as_one(tmp_path: Path, mesh: MeshConfig) -> None:
    one, eight = tmp_path / "one", tmp_path / "eight"
    for folder, devices, sizes in ((one, 1, MeshConfig()), (eight, 8, mesh)):
        folder.mkdir()
        run(tiny(folder, mesh=sizes), MemoryRuntime(folder, num_devices=devices))
    np.testing.assert_allclose(_losses(eight), _losses(one), rtol=1e-3)
    accuracy = [
        json.loads((f / "summary.json").read_text())["test_loss"] for f in (one, eight)
    ]
    assert accuracy[0] == pytest.approx(accuracy[1], rel=1e-3)


def test_calls_come_in_the_promised_order(tmp_path: Path) -> None:
    runtime = MemoryRuntime(tmp_path, interval=2)
    checkpoint = CheckpointConfig(interval=2, storage_interval=2)
    run(tiny(tmp_path, steps=3, checkpoint=checkpoint), runtime)
    boundary = ["await_turn {0}", "finished_step {0}", "save {0}"]
    assert runtime.calls == [
        "dispatched 1",
        "dispatched 2",
        *(call.format(2) for call in boundary),
        "dispatched 3",
        *(call.format(3) for call in boundary),
        "finish 3",
    ]


def test_a_boundary_that_is_not_taken_is_not_waited_for(tmp_path: Path) -> None:
    runtime = MemoryRuntime(tmp_path, every=3)
    result = run(tiny(tmp_path, steps=5), runtime)
    assert runtime.calls == [
        *(f"dispatched {step}" for step in (1, 2, 3)),
        *("await_turn 3", "finished_step 3", "save 3"),
        *("dispatched 4", "dispatched 5"),
        *("await_turn 5", "finished_step 5", "save 5"),
        "finish 5",
    ]
    each = MemoryRuntime(tmp_path / "each")
    (tmp_path / "each").mkdir()
    whole = run(tiny(tmp_path / "each", steps=5), each)
    assert as_bytes(result.state) == as_bytes(whole.state)
    assert runtime.saved[5][1] == each.saved[5][1]


@pytest.mark.parametrize("stop_at", [-1, 2, 4])
def test_a_run_ends_at_the_same_step_however_few_boundaries_are_waited_for(
    tmp_path: Path, stop_at: int
) -> None:
    stop = StopConfig(steps=20, metric="loss", patience=3, min_delta=0.05)
    ends = []
    for every in (1, 7):
        folder = tmp_path / str(every)
        folder.mkdir()
        runtime = MemoryRuntime(folder, every=every, stop_at=stop_at)
        result = run(tiny(folder, stop=stop), runtime)
        ends.append((result.step, result.summary, runtime.saved[result.step][1]))
    assert ends[0] == ends[1] and ends[0][0] < 20


def test_every_phase_is_told_and_compiling_is_one(tmp_path: Path) -> None:
    runtime = MemoryRuntime(tmp_path, interval=2)
    checkpoint = CheckpointConfig(interval=2, storage_interval=2)
    run(tiny(tmp_path, steps=2, checkpoint=checkpoint), runtime)
    told = [phase for phase, _ in itertools.groupby(runtime.phases)]
    assert told == [
        *[("compile", 0), ("data", 1), ("compile", 1), ("step", 1)],
        *[("data", 2), ("step", 2), ("data", 3)],
        *[("save", 2), ("step", 2), ("save", 2), ("step", 2)],
        *[("evaluate", 2), ("compile", 2), ("evaluate", 2), ("save", 2)],
    ]


def test_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    fsdp = 4
    experiment = tiny(tmp_path, mesh=MeshConfig(replica=1, fsdp=fsdp))
    whole = MemoryRuntime(tmp_path, num_devices=fsdp)
    run(experiment, whole)
    state, items = whole.saved[3]
    assert items["position"] == 3 * 16 and json.loads(json.dumps(items)) == items
    resumed = MemoryRuntime(tmp_path, fsdp, restored=(3, state, items))
    run(experiment, resumed)
    assert sorted(resumed.saved) == [4, 5, 6]
    assert as_bytes(resumed.saved[6][0]) == as_bytes(whole.saved[6][0])
    assert resumed.saved[6][1] == whole.saved[6][1]


@pytest.mark.parametrize("interval", [1, 4])
def test_a_plateau_ends_where_the_interval_does_not_matter(
    tmp_path: Path, interval: int
) -> None:
    checkpoint = CheckpointConfig(interval="auto", max_interval=8)
    stop = StopConfig(steps=20, metric="loss", patience=2, min_delta=100.0)
    runtime = MemoryRuntime(tmp_path, interval=interval)
    result = run(tiny(tmp_path, stop=stop, checkpoint=checkpoint), runtime)
    assert result.step == 8 and result.summary["completed"]
    assert max(runtime.saved) == 8


def test_stops_when_asked_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tiny(tmp_path), MemoryRuntime(tmp_path, stop_at=2))
    assert result.summary == {"step": 2, "completed": False}
    *_, head, resume = capsys.readouterr().out.splitlines()
    assert (
        head == "stopped early at step 2" and resume == "resume with: dtft train tiny"
    )


def test_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    first = MemoryRuntime(tmp_path)
    run(tiny(tmp_path, steps=2), first)
    again = MemoryRuntime(tmp_path, restored=(2, *first.saved[2]))
    result = run(tiny(tmp_path, steps=2), again)
    assert again.calls == ["finish 2"] and result.summary["completed"]


def test_other_data_is_refused(tmp_path: Path) -> None:
    first = MemoryRuntime(tmp_path)
    run(tiny(tmp_path, steps=1), first)
    state, items = first.saved[1]
    other = {**items, "data_identity": "other"}
    with pytest.raises(ConfigError, match="data_identity is 'other'"):
        run(tiny(tmp_path), MemoryRuntime(tmp_path, restored=(1, state, other)))


def test_plateau_ends_the_run_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopConfig(steps=50, metric="loss", patience=2, min_delta=1e9)
    whole = MemoryRuntime(tmp_path)
    result = run(tiny(tmp_path, stop=stop), whole)
    assert result.step == 3 and result.summary["completed"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("converged (loss gained nothing in 2 steps) at step 3")
    resumed = MemoryRuntime(tmp_path, restored=(2, *whole.saved[2]))
    assert run(tiny(tmp_path, stop=stop), resumed).step == 3
    assert resumed.saved[3][1] == whole.saved[3][1]


def test_a_metric_that_was_not_watched_before_gets_its_patience(
    tmp_path: Path,
) -> None:
    before = MemoryRuntime(tmp_path)
    run(tiny(tmp_path, steps=4), before)
    stop = StopConfig(steps=50, metric="loss", patience=2, min_delta=1e9)
    resumed = MemoryRuntime(tmp_path, restored=(4, *before.saved[4]))
    assert run(tiny(tmp_path, stop=stop), resumed).step == 7  # the first value is of 5


def test_unknown_stop_metric_is_an_error() -> None:
    stop = StopConfig(steps=2, metric="los")
    with pytest.raises(ValueError, match=r"stop.metric='los' .* accuracy.*loss"):
        observe(Plateau(), stop, 1, {"accuracy": 0.1, "loss": 1.0})


class _Exploding(CNNConfig):
    def loss(self, model: Any, batch: Any) -> Any:
        losses, metrics = super().loss(model, batch)
        return jnp.where(jnp.sum(losses) < 36.5, jnp.nan, losses), metrics


def test_nan_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    runtime = MemoryRuntime(tmp_path)
    model = _Exploding(channels=(4, 8), hidden=16)
    with pytest.raises(NonFinite, match=r"step \d+: loss is nan"):
        run(tiny(tmp_path, steps=200, model=model), runtime)
    state, _ = runtime.saved[max(runtime.saved)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_samples_log_names_every_row(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, steps=3)
    experiment = replace(experiment, log=replace(experiment.log, sample_ids=True))
    run(experiment, MemoryRuntime(tmp_path, num_devices=4, generation=2, attempt=1))
    lines = (tmp_path / "samples" / "slot0-g2-a1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [row for record in records for row in record["rows"]] == list(range(48))
    assert len({i for record in records for i in record["ids"]}) == 48


def test_plateau_follows_the_better_side() -> None:
    config = StopConfig(metric="accuracy", mode="max", patience=2)
    plateau = Plateau()
    for step, value in enumerate([0.1, 0.5, 0.4], 1):
        values = {"loss": 1.0, "accuracy": value}
        plateau = observe(plateau, config, step, values)
    assert plateau == Plateau(best=0.5, best_step=2)
    assert not plateau.converged(config, 3) and plateau.converged(config, 4)
    assert Plateau.from_items(json.loads(json.dumps(plateau.to_items()))) == plateau
