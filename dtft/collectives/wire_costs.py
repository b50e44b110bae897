"""Measures the time of each wire format of `all_reduce_symmetric` on a mesh.

The cheapest wire depends on the size of the matrices, the number of devices, the links
and the speed of factorization. The reduction is timed instead of modeled.
"""

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Wire = Literal["full", "packed", "cholesky"]
"""Wire format of a symmetric matrix, as documented in `all_reduce_symmetric`."""

WIRES: tuple[Wire, ...] = get_args(Wire)


@dataclass(frozen=True, kw_only=True)
class WireCosts:
    """Measured seconds of one all-reduce, by matrix size and wire format.

    A wire format is the form in which `all_reduce_symmetric` sends a symmetric matrix:
    "packed" (its lower triangle), "full", or "cholesky" (its Cholesky factor).

    Attributes:
        seconds: maps the number of rows n of a matrix to the seconds of each wire
            format. Must be equal on all processes, because every process chooses its
            wire format by these numbers.
    """

    seconds: Mapping[int, Mapping[Wire, float]]

    def __post_init__(self) -> None:
        """Raises a ValueError unless `seconds` has valid sizes.

        There must be at least one size. Every size must be 1 or more, and must have the
        seconds of at least one wire format.
        """
        sizes = self.seconds if isinstance(self.seconds, Mapping) else {}
        if not sizes or min(sizes) < 1 or not all(sizes.values()):
            raise ValueError(
                f"seconds={self.seconds!r}. Allowed: a dict of at least one size of 1 "
                "or more, each with the seconds of at least one wire. Pass what "
                "dtft.collectives.measure_wires returned."
            )

    def cheapest(self, n: int, wires: Collection[Wire] = WIRES) -> Wire:
        """Returns the fastest wire format for matrices of n rows, among `wires`.

        Compares the seconds that were measured at one size: the size whose ratio to n
        is nearest to 1. In the example this is 8 for n = 16, and 512 for n = 300.

        Raises:
            ValueError: none of the wire formats was measured at the nearest size.

        >>> costs = WireCosts(seconds={
        ...     8: {"packed": 2e-4, "full": 1e-4}, 512: {"packed": 1e-3, "full": 2e-3}})
        >>> costs.cheapest(16), costs.cheapest(300), costs.cheapest(8, ["packed"])
        ('full', 'packed', 'packed')
        """
        nearest = min(self.seconds, key=lambda m: abs(math.log(max(n, 1) / m)))
        found: dict[Wire, float] = {
            w: s for w, s in self.seconds[nearest].items() if w in wires
        }
        if not found:
            raise ValueError(
                f"costs has {sorted(self.seconds[nearest])} for n={nearest}, none of "
                f"which is possible here: {sorted(wires)}. Measure one of them too."
            )
        return min(found.items(), key=lambda item: item[1])[0]


def measure_wires(
    mesh: Mesh,
    axis_name: str,
    sizes: Sequence[int],
    *,
    wires: Collection[Wire] = WIRES,
    dtype: DTypeLike = jnp.float32,
    wire_dtype: DTypeLike | None = None,
    rounds: int = 5,
) -> WireCosts:
    """Times each wire format of `all_reduce_symmetric` over a mesh axis, in turn.

    Every process of the mesh must call the function. Each time is the median over the
    rounds on the slowest process, so all processes choose the same wire format.

    Args:
        mesh: Devices of the reduction.
        axis_name: Mesh axis of the reduction.
        sizes: Rows n of the matrices, 1 or more each.
        wires: Wire formats to compare; they run in the order of `WIRES`. Leave
            "cholesky" out if the jitter or the rounding of factors is not acceptable.
        dtype: Floating dtype of the matrices.
        wire_dtype: Dtype to which matrices, or their factors, are rounded before
            sending; None for no rounding.
        rounds: Timed runs of each wire format after one untimed run, 1 or more.

    Raises:
        ValueError: `sizes` or `wires` is empty, a size or `rounds` is below 1, or the
            axis or a wire is unknown.

    >>> mesh = jax.make_mesh((2,), ("replica",), (jax.sharding.AxisType.Auto,))
    >>> costs = measure_wires(mesh, "replica", [8], rounds=1)
    >>> costs.cheapest(8) in ("full", "packed", "cholesky")
    True
    """
    _check(mesh, axis_name, sizes, wires, rounds)
    # The order of a set differs between processes; that of collectives must not.
    wires = [wire for wire in WIRES if wire in wires]
    seconds: dict[int, dict[Wire, float]] = {}
    for n in sizes:
        programs: dict[Wire, jax.stages.Wrapped] = {
            w: _program(mesh, axis_name, w, wire_dtype) for w in wires
        }
        everywhere = NamedSharding(mesh, PartitionSpec())
        matrix = jax.device_put(np.eye(n, dtype=np.float32), everywhere).astype(dtype)
        for program in programs.values():
            jax.block_until_ready(program(matrix))
        times: dict[Wire, list[float]] = {wire: [] for wire in wires}
        for _ in range(rounds):
            for wire, program in programs.items():
                begun = time.perf_counter()
                jax.block_until_ready(program(matrix))
                times[wire].append(time.perf_counter() - begun)
        medians = [statistics.median(each) for each in times.values()]
        agreed = _largest(np.asarray(medians, np.float32), mesh)
        seconds[n] = dict(zip(times, agreed.tolist(), strict=True))
    return WireCosts(seconds=seconds)


def _program(
    mesh: Mesh, axis_name: str, wire: Wire, wire_dtype: DTypeLike | None
) -> jax.stages.Wrapped:
    from dtft.collectives.symmetric import all_reduce_symmetric

    def reduce(matrix: jax.Array) -> jax.Array:
        own = jax.lax.pcast(matrix, axis_name, to="varying")
        return all_reduce_symmetric(own, axis_name, wire=wire, wire_dtype=wire_dtype)

    return jax.jit(
        jax.shard_map(
            reduce, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
        )
    )


def _largest(own: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Returns the elementwise maximum of `own` over all processes of the mesh.

    `own` is this process's array [n]; every process gets the same result.
    """
    divided = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.make_array_from_callback(
        (mesh.size, len(own)), divided, lambda _: own[None]
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return np.asarray(
        jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=everywhere)(rows)
    )


def _check(
    mesh: Mesh,
    axis_name: str,
    sizes: Sequence[int],
    wires: Collection[Wire],
    rounds: int,
) -> None:
    if axis_name not in mesh.shape:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh. Allowed: "
            f"{', '.join(map(repr, mesh.axis_names))}."
        )
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise ValueError(
            f"sizes={list(sizes)}, rounds={rounds}. Allowed: at least one size, each 1 "
            "or more, and 1 round or more."
        )
    if not wires or set(wires) - set(WIRES):
        raise ValueError(f"wires={list(wires)}. Allowed: some of {WIRES}.")
