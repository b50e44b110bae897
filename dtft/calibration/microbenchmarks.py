"""Times of single operations on the devices at hand: computing, images, collectives.

Every device works at once, as in a step: devices that share cores or a bus are seen so.
An operation runs many times in a loop of one program, and the time of a program with
one turn is taken off, so what the host needs to start it does not count. In a job of
several processes all of them call this alike, they begin a program together, and its
time is that of the last to end: where processes share cores the first to end has had
more than its share.
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

from dtft.planner.cluster import CollectiveKind

MOST_TURNS = 20_000

Body = Callable[..., tuple[jax.Array, ...]]
"""One turn, on one device: from the arrays that the loop carries to the next ones."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkPace:
    """How long is measured."""

    budget_s: float = 0.01
    """Least duration of a loop that is timed."""
    repeats: int = 5
    """Times that it is timed; the median counts."""

    def among(self, num_processes: int) -> "BenchmarkPace":
        """Longer loops, fewer times, in a job of several processes.

        They begin milliseconds apart, find together after each time, and for some
        turns in a row one of them has a core for itself.

        >>> pace = BenchmarkPace(budget_s=0.5)
        >>> pace.among(1), pace.among(4)
        (BenchmarkPace(budget_s=0.5, repeats=5), BenchmarkPace(budget_s=1.0, repeats=3))
        """
        if num_processes == 1:
            return self
        repeats = math.ceil(self.repeats / 2)
        return BenchmarkPace(budget_s=2 * self.budget_s, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class TimedProgram:
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
    pace: BenchmarkPace,
) -> TimedProgram:
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
    return TimedProgram(seconds=each, dispatch_s=max(0.0, one - each))


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
    """The seconds that process 0 measured, broadcast to every process."""
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


def matmul_s(
    mesh: Mesh, m: int, n: int, k: int, dtype: Any, pace: BenchmarkPace
) -> TimedProgram:
    """One (m, k) by (k, n): half of what it and the way back to (m, k) take."""

    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        return (x @ up) @ down, up, down

    found = timed(mesh, body, [(m, k), (k, n), (n, k)], dtype, pace)
    return TimedProgram(seconds=found.seconds / 2, dispatch_s=found.dispatch_s)


def stream_s(mesh: Mesh, num_bytes: int, pace: BenchmarkPace) -> TimedProgram:
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


def element_wise_s(
    mesh: Mesh, name: str, side: int, pace: BenchmarkPace
) -> TimedProgram:
    """One of `ELEMENT_WISE` of (side, side) numbers."""
    function, _, _ = ELEMENT_WISE[name]
    return timed(mesh, lambda x: (function(x),), [(side, side)], jnp.float32, pace)


def strided_s(mesh: Mesh, side: int, pace: BenchmarkPace) -> float:
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


# ----------------------------------------------------------------- operations on images

COLOURS = 3
"""Channels of an image."""
_NUM = 6
"""Convolutions that are timed together."""
GRADIENTS = _NUM / (3 * _NUM - 1)
"""Share of them that make the gradient of a kernel, in `convolution_s`."""
_SIDE = 3
"""Of a kernel or window."""


def convolution_s(
    mesh: Mesh, rows: int, side: int, channels: int, pace: BenchmarkPace
) -> float:
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


def first_s(
    mesh: Mesh, rows: int, side: int, channels: int, pace: BenchmarkPace
) -> float:
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
    mesh: Mesh, rows: int, side: int, channels: int, pace: BenchmarkPace
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
    pace: BenchmarkPace,
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


# ------------------------------------------- collectives: alone, behind and beside work

_COMPUTED = (256, 512), (512, 512)
"""Operands of the matmuls that collectives are timed behind."""
_MATMULS, _TURNS = 4, 5
"""Of a turn, some milliseconds as between the collectives of a step; and turns."""
_LAYERS, _OF_LAYER, _FEW = 4, 2, 4
"""Gathers of a turn that computing needs one after another; matmuls before each; and
turns."""


def collective_s(
    mesh: Mesh, kind: CollectiveKind, num_bytes: int, pace: BenchmarkPace
) -> TimedProgram:
    """One collective of float32 along `group`; bytes as the planner counts them."""
    members = mesh.shape["group"]
    local = _local(kind, num_bytes, members)

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        return (collective(kind, x, members),)

    return timed(mesh, body, [(local,)], jnp.float32, pace)


def _local(kind: CollectiveKind, num_bytes: int, members: int) -> int:
    """Numbers that a device has, of so many bytes as the planner counts them."""
    size = num_bytes // 4 // members * members
    return size // members if kind == "all_gather" else size


def collective(kind: CollectiveKind, x: jax.Array, members: int) -> jax.Array:
    """A collective whose result has the operand's shape again, at little more cost."""
    if kind == "all_reduce":
        return lax.psum(x, "group")
    if kind == "permute":
        return lax.ppermute(
            x, "group", [(i, (i + 1) % members) for i in range(members)]
        )
    if kind == "all_to_all":
        parts = lax.all_to_all(x.reshape(members, -1), "group", 0, 0)
        return parts.reshape(x.shape)
    if kind == "reduce_scatter":
        part = lax.psum_scatter(x, "group", tiled=True)
        return lax.dynamic_update_slice(x, part, (0,))
    whole = lax.all_gather(x, "group", tiled=True)
    # The next member's part: taking back one's own would undo the gathering.
    other = (lax.axis_index("group") + 1) % members
    return lax.dynamic_slice(whole, (other * x.shape[0],), x.shape)


def overlap_s(
    mesh: Mesh, side: int, num_bytes: int, dtype: Any, pace: BenchmarkPace
) -> TimedProgram:
    """A square matmul, and an all-reduce that does not need it, in one turn."""
    members = mesh.shape["group"]

    def body(x: jax.Array, by: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return x @ by, by, collective("all_reduce", y, members)

    size = num_bytes // jnp.dtype(dtype).itemsize
    return timed(mesh, body, [(side, side), (side, side), (size,)], dtype, pace)


def behind_s(
    mesh: Mesh,
    all_bytes: Sequence[int],
    rounds: int,
    kind: CollectiveKind = "all_reduce",
    num: int = 1,
) -> list[float]:
    """What collectives add to matmuls that they wait for, and that wait for them.

    A loop with matmuls alone and one with each size of a collective, in turns: they
    are compared while the machine is equally fast.

    Args:
        mesh: of `make_mesh`.
        all_bytes: of the collectives.
        rounds: times that each is timed; the median counts.
        kind: of all of them.
        num: collectives behind each other, as of gradients; of one size.

    Returns:
        Seconds of one collective, for each size.
    """
    members = mesh.shape["group"]

    def computed(x: jax.Array, by: jax.Array) -> jax.Array:
        for _ in range(_MATMULS):
            x = jnp.tanh(x @ by)
        return x

    def alone(x: jax.Array, by: jax.Array) -> tuple[jax.Array, ...]:
        return computed(x, by), by

    def behind(x: jax.Array, by: jax.Array, *ys: jax.Array) -> tuple[jax.Array, ...]:
        x = computed(x, by)
        after = [collective(kind, y + x[0, 0], members) / members for y in ys]
        return sum((y[0] for y in after), x), by, *after

    sizes = [_local(kind, size, members) for size in all_bytes]
    loops = [make_loop(mesh, alone, _COMPUTED, jnp.float32)]
    loops += [
        make_loop(mesh, behind, [*_COMPUTED, *[(n,)] * num], jnp.float32) for n in sizes
    ]
    found: list[list[float]] = [[] for _ in all_bytes]
    for _ in range(rounds):
        without, *others = [run(_TURNS) for run in loops]
        for seconds, own in zip(others, found, strict=True):
            own.append((seconds - without) / _TURNS / num)
    return [median(own) for own in found]


def ahead_s(
    mesh: Mesh, all_bytes: Sequence[int], rounds: int
) -> tuple[float, float, float]:
    """Layers whose parameters are gathered, which waits for nothing that they compute.

    In turns, as in `behind_s`: only the layers, only the gathers, and both.

    Args:
        mesh: of `make_mesh`.
        all_bytes: of the parameters of layers, which have them by turns.
        rounds: times that each is timed; the median counts.

    Returns:
        Seconds of each.
    """
    members = mesh.shape["group"]
    some = [all_bytes[n % len(all_bytes)] for n in range(_LAYERS)]
    shapes = [*_COMPUTED, *[(_local("all_gather", n, members),) for n in some]]
    loops = [
        make_loop(mesh, _layers(members, *parts), shapes, jnp.float32)
        for parts in ((True, False), (False, True), (True, True))
    ]
    found = [[run(_FEW) / _FEW for run in loops] for _ in range(rounds)]
    computing, gathers, together = map(median, zip(*found, strict=True))
    return computing, gathers, together


def _layers(members: int, computes: bool, gathers: bool) -> Body:
    """One turn of `ahead_s`."""

    def body(x: jax.Array, by: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        after = []
        for part in parts:
            whole = collective("all_gather", part, members) if gathers else part
            for _ in range(_OF_LAYER if computes else 0):
                x = jnp.tanh(x @ by)
            x = x + 1e-3 * whole[0] if computes else x
            after.append(0.999 * whole)  # or it would be gathered before the loop
        return x, by, *after

    return body
