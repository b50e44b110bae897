"""The commands of jobs: `dtft launch`, `agent` (also `--serve-only`), `scale`, `drain`.

Each command turns its flags into values for `dtft.elastic`, which does the work. Config
and flags are checked before etcd or an agent is started.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from dtft.checkpoint.managers import ProgressBoard
from dtft.checkpoint.tables import size_text
from dtft.config import (
    CheckpointConfig,
    ClusterConfig,
    Experiment,
    load_experiment,
    to_json,
)
from dtft.drills import (
    bind_address,
    cluster_options,
    handed_on,
    host_name,
    own_certificate,
    prepare_run,
    read_secret,
    settings,
    store_address,
)
from dtft.elastic.assignment import SizeLimits
from dtft.elastic.host import (
    Agent,
    ServeConfig,
    ServingHost,
    base_config,
    check_arena_directory,
)
from dtft.elastic.job import TURNS, AgentConfig
from dtft.elastic.leader import newest_stored
from dtft.elastic.local_cluster import LAUNCHED, LocalCluster, supervise, tell
from dtft.elastic.stop_signals import end_line, heard_signals, left_line
from dtft.elastic.store import (
    EtcdStore,
    Store,
    StoreAddress,
    StoreUnavailable,
    version_warning,
)
from dtft.parallel import check_experiment, row_parts
from dtft.train import only_run_in

if TYPE_CHECKING:
    from dtft.cli.commands import (
        AgentCommand,
        DrainCommand,
        JobFlags,
        LaunchCommand,
        ScaleCommand,
        ServeCommand,
    )
    from dtft.elastic.inspect_job import Observer


# ------------------------------------------------------------------- dtft agent CONFIG

CACHE = "DTFT_COMPILATION_CACHE"
"""Name of the environment variable with the directory of XLA's compilation cache. If it
is not set, trainers use `xla-cache` in the run directory."""


def run_agent(options: "AgentCommand", words: list[str]) -> int:
    """Runs the agent of one host, and its trainers, until the job ends.

    Args:
        options: CONFIG, job and host.
        words: words of the command line that set keys of the config.

    Returns:
        The exit code: that of the job's error, if the job ended with an error. 0 if the
        job ended without an error, or if a signal made this host leave the job.

    Raises:
        ValueError: wrong input, the job refuses the host, or etcd cannot be reached.
        SystemExit: CONFIG or a key of it is wrong (see `load_experiment`).
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
    """Sets up logging to stderr for an agent's process."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def run_at(
    address: StoreAddress,
    make: Callable[[Store], Agent | ServingHost],
    leaving: Callable[[], None] = lambda: None,
) -> str:
    """Runs a host of a job until the job ends; on a signal the host leaves the job.

    Args:
        address: address of etcd.
        make: makes the agent or serving host; its argument is the client of etcd.
        leaving: called on a signal, before the host leaves.

    Returns:
        The job's result as JSON; "" if the host left before the job's end.

    Raises:
        ValueError: etcd cannot be reached, or the job refuses the host.
    """
    store = EtcdStore(address)
    try:
        for warning in (address.warning(), version_warning(store.status())):
            if warning:
                logging.getLogger(__name__).warning("%s", warning)
        host = make(store)
        for number in heard_signals():
            signal.signal(number, lambda *_: (leaving(), host.depart()))
        return host.run()
    except StoreUnavailable as error:
        raise ValueError(f"--store {address}: {error}") from error
    finally:
        store.close()


def _exit_code(result: dict[str, Any], config: AgentConfig, stored: int) -> int:
    """Prints the outcome of an ended job; returns the exit code of its agent.

    An error goes to stderr. Under `dtft launch` success is not printed, because the
    launching process prints it.

    Args:
        result: the job's result from etcd: its status, and its last step or the message
            and exit code of its error.
        config: config of this host's agent.
        stored: the newest step in storage; 0 if there is none.

    Returns:
        0, or the code of the job's error.
    """
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


def _agent_config(options: "AgentCommand", words: list[str]) -> AgentConfig:
    overrides = [*words, *options.run_flags.keys()]
    experiment = load_experiment(options.config, overrides, "dtft agent")
    check_experiment(experiment)
    check_arena_directory(Path(experiment.checkpoint.arena_directory))
    address = store_address(options.job)
    secret = read_secret(options.job)
    host = host_name(options.place)
    flags = settings(options.host, options.place, host)
    bind = bind_address(options.place, address)
    directory, extra = prepare_run(experiment)
    arguments = [options.config, *overrides, *extra]
    cluster = experiment.cluster
    return AgentConfig(
        job=options.job.name,
        host=host,
        store=str(address),
        secret=secret,
        num_slots=cluster.hosts,
        failure_budget=cluster.failure_budget,
        sizes=_size_limits(experiment),
        trainer_command=(sys.executable, "-m", "dtft.train.worker", *arguments),
        trainer_environment={
            CACHE: os.environ.get(CACHE, str(directory / "xla-cache"))
        },
        run_directory=directory,
        storage_directory=experiment.checkpoint.storage_path(directory),
        config_digest=_digest(experiment),
        bind=bind,
        timeouts=experiment.timeouts,
        **_checkpoint_settings(experiment.checkpoint),
        last_step=experiment.stop.steps,
        hot_swap=can_swap(cluster),
        cpu_devices=max(0, cluster.devices_per_host) * TURNS * cluster.hot_swap,
        **flags,
    )


def can_swap(cluster: ClusterConfig) -> bool:
    """Whether trainers can keep their processes when another host is lost (hot swap).

    False if the config switches hot swaps off (`hot_swap`). Also False on TPUs, where a
    JAX process can join only one mesh in its life: libtpu is installed, and a host uses
    all its accelerators (`devices_per_host` is -1).
    """
    return cluster.hot_swap and (
        cluster.devices_per_host > 0 or find_spec("libtpu") is None
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
    """Returns the SHA-256 of the config without its section `log`, in hexadecimal.

    The agents of a job must have equal digests.
    """
    resolved = json.loads(to_json(experiment))
    text = json.dumps({**resolved, "log": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------- dtft agent --serve-only

_PROG = "dtft agent --serve-only"
_ONLY = f"`{_PROG}` trains nothing"


def serve(options: "ServeCommand", words: list[str]) -> int:
    """Runs an agent that only serves a host's memory, until a signal or the job's end.

    Args:
        options: job and host.
        words: words of the command line that set fields of `ServeConfig`.

    Returns:
        The exit code 0.

    Raises:
        ValueError: a flag is wrong, the job refuses the host, or etcd cannot be
            reached.
        SystemExit: the value of a word is wrong (2), or help was printed (0).
    """
    log_to_stderr()
    config = _serving_config(options, words)
    (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    address = store_address(options.job)
    run_at(address, lambda store: ServingHost(config, store, options.hosts))
    return 0


def _serving_config(options: "ServeCommand", words: list[str]) -> AgentConfig:
    serving = _serve_config(words)  # first: --help needs no store and no secret
    check_arena_directory(Path(serving.arena_directory))
    address = store_address(options.job)
    secret = read_secret(options.job)
    if options.hosts is not None and options.hosts < 2:
        raise ValueError(
            f"--hosts {options.hosts}: a job of several hosts has 2 or more. A process "
            "of its own needs no agent. Leave --hosts out to take any number."
        )
    directory = options.run_dir or Path("runs") / options.job.name
    host = host_name(options.place)
    flags = settings(options.host, options.place, host)
    return dataclasses.replace(
        base_config(
            serving,
            job=options.job.name,
            host=host,
            store=str(address),
            secret=secret,
        ),
        bind=bind_address(options.place, address),
        run_directory=Path(directory).resolve(),
        **flags,
    )


def _serve_config(words: list[str]) -> ServeConfig:
    config, unknown = tyro.cli(
        ServeConfig, args=words, prog=_PROG, return_unknown_args=True
    )
    for word in unknown:
        name = word.removeprefix("--").replace("-", "_").partition("=")[0]
        if not word.startswith("--"):
            raise ValueError(
                f"CONFIG {word}: {_ONLY}, so it has no CONFIG. Leave it out, or leave "
                "--serve-only out."
            )
        if name in ("share", "checkpoint.share"):
            raise ValueError(
                f"{word}: a process that is restarted takes its state from its own "
                "agent, which therefore keeps all of its slices. Leave it out."
            )
        raise ValueError(
            f"{word}: {_ONLY}. Allowed beside the flags in its --help: --copies, "
            "--arena_directory, --timeouts.NAME. Leave it out."
        )
    return config


# -------------------------------------------------------------- dtft scale, dtft drain


def run(options: "ScaleCommand") -> int:
    """Changes the number of replicas of a live job.

    Returns:
        The exit code: 0 if the job trains with the requested number of replicas, even
        if it had this number before. 1 if the job has ended, or the change failed or
        took too long.

    Raises:
        ValueError: wrong input, etcd cannot be reached or has no such job, the job has
            another secret, or the job cannot have this number of replicas.
    """
    from dtft.elastic.job_changes import scale

    if options.replicas < 1 or options.timeout <= 0:
        raise ValueError(
            f"--replicas {options.replicas}, --timeout {options.timeout:g}: both are "
            "above 0. Give the number of replicas that shall train, and seconds."
        )
    replicas, limit_s = options.replicas, options.timeout
    found = _changed(options.job, lambda observer: scale(observer, replicas, limit_s))
    if found is not None:
        name = options.job.name
        print(json.dumps(found) if options.json else line(name, found))
    return int(found is None)


def drain(options: "DrainCommand") -> int:
    """Takes a host out of a live job.

    Returns:
        The exit code: 0 if the job trains without the host. 1 if no host can take the
        slot, the job has ended, or the change failed or took too long.

    Raises:
        ValueError: wrong input, etcd cannot be reached or has no such job, the job has
            another secret, or no such host.
    """
    from dtft.elastic.job_changes import drain

    if options.timeout <= 0:
        raise ValueError(f"--timeout {options.timeout:g}: give seconds above 0.")
    host, limit_s = options.host, options.timeout
    found = _changed(options.job, lambda observer: drain(observer, host, limit_s))
    if found is not None:
        name = options.job.name
        print(json.dumps(found) if options.json else drained_line(name, found))
    return int(found is None)


def _changed(
    job: "JobFlags", change: Callable[["Observer"], dict[str, Any]]
) -> dict[str, Any] | None:
    """Changes a live job; prints the error and returns None if that fails.

    Args:
        job: the job, its etcd and its secret.
        change: makes the change through an observer of the job, and returns a record
            of the change; raises a RuntimeError if the change failed.

    Returns:
        The record that `change` returned; None if the change failed.

    Raises:
        ValueError: etcd cannot be reached or has no such job, the job has another
            secret, or the change is refused.
    """
    from dtft.drills import read_secret, store_address
    from dtft.elastic.inspect_job import Observer
    from dtft.elastic.store import EtcdStore, StoreUnavailable

    address, secret = store_address(job), read_secret(job)
    store = EtcdStore(address)
    try:
        return change(Observer(store, job.store, job.name, secret))
    except StoreUnavailable as error:
        raise ValueError(f"--store {job.store}: {error}") from error
    except RuntimeError as error:
        print(f"dtft: error: {error}", file=sys.stderr, flush=True)
        return None
    finally:
        store.close()


def drained_line(job: str, found: dict[str, Any]) -> str:
    """Formats the result of draining a host (`job_changes.drain`) as a line of text.

    Args:
        job: name of the job.
        found: `host` is the drained host, `slot` the slot that it had; -1 if it had
            none, as in the example. With a slot: `successor` is the host that has the
            slot now; None if the job has fewer slots now. `step` is the step from which
            the job went on, `seconds` the time that the change took, `bytes_from_peers`
            and `bytes_from_storage` the bytes that were restored.

    >>> drained_line("j", {"host": "a", "slot": -1})
    'a leaves job j; it had no slot'
    """
    if found["slot"] < 0:
        return f"{found['host']} leaves job {job}; it had no slot"
    if (successor := found["successor"]) is not None:
        now = f"{successor} has slot {found['slot']} now"
    else:
        now = f"the job goes on with fewer hosts, without slot {found['slot']}"
    return (
        f"{found['host']} leaves job {job}; {now}: went on from step {found['step']}, "
        f"{size_text(found['bytes_from_peers'])} from peers' memory and "
        f"{size_text(found['bytes_from_storage'])} from storage, "
        f"{found['seconds']:.2f} s after it was asked for"
    )


def line(job: str, found: dict[str, Any]) -> str:
    """Formats the result of scaling a job (`job_changes.scale`) as a line of text.

    Args:
        job: name of the job.
        found: `replicas` and `before` are the numbers of replicas after and before the
            change, `hosts` is the number of hosts with a slot. If the request changed
            the number: `step` is the step from which the job went on, `seconds` the
            time that the change took, `bytes_from_peers` and `bytes_from_storage` the
            bytes that were restored. Without `step` the job had the number already, as
            in the example. Then `asked_again` may be True: the request was repeated
            after a failure, and the first one may have made the change.

    >>> line("j", {"replicas": 3, "before": 3, "hosts": 3})
    'job j trains with 3 replicas (3 hosts) already; nothing was changed'
    """
    size = f"{found['replicas']} replicas ({found['hosts']} hosts)"
    if "step" not in found and found.get("asked_again"):
        return f"job {job} trains with {size}; its leader changed meanwhile"
    if "step" not in found:
        return f"job {job} trains with {size} already; nothing was changed"
    return (
        f"job {job} trains with {size} instead of {found['before']}: went on from step "
        f"{found['step']}, {size_text(found['bytes_from_peers'])} from peers' memory "
        f"and {size_text(found['bytes_from_storage'])} from storage, "
        f"{found['seconds']:.2f} s after it was asked for"
    )


# ------------------------------------------------------------------------- dtft launch


def launch(command: "LaunchCommand", words: list[str]) -> int:
    """Runs a local cluster until its job ends.

    Prints the command to resume the run if the exit code is not 0.

    Args:
        command: CONFIG, and the cluster's settings.
        words: words of the command line that set keys of the config.

    Returns:
        The exit code. 0: the job ended without an error, and storage has its last step.
        If the job ended with an error: the error's code. If the job has no recorded
        end: 2 if all agents ended with code 2. In every other case 1.

    Raises:
        ValueError: wrong input, another run uses the run directory or the storage
            directory, or etcd does not start.
        FileNotFoundError: there is no etcd executable.
        SystemExit: CONFIG or a key of it is wrong (see `load_experiment`).
    """
    overrides = [*words, *command.run_flags.keys()]
    experiment = load_experiment(command.config, overrides, "dtft launch")
    check_experiment(experiment)
    check_arena_directory(Path(experiment.checkpoint.arena_directory))
    flags = handed_on(command.host)
    directory, extra = prepare_run(experiment)
    least = experiment.cluster.min_replicas
    resume = shlex.join(
        ["dtft", "launch", command.config, *words, "--spares", str(command.spares)]
        + ["--hosts", str(experiment.cluster.hosts), "--run-dir", str(directory)]
        + (["--min-replicas", str(least)] if least else [])
        + [*flags, *["--tls"] * command.tls]
    )
    with only_run_in(directory, experiment.checkpoint.storage_path(directory)):
        if command.tls:
            flags += own_certificate(command.host, directory)
        arguments = [command.config, *overrides, *extra, *flags]
        settings = cluster_options(experiment, arguments, command.spares, directory)
        settings.environment["DTFT_RESUME_COMMAND"] = resume
        code = supervise(LocalCluster(settings), experiment.timeouts.stop)
    if code:
        tell(f"resume with: {resume}")
    return code
