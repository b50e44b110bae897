"""How parameters and optimizer moments are divided on a config's mesh without stages.

State marked `PerReplica` (`dtft.optim.per_replica`) has a leading replica dim, which
`local_updates.shardings` divides over `replica`. For `mesh.stage` above 1
`_state_sharding` in `pipeline` makes the shardings. A plan's specs come from
`dtft.planner.spmd.zero`, and `plan_shardings` applies them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from dtft.config import MeshConfig
from dtft.parallel import local_updates
from dtft.parallel.validation import resolve_mesh

AXES = ("replica", "stage", "fsdp", "tensor")
BATCH_AXES = ("replica", "fsdp")


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """Makes a mesh with the axes of `AXES` over devices in their given order.

    The last axis varies fastest.

    Raises:
        ValueError: the sizes do not fit the number of devices.
    """
    sizes = resolve_mesh(config, 1, len(devices))
    shape = tuple(getattr(sizes, name) for name in AXES)
    grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec_of(shape: tuple[int, ...], fsdp: int, tensor: int) -> PartitionSpec:
    """Returns the PartitionSpec of a state's array, by the sizes of two mesh axes.

    An array with two or more dims is divided over `tensor` in its last dim, if the size
    of this dim is a multiple of `tensor`. `fsdp` divides the largest remaining dim
    whose size is a multiple of `fsdp`; of equal dims, the first. An axis of size 1
    divides nothing.

    >>> tuple(spec_of((6, 8), fsdp=2, tensor=4))
    ('fsdp', 'tensor')
    >>> tuple(spec_of((7,), fsdp=2, tensor=1))
    ()
    """
    spec: list[str | None] = [None] * len(shape)
    if tensor > 1 and len(shape) >= 2 and shape[-1] % tensor == 0:
        spec[-1] = "tensor"
    free = [dim for dim, axis in enumerate(spec) if axis is None]
    fitting = [dim for dim in free if shape[dim] and shape[dim] % fsdp == 0]
    if fsdp > 1 and fitting:
        spec[max(fitting, key=lambda dim: (shape[dim], -dim))] = "fsdp"
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def state_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Returns a NamedSharding for every leaf of a state on a mesh without stages.

    The last dim of an array with two or more dims is divided over `tensor`, and the
    largest other dim over `fsdp`; dims that an axis does not divide evenly stay whole.
    A leading replica dim (leaves marked `PerReplica`) is divided over `replica`.

    Args:
        abstract: the state, or a part of it, as a tree of ShapeDtypeStructs.
        mesh: a mesh from `make_mesh`.
    """

    def of(shape: tuple[int, ...]) -> PartitionSpec:
        return spec_of(shape, mesh.shape["fsdp"], mesh.shape["tensor"])

    return local_updates.shardings(abstract, mesh, of)
