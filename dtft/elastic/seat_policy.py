"""The differences between launched jobs and served jobs.

Agents start the trainers of a launched job; the user starts the processes of a served
job (`--serve-only`). Both kinds of jobs use the same leader, rendezvous and host code.
A `SeatPolicy` decides which host fills which slot, and how the job reacts when hosts or
processes join, leave or fail. The slot of a user's process is its index in the user's
own job (`fill_by_process`). `Admission` decides which process may attach; `missing`
lists the processes that are not attached.
"""

import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dtft.checkpoint.replication import FailureDomains
from dtft.checkpoint.state import Layout
from dtft.elastic.anti_affinity import preferred
from dtft.elastic.assignment import (
    HostRecord,
    ReplicaGroups,
    SizeLimits,
    SlotAssignment,
    seat,
)
from dtft.elastic.messages import REPORT_FIELDS, SERVED_FIELDS, Check
from dtft.elastic.store import StoreUnavailable


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings that must be equal in all processes of a served job.

    The first process that attaches decides them.
    """

    processes: int
    """Number of processes of the job, one per slot."""
    directory: str
    """Directory of the storage tier."""
    storage_interval_steps: int
    max_to_keep: int
    chunk_bytes: int
    storage_timeout_s: float

    def __post_init__(self) -> None:
        """Raises TypeError for a value of another type than its field's."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                raise TypeError(
                    f"{field.name}={value!r} is of {type(value)}. Allowed: "
                    f"{field.type}. Use one version of dtft."
                )

    def to_json(self) -> str:
        """Encodes the settings as JSON; inverse of `from_json`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Terms":
        """Parses the text of `to_json`.

        Raises:
            ValueError: the text is not JSON, or a field is missing, unknown or of the
                wrong type, as in a text of another version of dtft.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the job's terms {text!r:.300} cannot be read: {error}. Use one "
                "version of dtft on all hosts of the job, or another --job."
            ) from error

    def differences(self, other: "Terms") -> str:
        """Describes the fields in which `other` differs; "" for none.

        >>> terms = Terms(processes=2, directory="/d", storage_interval_steps=1,
        ...     max_to_keep=1, chunk_bytes=1, storage_timeout_s=1.0)
        >>> terms.differences(Terms(**{**asdict(terms), "processes": 3}))
        'processes=3 instead of 2'
        """
        mine = asdict(self)
        return ", ".join(
            f"{name}={value!r} instead of {mine[name]!r}"
            for name, value in asdict(other).items()
            if value != mine[name]
        )


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Decides which processes may attach to the agent of a host."""

    job: str
    host: str
    processes: int | None
    """Required number of processes of the job; None for any number."""
    agree: Callable[[Terms], Terms]
    """Stores a process's settings if the job has none yet; returns the job's settings.
    May raise StoreUnavailable."""

    def objection(self, message: Mapping[str, Any]) -> str | None:
        """Returns why a process may not attach, as text for people; None if it may.

        If the job has no settings yet, those of this process are written to the store
        and become the job's. Otherwise the process must have the job's settings.

        Args:
            message: the process's request to attach. "terms": a dict of its settings,
                by the field names of `Terms`; "process": its index among the job's
                processes; "pid": its process id.
        """
        who = f"job {self.job!r}, agent of host {self.host}"
        try:
            terms, index = Terms(**message["terms"]), operator.index(message["process"])
            pid = operator.index(message["pid"])
        except (TypeError, KeyError):
            return f"{who}: the process speaks another version of dtft. Use one version"
        if self.processes is not None and terms.processes != self.processes:
            return (
                f"{who}: started with --hosts {self.processes}, but this job has "
                f"{terms.processes} processes. Start the agents with --hosts "
                f"{terms.processes}, or leave it out."
            )
        if not 0 <= index < terms.processes or pid <= 0:
            return f"{who}: process {index} of {terms.processes} (pid {pid}) is not one"
        try:
            differences = self.agree(terms).differences(terms)
        except StoreUnavailable as error:
            return f"{who}: the store does not answer ({error}). Try again."
        except ValueError as error:
            return f"{who}: {error}"
        if differences:
            return (
                f"{who}: this process has {differences} (what the job began with). "
                "Start it with the same, or start the agents under another --job."
            )
        return None


def fill_by_process(
    hosts: Collection[HostRecord], num_slots: int
) -> tuple[HostRecord | None, ...]:
    """Gives slot i to the host to which the user's process with index i is attached.

    If two processes with the same index are attached, the process that attached later
    gets the slot; the other one is left over from an earlier start of the job. The
    result is None for a slot without a process.

    >>> def host(name, process, ns):
    ...     return HostRecord(host=name, address="", incarnation="", joined_ns=0,
    ...         pid=1, process=process, attached_ns=ns)
    >>> hosts = [host("a", 1, 5), host("b", 1, 7), host("c", -1, 0)]
    >>> [record and record.host for record in fill_by_process(hosts, 2)]
    [None, 'b']
    """
    newest: dict[int, HostRecord] = {}
    for record in sorted(hosts, key=lambda record: (record.attached_ns, record.host)):
        if record.process >= 0:
            newest[record.process] = record
    return tuple(newest.get(slot) for slot in range(num_slots))


def missing(hosts: Collection[HostRecord], num_slots: int) -> str:
    """Describes the processes that are not attached; "" if all are.

    >>> missing([], 3)
    'processes 0, 1, 2 of 3 to attach'
    """
    filled = fill_by_process(hosts, num_slots)
    absent = [str(slot) for slot, record in enumerate(filled) if record is None]
    if not absent:
        return ""
    word = "process" if len(absent) == 1 else "processes"
    return f"{word} {', '.join(absent)} of {num_slots} to attach"


def change_refusal(job: str) -> str:
    """Explains why neither `dtft scale` nor `dtft drain` can change a served job.

    >>> change_refusal("j").partition(":")[0]
    "job 'j' serves processes of its user's own (--serve-only)"
    """
    return (
        f"job {job!r} serves processes of its user's own (--serve-only): whoever "
        "starts them decides how many there are, and on which hosts. To change that "
        "close them, and start agents and processes anew under another --job; they "
        "begin with what storage has."
    )


Filled = tuple[HostRecord | None, ...]
"""The host of each slot; None for an empty slot."""
ExitReport = tuple[str, dict[str, Any]] | None
"""Op and fields of a report about a trainer's end; None if nothing is reported."""


@dataclass(frozen=True, kw_only=True)
class Seating:
    """The inputs of `SeatPolicy.fill`, which chooses the host of each slot."""

    usable: Sequence[HostRecord]
    """Hosts that may be given a slot."""
    replies: Mapping[str, Mapping[str, Any]]
    """Maps each host to its report of the copies that it holds (`holdings`), in this
    attempt to form the job."""
    num_slots: int
    """Number of slots at the start of the job."""
    choose_size: Callable[[int, Layout | None], int]
    """Takes the number of usable hosts and the layout; returns the number of slots."""
    previous: SlotAssignment | None
    layout: Layout | None
    """Layout of the state; None if no live host knows the layout."""
    limits: SizeLimits
    domains: FailureDomains

    @property
    def group_slots(self) -> int:
        """Number of slots of a replica group; 1 if the layout is unknown."""
        known = self.layout
        return ReplicaGroups.of(known, self.limits).group[1] if known else 1

    def prefetched(self, num_slots: int) -> dict[str, dict[int, int]]:
        """Maps each host to the bytes that it has prefetched, by slot.

        Leaves out hosts and slots without prefetched bytes. `num_slots` is the number
        of slots that the job is to have.
        """
        return {
            host: _bytes_by_slot(found, num_slots, self.group_slots)
            for host, reply in self.replies.items()
            if (found := reply.get("prefetched"))
        }


def _fill_with_spares(seating: Seating) -> Filled:
    """Chooses the number of slots, keeps hosts in their slots, and fills empty slots.

    Returns the host of each slot. An empty slot gets a spare, or None if no spare is
    left.
    """
    old, layout = seating.previous, seating.layout
    num_slots = seating.choose_size(len(seating.usable), layout)
    ahead = seating.prefetched(num_slots)
    return seat(
        list(zip(old.slots, old.incarnations, strict=True)) if old else [],
        seating.usable,
        num_slots,
        seating.group_slots,
        lambda seats, spares: preferred(
            old, layout, seats, spares, seating.domains, ahead
        ),
    )


def _bytes_by_slot(
    prefetched: Mapping[int, int], num_slots: int, group_slots: int
) -> dict[int, int]:
    """Maps each slot to the number of prefetched bytes that a host in it could use.

    Slots at the same position in their replica groups have the same slices, so bytes
    that were prefetched for one of these slots count for all of them. Slots without
    prefetched bytes are left out.

    Args:
        prefetched: slot to the number of bytes that were prefetched for it.
        num_slots: number of slots of the job.
        group_slots: number of slots of a replica group.

    >>> _bytes_by_slot({1: 9}, num_slots=4, group_slots=2)
    {1: 9, 3: 9}
    """
    positions = {slot % group_slots: nbytes for slot, nbytes in prefetched.items()}
    return {
        slot: positions[slot % group_slots]
        for slot in range(num_slots)
        if slot % group_slots in positions
    }


def _fill_with_processes(seating: Seating) -> Filled:
    """Gives slot i to the host to which the user's process with index i is attached.

    Returns the host of each slot; None for a slot without a process. A process that has
    detached since its host's last record does not count.
    """
    free = [  # replies are newer than records: a process may have detached since
        record
        for record in seating.usable
        if record.attached_ns
        and seating.replies[record.host]["attached_ns"] == record.attached_ns
    ]
    return fill_by_process(free, seating.num_slots)


def _no_spare(empty: str, num_slots: int, job: str, store: str) -> str:
    return (
        f"no spare is left for slot {empty}: the job waits for a host, and goes on "
        "when one comes back or another joins. To start one more: the command of the "
        f"other agents, with --job {job} --store {store}"
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
    """How a job fills its slots, and reacts when hosts and trainers join or end."""

    attached: bool
    """Whether trainers are processes that the user starts. Such processes decide when
    to save and restore, may restore a step under other shardings than the saved ones,
    and may wait until a step is committed or stored."""
    fill: Callable[[Seating], Filled]
    """Returns the host of each slot."""
    waiting_line: Callable[[str, int, str, str], str]
    """Makes the message for a job with empty slots. Takes the names of the empty slots,
    the number of all slots, the job's name and the store's address."""
    waiting_event: str
    """Name of the event that is logged when the job begins to wait with empty slots."""
    begins_on_join: bool
    """Whether a host that joins can start the job, or end the job's wait for a host.
    Otherwise the job starts when every process has attached."""
    ends_by_itself: bool
    """Whether the job ends when all trainers have finished, or after an error that
    would repeat. If False, the error is sent to the trainers, and the job waits for new
    trainers."""
    reads_copies: bool
    """Whether hosts read and verify their copies in every attempt to form the job."""
    has_coordination_service: bool
    """Whether dtft runs JAX's coordination service: one agent for all trainers, or each
    trainer for itself (`AgentConfig.is_served_by_one`). If False, the user's processes
    do."""
    reports: Mapping[str, Mapping[str, Check]]
    """Maps the kind (`op`) of each report that a host may send to the checks of the
    report's fields."""
    exit_report: Callable[[int], ExitReport]
    """Makes the report of a trainer's end, or None. Takes the return code of a trainer
    that the agent has started. For a user's process, takes 1 if the process has told
    the agent that it leaves, else 0."""
    change_refusal: Callable[[str], str] | None
    """Explains why a job of this name cannot be scaled, and no host of it drained; None
    if a job can be changed."""


LAUNCHED = SeatPolicy(
    attached=False,
    fill=_fill_with_spares,
    waiting_line=_no_spare,
    waiting_event="waiting_for_host",
    begins_on_join=True,
    ends_by_itself=True,
    reads_copies=False,
    has_coordination_service=True,
    reports=REPORT_FIELDS,
    exit_report=_exit_code,
    change_refusal=None,
)
"""Policy of jobs whose agents start the trainers. Any host can have any slot."""

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
    change_refusal=change_refusal,
)
"""Policy of jobs whose processes the user starts (`--serve-only`)."""
