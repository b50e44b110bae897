"""Runs of former code resume: run directories that commit 12caba6 has written.

`trained` is of `dtft train`, `launched` of two hosts and `--mesh.fsdp 2`; both ended at
step 20. `expected.json` has what that commit read there, and the losses with which it
resumed `trained`.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.storage.directory import load_numpy
from dtft.config.loading import ConfigError, parse_experiment
from dtft.train.loop import run
from dtft.train.single_process import LocalRuntime
from tests.support.archives import unpack

ARCHIVE = Path(__file__).parent / "data" / "runs_of_12caba6.tar.xz"
OPTIONS = (
    *("--checkpoint.storage_interval", "10", "--log.every", "1"),
    *("--log.tensorboard", "False", "--data.global_batch", "32"),
    *("--model.channels", "4", "8", "--model.hidden", "8"),
)
OF = {
    "trained": ("--cluster.hosts", "1"),
    "launched": ("--cluster.hosts", "2", "--mesh.fsdp", "2"),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    unpack(ARCHIVE, tmp_path)
    return tmp_path / "runs_of_12caba6"


def expected(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "expected.json").read_text())


@pytest.mark.parametrize("name", OF)
def test_every_bit_of_a_former_checkpoint_is_read(name: str, runs: Path) -> None:
    found = {
        path: [str(it.dtype), list(it.shape), hashlib.sha256(it.tobytes()).hexdigest()]
        for path, it in load_numpy(runs / name / "checkpoints", 20).items()
    }
    assert found == expected(runs)["digests"][name] and len(found) > 20


@pytest.mark.parametrize("name", OF)
def test_a_former_run_resumes_with_its_losses(name: str, runs: Path) -> None:
    where = ("--log.run_dir", str(runs / name), "--stop.steps", "30")
    experiment = parse_experiment("digits_cnn", [*OPTIONS, *OF[name], *where])
    run(experiment, LocalRuntime(experiment))
    lines = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    losses = {str(it["step"]): it["loss"] for it in lines if it["step"] > 20}
    assert losses == pytest.approx(expected(runs)["losses"], rel=1e-5)


def test_another_class_is_refused_by_its_name_of_today(runs: Path) -> None:
    where = ("--log.run_dir", str(runs / "trained"))
    experiment = parse_experiment("digits_shampoo", [*where, "--seed", "0"])
    experiment = replace(experiment, plan="")
    with pytest.raises(ConfigError, match=r"optim\.class: max_adabelief -> shampoo"):
        LocalRuntime(experiment)
