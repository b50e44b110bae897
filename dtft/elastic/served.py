"""Jobs whose processes belong to the user: who fills which slot, and who is missing.

Decisions over what hosts say of the processes attached to them; the slot of a process
is its index in the user's own job. Must not know processes or connections.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtft.elastic.roles import HostRecord
from dtft.elastic.store import StoreUnavailable


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What every process of a job must say alike; the first one decides."""

    processes: int
    """Processes of the job, one per slot."""
    directory: str
    """Of the storage tier."""
    storage_interval_steps: int
    max_to_keep: int
    chunk_bytes: int
    storage_timeout_s: float

    def to_json(self) -> str:
        """JSON; inverse of `from_json`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Terms":
        """Reads what `to_json` wrote.

        Raises:
            TypeError: a field is missing or unknown.
        """
        return cls(**json.loads(text))

    def differences(self, other: "Terms") -> str:
        """What `other` says otherwise, for people; "" if nothing.

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
    """Which processes the agent of a host takes."""

    job: str
    host: str
    processes: int | None
    """How many the job has to have; None for any number."""
    agree: Callable[[Terms], Terms]
    """Makes terms those of the job, or returns the ones in force."""

    def objection(self, message: Mapping[str, Any]) -> str | None:
        """Why a process is not taken, from what it says of itself; None if it is."""
        who = f"job {self.job!r}, agent of host {self.host}"
        try:
            terms, index = Terms(**message["terms"]), int(message["process"])
            pid = int(message["pid"])
        except (TypeError, KeyError, ValueError):
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
        if differences:
            return (
                f"{who}: this process has {differences} (what the job began with). "
                "Start it with the same, or start the agents under another --job."
            )
        return None


def fill_by_process(
    hosts: Collection[HostRecord], num_slots: int
) -> tuple[HostRecord | None, ...]:
    """The host of each slot: the one to which the process of that index is attached.

    Of two that claim one index the one that attached last has it: the other is left
    from an earlier start of the job.

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
    """Which processes are not attached, for people; "" if all are.

    >>> missing([], 3)
    'processes 0, 1, 2 of 3 to attach'
    """
    filled = fill_by_process(hosts, num_slots)
    absent = [str(slot) for slot, record in enumerate(filled) if record is None]
    if not absent:
        return ""
    word = "process" if len(absent) == 1 else "processes"
    return f"{word} {', '.join(absent)} of {num_slots} to attach"


def scale_refusal(job: str) -> str:
    """Why `dtft scale` cannot change the size of such a job.

    >>> scale_refusal("j").partition(":")[0]
    "job 'j' serves processes of its user's own (--serve-only)"
    """
    return (
        f"job {job!r} serves processes of its user's own (--serve-only): whoever "
        "starts them decides how many there are. For another number close them, and "
        "start agents and processes anew under another --job; they begin with what "
        "storage has."
    )
