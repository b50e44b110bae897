"""The embedded etcd under a supervisor: killed, stopped, corrupt, without room."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dtft.elastic.processes import process_alive
from dtft.elastic.store.embedded import EmbeddedEtcd
from dtft.elastic.store.etcd import EtcdStore
from dtft.elastic.store.supervision import (
    Outage,
    ProbedEtcd,
    Step,
    SupervisionLimits,
    Supervisor,
    next_step,
    started,
)

QUICK = SupervisionLimits(hung_s=3.0, start_s=30.0)
"""A busy machine must still answer within these."""


class Watched:
    """An etcd with one key, its supervisor, and what was said."""

    def __init__(self, directory: Path) -> None:
        self.said: list[str] = []
        self.etcd = EmbeddedEtcd(directory)
        self.etcd.start()
        self.etcd.wait_ready()
        self.supervisor = Supervisor(self.etcd, self.said.append, QUICK)
        self.ticks = 0
        self.store = EtcdStore(self.etcd.address)
        self.store.put("/k", b"v")

    def until(self, ready: Callable[[], object], limit_s: float = 30.0) -> None:
        """Supervises until something holds."""
        end = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < end, self.said
            self.supervisor.tick()
            self.ticks += 1
            time.sleep(0.02)

    def serves_again(self) -> bool:
        return "serves again" in self.said[-1] if self.said else False

    def value(self) -> bytes | None:
        pair = self.store.get("/k")
        return pair.value if pair else None


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    found = Watched(directory)
    try:
        yield found
    finally:
        found.supervisor.close()
        found.store.close()
        found.etcd.stop()


def test_a_killed_etcd_is_restarted_on_its_data_and_port(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        pid, address = it.etcd.pid, it.etcd.address
        os.kill(pid, signal.SIGKILL)
        it.until(it.serves_again)
        assert it.etcd.address == address and it.etcd.pid != pid
        assert it.value() == b"v"
        assert f"process {pid}, killed by SIGKILL" in it.said[0]


def test_a_stopped_etcd_is_killed_and_restarted(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        # Until it has answered once, it is given the time of a start.
        it.until(lambda: it.supervisor._prober.seen(time.monotonic()).ready)
        pid = it.etcd.pid
        os.kill(pid, signal.SIGSTOP)
        it.until(it.serves_again)
        assert not process_alive(pid) and it.value() == b"v"
        assert f"process {pid}) is stopped" in it.said[0]
        assert it.ticks > 20  # health checks, which got no answer, are on a thread


def test_corrupt_data_are_moved_aside(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        os.kill(it.etcd.pid, signal.SIGKILL)
        it.until(lambda: not it.etcd.running)
        (database,) = (tmp_path / "etcd-data").rglob("db")
        database.write_bytes(os.urandom(1 << 16))
        it.until(it.serves_again, 50.0)
        assert it.value() is None
        assert any("failed to open database" in line for line in it.said), it.said
        assert (tmp_path / "etcd-aside").exists()


def test_a_taken_port_is_named_and_waited_for(tmp_path: Path) -> None:
    with watched(tmp_path) as it, socket.socket() as other:
        os.kill(it.etcd.pid, signal.SIGKILL)
        while it.etcd.running:
            time.sleep(0.01)
        port = int(it.etcd.address.rpartition(":")[2])
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        it.until(lambda: any("cannot be started" in line for line in it.said))
        assert f"another process listens on 127.0.0.1:{port}" in it.said[-1]
        other.close()
        it.until(it.serves_again)
        assert it.value() == b"v"
        assert not (tmp_path / "etcd-aside").exists()


def test_a_full_disk_is_named_and_waited_for(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    size = "size=300m"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "x", small]).returncode:
        pytest.skip("needs to mount a small tmpfs")
    try:
        with watched(small) as it:
            filler = small / "filler"
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - (1 << 20))
            os.kill(it.etcd.pid, signal.SIGKILL)
            it.until(lambda: any("cannot be started" in line for line in it.said))
            assert f"{small}: No space left on device (errno 28)" in it.said[-1]
            filler.unlink()
            it.until(it.serves_again)
            assert it.value() == b"v"
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_is_meant_is_left_alone(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        it.etcd.kill()
        end = time.monotonic() + 1.0
        it.until(lambda: time.monotonic() > end)
        assert not it.etcd.running and not it.said
        it.etcd.start()
        it.etcd.wait_ready()
        pid = it.etcd.pid
        pause = threading.Thread(target=it.etcd.pause, args=(QUICK.hung_s + 1,))
        pause.start()
        it.until(lambda: not pause.is_alive())
        end = time.monotonic() + 1.0
        it.until(lambda: time.monotonic() > end)
        assert it.etcd.pid == pid and not it.said and it.value() == b"v"
        os.kill(pid, signal.SIGKILL)  # after all that it is supervised again
        it.until(it.serves_again)


def test_an_etcd_that_is_killed_meanwhile_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path) as it:
        os.kill(it.etcd.pid, signal.SIGKILL)
        found = it.etcd.obstacle

        def killed() -> str:
            it.etcd.kill()  # by another thread, once the supervisor has looked
            return found()

        monkeypatch.setattr(it.etcd, "obstacle", killed)
        it.until(lambda: not it.etcd.supervised)
        it.supervisor.tick()
        assert not it.etcd.running and it.etcd.num_starts == 1
        it.etcd.start()
        it.etcd.wait_ready()
        assert it.value() == b"v"


def test_a_supervised_pause_is_ended(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        # Until it has answered once, it is given the time of a start.
        it.until(lambda: it.supervisor._prober.seen(time.monotonic()).ready)
        pause = threading.Thread(
            target=it.etcd.pause, args=(QUICK.hung_s + 4,), kwargs={"supervised": True}
        )
        pause.start()
        it.until(it.serves_again)
        pause.join()
        assert it.value() == b"v" and it.etcd.running


def test_an_emptied_store_is_empty(tmp_path: Path) -> None:
    with watched(tmp_path) as it:
        it.etcd.discard()
        it.etcd.start()
        it.etcd.wait_ready()
        assert it.value() is None and it.etcd.num_starts == 2


# ---------------------------------------------------------------------- decisions

LIMITS = SupervisionLimits()
DEAD = ProbedEtcd(now=100.0, running=False, ready=False, silent_s=0.0)
WELL = ProbedEtcd(now=100.0, running=True, ready=True, silent_s=0.0)


def play(
    seen: list[ProbedEtcd], outage: Outage | None = None
) -> tuple[Outage, list[Step]]:
    """What is done at each look; a start is taken to be tried."""
    outage, steps = outage or Outage(), list[Step]()
    for one in seen:
        outage, step = next_step(outage, one, LIMITS)
        if step in ("start", "start_empty"):
            outage = started(outage, one.now, LIMITS)
        steps.append(step)
    return outage, steps


def test_a_silence_is_only_long_enough_after_its_deadline() -> None:
    short = replace(WELL, silent_s=LIMITS.hung_s - 0.1)
    long = replace(WELL, silent_s=LIMITS.hung_s)
    assert play([WELL, short, long])[1] == ["wait", "wait", "kill"]
    starting = replace(long, ready=False)
    assert play([starting])[1] == ["wait"]
    assert play([replace(starting, silent_s=LIMITS.start_s)])[1] == ["kill"]


def test_starts_that_bring_no_answer_pause_longer_and_condemn_the_data() -> None:
    looks = [replace(DEAD, now=100.0 + 0.1 * n) for n in range(400)]
    _, steps = play(looks)
    tries = [n for n, step in enumerate(steps) if step == "start"]
    pauses = [b - a for a, b in zip(tries, tries[1:], strict=False)]
    assert pauses[: LIMITS.tries - 1] == sorted(pauses[: LIMITS.tries - 1])
    assert steps.count("start_empty") == 1
    assert steps.index("start_empty") * 0.1 < LIMITS.start_s
    assert tries[LIMITS.tries - 1] < steps.index("start_empty") < tries[LIMITS.tries]


def test_an_outage_ends_with_an_answer() -> None:
    outage, steps = play([DEAD, replace(WELL, now=101.0)])
    assert steps == ["start", "wait"] and outage.begun is None


def test_data_on_which_etcd_dies_again_and_again_are_condemned() -> None:
    steps, outage, now = list[Step](), Outage(), 0.0
    while "start_empty" not in steps:
        assert now < LIMITS.steady_s
        outage, (step,) = play([replace(DEAD, now=now)], outage)
        if step == "start":
            outage, _ = play([replace(WELL, now=now + 0.5)], outage)
            assert outage.begun is None
        steps, now = [*steps, step], now + 0.6
    assert steps.count("start") == LIMITS.crashes
