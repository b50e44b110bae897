"""Runs a function at each position of a mesh axis, on equal parts of a batch's rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Loss = Callable[[Any, Any], Any]
"""`loss(params, batch) -> mean`, or `-> (mean, aux)`; the mean, and all means in the
tree `aux`, are over the rows of `batch`."""
ValueAndGradients = tuple[Any, Any]
"""`(value, gradients)`, or `((value, aux), gradients)`."""


def over_shares(
    local: Callable[[Any, Any], Any], mesh: Mesh, axis_name: str, out: PartitionSpec
) -> Callable[[Any, Any], Any]:
    """Maps the function `local(params, batch)` over a mesh axis with `jax.shard_map`.

    In the function that is returned, `params` are replicated over the axis; the rows
    (dim 0) of each leaf of `batch` are divided. `out` is the PartitionSpec of every
    result. The returned function raises a ValueError if the rows of a leaf cannot be
    divided evenly.
    """
    # With check_vma=True autodiff would sum the gradients of replicated parameters.
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axis_name)),
        out_specs=out,
        axis_names={axis_name},
        check_vma=False,
    )

    def checked(params: Any, batch: Any) -> Any:
        _check_rows(batch, mesh.shape[axis_name], axis_name)
        return mapped(params, batch)

    return checked


def _check_rows(batch: Any, num_shares: int, axis_name: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.ndim(leaf) and jnp.shape(leaf)[0] % num_shares == 0:
            continue
        raise ValueError(
            f"batch{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: dim 0 "
            f"cannot be divided evenly over axis {axis_name!r} of size {num_shares}. "
            f"Allowed: a multiple of {num_shares} rows. Change the batch or the mesh."
        )
