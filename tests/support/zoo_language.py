"""Language models of the zoo that are not plain: Llama-style, experts, adapters.

Legend: B examples, T positions, D width, N heads, K heads of keys and values, H width
of a head, F hidden width, V vocabulary, E experts, C capacity of an expert, L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.support.zoo_parts import (
    LAYER_NORM,
    LOG_SOFTMAX,
    RMS_NORM,
    Model,
    array,
    cross_entropy,
    ints,
    over,
)
from tests.support.zoo_transformers import (
    GELU,
    attention_flops,
    gpt_layers,
    layer_norm,
    mixed,
)


def llama(
    batch: int = 4, time: int = 2048, width: int = 2048, layers: int = 16,
    heads: int = 32, kv_heads: int = 8, hidden: int = 8192, vocabulary: int = 128_256,
    remat: bool = True, unrolled: bool = False,
) -> Model:  # fmt: skip
    """Grouped queries, rotary positions, SwiGLU, RMSNorm, bfloat16."""
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
        heard = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)
        x = x + heard.reshape(*x.shape) @ p["out"]
        y = norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        body = jax.checkpoint(layer) if remat else layer
        if unrolled:
            for i in range(layers):
                x, _ = body(x, {name: p[i] for name, p in params["layers"].items()})
        else:
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
    capacity = int(1.25 * chosen * time / experts)

    def routed(x: jax.Array, p: Any) -> jax.Array:
        weights, choice = _choice(x, p["router"], chosen)
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

    tokens = batch * time
    each = 2 * 2 * tokens * experts * capacity * width  # dispatch and combine
    each += 2 * tokens * chosen * experts * capacity  # of weights, experts, places
    each += 2 * 2 * batch * experts * capacity * width * hidden
    each += batch * experts * capacity * hidden
    return _of_experts(
        "moe", routed, each, batch=batch, time=time, width=width, layers=layers,
        hidden=hidden, experts=experts, heads=heads, vocabulary=vocabulary,
    )  # fmt: skip


def moe_sorted(
    batch: int = 8, time: int = 1024, width: int = 1024, layers: int = 4,
    hidden: int = 4096, experts: int = 8, chosen: int = 2, heads: int = 16,
    vocabulary: int = 32_000,
) -> Model:  # fmt: skip
    """The same without capacity: tokens sorted by expert, ragged products."""

    def routed(x: jax.Array, p: Any) -> jax.Array:
        rows = x.reshape(-1, width)
        weights, choice = _choice(rows, p["router"], chosen)
        order = jnp.argsort(choice.reshape(-1))
        sizes = jnp.bincount(choice.reshape(-1), length=experts).astype(jnp.int32)
        made = jax.nn.relu(jax.lax.ragged_dot(rows[order // chosen], p["up"], sizes))
        back = jax.lax.ragged_dot(made, p["down"], sizes)
        back = back * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(rows).at[order // chosen].add(back).reshape(x.shape)

    pairs = batch * time * chosen
    each = 2 * 2 * pairs * width * hidden + pairs * hidden + 2 * pairs * width
    return _of_experts(
        "moe_sorted", routed, each, batch=batch, time=time, width=width, layers=layers,
        hidden=hidden, experts=experts, heads=heads, vocabulary=vocabulary,
    )  # fmt: skip


def _choice(x: jax.Array, router: jax.Array, chosen: int) -> Any:
    """Weights and numbers of each token's experts."""
    return jax.lax.top_k(jax.nn.softmax(x @ router), chosen)


def _of_experts(
    name: str, routed: Callable[[jax.Array, Any], jax.Array], routed_flops: float, *,
    batch: int, time: int, width: int, layers: int, hidden: int, experts: int,
    heads: int, vocabulary: int,
) -> Model:  # fmt: skip
    """A language model with experts in place of the perceptron, unrolled."""
    head = width // heads
    layer = {
        "norm1": array(width),
        "qkv": array(width, 3, heads, head),
        "out": array(heads, head, width),
        "norm2": array(width),
        "router": array(width, experts),
        "up": array(experts, width, hidden),
        "down": array(experts, hidden, width),
    }
    params = {"embed": array(vocabulary, width), "layers": [layer] * layers}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for p in params["layers"]:
            y = layer_norm(x, p["norm1"])
            q, k, v = jnp.einsum("btd,dcnh->cbtnh", y, p["qkv"])
            x = x + jnp.einsum("btnh,nhd->btd", mixed(q, k, v), p["out"])
            x = x + routed(layer_norm(x, p["norm2"]), p)
        return cross_entropy(x @ params["embed"].T, batch["labels"])

    tokens = batch * time
    each = attention_flops(tokens, time, width, heads, width) + routed_flops
    each += 2 * tokens * width * experts + 2 * tokens * width * LAYER_NORM
    flops = layers * each + tokens * vocabulary * (2 * width + LOG_SOFTMAX)
    data = {"tokens": ints(batch, time), "labels": ints(batch, time)}
    return Model(name=name, loss=loss, params=params, batch=data, forward_flops=flops)


def lora(
    batch: int = 8, time: int = 512, width: int = 1024, layers: int = 8,
    heads: int = 16, rank: int = 16, vocabulary: int = 32_000,
) -> Model:  # fmt: skip
    """Adapters on queries and values of a frozen base; only they are trained."""
    head = width // heads
    base = {
        "embed": array(vocabulary, width),
        "layers": gpt_layers(layers, width, heads),
    }
    adapters = {
        f"{name}_{part}": array(layers, *shape)
        for name in "qv"
        for part, shape in (("in", (width, rank)), ("out", (rank, heads, head)))
    }

    def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
        p, a = both
        y = layer_norm(x, p["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[name]) for name in "qkv")
        q = q + jnp.einsum("btr,rnh->btnh", y @ a["q_in"], a["q_out"])
        v = v + jnp.einsum("btr,rnh->btnh", y @ a["v_in"], a["v_out"])
        x = x + jnp.einsum("btnh,nhd->btd", mixed(q, k, v), p["out"])
        y = layer_norm(x, p["norm2"])
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
