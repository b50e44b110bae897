"""Transformers of the zoo: GPT in two forms, ViT, Llama-style, experts, adapters.

Legend: B examples, T positions, D width, N heads, K heads of keys and values, H width
of a head, F hidden width, V vocabulary, E experts, C capacity of an expert, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dtft.models.base import TransformerConfig
from tests.planner.zoo_parts import (
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


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * over(scale, x)


def _mixed(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Attention of [B, T, N, H] arrays."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5)
    if causal:
        length = scores.shape[-1]
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)[None]
        scores = jnp.where(mask[None, None], scores, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def _gpt_layers(layers: int, width: int, heads: int) -> dict[str, Any]:
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
        "layers": _gpt_layers(layers, width, heads),
        "norm": array(width),
    }

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = _layer_norm(x, p["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[name]) for name in "qkv")
        x = x + jnp.einsum("btnh,nhd->btd", _mixed(q, k, v), p["out"])
        y = _layer_norm(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]] + params["places"][None]
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = _layer_norm(x, params["norm"]) @ params["embed"].T
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


def llama(
    batch: int = 4, time: int = 2048, width: int = 2048, layers: int = 16,
    heads: int = 32, kv_heads: int = 8, hidden: int = 8192, vocabulary: int = 128_256,
    remat: bool = True,
) -> Model:  # fmt: skip
    """Grouped queries, rotary positions, SwiGLU, RMSNorm, bfloat16; scanned, remat."""
    head = width // heads

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype="bfloat16")

    params = {
        "embed": weight(vocabulary, width),
        "layers": {
            "norm1": weight(layers, width),
            "q": weight(layers, width, heads * head),
            "k": weight(layers, width, kv_heads * head),
            "v": weight(layers, width, kv_heads * head),
            "out": weight(layers, heads * head, width),
            "norm2": weight(layers, width),
            "gate": weight(layers, width, hidden),
            "up": weight(layers, width, hidden),
            "down": weight(layers, hidden, width),
        },
        "norm": weight(width),
        "logits": weight(width, vocabulary),
    }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * over(scale, x)

    def rotated(x: jax.Array) -> jax.Array:
        half = head // 2
        rate = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate[None]
        cos, sin = (f(angle).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = norm(x, p["norm1"])
        groups = heads // kv_heads
        q = rotated((y @ p["q"]).reshape(*x.shape[:2], heads, head))
        k = rotated((y @ p["k"]).reshape(*x.shape[:2], kv_heads, head))
        v = (y @ p["v"]).reshape(*x.shape[:2], kv_heads, head)
        q = q.reshape(*x.shape[:2], kv_heads, groups, head)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * (head**-0.5)
        length = x.shape[1]
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)[None]
        scores = jnp.where(mask[None, None, None], scores, jnp.array(-1e30, x.dtype))
        mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(*x.shape) @ p["out"]
        y = norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = norm(x, params["norm"]) @ params["logits"]
        return cross_entropy(logits.astype(jnp.float32), batch["labels"])

    tokens = batch * time
    each = attention_flops(tokens, time, width, heads, kv_heads * head)
    each += 2 * tokens * width * 3 * hidden + 3 * tokens * hidden
    each += tokens * width * (2 * RMS_NORM + 2) + 3 * tokens * head * (heads + kv_heads)
    flops = layers * each + tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    return Model(
        name="llama", loss=loss, params=params, batch=data, forward_flops=flops
    )


def moe(
    batch: int = 8, time: int = 1024, width: int = 1024, layers: int = 4,
    hidden: int = 4096, experts: int = 8, chosen: int = 2, heads: int = 16,
    vocabulary: int = 32_000,
) -> Model:  # fmt: skip
    """Experts behind a top-k router: one-hot dispatch and combine, capacity 1.25."""
    head = width // heads
    capacity = int(1.25 * chosen * time / experts)
    params = {
        "embed": array(vocabulary, width),
        "layers": [
            {
                "norm1": array(width),
                "qkv": array(width, 3, heads, head),
                "out": array(heads, head, width),
                "norm2": array(width),
                "router": array(width, experts),
                "up": array(experts, width, hidden),
                "down": array(experts, hidden, width),
            }
            for _ in range(layers)
        ],
    }

    def routed(x: jax.Array, p: Any) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("btd,de->bte", x, p["router"]))
        weights, choice = jax.lax.top_k(gates, chosen)
        hot = jax.nn.one_hot(choice, experts, dtype=x.dtype)  # [B, T, k, E]
        flat = hot.reshape(hot.shape[0], -1, experts)
        place = (jnp.cumsum(flat, axis=1) - 1).reshape(hot.shape)
        slot = jax.nn.one_hot(
            jnp.sum(place * hot, axis=-1).astype(jnp.int32), capacity, dtype=x.dtype
        )
        combine = jnp.einsum("btk,btke,btkc->btec", weights, hot, slot)
        dispatch = (combine > 0).astype(x.dtype)
        given = jnp.einsum("btec,btd->ebcd", dispatch, x)
        made = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", given, p["up"]))
        back = jnp.einsum("ebcf,efd->ebcd", made, p["down"])
        return jnp.einsum("ebcd,btec->btd", back, combine)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for p in params["layers"]:
            y = _layer_norm(x, p["norm1"])
            q, k, v = jnp.einsum("btd,dcnh->cbtnh", y, p["qkv"])
            x = x + jnp.einsum("btnh,nhd->btd", _mixed(q, k, v), p["out"])
            x = x + routed(_layer_norm(x, p["norm2"]), p)
        return cross_entropy(x @ params["embed"].T, batch["labels"])

    tokens = batch * time
    each = attention_flops(tokens, time, width, heads, width)
    each += 2 * tokens * width * experts + 2 * tokens * width * LAYER_NORM
    each += 2 * 2 * tokens * experts * capacity * width  # dispatch and combine
    each += 2 * tokens * chosen * experts * capacity  # of weights, experts, places
    each += 2 * 2 * batch * experts * capacity * width * hidden
    each += batch * experts * capacity * hidden
    flops = layers * each + tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    return Model(name="moe", loss=loss, params=params, batch=data, forward_flops=flops)


def lora(
    batch: int = 8, time: int = 512, width: int = 1024, layers: int = 8,
    heads: int = 16, rank: int = 16, vocabulary: int = 32_000,
) -> Model:  # fmt: skip
    """Adapters on queries and values of a frozen base; only they are trained."""
    head = width // heads
    base = {
        "embed": array(vocabulary, width),
        "layers": _gpt_layers(layers, width, heads),
    }
    adapters = {
        f"{name}_{part}": array(layers, *shape)
        for name in "qv"
        for part, shape in (("in", (width, rank)), ("out", (rank, heads, head)))
    }

    def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
        p, a = both
        y = _layer_norm(x, p["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[name]) for name in "qkv")
        q = q + jnp.einsum("btr,rnh->btnh", y @ a["q_in"], a["q_out"])
        v = v + jnp.einsum("btr,rnh->btnh", y @ a["v_in"], a["v_out"])
        x = x + jnp.einsum("btnh,nhd->btd", _mixed(q, k, v), p["out"])
        y = _layer_norm(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"], None

    def of(adapters: Any, base: Any, batch: Any) -> jax.Array:
        x = base["embed"][batch["tokens"]]
        x, _ = jax.lax.scan(layer, x, (base["layers"], adapters))
        return cross_entropy(x @ base["embed"].T, batch["labels"])

    def loss(params: Any, batch: Any) -> jax.Array:
        frozen = jax.lax.stop_gradient(params["base"])
        return of(params["adapters"], frozen, batch)

    optimizer = optax.adam(1e-4)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(of)(
            state["adapters"], state["base"], batch
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, after = optimizer.update(gradients, state["optimizer"])
            adapters = optax.apply_updates(state["adapters"], updates)
        return {**state, "adapters": adapters, "optimizer": after}, value

    tokens = batch * time
    each = attention_flops(tokens, time, width, heads, width)
    each += 2 * tokens * width * 8 * width + tokens * width * 4 * GELU
    each += 2 * 2 * 2 * tokens * width * rank + tokens * width * (2 * LAYER_NORM + 2)
    flops = layers * each + tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    state = {
        "base": base,
        "adapters": adapters,
        "optimizer": jax.eval_shape(optimizer.init, adapters),
    }
    return Model(
        name="lora", loss=loss, params={"base": base, "adapters": adapters},
        batch=data, forward_flops=flops, own_step=step, own_state=state,
    )  # fmt: skip
