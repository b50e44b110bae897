"""What differs between launched jobs and those that serve the user's own processes.

Both have one leader, one rendezvous and one kind of host; a `SeatPolicy` says who fills
which slot and what follows when somebody comes, goes or fails. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.replication import FailureDomains
from dtft.checkpoint.state import Layout
from dtft.elastic.reports import FIELDS, SERVED_FIELDS, Check
from dtft.elastic.roles import Assignment, HostRecord
from dtft.elastic.served import fill_by_process, scale_refusal
from dtft.elastic.sizing import Groups, SizeLimits, seat
from dtft.elastic.spread import preferred

Filled = tuple[HostRecord | None, ...]
"""The host of each slot, None where there is none."""
ExitReport = tuple[str, dict[str, Any]] | None
"""What the leader is told when a trainer has ended: op and fields, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Seating:
    """From what slots are filled."""

    usable: Sequence[HostRecord]
    """Hosts that may be given a slot."""
    replies: Mapping[str, Mapping[str, Any]]
    """Per host what it has reported in this round."""
    num_slots: int
    """Slots at the start of the job."""
    choose_size: Callable[[int, Layout | None], int]
    """Slots for a number of hosts."""
    previous: Assignment | None
    layout: Layout | None
    """Of the state, if any live host knows it."""
    limits: SizeLimits
    domains: FailureDomains


def _fill_with_spares(seating: Seating) -> Filled:
    """Hosts keep their slots; spares take the empty ones."""
    old, layout = seating.previous, seating.layout
    return seat(
        list(zip(old.slots, old.incarnations, strict=True)) if old else [],
        seating.usable,
        seating.choose_size(len(seating.usable), layout),
        Groups.of(layout, seating.limits).group[1] if layout else 1,
        lambda seats, spares: preferred(old, layout, seats, spares, seating.domains),
    )


def _fill_with_processes(seating: Seating) -> Filled:
    """Slots go by the index of the attached process, if that can still be taken."""
    free = [  # replies are newer than the store: who has stood down since
        record
        for record in seating.usable
        if record.attached_ns
        and seating.replies[record.host]["attached_ns"] == record.attached_ns
    ]
    return fill_by_process(free, seating.num_slots)


def _no_spare(empty: str, num_slots: int, job: str, store: str) -> str:
    return (
        f"no spare is left for slot {empty}: the job waits for a host. Start one more: "
        f"the command of the other agents, with --job {job} --store {store}"
    )


def _no_process(empty: str, num_slots: int, job: str, store: str) -> str:
    return (
        f"waiting for process {empty} of {num_slots} to attach; restart all processes "
        "of the job, each beside an agent that is free"
    )


def _exit_code(code: int) -> ExitReport:
    return "trainer_exit", {"code": code}


def _gone_without_goodbye(code: int) -> ExitReport:
    return None if code else ("process_gone", {})


@dataclass(frozen=True, kw_only=True)
class SeatPolicy:
    """How slots are filled, and what follows from what trainers do."""

    attached: bool
    """Trainers are the user's own processes. They decide when they save and restore,
    and may ask for a step on other shardings, or that one is safe or stored."""
    fill: Callable[[Seating], Filled]
    """Who fills which slot."""
    waiting_line: Callable[[str, int, str, str], str]
    """What people are told while slots are empty: slots, their number, job, store."""
    waiting_event: str
    """The same, in the journal."""
    begins_on_join: bool
    """A host that joins begins the job, or ends a wait. Otherwise it begins when every
    process has attached."""
    ends_by_itself: bool
    """The job ends when all trainers have finished, or when an error would come again.
    Otherwise trainers are let go with the reason, and the job waits for others."""
    reads_copies: bool
    """Hosts read and check their copies at the start of every round."""
    has_coordination_service: bool
    """The leader starts JAX's coordination service for each formation."""
    reports: Mapping[str, Mapping[str, Check]]
    """Reports that a host may make."""
    exit_report: Callable[[int], ExitReport]
    """What the end of a formation's trainer means, from its code."""
    scale_refusal: Callable[[str], str] | None
    """Why a job of this name cannot be scaled; None if it can."""


LAUNCHED = SeatPolicy(
    attached=False,
    fill=_fill_with_spares,
    waiting_line=_no_spare,
    waiting_event="waiting_for_host",
    begins_on_join=True,
    ends_by_itself=True,
    reads_copies=False,
    has_coordination_service=True,
    reports=FIELDS,
    exit_report=_exit_code,
    scale_refusal=None,
)
"""Agents start the trainers; any host can have any slot."""

SERVED = SeatPolicy(
    attached=True,
    fill=_fill_with_processes,
    waiting_line=_no_process,
    waiting_event="waiting_for_process",
    begins_on_join=False,
    ends_by_itself=False,
    reads_copies=True,
    has_coordination_service=False,
    reports=SERVED_FIELDS,
    exit_report=_gone_without_goodbye,
    scale_refusal=scale_refusal,
)
"""The user starts the processes (`--serve-only`), which are a world already."""
