"""Plans that can be run, and asked why: their values with what JAX needs of them.

`dtft.planner` decides and never runs anything; this is its other half: meshes and
NamedSharding trees of a plan, and what the planner says of it. Must not know how a plan
is found (`plan_entry` asks), or what its step consists of (`planned_step` does).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from dtft.checkpoint.state import to_paths
from dtft.planner import wording
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
from dtft.planner.search import Decision
from dtft.planner.wording import Section
from dtft.train.logical_names import logical_names
from dtft.train.plan_arguments import Step, check_plan
from dtft.train.plan_shardings import mesh_of, sharding_tree
from dtft.train.planned_step import PlannedStep, jit_plan


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
