"""This host's part in its job's store: registration, leader key and fenced writes.

The agent's event loop calls `tick`, which renews the lease; so a host whose loop blocks
loses its lease. Calls of the store run on other threads, so they do not block the loop.
After its lease has expired, a host registers again under its next incarnation. A
leader's writes are fenced: they apply only while leader key and era are unchanged. The
era is a number in the store that grows when the store has lost data. `Compaction` drops
the history of a store that is private to dtft.
"""

import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from dtft.checkpoint.replication import Commit
from dtft.elastic.assignment import HostRecord, process_of
from dtft.elastic.event_loop import Loop
from dtft.elastic.store.api import (
    Compare,
    Delete,
    LeaseGone,
    Put,
    Store,
    StoreUnavailable,
)
from dtft.elastic.store.mirror import MirrorSource, Pairs
from dtft.elastic.store.view import View, ViewReader, job_key, read_commits

logger = logging.getLogger(__name__)

PERIOD_BYTES = 512 << 10
PERIOD_WRITES = 500
"""Number of writes between two compactions of a private store. A compaction is also
due after `PERIOD_BYTES` written bytes."""
RECLAIM_PAUSE_S = 5.0
FULL_PAUSE_S = 60.0
"""Seconds between two log lines that report a full shared store."""


class Compaction:
    """Compacts a private store as its history grows. Not thread-safe.

    A store keeps every old value of a key until a compaction. Keys are written at every
    commit, so with short steps the quota fills within minutes, but etcd's automatic
    compaction runs only every five minutes. A compaction affects all keys of an etcd,
    so the operator of a shared store compacts it (`--auto-compaction-mode=periodic
    --auto-compaction-retention=5m`); see `Store.private`.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts with no counted write.

        Args:
            store: the store to compact.
            clock: returns the time in seconds.
        """
        self._store, self._clock = store, clock
        self._bytes = self._writes = self._mark = 0
        self._pause_s = RECLAIM_PAUSE_S if store.private else FULL_PAUSE_S
        self._reclaimed = -self._pause_s

    def wrote(self, num_bytes: int) -> None:
        """Counts one write of `num_bytes`; compacts the store at the end of a period.

        A period ends after 500 writes (`PERIOD_WRITES`) or 512 KiB of values
        (`PERIOD_BYTES`), whichever is first. The compaction drops the values that were
        replaced before the period began. Values that were replaced during the period
        stay, so that a watch can continue after a short interruption. A store with
        other users is not compacted.
        """
        if not self._store.private:
            return
        self._bytes, self._writes = self._bytes + num_bytes, self._writes + 1
        if self._bytes < PERIOD_BYTES and self._writes < PERIOD_WRITES:
            return
        self._bytes = self._writes = 0
        try:
            _, now = self._store.list("none/")
            mark, self._mark = self._mark, now
            if mark:
                self._store.compact(mark)
        except (StoreUnavailable, ValueError) as error:
            # etcd refuses a mark that another leader's compaction has passed.
            logger.info("the store's history was not compacted: %s", error)

    def reclaim(self) -> None:
        """Frees space in a store that refuses writes because its quota is used up.

        If the store has other users, only logs a warning. Does nothing for 5 s
        (`RECLAIM_PAUSE_S`) after an attempt, or for 60 s (`FULL_PAUSE_S`) after such a
        warning.
        """
        if self._clock() < self._reclaimed + self._pause_s:
            return
        self._reclaimed = self._clock()
        if not self._store.private:
            logger.warning(
                "the store is full and has other users, so commits wait for its "
                "operator: compact and defragment it, raise --quota-backend-bytes, and "
                "run `etcdctl alarm disarm`"
            )
            return
        logger.warning("the store is full: dropping its history to free space")
        try:
            self._store.reclaim()
        except StoreUnavailable as error:
            logger.warning(
                "the store is still full: its space could not be freed: %s", error
            )


RETRY_S = 0.2
"""Seconds until the next attempt after a call that the store did not answer."""


def claim(store: Store, key: str, value: bytes) -> bytes:
    """Writes a key if it does not exist; returns the value that the key then has."""
    store.txn([Compare(key=key, target="create", value=0)], [Put(key=key, value=value)])
    pair = store.get(key)
    assert pair is not None
    return pair.value


class Membership:
    """One host's membership in its job: registration, leader key and a leader's writes.

    Methods run on the event loop, except methods whose docstrings say "blocks".

    Attributes:
        record: this host's record in the store.
        view: the newest view (the job's records in the store at one moment).
    """

    def __init__(
        self,
        store: Store,
        mirrors: MirrorSource,
        job: str,
        record: HostRecord,
        lease_s: float,
        loop: Loop,
        *,
        on_view: Callable[[View], None],
        on_lapse: Callable[[], None],
        on_store: Callable[[bool], None],
        on_replaced: Callable[[HostRecord], None],
    ) -> None:
        """Makes a membership; `start` registers the host.

        Args:
            store: the job's store.
            mirrors: starts the mirror, a local copy of the job's keys.
            job: name of the job.
            record: this host's record; its incarnation names the agent process.
            lease_s: seconds without a renewal after which the lease expires.
            loop: the agent's event loop.
            on_view: called with each new view that is not older than the view before.
            on_lapse: called when the lease has expired, so other hosts may treat this
                host as dead. `Membership` registers the host again by itself.
            on_store: called with False when the store stops answering, with True when
                the store answers again.
            on_replaced: called with the record of a later agent process that has
                registered under this host's name.
        """
        self._on_replaced = on_replaced
        self._store, self._mirrors, self._loop = store, mirrors, loop
        self._job, self._lease_s = job, lease_s
        self._on_view, self._on_lapse, self._on_store = on_view, on_lapse, on_store
        self.compaction = Compaction(store, loop.now)
        """Compacts the history of the leader's writes."""
        self.record, self.view = record, View()
        self._reader = ViewReader(job)
        self.claims: Mapping[str, bytes] = {}
        """Name to value of keys that each registration writes if they are absent."""
        self._lane, self._campaigns = loop.lane("membership"), loop.lane("campaign")
        self._lease = self._registrations = 0
        self._busy = self._campaigning = self._stopped = False
        self._again = False
        """Whether the record must be written again, at the time `_put_due` or later."""
        self._due, self._put_due, self._up = 0.0, 0.0, True
        self._end_mirror: Callable[[], None] = lambda: None

    def key(self, name: str) -> str:
        """Returns the key under which the store has the value `name` of this job."""
        return job_key(self._job, name)

    # ------------------------------------------------------------- registration

    def start(self) -> None:
        """Registers this host and begins to watch the job's keys; blocks.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        self._number()
        self._lease = self._register(self.record)
        self._due = self._loop.now() + self._lease_s / 5
        self._end_mirror = self._mirrors.mirror(
            self.key("m/"), lambda *told: self._loop.post(self._changed, *told)
        )

    def _number(self) -> None:
        """Gives this host's record its next incarnation, "PROCESS.NUMBER".

        PROCESS names the agent process; NUMBER counts its registrations in the store,
        from 1.
        """
        self._registrations += 1
        process = process_of(self.record.incarnation)
        self.record = dataclasses.replace(
            self.record, incarnation=f"{process}.{self._registrations}"
        )

    def _register(self, record: HostRecord) -> int:
        """Makes a lease and writes this host's record with that lease; blocks.

        First writes the keys that the first host of a job writes, if the store lacks
        them: the era, and the settings that all hosts must have in common (attribute
        `claims`: the name of each setting to its value).

        Returns:
            The id of the lease.
        """
        era = {"era": self.view.era + 1, "id": secrets.token_hex(8)}
        for name, value in {"era": json.dumps(era).encode(), **self.claims}.items():
            key = self.key(f"m/{name}")
            absent = Compare(key=key, target="create", value=0)
            self._store.txn([absent], [Put(key=key, value=value)])
        lease = self._store.grant(self._lease_s)
        self._put(record, lease)
        return lease

    def _put(self, record: HostRecord, lease: int) -> None:
        key = self.key(f"m/hosts/{record.host}")
        self._store.put(key, record.to_json().encode(), lease=lease)

    def describe(self, record: HostRecord) -> None:
        """Replaces this host's record, except for the incarnation.

        A later `tick` writes the record to the store.
        """
        incarnation = self.record.incarnation
        self.record = dataclasses.replace(record, incarnation=incarnation)
        self._again = True

    def tick(self) -> None:
        """Starts the store call that is due, if any; does not wait for the call.

        Registers the host if it has no lease. Otherwise writes the host's changed
        record, or renews the lease. Does nothing while an earlier call still runs.
        """
        if self._busy or self._stopped:
            return
        now = self._loop.now()
        puts = bool(self._again and self._lease and now >= self._put_due)
        if now < self._due and not puts:
            return
        self._busy, record, lease = True, self.record, self._lease
        if not lease:
            self._lane.submit(lambda: self._register(record), self._registered)
        elif puts:
            self._again = False
            self._lane.submit(lambda: self._put(record, lease), self._put_done)
        else:
            self._lane.submit(lambda: self._store.keepalive(lease), self._renewed)

    def _registered(self, outcome: "Future[int]") -> None:
        if self._answered(outcome) and not self._stopped:
            self._lease = outcome.result()
            self._due = self._loop.now() + self._lease_s / 5
            logger.info(
                "this host is registered in the store again, as %s",
                self.record.incarnation,
            )

    def _put_done(self, outcome: "Future[None]") -> None:
        if isinstance(outcome.exception(), LeaseGone):
            self._busy = False
            self._lapsed()
        elif not self._answered(outcome):
            # A renewal comes first: a full store refuses writes, but not renewals.
            self._again, self._put_due = True, self._loop.now() + 2 * RETRY_S

    def _renewed(self, outcome: "Future[float | None]") -> None:
        if not self._answered(outcome) or not self._lease:
            return  # no answer, or `let_go` ran during the call
        if outcome.result() is None:
            self._lapsed()
            return
        self._due = self._loop.now() + self._lease_s / 5
        self._check_registered(self.view)  # it may be lost during a call

    def _answered(self, outcome: "Future") -> bool:
        """Marks the running store call as ended; returns whether the call succeeded.

        `outcome` is the finished future of the call. If the store did not answer, the
        next call is made after 0.2 s (`RETRY_S`). Errors other than StoreUnavailable
        are raised.
        """
        self._busy = False
        error = outcome.exception()
        if error is None:
            self._tell_up(True)
            return True
        if not isinstance(error, StoreUnavailable):
            raise error
        self._due = self._loop.now() + RETRY_S
        if self._up:
            logger.warning("%s", error)
        self._tell_up(isinstance(error, LeaseGone))
        return False

    def _tell_up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._on_store(up)

    def _lapsed(self) -> None:
        """Registers this host under its next incarnation, because its lease expired."""
        logger.warning(
            "this host's lease in the store (%s) has expired, so the job may treat the "
            "host as lost; it registers again",
            self.record.incarnation,
        )
        self._lease, self._due = 0, 0.0
        self._number()
        self._on_lapse()
        self.tick()

    # ---------------------------------------------------------------- the view

    def _changed(self, pairs: Pairs, revision: int) -> None:
        """Parses the job's keys into a view and passes it on (`on_view`).

        `pairs` are the keys with their values at the store's `revision`. If the store
        has lost data since the view before, a new era is written instead: a number that
        tells views before the loss from views after it.
        """
        if self._stopped:
            return
        view = self._reader.view(pairs.values(), revision)
        if view.lost_data_since(self.view):
            self._renew_era(view)
            return
        self.view = view
        self._check_registered(view)
        self._on_view(view)

    def _renew_era(self, view: View) -> None:
        """Begins a new era, because the store has lost data.

        Writes the next era's number and a random id, if the era's key still has its
        value in `view`. So only one host's write applies.
        """
        if not view.era_value:
            self._again = bool(self._lease)  # the write fails if the lease is lost
        era = {"era": self.view.era + 1, "id": secrets.token_hex(8)}
        put = Put(key=self.key("m/era"), value=json.dumps(era).encode())
        logger.warning(
            "the store has lost data: era %d begins, and the hosts write the job's "
            "records again",
            era["era"],
        )
        unchanged = self._in_era(view)
        self._campaigns.submit(
            lambda: self._store.txn([unchanged], [put]), _only_logged
        )

    def _in_era(self, view: View) -> Compare:
        """Makes the condition that the store has lost no data since a view was read.

        The condition is that the era key still has the value that it had in `view`.
        """
        key = self.key("m/era")
        if not view.era_value:
            return Compare(key=key, target="create", value=0)
        return Compare(key=key, target="value", value=view.era_value)

    def _check_registered(self, view: View) -> None:
        """Schedules a write of this host's record if it is not in a view.

        Also if the view has the record under another incarnation. If a later agent
        process has registered under this host's name, reports that instead
        (`on_replaced`). Does nothing without a lease, or while a store call runs.
        """
        if not self._lease or self._busy:
            return
        known = view.hosts.get(self.record.host)
        if known is not None and known.replaces(self.record):
            self._on_replaced(known)
        elif known is None or known.incarnation != self.record.incarnation:
            self._again = True

    # ----------------------------------------------------------- the leader key

    def campaign(self) -> None:
        """Tries to take the leader key, without blocking; the next view has the result.

        Fails if a leader exists. Also fails if, after this host's newest view, a host
        has become leader or the store has lost data. Does nothing without a lease,
        while another attempt runs, or after `close`.
        """
        if self._campaigning or not self._lease or self._stopped:
            return
        self._campaigning = True
        view, lease, host = self.view, self._lease, self.record.host.encode()
        free = Compare(key=self.key("m/leader"), target="create", value=0)
        known = Compare(
            key=self.key("m/led"), target="mod", value=view.last_led_revision
        )
        era = self._in_era(view)
        changes = [
            Put(key=self.key("m/leader"), value=host, lease=lease),
            Put(key=self.key("m/led"), value=host),
        ]
        self._campaigns.submit(
            lambda: self._store.txn([free, known, era], changes), self._campaigned
        )

    def _campaigned(self, outcome: "Future[bool]") -> None:
        self._campaigning = False
        error = outcome.exception()
        if isinstance(error, LeaseGone):
            self._due = 0.0  # the next renewal finds that the lease has expired
        elif error is not None:
            _only_logged(outcome)

    def let_go(self, term: View) -> None:
        """Gives up the leader key without waiting; this host remains a follower.

        Deletes the key, and registers this host again under a new lease. If the store
        does not answer the delete, the key disappears when this host's old lease
        expires. `term` is a view of the store in which this host has the leader key.
        """
        self._lease, self._due = 0, 0.0
        mine = [self._fence(term), self._in_era(term)]
        drop = Delete(key=self.key("m/leader"))
        self._campaigns.submit(lambda: self._store.txn(mine, [drop]), _only_logged)
        self.tick()

    def expel(self, lease: int) -> None:
        """Revokes a dead host's lease, so all hosts see the loss at once.

        Does not block; an error is only logged. A `lease` of 0 is ignored.
        """
        if lease:
            self._loop.aside(lambda: self._store.revoke(lease), _only_logged)

    # ------------------------------------------------ what the leader's lane does

    def _fence(self, view: View) -> Compare:
        key = self.key("m/leader")
        return Compare(key=key, target="create", value=view.leader_revision)

    def fenced(self, view: View, changes: list[Put | Delete]) -> bool:
        """Applies a leader's changes if this leader still leads; blocks.

        The leader still leads if the leader key is that of `view`, and the store has
        lost no data since `view` was read.

        Returns:
            Whether the changes were applied; False also if `view` has no leader.
        """
        if not view.leader_revision:
            return False  # an absent key has revision 0 and would match
        return self._store.txn([self._fence(view), self._in_era(view)], list(changes))

    def commits(self) -> tuple[Commit, ...]:
        """Reads the recorded commits, newest first; blocks."""
        return read_commits(self._store, self._job)

    def commit_change(self, commits: tuple[Commit, ...]) -> Put:
        """Makes the put that records these commits in place of the recorded ones."""
        text = "\n".join(commit.to_json() for commit in commits)
        return Put(key=self.key("c/commits"), value=text.encode())

    def close(self) -> None:
        """Revokes this host's lease and stops watching; blocks for one call."""
        self._stopped = True
        self._end_mirror()
        self._lane.close()
        self._campaigns.close()
        lease, self._lease = self._lease, 0
        if lease:
            try:
                self._store.revoke(lease)
            except StoreUnavailable:
                pass  # the lease expires


def _only_logged(outcome: "Future") -> None:
    error = outcome.exception()
    if error is not None:
        if not isinstance(error, StoreUnavailable):
            raise error
        logger.warning("%s", error)
