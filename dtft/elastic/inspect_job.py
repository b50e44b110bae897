"""Inspects a live job from outside: the store's records and every host's copies.

An observer does not join the job and writes nothing to the store, but must know the
job's secret. In a verification every host reads its copies; a copy found corrupt is no
longer sent to other hosts.
"""

import hmac
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.replication import (
    Commit,
    CommitHealth,
    commit_health,
    worth_showing,
)
from dtft.checkpoint.state import Layout
from dtft.checkpoint.transport import Credentials, Tls, connect
from dtft.elastic.admission import SERVED, JobMismatch, proof_of
from dtft.elastic.anti_affinity import Surroundings
from dtft.elastic.assignment import HostRecord
from dtft.elastic.store import Store, View, job_key, read_commits, read_view

CONNECT_S = 5.0
LOOK_S = 30.0
VERIFY_S = 600.0
"""Default of `Verification.timeout_s`, the limit for a host to read all its copies."""
SILENCE_S = 30.0
"""Seconds without a progress message after which a host's verification has failed."""
MOST_VERIFIERS = 1024
"""Largest number of hosts that verify at the same time."""
EXPORT_S = 900.0
"""Limit in seconds of `Observer.export`, including requests to later leaders."""
TRIES = 20
LEADER_S = 20.0
"""Seconds for which a request to export is repeated while no leader takes it. A live
job elects a leader within this time."""
LEADER_PAUSE_S = 0.2
VERIFY_TRIES = 8
"""Largest number of repetitions of a verification. Training continues meanwhile, so
hosts may drop a step before all of them have read it; then all hosts verify again."""
VERIFY_AGAIN_S = 20.0
"""Seconds from the start of the first verification after which no further verification
begins."""


class NotThere(RuntimeError):
    """The job has no leader at the moment, or the leader does not answer."""


def _ignore(host: str, read: int, total: int) -> None:
    """Ignores the progress of a verification: host, bytes read, bytes of all copies."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Settings of a verification: hosts read their copies and compare digests."""

    rate: int = 0
    """Bytes per second that each host may read; 0 for no limit."""
    timeout_s: float = VERIFY_S
    """Limit in seconds for a host to read all its copies; with a `rate`, the time that
    the host needs at this rate is added."""
    progress: Callable[[str, int, int], None] = _ignore
    """Called from several threads with a host, the bytes that it has read and the bytes
    of all its copies."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """One host's answer to an `Observer`."""

    record: HostRecord
    slot: int = -1
    """The host's slot; -1 for a spare."""
    arena_bytes: int = 0
    held: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    """Maps each step, then the key of each slice, to the digest of the host's copy. Has
    only copies that the host keeps for the newest assignment of slots."""
    corrupt: tuple[str, ...] = ()
    """Each corrupt copy as "step STEP: SLICE KEY"; these are not in `held`."""
    unread: tuple[int, ...] = ()
    """Steps of which the host dropped or replaced a copy before the verification ended.
    The host may not have read this copy."""
    copies_read: int = 0
    """Number of copies that were read and compared with their digests."""
    bytes_read: int = 0
    """Bytes that the host read from memory. A chunk that belongs to copies of several
    steps counts once."""
    seconds: float = 0.0
    """Seconds that reading the copies took."""
    layout: str = ""
    storage_directory: str = ""
    error: str = ""
    """Why the host did not answer; "" if the host answered."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job at one moment."""

    job: str
    store: str
    view: View
    hosts: tuple[HostState, ...]
    commits: tuple[CommitHealth, ...]
    """The commits to display, newest first: all healthy commits; if there are none, all
    degraded commits; if there are none of these either, the newest commit. Every slice
    of a healthy commit has copies in as many failure domains as when the commit was
    made. A degraded commit has fewer, but can be restored from memory."""
    copies: tuple[int, int, str] = (0, 0, "")
    """Requested copies of every slice, how many are in separate failure domains, and
    why the numbers differ ("" if not); (0, 0, "") if unknown."""

    @property
    def telling(self) -> bool:
        """Whether this state is conclusive, so that the observer need not look again.

        Hosts drop the copies of old steps while they are queried, so a commit can seem
        to have too few copies. The state is conclusive in these cases:

        * There is no commit, a copy is corrupt, or a host did not answer.
        * Some commit is healthy (each of its slices has copies in as many failure
          domains as at the commit), and no host dropped a copy of its step before the
          copy was read.
        """
        if not self.commits or any(host.corrupt or host.error for host in self.hosts):
            return True
        unread = {step for host in self.hosts for step in host.unread}
        healthy = {it.step for it in self.commits if it.state == "healthy"}
        return bool(healthy - unread)

    @property
    def storage_directory(self) -> str:
        """Storage directory of the job, as its hosts name it; "" if none answered."""
        told = [host.storage_directory for host in self.hosts]
        return next((directory for directory in told if directory), "")


class Observer:
    """Queries a job from outside, with the job's secret."""

    def __init__(self, store: Store, address: str, job: str, secret: bytes) -> None:
        """Checks that the job exists and has this secret.

        Args:
            store: the store.
            address: the store's address, for messages.
            job: name of the job.
            secret: the job's secret.

        Raises:
            StoreUnavailable: the store does not answer.
            ValueError: the job does not exist; the message lists the store's jobs.
            JobMismatch: the job has another secret.
        """
        self._store, self._address, self.job = store, address, job
        found = store.get(job_key(job, "m/fingerprint"))
        if found is None:
            raise ValueError(
                f"--job {job!r}: the store at {address} has no such job. It has: "
                f"{', '.join(_jobs(store)) or 'none'}."
            )
        known = json.loads(found.value)
        if not hmac.compare_digest(known["secret"], proof_of(secret, job)):
            raise JobMismatch(
                f"the secret of --secret-file is not that of job {job!r} at {address}: "
                "copy the job's secret file (job.secret in the run directory of "
                "`dtft launch`)."
            )
        self.is_served = known.get("config", "").startswith(SERVED)
        """Whether the user starts the job's processes (--serve-only)."""
        tls = Tls() if known.get("tls") else None
        self._credentials = Credentials(job=job, secret=secret, tls=tls)

    def look(self, verify: Verification | None = None) -> JobState:
        """Asks all hosts for their copies; returns the job's state.

        With `verify`, each host first reads its copies and compares their digests.
        Asks again, a limited number of times, while the state is inconclusive
        (`JobState.telling`): hosts drop the copies of old steps meanwhile, and a commit
        can then seem to have too few copies.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        begun = time.monotonic()
        state = self._look_once(verify)
        for _ in range(VERIFY_TRIES if verify else TRIES):
            if state.telling:
                break
            if verify and time.monotonic() - begun > VERIFY_AGAIN_S:
                break
            time.sleep(0.02)
            state = self._look_once(verify)
        return state

    def _look_once(self, verify: Verification | None) -> JobState:
        view, _ = read_view(self._store, self.job)
        commits = {commit.step: commit for commit in self._commits()}
        records = [view.hosts[name] for name in sorted(view.hosts)]
        most = MOST_VERIFIERS if verify else 32
        with ThreadPoolExecutor(max_workers=max(1, min(most, len(records)))) as pool:
            hosts = tuple(pool.map(lambda record: self._ask(record, verify), records))
        commits |= {commit.step: commit for commit in self._commits()}
        texts = {host.layout for host in hosts if host.layout}
        known = {layout.digest: layout for layout in map(Layout.from_json, texts)}
        holdings = {host.record.host: host.held for host in hosts}
        seen = Surroundings.of(view)
        layouts = {it.step: known.get(it.layout) for it in commits.values()}
        found = [
            commit_health(
                commit,
                layouts[step],
                holdings,
                placed=seen.placed_on(layouts[step]),
                domains=seen.names,
            )
            for step, commit in commits.items()
        ]
        return JobState(
            job=self.job,
            store=self._address,
            view=view,
            hosts=hosts,
            commits=tuple(worth_showing(found)),
            copies=seen.copies(layouts[max(layouts)] if layouts else None),
        )

    def _commits(self) -> tuple[Commit, ...]:
        return read_commits(self._store, self.job)

    def _ask(self, record: HostRecord, verify: Verification | None) -> HostState:
        try:
            if verify is None:
                reply = self._call(record, "inspect", {"verify": False}, LOOK_S)
            else:
                reply = self._verified(record, verify)
        except (OSError, TimeoutError) as error:
            return HostState(record=record, error=str(error))
        return HostState(
            record=record,
            slot=reply["slot"],
            arena_bytes=reply["arena_bytes"],
            held=reply.get("held", {}),
            corrupt=tuple(reply.get("corrupt", ())),
            unread=tuple(reply.get("unread", ())),
            copies_read=reply.get("copies", 0),
            bytes_read=reply.get("nbytes", 0),
            seconds=reply.get("seconds", 0.0),
            layout=reply["layout"],
            storage_directory=reply["storage_directory"],
        )

    def _verified(self, record: HostRecord, verify: Verification) -> dict[str, Any]:
        """Makes a host read all its copies; returns its reply, a dict.

        The reply has the host's slot and layout, the digests of its copies, and which
        copies are corrupt; a `HostState` is made from it.

        Raises:
            TimeoutError: the host sent no progress for 30 s (`SILENCE_S`), or took
                longer than `verify` allows.
            OSError: the connection failed.
        """
        request, allowed_s = {"verify": True, "rate": verify.rate}, verify.timeout_s
        begun = time.monotonic()
        with connect(
            record.address, self._credentials, {"op": "inspect"}, CONNECT_S
        ) as channel:
            channel.send(request, timeout_s=CONNECT_S)
            while True:
                left_s = begun + allowed_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"not all copies were read in {allowed_s:.0f} s; raise --rate "
                        "or --timeout"
                    )
                try:
                    reply, _ = channel.receive(timeout_s=min(SILENCE_S, left_s))
                except TimeoutError as error:
                    if left_s <= SILENCE_S:
                        continue  # the time is over; the loop raises
                    raise TimeoutError(
                        f"{record.address} told no progress for {SILENCE_S:.0f} s"
                    ) from error
                if "progress" not in reply:
                    channel.send({"done": True}, timeout_s=CONNECT_S)
                    return reply
                read, total = reply["progress"]
                if verify.rate:
                    allowed_s = verify.timeout_s + total / verify.rate
                verify.progress(record.host, read, total)

    def _call(
        self, record: HostRecord, op: str, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        hello = {"op": op}
        with connect(record.address, self._credentials, hello, CONNECT_S) as channel:
            channel.send(request, timeout_s=CONNECT_S)
            reply, _ = channel.receive(timeout_s=limit_s)
            channel.send({"done": True}, timeout_s=CONNECT_S)
        return reply

    def export(self) -> int:
        """Makes the leader export a commit to storage; returns the step.

        In a job whose processes the user starts, the newest commit is exported; in
        other jobs the next commit. Whenever the leader changes meanwhile, the request
        is sent to the new leader.

        Raises:
            RuntimeError: the export was refused or failed, it was not over in 900 s
                (`EXPORT_S`), or a leader was gone and there was no new one for 20 s
                (`LEADER_S`); the message has the reason.
            StoreUnavailable: the store does not answer.
        """
        begun = time.monotonic()
        end, elected_by, last_term = begun + EXPORT_S, begun + LEADER_S, -1
        while True:
            term, reply = last_term, {}
            try:
                term, leader = self._leader()
                left_s = max(end - time.monotonic(), LEADER_PAUSE_S)
                reply = self._ask_host(leader, "export", {}, left_s)
                problem = f"leader {leader.host}: {reply.get('error')}"
                again = reply.get("moved")
            except NotThere as error:
                problem = str(error)
                again = not isinstance(error.__cause__, TimeoutError)
            if "step" in reply:
                return reply["step"]
            now = time.monotonic()
            if term != last_term:  # from now on, the job may elect another leader
                last_term, elected_by = term, now + LEADER_S
            if not again or now > min(elected_by, end):
                raise RuntimeError(problem)
            time.sleep(LEADER_PAUSE_S)

    def ask_leader(
        self, op: str, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        """Sends a request to the job's leader; returns the reply.

        Adds the name of the leader's host to the reply, as `leader`.

        Args:
            op: kind of the request, such as "scale".
            request: fields of the request.
            limit_s: deadline of the reply in seconds.

        Raises:
            NotThere: the job has no leader, or the leader does not answer.
            StoreUnavailable: the store does not answer.
        """
        _, leader = self._leader()
        reply = self._ask_host(leader, op, request, limit_s)
        return {**reply, "leader": leader.host}

    def _leader(self) -> tuple[int, HostRecord]:
        """Returns the number of the leader's term, and the record of the leader's host.

        Raises:
            NotThere: the job has no leader.
            StoreUnavailable: the store does not answer.
        """
        view, _ = read_view(self._store, self.job)
        leader = view.hosts.get(view.leader or "")
        if leader is None:
            raise NotThere(f"job {self.job!r} has no leader at the moment.")
        return view.term, leader

    def _ask_host(
        self, leader: HostRecord, op: str, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        """Sends a request to the host that leads; returns the reply.

        Args:
            leader: record of the host that leads.
            op: kind of the request, such as "export".
            request: fields of the request.
            limit_s: deadline of the reply in seconds.

        Raises:
            NotThere: the host does not answer.
        """
        try:
            return self._call(leader, op, request, limit_s)
        except (OSError, TimeoutError) as error:
            raise NotThere(f"leader {leader.host}: {error}") from error

    def result(self) -> str | None:
        """Returns "done", "stopped" or "error" once the job has ended; None before."""
        view, _ = read_view(self._store, self.job)
        return json.loads(view.result)["status"] if view.result else None


def _jobs(store: Store) -> list[str]:
    pairs, _ = store.list("")
    return sorted({pair.key.partition("/")[0] for pair in pairs})
