"""One of several gloo processes that all-reduce: RANK NUM_PROCESSES ADDRESS DELAY_S."""

import hashlib
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.collectives import all_reduce, all_reduce_symmetric
from experiments import worlds

ALGORITHMS = ("native", "ring", "tree", "gather")


def main(rank: int, num: int, address: str, delay_s: float) -> None:
    """Answers with a digest and the error against float64 of every algorithm.

    Twice: of a reduction that all enter at once, and of one that this process enters
    late.
    """
    worlds.join(rank, num, address)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    rows = np.random.default_rng(0).normal(size=(num, 30, 30)).astype(np.float32)
    rows += rows.swapaxes(1, 2)
    mine = NamedSharding(mesh, PartitionSpec("replica"))
    x = jax.make_array_from_process_local_data(mine, rows[rank : rank + 1])

    def reduce_all(x_RNN: jax.Array) -> dict[str, jax.Array]:
        x_NN = x_RNN[0]
        results = {
            a: all_reduce(x_NN, "replica", op="mean", algorithm=a) for a in ALGORITHMS
        }
        results["again"] = all_reduce(x_NN + 0, "replica", op="mean", algorithm="ring")
        results["packed"] = all_reduce_symmetric(x_NN, "replica", op="mean")
        return results

    reduce_all = jax.jit(
        jax.shard_map(
            reduce_all,
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
        )
    )
    exact = rows.astype(np.float64).mean(0)
    rounds = []
    for delay in (0.0, delay_s):
        time.sleep(delay)
        reduced = reduce_all(x)
        results = {n: np.asarray(r.addressable_data(0)) for n, r in reduced.items()}
        rounds.append(
            {
                name: [
                    hashlib.sha256(result.tobytes()).hexdigest(),
                    float(np.abs(result - exact).max()),
                ]
                for name, result in results.items()
            }
        )
    worlds.answer(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
