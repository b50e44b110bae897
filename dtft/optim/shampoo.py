"""Shampoo: gradients preconditioned by the roots of their Kronecker statistics.

Two statistics per matrix give the direction of its update; Max-AdaBelief gives the
norm. This module calls no collective: a function `exchange` of the caller averages the
statistics of several replicas.

    L_t = b L_{t-1} + (1 - b) G_t G_t^T          R_t = b R_{t-1} + (1 - b) G_t^T G_t
    P_t = L_t^(-1/4) m_t R_t^(-1/4)              u_t = P_t |a_t| / |P_t|

with G_t the gradient as a matrix, b the decay rate, m_t the first moment of
Max-AdaBelief, a_t its direction (the update before the learning rate) and |.| the
Frobenius norm. Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor
Optimization" (2018), Algorithm 1; grafting from Agarwal et al., "Disentangling Adaptive
Gradient Methods from Learning Rates" (2020).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtft._former import renamed
from dtft.optim import checks
from dtft.optim.max_adabelief import decoupled_decay
from dtft.optim.phases import max_belief_phases
from dtft.optim.shampoo_steps import Exchange, ShampooSteps


@renamed(statistics_decay="beta_preconditioner", root_every="precondition_frequency")
def scale_by_shampoo(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    beta_preconditioner: jax.typing.ArrayLike = 0.999,
    exponent: jax.typing.ArrayLike = 0.25,
    root_eps: jax.typing.ArrayLike = 1e-6,
    block_size: int = 256,
    precondition_frequency: jax.typing.ArrayLike = 10,
    statistics_every: jax.typing.ArrayLike = 1,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients by Shampoo, with norms of updates from Max-AdaBelief.

    Leaves: Shampoo applies to real leaves that are matrices after all dims but the last
    are merged (a convolution kernel HWIO is (H W I, O)). Vectors, scalars, matrices
    with a dim of 1 and complex leaves get the Max-AdaBelief direction, that is, its
    update before the learning rate. All leaves get this direction before step
    `precondition_frequency`, which computes the first roots.

    Norm: each leaf's update has the Frobenius norm of the leaf's Max-AdaBelief
    direction. So the learning rates of Max-AdaBelief apply, and the scale of the
    statistics (and a correction for their bias) has no effect. Within a leaf the
    statistics of each block decide the relative norms of the blocks.

    Momentum: the first moment of Max-AdaBelief is preconditioned. There is no second
    average of gradients.

    Statistics of several replicas: `update` takes the extra argument
    `local_gradients`, a tree like `updates`. The statistics are then computed from the
    local gradients and averaged by `exchange`, and the direction is computed from
    `updates`, the mean gradient. Without `local_gradients` the statistics are computed
    from `updates`. The two differ: the mean of G_i G_i^T over the replicas is the outer
    product of the mean gradient plus the covariance of G_i between replicas. The
    covariance damps noisy directions more. With p replicas, the rank that one step adds
    is up to p times as high. If the batch per replica is so small that the covariance
    dominates, the preconditioner follows the noise instead of the curvature.

    Args:
        b1: Decay rate of Max-AdaBelief's first moment, 0 < b1 < 1.
        b2: Decay rate of Max-AdaBelief's second moment, 0 <= b2 < 1.
        eps: Term added to Max-AdaBelief's denominator outside of the square root.
        eps_root: Term added to Max-AdaBelief's second moment at every step.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter.
        beta_preconditioner: Decay rate b of the statistics, above 0; 1 sums the
            statistics without decay, as in Algorithm 1 of the paper.
        exponent: Power e of the inverse roots L^-e and R^-e. 1/4, as in the paper,
            applies the inverse square root of the Kronecker product of L^(1/2) and
            R^(1/2); 1/2 applies the inverse of this product. Above 1 the roots for
            small gradients overflow float32.
        root_eps: Added to the eigenvalues before the root, as a fraction of the largest
            eigenvalue of the block; above 0. The root of a singular block contains
            root_eps^-exponent, which must be finite in float32.
        block_size: Largest number of rows and columns of a block. Matrices are cut into
            blocks, each with separate statistics. The time for the roots of one block
            is cubic in its size, the memory for its statistics quadratic.
        precondition_frequency: Steps from one computation of the roots to the next; a
            multiple of `statistics_every`.
        statistics_every: Steps from one measurement of the statistics to the next. With
            a period of k, `exchange` sends 1/k of the bytes per step.
        exchange: Function that averages over replicas: gets a tree of one replica's
            G G^T and G^T G (symmetric, [blocks, n, n], at least float32), and returns
            the tree of their means over all replicas. None for one replica.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Under `optax.inject_hyperparams`
        name `block_size` and `exchange` in its `static_args`.

    Raises:
        ValueError: a size or period is below 1, `precondition_frequency` is not a
            multiple of `statistics_every`, another hyperparameter that is not traced is
            out of range, or `exchange` is not a function. In `update`:
            `local_gradients` has another tree structure than `updates`, or `exchange`
            changes the tree structure.

    .. note:: A gradient that is not finite makes the statistics NaN for ever, like the
        moments of other optimizers. If such gradients can occur, use
        `optax.apply_if_finite`.

    In the example the roots make the elements 4 and 1 of the diagonal equal. Their size
    is that of the first Max-AdaBelief direction: 1 / b1 = 1.11.

    >>> import jax.numpy as jnp
    >>> transform = scale_by_shampoo(precondition_frequency=1)
    >>> gradient = jnp.array([[4.0, 0.0], [0.0, 1.0]])
    >>> update, _ = transform.update(gradient, transform.init(gradient))
    >>> bool(jnp.allclose(update, 1.11 * jnp.eye(2), atol=1e-2))
    True
    """
    _check(block_size, precondition_frequency, statistics_every)
    _check_exchange(exchange)
    checks.check_wide("beta_preconditioner", beta_preconditioner)
    checks.check_positive(
        exponent=exponent, beta_preconditioner=beta_preconditioner, root_eps=root_eps
    )
    decays = checks.numbers("beta_preconditioner", beta_preconditioner)
    if max(decays, default=0) > 1:
        raise ValueError(
            f"beta_preconditioner={beta_preconditioner} would let the statistics grow "
            "without bound. Allowed: above 0, up to 1 (their plain sum)."
        )
    _check_root(exponent, root_eps)
    steps = ShampooSteps(
        max_belief_phases(b1, b2, eps, eps_root, mu_dtype),
        beta_preconditioner,
        exponent,
        root_eps,
        block_size,
        precondition_frequency,
        statistics_every,
        exchange,
    )
    return optax.GradientTransformationExtraArgs(
        steps.init,
        steps.update,  # pyright: ignore[reportArgumentType]
    )


@renamed(statistics_decay="beta_preconditioner", root_every="precondition_frequency")
def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    weight_decay_mask: Any = None,
    *,
    beta_preconditioner: jax.typing.ArrayLike = 0.999,
    exponent: jax.typing.ArrayLike = 0.25,
    root_eps: jax.typing.ArrayLike = 1e-6,
    block_size: int = 256,
    precondition_frequency: jax.typing.ArrayLike = 10,
    statistics_every: jax.typing.ArrayLike = 1,
    exchange: Exchange | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The Shampoo optimizer, with the norms of updates taken from Max-AdaBelief.

    See `scale_by_shampoo` for the method. Learning rates of `max_adabelief` apply.

    Args:
        learning_rate: A number of 0 or more, an array or a schedule.
        b1: Decay rate of Max-AdaBelief's first moment, 0 < b1 < 1.
        b2: Decay rate of Max-AdaBelief's second moment, 0 <= b2 < 1.
        eps: Term added to Max-AdaBelief's denominator outside of the square root.
        eps_root: Term added to Max-AdaBelief's second moment at every step.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter.
        weight_decay: Strength of the decoupled weight decay; None for no decay.
        weight_decay_mask: Which parameters decay, as in `max_adabelief`.
        beta_preconditioner: Decay rate b of the statistics, above 0; 1 sums the
            statistics without decay.
        exponent: Power e of the inverse roots L^-e and R^-e.
        root_eps: Added to the eigenvalues before the root, as a fraction of the largest
            eigenvalue of the block; above 0.
        block_size: Largest number of rows and columns of a block; matrices are cut into
            blocks, each with separate statistics.
        precondition_frequency: Steps from one computation of the roots to the next; a
            multiple of `statistics_every`.
        statistics_every: Steps from one measurement of the statistics to the next.
        exchange: Function that averages over replicas: gets a tree of one replica's
            G G^T and G^T G, and returns the tree of their means over all replicas. None
            for one replica.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    >>> import jax.numpy as jnp
    >>> solver = shampoo(0.1)
    >>> params = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> state = solver.init(params)
    >>> updates, state = solver.update(2 * params, state, params)
    >>> bool(jnp.all(optax.apply_updates(params, updates) < params))
    True
    """
    scaled = scale_by_shampoo(
        b1,
        b2,
        eps,
        eps_root,
        mu_dtype,
        beta_preconditioner=beta_preconditioner,
        exponent=exponent,
        root_eps=root_eps,
        block_size=block_size,
        precondition_frequency=precondition_frequency,
        statistics_every=statistics_every,
        exchange=exchange,
    )
    checks.check_schedule("learning_rate", learning_rate)
    decay = decoupled_decay(weight_decay, weight_decay_mask)
    return optax.chain(scaled, *decay, optax.scale_by_learning_rate(learning_rate))


def _check(block_size: int, precondition_frequency: Any, statistics_every: Any) -> None:
    given = {
        "precondition_frequency": precondition_frequency,
        "statistics_every": statistics_every,
    }
    known = {name: checks.whole(name, value) for name, value in given.items()}
    if block_size is None or isinstance(block_size, jax.Array):
        raise ValueError(
            f"block_size={block_size!r} is not a size. Allowed: an int, 1 or more; it "
            "decides the shapes of the state. Under optax.inject_hyperparams name it "
            "in static_args."
        )
    for name, value in {
        "block_size": checks.whole("block_size", block_size),
        **known,
    }.items():
        if value is not None and value < 1:
            raise ValueError(
                f"{name}={value} is not positive. Allowed: 1 or more. Set {name}=1 "
                "for the smallest."
            )
    if None not in known.values() and precondition_frequency % statistics_every:
        raise ValueError(
            f"precondition_frequency={precondition_frequency} is not a multiple of "
            f"statistics_every={statistics_every}: roots would be computed of "
            "statistics that have not changed. Set precondition_frequency to a "
            "multiple."
        )


def _check_root(exponent: Any, root_eps: Any) -> None:
    """Raises a ValueError if root_eps^-exponent overflows JAX's default float dtype.

    The root of a singular block would be infinite, and its products with 0 NaN.
    """
    powers = checks.numbers("exponent", exponent)
    floors = checks.numbers("root_eps", root_eps)
    if not powers or not floors:
        return
    largest = float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).max)
    if max(powers) * -math.log(min(floors)) > math.log(largest):
        raise ValueError(
            f"exponent={max(powers):g} with root_eps={min(floors):g}: the root of a "
            "singular block, root_eps^-exponent, is infinite. Allowed: up to "
            f"{largest:.1e}. Lower exponent (0.25 in the paper), or raise root_eps."
        )


def _check_exchange(exchange: Any) -> None:
    if exchange is not None and not callable(exchange):
        raise ValueError(
            f"exchange={exchange!r} is not a function. Allowed: one from the tree of "
            "one replica's increments to their mean, or None for one replica. Pass "
            "what dtft.optim.exchange_symmetric returns."
        )
