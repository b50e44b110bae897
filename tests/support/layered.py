"""Small networks whose layers are unrolled or stacked. B rows, D features, L layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

D, L = 8, 3


def batch(rows: int = 16) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(2, rows, D))
    return {"x": jnp.asarray(x, float), "y": jnp.asarray(y, float)}


def unrolled() -> dict[str, dict[str, jax.Array]]:
    random = np.random.default_rng(0)
    return {
        f"layer{i}": {
            "w": jnp.asarray(random.normal(size=(D, D)), float),
            "b": jnp.asarray(random.normal(size=(D,)), float),
        }
        for i in range(L)
    }


def stacked() -> dict[str, Any]:
    layers = [unrolled()[f"layer{i}"] for i in range(L)]
    return {
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        "scale": jnp.ones((D,)),
    }


def apply(layer: Any, x_BD: jax.Array) -> jax.Array:
    return jnp.tanh(x_BD @ layer["w"] + layer["b"][None, :])


def error(x_BD: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((x_BD - batch["y"]) ** 2)


def unrolled_loss(params: Any, batch: Any) -> jax.Array:
    x_BD = batch["x"]
    for i in range(L):
        x_BD = apply(params[f"layer{i}"], x_BD)
    return error(x_BD, batch)


def stacked_loss(
    params: Any,
    batch: Any,
    of_layer: Callable[[Any], Any] = lambda layer: layer,
    remat: bool = False,
) -> jax.Array:
    """`of_layer` wraps one layer's parameters, inside the body and outside of it."""

    def body(x_BD: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return apply(of_layer(layer), x_BD), None

    x_BD, _ = jax.lax.scan(
        jax.checkpoint(body) if remat else body, batch["x"], params["layers"]
    )
    return error(x_BD * of_layer(params["scale"])[None, :], batch)
