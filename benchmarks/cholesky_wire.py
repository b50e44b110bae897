"""The Cholesky wire where it wins: owners that factor for all, and a narrow wire.

    python benchmarks/cholesky_wire.py [--sizes 128,256] [--blocks 8] [--devices 4]

* Owners: every device needs the factors of all blocks (Shampoo, K-FAC).
  `alone` factors every block on every device; `owners` gives each device a share of
  the blocks and broadcasts the factors, so that it factors blocks/devices matrices.
* Narrow wire: the same bytes in bfloat16, as the packed matrix and as its factor; what
  arrives is factored and solved with. The packed matrix loses definiteness.
* Receiver: what a device does with what it got until it can solve: factor the matrix,
  or nothing but unpack.

The devices are simulated on this machine's cores, without links: times are of work.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from dtft.collectives import (
    broadcast_factor,
    cholesky_decode,
    cholesky_encode,
    pack_lower,
    unpack_lower,
    unpack_triangle,
)

CONDITION = 1e4


def definite(n: int, blocks: int) -> np.ndarray:
    """[blocks, n, n], float32, eigenvalues from 1 to 1/CONDITION."""
    random = np.random.default_rng(n)
    basis = np.linalg.qr(random.normal(size=(blocks, n, n)))[0]
    values = np.logspace(0, -np.log10(CONDITION), n)
    return ((basis * values) @ basis.swapaxes(1, 2)).astype(np.float32)


def seconds(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Medians; the functions take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            begun = time.perf_counter()
            jax.block_until_ready(function())
            if turn:  # the first compiles
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in times.items()}


def owners(n: int, blocks: int, devices: int, rounds: int) -> dict[str, float]:
    """Every device gets all factors: all factor all, or owners factor and broadcast."""
    mesh = jax.make_mesh((devices,), ("replica",), (AxisType.Auto,))
    share = blocks // devices
    matrices = jnp.asarray(definite(n, share * devices))

    def alone(all_BNN: jax.Array) -> jax.Array:
        return jax.lax.map(jnp.linalg.cholesky, all_BNN)

    def owned(all_BNN: jax.Array) -> jax.Array:
        parts = [
            broadcast_factor(all_BNN[i * share : (i + 1) * share], i, "replica")
            for i in range(devices)
        ]
        return jnp.concatenate(parts)

    programs = {name: on(mesh, f) for name, f in (("alone", alone), ("owners", owned))}
    return seconds(
        {name: lambda p=p: p(matrices) for name, p in programs.items()}, rounds
    )


def on(mesh: Mesh, function: Callable[[jax.Array], jax.Array]) -> Any:
    """A function of replicated matrices, run on every device; its first result."""
    mapped = jax.shard_map(
        lambda x: function(x)[:1],
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    return jax.jit(mapped)


def narrow(n: int) -> dict[str, dict[str, float | bool]]:
    """Smallest eigenvalue and solve error of a matrix that went by a bfloat16 wire."""
    matrix = jnp.asarray(definite(n, 1)[0])
    packed = pack_lower(matrix).astype(jnp.bfloat16)
    code = cholesky_encode(matrix, wire_dtype=jnp.bfloat16)
    arrived = {
        "packed": unpack_lower(packed, n).astype(jnp.float32),
        "cholesky": cholesky_decode(code.packed, n),
    }
    found: dict[str, dict[str, float | bool]] = {}
    for wire, received in arrived.items():
        values = np.linalg.eigvalsh(np.asarray(received, np.float64))
        factored = bool(jnp.isfinite(jnp.linalg.cholesky(received)).all())
        found[wire] = {
            "bytes": 2 * packed.size,
            "smallest_eigenvalue": float(values[0]),
            "factored": factored,
        }
    return found


def receiver(n: int, rounds: int) -> dict[str, float]:
    """Seconds from what arrived to a factor."""
    matrix = jnp.asarray(definite(n, 1)[0])
    packed, code = pack_lower(matrix), cholesky_encode(matrix).packed
    factor = jax.jit(lambda p: jnp.linalg.cholesky(unpack_lower(p, n)))
    unpack = jax.jit(lambda p: unpack_triangle(p, n))
    return seconds(
        {"packed": lambda: factor(packed), "cholesky": lambda: unpack(code)}, rounds
    )


def report(sizes: Sequence[int], blocks: int, devices: int, rounds: int) -> None:
    """Prints a line per size and comparison, and one JSON object."""
    results = {}
    for n in sizes:
        of = results[n] = {
            "owners": owners(n, blocks, devices, rounds),
            "narrow": narrow(n),
            "receiver": receiver(n, rounds),
        }
        alone, shared = of["owners"]["alone"], of["owners"]["owners"]
        print(
            f"n={n}, {blocks} blocks, {devices} devices: all factor all "
            f"{alone * 1e3:.1f} ms, owners factor and broadcast {shared * 1e3:.1f} ms: "
            f"{alone / shared:.2f}x"
        )
        for wire, got in of["narrow"].items():
            print(
                f"n={n}, bfloat16 {wire}: smallest eigenvalue "
                f"{got['smallest_eigenvalue']:+.1e} of {1 / CONDITION:.0e}, "
                f"{'factored' if got['factored'] else 'NOT definite'}"
            )
        packed, factor = of["receiver"]["packed"], of["receiver"]["cholesky"]
        print(
            f"n={n}, until the receiver can solve: packed {packed * 1e3:.2f} ms, "
            f"factor {factor * 1e3:.2f} ms: {packed / factor:.1f}x",
            flush=True,
        )
    print(json.dumps({"blocks": blocks, "devices": devices, "n": results}))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description="The Cholesky wire where it wins.",
    )
    parser.add_argument("--sizes", default="128,256", help="n, with commas")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)  # no effect on a GPU
    sizes = [int(n) for n in options.sizes.split(",")]
    report(sizes, options.blocks, options.devices, options.rounds)


if __name__ == "__main__":
    main()
