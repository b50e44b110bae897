"""Which plan a run has: decided once, recorded in every commit, replayed afterwards.

One process decides and all others are told, so that they agree whatever files each of
them sees. Must not know how a plan is searched for, or what it does to a program.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from dtft._jax_internals import told_by_first
from dtft.planner.plan import Plan
from dtft.train.config import ConfigError
from dtft.train.experiment import Experiment

ITEM = "plan"
"""Its name among what a checkpoint holds beside arrays."""

Decide = Callable[[Experiment, Sequence[Any]], Plan]
"""From a config and its devices, in slot order, to a plan."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan, and what the config said."""

    asked: str
    """`auto`, or the path of a plan file."""
    plan: Plan
    """What is run."""

    @cached_property
    def items(self) -> dict[str, Any]:
        """What a checkpoint records; what was only reported is left out."""
        kept = replace(self.plan, alternatives=(), collectives=())
        return {ITEM: {"asked": self.asked, "plan": json.loads(kept.to_json())}}

    @property
    def text(self) -> str:
        """The whole plan, as it is written into the run directory."""
        return self.plan.to_json() + "\n"

    @property
    def words(self) -> str:
        """One line for the banner."""
        plan, knobs = self.plan, self.plan.knobs
        sizes = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        expected = plan.prediction
        return (
            f"plan {self.asked}: {sizes}, microbatches {knobs.microbatches}, remat "
            f"{knobs.remat}, zero {knobs.zero}; predicted "
            f"{1e3 * expected.step_s:.3g} ms a step ({1e3 * expected.low_s:.3g} to "
            f"{1e3 * expected.high_s:.3g}, {expected.source}), "
            f"{plan.memory_bytes / 2**20:.1f} MiB per device"
        )


def choose(
    experiment: Experiment,
    devices: Sequence[Any],
    items: Mapping[str, Any],
    decide: Decide | None = None,
) -> Choice | None:
    """The plan of a run; None where the config's own mesh decides.

    All processes call it together. What a checkpoint recorded is replayed as long as
    the config asks for the same.

    Args:
        experiment: its field `plan` says what is asked for.
        devices: in slot order.
        items: of the checkpoint that the run continues from; empty at the very start.
        decide: answers `auto`; by default the planner.

    Raises:
        ConfigError: there is no such plan file, or it holds no plan.
    """
    asked = experiment.plan
    if not asked:
        return None
    recorded, text = items.get(ITEM, {}), ""
    if recorded.get("asked") == asked:
        text = json.dumps(recorded["plan"])
    elif jax.process_index() == 0:
        answer = decide or _automatic
        plan = answer(experiment, devices) if asked == "auto" else read(asked)
        text = plan.to_json()
    agreed = told_by_first("dtft/plan", text, experiment.timeouts.start)
    return Choice(asked=asked, plan=Plan.from_json(agreed))


def read(path: str) -> Plan:
    """The plan of a file.

    Raises:
        ConfigError: it cannot be read, or holds no plan.
    """
    try:
        return Plan.from_json(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"plan={path!r} cannot be read ({error}). Allowed: auto, the path of a "
            "file that `dtft plan --json PATH` wrote, or nothing. Set --plan."
        ) from None
    except ValueError as error:
        raise ConfigError(f"plan={path!r}: {error}") from None


def _automatic(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    # What searches is loaded only where it is asked for: trainers start without it.
    from dtft.train.plan_auto import automatic

    return automatic(experiment, devices)
