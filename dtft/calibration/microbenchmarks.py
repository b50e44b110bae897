"""Times single operations on the local devices: matmuls, convolutions, collectives.

All devices run an operation at once, as in a step, so times include contention for
shared cores and buses. An operation runs many times (turns) in a loop of one program.
`timed` subtracts the time of a program with one turn, so the host's time to start a
program does not count. Convolutions are timed without a loop. In a job of several
processes, all processes make the same calls and begin a program together. The time of
the last process to end counts: if processes share cores, the first process to end had
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
"""One turn of a loop on one device: maps the carried arrays to their next values."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkPace:
    """How long a timed loop runs, and how often it is timed."""

    budget_s: float = 0.01
    """Least duration of a timed loop, in seconds."""
    repeats: int = 5
    """Number of timings of a loop; the median counts."""

    def among(self, num_processes: int) -> "BenchmarkPace":
        """Returns the pace for a job of several processes: longer loops, fewer timings.

        Longer loops average out two effects: processes begin milliseconds apart, and
        during some turns a process shares its core with no other process.

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
    """Seconds of one iteration of a timed loop, and of starting the program.

    `dispatch_s` is the host's time to start the program.
    """

    seconds: float
    dispatch_s: float


def make_mesh(devices: Sequence[Any], inner: int, group: int) -> Mesh:
    """Makes a mesh of `devices` with the axes "outer", "group" and "inner".

    The axis "group" has `group` devices, `inner` positions apart in `devices`.
    """
    shape = (-1, group, inner)
    return Mesh(np.array(devices).reshape(shape), ("outer", "group", "inner"))


def make_loop(
    mesh: Mesh, body: Body, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> Callable[[int], float]:
    """Compiles a loop; returns a function that runs n turns and returns their seconds.

    Args:
        mesh: mesh of `make_mesh`; all devices of the mesh run the loop.
        body: one turn on one device; maps the carried arrays to their next values.
        shapes: shapes of the carried arrays on one device.
        dtype: dtype of these arrays.
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
    """Times one turn of a loop, without the time to start the program.

    Args:
        mesh: mesh of `make_mesh`; all devices of the mesh run the loop.
        body: one turn on one device; maps the carried arrays to their next values.
        shapes: shapes of the carried arrays on one device.
        dtype: dtype of these arrays.
        pace: duration and number of the timed loops.
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
    """Finds a number of turns for which a loop takes at least `budget_s` seconds.

    `run` runs a number of turns and returns their seconds. The result is equal on all
    processes, and at most 20,000 (`MOST_TURNS`) even if these take fewer seconds.
    """
    turns = 2
    while True:
        seconds = run(turns)
        if seconds >= budget_s or turns >= MOST_TURNS:
            return turns
        growth = min(16.0, 1.2 * budget_s / max(seconds, 1e-9))
        turns = min(MOST_TURNS, math.ceil(turns * max(1.5, growth)))


def agreed(seconds: float) -> float:
    """Returns the `seconds` of process 0; every process must call the function."""
    if jax.process_count() == 1:
        return seconds
    found = multihost_utils.broadcast_one_to_all(np.float32(seconds))
    return float(np.asarray(found))


def slowest(seconds: float) -> float:
    """Returns the largest `seconds` of all processes; waits until all have called."""
    if jax.process_count() == 1:
        return seconds
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def filled(
    mesh: Mesh, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], dtype: Any
) -> tuple[jax.Array, ...]:
    """Makes arrays of random values.

    With zeros, accelerators would need less power and would be faster. The host makes
    equal values for all devices, so no program has to be compiled.

    Args:
        mesh: mesh of `make_mesh`.
        shapes: shapes of the arrays on one device.
        specs: PartitionSpec of each array, which divides only its first dim.
        dtype: dtype of all arrays.
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
    """Times one matmul (m, k) by (k, n).

    An iteration of the timed loop has two matmuls: the second multiplies the result by
    (n, k). The time is half of that of an iteration.
    """

    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        return (x @ up) @ down, up, down

    found = timed(mesh, body, [(m, k), (k, n), (n, k)], dtype, pace)
    return TimedProgram(seconds=found.seconds / 2, dispatch_s=found.dispatch_s)


def stream_s(mesh: Mesh, num_bytes: int, pace: BenchmarkPace) -> TimedProgram:
    """Times an update that reads four arrays and writes three, like that of Adam.

    `num_bytes` is the sum of bytes read and written on one device.
    """

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
"""Functions that are timed to fit the cost of element-wise operators: the function, its
operations per element (`planner.ir.flops`), and how many of these operations are
special functions such as exp."""


def _norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    off = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return 1.1 * (x - mean) * lax.rsqrt(off + 1e-5)


def element_wise_s(
    mesh: Mesh, name: str, side: int, pace: BenchmarkPace
) -> TimedProgram:
    """Times an element-wise function on a (side, side) array of float32.

    `name` is the function's key in `ELEMENT_WISE`, such as "gelu".
    """
    function, _, _ = ELEMENT_WISE[name]
    return timed(mesh, lambda x: (function(x),), [(side, side)], jnp.float32, pace)


def strided_s(mesh: Mesh, side: int, pace: BenchmarkPace) -> float:
    """Measures the extra seconds per element to read an array in transposed order.

    Two loops on (side, side) arrays are timed: one reads an array, the other its
    transpose. Returns the difference of their seconds, at least 0, divided by the
    number of elements. In a training step, the optimizer reads a gradient in this order
    if a matmul has computed the transpose of the gradient. Both arrays change in every
    iteration; otherwise XLA would transpose before the loop.
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
"""The number of channels of an image."""
_NUM = 6
"""The number of convolutions that are timed together."""
GRADIENTS = _NUM / (3 * _NUM - 1)
"""Fraction of the convolutions in `convolution_s` that make a kernel's gradient."""
_SIDE = 3
"""Side of a kernel or window."""


def convolution_s(
    mesh: Mesh, rows: int, side: int, channels: int, pace: BenchmarkPace
) -> float:
    """Measures the seconds of one 3 by 3 convolution of (rows, side, side, channels).

    `rows` is the number of images on one device. Several convolutions in a row are
    timed, forward and backward. The result is the mean over all convolutions of both
    passes.
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
    """Measures the seconds of one 3 by 3 convolution of images with three channels.

    Only the forward pass is timed.

    Args:
        mesh: mesh of `make_mesh`.
        rows: the number of images on one device.
        side: side of an image.
        channels: output channels.
        pace: duration and number of the timings.
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
    """Times 3 by 3 max pooling, forward and backward, in seconds per window element.

    Returns the seconds of the forward and of the backward pass, divided by the number
    of outputs and by the 9 elements of a window. The input is (rows, side, side,
    channels). The forward pass has stride 1. The backward pass has stride 2, as in
    layers that reduce the size of images.
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
    """Measures the median seconds of a program that runs `body` once on each device.

    `shapes` are the shapes of the arguments of `body`. There is no loop, because XLA's
    CPU backend computes convolutions inside loops many times slower.
    """
    specs = [PartitionSpec(("outer", "group", "inner"))] * len(shapes)
    program = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
        )
    )
    arrays = filled(mesh, shapes, specs, jnp.float32)
    jax.block_until_ready(program(*arrays))
    slowest(0.0)  # waits for all processes to compile
    times = []
    for _ in range(max(pace.repeats, 1)):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        times.append(slowest(time.perf_counter() - begin))
    return median(times)


# ------------------------------------------- collectives: alone, behind and beside work

_COMPUTED = (256, 512), (512, 512)
"""Shapes of the operands of the matmuls before a timed collective."""
_MATMULS, _TURNS = 4, 5
"""`_MATMULS` is the number of matmuls of a turn. They take some milliseconds, like the
work between two collectives of a step. `_TURNS` is the number of turns."""
_LAYERS, _OF_LAYER, _FEW = 4, 2, 4
"""`_LAYERS` is the number of layers of a turn, each with one gather. `_OF_LAYER` is the
number of matmuls of a layer, and `_FEW` the number of turns."""


def collective_s(
    mesh: Mesh, kind: CollectiveKind, num_bytes: int, pace: BenchmarkPace
) -> TimedProgram:
    """Times one collective of float32 along the mesh axis `group`.

    `num_bytes` are the bytes of a device's operand; for an all-gather, of the result.
    """
    members = mesh.shape["group"]
    local = _local(kind, num_bytes, members)

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        return (collective(kind, x, members),)

    return timed(mesh, body, [(local,)], jnp.float32, pace)


def _local(kind: CollectiveKind, num_bytes: int, members: int) -> int:
    """Computes the number of float32 elements of a device's operand of a collective.

    `num_bytes` are the bytes of this operand; for an all-gather, of the result.
    `members` is the number of devices that take part.
    """
    size = num_bytes // 4 // members * members
    return size // members if kind == "all_gather" else size


def collective(kind: CollectiveKind, x: jax.Array, members: int) -> jax.Array:
    """Runs a collective along the mesh axis "group", which has `members` devices.

    Returns an array of x's shape, the operand of the loop's next turn.
    """
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
    # Takes the next member's part. A member's own part would equal the operand.
    other = (lax.axis_index("group") + 1) % members
    return lax.dynamic_slice(whole, (other * x.shape[0],), x.shape)


def overlap_s(
    mesh: Mesh, side: int, num_bytes: int, dtype: Any, pace: BenchmarkPace
) -> TimedProgram:
    """Times a matmul of two (side, side) matrices beside an all-reduce of `num_bytes`.

    The matmul and the all-reduce do not depend on each other, so they may run at the
    same time. `num_bytes` are the bytes of the all-reduce's operand on each device.
    `dtype` is the dtype of the matrices and of this operand.
    """
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
    """Measures the seconds that a collective adds to a loop of matmuls.

    Each iteration of the loop has matmuls, then `num` collectives that need their
    result. The next matmuls need the results of the collectives, so nothing overlaps.

    Each round times a loop of matmuls alone, then a loop with each size of collective,
    so that slow phases of the machine affect all loops.

    Args:
        mesh: mesh of `make_mesh`.
        all_bytes: sizes of the collective in bytes: of a device's operand, or for an
            all-gather of the result.
        rounds: number of timings of each loop; the median counts.
        kind: kind of the collectives.
        num: number of collectives of one size in a row, as for gradients.

    Returns:
        Seconds of one collective, for each size; because of noise, these may be 0 or
        less.
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
    """Times three loops: layers, gathers of the layers' parameters, and both together.

    A layer is a few matmuls. A gather does not depend on the result of a layer, so it
    can run while other layers compute. Each round times all three loops.

    Args:
        mesh: mesh of `make_mesh`.
        all_bytes: bytes of parameters of a layer; the layers of a loop use the sizes
            one after the other, and then again from the first.
        rounds: number of timings of each loop; the median counts.

    Returns:
        Seconds of one iteration of each loop: only the layers, only the gathers, and
        both.
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
    """Makes the body of one turn of `ahead_s`, with matmuls, gathers, or both.

    `members` is the number of devices that take part in a gather.
    """

    def body(x: jax.Array, by: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        after = []
        for part in parts:
            whole = collective("all_gather", part, members) if gathers else part
            for _ in range(_OF_LAYER if computes else 0):
                x = jnp.tanh(x @ by)
            x = x + 1e-3 * whole[0] if computes else x
            after.append(0.999 * whole)  # keeps the gather inside the loop
        return x, by, *after

    return body
