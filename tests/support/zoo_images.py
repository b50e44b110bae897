"""Models of the zoo for images: ResNet and a diffusion U-Net.

Legend: B examples, H height, W width, C channels, D width of the time embedding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dtft.models.base import ResNetConfig
from tests.support.zoo_parts import LOG_SOFTMAX, SOFTMAX, Model, array, ints, split

BATCH_NORM = 6
"""Square, two sums, difference, product, shift."""
GROUP_NORM = 7
"""The same with a scale of its own."""


def resnet(
    batch: int = 256, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64, classes: int = 1000,
) -> Model:  # fmt: skip
    """ResNet-50 by default, of `dtft.models`, with batch statistics."""
    config = ResNetConfig(
        depths=depths, width=width, num_classes=classes, compute_dtype="float32"
    )
    graph, params, statistics = split(
        lambda: config.build(nnx.Rngs(0)), nnx.Param, nnx.BatchStat
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        # Training reads no running statistics, it only renews them.
        old = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), statistics)
        model = nnx.merge(graph, params, old)
        model.train()
        losses, _ = config.loss(model, batch)
        return jnp.mean(losses)

    data = {"image": array(batch, size, size, 3, dtype="uint8"), "label": ints(batch)}
    return Model(
        name="resnet", loss=loss, params=params, batch=data,
        forward_flops=batch * _resnet_flops(size, depths, width, classes),
        optimizer=optax.sgd(0.1, momentum=0.9),
    )  # fmt: skip


def _resnet_flops(
    size: int, depths: tuple[int, ...], width: int, classes: int
) -> float:
    """Of one image: convolutions, normalization, rectifiers, pooling, classes."""

    def conv(side: int, ins: int, outs: int, kernel: int) -> float:
        return side**2 * outs * (2 * ins * kernel**2 + BATCH_NORM)

    side = size // 2
    flops = conv(side, 3, width, 7) + side**2 * width + 3 * 3 * size**2
    side //= 2
    flops += 9 * side**2 * width
    channels = width
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        for index in range(depth):
            before = side
            side = side // 2 if stage and not index else side
            flops += conv(before, channels, inner, 1) + before**2 * inner
            flops += conv(side, inner, inner, 3) + side**2 * inner
            flops += conv(side, inner, 4 * inner, 1) + 2 * side**2 * 4 * inner
            if not index:
                flops += conv(side, channels, 4 * inner, 1)
            channels = 4 * inner
    return flops + side**2 * channels + classes * (2 * channels + LOG_SOFTMAX)


def unet(
    batch: int = 16, size: int = 64, width: int = 128,
    multiples: tuple[int, ...] = (1, 2, 4), channels: int = 3, groups: int = 32,
) -> Model:  # fmt: skip
    """Denoising diffusion: residual blocks, strided and transposed convolutions.

    Attention at the lowest resolution; the noise of a step is predicted.
    """
    time = 4 * width
    widths = [width * multiple for multiple in multiples]

    def res(ins: int, outs: int) -> dict[str, Any]:
        return {
            "norm1": array(ins), "conv1": array(3, 3, ins, outs),
            "time": array(time, outs),
            "norm2": array(outs), "conv2": array(3, 3, outs, outs),
            "skip": array(1, 1, ins, outs),
        }  # fmt: skip

    last = widths[-1]
    params = {
        "first": array(3, 3, channels, width),
        "time1": array(width, time),
        "time2": array(time, time),
        "down": [
            {"res": res(i, o), "half": array(3, 3, o, o)}
            for i, o in zip([width, *widths], widths, strict=False)
        ],
        "middle": res(last, last),
        "attention": {name: array(last, last) for name in ("q", "k", "v", "out")},
        "up": [
            {"double": array(4, 4, i, o), "res": res(2 * o, o)}
            for i, o in zip([last, *widths[::-1]], widths[::-1], strict=False)
        ],
        "last": array(3, 3, width, channels),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        rate = jnp.exp(-jnp.arange(width // 2, dtype=jnp.float32) * (9.2 / width))
        angle = batch["time"][:, None] * rate[None]
        t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        t = jax.nn.silu(jax.nn.silu(t @ params["time1"]) @ params["time2"])
        level = jnp.cos(batch["time"])[:, None, None, None]
        noisy = level * batch["image"] + jnp.sqrt(1 - level * level) * batch["noise"]
        guess = _denoised(params, noisy, t, groups)
        return jnp.mean(jnp.square(guess - batch["noise"]))

    data = {
        "image": array(batch, size, size, channels),
        "noise": array(batch, size, size, channels),
        "time": array(batch),
    }
    return Model(
        name="unet", loss=loss, params=params, batch=data,
        forward_flops=batch * _unet_flops(size, width, widths, channels),
    )  # fmt: skip


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _group_norm(x: jax.Array, scale: jax.Array, groups: int) -> jax.Array:
    groups = min(groups, x.shape[-1])
    y = x.reshape(*x.shape[:3], groups, -1)
    y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(y * y, axis=(1, 2, 4), keepdims=True)
    y = (y * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return jax.nn.silu(y * scale[None, None, None])


def _res(p: Any, x: jax.Array, t: jax.Array, groups: int) -> jax.Array:
    y = _conv(_group_norm(x, p["norm1"], groups), p["conv1"])
    y = y + (t @ p["time"])[:, None, None]
    y = _conv(_group_norm(y, p["norm2"], groups), p["conv2"])
    return y + _conv(x, p["skip"])


def _attended(p: Any, x: jax.Array) -> jax.Array:
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    q, k, v = flat @ p["q"], flat @ p["k"], flat @ p["v"]
    scores = jnp.einsum("btc,bsc->bts", q, k) * (x.shape[-1] ** -0.5)
    mixed = jnp.einsum("bts,bsc->btc", jax.nn.softmax(scores), v)
    return x + (mixed @ p["out"]).reshape(x.shape)


def _denoised(params: Any, x: jax.Array, t: jax.Array, groups: int) -> jax.Array:
    x = _conv(x, params["first"])
    kept = []
    for p in params["down"]:
        x = _res(p["res"], x, t, groups)
        kept.append(x)
        x = _conv(x, p["half"], stride=2)
    x = _attended(params["attention"], _res(params["middle"], x, t, groups))
    for p in params["up"]:
        x = jax.lax.conv_transpose(x, p["double"], (2, 2), "SAME")
        x = _res(p["res"], jnp.concatenate([x, kept.pop()], axis=-1), t, groups)
    return _conv(x, params["last"])


def _unet_flops(size: int, width: int, widths: list[int], channels: int) -> float:
    """Of one image: convolutions, normalization with its SiLU, attention, time."""
    time = 4 * width

    def res(side: int, ins: int, outs: int) -> float:
        products = 2 * 9 * ins * outs + 2 * 9 * outs * outs + 2 * ins * outs
        each = products + (ins + outs) * (GROUP_NORM + 2) + 2 * outs
        return side**2 * each + 2 * time * outs

    flops = 2 * 2 * size**2 * 9 * channels * width + 2 * (width * time + time * time)
    side, before = size, width
    for outs in widths:
        flops += res(side, before, outs)
        side //= 2
        flops += 2 * side**2 * 9 * outs * outs
        before = outs
    tokens = side**2
    flops += res(side, before, before) + 2 * 4 * tokens * before**2
    flops += 2 * 2 * tokens**2 * before + tokens**2 * (SOFTMAX + 1)
    for outs in widths[::-1]:
        flops += 2 * side**2 * 16 * before * outs  # each input meets the whole kernel
        side *= 2
        flops += res(side, 2 * outs, outs)
        before = outs
    return flops
