"""Blocks of transformers, from whose compiled programs the rules of fusion were read.

Each block is two or four layers of one kind in a residual stream of [8, 1024, 1024], or
the head with its cross entropy. Weights are float32 and cast to the dtype of the block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

BATCH, TIME, WIDTH, HEADS, HIDDEN, VOCABULARY = 8, 1024, 1024, 16, 4096, 32000
Layer = Callable[[jax.Array, Any], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A loss of `params` and `batch`, which are shapes."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_MLP = {"up": _floats(WIDTH, HIDDEN), "down": _floats(HIDDEN, WIDTH)}
_GATED = {**_MLP, "gate": _floats(WIDTH, HIDDEN)}
_ATTENTION = {
    **{name: _floats(WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"},
    "out": _floats(HEADS, WIDTH // HEADS, WIDTH),
}
_SCALE = {"scale": _floats(WIDTH)}
_SCALE_2 = {"scale2": _floats(WIDTH)}


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    centred = y - jnp.mean(y, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    size = jnp.mean(y * y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(size + 1e-5) * scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    rate = 10_000 ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] / rate
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


def _attention(
    x: jax.Array,
    p: Any,
    *,
    rotary: bool = False,
    causal: bool = True,
    in_float32: bool = True,
) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "qkv")
    if rotary:
        q, k = _rotated(q), _rotated(k)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = scores.astype(jnp.float32) if in_float32 else scores
    scores = scores * (q.shape[-1] ** -0.5)
    if causal:
        seen = jnp.tril(jnp.ones((TIME, TIME), bool))
        scores = jnp.where(seen, scores, jnp.asarray(-1e30, scores.dtype))
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bnts,bsnh->btnh", shares, v)
    return jnp.einsum("btnh,nhd->btd", mixed, p["out"])


def _mlp(x: jax.Array, p: Any) -> jax.Array:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def _gated_mlp(x: jax.Array, p: Any) -> jax.Array:
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def _llama(x: jax.Array, p: Any) -> jax.Array:
    x = x + _attention(_rms_norm(x, p["scale"]), p, rotary=True)
    return x + _gated_mlp(_rms_norm(x, p["scale2"]), p)


def _block(
    layer: Layer,
    params: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str = "bfloat16",
    *,
    remat: bool = False,
    scanned: int = 0,
) -> Block:
    """Makes a block of two unrolled layers, or of `scanned` layers in a scan."""

    def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return layer(x, {name: one.astype(dtype) for name, one in p.items()}), None

    run = jax.checkpoint(body) if remat else body

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if scanned:
            x, _ = jax.lax.scan(run, x, params)
        else:
            for one in params:
                x, _ = run(x, one)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    stacked = {name: _floats(scanned, *p.shape) for name, p in params.items()}
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.dtype(dtype))
    return Block(loss=loss, params=stacked if scanned else [params] * 2, batch=x)


def _head(dtype: str) -> Block:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        logits = _layer_norm(x, params["scale"]) @ params["head"].astype(dtype)
        labels = jnp.zeros((BATCH, TIME), jnp.int32)
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), labels
        )
        return jnp.mean(each)

    params = {**_SCALE, "head": _floats(WIDTH, VOCABULARY)}
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.dtype(dtype))
    return Block(loss=loss, params=params, batch=x)


def _dense(x: jax.Array, p: Any) -> jax.Array:
    return x + _mlp(_layer_norm(x, p["scale"]), p)


def _gated(x: jax.Array, p: Any) -> jax.Array:
    return x + _gated_mlp(_rms_norm(x, p["scale"]), p)


def _attended(x: jax.Array, p: Any) -> jax.Array:
    return x + _attention(x, p)


def _rotary(x: jax.Array, p: Any) -> jax.Array:
    return x + _attention(_rms_norm(x, p["scale"]), p, rotary=True)


def _normed(x: jax.Array, p: Any) -> jax.Array:
    return x + _attention(_layer_norm(x, p["scale"]), p)


def blocks() -> dict[str, Block]:
    """The blocks by name."""
    found: dict[str, Block] = {}
    for dtype in ("bfloat16", "float32"):
        found |= {
            f"dense {dtype}": _block(_dense, {**_MLP, **_SCALE}, dtype),
            f"gated {dtype}": _block(_gated, {**_GATED, **_SCALE}, dtype),
            f"attention {dtype}": _block(_attended, _ATTENTION, dtype),
            f"rotary {dtype}": _block(_rotary, {**_ATTENTION, **_SCALE}, dtype),
            f"head {dtype}": _head(dtype),
        }
    llama = {**_ATTENTION, **_GATED, **_SCALE, **_SCALE_2}
    return found | {
        "softmax bfloat16": _block(
            lambda x, p: x + _attention(x, p, in_float32=False), _ATTENTION
        ),
        "attention to all": _block(
            lambda x, p: x + _attention(x, p, causal=False), _ATTENTION
        ),
        "dense, remat": _block(_dense, {**_MLP, **_SCALE}, remat=True),
        "attention, remat": _block(_normed, {**_ATTENTION, **_SCALE}, remat=True),
        "llama, scan": _block(_llama, llama, scanned=4),
        "llama, scan, remat": _block(_llama, llama, scanned=4, remat=True),
    }
