"""Training goes on while members of a shared etcd die and are cut off.

Three members with TLS, client certificates, user and password; agents as an operator
starts them, one per host. Members are killed (SIGKILL) and cut off (SIGSTOP: a member
keeps its connections and answers nobody). What is measured is printed.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from dtft.checkpoint.managers.progress import ProgressBoard
from dtft.checkpoint.storage.directory import compare_steps
from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.drills import leftovers
from dtft.drills.compare import samples_exactly_once
from dtft.elastic.faults.injector import rate
from dtft.elastic.leader.events import read_events
from dtft.elastic.processes import session
from tests.support.etcd_cluster import Member, TlsEtcdCluster, until
from tests.support.harness import REPOSITORY, dtft, memory

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(900)]
STEPS, BATCH, HOSTS = 1500, 960, 3
RUN = (
    *("digits_cnn", "--stop.steps", str(STEPS), "--data.global_batch", str(BATCH)),
    *("--checkpoint.storage_interval", "100"),
    *("--log.sample_ids", "True", "--log.tensorboard", "False"),
)
TTL_S = 5.0
CALL_S = 2.0
"""A write that a stopped member has got is not sent to another one before that."""
ELECTION_S = 3.0
PATIENCE_S = 300.0


@dataclass(kw_only=True)
class Phase:
    """A part of the run, in wall-clock time."""

    name: str
    begin: float
    end: float = 0.0


@dataclass(kw_only=True)
class Job:
    """Agents of one job, as an operator starts them, and how far they are."""

    run: Path
    memory: Path
    flags: list[str]
    name: str = "members"
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self.run.mkdir()
        (self.run / "logs").mkdir()
        for number in range(HOSTS):
            self._start(f"host-{number}")
        self._sampling = threading.Thread(target=self._sample, daemon=True)
        self._sampling.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for agent in self.agents.values():
            for pid in session(agent.pid):
                os.kill(pid, 9)
            agent.wait(10)
        self._sampling.join(10)

    def _start(self, host: str) -> None:
        command = [sys.executable, "-m", "dtft.cli", "agent", *RUN]
        command += ["--cluster.hosts", str(HOSTS), "--log.run_dir", str(self.run)]
        command += ["--checkpoint.arena_directory", str(self.memory), *self.flags]
        command += ["--host-name", host]
        with (self.run / "logs" / f"{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, leftovers.MARK: self.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _sample(self) -> None:
        """Notes every time at which the last finished step was seen to grow."""
        boards: dict[str, ProgressBoard] = {}
        while not self._ended.wait(0.004):
            for host in self.agents:
                path = self.memory / f"dtft-{self.name}-{host}" / "board"
                if host not in boards and path.exists() and path.stat().st_size:
                    boards[host] = ProgressBoard(path)
            step = max((it.get("finished") for it in boards.values()), default=0)
            if step and (not self.samples or step > self.samples[-1][1]):
                self.samples.append((time.time(), step))

    # ------------------------------------------------------------------- looking

    @property
    def step(self) -> int:
        """The last step that any trainer has finished."""
        return self.samples[-1][1] if self.samples else 0

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run)

    def commits(self, begin: float, end: float) -> list[float]:
        """When commits were recorded."""
        times = [it["time"] for it in self.events if it["event"] == "commit"]
        return [at for at in times if begin <= at < end]

    @property
    def leader(self) -> str:
        return self.events[-1]["by"]

    def said(self, begin: float, *words: str) -> bool:
        return any(
            all(word in it["text"] for word in words)
            for it in self.events
            if it["event"] == "message" and it["time"] >= begin
        )

    def log(self) -> str:
        paths = sorted((self.run / "logs").glob("host-?.log"))
        return "\n".join(f"{path.name}\n{path.read_text()[-3000:]}" for path in paths)

    # -------------------------------------------------------------------- phases

    @contextmanager
    def phase(self, name: str, seconds: float) -> Iterator[Phase]:
        """What the body does, and so many seconds in which the job must go on."""
        phase = Phase(name=name, begin=time.time())
        self.phases.append(phase)
        yield phase
        while time.time() < phase.begin + seconds:
            assert all(it.poll() is None for it in self.agents.values()), self.log()
            time.sleep(0.05)
        phase.end = time.time()

    def wait(self) -> None:
        """Until every agent has ended, and well."""
        until(
            lambda: all(it.poll() is not None for it in self.agents.values()),
            PATIENCE_S,
        )
        codes = {host: agent.returncode for host, agent in self.agents.items()}
        assert set(codes.values()) == {0}, (codes, self.log())

    # ----------------------------------------------------------------- measuring

    def figures(self, phase: Phase) -> dict[str, Any]:
        """Speeds and longest waits of a phase."""
        commits = self.commits(phase.begin, phase.end)
        steps = [at for at, _ in self.samples if phase.begin <= at < phase.end]
        speed = rate(self.samples, phase.begin, phase.end, STEPS)
        return {
            "phase": phase.name,
            "seconds": round(phase.end - phase.begin, 1),
            "steps_per_s": round(speed or 0.0, 1),
            "longest_step_s": round(_longest(steps), 3),
            "commits": len(commits),
            "longest_without_commit_s": round(
                _longest([phase.begin, *commits, phase.end]), 3
            ),
        }

    def longest_call(self) -> dict[str, Any]:
        """Of the event loops of all agents; they must have ended."""
        found = {"seconds": 0.0}
        for path in self.run.glob("loop-*.json"):
            said = json.loads(path.read_text())
            for call in said["calls"]:
                if call["seconds"] > found["seconds"]:
                    found = {"host": said["host"], **call}
        return found


def _longest(times: list[float]) -> float:
    gaps = (after - before for before, after in zip(times, times[1:], strict=False))
    return max(gaps, default=0.0)


@pytest.fixture
def undisturbed(control: Callable[[str], list[str]]) -> Path:
    """The same run with a private etcd, and nothing happens to it."""
    run = Path(control("members")[-1])
    if not (run / "summary.json").exists():
        given = (*RUN, "--hosts", str(HOSTS), "--run-dir", str(run), *memory())
        done = dtft("launch", *given, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TlsEtcdCluster]:
    with TlsEtcdCluster(tmp_path / "etcd") as made:
        yield made


@pytest.fixture
def job(
    tmp_path: Path, cluster: TlsEtcdCluster, memory: Path, undisturbed: Path
) -> Iterator[Job]:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    flags = [*cluster.store_flags(), "--job", "members", "--secret-file", str(secret)]
    with Job(run=tmp_path / "run", memory=memory, flags=flags) as made:
        until(lambda: made.step >= 30, PATIENCE_S)
        yield made


def _without(members: list[Member], *gone: Member) -> list[Member]:
    return [member for member in members if member not in gone]


@pytest.mark.parametrize("whom", ["leaders", "followers"])
def test_training_goes_on_without_members_of_the_store(
    cluster: TlsEtcdCluster, job: Job, undisturbed: Path, whom: str
) -> None:
    """`whom`: whether the members that are hit lead their cluster at that moment."""
    with job.phase("before", 5.0):
        pass
    leading = cluster.leader()
    killed = leading if whom == "leaders" else _without(cluster.members, leading)[0]
    with job.phase("one killed", 6.0) as one_killed:
        killed.kill()
    alive = _without(cluster.members, killed)
    # A leader that is cut off finds its leases run out when it comes back.
    leading = cluster.leader()
    (cut,) = [leading] if whom == "leaders" else _without(alive, leading)
    with job.phase("one killed, one cut off", 2.5 * TTL_S) as no_majority:
        cut.stop()
    with job.phase("the cut one is back", 5.0) as back:
        cut.go_on()
    with job.phase("all are back", 2.0):
        killed.revive()
    agent = job.agents[job.leader]
    used = cluster.used_by(agent.pid)
    most_used = max(cluster.members, key=lambda member: used[member.name])
    with job.phase("the one in use cut off", 7.0) as in_use:
        most_used.stop()
    most_used.go_on()
    until(lambda: job.step >= STEPS, PATIENCE_S)
    job.wait()

    figures = [job.figures(phase) for phase in job.phases]
    for line in figures:
        print(json.dumps(line))
    print("longest call of an event loop:", json.dumps(job.longest_call()))
    events = job.events
    assert not [it for it in events if it["event"] == "recovery"], job.log()
    assert sum(it["event"] == "assignment" for it in events) == 1
    for phase in (one_killed, in_use):
        commits = [phase.begin, *job.commits(phase.begin, phase.end), phase.end]
        assert len(commits) > 10, figures
        assert _longest(commits) < CALL_S + ELECTION_S, figures
    assert not job.commits(no_majority.begin + 1.0, no_majority.end), figures
    assert job.said(no_majority.begin, "does not answer; training goes on", "waits")
    assert job.commits(back.begin, back.begin + ELECTION_S + CALL_S), figures
    assert job.said(back.begin, "the store answers again")
    failed = [it for it in events if it["event"] == "export" and not it["ok"]]
    assert not failed, failed
    for phase in (one_killed, no_majority, in_use):
        figure = job.figures(phase)
        # Steps wait at most `records.PATIENCE_S`; the machine may have other work.
        assert figure["steps_per_s"] > 0.5 * figures[0]["steps_per_s"], figures
        assert figure["longest_step_s"] < 2.0, figures

    assert events[-1]["event"] == "end" and events[-1]["status"] == "done"
    assert storage_steps(job.run / "checkpoints")[-1] == STEPS
    checkpoints = [it / "checkpoints" for it in (undisturbed, job.run)]
    assert compare_steps(checkpoints[0], STEPS, checkpoints[1], STEPS) == []
    assert samples_exactly_once(job.run, undisturbed, STEPS, BATCH, events)
    assert not any(session(agent.pid) for agent in job.agents.values())
    assert leftovers.of_job(job.name, job.memory, job.run) == []
