"""What several commands read from their flags: experiment, run directory, secret.

Turns flags into values, refuses what cannot be, and makes the run directory.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtft.checkpoint.storage import storage_steps
from dtft.elastic.host import check_arena_directory, check_name
from dtft.elastic.stop_signals import heard_signals
from dtft.elastic.store import StoreAddress
from dtft.train import config as configs
from dtft.train.experiment import Experiment
from dtft.train.fitting import check
from dtft.train.run_directory import make_run_directory, with_run_dir

if TYPE_CHECKING:
    from dtft.elastic.local_cluster import ClusterOptions
    from dtft.train.commands import Bench, Drill, JobFlags, PlaceFlags


def for_clusters(
    command: "Drill | Bench", words: list[str], prog: str
) -> tuple[Experiment, list[str]]:
    """The experiment, and the overrides for clusters with run directories of their own.

    SIGTERM and SIGHUP unwind like an error, so that clusters are closed and their
    memory freed.

    Args:
        command: CONFIG and sizes.
        words: keys of the config, as they were typed.
        prog: the command, for the help text.

    Raises:
        ValueError: wrong input.
    """
    overrides = [*words, *command.run_flags.keys()]
    experiment = configs.load(command.config, overrides, prog)
    check(experiment)
    for number in heard_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    cluster = experiment.cluster
    sizes = ["--cluster.hosts", str(cluster.hosts)]
    sizes += ["--cluster.min_replicas", str(cluster.min_replicas)]
    return experiment, [*words, *sizes]


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


def store_address(job: "JobFlags") -> StoreAddress:
    """The etcd of --store and of the flags that begin with --store-.

    Raises:
        ValueError: a flag has a value that is not allowed, or lacks its partner; or no
            job can have this name.
    """
    check_name("--job", job.name)
    return StoreAddress.parse(
        job.store,
        ca=job.store_ca,
        certificate=job.store_cert,
        key=job.store_key,
        user=job.store_user,
        password_file=job.store_password_file,
        prefix=job.store_prefix,
        private=job.store_private,
    )


def host_name(place: "PlaceFlags") -> str:
    """--host-name, or a name that no other process has.

    Raises:
        ValueError: no host can have this name.
    """
    if place.host_name is None:
        return f"{socket.gethostname()}-{os.getpid()}"
    check_name("--host-name", place.host_name)
    return place.host_name


def read_secret(job: "JobFlags") -> bytes:
    """The job's secret, from --secret-file or DTFT_SECRET_FILE.

    Raises:
        ValueError: neither is given, or the file cannot be read or is too short.
    """
    name = job.secret_file or os.environ.get("DTFT_SECRET_FILE", "")
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
    from dtft.elastic.local_cluster import ClusterOptions, job_name

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
