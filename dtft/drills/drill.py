"""`dtft drill`: compares a run that has planned faults to an undisturbed run.

Runs both with the same experiment on local clusters, injects the faults at their steps,
and judges the runs' files (module `compare`). An undisturbed run that is already there
is used again if it has finished, its config leads to the same final state, and it has
logged the samples and losses that the drill compares. The drill does not take part in
the recovery.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.config import Experiment, to_json
from dtft.drills import leftovers
from dtft.drills.compare import judge, say
from dtft.drills.options import cluster_options, for_clusters, handed_on
from dtft.elastic.faults import (
    OF_DIRECTORIES,
    Fault,
    FaultInjector,
    HostNamespaces,
    check_mounts,
    check_namespaces,
    check_together,
    existing_namespaces,
    parse_fault,
    sweep_namespaces,
    unmount_below,
)
from dtft.elastic.local_cluster import ClusterOptions, HostPlace, LocalCluster
from dtft.train import only_run_in

if TYPE_CHECKING:
    from dtft.cli import DrillCommand


DEADLINE_S = 600.0
FAIL_AT = "DTFT_FAIL_AT"
"""Environment variable with the value SLOT:STEP:once|always:MARKER: the slot and step
at which a trainer raises. With `once` the trainer makes the file MARKER first, and does
not raise if the file exists."""
_LITTLE_MEMORY = 'mount -t tmpfs -o size="$1" dtft "$2" && shift 2 && exec "$@"'
"""Shell script: mounts a tmpfs of size $1 on directory $2, then executes the rest of
its arguments as a command."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The outcome of one of a drill's two runs, the faulted or the undisturbed one.

    Has the injector of the run's faults, whether the run ended before its deadline, and
    the names of the run's leftovers on this machine (`left_behind`).
    """

    injector: FaultInjector
    ended_in_time: bool
    left_behind: list[str]


def run_drill(options: "DrillCommand", words: list[str]) -> int:
    """Runs the drill; returns exit code 0 if the faulted run passes all checks, else 1.

    Args:
        options: CONFIG, faults, and the clusters' settings.
        words: overrides of config keys, as typed on the command line.

    Raises:
        ValueError: wrong input, such as a fault that cannot be read; another run uses
            the run directory, or makes the undisturbed run; or etcd does not start.
        FileNotFoundError: there is no etcd executable.
        SystemExit: CONFIG or a key of it is wrong, or the undisturbed run did not end
            within 600 s (`DEADLINE_S`).
    """
    experiment, overrides = for_clusters(options, words, "dtft drill")
    overrides += handed_on(options.host)
    logging.getLogger("absl").setLevel(logging.ERROR)
    faults = _faults(experiment, options)
    sweep_namespaces()
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
    faulted = root / "faulted"
    with only_run_in(root), only_run_in(faulted):
        check_deletable(faulted, "--run-dir")
        usable = partial(_usable, control, experiment, every_loss=compares)
        if not usable():
            flag = "control" if options.control else "log.run_dir"
            with only_run_in(control, flag=flag):
                if not usable():  # another drill may have made it just now
                    _make_control(experiment, arguments, control, options)
        names = ", ".join(map(str, faults)) or "no fault"
        print(f"dtft: faulted run in {faulted}: {names}", flush=True)
        ran = _run(experiment, arguments, faulted, options.spares, faults, options)
        record = judge(
            *(control, faulted, ran.injector, experiment),
            ended_in_time=ran.ended_in_time,
            left_behind=ran.left_behind,
        )
    say(record)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    return 0 if record["ok"] else 1


def _make_control(
    experiment: Experiment,
    arguments: list[str],
    control: Path,
    options: "DrillCommand",
) -> None:
    """Runs the undisturbed run in the directory `control`.

    `arguments` are CONFIG and overrides, for each agent.

    Raises:
        ValueError: the directory has files, but no drill made it.
        SystemExit: the run did not end within 600 s (`DEADLINE_S`).
    """
    check_deletable(control, "--control" if options.control else "--run-dir")
    print(f"dtft: undisturbed run in {control}", flush=True)
    ran = _run(experiment, arguments, control, 0, [], options)
    if not ran.ended_in_time:
        raise SystemExit(f"dtft: error: {control} did not end in {DEADLINE_S:.0f} s")


def _faults(experiment: Experiment, options: "DrillCommand") -> list[Fault]:
    hosts = experiment.cluster.hosts
    if any(text.startswith("scale:") for text in options.fault):
        hosts += options.spares  # the job may grow onto the spares
    faults = [parse_fault(text, hosts) for text in options.fault]
    for fault in faults:
        if fault.step >= experiment.stop.steps:
            raise ValueError(
                f"--fault {fault}: the run ends at step {experiment.stop.steps}. Give "
                "an earlier step, or raise --stop.steps."
            )
    check_together(faults)
    _memory_limits(options)
    if any(fault.kind == "cut" for fault in faults):
        check_namespaces()
    if any(fault.kind in OF_DIRECTORIES for fault in faults):
        check_mounts()
    return faults


def _memory_limits(options: "DrillCommand") -> dict[str, int]:
    """Maps host to its memory limit in MiB, from --host-memory.

    Raises:
        ValueError: the flag cannot be parsed; or it is given, but this process is not
            root, or the program `unshare` is missing.
    """
    found = {}
    for text in options.host_memory:
        host, _, size = text.partition("=")
        if not host or not size.isdigit() or int(size) < 1:
            raise ValueError(
                f"--host-memory {text!r} is not HOST=MIB, for example host-3=4"
            )
        found[host] = int(size)
    if found and (os.geteuid() != 0 or shutil.which("unshare") is None):
        raise ValueError(
            "--host-memory needs a mount namespace, and that needs root and `unshare` "
            "(util-linux): run this as root, or leave it out."
        )
    return found


def _usable(control: Path, experiment: Experiment, *, every_loss: bool) -> bool:
    """Whether a finished undisturbed run in `control` can be used again.

    Its config and that of `experiment` must lead to the same final state, and the run
    must have logged its samples. If losses are compared (`every_loss`), the run must
    have logged the loss of every step.
    """
    saved = control / "config.json"
    if not (control / "summary.json").exists() or not saved.exists():
        return False
    log = json.loads(saved.read_text())["log"]
    if not log["sample_ids"] or (every_loss and log["every"] != 1):
        return False
    return _decisive(saved.read_text()) == _decisive(to_json(experiment))


def _decisive(resolved: str) -> dict[str, Any]:
    """Returns the settings of a config that decide a run's final state.

    These are all settings except the sections `log`, `timeouts` and `checkpoint`, and
    the key `cluster.hot_swap`. `resolved` is the config as JSON text.
    """
    free = ("log", "timeouts", "checkpoint")
    found = {k: v for k, v in json.loads(resolved).items() if k not in free}
    found["cluster"].pop("hot_swap", None)
    return found


_MADE = ".dtft-drill"
"""File in each directory of a run that a drill made, and may delete."""


def check_deletable(directory: Path, flag: str) -> None:
    """Checks that a directory that is to be deleted was made by a drill.

    Args:
        directory: directory of a run of the drill; may be missing or empty.
        flag: the flag that names the directory, for the message.

    Raises:
        ValueError: the directory has files, but neither the file that marks
            directories of drills, nor a config file of a run of a drill.
    """
    if not directory.exists() or _is_made(directory):
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise ValueError(
            f"{flag}: {directory} exists, and no drill made it. A drill deletes what "
            "an earlier one left there, and nothing else. Give another directory, or "
            "remove this one yourself."
        )


def _is_made(directory: Path) -> bool:
    """Whether a drill made a directory.

    A drill marks each directory that it makes with a file (`_MADE`). Drills before
    2026-11-26 made no mark. So a directory without it also counts as a drill's if its
    config logs samples but no TensorBoard.
    """
    if (directory / _MADE).exists():
        return True
    try:
        log = json.loads((directory / "config.json").read_text())["log"]
        return bool(log["sample_ids"]) and not log["tensorboard"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fresh(directory: Path) -> None:
    """Empties a run's directory, or makes it.

    The directory itself stays, because it may be locked.
    """
    unmount_below(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MADE).touch()
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MADE:
            path.unlink()


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
    options: "DrillCommand",
) -> Ran:
    _fresh(directory)
    arguments = [*arguments, "--log.run_dir", str(directory)]
    settings = _settings(experiment, [*arguments], spares, directory)
    settings.environment[leftovers.MARK] = settings.job
    marker = directory / "fail.marker"
    settings.environment.update(_failures(faults, marker))
    with _network(settings, faults, options) as network:
        limits = _memory_limits(options) if faults else {}
        cluster = LocalCluster(_placed(settings, network, limits))
        injector = FaultInjector(
            *(cluster, faults),
            seed=options.seed,
            rejoin_s=options.rejoin,
            network=network,
            fail_marker=marker,
            last_step=experiment.stop.steps,
        )
        left: list[str] = []
        try:
            cluster.start()
            injector.start()
            deadline_s = options.deadline if faults else DEADLINE_S
            ended = _wait(cluster, injector, deadline_s)
            left += leftovers.of_ended_hosts(cluster)
        finally:
            with contextlib.ExitStack() as last_first:  # an error of one keeps no other
                last_first.callback(injector.undo_mounts)
                last_first.callback(cluster.close)
                last_first.callback(injector.stop)
    left += leftovers.of_job(settings.job, settings.arena_directory, directory)
    left += existing_namespaces(os.getpid()) if network else []
    return Ran(injector=injector, ended_in_time=ended, left_behind=left)


def _wait(cluster: LocalCluster, injector: FaultInjector, deadline_s: float) -> bool:
    """Waits until all agents have ended, except those suspended or cut off for ever.

    While the job has not ended, also waits for hosts that --rejoin is about to start.

    Returns False if the deadline passes first.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        cluster.wait(0.1)
        running = set(cluster.agents) - set(cluster.poll())
        if running <= injector.held:
            if not injector.restarts_due or _has_ended(cluster):
                return True
            time.sleep(0.1)
    return False


def _has_ended(cluster: LocalCluster) -> bool:
    """Whether the job's leader has logged the job's end."""
    return any(event["event"] == "end" for event in cluster.events())


def _failures(faults: Sequence[Fault], marker: Path) -> dict[str, str]:
    """Returns the environment variables for the first fault of kind `fail`.

    The variables make a trainer raise an exception inside a step. A trainer that is to
    fail only once makes the file `marker` just before it raises, and does not raise if
    the file exists. Returns {} if there is no such fault.
    """
    for fault in faults:
        if fault.kind == "fail":
            often = "always" if fault.always else "once"
            return {FAIL_AT: f"{fault.slots[0]}:{fault.step}:{often}:{marker}"}
    return {}


@contextlib.contextmanager
def _network(
    settings: ClusterOptions, faults: Sequence[Fault], options: "DrillCommand"
) -> Iterator[HostNamespaces | None]:
    """Makes a network namespace for each host; removes all at the end.

    Hosts that --rejoin may start later get a namespace, too. If no fault cuts a host
    off, makes no namespace and yields None.
    """
    if not any(fault.kind == "cut" for fault in faults):
        yield None
        return
    hosts = settings.hosts + settings.spares
    if options.rejoin is not None:  # new hosts replace hosts that never come back
        hosts += sum(max(1, len(it.slots)) for it in faults if not it.heals)
    network = HostNamespaces([f"host-{number}" for number in range(hosts)])
    try:
        yield network
    finally:
        network.close()


def _placed(
    settings: ClusterOptions, network: HostNamespaces | None, limits: dict[str, int]
) -> ClusterOptions:
    """Returns the cluster's options, with a network and a memory limit for each host.

    `network` is None if the hosts share this machine's network. `limits` maps hosts to
    MiB; a host that it lacks has no limit.
    """
    place = partial(
        _place, network=network, limits=limits, memory=settings.arena_directory
    )
    store_host = network.store_host if network else settings.store_host
    return replace(settings, place=place, store_host=store_host)


def _place(
    host: str,
    *,
    network: HostNamespaces | None,
    limits: dict[str, int],
    memory: Path,
) -> HostPlace:
    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    if network is not None:
        prefix += network.prefix(host)
        arguments += ("--bind", f"{network.address(host)}:0")
    if host in limits:
        prefix += ("unshare", "--mount", "--propagation", "private", "sh", "-c")
        prefix += (_LITTLE_MEMORY, "sh", f"{limits[host]}m", str(memory))
    return HostPlace(prefix=prefix, arguments=arguments)
