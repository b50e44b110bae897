"""A large state is digested after the save has returned, on another thread."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.checkpoint.managers.agent_client import AgentCheckpointManager, SaveArgs
from dtft.checkpoint.managers.agent_link import AgentLink, Dialogue, LinkClosed
from dtft.checkpoint.memory import snapshot
from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state import digests
from dtft.checkpoint.state.digests import chunk_digests
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout

CHUNK = 256
ROWS = 1024
LIMIT_S = 20.0
SOON_S = 0.1
LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("x",), axis_sizes=(1,), slots=(0,)),
    leaves=(Leaf(path="w", shape=(ROWS,), dtype="float32", spec=()),),
)


class Left(Exception):
    """What an interrupted wait raises."""


class Host:
    """A manager and the agent's end of its link, with a real arena."""

    def __init__(self, directory: Path) -> None:
        placement = place_copies(LAYOUT, 1)
        self.holder = ReplicaStore(
            LAYOUT, 0, placement, path=directory / "arena", chunk_bytes=CHUNK
        )
        ours, theirs = socket.socketpair()
        self.agent, self._link = AgentLink(theirs), AgentLink(ours)
        self.dialogue = Dialogue(self._link, LIMIT_S)
        self.manager = AgentCheckpointManager(
            self.dialogue, slot=0, chunk_bytes=CHUNK, storage_directory=directory
        )
        self.dialogue.start(self.manager.take)
        order = {"source": "init", "step": 0, "arena": str(self.holder.path)}
        self.agent.send("restore", **order)
        self.manager.announce(LAYOUT)
        assert self.agent.receive(LIMIT_S)["op"] == "layout"
        self._staged: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Gives room for steps, and records those that are in memory."""
        with contextlib.suppress(LinkClosed):
            while True:
                message = self.agent.receive()
                if message["op"] == "stage":
                    room = asdict(self.holder.begin_stage(message["step"]))
                    self.agent.send("room", step=message["step"], copied=b"", **room)
                elif message["op"] == "staged":
                    names = ("step", "digests", "items", "kept")
                    self.holder.staged(*(message[name] for name in names))
                    self._staged.put(message)

    def save(self, step: int, value: float) -> None:
        """A save of new arrays, which are deleted once it has returned."""
        values = jax.block_until_ready(jnp.full((ROWS,), value, jnp.float32))
        self.manager.save(step, args=SaveArgs(arrays={"w": values}))
        values.delete()

    def staged(self) -> dict[str, Any]:
        """The next message that a step is in memory."""
        return self._staged.get(timeout=LIMIT_S)

    def is_told_nothing(self) -> bool:
        """Whether no step is said to be in memory for a while."""
        time.sleep(SOON_S)
        return self._staged.empty()

    def close(self) -> None:
        self.manager.close()
        self.dialogue.close()
        self._link.close()
        self.agent.close()
        self.holder.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host whose state counts as large."""
    monkeypatch.setattr(snapshot, "BRIEF_BYTES", CHUNK - 1)
    monkeypatch.setattr(snapshot, "RANGE_BYTES", 4 * CHUNK)
    monkeypatch.setattr(digests, "THREAD_BYTES", 4 * CHUNK)
    monkeypatch.setattr(digests.os, "sched_getaffinity", lambda _: range(3))
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Opens the digesting; open at the end, so that no thread is left waiting."""
    gate, digest = threading.Event(), snapshot.digests_of

    def waiting(written: Any) -> list[bytes]:
        assert gate.wait(LIMIT_S)
        return digest(written)

    monkeypatch.setattr(snapshot, "digests_of", waiting)
    yield gate
    gate.set()


def _bytes(value: float) -> bytes:
    return np.full((ROWS,), value, np.float32).tobytes()


def test_the_save_returns_before_the_digests_are_made(
    host: Host, gate: threading.Event
) -> None:
    host.save(1, 1.5)
    assert host.manager.stalls_s and host.is_told_nothing()
    gate.set()
    assert host.staged()["digests"] == [chunk_digests(_bytes(1.5), CHUNK)]
    (piece,) = host.holder.own_slices
    assert bytes(host.holder.own_parts(1, piece)) == _bytes(1.5)


def test_the_next_save_waits_for_the_digests_and_compares_with_them(
    host: Host, gate: threading.Event
) -> None:
    host.save(1, 1.5)
    second = threading.Thread(target=host.save, args=(2, 1.5))
    second.start()
    assert host.is_told_nothing() and second.is_alive()
    gate.set()
    assert host.staged()["step"] == 1
    second.join(LIMIT_S)
    message = host.staged()
    chunks = ROWS * 4 // CHUNK
    kept = np.unpackbits(np.frombuffer(message["kept"], np.uint8), count=chunks)
    assert message["step"] == 2 and kept.all()


def test_a_manager_that_is_closed_sends_no_digests(
    host: Host, gate: threading.Event
) -> None:
    host.save(1, 1.5)
    digested = host.manager._digested
    assert digested is not None
    host.manager.close()
    gate.set()
    assert digested.result(LIMIT_S) is None and host.is_told_nothing()


def test_waiting_for_digests_can_be_interrupted(
    host: Host, gate: threading.Event
) -> None:
    host.save(1, 1.5)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            host.manager.wait_until_finished()
        except Left as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(SOON_S)
    assert waiting.is_alive()
    host.dialogue.interrupt(waiting, Left)
    waiting.join(LIMIT_S)
    assert len(raised) == 1


def test_digests_are_made_also_where_no_thread_can_be_started(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the interpreter ends, after a script's last save."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    class Pool(ThreadPoolExecutor):
        submit = refuse  # type: ignore[assignment]

    host.manager._digester.shutdown()
    copied = snapshot.SnapshotPlan.write

    def copying(*args: Any) -> snapshot.CopiedStep:
        made = copied(*args)
        monkeypatch.setattr(snapshot, "ThreadPoolExecutor", Pool)
        return made

    monkeypatch.setattr(snapshot.SnapshotPlan, "write", copying)
    host.save(1, 1.5)
    assert host.staged()["digests"] == [chunk_digests(_bytes(1.5), CHUNK)]


def test_a_step_without_digests_counts_as_not_saved_and_can_be_saved_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> list[bytes]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "digests_of", fail)
        host.save(1, 1.5)
        with pytest.raises(RuntimeError, match=r"step 1 .*MemoryError: no memory"):
            host.manager.wait_until_finished()
    host.save(1, 2.5)
    assert host.staged()["digests"] == [chunk_digests(_bytes(2.5), CHUNK)]
    host.agent.send(
        "release", step=1, committed=True, stop_at=None, changes=[], room=None
    )
    host.manager.wait_until_finished()
    assert host.manager.latest_step() == 1
