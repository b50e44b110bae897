"""A job's records in the store at one moment, parsed from its keys.

A view has an era and the store's revision, and is never replaced by an older view. The
era is a number that the store keeps under one key, together with a random id. A host
that finds that the store has lost data, such as a smaller revision than in an earlier
view, writes the next era. So views after the loss are newer than views before it.
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
    """Create revision of the leader key; a leader's write applies only while the key
    has this revision."""
    leader_lease: int = 0
    last_led: str = ""
    """The host that leads now or led last; "" before the first leader."""
    last_led_revision: int = 0
    """Mod revision of `last_led`'s key. A host can become leader only if it knows the
    current one."""
    assignment: SlotAssignment | None = None
    stored: int = 0
    """The step last written to storage; 0 for none."""
    stop: bool = False
    wanted: WantedSize | None = None
    """The numbers of replicas and slots that a user has requested; None without a
    request."""
    budget: str = ""
    """JSON of the counts of failures that may end the job; "" for none."""
    result: str | None = None
    """JSON that describes the job's end; None while the job runs."""
    era: int = 0
    """Number of the era, which increases when the store has lost data; 0 if the store
    has none."""
    era_value: bytes = b""
    """Value of the era key, which has a random id; b"" if there is no key. A store that
    was emptied may reach the same revisions and the same number again, but not the same
    value."""
    revision: int = 0
    """Revision of the store at which this view was read."""

    @property
    def term(self) -> int:
        """The number of the leader's term (time in office); grows with every leader."""
        return (self.era << _REVISION_BITS) + self.leader_revision

    def lost_data_since(self, known: "View") -> bool:
        """Whether the store has lost data since an earlier view, `known`.

        True if this view has a smaller (era, revision). Also True if it has the same
        era, but another value of the era's key: each host that begins an era writes
        another random id there.
        """
        again = self.era == known.era and self.era_value != known.era_value
        return self.age < known.age or again

    @property
    def age(self) -> tuple[int, int]:
        """(era, revision of the store), which is larger for a later view.

        The era is a number that grows when the store has lost data.
        """
        return self.era, self.revision


def job_key(job: str, name: str) -> str:
    """Returns the key under which the store has the value `name` of a job.

    The client puts the store's prefix before the key.

    >>> job_key("mine", "m/leader")
    'mine/m/leader'
    """
    return f"{job}/{name}"


class ViewReader:
    """Parses a job's keys into views; caches the parsed values of unchanged keys."""

    def __init__(self, job: str) -> None:
        """Starts with an empty cache."""
        self._prefix = job_key(job, "m/")
        self._known: dict[str, tuple[bytes, Any]] = {}
        """Key to its value and the parsed result."""

    def view(self, pairs: Collection[KeyValue], revision: int) -> View:
        """Parses the job's pairs into a view; an unreadable value counts as absent.

        `revision` is the store's revision at which the pairs were read.
        """
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
            era_value=era.value if era else b"",
            revision=revision,
        )


def _read(read: Callable[[bytes], _Value], pair: KeyValue | None) -> _Value | None:
    """Parses a stored value; returns None if the value is absent or unreadable."""
    if pair is None:
        return None
    try:
        return read(pair.value)
    except Exception as error:  # a malformed value can raise any exception
        logger.warning("the store's value of %s cannot be read: %r", pair.key, error)
        return None


def _era_of(value: bytes) -> int:
    return int(json.loads(value)["era"])


def read_view(store: Store, job: str) -> tuple[View, int]:
    """Reads a job's view from the store; returns the view and its revision."""
    pairs, revision = store.list(job_key(job, "m/"))
    return ViewReader(job).view(pairs, revision), revision


def read_commits(store: Store, job: str) -> tuple[Commit, ...]:
    """Reads the recorded commits of a job, newest first; () if none can be read.

    A leader must not fail on unreadable commits, because the hosts also report their
    newest commits.
    """
    return _read(_commits_of, store.get(job_key(job, "c/commits"))) or ()


def _commits_of(value: bytes) -> tuple[Commit, ...]:
    return tuple(Commit.from_json(line) for line in value.decode().splitlines())
