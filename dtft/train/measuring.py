"""Times of single operations on the devices at hand: matmuls, memory, element-wise.

Every device works at once, as in a step: devices that share cores or a bus are seen so.
An operation runs many times in a loop of one program, and the time of a program with
one turn is taken off, so what the host needs to start it does not count. In a job of
several processes all of them call this alike, they begin a program together, and its
time is that of the last to end: where processes share cores the first to end has had
more than its share. More of them are in `measuring_images` and `measuring_links`.
Decides nothing about models or plans.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MOST_TURNS = 20_000

Body = Callable[..., tuple[jax.Array, ...]]
"""One turn, on one device: from the arrays that the loop carries to the next ones."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long is measured."""

    budget_s: float = 0.01
    """Least duration of a loop that is timed."""
    repeats: int = 5
    """Times that it is timed; the median counts."""

    def among(self, num_processes: int) -> "Pace":
        """Longer loops, fewer times, in a job of several processes.

        They begin milliseconds apart, find together after each time, and for some
        turns in a row one of them has a core for itself.

        >>> Pace(budget_s=0.5).among(1), Pace(budget_s=0.5).among(4)
        (Pace(budget_s=0.5, repeats=5), Pace(budget_s=1.0, repeats=3))
        """
        if num_processes == 1:
            return self
        repeats = math.ceil(self.repeats / 2)
        return Pace(budget_s=2 * self.budget_s, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One turn, and what is needed besides to run a program of one turn."""

    seconds: float
    dispatch_s: float


def make_mesh(devices: Sequence[Any], inner: int, group: int) -> Mesh:
    """Devices as (outer, group, inner): members of a group are `inner` apart."""
    shape = (-1, group, inner)
    return Mesh(np.array(devices).reshape(shape), ("outer", "group", "inner"))


def make_loop(
    mesh: Mesh, body: Body, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> Callable[[int], float]:
    """A loop on every device: from a number of turns to the seconds that they take.

    Args:
        mesh: of `make_mesh`; every device of it runs the loop.
        body: one turn.
        shapes: of the arrays that it carries, on one device.
        dtype: of these arrays.
    """
    specs = tuple(
        PartitionSpec(("outer", "group", "inner"), *[None] * (len(shape) - 1))
        for shape in shapes
    )
    arrays = filled(mesh, shapes, specs, dtype)

    def loop(turns: jax.Array, *carried: jax.Array) -> tuple[jax.Array, ...]:
        return lax.fori_loop(0, turns, lambda _, state: body(*state), carried)

    program = jax.jit(
        jax.shard_map(
            loop,
            mesh=mesh,
            in_specs=(PartitionSpec(), *specs),
            out_specs=specs,
            check_vma=False,
        )
    )

    def run(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(np.int32(turns), *arrays))
        return slowest(time.perf_counter() - begin)

    run(1)
    return run


def timed(
    mesh: Mesh,
    body: Body,
    shapes: Sequence[tuple[int, ...]],
    dtype: Any,
    pace: Pace,
) -> Timed:
    """Seconds of one turn of a loop.

    Args:
        mesh: as for `make_loop`, like the next three.
        body: one turn.
        shapes: of the arrays that it carries, on one device.
        dtype: of these arrays.
        pace: how long is measured.
    """
    run = make_loop(mesh, body, shapes, dtype)
    turns = _turns(run, pace.budget_s)
    pairs = [(run(1), run(turns)) for _ in range(pace.repeats)]
    one = median(short for short, _ in pairs)
    each = median((long - short) / (turns - 1) for short, long in pairs)
    if each <= 0:  # lost in the noise of starting a program
        each = min(long for _, long in pairs) / turns
    return Timed(seconds=each, dispatch_s=max(0.0, one - each))


def _turns(run: Callable[[int], float], budget_s: float) -> int:
    """Turns that take about `budget_s`; every process comes to the same number."""
    turns = 2
    while True:
        seconds = run(turns)
        if seconds >= budget_s or turns >= MOST_TURNS:
            return turns
        growth = min(16.0, 1.2 * budget_s / max(seconds, 1e-9))
        turns = min(MOST_TURNS, math.ceil(turns * max(1.5, growth)))


def agreed(seconds: float) -> float:
    """The time that process 0 saw."""
    if jax.process_count() == 1:
        return seconds
    found = multihost_utils.broadcast_one_to_all(np.float32(seconds))
    return float(np.asarray(found))


def slowest(seconds: float) -> float:
    """The longest that any process saw; all go on from here together."""
    if jax.process_count() == 1:
        return seconds
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def filled(
    mesh: Mesh, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], dtype: Any
) -> tuple[jax.Array, ...]:
    """Random arrays: zeros are computed with less power, so faster, on accelerators.

    Made by the host, the same for every device: no program has to be compiled for it.

    Args:
        mesh: of `make_mesh`.
        shapes: on one device.
        specs: how each is divided along its first dim.
        dtype: of all.
    """
    values = np.random.default_rng(0).standard_normal(1021)
    made = []
    for shape, spec in zip(shapes, specs, strict=True):
        one = np.resize(values / math.sqrt(shape[0]), shape).astype(jnp.dtype(dtype))
        whole = (shape[0] * mesh.size, *shape[1:])
        sharding = NamedSharding(mesh, spec)
        made.append(jax.make_array_from_callback(whole, sharding, lambda _, a=one: a))
    return tuple(made)


def matmul_s(mesh: Mesh, m: int, n: int, k: int, dtype: Any, pace: Pace) -> Timed:
    """One (m, k) by (k, n): half of what it and the way back to (m, k) take."""

    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        return (x @ up) @ down, up, down

    found = timed(mesh, body, [(m, k), (k, n), (n, k)], dtype, pace)
    return Timed(seconds=found.seconds / 2, dispatch_s=found.dispatch_s)


def stream_s(mesh: Mesh, num_bytes: int, pace: Pace) -> Timed:
    """Reading four arrays and writing three, as Adam does: num_bytes together."""

    def body(
        x: jax.Array, mean: jax.Array, square: jax.Array, by: jax.Array
    ) -> tuple[jax.Array, ...]:
        mean = 0.9 * mean + 0.1 * by
        square = 0.99 * square + 0.01 * by * by
        return x - 1e-3 * mean / (jnp.sqrt(square) + 1e-8), mean, square, by

    return timed(mesh, body, [(num_bytes // 28,)] * 4, jnp.float32, pace)


ELEMENT_WISE: Mapping[str, tuple[Callable[[jax.Array], jax.Array], float, float]] = {
    "norm": (lambda x: _norm(x), 8, 0),
    "exp": (lambda x: jnp.exp(0.1 * x), 2, 1),
    "gelu": (lambda x: 1.1 * jax.nn.gelu(x), 10, 1),
    "softmax": (lambda x: jax.nn.softmax(1.1 * x, axis=-1), 6, 1),
}
"""What is timed to learn what operations cost that are no products: a function, its
operations per element (`planner.flops`), and those among them that are like exp."""


def _norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    off = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return 1.1 * (x - mean) * lax.rsqrt(off + 1e-5)


def element_wise_s(mesh: Mesh, name: str, side: int, pace: Pace) -> Timed:
    """One of `ELEMENT_WISE` of (side, side) numbers."""
    function, _, _ = ELEMENT_WISE[name]
    return timed(mesh, lambda x: (function(x),), [(side, side)], jnp.float32, pace)


def strided_s(mesh: Mesh, side: int, pace: Pace) -> float:
    """Seconds of one element read across the order in which elements lie.

    As an update reads a gradient that its product made transposed; beyond what reading
    it in that order takes. Both arrays change in every turn, or XLA would transpose one
    before the loop.
    """

    def along(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return 0.9 * x + 0.1 * y, x

    def across(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return 0.9 * x + 0.1 * y.T, x

    one, other = (
        timed(mesh, body, [(side, side)] * 2, jnp.float32, pace).seconds
        for body in (along, across)
    )
    return max(0.0, other - one) / side**2
