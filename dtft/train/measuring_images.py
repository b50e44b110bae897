"""Times of single operations on images: convolutions, maxima of windows.

As `measuring`: every device works at once, and in a job of several processes all of
them call this alike. Decides nothing about models or plans.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dtft.train.measuring import Pace, filled, slowest, timed

COLOURS = 3
"""Channels of an image."""
_NUM = 6
"""Convolutions that are timed together."""
GRADIENTS = _NUM / (3 * _NUM - 1)
"""Share of them that make the gradient of a kernel, in `convolution_s`."""
_SIDE = 3
"""Of a kernel or window."""


def convolution_s(mesh: Mesh, rows: int, side: int, channels: int, pace: Pace) -> float:
    """Seconds of one 3 by 3 convolution of (rows, side, side, channels), as in a step.

    Both passes of a few in a row.
    """

    def loss(kernels: jax.Array, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = _convolved(x, kernel)
        return jnp.sum(x * x)

    shapes = [
        (1, _NUM, _SIDE, _SIDE, channels, channels),
        (rows, side, side, channels),
    ]
    whole = _once_s(
        mesh, lambda kernels, x: jax.grad(loss)(kernels[0], x)[None], shapes, pace
    )
    return whole / (3 * _NUM - 1)  # the first needs no gradient of x


def first_s(mesh: Mesh, rows: int, side: int, channels: int, pace: Pace) -> float:
    """Seconds of one 3 by 3 convolution, forward, of (rows, side, side, `COLOURS`).

    Args:
        mesh: of `make_mesh`.
        rows: images of one device.
        side: of an image.
        channels: that come out.
        pace: how long is measured.
    """
    shapes = [
        (1, _NUM, _SIDE, _SIDE, COLOURS, channels),
        (rows, side, side, COLOURS),
    ]

    def all_of_them(kernels: jax.Array, x: jax.Array) -> jax.Array:
        return sum((_convolved(x, kernel) for kernel in kernels[0]), jnp.zeros(()))

    return _once_s(mesh, all_of_them, shapes, pace) / _NUM


def windows_s(
    mesh: Mesh, rows: int, side: int, channels: int, pace: Pace
) -> tuple[float, float]:
    """Seconds of one element of one window whose largest is taken, and of its gradient.

    Windows of 3 by 3 of (rows, side, side, channels): forward around every element, and
    back around every second one, as where images become smaller.
    """
    shape, fewer = (rows, side, side, channels), (rows, side // 2, side // 2, channels)

    def forward(x: jax.Array) -> tuple[jax.Array, ...]:
        return (0.9 * _largest(x, 1),)

    def back(x: jax.Array, by: jax.Array) -> tuple[jax.Array, ...]:
        return 0.9 * x + 0.1 * jax.vjp(lambda x: _largest(x, 2), x)[1](by)[0], by

    one, other = (
        timed(mesh, body, shapes, jnp.float32, pace).seconds
        / (math.prod(shapes[-1]) * _SIDE**2)
        for body, shapes in ((forward, [shape]), (back, [shape, fewer]))
    )
    return one, other


def _largest(x: jax.Array, stride: int) -> jax.Array:
    window, strides = (1, _SIDE, _SIDE, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def _convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _once_s(
    mesh: Mesh,
    body: Callable[..., jax.Array],
    shapes: Sequence[tuple[int, ...]],
    pace: Pace,
) -> float:
    """Seconds of a program without a loop: XLA's CPU backend computes convolutions
    inside of loops many times slower.
    """
    specs = [PartitionSpec(("outer", "group", "inner"))] * len(shapes)
    program = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
        )
    )
    arrays = filled(mesh, shapes, specs, jnp.float32)
    jax.block_until_ready(program(*arrays))
    slowest(0.0)  # compiling takes processes unlike times
    times = []
    for _ in range(max(pace.repeats, 1)):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        times.append(slowest(time.perf_counter() - begin))
    return median(times)
