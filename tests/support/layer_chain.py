"""A chain of equal layers and a head, whose collectives tests look at."""

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, ROWS = 4, 64, 512
PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
               "b": jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.float32)},
    "head": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
}  # fmt: skip
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
OPTIMIZER = optax.sgd(1e-3)


def loss(params, batch):
    def layer(x, one):
        return jnp.tanh(x @ one["w"] + one["b"][None, :]), None

    hidden, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.mean(jnp.square(hidden @ params["head"]))
