"""`dtft plan CONFIG`: the plan of a config for a cluster, in words, as JSON and HTML.

Asks and writes; decides nothing of the plan. Runs no step but for a trial: a plan for a
cluster that is elsewhere needs none of its devices.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dtft.planner import report, wording
from dtft.planner.pins import COUNTS
from dtft.planner.wording import Section
from dtft.train import trial
from dtft.train.experiment import Experiment
from dtft.train.out_files import check_apart, check_writable
from dtft.train.plan_entry import plan
from dtft.train.plan_question import Asked, asked_of
from dtft.train.plan_verify import verified
from dtft.train.planning import RunnablePlan
from dtft.train.verify_words import first_fitting, sections


def run(options: Namespace, experiment: Experiment) -> int:
    """Runs the command.

    Raises:
        ValueError: a config that cannot be planned, pins that cannot be met, an unknown
            cluster; or nothing fits, predicted or compiled.
    """
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
            "--calibration": options.calibration,
            "--json": options.json,
            "--html": options.html,
        }
    )
    asked = asked_of(experiment)
    found = planned(
        asked,
        options.cluster,
        options.pin,
        calibration=options.calibration,
        what_if=options.what_if,
    )
    checked: tuple[Section, ...] = ()
    if options.trial and found.decision is not None:
        tried = trial.trial(found.decision, vars(asked), options.trial)
        checked = (trial.section(tried),)
        found = RunnablePlan.of(tried[0].plan, tried[0].decision)
    if options.verify and found.decision is not None:
        results = verified(found.decision, vars(asked), num=options.verify)
        checked = sections(results)
        taken = first_fitting(results).decision
        found = RunnablePlan.of(taken.plan, taken)
    show(found, checked)
    if options.json:
        _write(options.json, found.to_json())
    if options.html:
        _write(options.html, report.html(found, found.decision, checked))
    return 0


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)
    print(f"written: {path}")


def planned(
    asked: Asked,
    cluster: str | None,
    given: Sequence[str],
    *,
    calibration: str | None = None,
    what_if: bool = False,
) -> RunnablePlan:
    """The plan of a config.

    Args:
        asked: its loss, optimizer, parameters and batch.
        cluster: in words, or a file; None for the devices that JAX has.
        given: pins, as NAME=VALUE.
        calibration: a file that `dtft calibrate` wrote.
        what_if: looks also at knobs that cannot be run here.

    Raises:
        ValueError: as `run`.
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
    """Pins of a command line.

    Raises:
        ValueError: one of them is not NAME=VALUE, or its value is no number.

    >>> pins_of(["tensor=8", "remat=dots", "order=replica,tensor"])
    {'tensor': 8, 'remat': 'dots', 'order': ('replica', 'tensor')}
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
        if name in found:
            raise ValueError(f"--pin {text}: {name} is pinned twice. Give it once.")
        if name == "order":
            found[name] = tuple(value.split(","))
        elif name == "offload":
            found[name] = _is_true(text, value)
        else:
            found[name] = int(value) if value.isdigit() else value
    return found


def _is_true(text: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"--pin {text}: Allowed: offload=true, offload=false.")
    return value.lower() == "true"


def show(found: RunnablePlan, checked: Sequence[Section]) -> None:
    """Tables on a terminal, aligned text elsewhere.

    Args:
        found: what is shown.
        checked: what the compiler made of it, shown last.
    """
    parts = (*found.sections(), *checked)
    if sys.stdout.isatty():
        report.show(parts, Console())
    else:
        print(wording.text(parts))
