"""Rejects corrupt gradients before they reach the moments of an optimizer.

Moments keep past gradients. After one gradient of 1e6, AdaBelief's steps are too small
until b2^t has made the square of this gradient small again, and Max-AdaBelief's steps
stay too small for ever. NaN stays in the moments of both. The global norm of each
gradient decides whether the step is made.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtft.optim.checks import numbers, whole
from dtft.optim.numerics import abs_squared, dtype_of, widen

_EMPTY = -1.0
"""Value of an element of `SkipOutliersState.norms` that holds no norm yet; norms are
never negative. NaN as this value would fail under `jax_debug_nans`."""


class SkipOutliersState(NamedTuple):
    """State of `skip_outlier_gradients`: norms, counters and the inner state.

    The counters of rejected steps are meant for alerts.
    """

    norms: jax.Array
    """Norms of the last accepted gradients, the newest at the end, float32 [history].
    While fewer than `history` gradients were accepted, the leading elements are -1."""
    outliers: jax.Array
    """Number of steps rejected for their norm so far, int32."""
    outliers_in_a_row: jax.Array
    """Number of steps rejected for their norm since the last accepted step, int32."""
    nonfinite: jax.Array
    """Number of steps rejected for NaN or infinity so far, int32."""
    inner_state: Any
    """State of the guarded transform."""


def skip_outlier_gradients(
    inner: optax.GradientTransformation,
    max_norm_ratio: jax.typing.ArrayLike | None = 10.0,
    *,
    history: int = 64,
    warmup: int = 16,
    max_consecutive: int = 8,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Skips the step of `inner` if the gradient's norm is an outlier or not finite.

    A gradient is an outlier if its global norm exceeds `max_norm_ratio` times the
    median of the last `history` accepted norms. A rejected gradient gives zero updates
    and leaves the state of `inner` unchanged bit for bit, step counts included.

    *Change of scale.* After `max_consecutive` outliers in a row the next finite
    gradient is accepted whatever its norm. If this gradient is an outlier too, the
    history is filled with its norm, so later gradients are compared with the new scale.
    A gradient that is not finite is never accepted and does not count as an outlier. A
    norm whose square overflows float32 counts as not finite, because the second moment
    would be infinite.

    *Limits.* The first `warmup` finite gradients are accepted, because too few norms
    are known. A corrupt value is accepted if the norm of the whole gradient stays
    within `max_norm_ratio` medians.

    *Several devices* must all decide alike. Under `jit` all devices see the norm of the
    global gradient. Under `shard_map` apply the transform to gradients that are already
    reduced, or let `axis_name` name the axes over which gradients differ: then the
    largest norm of all devices decides. `inner` is computed in any case and its result
    is discarded on a rejection, so every device enters the collectives inside `inner`.

    Put the transform around the whole chain: clipping before it would hide outliers.

    Gradients of integer leaves (float0, by `jax.grad(allow_int=True)`) are passed to
    `inner` unchanged and are left out of the norm.

    Args:
        inner: The transform to guard.
        max_norm_ratio: Largest accepted norm, as a multiple of the median; above 1.
            Gradients with heavy tails need a larger ratio. None skips nothing and
            leaves norms and counters unchanged, so a checkpoint of a run with a ratio
            can be continued without one, and the other way round.
        history: Number of accepted norms that the median is taken of.
        warmup: Number of norms that must be known before any gradient is rejected as
            an outlier, at most `history`.
        max_consecutive: Number of outliers in a row that are rejected before the next
            one is accepted.
        axis_name: Mapped axis or axes over which gradients differ; None if all devices
            have the same gradients.

    Returns:
        A transform with the state `SkipOutliersState`. Inside a chain
        `optax.tree.get(state, "outliers")` and `"nonfinite"` find the counters.

    Raises:
        ValueError: `inner` is no optax transform, or another argument is out of range.
            In `update`: an axis is not bound.

    In the example 1e6 is rejected as an outlier, and infinity as not finite: the update
    is 0, and a counter increases.

    >>> solver = skip_outlier_gradients(optax.sgd(1.0), warmup=2)
    >>> state = solver.init(jnp.zeros(1))
    >>> for gradient in (1.0, 2.0, 1e6, jnp.inf, 3.0):
    ...     updates, state = solver.update(jnp.full(1, gradient), state)
    ...     print(updates[0], state.outliers, state.nonfinite)
    -1.0 0 0
    -2.0 0 0
    0.0 1 0
    0.0 1 1
    -3.0 1 1
    """
    _check_inner(inner)
    _check(max_norm_ratio, history, warmup, max_consecutive)
    wrapped = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> SkipOutliersState:
        return SkipOutliersState(
            norms=jnp.full(history, _EMPTY, jnp.float32),
            outliers=jnp.zeros([], jnp.int32),
            outliers_in_a_row=jnp.zeros([], jnp.int32),
            nonfinite=jnp.zeros([], jnp.int32),
            inner_state=wrapped.init(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: SkipOutliersState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipOutliersState]:
        if max_norm_ratio is None:
            updates, inner_state = wrapped.update(
                updates, state.inner_state, params, **extra_args
            )
            return updates, state._replace(inner_state=inner_state)
        finite, norm = _agreed_norm(updates, axis_name)
        outlier = finite & is_outlier(norm, state.norms, max_norm_ratio, warmup)
        believed = outlier & (state.outliers_in_a_row >= max_consecutive)
        accept = finite & (~outlier | believed)
        # Zeros, because an iterative inner transform might not terminate on NaN.
        seen = _if(accept, updates, jax.tree.map(_zeros, updates))
        changed, inner_state = wrapped.update(
            seen, state.inner_state, params, **extra_args
        )
        changed, inner_state = _if(
            accept,
            (changed, inner_state),
            (jax.tree.map(_zeros, changed), state.inner_state),
        )
        rejected = outlier & ~believed
        return changed, SkipOutliersState(
            norms=jnp.where(
                accept, _remember(state.norms, norm, believed), state.norms
            ),
            outliers=state.outliers + rejected.astype(jnp.int32),
            outliers_in_a_row=jnp.where(
                accept, 0, state.outliers_in_a_row + rejected.astype(jnp.int32)
            ),
            nonfinite=state.nonfinite + (~finite).astype(jnp.int32),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _agreed_norm(updates: optax.Updates, axis_name: Any) -> tuple[jax.Array, jax.Array]:
    """Returns whether the squared global norm is finite, and the norm.

    Without `axis_name` both results are for this device's gradients. With `axis_name`
    both are equal on all devices of the axis: whether all devices' squared norms are
    finite, and the largest norm (0 if a squared norm is not finite).
    """
    squared = squared_norm(updates)
    # Tests the square: for one number XLA turns sqrt(x * x) into |x|, which is finite.
    finite, norm = jnp.isfinite(squared), jnp.sqrt(squared)
    if axis_name is not None:
        from dtft.collectives.hops import axis_size

        axis_size(axis_name)  # refuses an axis that is not bound
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1
        norm = jax.lax.pmax(jnp.where(finite, norm, 0), axis_name)
    return finite, norm


def squared_norm(updates: optax.Updates) -> jax.Array:
    """Returns the squared global norm of a tree in float32; leaves out float0 leaves.

    >>> tree = {"a": jnp.array([3.0], jnp.float16), "b": jnp.array([4j])}
    >>> float(squared_norm(tree))
    25.0
    """
    leaves = [g for g in jax.tree.leaves(updates) if not _is_float0(g)]
    squares = [jnp.sum(abs_squared(_inexact(g))) for g in leaves]
    return sum((s.astype(jnp.float32) for s in squares), jnp.zeros([], jnp.float32))


def _inexact(g: Any) -> jax.Array:
    floating = jnp.issubdtype(dtype_of(g), jnp.inexact)
    return widen(g, g) if floating else jnp.asarray(g, jnp.float32)


def is_outlier(
    norm: jax.Array,
    norms: jax.Array,
    max_norm_ratio: jax.typing.ArrayLike,
    warmup: int,
) -> jax.Array:
    """Whether a norm exceeds `max_norm_ratio` times the (lower) median of known norms.

    Known norms are the elements of `norms` that are not negative: the norms of earlier
    accepted gradients. The result is False while fewer than `warmup` norms are known,
    or while the median is 0.

    In the example the median of the three known norms is 2, so the limit is 20.

    >>> norms = jnp.array([-1.0, 1.0, 2.0, 3.0])
    >>> bool(is_outlier(jnp.array(21.0), norms, 10.0, warmup=3))
    True
    >>> bool(is_outlier(jnp.array(21.0), norms, 10.0, warmup=4))
    False
    """
    known = jnp.sum(norms >= 0, dtype=jnp.int32)
    # Empty places are negative, so they come last.
    median = jnp.sort(norms, descending=True)[known // 2]
    ratio = jnp.asarray(max_norm_ratio).astype(norm.dtype)
    return (known >= warmup) & (median > 0) & (norm > ratio * median)


def _remember(norms: jax.Array, norm: jax.Array, restart: jax.Array) -> jax.Array:
    shifted = jnp.concatenate([norms[1:], norm[None]])
    return jnp.where(restart, jnp.broadcast_to(norm, norms.shape), shifted)


def _if(accept: jax.Array, new: Any, old: Any) -> Any:
    """Selects `new` if `accept` is true, else `old`, leaf by leaf.

    A leaf of `new` that is not an array or a number, or has dtype float0, is returned
    in any case. XLA fuses each select with the computation of the leaf.
    """

    def chosen(a: Any, b: Any) -> Any:
        return jnp.where(accept, a, b) if _is_number(a) else a

    return jax.tree.map(chosen, new, old)


def _zeros(leaf: Any) -> Any:
    return leaf if _is_float0(leaf) else jnp.zeros_like(leaf)


def _is_number(leaf: Any) -> bool:
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
    return isinstance(leaf, kinds) and not _is_float0(leaf)


def _is_float0(leaf: Any) -> bool:
    """Whether a leaf has dtype float0: JAX's gradient of an integer, without data."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _check_inner(inner: Any) -> None:
    functions = (getattr(inner, name, None) for name in ("init", "update"))
    if not all(map(callable, functions)):
        raise ValueError(
            f"inner={inner!r} is no optax transform. Allowed: what has init and update."
            " Call the function that makes it, as in max_adabelief(1e-3); make one of "
            "several with optax.chain."
        )


def _check(ratio: Any, history: int, warmup: int, max_consecutive: int) -> None:
    known = [] if ratio is None else numbers("max_norm_ratio", ratio)
    if not all(each > 1 for each in known):
        raise ValueError(
            f"max_norm_ratio={ratio} would reject ordinary gradients. Allowed: above "
            "1. Use 10, or leave the guard out."
        )
    given = {"history": history, "warmup": warmup, "max_consecutive": max_consecutive}
    for name, value in given.items():
        if whole(name, value) is None:
            raise ValueError(
                f"{name}={value!r} is not known. Allowed: an int. Under "
                f"optax.inject_hyperparams pass it static_args={tuple(given)}."
            )
    if not 1 <= warmup <= history:
        raise ValueError(
            f"warmup={warmup} does not fit history={history}. Allowed: 1 <= warmup <= "
            "history. Lower warmup or raise history."
        )
    if max_consecutive < 0:
        raise ValueError(
            f"max_consecutive={max_consecutive} is negative. Allowed: 0 or more; 0 "
            "rejects nothing but NaN and infinity."
        )
