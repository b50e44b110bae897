"""Digits on frozen random features: most of the state is the same at every step."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx

from dtft.config import ClusterConfig, Experiment, SGDConfig, StopConfig
from dtft.data import DigitsConfig
from dtft.models.base import ModelConfig


class FrozenBase(nnx.Module):
    """A wide layer without gradients, and a small one that is trained on top of it."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        """Makes both layers."""
        self.base = nnx.Linear(64, width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Computes logits [B, 10] of images [B, 8, 8, 1]."""
        x_BF = self.base(x_BHWC.reshape(x_BHWC.shape[0], -1))
        return self.head(nnx.relu(jax.lax.stop_gradient(x_BF)))


@dataclass(frozen=True, kw_only=True)
class FrozenBaseConfig(ModelConfig):
    """Config of `FrozenBase`."""

    width: int = 2048

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the module."""
        return FrozenBase(self.width, rngs)

    def loss(
        self, model: Any, batch: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy [B], and whether each example is classified correctly [B]."""
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def config() -> Experiment:
    """The experiment: two hosts that share one model, which no other host has whole."""
    return Experiment(
        name="frozen_base",
        model=FrozenBaseConfig(),
        data=DigitsConfig(global_batch=96),
        optim=SGDConfig(learning_rate=0.05),
        cluster=ClusterConfig(hosts=2),
        stop=StopConfig(steps=1200),
    )
