"""From a plan's mesh and specs to JAX's: meshes, NamedShardings by path, with errors.

Compares the trees that a user hands over with the paths that the plan was made for.
Decides no sharding; must not know steps, losses or how plans are found.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state import from_paths, listed, to_paths
from dtft.planner.types import Spec


def mesh_of(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh; devices in their order, the last axis varying fastest.

    Args:
        sizes: axis name to size, slowest-varying first.
        devices: by default all that JAX has; in a single process the first of them, if
            the plan leaves some idle.

    Raises:
        ValueError: there are not as many devices as the sizes multiply to.
    """
    wanted = math.prod(sizes.values())
    found = list(jax.devices() if devices is None else devices)
    if devices is None and jax.process_count() == 1:
        found = found[:wanted]
    if len(found) != wanted:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"devices: {len(found)} of them, but the plan's mesh {text} has {wanted}. "
            f"Pass {wanted} devices, or make a plan for a cluster of {len(found)}."
        )
    grid = np.asarray(found).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def partition_spec(spec: Spec) -> PartitionSpec:
    """A plan's spec as JAX's.

    >>> tuple(partition_spec(((), ("replica", "fsdp"), ("tensor",))))
    (None, ('replica', 'fsdp'), 'tensor')
    """
    return PartitionSpec(
        *(axes[0] if len(axes) == 1 else axes or None for axes in spec)
    )


HOST = "pinned_host"
"""JAX's name of host memory that devices read and write themselves."""


def sharding_tree(
    what: str,
    like: Any,
    specs: Mapping[str, Spec],
    mesh: Mesh,
    host: Container[str] = (),
) -> Any:
    """A NamedSharding for every leaf of a tree.

    Args:
        what: name of the tree in errors, such as `batch`.
        like: arrays or ShapeDtypeStructs.
        specs: path of each leaf to its spec.
        mesh: the plan's mesh.
        host: paths of leaves that are kept in host memory.

    Raises:
        ValueError: names the first path that does not fit the plan.
    """
    leaves = to_paths(like)
    _check_paths(what, leaves, specs)
    shardings = {
        path: _sharding(f"{what} {path!r}", leaf, specs[path], mesh)
        for path, leaf in leaves.items()
    }
    for path, sharding in shardings.items():
        if path in host:
            shardings[path] = sharding.with_memory_kind(HOST)
    return from_paths(like, shardings)


def signature(tree: Any) -> Any:
    """What a compiled program depends on: structure, shapes and dtypes; hashable."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf), _dtype(leaf)) for leaf in leaves)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


def _check_paths(
    what: str, leaves: Mapping[str, Any], specs: Mapping[str, Spec]
) -> None:
    if leaves.keys() == specs.keys():
        return
    missing = [path for path in specs if path not in leaves]
    unexpected = [path for path in leaves if path not in specs]
    raise ValueError(
        f"{what} is another tree than the plan was made for. Only in the plan: "
        f"{listed(missing)}. Not in the plan: {listed(unexpected)}. Pass "
        f"the {what} that was planned, or make a plan for this one."
    )


def _sharding(what: str, leaf: Any, spec: Spec, mesh: Mesh) -> NamedSharding:
    shape = tuple(np.shape(leaf))
    if len(spec) != len(shape):
        raise ValueError(
            f"{what} has the shape {shape}, but the plan has a spec of {len(spec)} "
            f"dims for it: {spec}. Make a plan for this shape."
        )
    for dim, axes in enumerate(spec):
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"{what} is divided over the axis {unknown[0]!r}, which is not in the "
                f"plan's mesh. It has: {', '.join(mesh.shape)}."
            )
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{what} has the shape {shape}: dim {dim} is not divisible by {parts} "
                f"({' x '.join(axes)}). Allowed: multiples of {parts}. Pass such a "
                "shape, in a batch with rows that the loss leaves out; or make a plan "
                "for this one."
            )
    return NamedSharding(mesh, partition_spec(spec))
