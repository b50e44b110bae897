"""Max-AdaBelief: AdaBelief whose second moment never shrinks, as an optax transform.

Decides the update from gradients and moments. Knows jax and optax; must not know
meshes, collectives or the rest of dtft.

    m_t   = b1 m_{t-1} + (1 - b1) g_t
    s_t   = b2 s_{t-1} + (1 - b2) (g_t - m_t)^2 + eps_root
    max_t = max(max_{t-1}, s_t)
    u_t   = [m_t / (1 - b1^t)] / (sqrt(max_t / (1 - b2^t)) + eps)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dtft.optim.phases import Phases, as_transform

Moments = Any
"""A pytree shaped like the parameters."""


class ScaleByMaxBeliefState(NamedTuple):
    """State of `scale_by_max_belief`."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of updates made, int32."""
    mu: Moments
    """First moment m."""
    nu: Moments
    """Second moment s of the prediction error, at least float32."""
    nu_max: Moments
    """The largest s so far, at least float32."""


class _Belief(NamedTuple):
    """The hyperparameters, and the two phases as methods."""

    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    mu_dtype: jax.typing.DTypeLike | None
    nesterov: bool
    debias_max: bool

    def init(self, params: optax.Params) -> ScaleByMaxBeliefState:
        def zero(p: Any) -> jax.Array:
            return jnp.zeros_like(p, dtype=_second_dtype(p.dtype))

        return ScaleByMaxBeliefState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=self.mu_dtype), params),
            nu=jax.tree.map(zero, params),
            nu_max=jax.tree.map(zero, params),
        )

    def accumulate(
        self, updates: optax.Updates, state: ScaleByMaxBeliefState
    ) -> ScaleByMaxBeliefState:
        def first(g: jax.Array, m: jax.Array) -> jax.Array:
            g, m = _widen(g, g), _widen(m, g)
            return (1 - _as(self.b1, g)) * g + _as(self.b1, g) * m

        def second(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            error = _abs_squared(_widen(g, g) - m)
            moment = (1 - _as(self.b2, v)) * error.astype(v.dtype)
            # eps_root, as v >= 0. Were it added as a constant, XLA's CPU compiler would
            # work nu out twice, which costs a copy of it: 72, not 56 B/parameter.
            floor = jnp.maximum(-v, _as(self.eps_root, v))
            return moment + _as(self.b2, v) * v + floor

        mu = jax.tree.map(first, updates, state.mu)
        nu = jax.tree.map(second, updates, mu, state.nu)
        return ScaleByMaxBeliefState(
            count=jnp.asarray(optax.safe_increment(state.count)),
            mu=jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu),
            nu=nu,
            nu_max=jax.tree.map(jnp.maximum, state.nu_max, nu),
        )

    def direction(
        self, updates: optax.Updates, state: ScaleByMaxBeliefState
    ) -> optax.Updates:
        def scaled(g: jax.Array, m: jax.Array, v_max: jax.Array) -> jax.Array:
            m_hat = self._corrected_first(_widen(g, g), _widen(m, g), state.count)
            v_hat = _debias(v_max, self.b2, state.count) if self.debias_max else v_max
            root = jnp.sqrt(v_hat) + _as(self.eps, v_hat)
            return (m_hat / root.astype(m_hat.dtype)).astype(g.dtype)

        return jax.tree.map(scaled, updates, state.mu, state.nu_max)

    def _corrected_first(
        self, g: jax.Array, m: jax.Array, count: jax.Array
    ) -> jax.Array:
        if not self.nesterov:
            return _debias(m, self.b1, count)
        ahead = _debias(m, self.b1, jnp.asarray(optax.safe_increment(count)))
        now = _debias(g, self.b1, count)
        return _as(self.b1, m) * ahead + (1 - _as(self.b1, m)) * now


def max_belief_phases(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = False,
    debias_max: bool = True,
) -> Phases:
    """The two phases of `scale_by_max_belief`, whose arguments these are.

    Raises:
        ValueError: if `b1` is the number 0.
    """
    if isinstance(b1, (int, float)) and b1 == 0:
        raise ValueError(
            "b1=0 makes the prediction error g - m identically zero, so the update "
            "would be divided by eps alone. Allowed: 0 < b1 < 1. Use b1=0.9, or "
            "optax.rmsprop for an optimizer without a first moment."
        )
    belief = _Belief(b1, b2, eps, eps_root, mu_dtype, nesterov, debias_max)
    return Phases(belief.init, belief.accumulate, belief.direction)


def scale_by_max_belief(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = False,
    debias_max: bool = True,
) -> optax.GradientTransformation:
    """Rescales gradients by Max-AdaBelief.

    The maximum is taken over the raw second moment and corrected for bias afterwards,
    as torch's AMSGrad and the AdaBelief author's code do. The moments follow the same
    recursion as `optax.adabelief`; the maximum does not enter it.

    Args:
        b1: Decay of the first moment. 0 makes the belief identically zero: an error.
        b2: Decay of the second moment.
        eps: Added to the denominator outside the root.
        eps_root: Added to the second moment at every step, so it accumulates, with
            the same meaning and default as in `optax.adabelief`.
        mu_dtype: Dtype of the first moment; by default that of the parameters.
        nesterov: Whether to look one step ahead in the first moment.
        debias_max: Whether the maximum is divided by 1 - b2^t. False is the form of
            Reddi et al.; its first step is about 35 times the learning rate.

    Returns:
        An `optax.GradientTransformation`.

    Raises:
        ValueError: if `b1` is the number 0.

    >>> transform = scale_by_max_belief()
    >>> state = transform.init(jnp.zeros(2))
    >>> update, state = transform.update(jnp.array([1.0, -2.0]), state)
    >>> [round(float(u), 2) for u in update]
    [1.11, -1.11]
    """
    return as_transform(
        max_belief_phases(
            b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, debias_max=debias_max
        )
    )


def max_adabelief(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: float | None = None,
    weight_decay_mask: Any = None,
    *,
    nesterov: bool = False,
    debias_max: bool = True,
) -> optax.GradientTransformation:
    """The Max-AdaBelief optimizer, used like `optax.adabelief`.

    Args:
        learning_rate: A number or a schedule.
        b1: See `scale_by_max_belief`.
        b2: See `scale_by_max_belief`.
        eps: See `scale_by_max_belief`.
        eps_root: See `scale_by_max_belief`.
        mu_dtype: See `scale_by_max_belief`.
        weight_decay: Strength of decoupled weight decay; None for none.
        weight_decay_mask: Which parameters decay, as in `optax.add_decayed_weights`.
        nesterov: See `scale_by_max_belief`.
        debias_max: See `scale_by_max_belief`.

    Returns:
        An `optax.GradientTransformation`.

    >>> solver = max_adabelief(0.1)
    >>> params = jnp.array([1.0, 2.0])
    >>> state = solver.init(params)
    >>> updates, state = solver.update(2 * params, state, params)
    >>> [round(float(p), 2) for p in optax.apply_updates(params, updates)]
    [0.89, 1.89]
    """
    belief = scale_by_max_belief(
        b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, debias_max=debias_max
    )
    decay = (
        []
        if weight_decay is None
        else [optax.add_decayed_weights(weight_decay, weight_decay_mask)]
    )
    return optax.chain(belief, *decay, optax.scale_by_learning_rate(learning_rate))


def _second_dtype(dtype: Any) -> Any:
    """Real and at least float32: an average in bfloat16 stops moving."""
    return _at_least_float32(jnp.finfo(dtype).dtype)


def _widen(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.astype(_at_least_float32(like.dtype))


def _at_least_float32(dtype: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def _as(value: jax.typing.ArrayLike, like: jax.Array) -> Any:
    """Python numbers stay weak; traced hyperparameters take the dtype of `like`."""
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(like.dtype)


def _abs_squared(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def _debias(
    moment: jax.Array, decay: jax.typing.ArrayLike, count: jax.Array
) -> jax.Array:
    # The power in float32 is bit-equal to optax's, and legal under strict promotion.
    power = _as(decay, moment.real) ** count.astype(jnp.float32)
    return moment / jnp.asarray(1 - power).astype(moment.dtype)
