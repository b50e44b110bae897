"""Shampoo: gradients preconditioned by the roots of their Kronecker statistics.

Decides the update of matrices from two statistics each, and its magnitude from
Max-AdaBelief. Knows jax and optax; holds no collective and no axis name: how the
statistics of several replicas become one is the caller's `exchange`.

    L_t = b L_{t-1} + (1 - b) G_t G_t^T          R_t = b R_{t-1} + (1 - b) G_t^T G_t
    P_t = L_t^(-1/4) m_t R_t^(-1/4)              u_t = P_t |a_t| / |P_t|

with m_t and a_t the first moment and the direction of Max-AdaBelief. Gupta, Koren and
Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018), Algorithm 1;
grafting from Agarwal et al., "Disentangling Adaptive Gradient Methods from Learning
Rates" (2020).
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
    """Rescales gradients by Shampoo, to the magnitude of Max-AdaBelief.

    Which leaves: those that are matrices once all dims but the last are merged (a
    convolution's HWIO is (H W I, O)). Vectors, scalars, matrices with a dim of 1 and
    complex leaves get the direction of Max-AdaBelief itself, and so does everything
    before step `precondition_frequency`, when the first roots are computed.

    Magnitude: each leaf's update has the Frobenius norm of its Max-AdaBelief
    direction, so learning rates carry over, and the scale of the statistics (their
    bias correction too) has no effect. Within a leaf the blocks keep the relative
    sizes that their own statistics give them.

    Momentum: it is the first moment that is preconditioned, the one Max-AdaBelief
    keeps anyway; nothing is averaged a second time.

    Statistics of several replicas: `update` takes the extra argument
    `local_gradients`, a tree like `updates`. Then the statistics are those of the
    local gradients, averaged by `exchange`, and the direction is that of `updates`,
    the mean gradient. The two are not the same: the mean of G_i G_i^T is the outer
    product of the mean gradient plus the covariance of G_i between replicas. The
    second term damps directions that are noisy more, and gives p times the rank per
    step; with a batch so small per replica that it dominates, the preconditioner
    tends to that of the noise and the curvature fades from it. Without
    `local_gradients` the statistics are those of `updates`.

    Args:
        b1: See `scale_by_max_belief`.
        b2: See `scale_by_max_belief`.
        eps: See `scale_by_max_belief`.
        eps_root: See `scale_by_max_belief`.
        mu_dtype: See `scale_by_max_belief`.
        beta_preconditioner: Decay b of the statistics; 1 for their plain sum, as in
            Algorithm 1 of the paper.
        exponent: Each side is raised to minus this: 1/4 in the paper, 1/2 makes the
            pair the inverse, not the root, of the Kronecker product. Above 1 float32
            does not hold the roots of small gradients.
        root_eps: Added to the eigenvalues before the root, as a fraction of the
            block's largest; above 0, as the root of a singular block would be infinite.
            That root is root_eps^-exponent, which must be finite in float32.
        block_size: Matrices are cut into blocks of at most so many rows and columns,
            each with statistics of its own. Time is cubic in it, state linear.
        precondition_frequency: Steps from one computation of the roots to the next.
        statistics_every: Steps from one measurement of the statistics to the next;
            divides what `exchange` sends.
        exchange: From the tree of increments (symmetric, [blocks, n, n], at least
            float32) of one replica to their mean over all; None for one replica.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Under `optax.inject_hyperparams`
        name `block_size` and `exchange` in its `static_args`.

    Raises:
        ValueError: a size or period below 1, periods that do not fit, or another
            hyperparameter that is known is out of range. `update`: `local_gradients` or
            the result of `exchange` lacks leaves.

    .. note:: A gradient that is not finite spoils the statistics for good, as it does
        the moments of other optimizers: use `optax.apply_if_finite` where it can occur.

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
    """The Shampoo optimizer, grafted to Max-AdaBelief and used like it.

    Args:
        learning_rate: A number or a schedule.
        b1: See `scale_by_max_belief`.
        b2: See `scale_by_max_belief`.
        eps: See `scale_by_max_belief`.
        eps_root: See `scale_by_max_belief`.
        mu_dtype: See `scale_by_max_belief`.
        weight_decay: Strength of decoupled weight decay; None for none.
        weight_decay_mask: Which parameters decay, as in `optax.add_decayed_weights`.
        beta_preconditioner: See `scale_by_shampoo`, as all that follow.
        exponent: See there.
        root_eps: See there.
        block_size: See there.
        precondition_frequency: See there.
        statistics_every: See there.
        exchange: See there.

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
    """Refuses a root of singular blocks that overflows: its zeros would be NaN."""
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
