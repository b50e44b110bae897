"""Chooses the plan of a run.

A plan is chosen once, recorded in every commit, and replayed from the record. The
process of the first device chooses and broadcasts the plan, because processes may see
different files. If the number of devices has changed since the commit, `auto` is
decided again. A plan from a file then gets more or fewer replicas, or is refused.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from dtft._jax_internals import told_by
from dtft.config import ConfigError, Experiment
from dtft.planner.cluster import Cluster
from dtft.planner.plan import Plan
from dtft.planner.report import step_text

AUTO = "auto"
"""Value of the config's `plan` for which the planner selects the plan."""
ITEM = "plan"
"""Key of the checkpoint item (JSON) that has the plan."""

Decide = Callable[[Experiment, Sequence[Any]], Plan]
"""Function from a config and its devices, in mesh order, to a plan."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The plan of a run, with the config's request (`auto`, or a plan file)."""

    asked: str
    """The config's `plan`: `auto`, or the path of a plan file."""
    plan: Plan
    """The plan that is run."""
    before: str = ""
    """Mesh of the recorded plan, if the number of devices has changed since; else
    empty."""
    num_devices: int = 0
    """Number of devices of the run, some of which the plan may leave idle; 0 means the
    number that the plan uses."""
    here: str = ""
    """Devices of the run in words, such as `2x8xh100 by NVLink and InfiniBand`; empty
    if the planner does not know the device type, if devices are of several types, or if
    hosts have different numbers of devices."""

    @property
    def is_predicted(self) -> bool:
        """Whether the plan's prediction is for the devices of this run."""
        return bool(self.here) and self.plan.predicted_for == self.here

    @cached_property
    def items(self) -> dict[str, Any]:
        """Checkpoint items that record the choice: the request and the plan.

        The plan is recorded without its alternatives and collectives. If it leaves
        devices idle, the number of the run's devices is recorded too.
        """
        kept = replace(self.plan, alternatives=(), collectives=())
        known = {"asked": self.asked, "plan": json.loads(kept.to_json())}
        if self.num_devices > used(self.plan):
            known["devices"] = self.num_devices
        return {ITEM: known}

    @property
    def text(self) -> str:
        """The whole plan as JSON, for the run directory."""
        return self.plan.to_json() + "\n"

    @property
    def words(self) -> str:
        """A line for the run's banner: mesh, settings such as remat, and prediction."""
        plan, knobs = self.plan, self.plan.knobs
        changed = ""
        if self.before:
            how = "decided again" if self.asked == AUTO else "replicas changed"
            num_devices = self.num_devices or used(plan)
            changed = f" ({how} for {num_devices} devices; was {self.before})"
        idle = ""
        if self.num_devices > used(plan):
            idle = f" ({used(plan)} of {self.num_devices} devices)"
        return (
            f"plan {self.asked}{changed}: {_sizes(plan)}{idle}, "
            f"microbatches {knobs.microbatches}, remat {knobs.remat}, "
            f"zero {knobs.zero}; {self._prediction}"
        )

    @property
    def _prediction(self) -> str:
        plan, expected = self.plan, self.plan.prediction
        if self.is_predicted:
            return (
                f"predicted {step_text(expected)}, {expected.source}; "
                f"{plan.memory_bytes / 2**20:.1f} MiB per device"
            )
        made = f"made for {plan.predicted_for or plan.cluster or 'devices unknown'}"
        if not plan.predicted_for:
            made += ", replicas, batch or model changed since (or an older dtft)"
        return (
            f"{made}, run on {self.here or 'devices that the planner does not know'}: "
            "no prediction, and calibrations learn nothing from this run"
        )


def choose(
    experiment: Experiment,
    devices: Sequence[Any],
    items: Mapping[str, Any],
    decide: Decide | None = None,
    *,
    formation: str = "",
) -> PlanChoice | None:
    """Chooses the plan of a run; None if the config asks for no plan.

    All processes must call this function together. A recorded plan is replayed if the
    config's `plan` and the number of devices are the same as in the checkpoint. If only
    the number of devices differs, `auto` is decided again, and a plan from a file gets
    the number of replicas that uses all devices. A plan that is newly read from its
    file gets this number of replicas, too, if it was made for another number of
    devices.

    Args:
        experiment: the config; its field `plan` is `auto`, a path, or empty.
        devices: the devices of the run, in mesh order.
        items: the items of the checkpoint from which the run continues; empty in a new
            run.
        decide: function from a config and devices to the plan for `auto`; by default
            the planner.
        formation: a name for this call, under which the processes find the broadcast
            plan. Must differ from the names of earlier calls, as long as this process
            is connected to the same coordination service.

    Raises:
        ConfigError: the plan file cannot be read or holds no plan, or the plan does not
            fit the number of devices or the batch.
        ValueError: `decide` raised it in this process, for example because no plan
            fits; or the recorded plan has another version.
    """
    asked = experiment.plan
    if not asked:
        return None
    known, num_known, text = recorded_plan(experiment, items), 0, ""
    if known is not None:
        num_known = items[ITEM].get("devices", used(known))
    is_same = known is not None and num_known == len(devices)
    if known is not None and (is_same or asked != AUTO):
        text = known.to_json()
    elif devices[0].process_index == jax.process_index():
        answer = (decide or _automatic) if asked == AUTO else _of_file
        text = answer(experiment, devices).to_json()
    first, key = devices[0].process_index, f"dtft/plan/{formation}"
    agreed = told_by(first, key, text, experiment.timeouts.start)
    plan = Plan.from_json(agreed)
    # A plan from a file may leave idle some of the devices that it was made for.
    is_made_for_these = known is None and _planned_for(plan) == len(devices)
    if not (is_same or asked == AUTO or is_made_for_these):
        plan = with_replicas(plan, len(devices))
    _check_idle(plan, devices)
    _check_batch(plan, experiment.data.global_batch)
    return PlanChoice(
        asked=asked,
        plan=plan,
        before="" if known is None or is_same else _sizes(known),
        num_devices=len(devices),
        here=_words(devices),
    )


def recorded_plan(experiment: Experiment, items: Mapping[str, Any]) -> Plan | None:
    """Returns the plan that a checkpoint's items record.

    Returns None if the items have no plan, if the config asks for no plan, or if the
    config's `plan` had another value when the plan was recorded.

    Raises:
        ValueError: the recorded plan has another version.
    """
    recorded = items.get(ITEM, {})
    if not experiment.plan or recorded.get("asked") != experiment.plan:
        return None
    return Plan.from_json(json.dumps(recorded["plan"]))


def used(plan: Plan) -> int:
    """Returns the number of devices of a plan's mesh."""
    return math.prod(plan.mesh.values())


def _planned_for(plan: Plan) -> int:
    """Returns the number of devices of the cluster that a plan was made for.

    If the plan's mesh has more devices, or `plan.cluster` cannot be parsed, returns the
    number of the mesh's devices.
    """
    try:
        return max(Cluster.parse(plan.cluster).num_devices, used(plan))
    except ValueError:  # `plan.cluster` may name a file that this machine lacks
        return used(plan)


def _check_idle(plan: Plan, devices: Sequence[Any]) -> None:
    """Checks that a plan leaves no device idle in a job of several processes.

    Raises:
        ConfigError: the plan leaves devices idle; the message has the number of devices
            that the plan uses, and the number of all devices.
    """
    processes = {device.process_index for device in devices}
    if used(plan) < len(devices) and len(processes) > 1:
        raise ConfigError(
            f"the plan's mesh {_sizes(plan)} uses {used(plan)} of {len(devices)} "
            f"devices, and each of the {len(processes)} processes of this job needs "
            f"its own in the mesh. Use {used(plan)} devices (fewer hosts), a plan for "
            "a batch that all devices divide (`dtft plan` names the nearest), or "
            "--plan auto, which leaves none out in such a job."
        )


def _check_batch(plan: Plan, batch: int) -> None:
    """Checks that all devices get equally many rows of a batch in each microbatch.

    Raises:
        ConfigError: the number of rows is no multiple of the devices along the batch's
            axes times the microbatches; the message names the next larger multiple.
    """
    specs = [spec[0] for spec in plan.batch.values() if spec]
    axes = max(specs, key=len, default=())
    parts = math.prod(plan.mesh.get(axis, 1) for axis in axes)
    micro = plan.knobs.microbatches
    if batch % (parts * micro):
        words = " x ".join(axes) or "one part"
        words += f", in {micro} microbatches" if micro > 1 else ""
        larger = -(-batch // (parts * micro)) * parts * micro
        raise ConfigError(
            f"data.global_batch={batch} is not divisible by {parts * micro} (the "
            f"plan's {words}): every part of the mesh takes equally many rows. Set "
            f"--data.global_batch {larger}, or use a plan for this batch: another "
            "--plan, or --plan auto."
        )


def _words(devices: Sequence[Any]) -> str:
    """Describes the type, the number and the links of devices in words.

    The text is written like `Plan.predicted_for`, so both can be compared. Returns ""
    if the planner does not know the device type, if devices are of several types, or if
    hosts have different numbers of devices.
    """
    try:
        return Cluster.from_devices(devices).uniform.fabric_words
    except ValueError:
        return ""


def with_replicas(plan: Plan, num_devices: int) -> Plan:
    """Returns the plan with the number of replicas that uses `num_devices` devices.

    A changed plan has neither `axes` (where the mesh axes lie in the cluster) nor
    `predicted_for` (the devices of its prediction), because both are for the old number
    of devices.

    Raises:
        ConfigError: no number of replicas fits the number of devices, or the plan's
            mesh has no axis `replica`.
    """
    others = math.prod(size for axis, size in plan.mesh.items() if axis != "replica")
    if num_devices == used(plan):
        return plan
    if num_devices % others or "replica" not in plan.mesh:
        allowed = f"multiples of {others}" if "replica" in plan.mesh else str(others)
        raise ConfigError(
            f"the plan's mesh {_sizes(plan)} does not fit {num_devices} devices. "
            f"Allowed: {allowed}. Use another number of devices, another --plan, or "
            "--plan auto, which is decided again when the number changes."
        )
    # `axes` and the prediction are for the old number of devices.
    mesh = {**plan.mesh, "replica": num_devices // others}
    return replace(plan, mesh=mesh, axes={}, predicted_for="")


def _sizes(plan: Plan) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())


def read(path: str) -> Plan:
    """Reads a plan from a file.

    Raises:
        ConfigError: the file cannot be read, or holds no plan.
    """
    try:
        return Plan.from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"plan={path!r} cannot be read ({error}). Allowed: auto, the path of a "
            "file that `dtft plan --json PATH` wrote, or nothing. Set --plan."
        ) from None
    except ValueError as error:
        raise ConfigError(f"plan={path!r}: {error}") from None


def _of_file(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    """Reads the plan from the file that a config names.

    If the plan was made for another model, optimizer or batch, its prediction does not
    hold, so `predicted_for` is cleared. `devices` is not used; the argument makes this
    function a `Decide`, a function from a config and devices to a plan.

    Raises:
        ConfigError: the file cannot be read, or holds no plan.
    """
    # Imported late, for the reason given in `_automatic`.
    from dtft.parallel.planning.auto import is_of

    plan = read(experiment.plan)
    return plan if is_of(plan, experiment) else replace(plan, predicted_for="")


def _automatic(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    # The planner's search is imported only for `auto`, so that trainers start faster.
    from dtft.parallel.planning.auto import automatic

    return automatic(experiment, devices)
