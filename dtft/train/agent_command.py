"""`dtft agent CONFIG`: from its flags to the agent of one host, and its exit code.

Also what it shares with `dtft agent --serve-only` (`serve_command.py`): the log, the
connection to etcd, the signals. Must not know what an agent does: `dtft.elastic` does.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.managers import ProgressBoard
from dtft.elastic.assignment import SizeLimits
from dtft.elastic.host import Agent, ServingHost, check_arena_directory
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader import newest_stored
from dtft.elastic.local_cluster import LAUNCHED
from dtft.elastic.stop_signals import end_line, heard_signals, left_line
from dtft.elastic.store import (
    EtcdStore,
    Store,
    StoreAddress,
    StoreUnavailable,
    version_warning,
)
from dtft.train import config as configs
from dtft.train import host_flags
from dtft.train.experiment import CheckpointConfig, Experiment
from dtft.train.fitting import check, row_parts
from dtft.train.job_options import (
    host_name,
    prepare_run,
    read_secret,
    store_address,
)

if TYPE_CHECKING:
    from dtft.train.commands import Agent as AgentOptions

CACHE = "DTFT_COMPILATION_CACHE"
"""Environment variable: the directory of XLA's compilation cache."""


def run_agent(options: "AgentOptions", words: list[str]) -> int:
    """Runs the agent of one host, and its trainers, until the job ends.

    Args:
        options: CONFIG, job and host.
        words: keys of the config, as they were typed.

    Raises:
        ValueError: wrong input, or etcd cannot be reached.
    """
    log_to_stderr()
    config = _agent_config(options, words)
    committed: list[int] = []

    def leaving() -> None:
        with contextlib.suppress(OSError, ValueError):
            board = ProgressBoard(config.memory_directory / "board")
            committed.append(board.get("committed"))

    outcome = run_at(store_address(options.job), partial(Agent, config), leaving)
    stored = newest_stored(config.storage_directory)
    if not outcome:
        newest = max(committed, default=0)
        _tell(left_line(config.host, config.job, newest, stored))
        return 0
    return _exit_code(json.loads(outcome), config, stored)


def log_to_stderr() -> None:
    """Sets up what an agent's process logs."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def run_at(
    address: StoreAddress,
    make: Callable[[Store], Agent | ServingHost],
    leaving: Callable[[], None] = lambda: None,
) -> str:
    """Runs a host's part in the job of an etcd; a signal makes it leave.

    Args:
        address: of etcd.
        make: the host's part, given the store.
        leaving: called when a signal has come, before the host leaves.

    Returns:
        What its `run` returns.

    Raises:
        ValueError: etcd cannot be reached.
    """
    store = EtcdStore(address)
    try:
        for warning in (address.warning(), version_warning(store.status())):
            if warning:
                logging.getLogger(__name__).warning("%s", warning)
        host = make(store)
        for number in heard_signals():
            signal.signal(number, lambda *_: (leaving(), host.leave()))
        return host.run()
    except StoreUnavailable as error:
        raise ValueError(f"--store {address}: {error}") from error
    finally:
        store.close()


def _exit_code(result: dict[str, Any], config: AgentConfig, stored: int) -> int:
    """The exit code of a job that has ended, and a line that says how."""
    if result["status"] == "error":
        _complain(f"{result['message']} ({config.host})")
        return int(result["code"])
    if LAUNCHED not in os.environ:
        where = str(config.storage_directory)
        _tell(end_line(result["status"], result["step"], stored, where))
    return 0


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"dtft: {line}", flush=True)


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"dtft: error: {line}", file=sys.stderr, flush=True)


def _agent_config(options: "AgentOptions", words: list[str]) -> AgentConfig:
    overrides = [*words, *options.run_flags.keys()]
    experiment = configs.load(options.config, overrides, "dtft agent")
    check(experiment)
    check_arena_directory(Path(experiment.checkpoint.arena_directory))
    address = store_address(options.job)
    secret = read_secret(options.job)
    host = host_name(options.place)
    flags = host_flags.settings(options.host, options.place, host)
    directory, extra = prepare_run(experiment)
    arguments = [options.config, *overrides, *extra]
    return AgentConfig(
        job=options.job.name,
        host=host,
        store=str(address),
        secret=secret,
        num_slots=experiment.cluster.hosts,
        failure_budget=experiment.cluster.failure_budget,
        sizes=_size_limits(experiment),
        trainer_command=(sys.executable, "-m", "dtft.train.worker", *arguments),
        trainer_environment={
            CACHE: os.environ.get(CACHE, str(directory / "xla-cache"))
        },
        run_directory=directory,
        config_digest=_digest(experiment),
        bind=options.place.bind,
        timeouts=experiment.timeouts,
        **_checkpoint_settings(experiment.checkpoint),
        last_step=experiment.stop.steps,
        **flags,
    )


def _size_limits(experiment: Experiment) -> SizeLimits:
    return SizeLimits(
        min_replicas=experiment.cluster.min_replicas,
        global_batch=experiment.data.global_batch,
        batch_axes=("replica", "fsdp"),
        row_parts=row_parts(experiment),
    )


def _checkpoint_settings(checkpoint: CheckpointConfig) -> dict[str, Any]:
    return {
        "arena_directory": Path(checkpoint.arena_directory),
        "copies": checkpoint.copies,
        "share": checkpoint.share,
        "cadence": checkpoint.cadence,
        "automatic": checkpoint.automatic,
        "storage_interval": checkpoint.storage_interval,
        "storage_keep": checkpoint.storage_keep,
        "chunk_bytes": checkpoint.chunk_bytes,
    }


def _digest(experiment: Experiment) -> str:
    """Digest of everything that hosts must agree on: all but where files lie."""
    resolved = json.loads(configs.to_json(experiment))
    text = json.dumps({**resolved, "log": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
