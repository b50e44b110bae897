"""`dtft agent --serve-only`: keeps copies in a host's memory for the user's processes.

Listens for the user's process. The first process that attaches to any host of the job
decides the settings that all processes of the job must have in common (`Terms`). From
then on the host runs an `Agent`. This module only defines the order of these steps.
"""

import contextlib
import dataclasses
import time
from pathlib import Path

from dtft.checkpoint.managers import AGENT_SOCKET, AGENT_SOCKET_VARIABLE, AgentLink
from dtft.checkpoint.timeouts import Timeouts
from dtft.elastic.admission import (
    SERVED,
    JobMismatch,
    check_domain,
    check_job,
    refuse_taken_name,
)
from dtft.elastic.host.agent import Agent
from dtft.elastic.host.memory_directory import (
    make_host_memory,
    remove_memory_directory,
)
from dtft.elastic.host.trainers import Trainers
from dtft.elastic.job import AgentConfig
from dtft.elastic.seat_policy import Admission, Terms
from dtft.elastic.store import Store, StoreUnavailable, claim, job_key

LOOK_S = 0.5
"""Seconds between two reads of the store, until it has the job's terms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of `dtft agent --serve-only`; every field is a flag.

    The number of copies must be equal on all agents of a job.
    """

    copies: int = 2
    """Number of copies of every slice, each on another host."""
    arena_directory: str = "/dev/shm"
    """Directory of the copies, on a memory file system."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    """Deadlines in seconds."""

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise ValueError(
                f"copies={self.copies} is below 1. Allowed: 1 or more; 2 survives the "
                "loss of any one host. Set --copies."
            )


def base_config(
    serve: ServeConfig, *, job: str, host: str, store: str, secret: bytes
) -> AgentConfig:
    """Returns the settings of an agent that are known before a process has attached.

    The other settings come from the first process that attaches.

    Args:
        serve: the flags of this command.
        job: name of the job.
        host: name of this host.
        store: the store's address.
        secret: the job's secret.
    """
    return AgentConfig(
        job=job,
        host=host,
        store=store,
        secret=secret,
        num_slots=0,
        trainer_command=(),
        run_directory=Path(),
        storage_directory=Path(),
        config_digest=f"{SERVED} --copies {serve.copies}",
        arena_directory=Path(serve.arena_directory),
        copies=serve.copies,
        timeouts=serve.timeouts,
        served=True,
    )


def with_terms(config: AgentConfig, terms: Terms) -> AgentConfig:
    """Returns an agent's settings, completed with those that the user's process gives.

    These terms of the job are the number of its processes, the storage directory, the
    steps from one export to the next, the number of steps that storage keeps, the time
    limit of an export, and the bytes per chunk.
    """
    timeouts = dataclasses.replace(config.timeouts, export=terms.storage_timeout_s)
    return dataclasses.replace(
        config,
        num_slots=terms.processes,
        terms=terms.to_json(),
        storage_directory=Path(terms.directory),
        storage_interval=terms.storage_interval_steps,
        storage_keep=terms.max_to_keep,
        chunk_bytes=terms.chunk_bytes,
        timeouts=timeouts,
    )


class ServingHost:
    """One host that keeps copies for the user's processes.

    Waits until a process has attached to any host of the job, then runs an `Agent`.
    """

    def __init__(
        self, config: AgentConfig, store: Store, processes: int | None
    ) -> None:
        """Checks whether this host may join the job; listens for the user's process.

        Args:
            config: the settings from `base_config`, with the run directory set.
            store: the job's store.
            processes: required number of the job's processes; None for any number.

        Raises:
            StoreUnavailable: the store does not answer.
            JobMismatch: another agent has the host name; or the secret, the TLS
                setting, --copies or the kind of job (launched or served) is another
                than the job's.
            ValueError: the memory directory cannot be made: the arena directory does
                not exist, a live agent or another user has the directory, or the file
                system is full.
        """
        self._config, self._store = config, store
        self._left = False  # set in a signal handler, which must take no lock
        self._agent: Agent | None = None
        self._refuse_live_agent()
        refuse_taken_name(store, config)
        check_job(store, config)
        make_host_memory(config.memory_directory, config.timeouts.start)
        self._key = job_key(config.job, "m/terms")
        admission = Admission(
            job=config.job, host=config.host, processes=processes, agree=self._agree
        )
        self._trainers = Trainers(
            config.memory_directory / AGENT_SOCKET,
            job=config.job,
            host=config.host,
            deadline_s=config.timeouts.start,
            objection=admission.objection,
        )

    def _refuse_live_agent(self) -> None:
        """Raises JobMismatch if an agent with this host's name listens at its socket.

        An agent is not listed in the store while it waits for the first user's process.
        """
        path = self._config.memory_directory / AGENT_SOCKET
        with contextlib.suppress(OSError):
            AgentLink.connect(path, 1.0).close()
            raise JobMismatch(
                f"--host-name {self._config.host} is taken: an agent of job "
                f"{self._config.job!r} listens at {path}. Give another name."
            )

    def _agree(self, terms: Terms) -> Terms:
        found = claim(self._store, self._key, terms.to_json().encode())
        return Terms.from_json(found)

    def run(self) -> str:
        """Serves until the job ends or the host must leave.

        Returns:
            The job's result as JSON; "" if the host left before the end.

        Raises:
            StoreUnavailable: the store does not answer at the agent's start.
            JobMismatch: the host's failure domain does not fit those of other hosts, a
                live host has this host's name, or the secret, the settings or TLS
                differ from the job's.
            ValueError: the host's port cannot be opened.
        """
        config = self._config
        print(
            f"dtft: {config.host} serves job {config.job}; a process on this machine "
            f"uses it by {AGENT_SOCKET_VARIABLE}={self._trainers.path}",
            flush=True,
        )
        try:
            terms = self._await_terms()
            if terms is None:
                return ""
            self._check_domain()
            self._agent = Agent(with_terms(config, terms), self._store, self._trainers)
            if self._left:
                self._agent.leave()
            return self._agent.run()
        finally:
            self._trainers.close()
            remove_memory_directory(config.memory_directory)

    def _check_domain(self) -> None:
        """Checks this host's failure domain label against the labels of other hosts.

        Raises:
            JobMismatch: the label cannot be parsed or contradicts the others: hosts
                name different levels (power, rack), or a rack is in two power domains.
                If a user's process is attached, it is sent the error and detached
                first.
            StoreUnavailable: the labels of the other hosts cannot be read.
        """
        try:
            check_domain(self._store, self._config)
        except JobMismatch as error:
            self._trainers.let_go(str(error), waiting=True)
            raise

    def _await_terms(self) -> Terms | None:
        while not self._left:
            with contextlib.suppress(StoreUnavailable):  # it may come back
                found = self._store.get(self._key)
                if found is not None:
                    return Terms.from_json(found.value)
            time.sleep(LOOK_S)
        return None

    def depart(self) -> None:
        """Makes `run` return soon; safe in a signal handler."""
        self._left = True
        if self._agent is not None:
            self._agent.leave()
