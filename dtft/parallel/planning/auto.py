"""Makes the plan for `plan=auto`: the planner's best for a config on given devices.

The config is converted to a loss, an optimizer, parameters and a batch, which are
traced with shapes only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtft.config import Experiment
from dtft.data import make_datasets
from dtft.parallel.functional_model import functional
from dtft.planner.cluster import Cluster
from dtft.planner.cost import Calibration, apply_calibration
from dtft.planner.plan import Plan
from dtft.planner.search import decide
from dtft.planner.workload import Workload, of_loss


@dataclass(frozen=True, kw_only=True)
class PlannerInputs:
    """The training step of a config, as arguments of `dtft.plan(loss=...)`."""

    loss: Callable[[Any, Any], tuple[jax.Array, Any]]
    """`(params, batch) -> (mean loss, (metrics, statistics))`. The operator numbers of
    a plan's constraints refer to the program of this function."""
    optimizer: optax.GradientTransformation
    """The config's optimizer."""
    params: Any
    """The model's parameters, as a tree of ShapeDtypeStructs."""
    batch: dict[str, jax.ShapeDtypeStruct]
    """Map from a name to the ShapeDtypeStruct of the array in the global batch."""


def asked_of(experiment: Experiment) -> PlannerInputs:
    """Converts a config to arguments of `dtft.plan(loss=...)`.

    Parameters and batch are ShapeDtypeStructs, so no arrays of their size are
    allocated.

    Raises:
        ValueError: the optimizer communicates between replicas, which no plan
            describes; or the model keeps arrays other than parameters and running
            statistics.
    """
    if experiment.optim.reduces_itself:
        raise ValueError(
            "optim.sync: replicas that exchange moments themselves have a mesh of "
            "their own kind, which no plan describes. Leave --plan out."
        )
    model = functional(experiment.model, experiment.seed)
    statistics = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.abstract["statistics"]
    )
    return PlannerInputs(
        loss=lambda params, batch: model.mean_loss(params, statistics, batch),
        optimizer=experiment.optim.build(None),
        params=model.abstract["params"],
        batch=_abstract_batch(experiment),
    )


def first_batch(experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns the first global batch of a config's training data, by array name."""
    return _rows(experiment, experiment.data.global_batch)


def _abstract_batch(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    rows = experiment.data.global_batch
    return {
        name: jax.ShapeDtypeStruct((rows, *column.shape[1:]), column.dtype)
        for name, column in _rows(experiment, 1).items()
    }


def _rows(experiment: Experiment, num: int) -> dict[str, np.ndarray]:
    columns = make_datasets(experiment.data, experiment.seed).train.batch(range(num))
    return {name: column for name, column in columns.items() if name != "id"}


def automatic(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    """Makes the planner's best plan for a config.

    If the devices belong to several processes, the plan uses all of the devices.

    Args:
        experiment: the config; model, optimizer, batch and calibration are used.
        devices: devices in mesh order.

    Raises:
        ValueError: no plan fits, the planner does not know the device type, devices are
            of several types, hosts have different numbers of devices, the calibration
            is of other devices, the optimizer communicates between replicas, or the
            model keeps arrays other than parameters and running statistics.
    """
    cluster = Cluster.from_devices(devices)
    if experiment.calibration:
        cluster = apply_calibration(cluster, Calibration.read(experiment.calibration))
    processes = {device.process_index for device in devices}
    return decide(_workload(experiment), cluster, whole=len(processes) > 1).plan


def is_of(plan: Plan, experiment: Experiment) -> bool:
    """Returns whether a plan is for the model, optimizer and batch of a config.

    Returns False also for a config that cannot be planned, because of its model or
    optimizer: its conversion or the tracing of its step raises ValueError.
    """
    try:
        return plan.model_hash == _workload(experiment).fingerprint
    except ValueError:  # no plan was made for a config that cannot be planned
        return False


def _workload(experiment: Experiment) -> Workload:
    asked = asked_of(experiment)
    return of_loss(asked.loss, asked.optimizer, asked.params, asked.batch)
