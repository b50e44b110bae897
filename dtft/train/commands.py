"""What the commands do: from parsed arguments to a running job and an exit code.

Turns an experiment into an agent's or a cluster's settings. Wrong input ends in one
clear line and exit code 2 before anything is started or written.
"""

import hashlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from argparse import Namespace
from pathlib import Path

from dtft.elastic.journal import storage_steps
from dtft.train import config as configs
from dtft.train import host_flags
from dtft.train.experiment import Experiment, check
from dtft.train.single import with_run_dir


class UserError(ValueError):
    """Wrong input: one line for the user, exit code 2."""


def run(options: Namespace, overrides: list[str]) -> int:
    """Runs one command."""
    try:
        return _COMMANDS[options.command](options, overrides)
    except (ValueError, FileExistsError, FileNotFoundError, PermissionError) as error:
        print(f"dtft: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("dtft: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _experiment(options: Namespace, overrides: list[str]) -> Experiment:
    if getattr(options, "hosts", None) is not None:
        overrides += ["--cluster.hosts", str(options.hosts)]
    if getattr(options, "run_dir", None):
        overrides += ["--log.run_dir", options.run_dir]
    if getattr(options, "min_replicas", None) is not None:
        overrides += ["--cluster.min_replicas", str(options.min_replicas)]
    return configs.load(options.config, overrides, f"dtft {options.command}")


def _config(options: Namespace, overrides: list[str]) -> int:
    print(configs.to_json(_experiment(options, overrides)))
    return 0


def _train(options: Namespace, overrides: list[str]) -> int:
    from dtft.train.single import train

    _experiment(options, overrides)
    return train(options.config, overrides)


# ----------------------------------------------------------------- many hosts


def prepare_run(experiment: Experiment) -> tuple[Path, list[str]]:
    """The run directory, checked against what it already holds, and its override.

    Raises:
        ValueError: it holds checkpoints of another config; nothing is touched.
    """
    directory = Path(with_run_dir(experiment).log.run_dir).resolve()
    saved = directory / "config.json"
    if saved.exists() and storage_steps(directory / "checkpoints"):
        resolved = saved.read_text()
        configs.refuse_other(resolved, configs.to_json(experiment), directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory, ["--log.run_dir", str(directory)]


def _launch(options: Namespace, overrides: list[str]) -> int:
    from dtft.elastic.launch import LocalCluster, supervise

    given = list(overrides)
    experiment = _experiment(options, overrides)
    check(experiment)
    flags = host_flags.handed_on(options)
    directory, extra = prepare_run(experiment)
    least = experiment.cluster.min_replicas
    resume = shlex.join(
        ["dtft", "launch", options.config, *given, "--spares", str(options.spares)]
        + ["--hosts", str(experiment.cluster.hosts), "--run-dir", str(directory)]
        + (["--min-replicas", str(least)] if least else [])
        + [*flags, *["--tls"] * options.tls]
    )
    flags += host_flags.own_certificate(options, directory)
    arguments = [options.config, *overrides, *extra, *flags]
    settings = cluster_options(experiment, arguments, options.spares, directory)
    settings.environment["DTFT_RESUME_COMMAND"] = resume
    code = supervise(LocalCluster(settings), experiment.timeouts.stop)
    if code:
        print(f"dtft: resume with: {resume}", flush=True)
    return code


def cluster_options(
    experiment: Experiment, arguments: list[str], spares: int, directory: Path
):
    """The local cluster for an experiment."""
    from dtft.elastic.launch import ClusterOptions, job_name

    return ClusterOptions(
        agent_arguments=tuple(arguments),
        job=job_name(experiment.name),
        hosts=experiment.cluster.hosts,
        spares=spares,
        run_directory=directory,
        arena_directory=Path(experiment.checkpoint.arena_directory),
    )


def _agent(options: Namespace, overrides: list[str]) -> int:
    if options.serve_only:
        from dtft.train.serve_command import serve

        return serve(options, overrides, _secret(options))
    from dtft.elastic.agent import Agent
    from dtft.elastic.etcd import EtcdStore, version_warning
    from dtft.elastic.store import StoreUnavailable

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    agent_config = _agent_config(options, overrides)
    store = EtcdStore(options.store)
    try:
        warning = version_warning(store.status())
        if warning:
            logging.getLogger(__name__).warning("%s", warning)
        agent = Agent(agent_config, store)
        signal.signal(signal.SIGTERM, lambda *_: agent.leave())
        signal.signal(signal.SIGINT, lambda *_: agent.leave())
        outcome = agent.run()
    except StoreUnavailable as error:
        raise UserError(f"--store {options.store}: {error}") from error
    finally:
        store.close()
    return _exit_code(outcome, agent_config.host)


def _exit_code(outcome: str, host: str) -> int:
    if not outcome:
        return 0
    result = json.loads(outcome)
    if result["status"] == "error":
        print(f"dtft: error: {result['message']} ({host})", file=sys.stderr, flush=True)
        return int(result["code"])
    return 0


def _agent_config(options: Namespace, overrides: list[str]):
    from dtft.elastic.config import AgentConfig
    from dtft.elastic.sizing import SizeLimits

    experiment = _experiment(options, overrides)
    check(experiment)
    check_address(options.store)
    secret = _secret(options)
    host = options.host_name or f"{socket.gethostname()}-{os.getpid()}"
    flags = host_flags.settings(options, host)
    directory, extra = prepare_run(experiment)
    arguments = [options.config, *overrides, *extra]
    checkpoint = experiment.checkpoint
    return AgentConfig(
        job=options.job,
        host=host,
        store=options.store,
        secret=secret,
        num_slots=experiment.cluster.hosts,
        sizes=SizeLimits(
            min_replicas=experiment.cluster.min_replicas,
            global_batch=experiment.data.global_batch,
            batch_axes=("replica", "fsdp"),
        ),
        trainer_command=(sys.executable, "-m", "dtft.train.worker", *arguments),
        trainer_environment={
            "DTFT_COMPILATION_CACHE": os.environ.get(
                "DTFT_COMPILATION_CACHE", str(directory / "xla-cache")
            )
        },
        run_directory=directory,
        config_digest=_digest(experiment),
        arena_directory=Path(checkpoint.arena_directory),
        bind=options.bind,
        copies=checkpoint.copies,
        share=checkpoint.share,
        cadence=checkpoint.cadence,
        automatic=checkpoint.automatic,
        storage_interval=checkpoint.storage_interval,
        storage_keep=checkpoint.storage_keep,
        chunk_bytes=checkpoint.chunk_bytes,
        timeouts=experiment.timeouts,
        **flags,
    )


def check_address(store: str) -> None:
    """Raises UserError unless --store is HOST:PORT."""
    if ":" not in store:
        raise UserError(f"--store {store!r} is not HOST:PORT, e.g. etcd-0:2379")


def _digest(experiment: Experiment) -> str:
    """Digest of everything that hosts must agree on: all but where files lie."""
    resolved = json.loads(configs.to_json(experiment))
    text = json.dumps({**resolved, "log": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _secret(options: Namespace) -> bytes:
    name = options.secret_file or os.environ.get("DTFT_SECRET_FILE", "")
    if not name:
        raise UserError(
            "no job secret: give --secret-file FILE or set DTFT_SECRET_FILE; any file "
            "of 16 bytes or more will do, the same on every host."
        )
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise UserError(f"--secret-file {name}: {error.strerror}") from error
    if len(secret) < 16:
        raise UserError(
            f"--secret-file {name} holds {len(secret)} bytes; at least 16 are needed."
        )
    return secret


def _for_clusters(
    options: Namespace, overrides: list[str]
) -> tuple[Experiment, list[str]]:
    """The experiment, and the overrides for clusters with run directories of their own.

    SIGTERM unwinds like an error, so that clusters are closed and their memory freed.
    """
    given = list(overrides)
    experiment = _experiment(options, overrides)
    check(experiment)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cluster = experiment.cluster
    sizes = ["--cluster.hosts", str(cluster.hosts)]
    sizes += ["--cluster.min_replicas", str(cluster.min_replicas)]
    return experiment, [*given, *sizes]


def _drill(options: Namespace, overrides: list[str]) -> int:
    from dtft.train.drill import drill

    experiment, arguments = _for_clusters(options, overrides)
    arguments += host_flags.handed_on(options)
    return drill(experiment, options, arguments)


def _bench(options: Namespace, overrides: list[str]) -> int:
    from dtft.train.bench import bench

    if options.config == "transport":
        return _bench_transport(options, overrides)
    experiment, arguments = _for_clusters(options, overrides)
    return bench(experiment, options, arguments)


def _bench_transport(options: Namespace, overrides: list[str]) -> int:
    import tyro

    from dtft.checkpoint.transport_bench import TransportBench, bench_transport

    for name in ("hosts", "run_dir"):
        if (value := getattr(options, name)) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} {value}: `dtft bench transport` has one "
                "peer process and no run. Leave it out."
            )
    arguments = [*overrides, "--rounds", str(options.rounds)]
    config = tyro.cli(TransportBench, args=arguments, prog="dtft bench transport")
    figures = bench_transport(config)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _scale(options: Namespace, overrides: list[str]) -> int:
    from dtft.train import scale_command

    _refuse_unknown("scale", overrides)
    return scale_command.run(options, _secret(options))


def _refuse_unknown(command: str, overrides: list[str]) -> None:
    if overrides:
        raise UserError(
            f"unknown arguments: {' '.join(overrides)}. See `dtft {command} --help`."
        )


def _checkpoint(options: Namespace, overrides: list[str]) -> int:
    from dtft.train import checkpoint_commands

    _refuse_unknown(f"checkpoint {options.action}", overrides)
    if options.action == "odds":
        from dtft.checkpoint.odds import odds_table

        print(odds_table(options.hosts, options.copies))
        return 0
    return checkpoint_commands.run(options, lambda: _secret(options))


_COMMANDS = {
    "checkpoint": _checkpoint,
    "scale": _scale,
    "train": _train,
    "config": _config,
    "launch": _launch,
    "agent": _agent,
    "drill": _drill,
    "bench": _bench,
}
