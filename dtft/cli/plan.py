"""`dtft plan CONFIG`: plans a config for a cluster; writes text, JSON and HTML.

Without --cluster the plan is that of `dtft train CONFIG --plan auto` on this machine.
Steps run only for --trial, so the devices of the cluster need not exist here.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dtft.cli.out_files import check_apart, check_writable
from dtft.config import Experiment
from dtft.parallel.planning import (
    PlannerInputs,
    RunnablePlan,
    asked_of,
    first_batch,
    first_fitting,
    plan,
    trial_section,
    try_plans,
    verified,
    verify_sections,
)
from dtft.planner import wording
from dtft.planner.cluster import Cluster
from dtft.planner.report import report_text
from dtft.planner.search import COUNTS, PINS, did_you_mean
from dtft.planner.wording import Section
from dtft.train import devices_of

if TYPE_CHECKING:
    from dtft.cli.commands import PlanCommand


def run(options: "PlanCommand", experiment: Experiment) -> int:
    """Runs `dtft plan`; returns the exit code 0.

    Raises:
        ValueError: the config cannot be planned, the pins cannot be satisfied, the
            cluster is unknown, a file cannot be read or written, --trial and --verify
            are both given, --trial cannot run here, or no plan fits in memory: by the
            prediction, or as compiled by --verify.
    """
    calibration = options.calibration or None
    if options.cluster is None:
        calibration = calibration or experiment.calibration or None
    _check_flags(options, calibration)
    cluster = _here(experiment) if options.cluster is None else options.cluster
    asked = asked_of(experiment)
    found = planned(
        asked,
        cluster,
        options.pin,
        calibration=calibration,
        what_if=options.what_if,
    )
    found, checked = _checked(found, asked, options, experiment)
    show(found, checked)
    if options.json:
        _write(options.json, found.to_json())
    if options.html:
        _write(options.html, found.html(checked))
    return 0


def _check_flags(options: "PlanCommand", calibration: str | None) -> None:
    if options.trial and options.verify:
        raise ValueError(
            f"--trial {options.trial} and --verify {options.verify}: what is run here "
            "needs no proof that it fits. Give one of them."
        )
    for name, path in (("--json", options.json), ("--html", options.html)):
        check_writable(name, path)
    check_apart(
        {
            "--cluster": options.cluster,
            "--calibration": calibration,
            "--json": options.json,
            "--html": options.html,
        }
    )


def _checked(
    found: RunnablePlan,
    asked: PlannerInputs,
    options: "PlanCommand",
    experiment: Experiment,
) -> tuple[RunnablePlan, tuple[Section, ...]]:
    """Returns the plan that --trial or --verify chooses, and report sections about it.

    --trial runs the best plans here, with the first rows of the config's data, and
    takes the fastest. --verify compiles the best plans and takes the best one that
    fits in memory. Without either flag, returns `found` and no sections.

    Args:
        found: the plan with the best prediction.
        asked: loss, optimizer, parameters and batch that were planned.
        options: the flags of `dtft plan`.
        experiment: the config.
    """
    decision = found.decision
    if decision is None:
        return found, ()
    if options.trial:
        given = vars(asked) | {"batch": first_batch(experiment)}
        tried = try_plans(decision, given, options.trial)
        best = RunnablePlan.of(tried[0].plan, tried[0].decision)
        return best, (trial_section(tried),)
    if options.verify:
        results = verified(decision, vars(asked), num=options.verify)
        taken = first_fitting(results).decision
        return RunnablePlan.of(taken.plan, taken), verify_sections(results)
    return found, ()


def _here(experiment: Experiment) -> Cluster:
    """Makes a cluster from the devices that `dtft train` has here, and prints them.

    Raises:
        ValueError: there is no device, the devices differ, the hosts have different
            numbers of devices, or the planner does not know the device type.
    """
    found = Cluster.from_devices(devices_of(experiment))
    hosts, pool = experiment.cluster.hosts, found.uniform
    line = f"for the devices of `dtft train` here: {pool.fabric_words}"
    if pool.device.platform == "cpu" and hosts > 1:
        each = f"{hosts}x{max(experiment.cluster.devices_per_host, 1)}xcpu"
        line += f" (of `dtft launch`, a process for each host: --cluster {each})"
    print(line)
    return found


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)
    print(f"written: {path}")


def planned(
    asked: PlannerInputs,
    cluster: Cluster | str,
    given: Sequence[str],
    *,
    calibration: str | None = None,
    what_if: bool = False,
) -> RunnablePlan:
    """Makes the plan of a config.

    Args:
        asked: loss, optimizer, parameters and batch of the config.
        cluster: a cluster, its text such as "8xA100", or the path of its file.
        given: settings of the plan that the user fixes (--pin), as NAME=VALUE.
        calibration: path of a file from `dtft calibrate`; None: no calibration.
        what_if: whether plans that cannot be run here are considered too.

    Raises:
        ValueError: the config cannot be planned, a setting in `given` is invalid or
            cannot be satisfied, the cluster is unknown, a file cannot be read, or no
            plan fits.
    """
    return plan(
        loss=asked.loss,
        optimizer=asked.optimizer,
        params=asked.params,
        batch=asked.batch,
        cluster=cluster,
        calibration=calibration,
        what_if=what_if,
        **pins_of(given),
    )


def pins_of(given: Sequence[str]) -> dict[str, Any]:
    """Parses the --pin flags into keyword arguments of `plan`.

    Each flag, NAME=VALUE, fixes one setting of the plan (a knob), such as the size of a
    mesh axis, remat or offload.

    Raises:
        ValueError: a text is not NAME=VALUE, a knob does not exist or is given twice,
            or the value of a numeric knob, `offload` or `stage_layers` is invalid.

    >>> pins_of(["tensor=8", "remat=dots", "order=replica,tensor"])
    {'tensor': 8, 'remat': 'dots', 'order': ('replica', 'tensor')}
    >>> pins_of(["stage_layers=5,6,6,5"])
    {'stage_layers': (5, 6, 6, 5)}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if (
            not name
            or not equals
            or not value
            or (name in COUNTS and not value.isdigit())
        ):
            raise ValueError(
                f"--pin {text}: a pin is NAME=VALUE, such as tensor=8, microbatches=4, "
                "zero=3, remat=dots or order=replica,tensor."
            )
        if name not in PINS:
            raise ValueError(
                f"--pin {text}: {name} is not a knob.{did_you_mean(name)} Allowed: "
                f"{', '.join(PINS)}."
            )
        if name in found:
            raise ValueError(f"--pin {text}: {name} is pinned twice. Give it once.")
        if name == "order":
            found[name] = tuple(value.split(","))
        elif name == "stage_layers":
            found[name] = _counts(text, value)
        elif name == "offload":
            found[name] = _is_true(text, value)
        else:
            found[name] = int(value) if value.isdigit() else value
    return found


def _counts(text: str, value: str) -> tuple[int, ...]:
    counts = value.split(",")
    if not all(count.isdecimal() for count in counts):
        raise ValueError(
            f"--pin {text}: Allowed: whole numbers between commas, such as "
            "stage_layers=5,6,6,5."
        )
    return tuple(map(int, counts))


def _is_true(text: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"--pin {text}: Allowed: offload=true, offload=false.")
    return value.lower() == "true"


def show(found: RunnablePlan, checked: Sequence[Section]) -> None:
    """Prints a plan: as tables on a terminal, elsewhere as aligned text.

    Args:
        found: the plan.
        checked: sections from a trial or the compiler, printed last.
    """
    parts = (*found.sections(), *checked)
    if sys.stdout.isatty():
        report_text(parts, Console())
    else:
        print(wording.text(parts))
