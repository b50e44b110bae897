"""Functions mapped over the devices of this process."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec


def over_devices(function: Any, num: int, *, check_vma: bool = True) -> Any:
    """The jitted function of [num, ...] rows on num devices, replicated result."""
    mesh = Mesh(np.array(jax.devices()[:num]), ("replica",))
    return jax.jit(
        jax.shard_map(
            lambda tree: function(jax.tree.map(lambda x: x[0], tree)),
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
