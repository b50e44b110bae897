"""Models of the zoo that are neither transformers nor for images.

Legend: B examples, T positions, D width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.support.zoo_parts import (
    LOG_SOFTMAX,
    Model,
    array,
    cross_entropy,
    ints,
    over,
    split,
)


def mlp(batch: int = 256, widths: tuple[int, ...] = (784, 1024, 1024, 10)) -> Model:
    """Linear layers with rectifiers, in Flax."""

    def make() -> nnx.Module:
        rngs = nnx.Rngs(0)
        pairs = zip(widths[:-1], widths[1:], strict=True)
        return nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])

    graph, params = split(make, nnx.Param)

    def loss(params: Any, batch: Any) -> jax.Array:
        layers = nnx.merge(graph, params)
        x_BD = batch["x"]
        for layer in list(layers)[:-1]:
            x_BD = nnx.relu(layer(x_BD))
        return cross_entropy(list(layers)[-1](x_BD), batch["y"])

    pairs = zip(widths[:-1], widths[1:], strict=True)
    flops = sum(2 * batch * i * o + 2 * batch * o for i, o in pairs)
    flops += (LOG_SOFTMAX - 1) * batch * widths[-1]
    data = {"x": array(batch, widths[0]), "y": ints(batch)}
    return Model(name="mlp", loss=loss, params=params, batch=data, forward_flops=flops)


def rnn(
    batch: int = 64, time: int = 128, width: int = 512, vocabulary: int = 256
) -> Model:
    """An LSTM over time in `lax.scan`, of characters."""
    params = {
        "embed": array(vocabulary, width),
        "input": array(width, 4 * width),
        "hidden": array(width, 4 * width),
        "bias": array(4 * width),
        "logits": array(width, vocabulary),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x_TBD = params["embed"][batch["tokens"]].swapaxes(0, 1)

        def cell(carry: Any, x_BD: jax.Array) -> Any:
            h_BD, c_BD = carry
            gates = x_BD @ params["input"] + h_BD @ params["hidden"]
            i, f, g, o = jnp.split(gates + over(params["bias"], gates), 4, axis=-1)
            c_BD = jax.nn.sigmoid(f) * c_BD + jax.nn.sigmoid(i) * jnp.tanh(g)
            h_BD = jax.nn.sigmoid(o) * jnp.tanh(c_BD)
            return (h_BD, c_BD), h_BD

        zero = jnp.zeros(x_TBD.shape[1:], x_TBD.dtype)
        _, h_TBD = jax.lax.scan(cell, (zero, zero), x_TBD)
        return cross_entropy(h_TBD @ params["logits"], batch["labels"].swapaxes(0, 1))

    each = 2 * 2 * width * 4 * width + 2 * 4 * width + 9 * width
    each += 2 * width * vocabulary + LOG_SOFTMAX * vocabulary
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    return Model(
        name="rnn", loss=loss, params=params, batch=data,
        forward_flops=batch * time * each,
    )  # fmt: skip


def user_step(
    batch: int = 1024, items: int = 50_000, width: int = 128, hidden: int = 512
) -> Model:
    """Somebody's two-tower retrieval in plain JAX and optax: no Flax, own state."""
    params = {
        "users": array(items, width),
        "items": array(items, width),
        "towers": [
            {
                "w1": array(width, hidden),
                "b1": array(hidden),
                "w2": array(hidden, width),
            }
            for _ in range(2)
        ],
        "temperature": array(),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4))

    def tower(layer: Any, x: jax.Array) -> jax.Array:
        h = x @ layer["w1"]
        return jnp.tanh(h + over(layer["b1"], h)) @ layer["w2"]

    def loss(params: Any, batch: Any) -> jax.Array:
        u = tower(params["towers"][0], params["users"][batch["user"]])
        v = tower(params["towers"][1], params["items"][batch["item"]])
        scores = (u @ v.T) * jnp.exp(params["temperature"])
        return cross_entropy(scores, jnp.arange(scores.shape[0]))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, average = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params)
        return (params, opt_state, average), {"loss": value}

    flops = 2 * batch * (2 * 2 * width * hidden + 2 * hidden)
    flops += batch * batch * (2 * width + 1 + LOG_SOFTMAX)
    state = (params, jax.eval_shape(optimizer.init, params), params)
    return Model(
        name="user_step", loss=loss, params=params, optimizer=optimizer,
        batch={"user": ints(batch), "item": ints(batch)}, forward_flops=flops,
        own_step=step, own_state=state,
    )  # fmt: skip
