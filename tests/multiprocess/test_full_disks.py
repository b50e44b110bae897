"""Directories that a drill makes full or read-only: real mounts, and real errors."""

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.elastic.faults import full_disks
from dtft.elastic.faults.full_disks import (
    check_mounts,
    memory_full,
    small_memory,
    storage_full,
    storage_read_only,
    unmount_below,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "storage"
    directory.mkdir()
    (directory / "old").write_text("step 10")
    check_mounts()
    yield directory
    unmount_below(tmp_path)


def error_of(write: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        write()
    assert caught.value.errno is not None
    return caught.value.errno


@pytest.mark.parametrize(
    ("begin", "number"),
    [(storage_full, errno.ENOSPC), (storage_read_only, errno.EROFS)],
)
def test_storage_takes_nothing_new_and_is_as_before_at_the_end(
    storage: Path, begin: Callable[[Path], Callable[[], None]], number: int
) -> None:
    end = begin(storage)
    assert (storage / "old").read_text() == "step 10"
    assert error_of(lambda: (storage / "new").write_bytes(bytes(1 << 20))) == number
    end()
    assert [path.name for path in storage.iterdir()] == ["old"]
    (storage / "new").write_bytes(bytes(1 << 20))
    assert not os.path.ismount(storage)


def test_storage_becomes_read_only_once_no_file_in_it_is_open(storage: Path) -> None:
    """Exporters write while the fault begins."""
    began, over = threading.Event(), threading.Event()

    def write() -> None:
        while not over.is_set():
            try:
                with open(storage / "written", "w"):
                    began.set()
                    time.sleep(0.2)
            except OSError as error:
                assert error.errno == errno.EROFS
                return
            time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(5)
    try:
        end = storage_read_only(storage)
        assert error_of(lambda: (storage / "new").write_text("")) == errno.EROFS
        end()
    finally:
        over.set()
        writer.join()


def test_a_fault_that_cannot_begin_leaves_no_mount(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = full_disks._run

    def limited(*words: object) -> None:
        if {"overlay", "remount,bind,ro"} & set(words):
            raise RuntimeError("mount: not supported here")
        run(*words)

    monkeypatch.setattr(full_disks, "_run", limited)
    for begin in (storage_full, storage_read_only):
        with pytest.raises(RuntimeError, match="not supported here"):
            begin(storage)
        assert list(tmp_path.iterdir()) == [storage]
        assert f" {storage} " not in Path("/proc/self/mounts").read_text()


def test_memory_is_full_until_the_end(tmp_path: Path) -> None:
    with small_memory(tmp_path / "memory", 8) as memory:
        end = memory_full(memory)
        assert error_of(lambda: (memory / "x").write_bytes(b"1" * 8192)) == errno.ENOSPC
        end()
        (memory / "y").write_bytes(bytes(4 << 20))
    assert not os.path.ismount(tmp_path / "memory")


def test_memory_of_other_programs_is_not_filled(tmp_path: Path) -> None:
    with small_memory(tmp_path / "memory", 2048) as memory:
        with pytest.raises(ValueError, match="full-memory does not fill"):
            memory_full(memory)


def test_what_an_interrupted_drill_has_mounted_is_unmounted(tmp_path: Path) -> None:
    storage = tmp_path / "a" / "storage"
    storage_read_only(storage)
    unmount_below(tmp_path)
    (storage / "new").touch()
