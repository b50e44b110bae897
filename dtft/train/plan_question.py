"""What a config asks of the planner: its loss, optimizer, parameters and batch.

Traces shapes only, on whatever device there is. Decides nothing; must not know plans,
clusters or how an answer is run (`planned_program`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtft.train.data import make_datasets
from dtft.train.experiment import Experiment
from dtft.train.functional_model import functional


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of the planner's entry `loss`."""

    loss: Callable[[Any, Any], tuple[jax.Array, Any]]
    """`(params, batch) -> (mean loss, (metrics, statistics))`; the program whose
    operators a plan's constraints number."""
    optimizer: optax.GradientTransformation
    """The config's."""
    params: Any
    """ShapeDtypeStructs."""
    batch: dict[str, jax.ShapeDtypeStruct]
    """ShapeDtypeStructs of a step's global batch."""


def asked_of(experiment: Experiment) -> Asked:
    """The question that a config asks.

    Raises:
        ValueError: the config cannot be planned.
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
    return Asked(
        loss=lambda params, batch: model.mean_loss(params, statistics, batch),
        optimizer=experiment.optim.build(None),
        params=model.abstract["params"],
        batch=_abstract_batch(experiment),
    )


def _abstract_batch(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    row = make_datasets(experiment.data, experiment.seed).train.batch([0])
    rows = experiment.data.global_batch
    return {
        name: jax.ShapeDtypeStruct((rows, *column.shape[1:]), column.dtype)
        for name, column in row.items()
        if name != "id"
    }
