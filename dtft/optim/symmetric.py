"""How the statistics of several replicas become one: full, packed, or as factors.

Decides what of a symmetric matrix travels. Made for `scale_by_shampoo`, knows only
trees of symmetric matrices and an axis name; must not know meshes. Needs
`dtft.collectives`, so it is loaded on first use.
"""

from typing import Any, Literal

import jax
import optax

from dtft.collectives import AnyWire, WireCosts, all_reduce, all_reduce_symmetric
from dtft.collectives.all_reduce import check_algorithm
from dtft.collectives.symmetric import check_options
from dtft.optim.shampoo_steps import Exchange

Algorithm = Literal["native", "ring", "tree", "gather"]


def exchange_symmetric(
    axis_name: str | None,
    wire: AnyWire = "packed",
    wire_dtype: jax.typing.DTypeLike | None = None,
    algorithm: Algorithm = "native",
    costs: WireCosts | None = None,
) -> Exchange:
    """An `exchange` for `scale_by_shampoo`: the mean of statistics over replicas.

    | wire | what travels | exact | stays positive semidefinite |
    |---|---|---|---|
    | `full` | n^2 numbers, summed on the way | yes | in float32, up to rounding |
    | `packed` | the triangle, summed on the way | yes | the same |
    | `cholesky` | every factor's triangle, gathered | no: jitter | in bfloat16 too |

    One replica's G G^T has at most the rank of its G, so it has no Cholesky factor
    until `cholesky_encode` adds its jitter (1e-6 of the mean diagonal element, or the
    smallest power of ten times that which works) to the diagonal. The mean then
    carries the mean jitter, a fraction of each block's own scale: it lifts the
    smallest eigenvalues as `root_eps` does, and where it is larger than `root_eps` it
    is the one that decides. Factors cannot be summed, so they are gathered: the bytes
    that arrive grow with the number of replicas. What `cholesky` buys is a lossy wire
    whose result has no negative eigenvalue; `inverse_root` clips those that `packed`
    in bfloat16 gets, at the cost of what they stood for.

    Args:
        axis_name: Replica axis, inside `jax.shard_map`; None for one replica.
        wire: See above.
        wire_dtype: Dtype on the way, such as bfloat16; None for the statistics' own.
        algorithm: As in `dtft.collectives.all_reduce`; factors go by "native" only.
        costs: For wire "auto", what `dtft.collectives.measure_wires` returned: each
            block travels by the wire that is cheapest at its size.

    Raises:
        ValueError: an unknown option, or options that do not go together.

    Returns:
        A function of a tree of symmetric matrices [..., n, n].

    >>> import jax.numpy as jnp
    >>> both = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    >>> exchange = exchange_symmetric("replica")
    >>> jax.vmap(exchange, axis_name="replica")(both)[0].tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """

    check_options("mean", algorithm, wire, wire_dtype, costs)

    def exchange(increments: Any) -> Any:
        return jax.tree.map(
            lambda increment: all_reduce_symmetric(
                increment,
                axis_name,
                op="mean",
                algorithm=algorithm,
                wire=wire,
                wire_dtype=wire_dtype,
                costs=costs,
            ),
            increments,
        )

    return exchange


def average_gradients(
    inner: optax.GradientTransformation,
    axis_name: str | None,
    algorithm: Algorithm = "native",
) -> optax.GradientTransformationExtraArgs:
    """Gives `inner` the mean gradient, and the local one as `local_gradients`.

    Args:
        inner: An optimizer that has `scale_by_shampoo` in it, such as `shampoo`.
        axis_name: Replica axis, inside `jax.shard_map`; None for one replica.
        algorithm: As in `dtft.collectives.all_reduce`.

    Returns:
        A transform with the state of `inner`, whose `update` takes local gradients.

    >>> import jax.numpy as jnp
    >>> from dtft.optim import shampoo
    >>> solver = average_gradients(shampoo(0.1), None)
    >>> params = jnp.ones((2, 2))
    >>> update, _ = solver.update(params, solver.init(params), params)
    >>> update.shape
    (2, 2)
    """
    check_algorithm(algorithm)
    extended = optax.with_extra_args_support(inner)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        mean = jax.tree.map(
            lambda g: all_reduce(g, axis_name, op="mean", algorithm=algorithm), updates
        )
        return extended.update(mean, state, params, local_gradients=updates, **extra)

    return optax.GradientTransformationExtraArgs(
        extended.init,
        update,  # pyright: ignore[reportArgumentType]
    )
