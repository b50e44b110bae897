"""A host's membership in its job: registration, leader key, the view of all others.

Speaks to the store and turns what it says into `View` values. Decides nothing about
slots or recovery; its only rule is that a leader's writes are fenced by its key.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dtft.checkpoint.commit import Commit
from dtft.elastic.roles import Assignment, HostRecord
from dtft.elastic.sizing import WantedSize
from dtft.elastic.store import Compare, Delete, Put, Store, StoreUnavailable
from dtft.elastic.upkeep import Upkeep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class View:
    """What the store says of the job at one moment."""

    hosts: dict[str, HostRecord] = dataclasses.field(default_factory=dict)
    leases: dict[str, int] = dataclasses.field(default_factory=dict)
    leader: str | None = None
    leader_revision: int = 0
    """Create revision of the leader key: the term, larger for every new leader."""
    leader_lease: int = 0
    assignment: Assignment | None = None
    stored: int = 0
    """The newest step that was ever written to storage."""
    stop: bool = False
    wanted: WantedSize | None = None
    """The size that somebody asked for; None: that of the start."""
    result: str | None = None
    """JSON of the job's end, once it has ended."""


def job_key(job: str, name: str) -> str:
    """The key of a name in a job, below the store's prefix.

    >>> job_key("mine", "m/leader")
    'mine/m/leader'
    """
    return f"{job}/{name}"


def read_view(store: Store, job: str) -> tuple[View, int]:
    """What the store says of a job, and the revision that this is of."""
    prefix = job_key(job, "m/")
    pairs, revision = store.list(prefix)
    found = {pair.key.removeprefix(prefix): pair for pair in pairs}
    hosts, leases = {}, {}
    for name, pair in found.items():
        if name.startswith("hosts/"):
            record = HostRecord.from_json(pair.value)
            hosts[record.host], leases[record.host] = record, pair.lease
    leader, assignment = found.get("leader"), found.get("assignment")
    result, stored = found.get("result"), found.get("stored")
    size = found.get("size")
    view = View(
        hosts=hosts,
        leases=leases,
        leader=leader.value.decode() if leader else None,
        leader_revision=leader.create_revision if leader else 0,
        leader_lease=leader.lease if leader else 0,
        assignment=Assignment.from_json(assignment.value) if assignment else None,
        stored=int(stored.value) if stored else 0,
        stop="stop" in found,
        wanted=WantedSize.from_json(size.value) if size else None,
        result=result.value.decode() if result else None,
    )
    return view, revision


def read_commits(store: Store, job: str) -> tuple[Commit, ...]:
    """The recorded commits of a job, newest first."""
    pair = store.get(job_key(job, "c/commits"))
    lines = pair.value.decode().splitlines() if pair else []
    return tuple(Commit.from_json(line) for line in lines)


def claim(store: Store, key: str, value: bytes) -> bytes:
    """Stores a value that a job has once, if it has none; returns the one in force."""
    store.txn([Compare(key=key, target="create", value=0)], [Put(key=key, value=value)])
    pair = store.get(key)
    assert pair is not None
    return pair.value


class Membership:
    """This host's keys in the store, kept alive by two threads."""

    def __init__(
        self,
        store: Store,
        job: str,
        record: HostRecord,
        lease_s: float,
        emit: Callable[[str, object], None],
    ) -> None:
        """Nothing is registered before `start`.

        Args:
            store: etcd, or its in-memory twin.
            job: name of the job.
            record: this host.
            lease_s: seconds after which a silent host is gone.
            emit: receives ("view", View) and ("store", bool up) from threads.
        """
        self._store, self._record, self._emit = store, record, emit
        self._job, self._lease_s = job, lease_s
        self.upkeep = Upkeep(store)
        """Of the history that the leader's writes leave behind."""
        self._lease = self._lapsing = 0
        self._putting = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def key(self, name: str) -> str:
        """The full key of a name in this job."""
        return job_key(self._job, name)

    def start(self) -> None:
        """Registers this host and begins to watch.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
        self._register()
        for target in (self._keep_alive, self._watch):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _register(self) -> None:
        self._lease = self._store.grant(self._lease_s)
        self._put_record()

    def _put_record(self) -> None:
        with self._putting:  # a record must not overtake a newer one
            value = self._record.to_json().encode()
            key = self.key(f"m/hosts/{self._record.host}")
            self._store.put(key, value, lease=self._lease)

    def describe(self, record: HostRecord) -> None:
        """This host has something else to say of itself; does not wait."""
        self._record = record
        thread = threading.Thread(target=self._put_until_done, daemon=True)
        thread.start()

    def _put_until_done(self) -> None:
        while not self._stop.is_set():
            try:
                self._put_record()
                return
            except StoreUnavailable:
                self._stop.wait(0.2)

    def _keep_alive(self) -> None:
        up = True
        while not self._stop.wait(self._lease_s / 5 if up else 0.2):
            try:
                self._renew()
                now = True
            except StoreUnavailable as error:
                now = False
                if up:
                    logger.warning("%s", error)
            if now != up:
                up = now
                self._emit("store", up)
                if up:
                    self._refresh()

    def _renew(self) -> None:
        old, lapsing = self._lease, self._lapsing
        if old != lapsing and self._store.keepalive(old) is not None:
            return
        self._register()
        if old == lapsing:
            self._store.revoke(old)  # else it runs out

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                revision = self._refresh()
                for _ in self._store.watch(self.key("m/"), revision + 1, self._stop):
                    self._refresh()
            except StoreUnavailable:
                self._stop.wait(0.2)

    def _refresh(self) -> int:
        view, revision = read_view(self._store, self._job)
        self._emit("view", view)
        return revision

    def campaign(self) -> None:
        """Tries to become leader; the watch tells who did."""
        key = self.key("m/leader")
        self._store.txn(
            [Compare(key=key, target="create", value=0)],
            [Put(key=key, value=self._record.host.encode(), lease=self._lease)],
        )

    def let_go(self) -> None:
        """Gives the leader key up, not the registration; does not wait.

        The lease is not renewed any more and another is taken for the registration, so
        the key ends with the old one whatever the store answers until then.
        """
        self._lapsing = self._lease

    def expel(self, lease: int) -> None:
        """Ends the lease of a host that was proved dead, so that all see it at once."""
        self._store.revoke(lease)

    def expel_soon(self, host: str, lease: int) -> None:
        """As `expel`, without waiting; errors are only logged."""
        if lease:
            threading.Thread(
                target=self._expel_quietly, args=(host, lease), daemon=True
            ).start()

    def _expel_quietly(self, host: str, lease: int) -> None:
        try:
            self.expel(lease)
        except StoreUnavailable as error:
            logger.warning("could not end the lease of %s: %s", host, error)

    def fenced(self, view: View, changes: list[Put | Delete]) -> bool:
        """Writes only while this host is still the leader of `view`'s term."""
        term = Compare(
            key=self.key("m/leader"), target="create", value=view.leader_revision
        )
        return self._store.txn([term], list(changes))

    def commits(self) -> tuple[Commit, ...]:
        """The recorded commits, newest first."""
        return read_commits(self._store, self._job)

    def commit_change(self, commits: tuple[Commit, ...]) -> Put:
        """The write that records these commits."""
        text = "\n".join(commit.to_json() for commit in commits)
        return Put(key=self.key("c/commits"), value=text.encode())

    def leave(self) -> None:
        """Ends this host's registration; errors are of no interest any more."""
        self._stop.set()
        try:
            self._store.revoke(self._lease)
        except StoreUnavailable:
            pass
