"""Gradient accumulation: differentiates equal parts of a batch one after another.

The batch is divided so that every device keeps its own rows. A `lax.scan` sums loss,
aux and gradients over the parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from dtft.checkpoint.state import from_paths, to_paths
from dtft.parallel.plan_shardings import partition_spec
from dtft.planner.types import Spec

Loss = Callable[[Any, Any], tuple[jax.Array, Any]]
"""`(params, batch) -> (loss, aux)`; both are means over the rows of the batch."""
Weight = Callable[[Any], jax.Array | float]


def accumulated(
    loss: Loss,
    num_parts: int,
    weight: Weight | None,
    pin: Callable[[Any], Any],
    divide: Callable[[Any], Any],
) -> Callable[[Any, Any], tuple[tuple[jax.Array, Any], Any]]:
    """Makes a `jax.value_and_grad(loss, has_aux=True)` that runs part by part.

    The returned function differentiates the loss on one part of the batch after
    another. Loss, aux and gradients are weighted means over the parts. A part of weight
    0 does not count, also if its loss or gradients are NaN. If all weights are 0, the
    means are NaN. If there are several parts, and aux has an array that is not
    floating-point or has rows of the batch, the returned function raises ValueError.

    Args:
        loss: function `(params, batch) -> (loss, aux)`, which is differentiated with
            respect to `params`.
        num_parts: number of parts of the batch.
        weight: function from a part to its weight, such as its number of tokens, as a
            scalar array or a Python number; None gives all parts the same weight. Not
            called for a single part.
        pin: function that constrains a tree of gradients to shardings, and returns it.
        divide: function from a batch to a batch with a leading dim of parts; not called
            for a single part.

    Returns:
        A function `(params, batch) -> ((loss, aux), gradients)`.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if num_parts == 1:

        def undivided(params: Any, batch: Any) -> tuple[tuple[jax.Array, Any], Any]:
            values, gradients = gradient(params, batch)
            return values, pin(gradients)

        return undivided

    def in_parts(params: Any, batch: Any) -> tuple[tuple[jax.Array, Any], Any]:
        parts = divide(batch)
        weights = None if weight is None else _weights(weight, parts)

        def add(sums: Any, one: tuple[Any, jax.Array | None]) -> tuple[Any, None]:
            part, heavy = one
            values, gradients = gradient(params, part)
            found = (*values, pin(gradients))
            if heavy is not None:
                found = jax.tree.map(lambda leaf: _scaled(leaf, heavy), found)
            return jax.tree.map(jnp.add, sums, found), None

        first = jax.tree.map(lambda leaf: leaf[0], parts)
        like = jax.eval_shape(gradient, params, first)
        _refuse_counts(like[0][1])
        _refuse_rows(like[0][1], lambda: jax.eval_shape(loss, params, batch)[1])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        begin = (*zeros[0], pin(zeros[1]))
        (value, aux, gradients), _ = lax.scan(add, begin, (parts, weights))
        total = jnp.float32(num_parts) if weights is None else weights.sum()

        def mean(leaf: jax.Array) -> jax.Array:
            return leaf / total.astype(leaf.dtype)

        return jax.tree.map(mean, (value, aux)), jax.tree.map(mean, gradients)

    return in_parts


def _weights(weight: Weight, parts: Any) -> jax.Array:
    """Computes the weights of parts, all divided by a power of two, as float32.

    The power is the least for which all weights are below 1, so that sums of weighted
    float16 gradients stay finite. `parts` has a leading dim of parts.
    """
    found = lax.map(lambda part: jnp.asarray(weight(part)).astype(jnp.float32), parts)
    _, exponent = jnp.frexp(jnp.abs(found).max())
    return jnp.ldexp(found, -exponent)


def _scaled(leaf: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies by a weight; the result is 0 for weight 0, also if `leaf` has NaNs."""
    scaled = leaf * weight.astype(leaf.dtype)
    return jnp.where(weight == 0, jnp.zeros_like(leaf), scaled)


def parts_of(batch: Any, num_parts: int, specs: Mapping[str, Spec], mesh: Mesh) -> Any:
    """Divides a batch into parts (microbatches) along a new leading dim.

    Each part has equally many of the rows that each device holds, so no rows move
    between devices. Arrays without dims are repeated for every part.

    Args:
        batch: a tree of arrays with rows in dim 0.
        num_parts: number of parts; the rows of each device must be a multiple of it.
        specs: map from the path of each array to the mesh axes that divide each dim.
        mesh: the mesh of the specs.

    Raises:
        ValueError: the rows of an array cannot be divided, or two arrays have different
            numbers of rows; the message names the arrays.
    """
    check_rows(batch, num_parts)

    def divided(path: str, leaf: jax.Array) -> jax.Array:
        if not leaf.shape:
            return jnp.broadcast_to(leaf, (num_parts,))
        spec = specs[path]
        along = 1
        for axis in spec[0]:
            along *= mesh.shape[axis]
        rows, rest = leaf.shape[0], leaf.shape[1:]
        each = along * num_parts
        if rows % each:
            raise ValueError(
                f"microbatches={num_parts}: batch {path!r} has {rows} rows, which is "
                f"not divisible by {each} (microbatches x {along} parts of the mesh). "
                f"Use a batch of a multiple of {each} rows, or make a plan for this "
                "one."
            )
        split = leaf.reshape(along, num_parts, rows // each, *rest)
        parts = jnp.swapaxes(split, 0, 1).reshape(num_parts, rows // num_parts, *rest)
        sharding = NamedSharding(mesh, partition_spec(((), *spec)))
        return lax.with_sharding_constraint(parts, sharding)

    leaves = to_paths(batch)
    return from_paths(batch, {p: divided(p, leaf) for p, leaf in leaves.items()})


def check_rows(batch: Any, num_parts: int) -> None:
    """Checks that all arrays of a batch have the same number of rows.

    If the sizes of dim 0 differ, dim 0 of some array is probably not its rows, and such
    an array cannot be divided.

    Args:
        batch: a tree of arrays or shapes; arrays without dims are not checked.
        num_parts: number of parts; with 1 nothing is checked.

    Raises:
        ValueError: numbers of rows differ; the message names two arrays.
    """
    leaves = to_paths(batch)
    rows = {path: jnp.shape(leaf)[0] for path, leaf in leaves.items() if jnp.ndim(leaf)}
    if num_parts == 1 or len(set(rows.values())) < 2:
        return
    fewest, most = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
    raise ValueError(
        f"microbatches={num_parts}: batch {fewest!r} has {rows[fewest]} rows and "
        f"{most!r} has {rows[most]}, and each part of the batch has rows of all. Use "
        "microbatches=1, or hand what belongs to every row to the loss in another way, "
        "such as repeated for each."
    )


def _refuse_counts(aux: Any) -> None:
    for path, leaf in to_paths(aux).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"microbatches: the loss returns {path!r} of dtype {leaf.dtype} beside "
                "its value. Allowed: floating-point means over the batch, which can "
                "be averaged over its parts. Return a mean, or nothing."
            )


def _refuse_rows(of_part: Any, of_batch: Callable[[], Any]) -> None:
    """Refuses auxiliary arrays with rows of the batch, which have no mean over parts.

    Args:
        of_part: shapes of the auxiliary arrays of one part.
        of_batch: function that returns their shapes for the whole batch. It is called
            only if an array of a part has dims.

    Raises:
        ValueError: an auxiliary array has another shape for the whole batch than for a
            part; the message names its path.
    """
    found = to_paths(of_part)
    if not any(leaf.shape for leaf in found.values()):
        return
    for path, leaf in to_paths(of_batch()).items():
        if leaf.shape != found[path].shape:
            raise ValueError(
                f"microbatches: the loss returns {path!r} of shape {leaf.shape} beside "
                f"its value, and {found[path].shape} for a part of the batch. Allowed: "
                "means over the batch, which can be averaged over its parts. Return a "
                "mean, or plan with microbatches=1."
            )
