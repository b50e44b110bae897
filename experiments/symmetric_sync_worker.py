"""One of several gloo processes that all-reduce a symmetric matrix by each wire.

Arguments: RANK NUM_PROCESSES ADDRESS SIZES WIRES ROUNDS (lists with commas). It answers
with {n: {wire: {"seconds": [...], "bytes": [...]}}}: for each round how long this
process took, and the bytes that its interface sent. The wires take turns within a
round, so that all of them see the same machine.
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.collectives import all_reduce_symmetric
from experiments import links, worlds

PLAIN = "plain"
WIRES: dict[str, dict[str, Any]] = {
    "full": {"wire": "full"},
    "packed": {"wire": "packed"},
    "cholesky": {"wire": "cholesky"},
    "packed bfloat16": {"wire": "packed", "wire_dtype": jnp.bfloat16},
    "cholesky bfloat16": {"wire": "cholesky", "wire_dtype": jnp.bfloat16},
}
"""Name -> options of `all_reduce_symmetric`; `plain` is JAX's own `pmean`."""


def definite(n: int, condition: float) -> np.ndarray:
    """[n, n] float32 with eigenvalues from 1 down to 1/condition."""
    basis, _ = np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))
    values = np.logspace(0, -np.log10(condition), n)
    return ((basis * values) @ basis.T).astype(np.float32)


def main(
    rank: int, num: int, address: str, sizes: str, wires: str, rounds: str
) -> None:
    """Joins, measures, answers."""
    worlds.join(rank, num, address)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    found = {
        n: _measure(mesh, int(n), wires.split(","), int(rounds))
        for n in sizes.split(",")
    }
    worlds.answer(found)


def _measure(mesh: Mesh, n: int, wires: list[str], rounds: int) -> dict[str, Any]:
    sharding = NamedSharding(mesh, PartitionSpec("replica"))
    # What is in it does not matter here, only that it has a factor.
    own = (np.eye(n, dtype=np.float32) + np.float32(0.5) / n)[None]
    matrix = jax.make_array_from_process_local_data(sharding, own)
    programs = {wire: _program(mesh, wire) for wire in wires}
    for program in programs.values():
        jax.block_until_ready(program(matrix))
    found = {wire: {"seconds": [], "bytes": []} for wire in wires}
    together = _program(mesh, "full")
    small = jax.make_array_from_process_local_data(sharding, own[:, :1, :1])
    for _ in range(rounds):
        for wire, program in programs.items():
            jax.block_until_ready(together(small))
            sent, _ = links.bytes_through()
            begun = time.monotonic()
            jax.block_until_ready(program(matrix))
            found[wire]["seconds"].append(time.monotonic() - begun)
            jax.block_until_ready(
                together(small)
            )  # what others still forward through us
            found[wire]["bytes"].append(links.bytes_through()[0] - sent)
    return found


def _program(mesh: Mesh, wire: str) -> Any:
    def reduce(own: jax.Array) -> jax.Array:
        if wire == PLAIN:
            return jax.lax.pmean(own[0], "replica")
        return all_reduce_symmetric(own[0], "replica", op="mean", **WIRES[wire])

    return jax.jit(
        jax.shard_map(
            reduce,
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
