"""Trainers of unlike speed take snapshots after the same steps, also when restored."""

import itertools
import queue
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dtft.checkpoint.managers.agent_client import (
    AgentCheckpointManager,
    RestoreArgs,
    SaveArgs,
)
from dtft.checkpoint.managers.agent_link import AgentLink, Dialogue, LinkClosed
from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.commit import push_root
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.replication.snapshot_interval import Automatic, Cadence
from dtft.checkpoint.state.slices import Layout
from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.storage import StorageHealth
from dtft.train.worker import WindowClock
from tests.support.commits import layout

CHUNK = 256
HOSTS = ("h0", "h1")
LIMIT_S = 30.0
MAXIMUM = 32


class Agents:
    """Two hosts' agents and a commit coordinator: real links, arenas and commits."""

    def __init__(self, directory: Path, state: Layout) -> None:
        self.state, self.step, self.ends = state, 0, []
        placement = place_copies(state, 2)
        self.following: list[int | None] = [None, None]
        self.holders = [
            ReplicaStore(
                state, slot, placement, path=directory / host, chunk_bytes=CHUNK
            )
            for slot, host in enumerate(HOSTS)
        ]
        self.committed: list[int] = []

    def begin(self) -> list[AgentLink]:
        """A formation: the trainers' ends of new links."""
        config = AgentConfig(
            job="j",
            host="h0",
            store="s:1",
            secret=b"x" * 16,
            num_slots=2,
            trainer_command=(),
            run_directory=Path("/nowhere"),
            storage_directory=Path("/nowhere/checkpoints"),
            config_digest="",
            storage_interval=0,
            cadence=Cadence(interval=1, period=MAXIMUM),
            automatic=Automatic(budget=0.01, maximum=MAXIMUM),
        )
        assignment = SlotAssignment(
            generation=1,
            attempt=1,
            slots=HOSTS,
            incarnations=HOSTS,
            source="memory" if self.step else "init",
            step=self.step,
            rung=1,
            reason="test",
        )
        recorded: queue.Queue[Any] = queue.Queue()
        coordinator = CommitCoordinator(
            config,
            self.state,
            assignment,
            stored=0,
            export_addresses={},
            addresses={},
            record=recorded.put,
            send=self._release,
            health=StorageHealth(Path("/nowhere")),
        )
        reports: queue.Queue[Any] = queue.Queue()
        pairs = [socket.socketpair() for _ in HOSTS]
        self.ends = [AgentLink(end) for _, end in pairs]
        for slot in range(2):
            threading.Thread(
                target=self._serve, args=(slot, reports), daemon=True
            ).start()
        threading.Thread(
            target=self._lead, args=(coordinator, reports, recorded), daemon=True
        ).start()
        return [AgentLink(end) for end, _ in pairs]

    def _release(self, host: str, op: str, **fields: Any) -> None:
        slot = HOSTS.index(host)
        self.holders[slot].drop_before(fields["step"], keep={fields["step"]})
        following, self.following[slot] = self.following[slot], None
        room = None if following is None else self._room(slot, following)
        try:
            self.ends[slot].send(op, room=room, **fields)
        except LinkClosed:
            pass

    def _room(self, slot: int, step: int) -> dict[str, Any]:
        room = asdict(self.holders[slot].begin_stage(step))
        return {"step": step, "copied": b"", **room}

    def _serve(self, slot: int, reports: queue.Queue[Any]) -> None:
        link, holder = self.ends[slot], self.holders[slot]
        try:
            while True:
                message = link.receive()
                op = message.pop("op")
                if op == "layout":
                    link.send("restore", **self._order(holder))
                elif op == "stage":
                    link.send("room", **self._room(slot, message["step"]))
                elif op == "staged":
                    items, kept = message.pop("items"), message.pop("kept")
                    holder.staged(message["step"], message["digests"], items, kept)
                    self.following[slot] = message.pop("following")
                    reports.put((slot, message))
        except LinkClosed:
            link.close()
            reports.put(None)

    def _order(self, holder: ReplicaStore) -> dict[str, Any]:
        known = self.step > 0
        return {
            "source": "memory" if known else "init",
            "step": self.step,
            "arena": str(holder.path),
            "buffers": holder.own_buffers(self.step) if known else b"",
            "digests": holder.all_own_digests(self.step) if known else [],
            "items": holder.items(self.step) if known else {},
        }

    def _lead(
        self, coordinator: CommitCoordinator, reports: Any, recorded: Any
    ) -> None:
        known: dict[str, bytes] = {}
        while (report := reports.get()) is not None:
            slot, message = report
            keys = [piece.key for piece in coordinator.layout.slices(slot)]
            known |= zip(keys, message["digests"], strict=True)
            coordinator.staged(slot, **message)
            if slot == 1:
                for push in coordinator.placement.pushes:
                    root = push_root(push, known)
                    coordinator.held(message["step"], push.source, push.target, root)
            while not recorded.empty():
                commit = recorded.get()
                self.committed.append(commit.step)
                self.step = commit.step
                coordinator.written(commit)

    def close(self) -> None:
        for holder in self.holders:
            holder.close()


class Trainer(threading.Thread):
    """A training loop without a model; slot 1 is slow now and then."""

    def __init__(self, link: AgentLink, state: Layout, slot: int, last: int) -> None:
        super().__init__(daemon=True)
        self.link, self.state, self.slot, self.last = link, state, slot, last
        self.saved: list[int] = []
        self.items: dict[str, Any] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # told by the test's own thread
            self.error = error
        finally:
            self.link.close()

    def _train(self) -> None:
        dialogue = Dialogue(self.link, LIMIT_S)
        manager = AgentCheckpointManager(
            dialogue,
            slot=self.slot,
            chunk_bytes=CHUNK,
            storage_directory=Path("/nowhere"),
            cadence=Cadence(interval=1, period=MAXIMUM),
            automatic=True,
            last=self.last if self.slot else None,  # one asks for room ahead
        )
        dialogue.start(manager.take)
        manager.announce(self.state)
        device = jax.devices()[self.slot]
        arrays = {
            leaf.path: jax.device_put(jnp.ones(leaf.shape, leaf.dtype), device)
            for leaf in self.state.leaves
        }
        jax.block_until_ready(arrays)  # as `save` asks for
        abstract = {
            path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for path, a in arrays.items()
        }
        found = manager.restore(args=RestoreArgs(abstract=abstract))
        self.items = found[1] if found else {}
        clock, step = WindowClock(), self.items.get("step", 0)
        while step < self.last:
            step += 1
            clock.dispatched(step, time.monotonic())
            if self.slot == 1 and step % 3 == 0:
                time.sleep(0.002)
            if step < self.last and not manager.should_save(step):
                continue
            manager.wait_until_finished()
            now, released = time.monotonic(), manager.released_at
            window = clock.finished(step, now, released_at=released, stall_s=0.0)
            args = SaveArgs(arrays=arrays, items={"step": step}, window=window)
            manager.save(step, args=args)
            self.saved.append(step)
        manager.wait_until_finished()
        manager.close()


def train(agents: Agents, last: int) -> list[Trainer]:
    links = agents.begin()
    trainers = [Trainer(link, agents.state, s, last) for s, link in enumerate(links)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(LIMIT_S)
        assert not trainer.is_alive()
        if trainer.error is not None:
            raise trainer.error
    return trainers


def test_trainers_agree_before_and_after_a_restore(tmp_path: Path) -> None:
    agents = Agents(tmp_path, layout(2, 1))
    try:
        first = train(agents, 150)
        assert first[0].saved == first[1].saved == agents.committed
        gaps = [b - a for a, b in itertools.pairwise(first[0].saved)]
        assert gaps[:8] == [1] * 8 and max(gaps) >= 16
        assert {32, 64, 96, 128} <= set(first[0].saved)
        restored = train(agents, 200)
        assert [t.items["step"] for t in restored] == [150, 150]
        interval = restored[0].items["interval"]
        cadence = Cadence(interval=interval, period=MAXIMUM)
        for trainer in restored:
            assert trainer.items["interval"] == interval
            assert trainer.saved[0] == cadence.following(150)
        assert restored[0].saved == restored[1].saved
    finally:
        agents.close()


@pytest.mark.parametrize("automatic, kept", [(True, 8), (False, 1)])
def test_a_fixed_interval_overrules_that_of_the_commit(
    automatic: bool, kept: int, tmp_path: Path
) -> None:
    ours, theirs = (AgentLink(end) for end in socket.socketpair())
    holder = ReplicaStore(
        layout(1, 1),
        0,
        place_copies(layout(1, 1), 1),
        path=tmp_path / "a",
        chunk_bytes=CHUNK,
    )
    zeros = {p.key: bytes(16) for p in holder.own_slices}
    with holder.begin_restore(8, zeros, {"step": 8, "interval": 8}):
        pass
    order = {"source": "memory", "step": 8, "arena": str(holder.path), "items": {}}
    order |= {"buffers": b"", "digests": []}
    order["items"] = holder.items(8)
    theirs.send("restore", **order)
    dialogue = Dialogue(ours, LIMIT_S)
    manager = AgentCheckpointManager(
        dialogue,
        slot=0,
        chunk_bytes=CHUNK,
        storage_directory=tmp_path,
        cadence=Cadence(interval=1, period=MAXIMUM if automatic else 1),
        automatic=automatic,
    )
    dialogue.start(manager.take)
    manager.announce(Layout(mesh=layout(1, 1).mesh, leaves=()))
    assert manager.restore(args=RestoreArgs(abstract={})) is not None
    assert manager.interval() == kept
    assert manager.should_save(16) and manager.should_save(9) == (not automatic)
    manager.close()
    theirs.close()
    ours.close()
    holder.close()
