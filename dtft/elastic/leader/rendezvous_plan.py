"""How a formation is decided: from what hosts replied to orders for each slot.

A `Round` is one attempt to form. The functions here fill it in and read it out; when
which one is called is the leader's business.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dtft.checkpoint.replication import Commit, FailureDomains
from dtft.checkpoint.state import Layout
from dtft.checkpoint.transport import Packed, with_port
from dtft.elastic.anti_affinity import next_spread
from dtft.elastic.assignment import HostRecord, SlotAssignment, next_epoch
from dtft.elastic.leader.recovery import (
    RecoveryDecision,
    RecoveryReport,
    decide,
    fetches_for,
)

Ballot = tuple[int, int]
"""(term of the leader, counter): larger for every new round of any leader."""


Cause = Literal["lost", "killed", "signal", "other"]
"""What a reason is about: a host, a trainer killed by SIGKILL or by another signal, or
anything else. Each may be what has caused those after it."""


@dataclass(frozen=True)
class Reason:
    """Why a round begins."""

    text: str
    """For people."""
    cause: Cause = "other"
    hosts: tuple[str, ...] = ()
    """Whom the text names."""


def lost(host: str, *assignments: SlotAssignment | None) -> Reason:
    """A host is lost; its slot is of the first assignment that has the host.

    >>> lost("b").text
    'b was lost'
    """
    for assignment in assignments:
        if assignment is not None and host in assignment.slot_of:
            name = f"{host} (slot {assignment.slot_of[host]})"
            return Reason(f"{name} was lost", "lost", (host,))
    return Reason(f"{host} was lost", "lost", (host,))


def death(slots: Mapping[str, int], host: str, code: int) -> Reason:
    """A trainer has ended; `slots` has the slot of each host.

    >>> death({"a": 0, "b": 1}, "b", -9).text
    'trainer of slot 1 on b killed by signal 9'
    """
    slot = slots.get(host, "?")
    how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
    text = f"trainer of slot {slot} on {host} {how}"
    cause = "killed" if code == -9 else "signal" if code < 0 else "other"
    return Reason(text, cause, (host,))


def causes(reasons: Sequence[Reason]) -> list[Reason]:
    """Those of the first cause that there is, in the order of `Cause`."""
    of_cause = {
        cause: [reason for reason in reasons if reason.cause == cause]
        for cause in get_args(Cause)
    }
    return next((found for found in of_cause.values() if found), [])


@dataclass(kw_only=True)
class Round:
    """One attempt to form: what was heard and decided since it began."""

    ballot: Ballot
    reasons: list[Reason]
    detected: float
    """Wall-clock time at which the first failure was noticed."""
    tried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Per host whose ports it was to try."""
    ring: dict[str, HostRecord] = field(default_factory=dict)
    """Of whom these were chosen: the hosts that were there, by name."""
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per host its holdings."""
    decision: RecoveryDecision | None = None
    assignment: SlotAssignment | None = None
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    finished: dict[int, int] = field(default_factory=dict)
    """Slot to the last step, once its trainer has ended well."""
    corrupt: list[str] = field(default_factory=list)
    """Copies that did not match their digests, in this round or the failed ones before
    it."""
    read: bool = False
    """Hosts read what they hold before they offer it. Otherwise what was verified when
    it came is offered, and verified again by whoever takes it: that it is right is
    found out beside the transfer, not before."""
    last_finished: int = 0
    restore_begun: float = 0.0
    restore_s: float = 0.0
    bytes_from_storage: int = 0
    reported: bool = False

    @property
    def answers(self) -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]]]:
        """Per host that has answered: whom it was to reach, and whom it did not."""
        tried = {host: self.tried.get(host, ()) for host in self.replies}
        missed = {host: it.get("missed", []) for host, it in self.replies.items()}
        return tried, missed

    def reply(self, host: str, reply: dict[str, Any]) -> None:
        """A host has stood down and said what it holds."""
        self.replies[host] = reply
        self.corrupt.extend(reply["corrupt"])
        self.last_finished = max(self.last_finished, reply["finished"])

    @property
    def assignment_told(self) -> SlotAssignment | None:
        """The newest assignment that a host has obeyed, None if none has."""
        texts = {it["assignment"] for it in self.replies.values() if "assignment" in it}
        found = [SlotAssignment.from_json(text) for text in texts if text]
        return max(found, key=lambda it: it.epoch, default=None)

    @property
    def commits_told(self) -> list[Commit]:
        """Commits that hosts were told of, one for each step."""
        texts = {text for it in self.replies.values() for text in it.get("commits", ())}
        return list({it.step: it for it in map(Commit.from_json, texts)}.values())

    @property
    def layouts(self) -> dict[str, Layout]:
        """Digest to layout: what hosts know of the state; two after a new size."""
        texts = {text for r in self.replies.values() for text in r["layouts"]}
        found = [Layout.from_json(text) for text in sorted(texts)]
        return {layout.digest: layout for layout in found}

    def layout_of(self, commits: Sequence[Commit]) -> Layout | None:
        """The layout of the newest commit whose layout a host knows, or any."""
        known = self.layouts
        chosen = [known[it.layout] for it in commits if it.layout in known]
        return next(iter([*chosen, *known.values()]), None)


def next_round(
    old: Round | None,
    ballot: Ballot,
    reasons: Sequence[Reason],
    now: float,
    *,
    read: bool,
) -> Round:
    """A new round; one that follows a failed one goes on with its account.

    Args:
        old: the round before, if there was one.
        ballot: of the new round.
        reasons: what has happened.
        now: the wall-clock time.
        read: whether hosts read what they hold in any case. After a failure they do: a
            corrupt copy may have been the cause, and all of them are found at once.
    """
    chosen = old.assignment if old is not None else None
    if old is None or old.reported or (chosen is not None and chosen.rung == 0):
        return Round(ballot=ballot, reasons=[*reasons], detected=now, read=read)
    return Round(
        ballot=ballot,
        reasons=[*old.reasons, *reasons],
        detected=old.detected,
        corrupt=old.corrupt,
        read=True,
        last_finished=old.last_finished,
    )


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
) -> tuple[SlotAssignment, RecoveryDecision]:
    """Decides what is restored and writes it down as an assignment.

    What the hosts `aside` hold is used only if a step cannot be had without it: not
    every other host reaches them.
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

    decision = decided(())
    if aside and decision.source == "memory":
        near = decided(aside)
        same = (near.source, near.step) == (decision.source, decision.step)
        decision = near if same else decision
    in_memory = decision.source == "memory"
    generation, attempt = next_epoch(previous, filled)
    assignment = SlotAssignment(
        generation=generation,
        attempt=attempt,
        slots=hosts,
        incarnations=tuple(record.incarnation for record in filled),
        source=decision.source,
        step=decision.step,
        rung=0 if previous is None else decision.rung,
        reason=main_reason(round_.reasons),
        spread=next_spread(previous, hosts, domains, copies, keep=in_memory),
        asked_slots=asked_slots,
    )
    return assignment, decision


def orders(
    round_: Round, hosts: Mapping[str, HostRecord], coordinator: str
) -> dict[str, dict[str, Any]]:
    """For the host of each slot what it has to do.

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
    common = {
        "ballot": round_.ballot,
        "generation": assignment.generation,
        "attempt": assignment.attempt,
        "coordinator": coordinator,
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
            **fetches,
            "digests": {key: digests[key] for key in keys if key in digests},
        }
    return told


def export_addresses(
    round_: Round, assignment: SlotAssignment, hosts: Mapping[str, HostRecord]
) -> dict[str, str]:
    """Host to the host:port at which it would lead an export, of the hosts left."""
    told = {**round_.replies, **round_.prepared}  # between formations the former only
    ports = {host: known.get("export_port", 0) for host, known in told.items()}
    return {
        host: with_port(hosts[host].address, ports.get(host, 0))
        for host in assignment.slots
        if host in hosts
    }


def report_of(
    round_: Round, previous: SlotAssignment | None, now: float, *, coordinators: int
) -> RecoveryReport:
    """What a recovery cost, once every slot trains again.

    Args:
        round_: that ended so.
        previous: the assignment before.
        now: the wall-clock time.
        coordinators: processes of dtft's own that were started anew beside trainers.
    """
    assignment = round_.assignment
    assert assignment is not None
    named = {host for reason in causes(round_.reasons) for host in reason.hosts}
    taken = replaced(previous, assignment, named)
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
        processes_restarted=len(assignment.slots) + coordinators,
        corrupt_copies=tuple(sorted(set(round_.corrupt))),
        slots=len(assignment.slots),
        slots_before=len(previous.slots) if previous else 0,
        senders=round_.decision.sent if round_.decision else {},
    )


def replaced(
    previous: SlotAssignment | None,
    assignment: SlotAssignment,
    named: Collection[str],
) -> tuple[str, ...]:
    """Hosts that lost their slot to another host and are not named in the reason.

    The leader that noticed a loss may be lost itself before the job is formed anew; the
    next leader's reason does not have the first loss.

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


def main_reason(reasons: Sequence[Reason]) -> str:
    """What really happened, without what followed from it.

    A lost host breaks the collectives of all others, whose trainers then end; a killed
    trainer does the same to its peers.

    >>> main_reason([death({"a": 0}, "a", 1), lost("b")])
    'b was lost'
    """
    return "; ".join(dict.fromkeys(reason.text for reason in causes(reasons)))
