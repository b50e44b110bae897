"""`dtft launch`: from its flags to a local cluster, and the command that continues it.

Checks config and flags before anything is started or written.
"""

import shlex
from typing import TYPE_CHECKING

from dtft.elastic.local_cluster import LocalCluster, supervise, tell
from dtft.train import config as configs
from dtft.train import host_flags
from dtft.train.fitting import check
from dtft.train.job_options import cluster_options, prepare_run
from dtft.train.run_directory import only_run_in

if TYPE_CHECKING:
    from dtft.train.commands import Launch


def launch(command: "Launch", words: list[str]) -> int:
    """Runs a local cluster until its job ends, and says how to continue.

    Args:
        command: CONFIG, and what the cluster is told.
        words: keys of the config, as they were typed.

    Raises:
        ValueError: wrong input.
    """
    overrides = [*words, *command.run_flags.keys()]
    experiment = configs.load(command.config, overrides, "dtft launch")
    check(experiment)
    flags = host_flags.handed_on(command.host)
    directory, extra = prepare_run(experiment)
    least = experiment.cluster.min_replicas
    resume = shlex.join(
        ["dtft", "launch", command.config, *words, "--spares", str(command.spares)]
        + ["--hosts", str(experiment.cluster.hosts), "--run-dir", str(directory)]
        + (["--min-replicas", str(least)] if least else [])
        + [*flags, *["--tls"] * command.tls]
    )
    with only_run_in(directory):
        if command.tls:
            flags += host_flags.own_certificate(command.host, directory)
        arguments = [command.config, *overrides, *extra, *flags]
        settings = cluster_options(experiment, arguments, command.spares, directory)
        settings.environment["DTFT_RESUME_COMMAND"] = resume
        code = supervise(LocalCluster(settings), experiment.timeouts.stop)
    if code:
        tell(f"resume with: {resume}")
    return code
