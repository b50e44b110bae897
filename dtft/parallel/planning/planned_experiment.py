"""Builds the train step of an experiment from a plan.

The plan determines the shardings of arrays, and how gradients are computed and applied.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.config import Experiment
from dtft.parallel.functional_model import FunctionalModel, Metrics, State, functional
from dtft.parallel.plan_shardings import mesh_of, sharding_tree
from dtft.parallel.planning.planned_step import Update
from dtft.parallel.state_sharding import AXES
from dtft.parallel.step import Gradients, Means, Parallelism, TrainStep
from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.planner.types import Spec


def planned_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """Makes the plan's mesh.

    Axes that a config's mesh has and the plan lacks get size 1.

    Args:
        plan: the plan of the `PlanChoice` that `choose` returned.
        devices: devices in mesh order; the last ones stay idle if the plan uses fewer.

    Raises:
        ValueError: the plan needs more devices.
    """
    sizes = {axis: 1 for axis in AXES if axis not in plan.mesh} | dict(plan.mesh)
    return mesh_of(sizes, devices[: math.prod(sizes.values())])


def planned_train_step(experiment: Experiment, mesh: Mesh, plan: Plan) -> TrainStep:
    """Builds the train step of an experiment by a plan.

    The plan's shardings and settings (microbatches, remat, ZeRO level, offload) apply.

    Args:
        experiment: the config; model, optimizer and seed are used.
        mesh: the mesh that `planned_mesh` returned.
        plan: a plan for this experiment.

    Raises:
        ValueError: the plan cannot be run here, was made for another state, or divides
            the rows of two arrays of the batch over different axes; the model keeps
            arrays other than parameters and running statistics; or the optimizer
            communicates between replicas, which no plan describes.
    """
    check_runnable(plan, "loss", mesh.devices.flat[0].platform)
    if experiment.optim.reduces_itself:
        raise ValueError(
            "optim.sync: replicas that exchange moments themselves have a mesh of "
            "their own kind, which no plan describes. Leave --plan out."
        )
    experiment.optim.check_mesh(mesh.shape["tensor"])
    rows, model = rows_of(plan), functional(experiment.model, experiment.seed)

    def parallelize(abstract: State) -> Parallelism:
        params, opt_state = abstract["params"], abstract["opt_state"]
        update = Update.of(plan, mesh, params, opt_state)
        everywhere = NamedSharding(mesh, PartitionSpec())

        def whole(read: State) -> State:
            return {**read, "params": update.gathered(read["params"])}

        return Parallelism(
            state={
                **jax.tree.map(lambda _: everywhere, abstract),
                "params": update.of_params,
                "opt_state": update.of_optimizer(opt_state),
            },
            rows=rows,
            gradients=_gradients_of(model, update),
            apply=update.apply,
            evaluated=model.reading(whole),
        )

    return TrainStep(experiment.optim, model, mesh, parallelize)


def _gradients_of(model: FunctionalModel, update: Update) -> Gradients:
    """Makes a function from a state and a batch to gradients, metrics and statistics.

    The function returns a dict (`Means`): the gradients and metrics, averaged over the
    batch, and the model's new running statistics, such as those of batch normalization.
    The function applies the shardings and settings of the update's plan.
    """

    def loss(
        params: Any, batch: Any, statistics: Any
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        return model.mean_loss(params, statistics, batch)

    def means(state: State, batch: dict[str, jax.Array]) -> Means:
        of_batch = sharding_tree("batch", batch, update.plan.batch, update.mesh)
        batch = jax.lax.with_sharding_constraint(batch, of_batch)
        found = update.gradients(loss, None, state["statistics"])
        (_, (metrics, statistics)), gradients = found(state["params"], batch)
        return {"gradients": gradients, "statistics": statistics, "metrics": metrics}

    return means


def rows_of(plan: Plan) -> tuple[str, ...]:
    """Returns the mesh axes that divide the rows of the batch.

    Raises:
        ValueError: the axes are not the same for every array of the batch, or no array
            has dims.
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
