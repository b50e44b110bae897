"""Arenas are reserved whole or refused with the numbers."""

import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.memory.arena import Arena


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in shared memory that is free before and after."""
    chosen = Path("/dev/shm") / f"dtft-test-{uuid.uuid4().hex}"
    yield chosen
    chosen.unlink(missing_ok=True)


def test_another_process_sees_the_bytes_and_they_outlive_it(path: Path) -> None:
    arena = Arena.create(path, 10_000)
    code = (
        "import sys; from dtft.checkpoint.memory.arena import Arena\n"
        "arena = Arena.attach(sys.argv[1]); arena.view(5000, 5)[:] = b'hello'"
    )
    root = Path(__file__).parents[3]
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, timeout=30, cwd=root
    )
    assert bytes(arena.view(5000, 5)) == b"hello"
    arena.close()
    attached = Arena.attach(path)
    assert attached.size == 10_000
    assert bytes(attached.view(5000, 5)) == b"hello"
    attached.close()


def test_memory_is_reserved_not_promised(path: Path) -> None:
    arena = Arena.create(path, 1 << 20)
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    arena.close()


def test_pages_are_mapped_ahead_and_keep_their_bytes(path: Path) -> None:
    arena = Arena.create(path, 64 << 20)
    arena.view(33 << 20, 5)[:] = b"hello"
    before = resident_bytes()
    arena.prefault().join(50)
    if kernel() >= (5, 14):
        assert resident_bytes() - before > 48 << 20
    assert bytes(arena.view(33 << 20, 5)) == b"hello"
    arena.prefault()
    arena.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in os.uname().release.split(".")[:2])


def test_too_large_is_refused_with_the_numbers(path: Path) -> None:
    with pytest.raises(OSError, match="needs 1125899906842624 bytes .* available"):
        Arena.create(path, 1 << 50)
    assert not path.exists()


def test_full_while_reserving_is_refused_and_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the last memory, or a signal's handler raises an error."""
    real = os.posix_fallocate
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def reserve(
            descriptor: int,
            offset: int,
            size: int,
            error: BaseException = error,
        ) -> None:
            if offset >= 5 << 20:
                raise error
            real(descriptor, offset, size)

        monkeypatch.setattr(os, "posix_fallocate", reserve)
        expected = OSError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected, match="Enlarge it|^$"):
            Arena.create(path, 64 << 20)
        assert not path.exists()


def test_a_signal_undoes_one_piece_at_most(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer kernels go on after a signal, so calls are looked at."""
    real, reserved = os.posix_fallocate, [0]

    def reserve(descriptor: int, offset: int, size: int) -> None:
        assert offset == reserved[-1] and 0 < size <= 1 << 20
        real(descriptor, offset, size)
        reserved.append(offset + size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    Arena.create(path, (3 << 20) + 5).close()
    assert reserved[-1] == path.stat().st_size == (3 << 20) + 5


def test_memory_is_reserved_under_a_timer(path: Path) -> None:
    """A profiler's signals come more often than the whole can be reserved."""
    code = (
        "import signal, sys\n"
        "from dtft.checkpoint.memory.arena import Arena\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
        "Arena.create(sys.argv[1], 256 << 20)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    )
    root = Path(__file__).parents[3]
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, timeout=50, cwd=root
    )
    assert path.stat().st_size == 256 << 20


def test_existing_file_is_kept(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="exists already"):
        Arena.create(path, 10)
    assert path.read_bytes() == b"mine"


def test_views_survive_close_and_unlink(path: Path) -> None:
    arena = Arena.create(path, 100)
    view = arena.view(0, 100)
    arena.close()
    arena.close()
    arena.unlink()
    arena.unlink()
    view[:5] = b"alive"
    assert bytes(view[:5]) == b"alive"
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, -1), (0, 101), (100, 1)])
def test_views_outside_are_refused(path: Path, offset: int, nbytes: int) -> None:
    arena = Arena.create(path, 100)
    with pytest.raises(ValueError, match="Allowed: 0 to 100"):
        arena.view(offset, nbytes)
    assert len(arena.view(100, 0)) == 0
    arena.close()


def test_impossible_sizes_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="size=0"):
        Arena.create(path, 0)
