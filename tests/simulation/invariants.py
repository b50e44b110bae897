"""What must hold in every run, looked at from outside while it goes on.

Safety is checked at every write to the store and at every restore; that hosts are used
and steps are committed, once a second. See issue 17, Must hold 1.
"""

import itertools
import json
from typing import Any

from dtft.checkpoint.replication.commit import Commit
from dtft.elastic.assignment import SlotAssignment, process_of
from dtft.elastic.store.view import job_key
from tests.simulation.memory import SimHolder, right
from tests.simulation.storage import whole
from tests.simulation.store import STORE
from tests.simulation.trainers import SimTrainer
from tests.simulation.world import Node, World

LOOK_S = 1.0
USABLE_LEASES = 3
SLACK_S = 3.0
COMMIT_S = 60.0
LEAVE_S = 30.0
LEADERS_KEYS = ("m/assignment", "m/stored", "m/result", "m/budget", "c/commits")


class Invariants:
    """Watches one world."""

    def __init__(
        self, world: World, *, trusting: bool = True, may_fail: bool = False
    ) -> None:
        """Args:
        world: what is watched.
        trusting: no host lies, so what hosts say of copies is checked as well.
        may_fail: the job may end with an error.
        """
        self._world, self._trusting, self._may_fail = world, trusting, may_fail
        self._writers: dict[tuple[int, int], tuple[str, str]] = {}
        self._eras = 0
        self.newest = 0
        """The newest step that was ever recorded as committed."""
        self.committed: set[int] = {0}
        """Steps that were recorded, or were complete while the store was away."""
        self.commits = 0
        self._committed_at = self._progress_at = 0.0
        """When a step was last committed, or fewer hosts than needed were well."""
        self._well: set[str] = set()
        self._at_end: list[Node] = []
        """Agents with which nothing was wrong just before the job had a result."""
        self._usable_at: dict[str, float] = {}
        world.etcd.watchers.append(self._written)
        world.job.restored = self._restored
        world.job.released = self.committed.add
        world.observers.append(self._journal)
        world.scheduler.after(LOOK_S, self._look)
        self.bad_storage = False
        """Storage was away when it may have been needed."""

    # ------------------------------------------------------------------ safety

    def _written(self, writer: str, events: Any) -> None:
        world = self._world
        for event in events:
            key = event.kv.key
            name = key.removeprefix(job_key("j", ""))
            if event.kind != "put" or name not in LEADERS_KEYS:
                continue
            self._fenced(writer, name)
            if name == "c/commits":
                lines = event.kv.value.decode().splitlines()
                self._commit([Commit.from_json(line) for line in lines])
            elif name == "m/assignment":
                self._assigned(SlotAssignment.from_json(event.kv.value))
            elif name == "m/result":
                self._ended(json.loads(event.kv.value))
        del world

    def _fenced(self, writer: str, name: str) -> None:
        """Only who has the leader key writes; one process in each term."""
        pairs = self._world.etcd.twin.listing(job_key("j", "m/"))
        leader = pairs.get(job_key("j", "m/leader"))
        if leader is None or leader.value.decode() != writer:
            self._world.wrong(f"(a) {writer} wrote {name} without the leader key")
            return
        era = pairs.get(job_key("j", "m/era"))
        term = (id(self._world.etcd.twin), leader.create_revision)
        node = self._world.nodes.get(writer)
        process = node.number if node is not None else 0
        known = self._writers.setdefault(term, (writer, str(process)))
        if known != (writer, str(process)) and era is not None:
            self._world.wrong(f"(a) {known} and {writer} {process} wrote in one term")

    def _commit(self, commits: list[Commit]) -> None:
        world, commit = self._world, commits[0]
        self._committed_at = self._progress_at = world.now
        self.commits += 1
        self.committed |= {it.step for it in commits}
        if commit.step <= self.newest:
            return
        self.newest = commit.step
        if not self._trusting:
            return
        # A write that the store takes late may be of a step that was released since:
        # then the commit before it is still there.
        short = [self._lacking(it) for it in commits]
        moved_on = max((it.newest_step for it in self._holders(commit)), default=0)
        late = len(commits) == 1 and moved_on > commit.step
        if all(short) and not late:
            world.wrong(f"(b) step {commit.step} committed without copies: {short}")

    def _holders(self, commit: Commit) -> "list[SimHolder]":
        nodes = [self._world.nodes.get(host) for host in commit.holders]
        return [
            node.copies.holder
            for node in nodes
            if node is not None
            and node.alive
            and isinstance(node.copies.holder, SimHolder)
        ]

    def _lacking(self, commit: Commit) -> dict[str, int]:
        """Slices that are not on as many of the holders as the commit says."""
        world = self._world
        unknown = 0
        counts = {piece.key: 0 for piece in world.layout.owners}
        for host in commit.holders:
            node = world.nodes.get(host)
            epoch = commit.generation, commit.attempt
            if node is None or not node.alive or node.agent._follower.epoch != epoch:
                unknown += 1  # it has gone, or stood down, since it said so
                continue
            holder = node.copies.holder
            here = holder.here(commit.step) if isinstance(holder, SimHolder) else {}
            for key, digest in here.items():
                counts[key] += digest == right(key, commit.step)
        return {
            key: count
            for key, count in counts.items()
            if count + unknown < min(commit.copies, len(commit.holders))
        }

    def _assigned(self, assignment: SlotAssignment) -> None:
        """No newer commit is passed over that the assigned hosts hold."""
        if not self._trusting or assignment.step >= self.newest:
            return
        world = self._world
        step, found = self.newest, set()
        for host in assignment.slots:
            node = world.nodes.get(host)
            if node is None or not node.alive:
                return
            for holder in node.copies.holders():
                assert isinstance(holder, SimHolder)
                for key, digest in holder.here(step).items():
                    bad = (step, key) in holder.corrupt
                    if digest == right(key, step) and not bad:
                        found.add(key)
        quarantined = any(
            step in node.leader._rendezvous.failures.quarantined
            for node in world.leading
            if node.host == world.store_leader()
        )
        everything = {piece.key for piece in world.layout.owners}
        if found >= everything and not quarantined and step in self._known():
            world.wrong(
                f"(b) {assignment.source} step {assignment.step} is restored, though "
                f"{assignment.slots} hold the committed step {step}"
            )

    def _known(self) -> set[int]:
        """Committed steps that the store has, or that a connected host was told of.

        A leader that dies, or is cut off, between the record and the first word to
        others, while the store loses its data, takes the knowledge of it along.
        """
        stored = self._world.etcd.twin.listing(job_key("j", "c/commits")).values()
        lines = [line for it in stored for line in it.value.decode().splitlines()]
        return {Commit.from_json(line).step for line in lines} | self._told(
            self._connected()
        )

    def _told(self, nodes: list[Node]) -> set[int]:
        """Steps whose commit hosts were told of; with the store away, released ones."""
        return {
            commit.step for node in nodes for commit in node.agent._follower._commits
        }

    def _restored(self, trainer: SimTrainer, source: str, step: int) -> None:
        if source != "init" and step not in self.committed | self._told(
            self._world.live
        ):
            self._world.wrong(f"(b) {trainer.host} restores step {step}: no commit")

    def _ended(self, result: dict[str, Any]) -> None:
        world, last = self._world, self._world.settings.last_step
        if result["status"] == "error" and not self._may_fail:
            world.wrong(f"the job ended with an error: {result['message']}")
        if result["status"] == "done":
            stored = world.storage.steps.get(result["step"])
            if result["step"] != last or stored is None:
                world.wrong(f"(g) done at {result['step']} of {last}, stored {stored}")
            elif not whole(world.layout, stored, last):
                world.wrong(f"(g) what is stored of step {last} is wrong")

    def _journal(self, at: float, host: str, kind: str, fields: dict) -> None:
        if kind == "end" and fields.get("status") == "error" and not self._may_fail:
            self._world.wrong(f"{host} ends the job: {fields['message']}")

    # ---------------------------------------------------------------- liveness

    def well(self) -> list[Node]:
        """Agents that run and reach, and are reached by, every other and the store."""
        healthy = self._world.etcd.healthy and not self._world.mutating
        return self._connected() if healthy else []

    def _connected(self) -> list[Node]:
        """Agents with which nothing is wrong, whatever the store does."""
        cut = self._world.wire.cut_hosts() - {STORE}
        return [node for node in self._unhurt() if node.host not in cut]

    def _unhurt(self) -> list[Node]:
        """Agents with which nothing is wrong, whatever the network does."""
        world = self._world
        bad = set(world.memory_full) | set(world.no_processes) | set(world.wire.delay_s)
        bad |= {it.host for it in world.live if it.agent._membership.record.leaving}
        bad |= {it for one in world.leading for it in one.leader._registry.drained}
        return [
            node
            for node in world.live
            if not node.loop.paused
            and node.host not in bad
            and not node.loop.slow_s
            and not any(it.stopped or it.immortal_s for it in node.trainers.all())
        ]

    def _enough_together(self) -> bool:
        """Whether hosts enough for all slots, the leader's among them, reach each other
        and the store, though they do not all reach every other host.
        """
        world, wire = self._world, self._world.wire
        if not world.etcd.healthy or world.mutating:
            return False

        def reach(one: str, other: str) -> bool:
            return not (wire.blocked(one, other) or wire.blocked(other, one))

        cut = world.wire.cut_hosts() - {STORE}
        fine = [node.host for node in self._unhurt() if reach(node.host, STORE)]
        leader = world.store_leader()
        if not cut or leader not in fine:
            return False
        all_reached = [host for host in fine if reach(host, leader)]
        return any(
            all(reach(a, b) for a, b in itertools.combinations(chosen, 2))
            for chosen in itertools.combinations(all_reached, world.settings.slots)
        )

    def _look(self) -> None:
        world = self._world
        world.scheduler.after(LOOK_S, self._look)
        well = self.well()
        if world.result is None:
            self._at_end = self._connected()
        names = {f"{node.host}#{node.number}": node for node in well}
        if set(names) != self._well:  # whoever led may be gone: the time begins anew
            self._well = set(names)
            self._usable_at = dict.fromkeys(names, world.now)
        limit_s = USABLE_LEASES * world.settings.timeouts.lease + SLACK_S
        for name, node in names.items():
            if self._is_usable(node) or world.result is not None:
                self._usable_at[name] = world.now
            elif world.now >= self._usable_at[name] + limit_s:
                world.wrong(
                    f"(c) {node.host} is alive and connected, but no leader has it: "
                    f"{self.explain()}"
                )
        storage_needed = not world.storage.healthy
        enough = len(well) >= world.settings.slots or self._enough_together()
        enough = enough and not storage_needed
        if not enough or world.mutating or world.job.failing:
            self._progress_at = world.now
        if world.now >= self._progress_at + COMMIT_S and world.result is None:
            world.wrong(
                f"(d) {len(well)} hosts are well, but no step was committed for "
                f"{COMMIT_S:.0f} s: {self.explain()}"
            )

    @property
    def idle_since(self) -> float:
        """When a step was committed last."""
        return self._committed_at

    def finish(self, result_at: float | None) -> None:
        """The run is over; `result_at`: when the job had a result."""
        world = self._world
        if result_at is None or world.now < result_at + LEAVE_S:
            return
        for node in self.well():
            if node in self._at_end:  # others could not be told
                world.wrong(f"(h) {node.host} still runs, the job has ended")

    def _is_usable(self, node: Node) -> bool:
        """In a slot, or known to a leader that may give it one."""
        for leading in self._world.leading:
            registry = leading.leader._registry
            known = registry.records.get(node.host)
            mine = process_of(node.agent._membership.record.incarnation)
            if known is not None and process_of(known.incarnation) == mine:
                if leading.host == node.host or node.host in registry.connected:
                    return True
        return False

    def explain(self) -> str:
        """Where everybody is, for people."""
        world = self._world
        parts = [f"store leader {world.store_leader() or 'nobody'}"]
        for node in world.live:
            agent = node.agent
            text = f"{node.host}: follows term {agent._leader_link.term}"
            leader = agent._leader_link._leader
            text += f" of {leader.host if leader else None}"
            text += f" epoch {agent._follower.epoch}"
            if node.loop.paused:
                text += " paused"
            if node.leader is not None:
                rendezvous = node.leader._rendezvous
                text += (
                    f" LEADS phase {rendezvous.phase} frozen {rendezvous.frozen} "
                    f"deadline in {rendezvous.deadline - node.loop.now():.1f} "
                    f"connected {sorted(node.leader._registry.connected)} unusable "
                    f"{node.leader._registry.unusable()}"
                )
            trainer = node.trainers.trainer
            if trainer is not None:
                text += (
                    f" trainer step {trainer._step} phase {trainer.phase!r} "
                    f"waits {trainer._waits_for!r} done {trainer.done}"
                )
            parts.append(text)
        return "\n    ".join(parts)
