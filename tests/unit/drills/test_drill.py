"""Drills: which runs are used again, and which directories may be deleted."""

from pathlib import Path

import pytest

from dtft.config.loading import load_experiment, to_json
from dtft.drills import drill


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
