"""A model as pure functions of its parameters and running statistics.

A Flax module is split once into its arrays and its graph. Training, evaluation and
planning call the functions of `FunctionalModel` with the arrays.

Legend: B rows, T tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dtft.checkpoint.state import to_paths
from dtft.models.base import ModelConfig

State = dict[str, Any]
Metrics = dict[str, jax.Array]
READ = ("params", "statistics")
"""Keys of a state's parameters and running statistics, which a model computes with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionalModel:
    """A model as pure functions, not jitted: initial parameters, losses and metrics."""

    init: Callable[[], State]
    """Function that makes `{"params", "statistics"}` at step 0."""
    losses: Callable[[State, dict[str, jax.Array], bool], tuple[Metrics, Any]]
    """Function `(read, batch, training)`, with `read` the parameters and statistics. It
    returns the loss and metrics of each row [B] or each token [B, T], and the new
    running statistics."""
    abstract: State
    """Shapes and dtypes of the result of `init`."""
    num_padding: int = 0
    """Number of padding scalars in the parameters; padding is never trained."""

    def mean_loss(
        self, params: Any, statistics: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        """Computes the mean loss of a batch in training mode.

        Returns `(mean loss, (means of loss and metrics, new statistics))`, as
        `jax.grad` with `has_aux` requires.
        """
        read = {"params": params, "statistics": statistics}
        values, statistics = self.losses(read, batch, True)
        means = {name: jnp.mean(value) for name, value in values.items()}
        return means["loss"], (means, statistics)

    def sums(
        self, read: State, batch: dict[str, jax.Array], weight_B: jax.Array
    ) -> Metrics:
        """Returns weighted sums of loss and metrics over the rows, in evaluation mode.

        The value of a row is the mean over its tokens.

        Args:
            read: the parameters and running statistics.
            batch: map from a name to an array with rows in dim 0.
            weight_B: the weight of each row, such as 0 for padding.
        """

        def total(values: jax.Array) -> jax.Array:
            values_B = jnp.mean(values.reshape(values.shape[0], -1), axis=1)
            return jnp.sum(values_B * weight_B)

        values, _ = self.losses(read, batch, False)
        return {name: total(value) for name, value in values.items()}

    def reading(self, prepare: Callable[[State], State]) -> "FunctionalModel":
        """Returns a model that applies `prepare` to its arrays before it uses them.

        `prepare` gets a caller's parameters and running statistics, and returns those
        with which the model computes losses and metrics. For example, it gathers
        divided parameters.
        """

        def losses(
            read: State, batch: dict[str, jax.Array], training: bool
        ) -> tuple[Metrics, Any]:
            return self.losses(prepare(read), batch, training)

        return replace(self, losses=losses)


def functional(config: ModelConfig, seed: int) -> FunctionalModel:
    """Makes the functions of a model. Traces the model without allocating arrays.

    Args:
        config: config of the model.
        seed: random seed of the parameters at step 0.

    Raises:
        ValueError: the model keeps arrays that are neither `nnx.Param` nor
            `nnx.BatchStat`.
    """
    abstract = nnx.eval_shape(lambda: config.build(nnx.Rngs(seed)))
    graph, _, _, rest = nnx.split(abstract, nnx.Param, nnx.BatchStat, ...)
    others = to_paths(nnx.to_pure_dict(rest))
    if others:
        raise ValueError(
            f"model {type(config).__name__} keeps {', '.join(others)} beside "
            "its parameters. Allowed: nnx.Param, and nnx.BatchStat for running "
            "statistics. Remove layers with random state, such as dropout."
        )

    def init() -> State:
        return _arrays(config.build(nnx.Rngs(seed)))

    def losses(
        read: State, batch: dict[str, jax.Array], training: bool
    ) -> tuple[Metrics, Any]:
        model = nnx.merge(graph, read["params"], read["statistics"])
        in_mode(model, training=training)
        losses, metrics = config.loss(model, batch)
        return {"loss": losses, **metrics}, _arrays(model)["statistics"]

    return FunctionalModel(init=init, losses=losses, abstract=_arrays(abstract))


def in_mode(model: Any, *, training: bool) -> Any:
    """Sets a module to training or evaluation mode, and returns the module."""
    (model.train if training else model.eval)()
    return model


def _arrays(model: nnx.Module) -> State:
    return {
        "params": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        "statistics": nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    }
