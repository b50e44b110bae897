"""The program of an experiment that runs as a plan says.

The state, the model and what is logged are those of `step.Program`; where arrays are,
and how gradients are computed and applied, is the plan's. Decides nothing that the plan
decides; must not know how it was found, hosts, checkpoints or the loop.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.planner.types import Spec
from dtft.train.experiment import Experiment
from dtft.train.plan_shardings import mesh_of, sharding_tree
from dtft.train.planned_update import Update
from dtft.train.step import AXES, Metrics, Program, State


def planned_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """The plan's mesh, with axes of size 1 for those that every program names.

    Args:
        plan: of `plan_choice.choose`.
        devices: in slot order; those that the plan leaves idle are the last.

    Raises:
        ValueError: the plan needs more devices.
    """
    sizes = {axis: 1 for axis in AXES if axis not in plan.mesh} | dict(plan.mesh)
    return mesh_of(sizes, devices[: math.prod(sizes.values())])


class PlannedProgram(Program):
    """Init, step and evaluation of an experiment as planned."""

    def __init__(self, experiment: Experiment, mesh: Mesh, plan: Plan) -> None:
        """Traces the model; allocates nothing.

        Args:
            experiment: model, optimizer and seed.
            mesh: of `planned_mesh`.
            plan: of `plan_question.asked_of(experiment)`.

        Raises:
            ValueError: the plan cannot be run here, or was made for another state.
        """
        check_runnable(plan, "loss", mesh.devices.flat[0].platform)
        if experiment.optim.reduces_itself:
            raise ValueError(
                "optim.sync: replicas that exchange moments themselves have a mesh of "
                "their own kind, which no plan describes. Leave --plan out."
            )
        experiment.optim.check_mesh(mesh.shape["tensor"])
        self.plan: Plan | None = plan
        self._planned = plan
        self._rows = PartitionSpec(rows_of(plan))
        super().__init__(experiment, mesh)

    def _shardings(self, abstract: State) -> State:
        plan, mesh = self._planned, self.mesh
        everywhere = NamedSharding(mesh, PartitionSpec())
        opt_state = abstract["opt_state"]
        self._update = Update.of(plan, mesh, abstract["params"], opt_state)
        return {
            **jax.tree.map(lambda _: everywhere, abstract),
            "params": self._update.of_params,
            "opt_state": self._update.of_optimizer(opt_state),
        }

    def _whole(self, read: State, *, training: bool) -> State:
        if training:  # the update gathers each parameter where it is used
            return read
        return {**read, "params": self._update.gathered(read["params"])}

    def _descend(
        self, state: State, batch: dict[str, jax.Array]
    ) -> tuple[State, Metrics, Any]:
        def loss(
            params: Any, batch: Any, statistics: Any
        ) -> tuple[jax.Array, tuple[Metrics, Any]]:
            return self.mean_loss(params, statistics, batch)

        of_batch = sharding_tree("batch", batch, self._planned.batch, self.mesh)
        batch = jax.lax.with_sharding_constraint(batch, of_batch)
        gradients_of = self._update.gradients(loss, None, state["statistics"])
        (_, (metrics, statistics)), gradients = gradients_of(state["params"], batch)
        params, opt_state = self._update.apply(
            self._optimizer, gradients, state["opt_state"], state["params"]
        )
        parts = {"params": params, "statistics": statistics, "opt_state": opt_state}
        return parts, metrics, gradients


def rows_of(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that divide the rows of the batch.

    Raises:
        ValueError: not the same for every array.
    """
    found: set[Spec] = {spec[:1] for spec in plan.batch.values() if spec}
    if len(found) != 1:
        raise ValueError(
            f"the plan divides the rows of the batch in several ways: "
            f"{dict(plan.batch)}. Allowed: dim 0 of every array alike. Make the plan "
            "again for this config."
        )
    (spec,) = found
    return spec[0]
