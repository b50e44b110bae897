"""What several commands read from their flags: experiment, run directory, secret.

Turns parsed arguments into values, refuses what cannot be, and makes the run directory.
Must not start anything: which command is running is not known here.
"""

import os
import socket
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from dtft.checkpoint.storage_steps import storage_steps
from dtft.elastic.host_memory import check_arena_directory
from dtft.elastic.store_address import StoreAddress
from dtft.train import config as configs
from dtft.train.experiment import Experiment
from dtft.train.run_directory import make_run_directory, with_run_dir

if TYPE_CHECKING:
    from dtft.elastic.launch import ClusterOptions


def load_experiment(options: Namespace, overrides: list[str]) -> Experiment:
    """The experiment of the command line.

    Args:
        options: what the command's parser knows.
        overrides: the rest. The flags that stand for fields of the config are added to
            it, so that it makes the same experiment in another process.

    Raises:
        ValueError: there is no such config, or a value is not allowed.
    """
    if getattr(options, "hosts", None) is not None:
        overrides += ["--cluster.hosts", str(options.hosts)]
    if getattr(options, "run_dir", None):
        overrides += ["--log.run_dir", options.run_dir]
    if getattr(options, "min_replicas", None) is not None:
        overrides += ["--cluster.min_replicas", str(options.min_replicas)]
    return configs.load(options.config, overrides, f"dtft {options.command}")


def prepare_run(experiment: Experiment) -> tuple[Path, list[str]]:
    """The run directory, checked against what it already holds, and its override.

    Raises:
        ValueError: it holds checkpoints of another config, and nothing is touched; or
            it cannot be written to.
    """
    directory = Path(with_run_dir(experiment).log.run_dir).resolve()
    saved = directory / "config.json"
    if saved.exists() and storage_steps(directory / "checkpoints"):
        resolved = saved.read_text()
        configs.refuse_other(resolved, configs.to_json(experiment), directory)
    make_run_directory(directory)
    return directory, ["--log.run_dir", str(directory)]


def store_address(options: Namespace) -> StoreAddress:
    """The etcd of --store and of the flags that begin with --store-.

    Raises:
        ValueError: a flag has a value that is not allowed, or lacks its partner.
    """
    return StoreAddress.parse(
        options.store,
        ca=options.store_ca,
        certificate=options.store_cert,
        key=options.store_key,
        user=options.store_user,
        password_file=options.store_password_file,
        prefix=options.store_prefix,
        private=options.store_private,
    )


def host_name(options: Namespace) -> str:
    """--host-name, or a name that no other process has."""
    return options.host_name or f"{socket.gethostname()}-{os.getpid()}"


def read_secret(options: Namespace) -> bytes:
    """The job's secret, from --secret-file or DTFT_SECRET_FILE.

    Raises:
        ValueError: neither is given, or the file cannot be read or is too short.
    """
    name = options.secret_file or os.environ.get("DTFT_SECRET_FILE", "")
    if not name:
        raise ValueError(
            "no job secret: give --secret-file FILE or set DTFT_SECRET_FILE; any file "
            "of 16 bytes or more will do, the same on every host."
        )
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--secret-file {name}: {error.strerror}") from error
    if len(secret) < 16:
        raise ValueError(
            f"--secret-file {name} holds {len(secret)} bytes; at least 16 are needed."
        )
    return secret


def cluster_options(
    experiment: Experiment, arguments: list[str], spares: int, directory: Path
) -> "ClusterOptions":
    """The local cluster for an experiment.

    Raises:
        ValueError: the arena directory is not there.
    """
    from dtft.elastic.launch import ClusterOptions, job_name

    arena_directory = Path(experiment.checkpoint.arena_directory)
    check_arena_directory(arena_directory)
    return ClusterOptions(
        agent_arguments=tuple(arguments),
        job=job_name(experiment.name),
        hosts=experiment.cluster.hosts,
        spares=spares,
        run_directory=directory,
        arena_directory=arena_directory,
        storage_keep=experiment.checkpoint.storage_keep,
    )
