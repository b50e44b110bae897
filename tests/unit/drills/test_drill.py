"""Drills: which runs are used again, which directories may be deleted, and the end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtft.cli.commands import DrillCommand
from dtft.cli.dispatch import main
from dtft.config.loading import load_experiment, to_json
from dtft.drills import drill
from dtft.elastic.faults import FaultInjector
from dtft.elastic.local_cluster import LocalCluster
from dtft.train import only_run_in


@pytest.mark.parametrize(("every", "usable"), [("1", True), ("10", False)])
def test_a_control_without_the_losses_that_are_compared_is_run_again(
    tmp_path: Path, every: str, usable: bool
) -> None:
    words = ["--log.every", every, "--log.sample_ids", "True"]
    experiment = load_experiment("digits_cnn", words)
    (tmp_path / "config.json").write_text(to_json(experiment))
    (tmp_path / "summary.json").write_text("{}")
    assert drill._usable(tmp_path, experiment, every_loss=True) is usable
    assert drill._usable(tmp_path, experiment, every_loss=False)
    other = load_experiment("digits_cnn", ["--optim.learning_rate", "0.5"])
    assert not drill._usable(tmp_path, other, every_loss=False)


def test_a_control_without_the_samples_that_are_compared_is_run_again(
    tmp_path: Path,
) -> None:
    experiment = load_experiment("digits_cnn", [])
    (tmp_path / "config.json").write_text(to_json(experiment))
    (tmp_path / "summary.json").write_text("{}")
    assert not drill._usable(tmp_path, experiment, every_loss=False)


def test_only_what_a_drill_made_is_deleted(tmp_path: Path) -> None:
    drill.check_deletable(tmp_path / "missing", "--control")
    drill.check_deletable(tmp_path, "--control")  # empty
    (tmp_path / "thesis.tex").write_text("of years")
    with pytest.raises(ValueError, match="--control: .* no drill made it"):
        drill.check_deletable(tmp_path, "--control")
    with pytest.raises(ValueError, match="no drill made it"):
        drill.check_deletable(tmp_path / "thesis.tex", "--control")
    drill._fresh(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").touch()
    drill.check_deletable(tmp_path / "run", "--run-dir")


@pytest.mark.parametrize("samples", ["True", "False"])
def test_a_run_of_an_older_drill_is_told_from_a_users(
    tmp_path: Path, samples: str
) -> None:
    words = ["--log.sample_ids", samples, "--log.tensorboard", "False"]
    (tmp_path / "config.json").write_text(to_json(load_experiment("digits_cnn", words)))
    if samples == "True":
        drill.check_deletable(tmp_path, "--run-dir")
        return
    with pytest.raises(ValueError, match="--run-dir: .* no drill made it"):
        drill.check_deletable(tmp_path, "--run-dir")


@pytest.mark.parametrize(
    ("flag", "key"), [("--run-dir", "log.run_dir"), ("--control", "control")]
)
def test_a_drill_deletes_nothing_of_one_that_has_not_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    key: str,
) -> None:
    monkeypatch.setattr(drill, "_run", None)  # nothing is run
    used = tmp_path / "used"
    control = used if flag == "--control" else used / "control"
    control.mkdir(parents=True)
    (control / drill._MADE).touch()
    (control / "metrics.jsonl").touch()
    words = ["--run-dir", str(tmp_path / "mine"), flag, str(used)]
    with only_run_in(used):
        assert main(["drill", "digits_cnn", *words]) == 2
    told = capsys.readouterr()
    assert f"{key}={used} belongs to a run that has not ended" in told.err
    assert told.out == "" and (control / "metrics.jsonl").exists()


def test_a_drill_deletes_nothing_of_its_faulted_run_that_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "_run", None)  # nothing is run
    monkeypatch.setattr(drill, "_usable", lambda *_, **__: True)
    faulted = tmp_path / "faulted"
    faulted.mkdir()
    (faulted / drill._MADE).touch()
    (faulted / "metrics.jsonl").touch()
    with only_run_in(faulted):
        assert main(["drill", "digits_cnn", "--run-dir", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert f"log.run_dir={faulted} belongs to a run that has not ended" in told.err
    assert (faulted / "metrics.jsonl").exists()


def test_a_control_that_another_drill_has_just_made_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = iter([False, True])
    ran: list[Path] = []
    monkeypatch.setattr(drill, "_usable", lambda *_, **__: next(usable))

    def run(experiment: Any, arguments: Any, directory: Path, *_: Any) -> None:
        ran.append(directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(drill, "_run", run)
    assert main(["drill", "digits_cnn", "--run-dir", str(tmp_path / "run")]) == 130
    assert ran == [tmp_path / "run" / "faulted"]


def test_an_interrupted_run_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def part(*names: str) -> Any:
        methods = {name: lambda name=name: done.append(name) for name in names}
        return lambda *_, **__: SimpleNamespace(**methods)

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(drill, "LocalCluster", part("start", "close"))
    monkeypatch.setattr(drill, "FaultInjector", part("start", "stop", "undo_mounts"))
    monkeypatch.setattr(drill, "_wait", interrupted)
    experiment = load_experiment("digits_cnn", [])
    options = DrillCommand(config="digits_cnn")
    with pytest.raises(KeyboardInterrupt):
        drill._run(experiment, ["digits_cnn"], tmp_path / "run", 0, [], options)
    assert done == ["start", "start", "stop", "close", "undo_mounts"]


@pytest.mark.parametrize(
    ("events", "held", "waits"),
    [
        ([], [], True),  # all hosts were killed
        ([], ["a"], True),  # the last one that runs is stopped for ever
        ([{"event": "end"}], [], False),
    ],
)
def test_a_drill_waits_for_hosts_that_are_due(
    events: list[dict[str, str]], held: list[str], waits: bool
) -> None:
    due = iter([1, 1, 0])
    asked: list[int] = []

    class Injector:
        held = frozenset[str]()

        @property
        def restarts_due(self) -> int:
            asked.append(next(due))
            return asked[-1]

    injector = Injector()
    injector.held = frozenset(held)
    cluster = SimpleNamespace(
        agents=dict.fromkeys(held),
        wait=lambda limit_s: not held,
        poll=dict,
        events=lambda: events,
    )
    assert drill._wait(cast(LocalCluster, cluster), cast(FaultInjector, injector), 20.0)
    assert asked == ([1, 1, 0] if waits else [1])


def test_a_drill_waits_no_longer_than_its_deadline() -> None:
    cluster = SimpleNamespace(agents={}, wait=bool, poll=dict, events=list)
    injector = SimpleNamespace(held=frozenset(), restarts_due=1)
    found = drill._wait(cast(LocalCluster, cluster), cast(FaultInjector, injector), 0.3)
    assert found is False
