"""Compiles for H200s that are not there, with XLA's own GPU compiler (extra `aot`)."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from dtft.planner.aot import gpu_targets


@cache
def devices(count: int) -> Sequence[Any]:
    """`count` H200s of one host, to compile for; skips the test if that cannot be."""
    try:
        return gpu_targets.fake_gpus(
            gpu_targets.gpu_target("h200"), count, per_host=count
        )
    except ImportError as error:
        pytest.skip(f"{error} `make test` does.")


def mesh(**sizes: int) -> Mesh:
    """A mesh of H200s with axes of these names and sizes."""
    shape = tuple(sizes.values())
    grid = np.asarray(devices(int(np.prod(shape)))).reshape(shape)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def on_one(tree: Any) -> Any:
    """The shapes of `tree`, on one H200."""
    sharding = SingleDeviceSharding(devices(1)[0])
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )
