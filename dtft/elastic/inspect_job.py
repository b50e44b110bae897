"""Looks at a live job from outside: the store's records and every host's holdings.

Joins nothing and writes nothing; whoever looks must know the job's secret. A
verification has every host read its copies; the host gives a corrupt one to nobody any
more.
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
"""How long a host may take to read all its copies, beside what its rate needs."""
SILENCE_S = 30.0
"""A host that verifies and tells no progress for so long does not answer."""
MOST_VERIFIERS = 1024
"""So many hosts verify at the same time; they wait for their own memory only."""
EXPORT_S = 900.0
TRIES = 20
LEADER_S = 20.0
"""A job without a leader has one again by then, if it lives."""
LEADER_PAUSE_S = 0.2
VERIFY_TRIES = 8
"""Steps go on while one looks: so often is looked for one that all hosts still have."""
VERIFY_AGAIN_S = 20.0
"""A verification that took longer is not repeated for such a step."""


class NotThere(RuntimeError):
    """Nobody leads the job at the moment, or the leader does not answer."""


def _ignore(host: str, read: int, total: int) -> None:
    """Tells nobody of progress."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How hosts read their copies again."""

    rate: int = 0
    """Bytes a second that each host may read; 0 for no limit."""
    timeout_s: float = VERIFY_S
    """How long a host may take, beside what its rate needs."""
    progress: Callable[[str, int, int], None] = _ignore
    """Called with a host, the bytes it has read and the bytes of its copies; from
    several threads."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """The answer of one host."""

    record: HostRecord
    slot: int = -1
    """The slot whose slices it owns; -1 for none (a spare)."""
    arena_bytes: int = 0
    held: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    """Step to slice key to digest."""
    corrupt: tuple[str, ...] = ()
    """Copies that were read and are wrong; they are not in `held`."""
    unread: tuple[int, ...] = ()
    """Steps that were dropped before they were read."""
    copies_read: int = 0
    """Slices of steps that were read and compared with their digests."""
    bytes_read: int = 0
    """What steps share was read once."""
    seconds: float = 0.0
    """How long the reading took."""
    layout: str = ""
    storage_directory: str = ""
    error: str = ""
    """Why it did not answer."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job at one moment."""

    job: str
    store: str
    view: View
    hosts: tuple[HostState, ...]
    commits: tuple[CommitHealth, ...]
    """Newest first, without those that were dropped for newer ones."""
    copies: tuple[int, int, str] = (0, 0, "")
    """Copies asked for, effective copies, and why they differ; 0 if not known."""

    @property
    def telling(self) -> bool:
        """Whether it does not show hosts between two steps: looking again may help.

        A silent host explains what is missing, and asking it again takes long.
        """
        if not self.commits or any(host.corrupt or host.error for host in self.hosts):
            return True
        unread = {step for host in self.hosts for step in host.unread}
        healthy = {it.step for it in self.commits if it.state == "healthy"}
        return bool(healthy - unread)

    @property
    def storage_directory(self) -> str:
        """Where the job writes checkpoints, as its hosts call it; "" if none told."""
        told = [host.storage_directory for host in self.hosts]
        return next((directory for directory in told if directory), "")


class Observer:
    """Queries a job from outside, with the job's secret."""

    def __init__(self, store: Store, address: str, job: str, secret: bytes) -> None:
        """Checks that there is such a job and that the secret is its own.

        Raises:
            StoreUnavailable: the store does not answer.
            ValueError: there is no such job; names those there are.
            JobMismatch: the secret is another.
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
        """Whether its processes are its user's own."""
        tls = Tls() if known.get("tls") else None
        self._credentials = Credentials(job=job, secret=secret, tls=tls)

    def look(self, verify: Verification | None = None) -> JobState:
        """Asks every host what it holds; with `verify` every copy is read again."""
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
        """What a host answers once it has read all its copies.

        Raises:
            TimeoutError: it told no progress for `SILENCE_S`, or took too long.
            OSError: it cannot be reached, or has gone.
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
                        continue  # its time is over, which is said
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
        """Has the leader write the newest commit to storage; returns its step.

        If another host leads before the answer is here, that one is asked.

        Raises:
            RuntimeError: it could not; says why.
        """
        end = time.monotonic() + LEADER_S
        while True:
            try:
                reply = self.ask_leader("export", {}, EXPORT_S)
                problem = f"leader {reply['leader']}: {reply.get('error')}"
                again = reply.get("moved")
            except NotThere as error:
                reply, problem = {}, str(error)
                again = not isinstance(error.__cause__, TimeoutError)
            if "step" in reply:
                return reply["step"]
            if not again or time.monotonic() > end:
                raise RuntimeError(problem)
            time.sleep(LEADER_PAUSE_S)

    def ask_leader(
        self, op: str, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        """Asks whoever leads the job now; adds `leader` to the answer.

        Raises:
            NotThere: nobody leads, or the leader does not answer.
        """
        view, _ = read_view(self._store, self.job)
        leader = view.hosts.get(view.leader or "")
        if leader is None:
            raise NotThere(f"job {self.job!r} has no leader at the moment.")
        try:
            reply = self._call(leader, op, request, limit_s)
        except (OSError, TimeoutError) as error:
            raise NotThere(f"leader {leader.host}: {error}") from error
        return {**reply, "leader": leader.host}

    def result(self) -> str | None:
        """How the job ended, for people; None while it lives."""
        view, _ = read_view(self._store, self.job)
        return json.loads(view.result)["status"] if view.result else None


def _jobs(store: Store) -> list[str]:
    """Names of the jobs in a store."""
    pairs, _ = store.list("")
    return sorted({pair.key.partition("/")[0] for pair in pairs})
