"""What the store says of a job at one moment, read from its keys. Pure.

A view has an era and a revision and is never replaced by an older one. The era is kept
in the store itself: data that are gone, or older than what was seen, begin a new era.
"""

import dataclasses
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass

from dtft.checkpoint.commit import Commit
from dtft.elastic.roles import Assignment, HostRecord
from dtft.elastic.sizing import WantedSize
from dtft.elastic.store import KeyValue, Store

logger = logging.getLogger(__name__)

_REVISION_BITS = 40


@dataclass(frozen=True, kw_only=True)
class View:
    """What the store says of the job at one moment."""

    hosts: dict[str, HostRecord] = dataclasses.field(default_factory=dict)
    leases: dict[str, int] = dataclasses.field(default_factory=dict)
    leader: str | None = None
    leader_revision: int = 0
    """Create revision of the leader key, by which the leader's writes are fenced."""
    leader_lease: int = 0
    last_led: str = ""
    """Host that led last, or leads."""
    last_led_revision: int = 0
    """Of the write that says so; whoever wants to lead next has to know it."""
    assignment: Assignment | None = None
    stored: int = 0
    """The newest step that was ever written to storage."""
    stop: bool = False
    wanted: WantedSize | None = None
    """The size that somebody asked for; None: that of the start."""
    budget: str = ""
    """What has failed so far, as JSON of the failure budget."""
    result: str | None = None
    """JSON of the job's end, once it has ended."""
    era: int = 0
    """Counts how often the store lost data; 0 before any host registered."""
    era_revision: int = 0
    """Of the write of the era."""
    revision: int = 0
    """Of the store, when it said so."""

    @property
    def term(self) -> int:
        """Number of the leader's term, larger for every later leader of the job."""
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


def view_of(job: str, pairs: Collection[KeyValue], revision: int) -> View:
    """The view that some pairs make; a record that cannot be read is left out."""
    prefix = job_key(job, "m/")
    found = {pair.key.removeprefix(prefix): pair for pair in pairs}
    hosts, leases = {}, {}
    for name, pair in found.items():
        if name.startswith("hosts/"):
            try:
                record = HostRecord.from_json(pair.value)
            except (TypeError, ValueError) as error:
                logger.warning("the store's record %s is not one: %s", name, error)
                continue
            hosts[record.host], leases[record.host] = record, pair.lease
    leader, assignment = found.get("leader"), found.get("assignment")
    result, stored = found.get("result"), found.get("stored")
    size, led, era = found.get("size"), found.get("led"), found.get("era")
    budget = found.get("budget")
    return View(
        hosts=hosts,
        leases=leases,
        leader=leader.value.decode() if leader else None,
        leader_revision=leader.create_revision if leader else 0,
        leader_lease=leader.lease if leader else 0,
        last_led=led.value.decode() if led else "",
        last_led_revision=led.mod_revision if led else 0,
        assignment=Assignment.from_json(assignment.value) if assignment else None,
        stored=int(stored.value) if stored else 0,
        stop="stop" in found,
        wanted=WantedSize.from_json(size.value) if size else None,
        budget=budget.value.decode() if budget else "",
        result=result.value.decode() if result else None,
        era=int(json.loads(era.value)["era"]) if era else 0,
        era_revision=era.mod_revision if era else 0,
        revision=revision,
    )


def read_view(store: Store, job: str) -> tuple[View, int]:
    """What the store says of a job, and the revision that this is of."""
    pairs, revision = store.list(job_key(job, "m/"))
    return view_of(job, pairs, revision), revision


def read_commits(store: Store, job: str) -> tuple[Commit, ...]:
    """The recorded commits of a job, newest first."""
    pair = store.get(job_key(job, "c/commits"))
    lines = pair.value.decode().splitlines() if pair else []
    return tuple(Commit.from_json(line) for line in lines)
