"""Drills: when a finished undisturbed run is used again."""

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
