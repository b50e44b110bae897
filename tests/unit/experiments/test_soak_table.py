"""The table and the figure of a soak, from the records of `dtft soak`."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtft.cli.dispatch import read
from dtft.config import parse_experiment
from dtft.parallel import check_experiment
from experiments import soak
from experiments.soak import HEADER, JOBS, drawn, failures, pending, row


def record(**changes: Any) -> dict[str, Any]:
    recovery = {"rung": 0, "gap_s": 0.25, "steps_lost": 1}
    episode = {
        "seed": 4,
        "faults": ["kill-host:1@20", "kill-leader@30:recovery"],
        "passed": True,
        "why": [],
        "not_over": ["kill-leader@30:recovery"],
        "recoveries": [recovery, recovery | {"rung": 2, "gap_s": None}],
    }
    sums = {
        "episodes": 1,
        "passed": 1,
        "bit_identical": 1,
        "bit_identical_expected": 1,
        "hangs": 0,
        "wrong": 0,
        "recoveries": 2,
        "rungs": {"0": 1, "2": 1},
        "gaps_s": {"0": [0.25, 0.25]},
        "steps_lost": 2,
    }
    return sums | {"records": [episode | changes]}


@pytest.mark.parametrize("name", JOBS)
def test_every_job_is_one_that_can_be_soaked(name: str) -> None:
    command, keys = read(shlex.split(f"soak {shlex.join(JOBS[name])}"))
    words = [*keys, *command.run_flags.keys()]
    check_experiment(parse_experiment(command.config, words))


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = row("replica", record())
    assert len(cells) == len(HEADER)
    assert cells[-4:] == [2, "0: 1, 2: 1", "0.25, 0.25", 2]
    assert row("x", record() | {"gaps_s": {}, "rungs": {}})[-3:-1] == ["-", "-"]


def test_failures_are_told_with_seed_and_reason() -> None:
    assert failures({"replica": record()}) == []
    (line,) = failures({"fsdp": record(passed=False, why=["hung"])})
    assert line == "fsdp, seed 4: kill-host:1@20 kill-leader@30:recovery: hung"


def test_faults_that_were_not_over_are_counted() -> None:
    left = ["kill-host:1@20", "kill-leader@30:recovery"]
    assert pending({"fsdp": record(), "stage": record(not_over=left)}) == (
        "3 of 4 faults had not happened, or were not undone, when the job ended; in 1 "
        "episodes no fault was over."
    )


def test_the_figure_has_gaps_by_rung_and_kinds_of_faults() -> None:
    above, below = drawn({"replica": record()}).axes
    assert above.get_legend_handles_labels()[1] == ["rung 0 (1)"]
    assert len(below.patches) == 2


@pytest.fixture
def soaked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs the study with a `dtft soak` that records one episode; lists its reports."""
    written: list[str] = []
    monkeypatch.setattr(
        soak.report, "write", lambda name, **given: written.append(given["command"])
    )

    def run(*words: str, code: int | None = 0) -> list[str]:
        def soaks(command: list[str], *_: Any) -> int | None:
            after = dict(zip(command, command[1:], strict=False))
            file = Path(after["--run-dir"]) / "soak.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            if code in (0, 1):
                seed = {"seed": int(after["--seed"])}
                file.write_text(json.dumps(record() | seed))
            return code

        monkeypatch.setattr(soak, "run_to_end", soaks)
        soak.main(["--directory", str(tmp_path), *words])
        return written

    return run


def test_a_soak_that_fails_is_shown_and_one_that_cannot_run_ends_the_study(
    soaked: Callable[..., list[str]],
) -> None:
    assert len(soaked("--seed", "1", code=1)) == 1
    for code in (2, None):
        with pytest.raises(SystemExit, match="replica: `dtft soak` ended with an err"):
            soaked("--seed", "1", code=code)
    assert len(soaked("--seed", "1", "--only", "fsdp")) == 2


def test_records_of_another_seed_are_not_shown(
    soaked: Callable[..., list[str]],
) -> None:
    soaked("--seed", "1")
    for words in ([], ["--only", "fsdp"]):
        with pytest.raises(SystemExit, match="--seed 2: .*soak.json is of seed 1. Gi"):
            soaked("--seed", "2", *words)


def test_only_a_job_that_is_known_is_soaked(
    soaked: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        soaked("--only", "replicas")
    assert "invalid choice: 'replicas'" in capsys.readouterr().err
