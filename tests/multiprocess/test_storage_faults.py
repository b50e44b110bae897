"""Storage that is full, read-only, gone or slow: real file systems, real Orbax.

Whatever happens, the exporter answers, every step that is offered can be read, and the
next step is written once storage is well again.
"""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from orbax.checkpoint.args import JsonSave, StandardSave

from dtft.checkpoint.state.digests import chunk_digests
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.storage.directory import StorageTier, load_numpy, orbax_options
from dtft.checkpoint.storage.orbax_manager import OpenedDirectory
from tests.support.exporting import Process, opening, saving
from tests.support.states import layout

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount"),
]

MIB = 1 << 20
LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("replica",), axis_sizes=(1,), slots=(0,)),
    leaves=tuple(
        Leaf(path=f"w{i}", shape=(MIB // 4,), dtype="float32", spec=())
        for i in range(6)
    ),
)
BLKIO = Path("/sys/fs/cgroup/blkio")
SLOW_BYTES_PER_S = 256 << 10


def run(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB of its own."""
    directory = tmp_path / "storage"
    directory.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64m", "dtft-test", directory)
    yield directory
    while os.path.ismount(directory):
        run("umount", "-l", directory)


@pytest.fixture
def start(tmp_path: Path, storage: Path) -> Iterator[Callable[..., "Exporting"]]:
    started: list[Exporting] = []

    def make(directory: Path = storage) -> Exporting:
        started.append(Exporting(tmp_path, directory))
        return started[-1]

    yield make
    for one in started:
        one.end()


class Exporting(Process):
    """An exporter of 6 MiB of random state, opened."""

    def __init__(self, tmp_path: Path, storage: Path) -> None:
        super().__init__()
        self.arena = tmp_path / "arena"
        if not self.arena.exists():
            self.arena.write_bytes(np.random.default_rng(0).bytes(6 * MIB))
        self.send(
            op="open",
            directory=str(storage),
            max_to_keep=3,
            rank=0,
            world=1,
            coordinator="",
            layout=LAYOUT.to_json(),
            slot=0,
            devices=1,
            chunk_bytes=MIB,
        )
        assert self.answer() == {"op": "open", "ok": True}

    def begin(self, step: int, **fields: Any) -> None:
        memory = self.arena.read_bytes()
        parts = (memory[start : start + MIB] for start in range(0, 6 * MIB, MIB))
        digests = [chunk_digests(part, MIB).hex() for part in parts]
        fields |= {"buffers": "00" * 6, "digests": digests, "items": {}}
        fields["memory"] = [str(self.arena)]
        self.send(op="save", step=step, **fields)

    def save(self, step: int) -> dict[str, Any]:
        self.begin(step)
        return self.answer()


def offered(storage: Path, arena: Path) -> tuple[int, ...]:
    """The steps that are offered, each of them read and compared."""
    steps = StorageTier(storage, read_only=True).all_steps()
    for step in steps:
        found = load_numpy(storage, step)
        together = b"".join(found[f"w{i}"].tobytes() for i in range(6))
        assert together == arena.read_bytes(), step
    return steps


def unfinished(storage: Path) -> list[str]:
    names = [path.name for path in storage.iterdir() if not path.name.isdigit()]
    return sorted(set(names) - {"lost+found"})


def test_full(storage: Path, start: Callable[[], Exporting]) -> None:
    exporter = start()
    assert exporter.save(1)["ok"]
    run("mount", "-o", "remount,size=9m", storage)
    for step in (2, 3):
        answer = exporter.save(step)
        assert not answer["ok"] and "No space left" in answer["error"], answer
        assert offered(storage, exporter.arena) == (1,)
        assert unfinished(storage) == []  # what was written is given back
    run("mount", "-o", "remount,size=64m", storage)
    assert exporter.save(4)["ok"] and exporter.save(5)["ok"]
    assert offered(storage, exporter.arena) == (1, 4, 5)


def test_full_while_many_arrays_are_written(storage: Path) -> None:
    # Orbax reports the first error while writes of other arrays are still to come.
    run("mount", "-o", "remount,size=4m", storage)
    opened = OpenedDirectory(epath.Path(storage), orbax_options(3))
    bytes_of = np.random.default_rng(0).bytes
    arrays = {f"w{i}": np.frombuffer(bytes_of(MIB), np.uint8) for i in range(200)}
    for step in (1, 2, 3):
        with pytest.raises(ValueError, match="No space left"):
            opened.save(step, {"state": StandardSave(arrays), "items": JsonSave({})})
            opened.wait_until_finished()
        assert unfinished(storage) == []
        time.sleep(0.5)
        assert unfinished(storage) == []
        # Here, not in a later test, asyncio logs the errors of the other writes.
        gc.collect()


def test_read_only(storage: Path, start: Callable[[], Exporting]) -> None:
    exporter = start()
    assert exporter.save(1)["ok"]
    run("mount", "-o", "remount,ro", storage)
    answer = exporter.save(2)
    assert not answer["ok"] and "Read-only file system" in answer["error"], answer
    assert offered(storage, exporter.arena) == (1,)
    run("mount", "-o", "remount,rw", storage)
    assert exporter.save(3)["ok"]
    assert offered(storage, exporter.arena) == (1, 3)


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@pytest.mark.parametrize("failing", [0, 1])
def test_read_only_for_one_of_two(
    failing: int, tmp_path: Path, storage: Path, free_port: int
) -> None:
    # The other process waits for the failing one, which must answer all the same.
    alone = ("unshare", "--mount", "sh", "-c", READ_ONLY, str(storage))
    with contextlib.ExitStack() as stack:
        exporters = [Process(*alone * (rank == failing)) for rank in (0, 1)]
        for rank, exporter in enumerate(exporters):
            stack.callback(exporter.end)
            message = opening(tmp_path, layout(), rank, slot=rank, world=2)
            exporter.send(**message | {"coordinator": f"localhost:{free_port}"})
        assert all(exporter.answer()["ok"] for exporter in exporters)
        for rank, exporter in enumerate(exporters):
            exporter.send(**saving(tmp_path, layout(), rank, 1))
        answer = exporters[failing].answer()
        assert not answer["ok"] and "ead-only file system" in answer["error"], answer
        assert offered(storage, tmp_path) == ()


def hold_while_writing(exporter: Exporting, storage: Path, first: int) -> int:
    """Stops the exporter while it writes a step, `first` or a later one; which.

    On a busy machine a step may be complete before the signal arrives: then the next.
    """
    for step in range(first, first + 20):
        finished = storage / str(step)
        unfinished = storage / f"{step}.orbax-checkpoint-tmp"
        exporter.begin(step)
        end = time.monotonic() + 30
        while not unfinished.exists() and not finished.exists():
            assert time.monotonic() < end
        exporter.process.send_signal(signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, exporter.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None and stopped.si_status == signal.SIGSTOP
        if unfinished.exists() and not finished.exists():
            return step
        exporter.process.send_signal(signal.SIGCONT)
        assert exporter.answer()["ok"]
    raise AssertionError("20 steps were complete before the exporter could be stopped")


def test_vanishing_while_a_step_is_written(
    tmp_path: Path, storage: Path, start: Callable[..., Exporting]
) -> None:
    inner, away = storage / "inner", tmp_path / "away"
    away.mkdir()

    def unmount() -> None:
        run("mount", "--bind", storage, away)  # keeps it to bring it back
        run("umount", "-l", storage)

    def bring_back() -> None:
        run("mount", "--bind", away, storage)

    def restore_name() -> None:
        end = time.monotonic() + 30
        while inner.with_name("renamed").exists():
            shutil.rmtree(inner, ignore_errors=True)  # Orbax makes it again and again
            with contextlib.suppress(OSError):
                inner.with_name("renamed").rename(inner)
            assert time.monotonic() < end

    exporter = start(inner)
    try:
        step = 0
        for leave, back in (
            (unmount, bring_back),
            (lambda: inner.rename(inner.with_name("renamed")), restore_name),
        ):
            assert exporter.save(step + 1)["ok"]
            step = hold_while_writing(exporter, inner, step + 2)
            before = offered(inner, exporter.arena)
            leave()
            exporter.process.send_signal(signal.SIGCONT)
            answer = exporter.answer()
            assert not answer["ok"] and str(inner) in answer["error"], answer
            assert offered(inner, exporter.arena) == ()
            back()
            assert offered(inner, exporter.arena) == before
            step += 1
            answer = exporter.save(step)
            assert answer["ok"], answer
            assert offered(inner, exporter.arena) == (*before, step)[-3:]
    finally:
        run("umount", "-l", away)


@pytest.fixture
def slow_group(tmp_path: Path, storage: Path) -> Iterator[Path]:
    """A control group whose members write slowly to `storage`, now a disk."""
    if not (BLKIO / "blkio.throttle.write_bps_device").exists():
        pytest.skip("needs the blkio controller of cgroup v1 to slow a disk down")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    run("mkfs.ext2", "-q", image)
    group = BLKIO / f"dtft-test-{os.getpid()}"
    loop = run("losetup", "--find", "--show", image)
    try:
        run("mount", "-o", "sync", loop, storage)  # over the tmpfs
        number = os.stat(loop).st_rdev
        group.mkdir()
        rule = f"{os.major(number)}:{os.minor(number)} {SLOW_BYTES_PER_S}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
        yield group
    finally:
        if group.exists():
            group.rmdir()
        run("umount", "-l", storage)
        run("losetup", "--detach", loop)


def test_slow(storage: Path, slow_group: Path, start: Callable[[], Exporting]) -> None:
    exporter = start()
    assert exporter.save(1)["ok"]
    (slow_group / "cgroup.procs").write_text(str(exporter.process.pid))
    exporter.begin(2, timeout_s=2)  # 6 MiB would take 24 s
    answer = exporter.answer()
    assert not answer["ok"] and "TimeoutError: 2 s" in answer["error"], answer
    assert exporter.process.wait(timeout=60) == 1
    assert offered(storage, exporter.arena) == (1,)
    assert unfinished(storage) == ["2.orbax-checkpoint-tmp"]
    another = start()  # in no group: as fast as ever
    assert another.save(3)["ok"]
    assert offered(storage, exporter.arena) == (1, 3)
    assert unfinished(storage) == []
