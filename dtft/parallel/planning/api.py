"""`dtft.plan`: from a user's step or loss and a cluster to a plan that can be run.

`dtft.planner` decides and never runs anything; this is its other half: the two entries,
what `cluster` stands for, and a plan with the meshes and NamedSharding trees of it,
which can be asked why.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dtft.checkpoint.state import to_paths
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
from dtft.parallel.sharding import mesh_of, sharding_tree
from dtft.planner import wording
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

# Plans that can be run, and asked why: their values with what JAX needs of them.
#
# `dtft.planner` decides and never runs anything; this is its other half: meshes and
# NamedSharding trees of a plan, and what the planner says of it.


@dataclass(frozen=True, kw_only=True)
class RunnablePlan(Plan):
    """A plan that can be put on devices, and asked why it is as it is."""

    decision: Decision | None = field(default=None, repr=False, compare=False)
    """What it was chosen from; None if it was read from a file."""

    @classmethod
    def of(cls, plan: Plan, decision: Decision | None = None) -> "RunnablePlan":
        """The same plan, such as one that was read from a file."""
        return cls(**_values(plan), decision=decision)

    @classmethod
    def from_json(cls, text: str) -> "RunnablePlan":
        """The plan of `to_json`; it can be run and explained, but not asked further.

        Raises:
            ValueError: another version, or not a plan.
        """
        return cls.of(Plan.from_json(text))

    def to_json(self) -> str:
        """The plan as JSON, versioned; equal plans give equal text."""
        return Plan(**_values(self)).to_json()

    def explain(self) -> str:
        """Where seconds and bytes go, what is sent, what else there was.

        With what its pins cost and what `lints()` finds, unless the plan was read from
        a file.
        """
        return wording.text(self.sections())

    def sections(self) -> tuple[Section, ...]:
        """The parts of `explain()`, for other ways to show them."""
        parts = plan_sections(self)
        if self.decision is None:
            return parts
        priced = pin_section(self.decision)
        return (*parts, *priced, lint_section(self.lints()))

    def diff(self, other: Plan) -> str:
        """What another plan does otherwise, and what that costs or saves.

        Raises:
            ValueError: `other` is no plan.
        """
        check_plan(other, "other")
        return diff(self, other)

    def why_not(self, **pins: Any) -> str:
        """What other knobs, such as `tensor=8`, would cost; or why they cannot be.

        Raises:
            ValueError: no knob is named, or the plan was read from a file.
        """
        return why_not(self._decision("why_not"), **pins)

    def sensitivity(self) -> str:
        """What faster links, more memory or more hosts would change; plans again.

        Raises:
            ValueError: the plan was read from a file.
        """
        return sensitivity(self._decision("sensitivity"))

    def lints(self) -> tuple[Lint, ...]:
        """Sizes, arrays and batches that cost what a small change would save.

        Raises:
            ValueError: the plan was read from a file.
        """
        return find_lints(self._decision("lints"))

    def html(self) -> str:
        """A report with pictures, in one file that needs nothing else."""
        return report_html(self, self.decision)

    def _decision(self, name: str) -> Decision:
        if self.decision is None:
            raise ValueError(
                f"{name}() looks at other plans of the same step, and a plan that was "
                "read from a file has no step. Make it again with dtft.plan(...); "
                "explain(), diff() and html() work without."
            )
        return self.decision

    def make_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The plan's mesh.

        Args:
            devices: in mesh order; by default all that JAX has.

        Raises:
            ValueError: there are not as many as the plan needs.
        """
        return mesh_of(self.mesh, devices)

    def shardings(self, mesh: Mesh, state: Any, batch: Any) -> tuple[Any, Any]:
        """A NamedSharding for every leaf of a state and of a batch, for any `jax.jit`.

        Args:
            mesh: of `make_mesh`.
            state: arrays or ShapeDtypeStructs; for entry loss the parameters.
            batch: arrays or ShapeDtypeStructs.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return (
            sharding_tree("state", state, self.state, mesh),
            sharding_tree("batch", batch, self.batch, mesh),
        )

    def axis_rules(self, params: Any) -> AxisRules:
        """The plan as Flax's rules from logical names to axes of the mesh.

        `flax.core.spmd.logical_axis_rules(plan.axis_rules(params).rules)` then shards a
        model that was written with logical names. A rule gives a name the same axes
        everywhere; arrays that the plan divides otherwise are the `exceptions`.

        Args:
            params: what the plan was made for, with its NNX variables
                (`nnx.state(model)`) or Linen boxes; entry step: the state.

        Raises:
            ValueError: no array has logical names, or one that has is not planned.
        """
        names = logical_names(params, self.state)
        shapes = {
            path.removesuffix("/value") if path not in names else path: leaf.shape
            for path, leaf in to_paths(params).items()
        }
        return axis_rules(self.state, names, shapes)

    def jit(self, step: Step, devices: Sequence[Any] | None = None) -> PlannedStep:
        """As `jit_plan`."""
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
    """How to shard a training step on a cluster, how fast it will be, whether it fits.

    Nothing is run and no array is made, but for a trial. Either a whole step,
    `plan(step=, state=, batch=)`, run with `.jit(step)`; or a loss, `plan(loss=,
    optimizer=, params=, batch=)`, run with `dtft.train.make_step`, which may also
    accumulate gradients over microbatches and compute parts of the loss again.

    Args:
        step: `step(state, batch) -> (state, anything)`.
        state: tree of arrays or ShapeDtypeStructs.
        loss: `loss(params, batch)`: a scalar, or a scalar and auxiliary values. It must
            be a mean over the batch: with `microbatches` above 1, which the planner may
            choose, what is taken is the mean of the parts' losses and gradients. Of a
            sum over the batch that would be one part's share, the sum divided by
            `microbatches`; pin `microbatches=1` for such a loss.
        optimizer: an optax transformation.
        params: tree of arrays or ShapeDtypeStructs.
        batch: the same; the first dim of each leaf is that of examples.
        cluster: such as `64x8xH100`, the path of a description, a Cluster, or None for
            the devices that JAX has. In a job of several processes a plan for as many
            devices as the job has leaves none of them out.
        calibration: what `dtft calibrate` measured on such devices, or the path of its
            file; its figures replace those of the catalog.
        what_if: looks also at knobs that cannot be run here.
        trial: runs so many of the best on the devices here, and takes the fastest.
        verify: how many of the best plans are compiled, for devices that need not
            exist; the first whose compiled memory fits is taken.
        **pins: knobs that are given: sizes of axes (`tensor=8`), `microbatches`,
            `remat`, `zero`, `offload`, `order` of the axes on the fabric; what-if:
            `virtual_stages` and `schedule` of a pipeline.

    Returns:
        The best plan.

    Raises:
        ValueError: arguments of neither or both entries, pins that cannot be met, an
            unknown device type, a calibration of another one; or nothing fits: by how
            much, and what would make it fit.
    """
    _check_knobs(pins, trial, verify)
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
        raise ValueError(
            f"{unknown[0]}= is neither an argument nor a knob."
            f"{did_you_mean(unknown[0])} Knobs: {', '.join(PINS)}; arguments: step, "
            "state, batch, or loss, optimizer, params, batch; and cluster, "
            "calibration, what_if, trial, verify."
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
    """Whether it is of several processes, each of which has to take part."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    return cluster.num_devices == jax.device_count()


def _workload(given: dict[str, Any]) -> Workload:
    """What is asked, from the arguments that are not None."""
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
    "what it closes over: with NNX, nnx.merge(graphdef, params, rest, copy=True).",
}
"""A note for errors of what is the user's."""
