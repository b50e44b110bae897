"""Averages the statistics and the gradients of `scale_by_shampoo` over replicas.

Depends on trees of arrays and an axis name; must not depend on meshes.
`dtft.optim` loads this module on first use, because it needs `dtft.collectives`.
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
    """Makes an `exchange` for `scale_by_shampoo`: the mean of statistics over replicas.

    | wire | what is sent | exact | stays positive semidefinite |
    |---|---|---|---|
    | `full` | n^2 numbers, reduced | yes | in float32, up to rounding |
    | `packed` | lower triangle, reduced | yes | in float32, up to rounding |
    | `cholesky` | triangle of each factor, gathered | no: jitter | in bfloat16 too |

    The rank of one replica's G G^T is at most the rank of G. A singular G G^T has no
    Cholesky factor, so `cholesky_encode` adds a jitter to the diagonal: 1e-6 of the
    mean diagonal element, times the smallest power of ten with which the factorization
    succeeds. If 10^5 does not suffice, the mean is NaN. The mean of the statistics
    contains the mean jitter, which raises the smallest eigenvalues, as `root_eps` of
    `scale_by_shampoo` does; the larger of the two has the larger effect.
    Factors cannot be summed, so they are gathered, and each replica receives bytes in
    proportion to the number of replicas. With a narrow `wire_dtype` the result of
    `cholesky` has no negative eigenvalue. The result of `packed` in bfloat16 can have
    negative eigenvalues; `inverse_root` sets these to 0.

    Args:
        axis_name: Replica axis, inside `jax.shard_map`; None for one replica.
        wire: See above; "auto" chooses by `costs`.
        wire_dtype: Dtype of the numbers sent, such as bfloat16; None for the dtype of
            the statistics.
        algorithm: Algorithm of `dtft.collectives.all_reduce`, such as "ring"; only
            "native" with `cholesky`.
        costs: For wire "auto", the result of `dtft.collectives.measure_wires`: each
            block is sent by the cheapest wire for its size.

    Raises:
        ValueError: an option is unknown, or options are incompatible.

    Returns:
        A function that maps a tree of symmetric matrices [..., n, n] to their mean.

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
    """Makes a transform that averages gradients over the replicas for `inner`.

    `inner` gets the mean gradient, and the local gradient as `local_gradients`.

    Args:
        inner: An optimizer that contains `scale_by_shampoo`, such as `shampoo`.
        axis_name: Replica axis, inside `jax.shard_map`; None for one replica.
        algorithm: Algorithm of `dtft.collectives.all_reduce`, such as "ring".

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
