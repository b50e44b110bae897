"""Hosts whose copies move onto other layouts: real arenas, sockets, digests.

Each host keeps its copies as an agent does; the job plays the leader with the pure
functions that the real leader uses. There are no trainers: bytes are a function of the
step and of where in the leaf they are.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.commit import Commit, Located
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout, Slice
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.recovery import RecoveryDecision, decide, fetches_for
from dtft.elastic.leader.rendezvous_plan import Round
from dtft.elastic.leader.scaling import Proof, prove
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.replica_server import Inbox, serve_fetch
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.hosts import hand_over, stage

CHUNK = 256
LIMIT_S = 20.0
JOB = Credentials(job="j", secret=b"s" * 32)


class Host:
    """One host's copies, served."""

    def __init__(self, name: str, directory: Path, copies: int) -> None:
        self.name, self.epoch = name, (0, 0)
        self.config = AgentConfig(
            job="j",
            host=name,
            store="s:1",
            secret=JOB.secret,
            num_slots=1,
            trainer_command=(),
            run_directory=directory,
            storage_directory=directory / "checkpoints",
            config_digest="",
            arena_directory=directory,
            chunk_bytes=CHUNK,
            copies=copies,
        )
        self.config.memory_directory.mkdir()
        self.copies = Copies(self.config)
        inbox = Inbox(
            epoch=lambda: self.epoch,
            holder=lambda: self.copies.holder,
            held=lambda *_: None,
            former=lambda: self.copies.former,
        )
        self.server = TransportServer(
            "127.0.0.1:0", JOB, {"fetch": lambda channel: serve_fetch(channel, inbox)}
        )

    @property
    def holder(self) -> ReplicaStore:
        assert self.copies.holder is not None
        return self.copies.holder

    @property
    def arenas(self) -> list[str]:
        return sorted(it.name for it in self.config.memory_directory.iterdir())

    def close(self) -> None:
        self.server.close()
        self.copies.close()


class Job:
    """Hosts by name; what the leader knows of them."""

    def __init__(self, directory: Path, names: Sequence[str], copies: int = 2) -> None:
        self.hosts = {name: Host(name, directory, copies) for name in names}
        self.num_copies, self.commits = copies, []
        self._epochs = itertools.count(1)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()

    def lose(self, name: str) -> None:
        self.hosts.pop(name).close()

    def train(self, layout: Layout, slots: Sequence[str], step: int) -> Commit:
        """Every host of a formation holds a step, own and hosted; it is committed."""
        placement = place_copies(layout, self.num_copies)
        digests: dict[str, bytes] = {}
        for slot, name in enumerate(slots):
            holder = self.hosts[name].copies.hold(layout, slot, keep=step)
            made = {
                piece.key: content(layout, step, piece) for piece in holder.own_slices
            }
            stage(holder, step, lambda key, _, made=made: made[key])
            keys = [piece.key for piece in holder.own_slices]
            digests |= dict(zip(keys, holder.all_own_digests(step), strict=True))
        for push in placement.pushes:
            source, target = (
                self.hosts[slots[it]].holder for it in (push.source, push.target)
            )
            hand_over(source, target, push, step)
        commit = Commit(
            step=step,
            generation=1,
            attempt=1,
            root=digest_root(digests.items()),
            layout=layout.digest,
            holders=tuple(slots),
            copies=placement.effective_copies,
        )
        self.commits = [commit, *self.commits][:2]
        for name in slots:
            self.hosts[name].copies.committed()
            self.hosts[name].holder.drop_before(step, keep={step})
        return commit

    def decide(self, slots: Sequence[str]) -> RecoveryDecision:
        """What the leader would do with these hosts in these slots."""
        round_ = Round(ballot=(1, 1), reasons=[], detected=0.0)
        for name, host in self.hosts.items():
            round_.reply(name, {**host.copies.report(), "finished": 0})
        self.corrupt = round_.corrupt
        return decide(
            commits=self.commits,
            layout=None,
            holdings={name: it["holdings"] for name, it in round_.replies.items()},
            slots=slots,
            storage_steps=[],
            other_layouts=round_.layouts.values(),
        )

    def restore(
        self, decision: RecoveryDecision, slots: Sequence[str], only: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """The hosts (or only some) do as they are told; what came of it."""
        located, layout = decision.located, decision.layout
        assert located is not None and layout is not None
        assert decision.plan is not None
        addresses = {name: host.server.address for name, host in self.hosts.items()}
        epoch, told = (next(self._epochs), 1), {}
        for slot, name in enumerate(slots):
            if only and name not in only:
                continue
            order = {
                "generation": epoch[0],
                "attempt": epoch[1],
                "step": decision.step,
                "digests": located.digests,
                "items": {"step": decision.step},
                "resized": True,
                "read": True,
                **fetches_for(decision.plan, addresses, name),
            }
            told[name] = self._obey(self.hosts[name], layout, slot, order)
        return told

    def _obey(
        self, host: Host, layout: Layout, slot: int, order: Mapping[str, Any]
    ) -> dict[str, Any]:
        host.epoch = order["generation"], order["attempt"]
        holder = host.copies.hold(layout, slot, keep=order["step"])
        former = host.copies.former
        return restore_into(holder, dict(order), host.name, JOB, LIMIT_S, former=former)

    def proof(self, decision: RecoveryDecision, told: Mapping[str, Any]) -> Proof:
        located: Located | None = decision.located
        assert located is not None and decision.layout is not None
        restored = [outcome["restored"] for outcome in told.values()]
        return prove(located, decision.layout, restored)

    def wrong(self, layout: Layout, slots: Sequence[str], step: int) -> list[str]:
        """Own slices that do not have the very bytes of the step."""
        return [
            f"{name}: {piece.key}"
            for slot, name in enumerate(slots)
            for piece in layout.slices(slot)
            if bytes(self.hosts[name].holder.own_parts(step, piece))
            != content(layout, step, piece)
        ]


def content(layout: Layout, step: int, piece: Slice) -> bytes:
    """The bytes of a slice: cut out of the leaf's, whatever the layout."""
    (leaf,) = (it for it in layout.leaves if it.path == piece.path)
    size = np.dtype(leaf.dtype).itemsize
    count = int(np.prod(leaf.shape, dtype=np.int64)) * size
    seed = sum(leaf.path.encode()) * 1000 + step
    whole = np.random.default_rng(seed).bytes(count)
    raw = np.frombuffer(whole, np.dtype((np.void, size))).reshape(leaf.shape)
    ranges = zip(piece.start, piece.stop, strict=True)
    return raw[tuple(slice(a, b) for a, b in ranges)].tobytes()
