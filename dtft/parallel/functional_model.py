"""A model as pure functions of its parameters and running statistics.

Splits a Flax module into arrays and the rest once; what trains, evaluates or plans a
model works on the functions.

Legend: B rows.
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
"""The parts of the state that a model reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionalModel:
    """Pure functions of one model, to be traced."""

    init: Callable[[], State]
    """`() -> {"params", "statistics"}` at step 0."""
    losses: Callable[[State, dict[str, jax.Array], bool], tuple[Metrics, Any]]
    """`(read, batch, training)`: loss and metrics of each row, or of each token [B, T];
    the running statistics afterwards."""
    abstract: State
    """Shapes and dtypes of what `init` returns."""
    num_padding: int = 0
    """Numbers among the parameters that are never trained."""

    def mean_loss(
        self, params: Any, statistics: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        """What is differentiated: the mean over the batch, metrics, new statistics."""
        read = {"params": params, "statistics": statistics}
        values, statistics = self.losses(read, batch, True)
        means = {name: jnp.mean(value) for name, value in values.items()}
        return means["loss"], (means, statistics)

    def sums(
        self, read: State, batch: dict[str, jax.Array], weight_B: jax.Array
    ) -> Metrics:
        """Weighted sums over the batch of loss and metrics, in evaluation mode."""

        def total(values: jax.Array) -> jax.Array:
            values_B = jnp.mean(values.reshape(values.shape[0], -1), axis=1)
            return jnp.sum(values_B * weight_B)

        values, _ = self.losses(read, batch, False)
        return {name: total(value) for name, value in values.items()}

    def reading(self, prepare: Callable[[State], State]) -> "FunctionalModel":
        """The same model, which uses `prepare(read)`, such as gathered parameters."""

        def losses(
            read: State, batch: dict[str, jax.Array], training: bool
        ) -> tuple[Metrics, Any]:
            return self.losses(prepare(read), batch, training)

        return replace(self, losses=losses)


def functional(config: ModelConfig, seed: int) -> FunctionalModel:
    """A model's functions. Traces the model; allocates nothing.

    Args:
        config: of the model.
        seed: of its parameters at step 0.

    Raises:
        ValueError: the model keeps arrays of another kind.
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
    """The same module, set to train or to evaluate."""
    (model.train if training else model.eval)()
    return model


def _arrays(model: nnx.Module) -> State:
    return {
        "params": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        "statistics": nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    }
