"""The commands: from parsed arguments to what does the work, and an exit code.

Wrong input ends in one clear line and exit code 2 before anything is started or
written. Must not know how a command's work is done: the module that it imports does.
"""

import json
import shlex
import signal
import sys
from argparse import Namespace
from pathlib import Path

from dtft.elastic.host_memory import check_name
from dtft.elastic.stopping import heard_signals
from dtft.train import config as configs
from dtft.train import host_flags
from dtft.train.experiment import Experiment
from dtft.train.fitting import check
from dtft.train.job_options import (
    cluster_options,
    load_experiment,
    prepare_run,
    read_secret,
)


def run(options: Namespace, overrides: list[str]) -> int:
    """Runs one command."""
    try:
        for flag in ("job", "host_name"):
            if (name := getattr(options, flag, None)) is not None:
                check_name(f"--{flag.replace('_', '-')}", name)
        return _COMMANDS[options.command](options, overrides)
    except (ValueError, FileExistsError, FileNotFoundError, PermissionError) as error:
        print(f"dtft: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("dtft: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _config(options: Namespace, overrides: list[str]) -> int:
    print(configs.to_json(load_experiment(options, overrides)))
    return 0


def _train(options: Namespace, overrides: list[str]) -> int:
    from dtft.train.single import train

    load_experiment(options, overrides)
    return train(options.config, overrides)


# ----------------------------------------------------------------- many hosts


def _launch(options: Namespace, overrides: list[str]) -> int:
    from dtft.elastic.launch import LocalCluster, supervise, tell
    from dtft.train.run_directory import only_run_in

    given = list(overrides)
    experiment = load_experiment(options, overrides)
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
    with only_run_in(directory):
        flags += host_flags.own_certificate(options, directory)
        arguments = [options.config, *overrides, *extra, *flags]
        settings = cluster_options(experiment, arguments, options.spares, directory)
        settings.environment["DTFT_RESUME_COMMAND"] = resume
        code = supervise(LocalCluster(settings), experiment.timeouts.stop)
    if code:
        tell(f"resume with: {resume}")
    return code


def _agent(options: Namespace, overrides: list[str]) -> int:
    if options.serve_only:
        from dtft.train.serve_command import serve

        return serve(options, overrides, read_secret(options))
    from dtft.train.agent_command import run_agent

    return run_agent(options, overrides)


def _for_clusters(
    options: Namespace, overrides: list[str]
) -> tuple[Experiment, list[str]]:
    """The experiment, and the overrides for clusters with run directories of their own.

    SIGTERM and SIGHUP unwind like an error, so that clusters are closed and their
    memory freed.
    """
    given = list(overrides)
    experiment = load_experiment(options, overrides)
    check(experiment)
    for number in heard_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
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
            raise ValueError(
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
    return scale_command.run(options, read_secret(options))


def _plan(options: Namespace, overrides: list[str]) -> int:
    if getattr(options, "action", "") == "predict":
        from dtft.train import predict_command

        _refuse_unknown("plan predict", overrides)
        return predict_command.run(options)
    from dtft.train import plan_command

    return plan_command.run(options, load_experiment(options, overrides))


def _calibrate(options: Namespace, overrides: list[str]) -> int:
    from dtft.train import calibrate_command

    _refuse_unknown("calibrate", overrides)
    return calibrate_command.run(options)


def _refuse_unknown(command: str, overrides: list[str]) -> None:
    if overrides:
        raise ValueError(
            f"unknown arguments: {' '.join(overrides)}. See `dtft {command} --help`."
        )


def _checkpoint(options: Namespace, overrides: list[str]) -> int:
    from dtft.train import checkpoint_commands

    _refuse_unknown(f"checkpoint {options.action}", overrides)
    if options.action == "odds":
        from dtft.checkpoint.odds import odds_table

        print(odds_table(options.hosts, options.copies))
        return 0
    return checkpoint_commands.run(options, lambda: read_secret(options))


_COMMANDS = {
    "checkpoint": _checkpoint,
    "scale": _scale,
    "plan": _plan,
    "calibrate": _calibrate,
    "train": _train,
    "config": _config,
    "launch": _launch,
    "agent": _agent,
    "drill": _drill,
    "bench": _bench,
}
