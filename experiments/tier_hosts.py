"""The hosts' memories of both tiers: started, lost. Runs in the launcher.

For dtft a host's memory is an agent with its arena; for Orbax it is a directory on the
same memory file system. Losing a host takes its memory and puts an empty host in its
place. Must not know what is measured.
"""

import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from dtft.elastic.processes import die_with_parent
from dtft.elastic.store import Store
from experiments.tier_agent import AgentTask, socket_of
from experiments.tier_leader import Leader
from experiments.tier_memory import await_mapped
from experiments.worlds import ROOT

CONNECT_S = 60.0


class Hosts(Protocol):
    """The memories of all hosts of one side."""

    def begin(self) -> None:
        """New trainers are about to come."""
        ...

    @property
    def error(self) -> str:
        """What the tier itself says went wrong, if anything."""
        ...

    def pids(self) -> list[int | None]:
        """Per host the process that keeps its memory, if one does."""
        ...

    def lose(self, number: int) -> None:
        """Takes a host's memory away."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of the largest host's arena or files."""
        ...

    @property
    def pushed_bytes(self) -> int:
        """Bytes that every save sends between hosts."""
        ...

    def restored(self, number: int) -> dict[str, Any]:
        """What is known of the lost host's restore: at least `bytes_moved`."""
        ...

    def close(self) -> None:
        """Ends everything and frees the memory."""
        ...


class OurHosts:
    """An agent per host, and the leader in this process."""

    def __init__(
        self, directory: Path, num_hosts: int, copies: int, store: Store
    ) -> None:
        """Starts the agents; they die with the thread that made this."""
        self._directory, self._copies = directory, copies
        self._secret = secrets.token_hex(32)
        self._leader = Leader(directory, num_hosts, copies, store)
        self._tasks = [self._task(f"h{n}", n) for n in range(num_hosts)]
        self._agents: list[subprocess.Popen[str]] = []
        try:
            self._agents = [self._start(task) for task in self._tasks]
            self._wait()
        except BaseException:
            self.close()
            raise

    def _task(self, host: str, slot: int) -> AgentTask:
        return AgentTask(
            host=host,
            slot=slot,
            directory=str(self._directory),
            copies=self._copies,
            secret=self._secret,
        )

    def _start(self, task: AgentTask) -> subprocess.Popen[str]:
        agent = subprocess.Popen(
            [sys.executable, "-m", "experiments.tier_agent"],
            stdin=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=die_with_parent,
        )
        assert agent.stdin is not None
        agent.stdin.write(task.to_json() + "\n")
        agent.stdin.flush()
        return agent

    def _wait(self) -> None:
        self._leader.wait_for([task.host for task in self._tasks], CONNECT_S)

    def begin(self) -> None:
        """See `Hosts.begin`."""
        self._leader.begin_formation()

    @property
    def error(self) -> str:
        """See `Hosts.error`."""
        return self._leader.error

    def pids(self) -> list[int | None]:
        """See `Hosts.pids`."""
        return [agent.pid for agent in self._agents]

    def lose(self, number: int) -> None:
        """Kills an agent, frees its arena, starts an empty one in its place."""
        _end(self._agents[number])
        shutil.rmtree(self._tasks[number].memory)
        socket_of(self._directory, number).unlink()
        self._tasks[number] = spare = self._task(f"h{number}-spare", number)
        self._agents[number] = self._start(spare)
        self._wait()
        for agent, task in zip(self._agents, self._tasks, strict=True):
            await_mapped(agent.pid, lambda task=task: _size_of(task.memory))

    def memory_bytes(self) -> int:
        """See `Hosts.memory_bytes`."""
        return max(_size_of(task.memory) for task in self._tasks)

    def restored(self, number: int) -> dict[str, Any]:
        """See `Hosts.restored`.

        Raises:
            RuntimeError: the leader says what went wrong.
        """
        host = self._tasks[number].host
        outcome = self._leader.outcomes.get(host)
        decision = self._leader.decision
        if self._leader.error or outcome is None or decision is None:
            raise RuntimeError(self._leader.error or f"{host} did not restore")
        plan = decision.plan
        flows = [it.nbytes for it in plan.transfers_to(host)] if plan else []
        return {
            "transfer_s": outcome["s"],
            "bytes_moved": outcome["peers"],
            "flows": flows,
        }

    @property
    def pushed_bytes(self) -> int:
        """Bytes that every save sends between hosts."""
        return self._leader.pushed_bytes

    def close(self) -> None:
        """See `Hosts.close`."""
        self._leader.close()
        for agent in self._agents:
            _end(agent)
        shutil.rmtree(self._directory)


class OrbaxHosts:
    """A directory per host."""

    def __init__(self, directory: Path, num_hosts: int) -> None:
        """Makes nothing: the trainers do."""
        self._directory, self._num_hosts = directory, num_hosts
        self._lost_bytes = 0

    def begin(self) -> None:
        """See `Hosts.begin`."""

    @property
    def error(self) -> str:
        """See `Hosts.error`: the trainers raise."""
        return ""

    def pids(self) -> list[int | None]:
        """See `Hosts.pids`: trainers keep the files themselves."""
        return [None] * self._num_hosts

    def lose(self, number: int) -> None:
        """Removes a host's directory."""
        lost = self._directory / f"host{number}"
        steps = [path for path in lost.iterdir() if path.name.isdigit()]
        newest = max(steps, key=lambda path: int(path.name))
        self._lost_bytes = _size_of(newest)
        shutil.rmtree(lost)

    def memory_bytes(self) -> int:
        """See `Hosts.memory_bytes`."""
        return max(_size_of(path) for path in self._directory.glob("host*"))

    def restored(self, number: int) -> dict[str, Any]:
        """See `Hosts.restored`: the files of the step that the host had."""
        del number
        return {"bytes_moved": self._lost_bytes}

    @property
    def pushed_bytes(self) -> int:
        """Orbax relies on data-parallel copies and sends nothing."""
        return 0

    def close(self) -> None:
        """See `Hosts.close`."""
        shutil.rmtree(self._directory)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _size_of(directory: Path) -> int:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)
