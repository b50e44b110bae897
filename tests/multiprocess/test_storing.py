"""Which steps reach storage, in what order, and who is told when they do not."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dtft.checkpoint import (
    ReplicatedCheckpointManager,
    ReplicatedOptions,
    StorageFailed,
)
from dtft.checkpoint.storage.exporter_client import ExporterProcess
from tests.support.managers import forget, memory_only

Save = ocp.args.StandardSave


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(8, step)}


def halted(manager: Any) -> int:
    """Stops the exporter of a write under way; its process."""
    process = manager._work._storing._exporter._process.result(timeout=40)
    os.kill(process.pid, signal.SIGSTOP)
    return process.pid


@pytest.mark.timeout(180)
def test_what_is_due_while_a_write_runs_waits_for_it(tmp_path: Path) -> None:
    options = ReplicatedOptions(storage_interval_steps=10, max_to_keep=2)
    manager: Any = ReplicatedCheckpointManager(tmp_path / "steps", options=options)
    assert manager.save(np.int64(0), args=Save(state(0)))
    exporter = halted(manager)
    for step in range(1, 38):
        assert manager.save(jnp.int32(step), args=Save(state(step)))
    os.kill(exporter, signal.SIGCONT)
    manager.wait_until_finished()
    assert sorted(ocp.utils.checkpoint_steps(tmp_path / "steps")) == [0, 30]
    assert manager.all_steps() == [0, 30, 37]
    manager.delete(np.int8(30))
    assert manager.save(30, args=Save(state(31)), force=True)  # due once more
    manager.wait_until_finished()
    assert sorted(ocp.utils.checkpoint_steps(tmp_path / "steps")) == [0, 30]
    assert manager.restore(np.int64(30))["w"].tolist() == [31] * 8
    manager.close()
    with ocp.CheckpointManager(tmp_path / "steps") as stock:
        assert sorted(stock.all_steps()) == [30, 37]
        assert stock.restore(37)["w"].tolist() == [37] * 8


@pytest.mark.timeout(180)
def test_close_writes_the_newest_step_before_what_waits(tmp_path: Path) -> None:
    options = ReplicatedOptions(storage_interval_steps=10, max_to_keep=1)
    manager = ReplicatedCheckpointManager(tmp_path / "steps", options=options)
    manager.save(0, args=Save(state(0)))
    exporter = halted(manager)
    for step in range(1, 16):
        manager.save(step, args=Save(state(step)))
    work: Any = manager._work
    written: list[int] = []
    write = work._storing._write

    def seen(version: Any, going: Any) -> None:
        written.append(version.step)
        write(version, going)

    work._storing._write = seen
    os.kill(exporter, signal.SIGCONT)
    manager.close()
    assert written == [15]  # 10 would only be removed again
    assert ocp.utils.checkpoint_steps(tmp_path / "steps") == [15]


@pytest.mark.timeout(180)
def test_steps_whose_trees_differ_are_all_written(tmp_path: Path) -> None:
    options = ReplicatedOptions(storage_interval_steps=1)
    trees = {
        1: ocp.args.Composite(model=Save(state(1))),
        2: ocp.args.Composite(model=Save({"w": jnp.ones(3), "n": 2})),
        3: ocp.args.Composite(data=ocp.args.JsonSave({"position": 3})),
    }
    with ReplicatedCheckpointManager(tmp_path / "steps", options=options) as manager:
        for step, args in trees.items():
            manager.save(step, args=args)
            manager.wait_until_finished()
    with ReplicatedCheckpointManager(tmp_path / "steps") as again:
        found: dict[int, Any] = {step: again.restore(step) for step in trees}
    assert found[1]["model"]["w"].tolist() == [1] * 8
    assert found[2]["model"]["w"].tolist() == [1] * 3 and found[2]["model"]["n"] == 2
    assert found[3]["data"] == {"position": 3}


@pytest.mark.parametrize(
    "step", [-1, 2**63, True, np.True_, "7", 1.5, np.float32(2), None, jnp.zeros(1)]
)
def test_what_is_no_step_is_refused_by_name(tmp_path: Path, step: Any) -> None:
    manager = memory_only(tmp_path)
    manager.save(0, args=Save(state(0)))
    calls: list[Callable[[Any], Any]] = [
        lambda step: manager.save(step, args=Save(state(0)), force=True),
        manager.should_save,
        manager.reached_preemption,
        manager.item_metadata,
        manager.metrics,
        manager.delete,
    ]
    if step is not None:
        calls += [manager.restore, manager.metadata]
    for call in calls:
        with pytest.raises(ValueError, match=r"step=.*is no step. Allowed: whole"):
            call(step)
    assert manager.all_steps() == [0]
    forget(manager)


def test_a_best_fn_that_raises_refuses_the_step_and_wedges_nothing(
    tmp_path: Path,
) -> None:
    manager = memory_only(
        tmp_path, best_fn=lambda metrics: metrics["acc"], memory_to_keep=2
    )
    manager.save(1, args=Save(state(1)), metrics={"acc": 0.5})
    for metrics in ({}, {"acc": "high"}, {"acc": [1]}):
        with pytest.raises(ValueError, match="best_fn does not take.* of step 2"):
            manager.save(2, args=Save(state(2)), metrics=metrics)
    manager.save(2, args=Save(state(2)))  # without metrics it is never the best
    assert manager.all_steps() == [1, 2] and manager.best_step() == 1
    manager.wait_until_finished()
    forget(manager)


def test_a_step_out_of_order_does_not_push_the_newest_out(tmp_path: Path) -> None:
    manager = memory_only(tmp_path)
    manager.save(5, args=Save(state(5)))
    assert manager.save(3, args=Save(state(3)), force=True)
    assert manager.all_steps() == [3, 5] and manager.latest_step() == 5
    assert manager.restore(5)["w"].tolist() == [5] * 8
    assert manager.save(6, args=Save(state(6)))
    assert manager.all_steps() == [6]
    forget(manager)


@pytest.mark.timeout(180)
def test_the_users_error_is_seen_before_that_of_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(KeyError, match="mine") as seen:
        with ReplicatedCheckpointManager(tmp_path / "file" / "steps") as manager:
            manager.save(1, args=Save(state(1)))
            raise KeyError("mine")
    assert "step 1 did not reach storage" in seen.value.__notes__[0]


@pytest.mark.parametrize("step", [object(), {1, 2}])
def test_whatever_ends_a_write_is_told(tmp_path: Path, step: Any) -> None:
    told: list[dict[str, Any]] = []
    opening = {"directory": str(tmp_path), "layout": "", "chunk_bytes": 64}
    exporter = ExporterProcess(opening, lambda _, answer: told.append(answer))
    exporter.save(lambda: {"step": step}, limit_s=9)
    until(lambda: any("not JSON serializable" in it["error"] for it in told))
    exporter.close()
    until(lambda: "ended" in told[-1])


def test_an_exporter_that_is_stuck_is_ended_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.checkpoint.storage.exporter_client.EXPORTER_START_S", 0.1)
    told: list[dict[str, Any]] = []
    opening = {"directory": str(tmp_path), "layout": "", "chunk_bytes": 64}
    exporter = ExporterProcess(opening, lambda _, answer: told.append(answer))
    os.kill(exporter._process.result(timeout=40).pid, signal.SIGSTOP)
    exporter.save(lambda: {"step": 1}, limit_s=0.1)
    until(lambda: bool(told))
    ended = {"ok": False, "error": "exporter ended with code -9", "ended": True}
    assert told == [ended]


NOISE = """
import os
os.write(1, b'hello\\n5\\n[1]\\n{"a": 1}\\n\\n\\xff\\xfe\\n')
"""


@pytest.mark.timeout(180)
def test_what_a_library_prints_in_the_exporter_does_not_keep_a_step_from_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)  # every Python process imports it
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    options = ReplicatedOptions(storage_interval_steps=1, storage_timeout_s=20)
    with ReplicatedCheckpointManager(tmp_path / "steps", options=options) as manager:
        manager.save(1, args=Save(state(1)))
        manager.wait_until_finished()
    assert ocp.utils.checkpoint_steps(tmp_path / "steps") == [1]
    for line in ("hello", "5", "[1]", '{"a": 1}', "\ufffd" * 2):
        assert f"exporter printed {line!r}" in caplog.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fails_at", ["open", "save"])
def test_an_answer_that_cannot_be_handled_ends_the_exporter(
    tmp_path: Path, fails_at: str
) -> None:
    told: list[dict[str, Any]] = []

    def hear(_: ExporterProcess, answer: dict[str, Any]) -> None:
        if answer.get("op") == fails_at:
            raise KeyError("missing")
        told.append(answer)

    before = set(threading.enumerate())
    opening = {"directory": str(tmp_path), "layout": "", "chunk_bytes": 64}
    exporter = ExporterProcess(opening, hear)
    threads = set(threading.enumerate()) - before
    exporter.save(lambda: {"step": 1}, limit_s=60)
    process = exporter._process.result(timeout=40)
    until(lambda: bool(told) and "ended" in told[-1])
    assert "an answer could not be handled: KeyError: 'missing'" in told[-1]["error"]
    until(lambda: not any(thread.is_alive() for thread in threads))
    assert process.poll() == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_cannot_be_handled_ends_an_exporter_that_stands_still(
    tmp_path: Path,
) -> None:
    told: list[dict[str, Any]] = []

    def hear(_: ExporterProcess, answer: dict[str, Any]) -> None:
        told.append(answer)
        if "ended" not in answer:
            raise KeyError("missing")

    opening = {"directory": str(tmp_path), "layout": "", "chunk_bytes": 64}
    exporter = ExporterProcess(opening, hear)
    os.kill(exporter._process.result(timeout=40).pid, signal.SIGSTOP)
    exporter.save(lambda: {"step": object()}, limit_s=60)
    until(lambda: bool(told) and "ended" in told[-1])


def test_an_exporter_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    def open_log() -> IO[bytes]:
        raise ValueError("no log")

    before = set(threading.enumerate())
    opening = {"directory": str(tmp_path), "layout": "", "chunk_bytes": 64}
    ExporterProcess(opening, lambda _, answer: told.append(answer), open_log=open_log)
    threads = set(threading.enumerate()) - before
    until(lambda: bool(told))
    error = "no exporter can be started: no log"
    assert told == [{"ok": False, "error": error, "ended": True}]
    until(lambda: not any(thread.is_alive() for thread in threads))


@pytest.mark.timeout(180)
def test_of_two_managers_of_a_directory_one_is_told_that_a_step_is_not_its_own(
    tmp_path: Path,
) -> None:
    options = ReplicatedOptions(storage_interval_steps=1)
    one, other = (
        ReplicatedCheckpointManager(tmp_path / "steps", options=options)
        for _ in range(2)
    )
    one.save(7, args=Save(state(1)))
    other.save(7, args=Save(state(2)))
    failed = []
    for number, manager in ((1, one), (2, other)):
        try:
            manager.close()
        except StorageFailed as error:
            assert "another manager has written step 7" in str(error)
            assert "is closed, so it is not tried again" in str(error)
            failed.append(number)
    with ocp.CheckpointManager(tmp_path / "steps") as stock:
        assert stock.all_steps() == [7]
        assert stock.restore(7)["w"].tolist() in [[1] * 8, [2] * 8]
        written = int(stock.restore(7)["w"][0])
    assert failed == [3 - written]


@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_is_left_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "steps"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "dtft-test", str(directory)]
    subprocess.run(mount, check=True, timeout=20)
    try:
        options = ReplicatedOptions(storage_interval_steps=1)
        manager = ReplicatedCheckpointManager(directory, options=options)
        rng = np.random.default_rng(0)
        for step, size in ((1, 4), (2, 2 << 20)):
            manager.save(step, args=Save({"w": rng.random(size)}))
            if step == 1:
                manager.wait_until_finished()
        with pytest.raises(StorageFailed, match=r"step 2 did not reach.*closed, so it"):
            manager.close()
        assert [path.name for path in directory.iterdir()] == ["1"]
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=20)
