"""A job whose hosts are threads: real arenas, sockets, digests, pushes and fetches.

Each host has its own arena and server; the job plays the leader with the pure
functions that the real leader uses. The devices of this process are the hosts' devices.
"""

import queue
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.memory.snapshot import Snapshot, SnapshotPlan
from dtft.checkpoint.replication.commit import Commit, Share, StepTracker
from dtft.checkpoint.replication.copy_placement import Shares, place_copies
from dtft.checkpoint.state.digests import pack_flags
from dtft.checkpoint.state.slices import Layout
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer
from dtft.elastic.leader.recovery import RecoveryDecision, decide, fetches_for
from dtft.elastic.transfer.replica_server import Inbox, serve_fetch, serve_pushes
from dtft.elastic.transfer.replication import Pusher
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.hosts import write

CHUNK = 256
LIMIT_S = 20.0
EPOCH = (1, 1)


class Host:
    """One host's memory, and the server that its peers reach."""

    def __init__(
        self, slot: int, layout: Layout, copies: int, path: Path, secret: Credentials
    ) -> None:
        self.slot, self._directory = slot, path
        path.mkdir()
        self.arrived: queue.Queue[tuple[int, int, str]] = queue.Queue()
        self.holder = ReplicaStore(
            layout,
            slot,
            place_copies(layout, copies),
            path=path / "arena",
            chunk_bytes=CHUNK,
        )
        self.plan = SnapshotPlan(layout, slot, CHUNK)
        self.last: Snapshot | None = None
        inbox = Inbox(
            epoch=lambda: EPOCH,
            holder=lambda: self.holder,
            held=lambda *copy: self.arrived.put(copy),
        )
        self.server = TransportServer(
            "127.0.0.1:0",
            secret,
            {
                "push": lambda channel: serve_pushes(channel, inbox),
                "fetch": lambda channel: serve_fetch(channel, inbox),
            },
        )

    def snapshot(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        copied: np.ndarray | None = None,
    ) -> list[bytes]:
        """What a trainer and its agent do for one step; the digests."""
        memory = self.holder.arena.view(0, self.holder.arena.size)
        room, last = self.holder.begin_stage(step), self.last
        base = last if last is not None and last.step == room.base else None
        buffers = np.frombuffer(room.buffers, np.uint8)
        made = self.plan.write(step, arrays, memory, buffers, base, copied)
        self.last = last = made.snapshot()
        kept = pack_flags(last.kept)
        self.holder.staged(step, last.digests, {"step": step}, kept)
        return list(last.digests)

    def own_bytes(self, step: int, path: str) -> bytes:
        """What this host holds of one leaf."""
        (piece,) = (p for p in self.holder.own_slices if p.path == path)
        return bytes(self.holder.own_parts(step, piece))

    def corrupt(self, step: int, path: str, num_bytes: int = 64) -> None:
        """Overwrites bytes in the middle of one leaf, as the seeds' defect does."""
        (piece,) = (p for p in self.holder.own_slices if p.path == path)
        parts = self.holder.own_parts(step, piece)
        write(parts, b"\xff" * num_bytes, (len(parts) - num_bytes) // 2)

    def die(self) -> None:
        """The host is gone, and its memory with it."""
        self.server.close()
        self.holder.close()
        shutil.rmtree(self._directory)


class Job:
    """Hosts by name, one for each slot at first: h0, h1, ..."""

    def __init__(
        self, layout: Layout, copies: int, directory: Path, share: Share = "full"
    ) -> None:
        self.shares = Shares(layout, copies) if share == "divided" else None
        self.layout, self.copies, self._directory = layout, copies, directory
        self.credentials = Credentials(job="job", secret=b"s" * 32)
        self.hosts: dict[str, Host] = {}
        self.commits: list[Commit] = []
        self.slots: list[str] = []
        for slot in range(layout.mesh.num_slots):
            self.slots.append(f"h{slot}")
            self._begin(f"h{slot}", slot)

    def _begin(self, name: str, slot: int) -> None:
        self.hosts[name] = Host(
            slot, self.layout, self.copies, self._directory / name, self.credentials
        )

    def lose(self, name: str) -> None:
        """A host dies; a spare, `NAME-spare`, takes its slot with empty memory."""
        host = self.hosts.pop(name)
        host.die()
        self.slots[host.slot] = f"{name}-spare"
        self._begin(f"{name}-spare", host.slot)

    def close(self) -> None:
        for host in self.hosts.values():
            host.die()

    @property
    def addresses(self) -> dict[str, str]:
        return {name: host.server.address for name, host in self.hosts.items()}

    # ------------------------------------------------------------------ a step

    def save(self, step: int, arrays: Mapping[str, jax.Array]) -> Commit:
        """Snapshot on every host, replication, commit."""
        tracker = StepTracker(self.layout, place_copies(self.layout, self.copies), step)
        for host in self.hosts.values():
            copied = self.shares and self.shares.of(host.slot, step)
            tracker.staged(host.slot, host.snapshot(step, arrays, copied))
        self._replicate(step, tracker)
        assert tracker.complete, tracker.missing
        commit = Commit(
            step=step,
            generation=1,
            attempt=1,
            root=tracker.root(),
            layout=self.layout.digest,
            holders=tuple(self.slots),
            copies=tracker.placement.effective_copies,
            share="full" if self.shares is None else "divided",
        )
        self.commits.insert(0, commit)
        for host in self.hosts.values():
            host.holder.drop_before(step, keep={step})
        return commit

    def _replicate(self, step: int, tracker: StepTracker) -> None:
        addresses = [self.addresses[name] for name in self.slots]
        pushers = [
            Pusher(
                host.holder,
                push,
                addresses[push.target],
                self.credentials,
                EPOCH,
                LIMIT_S,
            )
            for host in self.hosts.values()
            for push in host.holder.outgoing
        ]
        for pusher in pushers:
            pusher.offer(step)
        for host in self.hosts.values():
            for _ in host.holder.map.incoming:
                _, source, root = host.arrived.get(timeout=LIMIT_S)
                tracker.held(source, host.slot, root)
        for pusher in pushers:
            pusher.close()

    # --------------------------------------------------------------- a recovery

    def decide(self, storage_steps: Sequence[int] = ()) -> RecoveryDecision:
        """What the leader would restore, from what the hosts verify now."""
        return decide(
            commits=self.commits,
            layout=self.layout,
            holdings={n: host.holder.holdings()[0] for n, host in self.hosts.items()},
            slots=self.slots,
            storage_steps=storage_steps,
        )

    def orders(self, decision: RecoveryDecision) -> dict[str, dict[str, Any]]:
        """What every host is told to do."""
        assert decision.located is not None and decision.plan is not None
        return {
            name: {
                "generation": EPOCH[0],
                "attempt": EPOCH[1],
                "step": decision.step,
                "digests": decision.located.digests,
                "items": {"step": decision.step},
                "read": True,
                **fetches_for(decision.plan, self.addresses, name),
            }
            for name in self.hosts
        }

    def obey(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        """One host fetches what it lacks; what came of it."""
        holder = self.hosts[name].holder
        return restore_into(holder, order, name, self.credentials, LIMIT_S)

    def carry_out(self, decision: RecoveryDecision) -> dict[str, dict[str, Any]]:
        """Every host does as it is told; per host what came of it."""
        orders = self.orders(decision)
        return {name: self.obey(name, order) for name, order in orders.items()}
