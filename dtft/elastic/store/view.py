"""A job's records in the store at one moment, parsed from its keys.

A view has an era and a revision and is never replaced by an older view. The era is kept
in the store itself: lost data, or data older than seen before, begin a new era.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from dtft.checkpoint.replication import Commit
from dtft.elastic.assignment import HostRecord, SlotAssignment, WantedSize
from dtft.elastic.store.api import KeyValue, Store

logger = logging.getLogger(__name__)

_REVISION_BITS = 40
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class View:
    """The job's records in the store at one moment."""

    hosts: dict[str, HostRecord] = dataclasses.field(default_factory=dict)
    leases: dict[str, int] = dataclasses.field(default_factory=dict)
    leader: str | None = None
    leader_revision: int = 0
    """Create revision of the leader key, by which the leader's writes are fenced."""
    leader_lease: int = 0
    last_led: str = ""
    """The host that leads or led last."""
    last_led_revision: int = 0
    """Revision of the write of `last_led`; a campaign must know it."""
    assignment: SlotAssignment | None = None
    stored: int = 0
    """The newest step that was ever written to storage."""
    stop: bool = False
    wanted: WantedSize | None = None
    """The requested size; None for the size at the start."""
    budget: str = ""
    """The failure budget as JSON."""
    result: str | None = None
    """JSON of the job's end, once it has ended."""
    era: int = 0
    """Counts how often the store lost data; 0 before any host registered."""
    era_revision: int = 0
    """Revision of the write of the era."""
    revision: int = 0
    """Revision of the store for this view."""

    @property
    def term(self) -> int:
        """The number of the leader's term; it grows with every later leader."""
        return (self.era << _REVISION_BITS) + self.leader_revision

    @property
    def age(self) -> tuple[int, int]:
        """Orders views: a later one is larger."""
        return self.era, self.revision


def job_key(job: str, name: str) -> str:
    """The key of a name in a job, below the store's prefix.

    >>> job_key("mine", "m/leader")
    'mine/m/leader'
    """
    return f"{job}/{name}"


class ViewReader:
    """Parses views; an unchanged value is not parsed again."""

    def __init__(self, job: str) -> None:
        """Starts without a parsed value."""
        self._prefix = job_key(job, "m/")
        self._known: dict[str, tuple[bytes, Any]] = {}
        """Key to its value and the parsed result."""

    def view(self, pairs: Collection[KeyValue], revision: int) -> View:
        """The view of the given pairs; an unreadable value is left out."""
        former, self._known = self._known, {}
        found = {pair.key.removeprefix(self._prefix): pair for pair in pairs}

        def read(name: str, parse: Callable[[bytes], _Value]) -> _Value | None:
            if (pair := found.get(name)) is None:
                return None
            known = former.get(pair.key)
            if known is None or known[0] != pair.value:
                known = pair.value, _read(parse, pair)
            self._known[pair.key] = known
            return known[1]

        hosts, leases = {}, {}
        for name in found:
            if name.startswith("hosts/"):
                record = read(name, HostRecord.from_json)
                if record is not None:
                    hosts[record.host] = record
                    leases[record.host] = found[name].lease
        leader, led, era = found.get("leader"), found.get("led"), found.get("era")
        return View(
            hosts=hosts,
            leases=leases,
            leader=read("leader", bytes.decode),
            leader_revision=leader.create_revision if leader else 0,
            leader_lease=leader.lease if leader else 0,
            last_led=read("led", bytes.decode) or "",
            last_led_revision=led.mod_revision if led else 0,
            assignment=read("assignment", SlotAssignment.from_json),
            stored=read("stored", int) or 0,
            stop="stop" in found,
            wanted=read("size", WantedSize.from_json),
            budget=read("budget", bytes.decode) or "",
            result=read("result", bytes.decode),
            era=read("era", _era_of) or 0,
            era_revision=era.mod_revision if era else 0,
            revision=revision,
        )


def _read(read: Callable[[bytes], _Value], pair: KeyValue | None) -> _Value | None:
    """Parses a stored value; None if it is absent or unreadable."""
    if pair is None:
        return None
    try:
        return read(pair.value)
    except Exception as error:  # it can be wrong in any way at any depth
        logger.warning("the store's value of %s cannot be read: %r", pair.key, error)
        return None


def _era_of(value: bytes) -> int:
    return int(json.loads(value)["era"])


def read_view(store: Store, job: str) -> tuple[View, int]:
    """Reads a job's view from the store, with its revision."""
    pairs, revision = store.list(job_key(job, "m/"))
    return ViewReader(job).view(pairs, revision), revision


def read_commits(store: Store, job: str) -> tuple[Commit, ...]:
    """The recorded commits of a job, newest first; none if they cannot be read.

    A leader must not fail on unreadable commits: the hosts know their newest commits
    too.
    """
    return _read(_commits_of, store.get(job_key(job, "c/commits"))) or ()


def _commits_of(value: bytes) -> tuple[Commit, ...]:
    return tuple(Commit.from_json(line) for line in value.decode().splitlines())
