"""One of two gloo processes that restore a step: DIRECTORY COORDINATOR RANK."""

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.storage.directory import StorageTier
from tests.support.states import same_bits, state


def main(directory: str, coordinator: str, rank: int) -> None:
    """Prints "same" when every shard of this process has the right bits."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, rank, initialization_timeout=90)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    specs = {"params/w": PartitionSpec("fsdp")}
    tier = StorageTier(directory, read_only=True)
    arrays, items = tier.restore(
        5,
        {
            path: jax.ShapeDtypeStruct(
                value.shape,
                value.dtype,
                sharding=NamedSharding(mesh, specs.get(path, PartitionSpec())),
            )
            for path, value in state().items()
        },
    )
    tier.close()
    same = items["position"] == 5 and all(
        same_bits(shard.data, value[shard.index])
        for path, value in state().items()
        for shard in arrays[path].addressable_shards
    )
    print("same" if same else "different", flush=True)
    jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
