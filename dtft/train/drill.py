"""`dtft drill`: an undisturbed run and a faulted run with one seed, compared.

Runs both on local clusters, lets `elastic.strikes` play the faults, and has
`verdict.py` judge what they wrote. Must not take part in the recovery itself.
"""

import json
import logging
import os
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.elastic.faults import Fault, parse_fault
from dtft.elastic.launch import ClusterOptions, LocalCluster
from dtft.elastic.strikes import Striker
from dtft.train import config as configs
from dtft.train.experiment import Experiment
from dtft.train.job_options import cluster_options
from dtft.train.verdict import judge, say

DEADLINE_S = 600.0


def drill(experiment: Experiment, options: Namespace, overrides: list[str]) -> int:
    """Runs the drill; 0 if the faulted run is as good as the undisturbed one.

    Raises:
        ValueError: a fault cannot be read.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    faults = _faults(experiment, options)
    root = Path(experiment.log.run_dir or f"runs/drill-{time.strftime('%H%M%S')}")
    root = root.resolve()
    arguments = [options.config, *overrides, "--log.sample_ids", "True"]
    arguments += ["--log.tensorboard", "False"]
    resizes = bool(experiment.cluster.min_replicas)
    resizes |= any(it.kind == "scale" for it in faults)
    compares = resizes or experiment.balance.policy != "off"
    if compares:
        arguments += ["--log.every", "1"]  # the losses of all steps are compared
    control = Path(options.control).resolve() if options.control else root / "control"
    if not _usable(control, experiment, every_loss=compares):
        print(f"dtft: undisturbed run in {control}", flush=True)
        _run(experiment, arguments, control, 0, [], options)
    faulted = root / "faulted"
    names = ", ".join(map(str, faults)) or "no fault"
    print(f"dtft: faulted run in {faulted}: {names}", flush=True)
    striker = _run(experiment, arguments, faulted, options.spares, faults, options)
    record = judge(control, faulted, striker, experiment)
    say(record)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    return 0 if record["ok"] else 1


def _faults(experiment: Experiment, options: Namespace) -> list[Fault]:
    hosts = experiment.cluster.hosts
    if any(text.startswith("scale:") for text in options.fault):
        hosts += options.spares  # the job may grow over them
    faults = [parse_fault(text, hosts) for text in options.fault]
    for fault in faults:
        if fault.step >= experiment.stop.steps:
            raise ValueError(
                f"--fault {fault}: the run ends at step {experiment.stop.steps}. Give "
                "an earlier step, or raise --stop.steps."
            )
    return faults


def _usable(control: Path, experiment: Experiment, *, every_loss: bool) -> bool:
    """Whether a finished control run has the same result by construction.

    Where losses are compared it must have those of all steps.
    """
    saved = control / "config.json"
    if not (control / "summary.json").exists() or not saved.exists():
        return False
    if every_loss and json.loads(saved.read_text())["log"]["every"] != 1:
        return False
    return _decisive(saved.read_text()) == _decisive(configs.to_json(experiment))


def _decisive(resolved: str) -> dict[str, Any]:
    """The part of a config that decides the final state."""
    free = ("log", "timeouts", "checkpoint")
    return {k: v for k, v in json.loads(resolved).items() if k not in free}


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _settings(
    experiment: Experiment, arguments: list[str], spares: int, directory: Path
) -> ClusterOptions:
    settings = cluster_options(experiment, arguments, spares, directory)
    cache = os.environ.get(
        "DTFT_COMPILATION_CACHE", str(directory.parent / "xla-cache")
    )
    settings.environment["DTFT_COMPILATION_CACHE"] = cache
    command = ["dtft", "launch", *settings.agent_arguments]
    settings.environment["DTFT_RESUME_COMMAND"] = shlex.join(command)
    return settings


def _run(
    experiment: Experiment,
    arguments: Sequence[str],
    directory: Path,
    spares: int,
    faults: Sequence[Fault],
    options: Namespace,
) -> Striker:
    _fresh(directory)
    arguments = [*arguments, "--log.run_dir", str(directory)]
    cluster = LocalCluster(_settings(experiment, arguments, spares, directory))
    striker = Striker(cluster, faults, seed=options.seed, rejoin_s=options.rejoin)
    try:
        cluster.start()
        striker.start()
        ended = cluster.wait(DEADLINE_S)
    finally:
        striker.stop()
        cluster.close()
    if not ended:
        raise SystemExit(f"dtft: error: {directory} did not end in {DEADLINE_S:.0f} s")
    return striker
