"""A job of the user's own processes and the agents that serve it, played through."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dtft.elastic.processes import free_port
from dtft.elastic.store.embedded import EmbeddedEtcd
from tests.support.harness import REPOSITORY

PATIENCE_S = 100.0


class ServedJob:
    """Private etcd, agents that serve, and the user's processes beside them."""

    def __init__(self, directory: Path, memory: Path, name: str = "served") -> None:
        """Starts etcd."""
        self.directory, self.memory, self.name = directory, memory, name
        (directory / "digests").mkdir(parents=True)
        self.secret = directory / "secret"
        self.secret.write_text("0123456789abcdef0123456789abcdef")
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.etcd = EmbeddedEtcd(directory / "etcd")
        self.etcd.start()
        self.etcd.wait_ready(30.0)

    def __enter__(self) -> "ServedJob":
        return self

    def __exit__(self, *_: object) -> None:
        for index in list(self.processes):
            self.kill_process(index)
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for name in list(self.agents):
            self.end_agent(name)
        self.etcd.stop()

    @property
    def reached_by(self) -> list[str]:
        """The flags with which a command finds the job."""
        secret = ("--secret-file", str(self.secret))
        return ["--store", self.etcd.address, "--job", self.name, *secret]

    def start_agent(self, name: str, *more: str) -> None:
        """One host's agent; returns once it listens."""
        command = [sys.executable, "-m", "dtft.cli", "agent", "--serve-only"]
        command += [*self.reached_by, "--host-name", name]
        command += ["--run-dir", str(self.directory / "run"), *more]
        command += ["--arena_directory", str(self.memory), "--timeouts.start", "90"]
        log = open(self.directory / f"{name}.log", "a")
        self.agents[name] = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=log, stderr=log, text=True
        )
        log.close()
        self.await_true(self.socket(name).exists, f"{name} to listen")

    def socket(self, name: str) -> Path:
        return self.memory / f"dtft-{self.name}-{name}" / "agent.sock"

    def kill_host(self, name: str) -> None:
        """Its agent and its memory are gone."""
        self.agents[name].kill()
        self.end_agent(name)
        for path in sorted(self.socket(name).parent.glob("*")):
            path.unlink()
        self.socket(name).parent.rmdir()

    def end_agent(self, name: str) -> None:
        agent = self.agents.pop(name)
        try:
            agent.wait(timeout=60)
        finally:
            agent.kill()
            agent.wait(timeout=10)

    def start_processes(self, beside: list[str], steps: int, mode: str = "") -> None:
        """All processes of the job, each beside an agent."""
        coordinator = f"127.0.0.1:{free_port()}"
        for index, name in enumerate(beside):
            command = [sys.executable, "-m", "tests.drills.stock_job"]
            command += [str(self.directory), coordinator, str(len(beside))]
            command += [str(index), str(steps), mode]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            environment["DTFT_AGENT_SOCKET"] = str(self.socket(name))
            log = open(self.directory / f"process-{index}.log", "a")
            self.processes[index] = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            log.close()

    def heard(self, index: int) -> dict[str, Any]:
        """The next line that a process prints, waited for."""
        output = self.processes[index].stdout
        assert output is not None
        line = output.readline()  # the test's own limit ends a process that is silent
        assert line, self.log(f"process-{index}")
        return json.loads(line)

    def kill_process(self, index: int) -> None:
        process = self.processes.pop(index)
        process.kill()
        process.communicate(timeout=20)

    def ended(self) -> None:
        """All processes end, and well."""
        for index in list(self.processes):
            process = self.processes.pop(index)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, self.log(f"process-{index}")

    def await_true(self, ready: Any, what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not ready():
            assert time.monotonic() < end, f"{PATIENCE_S:.0f} s waiting for {what}"
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-6000:]

    def digest(self, step: int, index: int) -> str:
        """What a process had after a step."""
        return (self.directory / "digests" / f"{step}.{index}").read_text()
