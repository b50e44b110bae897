"""Transformers of the zoo: GPT in two forms, ViT.

Legend: B examples, T positions, D width, N heads, H width of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dtft.models.base import TransformerConfig
from tests.support.zoo_parts import (
    LAYER_NORM,
    LOG_SOFTMAX,
    RMS_NORM,
    SOFTMAX,
    Model,
    array,
    cross_entropy,
    ints,
    over,
    split,
)

GELU = 9
"""Of the tanh form: cube, five products, two sums, tanh."""


def attention_flops(
    tokens: int, seen: int, width: int, heads: int, kv_width: int
) -> float:
    """Projections, scores, softmax with scale, mixing."""
    projections = 2 * tokens * width * (2 * width + 2 * kv_width)
    scores = tokens * seen * heads * (SOFTMAX + 1)
    return projections + 2 * 2 * tokens * seen * width + scores


def gpt(
    batch: int = 8, time: int = 1024, width: int = 768, layers: int = 12,
    heads: int = 12, vocabulary: int = 50257,
) -> Model:  # fmt: skip
    """GPT-2 small by default, unrolled: the Flax model of `dtft.models`."""
    config = TransformerConfig(
        vocabulary=vocabulary, context=time, num_layers=layers, width=width,
        num_heads=heads,
    )  # fmt: skip
    graph, params = split(lambda: config.build(nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, batch: Any) -> jax.Array:
        losses, _ = config.loss(nnx.merge(graph, params), batch)
        return jnp.mean(losses)

    tokens = batch * time
    layer = attention_flops(tokens, time, width, heads, width)
    layer += 2 * tokens * width * 8 * width + tokens * width * 4 * (GELU + 1)
    layer += tokens * width * (2 * RMS_NORM + 3)
    flops = layers * layer + tokens * width * (RMS_NORM + 1)
    flops += tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time + 1)}
    return Model(name="gpt", loss=loss, params=params, batch=data, forward_flops=flops)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the last dim; LAYER_NORM operations per element."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * over(scale, x)


def mixed(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Attention of [B, T, N, H] arrays."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5)
    if causal:
        length = scores.shape[-1]
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)[None]
        scores = jnp.where(mask[None, None], scores, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def gpt_layers(layers: int, width: int, heads: int) -> dict[str, Any]:
    """Parameters of GPT layers, stacked."""
    head = width // heads
    return {
        "norm1": array(layers, width),
        "q": array(layers, width, heads, head),
        "k": array(layers, width, heads, head),
        "v": array(layers, width, heads, head),
        "out": array(layers, heads, head, width),
        "norm2": array(layers, width),
        "up": array(layers, width, 4 * width),
        "down": array(layers, 4 * width, width),
    }


def gpt_scan(
    batch: int = 8, time: int = 1024, width: int = 768, layers: int = 12,
    heads: int = 12, vocabulary: int = 50257, remat: bool = False,
) -> Model:  # fmt: skip
    """The same with its layers stacked and in `lax.scan`, in plain JAX."""
    params = {
        "embed": array(vocabulary, width),
        "places": array(time, width),
        "layers": gpt_layers(layers, width, heads),
        "norm": array(width),
    }

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = layer_norm(x, p["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[name]) for name in "qkv")
        x = x + jnp.einsum("btnh,nhd->btd", mixed(q, k, v), p["out"])
        y = layer_norm(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]] + params["places"][None]
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = layer_norm(x, params["norm"]) @ params["embed"].T
        return cross_entropy(logits, batch["labels"])

    tokens = batch * time
    each = attention_flops(tokens, time, width, heads, width)
    each += 2 * tokens * width * 8 * width + tokens * width * 4 * GELU
    each += tokens * width * 2 * LAYER_NORM
    flops = layers * each + tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    return Model(
        name="gpt_scan", loss=loss, params=params, batch=data, forward_flops=flops
    )


def vit(
    batch: int = 64, size: int = 224, patch: int = 16, width: int = 768,
    layers: int = 12, heads: int = 12, classes: int = 1000,
) -> Model:  # fmt: skip
    """ViT-B/16 by default, of Flax's own layers; the classes from the mean token."""
    length = (size // patch) ** 2

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm1 = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                heads, width, decode=False, rngs=rngs
            )
            self.norm2 = nnx.LayerNorm(width, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class ViT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.patches = nnx.Conv(
                3, width, (patch, patch), strides=(patch, patch), rngs=rngs
            )
            self.places = nnx.Embed(length, width, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.classes = nnx.Linear(width, classes, rngs=rngs)

        def __call__(self, image: jax.Array) -> jax.Array:
            x = self.patches(image).reshape(image.shape[0], length, width)
            x = x + self.places(jnp.arange(length))[None]
            for block in self.blocks:
                x = block(x)
            return self.classes(jnp.mean(self.norm(x), axis=1))

    graph, params, rest = split(lambda: ViT(nnx.Rngs(0)), nnx.Param, ...)
    assert not jax.tree.leaves(rest)

    def loss(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graph, params)
        return cross_entropy(model(batch["image"]), batch["label"])

    tokens = batch * length
    layer = attention_flops(tokens, length, width, heads, width)
    layer += 2 * tokens * width * 8 * width + tokens * width * 4 * GELU
    layer += tokens * width * 2 * LAYER_NORM
    flops = layers * layer + 2 * tokens * width * 3 * patch**2
    flops += batch * classes * (2 * width + LOG_SOFTMAX)
    data = {"image": array(batch, size, size, 3), "label": ints(batch)}
    return Model(name="vit", loss=loss, params=params, batch=data, forward_flops=flops)
