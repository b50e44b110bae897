"""Computes formations from hosts' replies, and the orders to the hosts; no I/O.

A formation is an assignment of hosts to slots, with the state that each host restores.
A `Round` is one attempt to form the job. The functions here make a round or derive
values from one; `rendezvous` decides when each is called.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from dtft.checkpoint.replication import Commit, FailureDomains
from dtft.checkpoint.state import Layout
from dtft.checkpoint.transport import Packed, with_port
from dtft.elastic.anti_affinity import next_spread, separates_as_well
from dtft.elastic.assignment import HostRecord, SlotAssignment, next_epoch
from dtft.elastic.leader.recovery import (
    RecoveryDecision,
    RecoveryReport,
    decide,
    fetches_for,
)
from dtft.elastic.leader.world_plan import WorldPlan, sound, why_over
from dtft.elastic.seat_policy import Filled, Seating

Ballot = tuple[int, int]
"""(Leader's term, counter): increases with every new round of any leader."""


Cause = Literal["lost", "killed", "signal", "other"]
"""The kind of an event for which a round begins. lost: a host was lost. killed: a
trainer was killed by SIGKILL. signal: a trainer was killed by another signal. other:
anything else. An event of one kind may have caused events of the kinds after it."""


@dataclass(frozen=True)
class RoundReason:
    """The reason why the job is formed anew."""

    text: str
    """The reason as text for people."""
    cause: Cause = "other"
    hosts: tuple[str, ...] = ()
    """The hosts that the text names."""


def lost(
    host: str, *assignments: SlotAssignment | None, how: str = "was lost"
) -> RoundReason:
    """Makes the reason for forming the job anew after the loss of a host.

    The text has the host's slot in the first of `assignments` that contains the host.

    Args:
        host: the lost host.
        *assignments: assignments of hosts to slots, or None.
        how: what happened to the host, for the text.

    >>> lost("b").text
    'b was lost'
    """
    for assignment in assignments:
        if assignment is not None and host in assignment.slot_of:
            name = f"{host} (slot {assignment.slot_of[host]})"
            return RoundReason(f"{name} {how}", "lost", (host,))
    return RoundReason(f"{host} {how}", "lost", (host,))


def leaving(host: str, slots: Mapping[str, int]) -> RoundReason:
    """Makes the reason for forming the job anew when a host is to leave the job.

    `slots` maps each host with a slot to its slot.

    >>> leaving("b", {"a": 0, "b": 1}).text
    'b (slot 1) leaves the job'
    """
    name = f"{host} (slot {slots[host]})" if host in slots else host
    return RoundReason(f"{name} leaves the job", hosts=(host,))


def death(slots: Mapping[str, int], host: str, code: int) -> RoundReason:
    """Makes the reason for forming the job anew after a trainer has ended.

    Args:
        slots: host to slot.
        host: the trainer's host.
        code: the trainer's exit code, or minus the number of the signal that killed it.

    >>> death({"a": 0, "b": 1}, "b", -9).text
    'trainer of slot 1 on b killed by signal 9'
    """
    slot = slots.get(host, "?")
    how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
    text = f"trainer of slot {slot} on {host} {how}"
    cause = "killed" if code == -9 else "signal" if code < 0 else "other"
    return RoundReason(text, cause, (host,))


def causes(reasons: Sequence[RoundReason]) -> list[RoundReason]:
    """Returns the root causes: those reasons that may have caused all others.

    Each reason has a kind (`Cause`). The kinds are, in order: a host was lost, a
    trainer was killed by SIGKILL, a trainer was killed by another signal, anything
    else. An event of one kind may cause events of later kinds. So the reasons of the
    first kind that occurs are returned; [] if there are no reasons.
    """
    of_cause = {
        cause: [reason for reason in reasons if reason.cause == cause]
        for cause in get_args(Cause)
    }
    return next((found for found in of_cause.values() if found), [])


@dataclass(kw_only=True)
class Round:
    """One attempt to form the job: hosts' replies and the leader's decisions."""

    ballot: Ballot
    reasons: list[RoundReason]
    detected: float
    """Wall-clock time in seconds at which the first failure was noticed."""
    tried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Host to the peers to which it was ordered to connect, to find network cuts."""
    ring: dict[str, HostRecord] = field(default_factory=dict)
    """Name to record of the hosts from which the peers in `tried` were chosen."""
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host to the fields of its report of the copies that it holds (`holdings`)."""
    decision: RecoveryDecision | None = None
    assignment: SlotAssignment | None = None
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    finished: dict[int, int] = field(default_factory=dict)
    """Slot to the last step of its trainer, once the trainer has ended normally."""
    corrupt: list[str] = field(default_factory=list)
    """Copies that did not match their digests, in this round or in the failed rounds
    before this one, each as "HOST step STEP: SLICE KEY"."""
    read: bool = False
    """Whether hosts re-read and verify their copies for the report. If False, the last
    verification of each copy counts, and the reader of a copy verifies it again during
    the restore."""
    last_finished: int = 0
    decided: float = 0.0
    """Wall-clock time in seconds at which the assignment was decided."""
    planned: Mapping[str, Any] = field(default_factory=dict)
    """Checkpoint items that record the planner's plan by which trainers divide their
    work; {} without a plan."""
    restore_begun: float = 0.0
    restore_s: float = 0.0
    bytes_from_storage: int = 0
    reported: bool = False

    @property
    def answers(self) -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]]]:
        """The peers that hosts tried to reach, and the peers that they did not reach.

        Two dicts. The first maps each host that has reported to the peers to which it
        had to connect. The second maps it to those peers that it did not reach.
        """
        tried = {host: self.tried.get(host, ()) for host in self.replies}
        missed = {host: it.get("missed", []) for host, it in self.replies.items()}
        return tried, missed

    def reply(self, host: str, reply: dict[str, Any]) -> None:
        """Records a host's report of the copies in its memory."""
        self.replies[host] = reply
        self.corrupt.extend(reply["corrupt"])
        self.last_finished = max(self.last_finished, reply["finished"])

    @property
    def assignment_told(self) -> SlotAssignment | None:
        """The newest assignment that a host has reported; None if there is none."""
        texts = {it["assignment"] for it in self.replies.values() if "assignment" in it}
        found = [SlotAssignment.from_json(text) for text in texts if text]
        return max(found, key=lambda it: it.epoch, default=None)

    @property
    def commits_told(self) -> list[Commit]:
        """The commits that hosts have reported, one for each step."""
        texts = {text for it in self.replies.values() for text in it.get("commits", ())}
        return list({it.step: it for it in map(Commit.from_json, texts)}.values())

    def members(self, world: int) -> dict[str, int]:
        """Maps each host that has reported a process in a world to its JAX index.

        A world is a group of JAX processes, identified by the number `world`. Returns
        {} for `world` 0, which stands for no world.
        """
        told = self.replies.items()
        return {
            host: reply["place"]
            for host, reply in told
            if world and reply.get("world", 0) == world
        }

    @property
    def joined(self) -> set[str]:
        """The hosts whose processes have joined the world that they have reported.

        The processes of the other `members` still start.
        """
        return {host for host, reply in self.replies.items() if reply.get("joined")}

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the state that hosts have reported, by digest.

        A layout is the mesh and the leaves of the state. After the number of slots has
        changed, hosts may report two layouts.
        """
        texts = {text for r in self.replies.values() for text in r["layouts"]}
        found = [Layout.from_json(text) for text in sorted(texts)]
        return {layout.digest: layout for layout in found}

    def layout_of(self, commits: Sequence[Commit]) -> Layout | None:
        """Returns the layout of the newest commit whose layout hosts have reported.

        A layout is the mesh and the leaves of the state. Without such a commit, returns
        any layout that hosts have reported; None if they have reported none. `commits`
        are newest first.
        """
        known = self.layouts
        chosen = [known[it.layout] for it in commits if it.layout in known]
        return next(iter([*chosen, *known.values()]), None)


def next_round(
    old: Round | None,
    ballot: Ballot,
    reasons: Sequence[RoundReason],
    now: float,
    *,
    read: bool,
) -> Round:
    """Makes a new round: an attempt to assign hosts to slots and start training.

    If the previous round never reached training, the new round takes over its reasons,
    time of detection, corrupt copies and last finished step. Nothing is taken over from
    a round in which a new job got its first assignment of slots.

    Args:
        old: the previous round, if there is one.
        ballot: (leader's term, counter), which identifies the new round.
        reasons: the events that made the new round necessary.
        now: the wall-clock time in seconds.
        read: whether hosts re-read their copies although no round has failed. After a
            failed round hosts always re-read: a corrupt copy may have been the cause,
            and reading finds all corrupt copies at once.
    """
    chosen = old.assignment if old is not None else None
    if old is None or old.reported or (chosen is not None and chosen.rung is None):
        return Round(ballot=ballot, reasons=[*reasons], detected=now, read=read)
    return Round(
        ballot=ballot,
        reasons=[*old.reasons, *reasons],
        detected=old.detected,
        corrupt=old.corrupt,
        read=True,
        last_finished=old.last_finished,
    )


FETCH_BYTES_PER_S = 1e9
"""Bytes per second at which a spare is assumed to fetch slices; a link of 10 Gbit/s
carries as much."""
FETCH_PART = 0.1
"""Largest part of `timeouts.restore` that a spare is assumed to take for its fetches.
So a link that is ten times slower than assumed still suffices."""


def ready_hosts(
    round_: Round, world: WorldPlan, slots: Collection[str], usable: Collection[str]
) -> set[str]:
    """Returns the hosts whose processes can train without a start.

    These processes are in the world (the group of JAX processes) that trained last.
    Returns set() if the world cannot form another mesh. Leaves out a host that has
    neither a slot nor memory reserved for one, as allocation may take longer than a
    start.

    Args:
        round_: the current attempt to form the job, with the hosts' reports.
        world: the JAX processes that trained last.
        slots: the hosts with a slot until now.
        usable: the hosts that may have a slot.
    """
    if why_over(world, usable):
        return set()
    members = sound(round_.members(world.number), world.size, slots)
    return {
        host
        for host in members.keys() & round_.joined
        if host in slots or round_.replies[host].get("reserved")
    }


def with_moves_undone(
    seating: Seating,
    fill: Callable[[Seating], Filled],
    commit: Commit | None,
    server: str,
) -> tuple[Seating, bool]:
    """Gives slots back to the hosts that committed the newest step, if need be.

    After a step was committed, a slot may have moved to another host, which had to
    fetch the slot's slices. If no step was committed since, the host that had the slot
    at the commit may still hold slices of it. All such slots are given back if one of
    the new hosts lacks slices (its fetch may have failed, and would fail again), or if
    there are too few other hosts for all slots: a former host needs memory beside its
    copies for any other slot. Otherwise the former hosts get no slot. A host that has
    another slot now, with all slices of it, is no former host.

    Args:
        seating: the hosts, the last assignment of slots and the layout.
        fill: chooses the host of each slot (`SeatPolicy.fill`).
        commit: the newest commit; None if there is none.
        server: the host that runs JAX's coordination service for all trainers, which
            keeps its slot; "" if each process has its own.

    Returns:
        The seating, in which either `previous` names the former hosts, or `usable`
        leaves them out; and whether there are former hosts, also unusable ones.
    """
    old, layout = seating.previous, seating.layout
    if old is None or layout is None or commit is None:
        return seating, False
    if commit.layout != layout.digest or len(commit.holders) != len(old.slots):
        return seating, False
    moved = {
        slot: host
        for slot, host in enumerate(commit.holders)
        if host != old.slots[slot]
        and host in seating.replies
        and _holds_some(seating, host, slot, commit.step)
        and not _is_seated(seating, old, host, commit.step)
    }
    usable = {record.host: record for record in seating.usable}
    former = {
        slot: usable[host]
        for slot, host in moved.items()
        if host in usable and server not in (host, old.slots[slot])
    }
    if not former:
        return seating, bool(moved)
    names = {record.host for record in former.values()}
    rest = [record for record in seating.usable if record.host not in names]
    others = replace(seating, usable=rest)
    is_whole = all(
        old.slots[slot] in usable
        and not _lacks(seating, old.slots[slot], slot, commit.step)
        for slot in former
    )
    if is_whole and len(found := fill(others)) >= len(old.slots) and all(found):
        return others, True
    slots, incarnations = list(old.slots), list(old.incarnations)
    for slot, record in former.items():
        if record.host in slots:  # it has taken another slot meanwhile
            slots[slots.index(record.host)] = ""
        slots[slot], incarnations[slot] = record.host, record.incarnation
    given = replace(old, slots=tuple(slots), incarnations=tuple(incarnations))
    return replace(seating, previous=given), True


def _holds_some(seating: Seating, host: str, slot: int, step: int) -> bool:
    """Whether a host has a copy of some slice of a slot at `step`."""
    assert seating.layout is not None
    held = seating.replies[host]["holdings"].get(step, {})
    return any(piece.key in held for piece in seating.layout.slices(slot))


def _is_seated(seating: Seating, old: SlotAssignment, host: str, step: int) -> bool:
    """Whether a host has all slices of its slot in `old` at `step`, in their place."""
    if host not in old.slot_of:
        return False
    complete = seating.replies[host].get("complete", {})
    return old.slot_of[host] in complete.get(step, ())


def _lacks(seating: Seating, host: str, slot: int, step: int) -> int:
    """Returns the bytes of a slot's slices at `step` of which a host has no copy."""
    assert seating.layout is not None
    held = seating.replies[host]["holdings"].get(step, {})
    slices = seating.layout.slices(slot)
    return sum(piece.nbytes for piece in slices if piece.key not in held)


def fill_with_ready(
    seating: Seating,
    fill: Callable[[Seating], Filled],
    *,
    ready: Collection[str],
    server: str,
    step: int,
    start_s: float,
    restore_s: float,
) -> Filled:
    """Chooses the host of each slot; leaves out hosts whose trainers have to start.

    A host whose trainer has ended has the slices of its slot in memory, but must start
    a process before it can train. A spare whose process is in the world (the group of
    connected JAX processes) must fetch the slices. Only hosts with such processes get
    slots if all of these conditions hold. Otherwise the result is that of `fill`.

    * They suffice: all trainers wait for one that starts.
    * No slice has copies in fewer failure domains than with the result of `fill`.
    * No slot's host lacks more bytes, beyond those that the host by `fill` lacks, than
      1 GB/s (`FETCH_BYTES_PER_S`) moves in the time that the start of a trainer takes,
      and in a tenth (`FETCH_PART`) of the time after which a restore is given up.
    * The host that runs JAX's coordination service for all trainers keeps its slot, if
      it has one. Without a slot it could end without the job being formed anew.

    Args:
        seating: the hosts, the present slots and the layout.
        fill: chooses the host of each slot (`SeatPolicy.fill`).
        ready: the hosts whose processes are in the world, and that have memory for a
            slot.
        server: the host of the coordination service; "" if each process has its own.
        step: the newest committed step, whose slices are fetched.
        start_s: seconds that the start of a trainer takes.
        restore_s: seconds after which a restore is given up (`timeouts.restore`).
    """
    filled, old, layout = fill(seating), seating.previous, seating.layout
    hosts = [record.host for record in filled if record is not None]
    if len(hosts) < len(filled) or len(ready) < len(hosts) or set(hosts) <= set(ready):
        return filled
    if old is None or layout is None:
        return filled
    if {len(hosts), len(old.slots)} != {layout.mesh.num_slots}:
        return filled
    inside = replace(
        seating,
        usable=[record for record in seating.usable if record.host in ready],
        choose_size=lambda *_: len(hosts),
    )
    found = fill(inside)
    heirs = [record.host for record in found if record is not None]
    if len(heirs) < len(hosts) or (server in hosts and server not in heirs):
        return filled
    placement = old.spread.place(layout)
    if not separates_as_well(old.spread, placement, hosts, heirs, seating.domains):
        return filled
    prefetched = seating.prefetched(len(hosts))

    def fetches(host: str, slot: int) -> int:
        ahead = prefetched.get(host, {}).get(slot, 0)
        return max(0, _lacks(seating, host, slot, step) - ahead)

    pairs = enumerate(zip(heirs, hosts, strict=True))
    more = [fetches(heir, at) - fetches(host, at) for at, (heir, host) in pairs]
    limit_s = min(start_s, FETCH_PART * restore_s)
    return found if max(more) <= limit_s * FETCH_BYTES_PER_S else filled


def assign(
    round_: Round,
    filled: Sequence[HostRecord],
    *,
    previous: SlotAssignment | None,
    commits: Sequence[Commit],
    storage_steps: Collection[int],
    quarantined: Collection[int],
    domains: FailureDomains,
    copies: int,
    asked_slots: int = 0,
    aside: Collection[str] = (),
    world: WorldPlan,
) -> tuple[SlotAssignment, RecoveryDecision]:
    """Decides which step is restored from where, and makes the assignment.

    Args:
        round_: the current attempt to form the job, with the hosts' replies.
        filled: the record of each slot's host.
        previous: the previous assignment of hosts to slots; None if there is none.
        commits: the recorded commits, newest first.
        storage_steps: the steps that storage holds.
        quarantined: the steps whose commits must not be restored from memory.
        domains: the failure domains of the hosts.
        copies: the requested number of copies of every slice.
        asked_slots: the number of slots that a user has requested; 0 without a request.
        aside: hosts without a slot that some other hosts do not reach. Their copies are
            used only if the step cannot be restored from memory without these copies.
        world: the JAX processes that are to train. If they have trained in another mesh
            before, trainers keep their processes.

    Returns:
        The assignment, and which step is restored with which transfers.
    """
    hosts = tuple(record.host for record in filled)

    def decided(without: Collection[str]) -> RecoveryDecision:
        told = {host: it for host, it in round_.replies.items() if host not in without}
        return decide(
            commits=commits,
            layout=None,
            other_layouts=round_.layouts.values(),
            holdings={host: reply["holdings"] for host, reply in told.items()},
            slots=hosts,
            storage_steps=storage_steps,
            quarantined=quarantined,
            placed=previous.spread.domains if previous else (),
            domains=domains.names,
        )

    def sparing(
        decision: RecoveryDecision, spared: Collection[str]
    ) -> tuple[RecoveryDecision, Collection[str]]:
        """Restores the same step without the copies of some hosts, if that suffices.

        Returns the decision, and the hosts whose copies it does not use; () if these
        copies are needed.
        """
        other = decided(spared) if spared else decision
        is_same = (other.source, other.step) == (decision.source, decision.step)
        return (other, spared) if is_same else (decision, ())

    decision = decided(())
    if decision.source == "memory":
        decision, spared = sparing(decision, aside)
        found = redundant_holders(decision, hosts, round_.replies)
        decision, _ = sparing(decision, {*spared, *found})
    in_memory = decision.source == "memory"
    generation, attempt = next_epoch(previous, filled)
    assignment = SlotAssignment(
        generation=generation,
        attempt=attempt,
        slots=hosts,
        incarnations=tuple(record.incarnation for record in filled),
        source=decision.source,
        step=decision.step,
        rung=_rung(previous, decision, is_swap=world.turn > 0),
        world=world.record,
        reason=main_reason(round_.reasons),
        spread=next_spread(previous, hosts, domains, copies, keep=in_memory),
        asked_slots=asked_slots,
    )
    return assignment, decision


def redundant_holders(
    decision: RecoveryDecision,
    slots: Sequence[str],
    replies: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Returns the hosts in new slots whose copies other hosts have too.

    Such a host may free its copies if it lacks memory for its slot. Each slice of the
    restored step that it holds is also held by a host that keeps its copies until a
    step is committed: it has no slot, the slot that it had at the commit, or a slot all
    of whose slices it holds. Returns set() if the step is not restored from memory, or
    if the number of slots has changed.

    Args:
        decision: the restored step, and the holders of its slices.
        slots: the host of each slot from now on.
        replies: host to its report of the copies that it holds (`holdings`).
    """
    located = decision.located
    if located is None or len(located.commit.holders) != len(slots):
        return set()
    step, seats = decision.step, zip(slots, located.commit.holders, strict=True)
    moved = {
        host
        for slot, (host, before) in enumerate(seats)
        if host != before
        and replies[host]["holdings"].get(step)
        and slot not in replies[host].get("complete", {}).get(step, ())
    }
    if not moved:
        return set()
    holders = [set(hosts) for hosts in located.holders.values()]
    alone = [hosts for hosts in holders if hosts <= moved]
    return set().union(*holders) & moved - set().union(*alone)


def _rung(
    previous: SlotAssignment | None, decision: RecoveryDecision, *, is_swap: bool
) -> int | None:
    if previous is None:
        return None
    return 0 if is_swap and decision.source == "memory" else decision.rung


def orders(
    round_: Round, hosts: Mapping[str, HostRecord], world: WorldPlan
) -> dict[str, dict[str, Any]]:
    """Computes the order to restore and train (`prepare`) for the host of each slot.

    Args:
        round_: the attempt to form the job, with its assignment and what is restored.
        hosts: host to its record, of all registered hosts.
        world: the JAX processes that are to train.

    Returns:
        Host to the fields of its order.

    Raises:
        KeyError: a host of the assignment is not registered any more.
    """
    assignment, decision = round_.assignment, round_.decision
    assert assignment is not None and decision is not None
    addresses = {host: record.address for host, record in hosts.items()}
    located = decision.located
    layout = decision.layout
    digests = located.digests if located else {}
    items = [reply["items"].get(decision.step) for reply in round_.replies.values()]
    relied = {host for it in located.holders.values() for host in it} if located else ()
    common = {
        "ballot": round_.ballot,
        "generation": assignment.generation,
        "attempt": assignment.attempt,
        "indices": [world.indices[host] for host in assignment.slots],
        "turn": world.turn,
        "hosts": Packed(assignment.slots),
        "addresses": Packed(addresses[host] for host in assignment.slots),
        "source": decision.source,
        "step": decision.step,
        "domains": Packed(assignment.spread.domains),
        "layout": layout.to_json() if layout else "",
        "resized": bool(located and layout and layout.digest != located.commit.layout),
        "read": round_.read,
        "assignment": assignment.to_json(),
        "items": next((found for found in items if found), {}) if located else {},
    }
    told: dict[str, dict[str, Any]] = {}
    for slot, host in enumerate(assignment.slots):
        keys = [piece.key for piece in layout.slices(slot)] if layout else []
        fetches = {"transfers": [], "regions": []}
        if decision.plan is not None:
            fetches = fetches_for(decision.plan, addresses, host)
            if fetches["regions"]:
                keys += decision.plan.read_by(host)
        told[host] = {
            **common,
            "slot": slot,
            "may_free": host not in relied,
            "world": world.seat(host),
            **fetches,
            "digests": {key: digests[key] for key in keys if key in digests},
        }
    return told


def export_addresses(
    round_: Round, assignment: SlotAssignment, hosts: Mapping[str, HostRecord]
) -> dict[str, str]:
    """Maps each host to the host:port at which it would serve coordination of exports.

    Each host reserves a port, but in an export only the host of rank 0 starts the
    coordination service. Leaves out hosts of the assignment that are not in `hosts`.

    Args:
        round_: the attempt to form the job, in which hosts have reported their ports.
        assignment: the host of each slot.
        hosts: host to its record, with its address.
    """
    told = {**round_.replies, **round_.prepared}  # between formations the former only
    ports = {host: known.get("export_port", 0) for host, known in told.items()}
    return {
        host: with_port(hosts[host].address, ports.get(host, 0))
        for host in assignment.slots
        if host in hosts
    }


def report_of(
    round_: Round, previous: SlotAssignment | None, now: float, *, world: WorldPlan
) -> RecoveryReport:
    """Computes the cost report of a recovery, once every slot trains again.

    Args:
        round_: the attempt to form the job that led to training.
        previous: the assignment of hosts to slots before this attempt.
        now: the wall-clock time in seconds.
        world: the JAX processes that train.
    """
    assignment = round_.assignment
    assert assignment is not None and assignment.rung is not None
    named = {host for reason in causes(round_.reasons) for host in reason.hosts}
    # A named host that has answered may be alive: who has its slot is told as well.
    taken = replaced(previous, assignment, named - round_.replies.keys())
    survivors = set(previous.slots if previous else ()) & set(assignment.slots) - named
    restarted = survivors - round_.members(world.number).keys()
    return RecoveryReport(
        fault="; ".join([assignment.reason, *taken]),
        generation=assignment.generation,
        attempt=assignment.attempt,
        rung=assignment.rung,
        source=assignment.source,
        restored_step=assignment.step,
        last_finished_step=round_.last_finished,
        detect_s=0.0,
        restore_s=round_.restore_s,
        total_s=now - round_.detected,
        bytes_from_own_memory=sum(p["own"] for p in round_.prepared.values()),
        bytes_from_peers=sum(p["peers"] for p in round_.prepared.values()),
        bytes_from_storage=round_.bytes_from_storage,
        processes_restarted=_restarted(round_, assignment, world),
        corrupt_copies=tuple(sorted(set(round_.corrupt))),
        slots=len(assignment.slots),
        slots_before=len(previous.slots) if previous else 0,
        senders=round_.decision.sent if round_.decision else {},
        survivors=len(survivors),
        survivors_restarted=len(restarted),
        restarted_because=_why_restarted(restarted, world),
        phases_s={
            "leave": round_.decided - round_.detected,
            "record": round_.restore_begun - round_.decided,
            "restore": round_.restore_s,
            "first_step": now - round_.restore_begun - round_.restore_s,
        },
    )


def _why_restarted(hosts: Collection[str], world: WorldPlan) -> str:
    if not hosts or world.because:
        return world.because
    names = ", ".join(sorted(hosts))
    return f"the trainer did not give up its slot in time, or ended: {names}"


def _restarted(round_: Round, assignment: SlotAssignment, world: WorldPlan) -> int:
    """Counts the processes that were started so that the job trains again.

    Counts the trainers that were not kept. If one host runs JAX's coordination service
    for all trainers, the service counts as one more, even if it was kept.

    Args:
        round_: the attempt to form the job, in which hosts reported kept processes.
        assignment: the host of each slot.
        world: the JAX processes that train.
    """
    kept = [host for host in assignment.slots if host in round_.members(world.number)]
    service = int(bool(world.address))
    return len(assignment.slots) - len(kept) + service


def replaced(
    previous: SlotAssignment | None,
    assignment: SlotAssignment,
    named: Collection[str],
) -> tuple[str, ...]:
    """Returns a text for each slot that has another host than in `previous`.

    Leaves out the slots whose former host is in `named`: the hosts that the reason for
    forming the job anew names already. (A lost host is not named if the leader that
    noticed the loss was lost itself before the job was re-formed.) Returns () without
    `previous`, or if the number of slots has changed.

    >>> def assigned(*slots):
    ...     return SlotAssignment(generation=1, attempt=1, slots=slots,
    ...         incarnations=slots, source="memory", step=1, rung=2, reason="")
    >>> replaced(assigned("a", "b"), assigned("c", "d"), named={"a"})
    ('d has slot 1 of b',)
    """
    if previous is None or len(previous.slots) != len(assignment.slots):
        return ()
    pairs = zip(previous.slots, assignment.slots, strict=True)
    return tuple(
        f"{new} has slot {slot} of {old}"
        for slot, (old, new) in enumerate(pairs)
        if old != new and old not in named
    )


def main_reason(reasons: Sequence[RoundReason]) -> str:
    """Returns the text of the root causes, without their consequences.

    A lost host breaks the collectives of all other hosts, whose trainers then end. A
    killed trainer does the same to its peers.

    >>> main_reason([death({"a": 0}, "a", 1), lost("b")])
    'b was lost'
    """
    return "; ".join(dict.fromkeys(reason.text for reason in causes(reasons)))
