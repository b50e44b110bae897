"""`dtft.plan`: makes a runnable plan from a user's step or loss and a cluster.

`dtft.planner` searches for plans and never runs one. This module checks the arguments
of the two entry points, resolves `cluster`, and returns a `RunnablePlan`. A
`RunnablePlan` also makes JAX meshes and NamedShardings, and explains the plan.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dtft.checkpoint.state import to_paths
from dtft.parallel.plan_shardings import mesh_of, sharding_tree
from dtft.parallel.planning.inputs import (
    Step,
    check_plan,
    checked_loss,
    checked_step,
    entry_of,
    logical_names,
)
from dtft.parallel.planning.planned_step import PlannedStep, jit_plan
from dtft.parallel.planning.trial import try_plans
from dtft.parallel.planning.verify import first_fitting, verified
from dtft.planner import wording
from dtft.planner.arguments import check_flag
from dtft.planner.cluster import Cluster
from dtft.planner.cost import Calibration, apply_calibration
from dtft.planner.plan import Plan
from dtft.planner.report import (
    AxisRules,
    Lint,
    axis_rules,
    diff,
    find_lints,
    lint_section,
    pin_section,
    plan_sections,
    report_html,
    sensitivity,
    why_not,
)
from dtft.planner.search import PINS, Decision, decide, did_you_mean
from dtft.planner.wording import Section
from dtft.planner.workload import Workload, of_loss, of_step


@dataclass(frozen=True, kw_only=True)
class RunnablePlan(Plan):
    """A plan that makes its JAX mesh and shardings, and explains its selection."""

    decision: Decision | None = field(default=None, repr=False, compare=False)
    """The decision that selected the plan, with all candidates; None if the plan was
    read from a file."""

    @classmethod
    def of(cls, plan: Plan, decision: Decision | None = None) -> "RunnablePlan":
        """Makes a RunnablePlan with the values of `plan`.

        `decision` is the planner's decision that selected the plan, with all
        candidates; None if the plan was read from a file.
        """
        return cls(**_values(plan), decision=decision)

    @classmethod
    def from_json(cls, text: str) -> "RunnablePlan":
        """Reads a plan from the JSON that `to_json` writes.

        The plan has no `decision`. It can be run, explained and compared, but methods
        that need other plans (`why_not`, `sensitivity`, `lints`) raise ValueError.

        Raises:
            ValueError: the text has another version, or is not a plan.
        """
        return cls.of(Plan.from_json(text))

    def to_json(self) -> str:
        """Writes the plan, without `decision`, as JSON with the format's version.

        Equal plans give equal text.
        """
        return Plan(**_values(self)).to_json()

    def explain(self) -> str:
        """Explains the plan as text: its seconds, bytes, collectives and alternatives.

        The seconds of a step are listed by cause (compute, collectives and so on), the
        bytes by use (parameters, activations and so on). Unless the plan was read from
        a file, the text also has the findings of `lints()`, and the seconds of a step
        that each pin costs compared with the best plan without it. A pin is a setting
        that the user has fixed. The first call of this method or of `html()` plans
        again: without each pin, and with the changes that some findings propose. Later
        calls plan nothing.
        """
        return wording.text(self.sections())

    def sections(self) -> tuple[Section, ...]:
        """Returns the sections of `explain()`, for display in other formats."""
        return (*plan_sections(self), *self._planned_again)

    @cached_property
    def _planned_again(self) -> tuple[Section, ...]:
        """Report sections with the costs of the pins and the findings of `lints()`.

        A pin is a setting that the user has fixed. Its cost is in seconds of a step,
        compared with the best plan without the pin. Computed on the first use, because
        this plans again: without each pin, and with the changes that some findings
        propose. () for a plan from a file.
        """
        if self.decision is None:
            return ()
        return (*pin_section(self.decision), lint_section(self.lints()))

    def diff(self, other: Plan) -> str:
        """Compares the plan with another plan, as text.

        The text lists the differences in settings and shardings, and in predicted
        seconds of a step, bytes of a device and collectives.

        Raises:
            ValueError: `other` is no plan.
        """
        check_plan(other, "other")
        return diff(self, other)

    def why_not(self, **pins: Any) -> str:
        """Compares, as text, with a plan that has other settings, such as `tensor=8`.

        The other plan is the best one with these settings. The text compares the
        seconds of a step and the collectives; if that plan does not fit the memory, it
        compares the bytes of a device. If no plan can have the settings, the text says
        why.

        Args:
            **pins: the settings, named as the `pins` of `dtft.plan`.

        Raises:
            ValueError: no setting is given, or the plan was read from a file.
        """
        return why_not(self._decision("why_not"), **pins)

    def sensitivity(self) -> str:
        """Plans again for changed clusters; returns a table of the results as text.

        For each change the table has the best plan and its step time. The changes are
        faster links, more memory, faster memory, a higher peak of operations a second,
        and twice and half the number of hosts or devices.

        Raises:
            ValueError: the plan was read from a file.
        """
        return sensitivity(self._decision("sensitivity"))

    def lints(self) -> tuple[Lint, ...]:
        """Finds small changes of the model or batch that would save time or memory.

        Findings are, for example, sizes that do not suit the mesh axes, arrays that are
        whole on every device, and a batch that the devices do not divide evenly.

        Raises:
            ValueError: the plan was read from a file.
        """
        return self._lints

    @cached_property
    def _lints(self) -> tuple[Lint, ...]:
        return find_lints(self._decision("lints"))

    def html(self, checked: Iterable[Section] = ()) -> str:
        """Returns the report of the plan as one HTML page with embedded pictures.

        Args:
            checked: further sections, such as the compiler's check of the plan.
        """
        return report_html(self, self.decision, checked, self._planned_again)

    def _decision(self, name: str) -> Decision:
        if self.decision is None:
            raise ValueError(
                f"{name}() looks at other plans of the same step, and a plan that was "
                "read from a file has no step. Make it again with dtft.plan(...); "
                "explain(), diff() and html() work without."
            )
        return self.decision

    def make_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Makes the plan's mesh.

        Args:
            devices: devices in mesh order; by default JAX's devices: in a single
                process the first ones that the plan uses, in several processes all.

        Raises:
            ValueError: the number of devices is not the product of the mesh's sizes.
        """
        return mesh_of(self.mesh, devices)

    def shardings(self, mesh: Mesh, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns trees with a NamedSharding for each leaf of a state and of a batch.

        Args:
            mesh: the mesh that `make_mesh` returned.
            state: arrays or ShapeDtypeStructs; the parameters if the plan was made by
                `dtft.plan(loss=...)`.
            batch: arrays or ShapeDtypeStructs.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
        """
        return (
            sharding_tree("state", state, self.state, mesh),
            sharding_tree("batch", batch, self.batch, mesh),
        )

    def axis_rules(self, params: Any) -> AxisRules:
        """Converts the plan to Flax's rules from logical names to mesh axes.

        `flax.core.spmd.logical_axis_rules(plan.axis_rules(params).rules)` shards a
        model that was written with logical names. A rule gives a name the same axes in
        every array. Arrays that the plan divides differently are listed in the result's
        field `exceptions`.

        Args:
            params: the planned parameters, with NNX variables (`nnx.state(model)`) or
                Linen boxes; the planned state if the plan was made by
                `dtft.plan(step=...)`.

        Raises:
            ValueError: no array has logical names, the plan lacks an array with logical
                names, or an array does not have one name per dim.
        """
        names = logical_names(params, self.state)
        shapes = {
            path.removesuffix("/value") if path not in names else path: leaf.shape
            for path, leaf in to_paths(params).items()
        }
        return axis_rules(self.state, names, shapes)

    def jit(self, step: Step, devices: Sequence[Any] | None = None) -> PlannedStep:
        """Jits a user's step with this plan's shardings and sharding constraints.

        Args:
            step: `(state, batch) -> (state, anything)`, the step that was planned.
            devices: devices in mesh order; by default JAX's devices: in a single
                process the first ones that the plan uses, in several processes all.

        Raises:
            ValueError: the plan was not made by `dtft.plan(step=...)`, has a setting
                that cannot be run here, or needs another number of devices; or the step
                cannot be called.
        """
        return jit_plan(self, step, devices=devices)


def _values(plan: Plan) -> dict[str, Any]:
    return {part.name: getattr(plan, part.name) for part in dataclasses.fields(Plan)}


def plan(
    *,
    step: Step | None = None,
    state: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    params: Any = None,
    batch: Any = None,
    cluster: Cluster | str | Path | None = None,
    calibration: Calibration | str | Path | None = None,
    what_if: bool = False,
    trial: int = 0,
    verify: int = 0,
    **pins: Any,
) -> RunnablePlan:
    """Plans a training step on a cluster: shardings, settings, step time and memory.

    Runs nothing and allocates no arrays, except in a trial. There are two entry points.
    `plan(step=, state=, batch=)` plans a whole step, which `.jit(step)` compiles.
    `plan(loss=, optimizer=, params=, batch=)` plans the step of a loss, which
    `dtft.train.make_step` makes. `make_step` can also accumulate gradients over
    microbatches and rematerialize parts of the loss.

    Args:
        step: `step(state, batch) -> (state, anything)`.
        state: tree of arrays or ShapeDtypeStructs.
        loss: `loss(params, batch)`: a scalar, or a scalar and auxiliary values. The
            loss must be a mean over the batch, because with `microbatches` above 1,
            which the planner may choose, the step takes the mean of the microbatches'
            losses and gradients. For a sum over the batch this mean would be the sum
            divided by `microbatches`; pin `microbatches=1` for such a loss.
        optimizer: an optax transformation.
        params: tree of arrays or ShapeDtypeStructs.
        batch: tree of arrays or ShapeDtypeStructs with the examples in dim 0.
        cluster: text such as `64x8xH100`, the path of a description, a Cluster, or None
            for JAX's devices. In a job of several processes, if the cluster has as many
            devices as the job, the plan uses every device.
        calibration: result of `dtft calibrate` for the same device type, or the path of
            its file. The measured figures replace the figures of the catalog.
        what_if: whether the search includes settings that dtft cannot run for these
            arguments or on the cluster's platform.
        trial: number of best plans that are run on the devices here; the fastest is
            selected. 0 runs none. If `batch` has indices, pass arrays: a trial replaces
            a ShapeDtypeStruct of integers by zeros and ones, and equal indices take
            longer on a GPU.
        verify: number of best plans that are compiled, for devices that need not exist;
            the first plan whose compiled memory fits is selected. 0 compiles none.
        **pins: settings that the search must keep: sizes of axes (`tensor=8`),
            `microbatches`, `remat`, `zero`, `offload`, `order` of the axes on the
            fabric; with `what_if` also `virtual_stages`, `schedule` and `stage_layers`
            (layers of each stage) of a pipeline. More than 64 microbatches are
            planned only if they are pinned.

    Returns:
        The best plan.

    Raises:
        ValueError: an argument has a value that is not allowed, the arguments are
            neither those for a step nor those for a loss, `trial` and `verify` are both
            given, the pins cannot be met, the device type is unknown, the calibration
            is of other devices, or a trial cannot run here. Also if no plan fits; the
            message gives the missing bytes and the changes that would make a plan fit.
    """
    _check_knobs(pins, trial, verify)
    check_flag("what_if", what_if)
    given = {
        "step": step, "state": state, "loss": loss, "optimizer": optimizer,
        "params": params, "batch": batch,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    question = _workload(given)
    where = _cluster(cluster)
    if calibration is not None:
        where = apply_calibration(where, _calibration(calibration))
    whole = _of_this_job(where)
    decision = decide(question, where, pins, what_if=what_if, whole=whole)
    if trial:
        decision = try_plans(decision, given, trial)[0].decision
    if verify:
        found = verified(decision, given, num=verify)
        decision = first_fitting(found).decision
    return RunnablePlan.of(decision.plan, decision)


def _check_knobs(pins: Mapping[str, Any], trial: Any, verify: Any) -> None:
    if unknown := [name for name in pins if name not in PINS]:
        hint = did_you_mean(unknown[0])
        if unknown[0] in ("mesh", "axes"):
            hint = " Sizes of axes are given by name, such as tensor=8."
        raise ValueError(
            f"{unknown[0]}= is neither an argument nor a knob.{hint} Knobs: "
            f"{', '.join(PINS)}; arguments: step, state, batch, or loss, optimizer, "
            "params, batch; and cluster, calibration, what_if, trial, verify."
        )
    for name, number in (("trial", trial), ("verify", verify)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(
                f"{name}={number!r}. Allowed: how many of the best plans, such as "
                f"{name}=4, or 0."
            )
    if trial and verify:
        raise ValueError(
            f"trial={trial} and verify={verify}: what is run here needs no proof that "
            "it fits. Give one of them."
        )


def _calibration(given: Any) -> Calibration:
    if isinstance(given, str | Path):
        return Calibration.read(given)
    if not isinstance(given, Calibration):
        raise ValueError(
            f"calibration={given!r}. Allowed: the path of a file that `dtft calibrate "
            "--out` wrote, or a dtft.planner.Calibration."
        )
    return given


def _cluster(cluster: Any) -> Cluster:
    if cluster is None:
        return Cluster.from_devices(jax.devices())
    if isinstance(cluster, str | Path):
        return Cluster.parse(str(cluster))
    if not isinstance(cluster, Cluster):
        raise ValueError(
            f"cluster={cluster!r}. Allowed: text such as '64x8xH100', the path of a "
            "description, a dtft.planner.Cluster (of JAX's devices: "
            "dtft.planner.Cluster.from_devices(devices)), or None for the devices here."
        )
    return cluster


def _of_this_job(cluster: Cluster) -> bool:
    """Whether the job has several processes, and as many devices as the cluster."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    return cluster.num_devices == jax.device_count()


def _workload(given: dict[str, Any]) -> Workload:
    """Checks the arguments of `dtft.plan`, and traces the step for the planner.

    `given` has the arguments that are not None, by name. An error raised while tracing
    gets a note that names the traced function.

    Raises:
        ValueError: an argument is missing, is one too many, or has a value that is not
            allowed; or the step returns another state than it takes, or the loss no
            scalar.
    """
    entry = entry_of(given)
    try:
        if entry == "step":
            step = checked_step(given["step"], given["state"])
            return of_step(**{**given, "step": step})
        return of_loss(**{**given, "loss": checked_loss(given["loss"])})
    except Exception as error:
        error.add_note(_TRACED[entry])
        raise


_TRACED = {
    "step": "This was raised while dtft.plan traced step(state, batch).",
    "loss": "This was raised while dtft.plan traced loss(params, batch), its gradient "
    "and optimizer.update(gradients, optimizer_state, params). A loss must not change "
    "what it closes over: with NNX, nnx.merge(graphdef, params, rest, copy=True). An "
    "optimizer whose update needs more, such as optax.lbfgs, is planned by step=.",
}
"""Map from an entry point (`step`, `loss`) to a note that `_workload` adds to errors
raised while the user's function is traced."""
