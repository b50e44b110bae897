"""SIGHUP ends what SIGTERM ends, unless it is ignored (nohup); the memory is freed."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dtft.elastic.host.memory_directory import (
    make_memory_directory,
    remove_memory_directory,
)
from dtft.elastic.stop_signals import SIGNALS, heard_signals, presses
from dtft.elastic.store.embedded import EmbeddedEtcd


def serving(
    tmp_path: Path,
    etcd: EmbeddedEtcd,
    before: Callable[[], object] = lambda: None,
) -> subprocess.Popen[str]:
    """A `dtft agent --serve-only` that has said that it serves."""
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "memory").mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dtft.cli", "agent", "--serve-only"),
            *("--store", etcd.address, "--job", "j", "--host-name", "a"),
            *("--secret-file", str(tmp_path / "secret")),
            *("--arena_directory", str(tmp_path / "memory")),
            *("--run-dir", str(tmp_path / "run")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=before,
    )
    assert process.stdout is not None
    assert "serves job j" in process.stdout.readline()
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_an_agent_leaves_and_frees_its_memory(
    tmp_path: Path, etcd: EmbeddedEtcd, number: int
) -> None:
    process = serving(tmp_path, etcd)
    assert list((tmp_path / "memory").iterdir())
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert not list((tmp_path / "memory").iterdir())


def test_an_agent_under_nohup_stays(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    process = serving(
        tmp_path, etcd, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_killed_agents_memory_is_swept_by_the_next_one(
    tmp_path: Path, etcd: EmbeddedEtcd
) -> None:
    process = serving(tmp_path, etcd)
    process.kill()
    process.communicate(timeout=20)
    memory = tmp_path / "memory"
    (left,) = memory.iterdir()
    left.rename(memory / "dtft-former-job-a")
    make_memory_directory(memory / "dtft-k-b")
    assert [it.name for it in memory.iterdir()] == ["dtft-k-b"]
    remove_memory_directory(memory / "dtft-k-b")


def test_what_counts_as_being_asked() -> None:
    interrupt, end, hang_up = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    cases: Sequence[tuple[list[tuple[float, int]], int]] = [
        ([], 0),
        ([(0.0, interrupt), (0.1, interrupt)], 1),  # a shell and a wrapper
        ([(0.0, end), (0.05, hang_up)], 1),  # as systemd sends them
        ([(0.0, interrupt), (1.0, interrupt), (2.0, end)], 3),
        ([(0.0, interrupt), (9.0, hang_up)], 1),  # the terminal is closed then
    ]
    assert [presses(signals) for signals, _ in cases] == [count for _, count in cases]


def test_only_an_ignored_sighup_stays_ignored() -> None:
    assert heard_signals() == SIGNALS
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heard_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
