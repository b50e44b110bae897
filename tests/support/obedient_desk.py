"""A leader with hosts that do at once what they are told."""

from pathlib import Path
from typing import Any

from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.elastic.assignment import HostRecord, SizeLimits, SlotAssignment
from tests.support.commits import layout, root_of, value
from tests.support.desks import LeaderDesk, record_of

STATE = layout(2, 1)
PROMPT_S = 0.5
"""Nobody here takes any time; the leader ticks."""


class ObedientDesk(LeaderDesk):
    """A leader of a job with two slots, h0 and h1; the other hosts are spares."""

    def __init__(
        self, directory: Path, hosts: int, min_replicas: int = 0, **changes: Any
    ) -> None:
        """The job trains; `answers` has the answers of requests. `changes` are those of
        the agents' config."""
        sizes = SizeLimits(min_replicas=min_replicas, global_batch=96)
        super().__init__(directory, record_number(0), sizes=sizes, **changes)
        self.exports: list[tuple[str, int, int]] = []
        self.answers: list[dict[str, Any]] = []
        self.held: dict[int, Any] = {7: STATE}
        self.silent: set[str] = set()
        self.obeyed: SlotAssignment | None = None
        """What the hosts tell a leader whose store does not know it."""
        self.members = {"h0", "h1"}
        for number in range(hosts):
            self.register(record_number(number))
        self.put("m/assignment", _assignment().to_json())
        self.put("c/commits", _commit(7, STATE).to_json())
        self.lead()

    def lead(self) -> None:
        """A leader takes over, and the job trains again."""
        self.begin()
        self.until(lambda: self.leader._rendezvous.phase in ("running", "waiting"))

    def ordered(self, host: str, op: str, **fields: Any) -> None:
        """A host obeys."""
        super().ordered(host, op, **fields)
        if op == "export":
            self.exports.append((host, fields["step"], fields["slot"]))
        if host in self.silent and op == "prepare":
            return
        told = {"ballot": fields.get("ballot")}
        if op == "reform":
            digests = {
                p.key: value(p.key) for s in self.held.values() for p in s.owners
            }
            mine = self.held if host in self.members else {}
            holdings = {step: digests for step in mine}
            known = [state.to_json() for state in mine.values()]
            told |= {"op": "holdings", "holdings": holdings, "layouts": known}
            told |= {"corrupt": [], "finished": 7, "items": {}}
            if self.obeyed is not None and host in self.obeyed.slots:
                told["assignment"] = self.obeyed.to_json()
            self.report(host, told)
        elif op == "prepare":
            self.members.add(host)
            restored = {key: value(key) for key in fields["digests"]}
            prepared = {"op": "prepared", "own": 1, "peers": 2, "seconds": 0.0}
            prepared |= {"export_port": 1, "restored": restored}
            if not fields["resized"]:
                prepared["restored"] = {}
            self.report(host, told | prepared)
            announced = {"op": "layout", "layout": fields["layout"]}
            self.report(host, told | announced)
            running = {"op": "running", "bytes_from_storage": 0, "step": 8}
            running["slot"] = fields["slot"]
            self.report(host, told | running)

    def report(self, host: str, message: dict[str, Any]) -> None:
        """What a host says reaches the leader."""
        self.loop.post(lambda: self.leader.handle_report(host, message))

    def until(self, ready: Any, limit_s: float = PROMPT_S) -> None:
        """Lets time pass until something is so; the leader sees the store's news."""

        def so() -> bool:
            self.look()
            return ready()

        self.loop.turn_until(so, limit_s)

    def ask(self, replicas: int) -> None:
        """A user asks for another number of replicas."""
        self.leader.scaling_wanted(replicas, self.answers.append)

    def commit(self, step: int) -> None:
        """All hosts of the formation stage and hold a step; the leader records it."""
        coordinator = self.leader._rendezvous.coordinator
        assert coordinator is not None
        self.held = {step: coordinator.layout}
        for slot in range(coordinator.layout.mesh.num_slots):
            told = [value(piece.key) for piece in coordinator.layout.slices(slot)]
            coordinator.staged(slot, step, told)
        for push in place_copies(coordinator.layout, 2).pushes:
            coordinator.held(step, push.source, push.target, root_of(push))
        told = self.leader._journal
        self.until(lambda: told.last_commit == step)

    def lose(self, host: str) -> None:
        """A host's process ends."""
        self.delete(f"m/hosts/{host}")
        self.leader.lost(host, "its port is dead")
        self.look()

    def settle(self, slots: int) -> None:
        """Until the job trains on so many hosts."""

        def trains() -> bool:
            found = self.leader._rendezvous.assignment
            running = self.leader._rendezvous.phase == "running"
            return running and found is not None and len(found.slots) == slots

        self.until(trains)


def record_number(number: int) -> HostRecord:
    """The record of host h0, h1 and so on."""
    return record_of(f"h{number}", joined_ns=number)


def _assignment() -> SlotAssignment:
    return SlotAssignment(
        generation=1,
        attempt=1,
        slots=("h0", "h1"),
        incarnations=("h0.1", "h1.1"),
        source="init",
        step=0,
        rung=None,
        reason="",
    )


def _commit(step: int, state: Any) -> Commit:
    slots = state.mesh.num_slots
    return Commit(
        step=step,
        generation=1,
        attempt=1,
        root=digest_root((p.key, value(p.key)) for p in state.owners),
        layout=state.digest,
        holders=tuple(f"h{n}" for n in range(slots)),
        copies=2,
    )
