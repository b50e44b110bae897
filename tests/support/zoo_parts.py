"""What the models of the zoo are made of, and how their operations are counted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SOFTMAX = 5
"""Operations per element: maximum, difference, exponential, sum, quotient."""
LOG_SOFTMAX = 5
"""The same with a difference for the quotient."""
LAYER_NORM = 8
"""Sum, difference, square, sum, product, scale, shift, and the mean's share."""
RMS_NORM = 4
"""Square, sum, product, scale."""
ADAM = optax.adamw(1e-3)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the zoo."""

    name: str
    loss: Callable[[Any, Any], jax.Array]
    """Of parameters and a batch."""
    params: Any
    batch: Any
    forward_flops: float
    """Of the loss, by hand."""
    optimizer: optax.GradientTransformation = ADAM
    own_step: Callable[[Any, Any], Any] | None = None
    own_state: Any = None

    @property
    def step(self) -> Callable[[Any, Any], Any]:
        """A whole training step of (state, batch), opaque to the planner."""
        if self.own_step is not None:
            return self.own_step

        def step(state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch)
            with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
                updates, after = self.optimizer.update(
                    gradients, state["optimizer"], state["params"]
                )
                params = optax.apply_updates(state["params"], updates)
            return {"params": params, "optimizer": after}, loss

        return step

    @property
    def state(self) -> Any:
        """What the step takes first."""
        if self.own_state is not None:
            return self.own_state
        optimizer = jax.eval_shape(self.optimizer.init, self.params)
        return {"params": self.params, "optimizer": optimizer}


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    """An array that does not exist."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Tokens or labels."""
    return array(*shape, dtype="int32")


def over(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector as a factor or term of the last dim of `like`."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels; LOG_SOFTMAX operations per logit."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def split(make: Callable[[], nnx.Module], *kinds: Any) -> tuple[Any, ...]:
    """Graph and abstract states of a Flax module that is never allocated."""
    graph, *states = nnx.split(nnx.eval_shape(make), *kinds)
    return graph, *(nnx.to_pure_dict(state) for state in states)
