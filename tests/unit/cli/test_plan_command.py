"""`dtft plan`: what is printed and written is the plan of the config."""

import json
from pathlib import Path

import pytest

from dtft.cli.dispatch import main
from dtft.cli.plan import pins_of
from dtft.planner import wording
from dtft.planner.plan import Plan
from tests.support import reading
from tests.support.deciding_zoo import count_plans


def test_a_plan_is_printed_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = count_plans(monkeypatch)
    paths = {name: tmp_path / f"plan.{name}" for name in ("json", "html")}
    flags = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    command = ["plan", "digits_cnn", "--cluster", "2x4xH100", "--pin", "replica=8"]
    assert main([*command, *flags, "--data.global_batch", "64"]) == 0
    printed = capsys.readouterr().out
    plan = Plan.from_json(paths["json"].read_text())
    assert plan.mesh == {"replica": 8} and plan.cluster == "2x4xh100"
    assert printed.startswith("Plan for 2x4xh100: replica=8; microbatches=1")
    rows = reading.rows(printed, "Step time")
    found = plan.prediction
    assert rows["step"][0] == wording.seconds(found.step_s, found.relative_error)
    assert "What a small change would save" in printed
    assert f"written: {paths['json']}" in printed
    assert paths["html"].read_text().startswith("<!DOCTYPE html>")
    assert json.loads(paths["json"].read_text())["batch"]["label"] == [["replica"]]
    # Printed and written, each thing is planned once.
    assert set(counted.values()) == {1} and len(counted) > 1


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        pytest.param(1, "cpu", marks=pytest.mark.more),
        (2, "2xcpu by loopback"),
    ],
)
def test_without_a_cluster_it_is_the_plan_of_a_run_here(
    hosts: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, flags = tmp_path / "plan.json", ["--cluster.hosts", str(hosts)]
    assert main(["plan", "digits_cnn", "--json", str(path), *flags]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    told = " (of `dtft launch`, a process for each host: --cluster 2x1xcpu)"
    assert first == f"for the devices of `dtft train` here: {words}" + (
        told if hosts == 2 else ""
    )
    assert second.startswith(f"Plan for {words.split()[0]}: ")
    planned = Plan.from_json(path.read_text())
    path.unlink()  # the run writes its own there
    flags += ["--plan", "auto", "--stop.steps", "1", "--log.run_dir", str(tmp_path)]
    assert main(["train", "digits_cnn", *flags]) == 0
    assert "; predicted " in capsys.readouterr().out
    assert Plan.from_json(path.read_text()) == planned
    assert planned.predicted_for == words


def test_without_a_cluster_a_configs_calibration_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = tmp_path / "mine.py", tmp_path / "c.json"
    config.write_text(
        "from dataclasses import replace\n"
        "from dtft.config.loading import parse_experiment\n"
        "def config():\n"
        f"    kept = dict(plan='auto', calibration={str(file)!r})\n"
        "    return replace(parse_experiment('digits_cnn', []), **kept)\n"
    )
    assert main(["plan", str(config)]) == 2
    assert f"calibration {file} cannot be read" in capsys.readouterr().err
    assert main(["plan", str(config), "--cluster", "h100"]) == 0  # it is of others


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster", "8xH1000"], "Known: a100"),
        (["--cluster", "8xH100", "--pin", "tensor"], "a pin is NAME=VALUE"),
        (
            ["--cluster", "8xH100", "--pin", "tensor=3"],
            "3 does not divide 8 devices",
        ),
        (["--cluster", "8xH100", "--pin", "tensr=3"], "Allowed: replica"),
        (["--pin", "cluster=8xa100"], "cluster is not a knob"),
        (["--pin", "trial=2"], "trial is not a knob"),
        (["--pin", "zero=1", "--pin", "zero=3"], "zero is pinned twice"),
        (["--html", "/nowhere/r.html"], "--html /nowhere/r.html: no file can be"),
        (["--json", "/tmp"], "Allowed: the path of a file in a folder that exists"),
        (["--pin", "offload=maybe"], "Allowed: offload=true, offload=false"),
        (["--html", "o.x", "--json", "./o.x"], "--html o.x is the file of --json, too"),
        (["--pin", "=2"], "a pin is NAME=VALUE"),
        (["--pin", "tp=2"], "Did you mean 'tensor'"),
        (["--cluster", "8xH100", "--optim.learning_rat", "1"], "learning_rat"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["plan", "digits_cnn", *flags]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert said in capsys.readouterr().err


def test_pins_are_numbers_words_or_an_order() -> None:
    assert pins_of([]) == {}
    assert pins_of(["zero=3", "order=replica,tensor"]) == {
        "zero": 3, "order": ("replica", "tensor"),
    }  # fmt: skip


def test_a_table_of_layouts_is_another_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "predict", "--help"])
    assert "ROWS.csv" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--what-if" in capsys.readouterr().out


def test_a_table_that_is_not_there_is_refused_and_so_is_a_folder_for_the_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = tmp_path / "rows.csv"
    there.write_text("gpus\n8\n")
    for rows, out, said in (
        ("/nowhere/r.csv", tmp_path / "o.csv", "ROWS.csv /nowhere/r.csv cannot be"),
        (there, "/nowhere/o.csv", "--out /nowhere/o.csv: no file can be written"),
        (there, tmp_path / "o.csv", "the table has no column heads"),
    ):
        flags = ["--cluster", "a100", "--out", str(out)]
        assert main(["plan", "predict", str(rows), *flags]) == 2
        assert said in capsys.readouterr().err
