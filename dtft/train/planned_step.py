"""The step of a plan: from a loss, an optimizer and a plan to a compiled update.

`make_step` puts the plan's knobs into the program: gradients accumulated over
microbatches, parts of the loss computed again, optimizer state, gradients or parameters
divided. Decides nothing that the plan decides; must not know models, data or loops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.train.accumulate import Loss, Weight
from dtft.train.plan_arguments import check_function, check_optimizer, check_plan
from dtft.train.plan_shardings import mesh_of, sharding_tree, signature
from dtft.train.planned_update import Update

State = dict[str, Any]
"""`{"params": ..., "opt_state": ...}`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A plan's step. `state = step.init(params)`, then `step.step(state, batch)`."""

    plan: Plan
    """What is run."""
    mesh: Mesh
    """The plan's mesh over the devices."""
    _loss: Callable[..., Any]
    _optimizer: optax.GradientTransformation
    _weight: Weight | None
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def init(self, params: Any) -> State:
        """The state at step 0, each device with its part; `params` stay usable."""

        def make(params: Any) -> State:
            with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
                return {"params": params, "opt_state": self._optimizer.init(params)}

        return jax.jit(make, out_shardings=self.state_shardings(params))(params)

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """One optimizer step. `state` is donated: it cannot be used afterwards.

        Returns:
            The state, and what the loss returned for the whole batch.

        Raises:
            ValueError: state or batch are not those of the plan; names the path.
        """
        return self._jitted(state, batch)(state, batch)

    def lower(self, params: Any, batch: Any) -> jax.stages.Lowered:
        """The step for such parameters and batches, to be compiled without being run.

        Args:
            params: arrays or ShapeDtypeStructs.
            batch: arrays or ShapeDtypeStructs.
        """
        state = self._abstract(params)
        return self._jitted(state, batch).lower(state, batch)

    def state_shardings(self, params: Any) -> State:
        """A NamedSharding for every leaf of the state that `params` begin.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return self._state_shardings(self._abstract(params))

    def batch_shardings(self, batch: Any) -> Any:
        """A NamedSharding for every leaf of a batch.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return sharding_tree("batch", batch, self.plan.batch, self.mesh)

    def _abstract(self, params: Any) -> State:
        with jax.numpy_dtype_promotion("standard"):
            opt_state = jax.eval_shape(self._optimizer.init, params)
        like = jax.eval_shape(lambda tree: tree, params)
        return {"params": like, "opt_state": opt_state}

    def _state_shardings(self, state: State) -> State:
        plan, mesh = self.plan, self.mesh
        update = Update.of(plan, mesh, state["params"], state["opt_state"])
        return {
            "params": update.of_params,
            "opt_state": update.of_optimizer(state["opt_state"]),
        }

    def _jitted(self, state: State, batch: Any) -> Any:
        if not (isinstance(state, dict) and state.keys() == {"params", "opt_state"}):
            raise ValueError(
                f"state is {_kind(state)}. Allowed: what init(params) or the step "
                "before returned, a dict of params and opt_state."
            )
        key = signature((state, batch))
        if key not in self._compiled:
            self._compiled[key] = self._jit(state, batch)
        return self._compiled[key]

    def _jit(self, state: State, batch: Any) -> Any:
        of_state = self._state_shardings(state)
        return jax.jit(
            self._update(state),
            donate_argnums=0,
            in_shardings=(of_state, self.batch_shardings(batch)),
            out_shardings=(of_state, NamedSharding(self.mesh, PartitionSpec())),
        )

    def _update(self, like: State) -> Callable[[State, Any], tuple[State, Any]]:
        """The step as a plain function of state and batch."""
        planned = Update.of(self.plan, self.mesh, like["params"], like["opt_state"])
        gradients_of = planned.gradients(_with_aux(self._loss), self._weight)

        def update(state: State, batch: Any) -> tuple[State, Any]:
            params = state["params"]
            (value, aux), gradients = gradients_of(params, batch)
            after, opt_state = planned.apply(
                self._optimizer, gradients, state["opt_state"], params
            )
            result = (value, aux["aux"]) if aux else value
            return {"params": after, "opt_state": opt_state}, result

        return update


def make_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    weight: Weight | None = None,
    devices: Sequence[Any] | None = None,
) -> Step:
    """The training step that a plan of `dtft.plan(loss=...)` describes.

    Microbatches: rows of the batch (dim 0 of every array) in equal parts, each device
    its own; the result is the mean over the parts, weighted by `weight`. So a loss that
    is a mean over rows needs none, one that is a mean over unmasked tokens needs their
    number. Gradients are added up in their own dtype; what the loss returns beside its
    value must then be floating-point means, too.

    Rematerialization: by block, see `dtft.planner.ir.remat`.

    ZeRO: 1 updates each parameter where its optimizer state is, 2 keeps gradients
    divided alike, 3 gathers parameters over `fsdp` where they are used, in the backward
    pass again, see `dtft.train.gathered`.

    Args:
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`, a mean over the batch.
        optimizer: any optax transformation.
        plan: made for this loss, optimizer and shapes.
        weight: `(batch) -> scalar`, what a part counts in the mean over microbatches.
        devices: in mesh order; by default as many as it needs of those JAX has.

    Returns:
        The compiled step and its shardings.

    Raises:
        ValueError: something else in the place of the loss, the optimizer or the plan;
            the plan is of another entry point, has a knob that cannot be run here, or
            needs another number of devices.
    """
    check_function("loss", loss)
    check_optimizer(optimizer)
    check_plan(plan)
    mesh = mesh_of(plan.mesh, devices)
    check_runnable(plan, "loss", mesh.devices.flat[0].platform)
    return Step(plan=plan, mesh=mesh, _loss=loss, _optimizer=optimizer, _weight=weight)


def _kind(state: Any) -> str:
    if isinstance(state, dict):
        return f"a dict of {', '.join(map(str, state)) or 'nothing'}"
    return f"a {type(state).__name__}"


def _with_aux(loss: Callable[..., Any]) -> Loss:
    """A loss that always returns something beside its value."""

    def with_aux(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        result: Any = loss(params, batch)
        has_aux = isinstance(result, tuple) and len(result) == 2
        value, aux = cast(Any, result if has_aux else (result, None))
        return value, {"aux": aux} if has_aux else {}

    return with_aux
