"""The memory of dead agents is swept; that of live ones and of others never is."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtft.checkpoint.managers.progress import ProgressBoard
from dtft.elastic.host import memory_directory
from dtft.elastic.host.memory_directory import (
    OWNER,
    UNMARKED_S,
    make_memory_directory,
    remove_memory_directory,
    sweep_memory,
    swept_line,
)
from tests.support.hosts import wait_until

_OWNER = """
import pathlib, sys, time
from dtft.elastic.host.memory_directory import make_memory_directory
path = pathlib.Path(sys.argv[1])
make_memory_directory(path)
(path / "arena").write_bytes(bytes(1 << 20))
print("made", flush=True)
time.sleep(60)
"""


@contextmanager
def owner(path: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that owns a memory directory, as an agent does."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", _OWNER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            yield process
        finally:
            process.kill()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def old(path: Path) -> None:
    """Makes a directory look as if nobody had changed it lately."""
    then = time.time() - UNMARKED_S - 1
    os.utime(path, (then, then))


def test_memory_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    with owner(tmp_path / "dtft-j-a") as dead, owner(tmp_path / "dtft-j-b"):
        assert sweep_memory(tmp_path) == []
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        (found,) = sweep_memory(tmp_path)
        assert found.name == "dtft-j-a" and found.num_bytes >= 1 << 20
        assert "dtft-j-a" in swept_line(tmp_path, [found])
        assert names(tmp_path) == ["dtft-j-b"]


def test_a_stopped_process_lives(tmp_path: Path) -> None:
    with owner(tmp_path / "dtft-j-a") as process:
        process.send_signal(signal.SIGSTOP)
        assert sweep_memory(tmp_path) == []
        process.send_signal(signal.SIGCONT)


def test_the_next_start_sweeps_and_takes_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dtft-j-a"
    with owner(path) as process:
        with pytest.raises(ValueError, match="belongs to a live agent"):
            make_memory_directory(path)
        process.kill()
    make_memory_directory(path)
    assert names(path) == [OWNER] and names(tmp_path) == ["dtft-j-a"]
    assert "dead agents" in capsys.readouterr().out
    make_memory_directory(path)  # by the same process: its own, made anew
    remove_memory_directory(path)
    assert names(tmp_path) == []


def test_another_start_may_remove_the_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dtft-j-a"
    with owner(path) as process:
        process.kill()
    opened, removed = os.open, []

    def removed_before(name: Path, *rest: int, **options: int) -> int:
        if name == path / OWNER and not removed:
            removed.append(path)
            shutil.rmtree(path)
        return opened(name, *rest, **options)

    monkeypatch.setattr(memory_directory, "sweep_memory", lambda arenas: [])
    monkeypatch.setattr(os, "open", removed_before)
    make_memory_directory(path)
    assert removed and names(path) == [OWNER]
    remove_memory_directory(path)


@pytest.mark.parametrize("freed", ["removed twice", "removed by hand"])
def test_a_successors_directory_is_not_removed(tmp_path: Path, freed: str) -> None:
    path = tmp_path / "dtft-j-a"
    make_memory_directory(path)
    if freed == "removed twice":
        remove_memory_directory(path)
    else:
        shutil.rmtree(path)
    with owner(path):
        remove_memory_directory(path)
        assert (path / "arena").stat().st_size == 1 << 20
        assert sweep_memory(tmp_path) == []


def test_a_process_of_another_pid_namespace_lives(tmp_path: Path) -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("needs to make PID namespaces")
    with owner(tmp_path / "dtft-j-a", *unshare):
        assert sweep_memory(tmp_path) == []
    wait_until(lambda: [it.name for it in sweep_memory(tmp_path)] == ["dtft-j-a"])


def test_what_is_not_an_agents_is_left_alone(tmp_path: Path) -> None:
    for name in ("other", "dtft-empty", "dtft-nested", "dtft-j-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "dtft-file").write_text("a file")
    (tmp_path / "dtft-link").symlink_to(tmp_path / "other")
    (tmp_path / "dtft-nested" / "dtft-j-a").mkdir()
    (tmp_path / "dtft-j-x" / OWNER).symlink_to(tmp_path / "dtft-file")
    for name in ("dtft-empty", "dtft-nested", "dtft-j-x"):
        old(tmp_path / name)
    before = names(tmp_path)
    assert sweep_memory(tmp_path) == [] and names(tmp_path) == before
    assert sweep_memory(tmp_path / "missing") == []


def test_memory_of_another_user_is_left_alone(tmp_path: Path) -> None:
    with owner(tmp_path / "dtft-j-a"):
        pass
    try:
        os.chown(tmp_path / "dtft-j-a", 4321, 4321)
    except PermissionError:
        pytest.skip("needs to give a directory to another user")
    assert sweep_memory(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_name_that_another_user_has_is_refused(mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:  # others may enter it
        directory = Path(shared)
        directory.chmod(mode)
        path = directory / "dtft-j-a"
        with owner(path):
            os.seteuid(4321)
            try:
                with pytest.raises(ValueError, match="another user.*--host-name"):
                    make_memory_directory(path)
            finally:
                os.seteuid(0)
            assert names(directory) == ["dtft-j-a"] and OWNER in names(path)


def test_without_a_lock_only_what_nobody_has_open(tmp_path: Path) -> None:
    """As versions before the lock left it: a board that is mapped, and a socket."""
    path = tmp_path / "dtft-j-a"
    path.mkdir()
    board = ProgressBoard(path / "board", create=True)
    old(path)
    assert sweep_memory(tmp_path) == []
    board.close()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "agent.sock"))
        listener.listen()
        old(path)
        assert sweep_memory(tmp_path) == []
    os.utime(path)
    assert sweep_memory(tmp_path) == []  # somebody may be making it
    old(path)
    assert [it.name for it in sweep_memory(tmp_path)] == ["dtft-j-a"]


def test_unfinished_makings_and_removals_are_swept_later(tmp_path: Path) -> None:
    for name in (".dtft-new-1", ".dtft-swept-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arena").write_bytes(b"x")
    assert sweep_memory(tmp_path) == []
    for name in (".dtft-new-1", ".dtft-swept-1"):
        old(tmp_path / name)
    assert len(sweep_memory(tmp_path)) == 2 and names(tmp_path) == []


_MAKER = """
import os, pathlib, sys, time
from dtft.elastic.host.memory_directory import OWNER, make_memory_directory
from dtft.elastic.host.memory_directory import sweep_memory
directory, end, made = pathlib.Path(sys.argv[1]), time.monotonic() + 3, 0
while time.monotonic() < end:
    made += 1
    path = directory / f"dtft-{os.getpid()}-{made}"
    make_memory_directory(path)
    sweep_memory(directory)
    assert (path / OWNER).exists(), f"{path} was swept while its owner lives"
    if os.fork() == 0:  # a process that dies with memory of its own
        make_memory_directory(directory / f"dtft-{os.getpid()}-dead")
        os.kill(os.getpid(), 9)
    os.wait()
"""


def test_concurrent_starts_and_sweeps_do_not_race(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MAKER, str(tmp_path)]
    makers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [maker.wait(60) for maker in makers] == [0] * 4
    sweep_memory(tmp_path)
    assert [name for name in names(tmp_path) if name.startswith("dtft-")] == []
