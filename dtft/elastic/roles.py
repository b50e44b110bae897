"""Who fills which slot. Pure decisions over frozen values.

Decides the assignment slot -> host, and whether a change makes a new generation. Must
not know processes, etcd, connections or the clock.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtft.checkpoint.replication import Spread

Source = Literal["memory", "storage", "init"]


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """What a host says of itself when it registers."""

    host: str
    """Name, unique in the job."""
    address: str
    """host:port of its transport."""
    incarnation: str
    """PROCESS.NUMBER: the process is another for every start of the agent, the number
    for every registration after its lease ran out."""
    joined_ns: int
    """Wall-clock time of registration; spares are taken in this order."""
    pid: int
    """Process id of the agent, for people who look for it."""
    domain: str = ""
    """Label of its failure domains, as `checkpoint.domains` reads it."""
    process: int = -1
    """Index of the user's process that is attached to the agent, -1 for none."""
    attached_ns: int = 0
    """Wall-clock time at which it attached; another one for every process."""

    def replaces(self, other: "HostRecord") -> bool:
        """Whether this is a later agent process under the same name."""
        another = process_of(self.incarnation) != process_of(other.incarnation)
        return another and self.joined_ns > other.joined_ns

    def to_json(self) -> str:
        """JSON; inverse of `from_json`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "HostRecord":
        """Reads what `to_json` wrote.

        Raises:
            ValueError, TypeError: it is not a record.
        """
        record = cls(**json.loads(text))
        for it in dataclasses.fields(cls):
            value = getattr(record, it.name)
            if type(value) is not it.type:
                raise ValueError(f"{it.name}={value!r} is not of type {it.type}")
        return record


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which host fills which slot, and from where the state comes."""

    generation: int
    """Changes when, and only when, the map slot -> host does."""
    attempt: int
    """Counts the formations of a generation; messages carry both."""
    slots: tuple[str, ...]
    """The host of each slot."""
    incarnations: tuple[str, ...]
    """Of these hosts, in the same order."""
    source: Source
    """Where the state comes from."""
    step: int
    """The step restored; 0 is the initial state."""
    rung: int
    """Rung of the recovery ladder; 0 for the first formation of a job."""
    reason: str
    """Why it was formed, for people."""
    spread: Spread = field(default_factory=Spread)
    """By what the copies of its slots are kept apart."""
    asked_slots: int = 0
    """Slots that somebody had asked for, 0 for nobody: hosts tell a store that has lost
    it."""

    @functools.cached_property
    def slot_of(self) -> dict[str, int]:
        """Host to its slot."""
        return {host: slot for slot, host in enumerate(self.slots)}

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt): later is larger, and only the latest is obeyed."""
        return self.generation, self.attempt

    def to_json(self) -> str:
        """JSON; inverse of `from_json`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Assignment":
        """Reads what `to_json` wrote."""
        raw = json.loads(text)
        return cls(
            **{
                **raw,
                "slots": tuple(raw["slots"]),
                "incarnations": tuple(raw["incarnations"]),
                "spread": Spread(
                    **{**raw["spread"], "domains": tuple(raw["spread"]["domains"])}
                ),
            }
        )


def process_of(incarnation: str) -> str:
    """The agent process of an incarnation: NAME of NAME.NUMBER.

    A process whose lease ran out registers again under the next number.

    >>> process_of("9f3c.2"), process_of("9f3c")
    ('9f3c', '9f3c')
    """
    return incarnation.partition(".")[0]


Choose = Callable[
    [Sequence[HostRecord | None], Sequence[HostRecord]], tuple[HostRecord | None, ...]
]
"""From the host of each slot (None where it is empty) and the spares in order to the
host of each slot."""


def fill_slots(
    previous: Sequence[tuple[str, str]],
    hosts: Collection[HostRecord],
    num_slots: int,
    choose: Choose | None = None,
) -> tuple[HostRecord | None, ...]:
    """Keeps every live host in its slot and fills the others with spares.

    Args:
        previous: (host, incarnation) of each slot, empty for a new job.
        hosts: the live hosts.
        num_slots: number of slots.
        choose: gives spares to the empty slots; by default one after the other.

    Returns:
        The host of each slot; None where no host is left. A new job is filled in the
        order of the hosts' names, spares stand in the order in which they joined.
    """
    live = {(record.host, process_of(record.incarnation)): record for record in hosts}
    entries = [(host, process_of(incarnation)) for host, incarnation in previous]
    kept = [live.get(entry) for entry in entries] or [None] * num_slots
    taken = {record.host for record in kept if record}
    spares = sorted(
        (record for record in hosts if record.host not in taken),
        key=lambda record: (
            (record.joined_ns if previous else len(record.host)),
            record.host,
        ),
    )
    if choose is not None:
        return choose(kept, spares)
    queue = iter(spares)
    return tuple(record or next(queue, None) for record in kept)


def next_epoch(
    previous: Assignment | None, filled: Sequence[HostRecord]
) -> tuple[int, int]:
    """(generation, attempt) of a new formation.

    >>> next_epoch(None, [])
    (1, 1)
    """
    if previous is None:
        return 1, 1
    old = zip(previous.slots, map(process_of, previous.incarnations), strict=True)
    new = [(record.host, process_of(record.incarnation)) for record in filled]
    if new == list(old):
        return previous.generation, previous.attempt + 1
    return previous.generation + 1, 1
