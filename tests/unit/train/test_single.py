"""`dtft train`: storage, resume, and what it refuses."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dtft.checkpoint.storage import StorageTier
from dtft.config.experiment import Experiment
from dtft.config.loading import ConfigError
from dtft.train.loop import Result, run
from dtft.train.run_directory import only_run_in
from dtft.train.single_process import (
    LocalRuntime,
    UnreadableCheckpoint,
    resume_command,
    train,
)
from tests.support.tiny_experiment import as_bytes, tiny


def _train(experiment: Experiment) -> Result:
    return run(experiment, LocalRuntime(experiment, "dtft train tiny"))


def _steps(experiment: Experiment, steps: int) -> Experiment:
    return replace(experiment, stop=replace(experiment.stop, steps=steps))


def test_resume_from_storage_is_bit_identical(tmp_path: Path) -> None:
    whole = _train(tiny(tmp_path / "whole"))
    parts = tiny(tmp_path / "parts")
    _train(_steps(parts, 3))
    resumed = _train(parts)
    assert as_bytes(resumed.state) == as_bytes(whole.state)
    assert resumed.summary == whole.summary
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3, 4, 6]


def _stored_in(experiment: Experiment, storage: str) -> Experiment:
    checkpoint = replace(experiment.checkpoint, storage_directory=storage)
    return replace(experiment, checkpoint=checkpoint)


def test_a_run_resumes_from_a_storage_directory_of_its_own(tmp_path: Path) -> None:
    whole = _train(tiny(tmp_path / "whole"))
    parts = _stored_in(tiny(tmp_path / "run"), str(tmp_path / "storage"))
    _train(_steps(parts, 3))
    assert (tmp_path / "storage" / "3").is_dir()
    assert not (tmp_path / "run" / "checkpoints").exists()
    with only_run_in(tmp_path / "run", tmp_path / "storage"):  # as `dtft train` does
        assert as_bytes(_train(parts).state) == as_bytes(whole.state)


def test_a_run_whose_checkpoints_are_elsewhere_does_not_begin_again(
    tmp_path: Path,
) -> None:
    run, new = tmp_path / "run", str(tmp_path / "new")
    _train(tiny(run, steps=2))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="has no checkpoint, and those of"):
        LocalRuntime(_stored_in(tiny(run), new))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert not Path(new).exists()
    (run / "checkpoints").rename(new)
    assert _train(_stored_in(tiny(run), new)).summary["step"] == 6


def test_a_storage_directory_must_be_writable_and_absolute(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "storage")
    with pytest.raises(ConfigError, match=r"checkpoint\.storage_directory=.*written"):
        LocalRuntime(_stored_in(tiny(tmp_path / "run"), path))
    with pytest.raises(ValueError, match="storage_directory='x' is not an absolute"):
        _stored_in(tiny(tmp_path), "x")


def test_another_config_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, steps=2)
    _train(experiment)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        LocalRuntime(replace(experiment, seed=1))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_unreadable_checkpoint_is_an_error(tmp_path: Path) -> None:
    _train(tiny(tmp_path, steps=2))
    for path in (tmp_path / "checkpoints" / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UnreadableCheckpoint, match="step 2 .* Nothing was changed"):
        _train(tiny(tmp_path))


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP,) * 3])
def test_signal_saves_and_ends(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    experiment = tiny(tmp_path, steps=10**6)
    runtime = LocalRuntime(experiment)
    dispatched = runtime.dispatched

    def strike(step: int) -> None:
        dispatched(step)
        for number in numbers if step == 3 else ():
            os.kill(os.getpid(), number)

    runtime.dispatched = strike
    with runtime.signals():
        result = run(experiment, runtime)
    assert result.summary == {"step": 3, "completed": False}
    assert (tmp_path / "checkpoints" / "3").is_dir()


def test_resume_command_names_the_run_directory_once(tmp_path: Path) -> None:
    plain = resume_command("x", ["--stop.steps", "9"], str(tmp_path))
    assert plain == f"dtft train x --stop.steps 9 --log.run_dir {tmp_path}"
    given = [f"--log.run-dir={tmp_path}"]
    assert resume_command("x", given, "") == f"dtft train x {given[0]}"


def test_mesh_that_does_not_fit_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--mesh.fsdp", "5", "--log.run_dir", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as caught:
        train("digits_cnn", arguments)
    assert caught.value.code == 2
    assert "does not fit 3 devices" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


CRASHING = """
import dataclasses
from configs.digits_cnn import config as digits
from tests.support.crashing_model import Crashing

def config():
    return dataclasses.replace(digits(), model=Crashing(channels=(4, 8), hidden=16))
"""


def test_a_crash_names_the_step_the_last_checkpoint_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    run_dir = tmp_path / "run"
    overrides = ["--stop.steps", "3", "--log.run_dir", str(run_dir)]
    assert train(str(tmp_path / "crashing.py"), overrides) == 1
    told = capsys.readouterr().err
    assert "in loss" in told and "Traceback" in told
    last = told.splitlines()[-1]
    assert "error: NameError: name 'momentun' is not defined (in phase" in last
    assert "of step 1); no checkpoint was stored; resume with: dtft train" in last


def test_a_crash_beside_storage_that_fails_says_so_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_: StorageTier) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    runtime = LocalRuntime(tiny(tmp_path), "dtft train tiny")
    monkeypatch.setattr(StorageTier, "latest_step", stale)
    text = runtime.crash_text()
    assert "cannot be listed ([Errno 116] Stale file handle); resume with: " in text
    assert text.endswith("dtft train tiny")
