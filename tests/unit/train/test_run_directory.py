"""A run directory that can be written to and has one run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtft.checkpoint.storage import alone_in, storage_steps
from dtft.config.loading import ConfigError
from dtft.train.run_directory import make_directory, only_run_in


def test_a_run_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory.*Set --log\.run_dir"):
        make_directory(tmp_path / "file" / "run")


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with only_run_in(directory):
        (directory / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=r"has not ended.*--log\.run_dir"):
            with only_run_in(directory):
                raise AssertionError("entered")
    with only_run_in(directory):
        assert (directory / "metrics.jsonl").exists()


def test_runs_of_two_directories_do_not_share_storage(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    with only_run_in(tmp_path / "a", storage):
        with pytest.raises(ConfigError, match=r"--checkpoint\.storage_directory to a"):
            with only_run_in(tmp_path / "b", storage):
                raise AssertionError("entered")
        with alone_in(storage, 0.0):  # as an exporter of the run does
            (storage / "5").mkdir()
    assert storage_steps(storage) == (5,)
    with only_run_in(tmp_path / "b", storage):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]


def test_a_run_with_storage_inside_of_its_directory_has_one_lock(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with only_run_in(run, run / "checkpoints"):
        assert not (run / "checkpoints").exists()


def test_a_run_of_several_runs_locks_a_mark_and_leaves_its_directory_to_them(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with only_run_in(run, mark=".soak"):
        with pytest.raises(ConfigError, match=f"job={run} belongs to a run.*--job to"):
            with only_run_in(run, mark=".soak", flag="job"):
                raise AssertionError("entered")
        with only_run_in(run):
            (run / "metrics.jsonl").touch()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_a_refused_run_leaves_no_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refused"):
        with only_run_in(tmp_path / "run"):
            raise ConfigError("refused")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_lets_go(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from dtft.train.run_directory import only_run_in\n"
        "with only_run_in(Path(sys.argv[1])): print('in', flush=True); time.sleep(50)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match="has not ended"):
            with only_run_in(tmp_path):
                pass
        os.kill(other.pid, signal.SIGKILL)
    with only_run_in(tmp_path):
        pass
