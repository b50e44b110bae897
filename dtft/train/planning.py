"""Plans that can be run: a plan's values with what JAX needs of them.

`dtft.planner` decides and never runs anything; this is its other half: meshes and
NamedSharding trees of a plan, and the user's own step compiled as planned. Must not
know how a plan is found, or losses and optimizers (`planned_step` does).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from dtft.checkpoint import tree
from dtft.planner.capabilities import check_runnable
from dtft.planner.plan import Plan
from dtft.train.constrained import constrained
from dtft.train.plan_shardings import mesh_of, sharding_tree, signature

Step = Callable[[Any, Any], tuple[Any, Any]]
"""`(state, batch) -> (state, anything)`."""


@dataclass(frozen=True, kw_only=True)
class RunnablePlan(Plan):
    """A plan that can be put on devices."""

    @classmethod
    def of(cls, plan: Plan) -> "RunnablePlan":
        """The same plan, such as one that was read from a file."""
        names = [part.name for part in dataclasses.fields(Plan)]
        return cls(**{name: getattr(plan, name) for name in names})

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

    def jit(self, step: Step, devices: Sequence[Any] | None = None) -> "PlannedStep":
        """As `jit_plan`."""
        return jit_plan(self, step, devices=devices)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A user's step, compiled on first use for each kind of state and batch."""

    plan: RunnablePlan
    """What it runs as."""
    mesh: Mesh
    """The plan's mesh over the devices."""
    _step: Step
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One step. `state` is donated: it cannot be used afterwards.

        Raises:
            ValueError: state or batch are not those of the plan; names the path.
        """
        known = len(self._compiled)
        jitted = self._jitted(state, batch)
        if len(self._compiled) > known:
            state = self.place(state)
        return jitted(state, batch)

    def place(self, state: Any) -> Any:
        """The state with each device's part on it.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return jax.device_put(
            state, sharding_tree("state", state, self.plan.state, self.mesh)
        )

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """The step for such states and batches, to be compiled without being run.

        Args:
            state: arrays or ShapeDtypeStructs.
            batch: arrays or ShapeDtypeStructs.
        """
        return self._jitted(state, batch).lower(state, batch)

    def _jitted(self, state: Any, batch: Any) -> Any:
        key = signature((state, batch))
        if key not in self._compiled:
            self._compiled[key] = self._jit(state, batch)
        return self._compiled[key]

    def _jit(self, state: Any, batch: Any) -> Any:
        of_state, of_batch = self.plan.shardings(self.mesh, state, batch)
        _check_result(jax.eval_shape(self._step, state, batch), state)
        return jax.jit(
            constrained(self._step, self.plan.constraints, self.mesh),
            donate_argnums=0,
            in_shardings=(of_state, of_batch),
            out_shardings=(of_state, None),
        )


def jit_plan(
    plan: Plan, step: Step, *, devices: Sequence[Any] | None = None
) -> PlannedStep:
    """The user's step as a plan of `dtft.plan(step=...)` says.

    State and batch have the plan's shardings, values inside the step its constraints;
    the mathematics is the step's own.

    Args:
        plan: made for this step and these shapes.
        step: `(state, batch) -> (state, anything)`; jitted or not.
        devices: in mesh order; by default all that JAX has.

    Raises:
        ValueError: the plan is of another entry point, has a knob that cannot be run
            here, or needs another number of devices.
    """
    runnable = RunnablePlan.of(plan)
    mesh = runnable.make_mesh(devices)
    check_runnable(plan, "step", mesh.devices.flat[0].platform)
    return PlannedStep(plan=runnable, mesh=mesh, _step=step)


def _check_result(result: Any, state: Any) -> None:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"step returned {type(result).__name__}. Allowed: a pair, the state after "
            "the step and anything else. Return (state, metrics)."
        )
    before, after = tree.to_paths(state), tree.to_paths(result[0])
    for path in {**before, **after}:
        shapes = [
            f"{part[path].dtype}{list(part[path].shape)}" if path in part else "nothing"
            for part in (before, after)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"step turned state {path!r} from {shapes[0]} into {shapes[1]}. "
                "Allowed: the same tree, shapes and dtypes, so that the state can be "
                "donated. Return the state first, in the form in which it was passed."
            )
