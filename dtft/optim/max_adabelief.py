r"""Max-AdaBelief: AdaBelief whose second moment never shrinks, as an optax transform.

Decides the update from gradients and moments. Knows jax and optax; must not know
meshes, collectives or the rest of dtft. The mathematics is in `max_adabelief`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dtft.optim import checks
from dtft.optim.numerics import (
    abs_squared,
    debias,
    hyperparameter,
    moment_dtype,
    widen,
)
from dtft.optim.phases import Phases, as_transform

Moments = Any
"""A pytree shaped like the parameters."""


class ScaleByMaxBeliefState(NamedTuple):
    """State of `scale_by_max_belief`. A restore needs every field.

    Without `nu_max` the steps after a restore would be larger than those before.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of updates made, int32."""
    mu: Moments
    """First moment m, in `mu_dtype` or the parameters' dtype."""
    nu: Moments
    """Second moment s of the prediction error, real and at least float32."""
    nu_max: Moments
    """The largest s so far, elementwise; dtype as `nu`."""


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
            return jnp.zeros_like(p, dtype=moment_dtype(p.dtype))

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
            b1 = hyperparameter(self.b1, widen(g, g))
            return (1 - b1) * widen(g, g) + b1 * widen(m, g)

        def second(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            b2 = hyperparameter(self.b2, v)
            error = abs_squared(widen(g, g) - m).astype(v.dtype)
            # eps_root, as v >= 0. Were it added as a constant, XLA's CPU compiler would
            # work nu out twice, which costs a copy of it: 72, not 56 B/parameter.
            floor = jnp.maximum(-v, hyperparameter(self.eps_root, v))
            return (1 - b2) * error + b2 * v + floor

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
            m_hat = self._corrected_first(widen(g, g), widen(m, g), state.count)
            v_hat = debias(v_max, self.b2, state.count) if self.debias_max else v_max
            root = jnp.sqrt(v_hat) + hyperparameter(self.eps, v_hat)
            return (m_hat / root.astype(m_hat.dtype)).astype(g.dtype)

        return jax.tree.map(scaled, updates, state.mu, state.nu_max)

    def _corrected_first(
        self, g: jax.Array, m: jax.Array, count: jax.Array
    ) -> jax.Array:
        if not self.nesterov:
            return debias(m, self.b1, count)
        b1 = hyperparameter(self.b1, m)
        ahead = debias(m, self.b1, jnp.asarray(optax.safe_increment(count)))
        return b1 * ahead + (1 - b1) * debias(g, self.b1, count)


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
        ValueError: a hyperparameter whose number is known is out of range.
    """
    checks.check_first_decay("b1", b1)
    checks.check_decay("b2", b2)
    checks.check_not_negative(eps=eps, eps_root=eps_root)
    checks.check_moment_dtype("mu_dtype", mu_dtype)
    belief = _Belief(b1, b2, eps, eps_root, mu_dtype, nesterov, debias_max)
    decay = {"mu": b1, "nu_max": b2} if debias_max else {"mu": b1}
    return Phases(
        belief.init, belief.accumulate, belief.direction, ("mu", "nu_max"), decay
    )


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
    """Rescales gradients by Max-AdaBelief; `max_adabelief` has the mathematics.

    Hyperparameters may be traced arrays, as `optax.inject_hyperparams` makes them.
    Every leaf of the state keeps the dtype that `init` gave it, whatever the dtype of
    the gradients, and the update has the dtype of the gradient.

    Args:
        b1: Decay of the first moment, 0 < b1 < 1. The number 0 is an error; a traced
            0 cannot be seen, and leaves m / (sqrt(eps_root t) + eps), a step of about
            3e6 times the learning rate.
        b2: Decay of the second moment, 0 <= b2 < 1.
        eps: Added to the denominator outside the root.
        eps_root: Added to the second moment at every step, so it accumulates, with
            the same meaning and default as in `optax.adabelief`.
        mu_dtype: Dtype of the first moment; by default that of the parameters. The
            second moment has no such option: it stops moving in 16 bits.
        nesterov: Whether to look one step ahead in the first moment.
        debias_max: Whether the maximum is divided by 1 - b2^t. False is the form of
            Reddi et al.; its first step is about 35 times the learning rate.

    Returns:
        An `optax.GradientTransformation`.

    Raises:
        ValueError: a hyperparameter whose number is known is out of range.

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
    weight_decay: float | jax.Array | None = None,
    weight_decay_mask: Any = None,
    *,
    nesterov: bool = False,
    debias_max: bool = True,
) -> optax.GradientTransformation:
    r"""The Max-AdaBelief optimizer, used like `optax.adabelief`.

    With :math:`g_t` the gradient and :math:`\alpha_t` the learning rate:

    .. math::

        \begin{align*}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        s_t &= \beta_2 s_{t-1} + (1 - \beta_2) |g_t - m_t|^2 + \bar{\varepsilon} \\
        s^{\max}_t &= \max(s^{\max}_{t-1}, s_t) \\
        \hat{m}_t &= m_t / (1 - \beta_1^t) \qquad
        \hat{s}_t = s^{\max}_t / (1 - \beta_2^t) \\
        \theta_t &= \theta_{t-1} - \alpha_t \left( \hat{m}_t /
            (\sqrt{\hat{s}_t} + \varepsilon) + \lambda \theta_{t-1} \right)
        \end{align*}

    **Which maximum.** It is taken over the raw :math:`s_t` and corrected for bias
    afterwards, as torch's AMSGrad and the AdaBelief authors' code do. It equals
    AdaBelief while s grows, bounds the step under steady gradients (15.5 times the
    learning rate for a constant gradient, where AdaBelief reaches millions), and is
    hardly touched by noise in the first steps, since s weights it by 1 - b2. Without
    the correction (`debias_max=False`, Reddi et al.) the first step is 35 times the
    learning rate. A maximum over the *corrected* moment (`optax.amsgrad`'s default)
    is not offered: five noisy first steps make its steps ten times smaller for ever.

    **What accumulates.** :math:`\bar{\varepsilon}` (`eps_root`) is stored with s at
    every step, as in `optax.adabelief`, so :math:`s_t` has the floor
    :math:`\bar{\varepsilon} (1 - \beta_2^t) / (1 - \beta_2)`: the corrected moment is
    never below 1e-13 at the defaults, and below 1e-5 with `eps_root=1e-8`.
    :math:`\varepsilon` (`eps`) does not accumulate. As :math:`g_t - m_t = \beta_1 (g_t
    - m_{t-1})`, s carries a factor :math:`\beta_1^2` and is nothing but the floor if
    b1 is 0.

    **What differs from optax.** `optax.adabelief` has no maximum; m and s here equal
    its own bit for bit, as the maximum does not enter their recursions.
    `optax.amsgrad` squares the gradient, not its distance to m; its maximum is of the
    corrected moment, and its `eps_root` does not accumulate. Both change their state's
    dtypes when gradients and parameters differ in dtype; here every leaf keeps its own.

    **The price.** A maximum never forgets. Where gradients are far larger early than
    late (Rosenbrock from a bad start) it ends further from the optimum than AdaBelief,
    and one corrupt gradient freezes its coordinates for good: `guard_gradients`
    rejects it before it enters the moments.

    Args:
        learning_rate: A number, an array or a schedule.
        b1: See `scale_by_max_belief`.
        b2: See `scale_by_max_belief`.
        eps: See `scale_by_max_belief`.
        eps_root: See `scale_by_max_belief`.
        mu_dtype: See `scale_by_max_belief`.
        weight_decay: Strength of decoupled weight decay (lambda), which the learning
            rate multiplies as in `optax.adamw`; None for none.
        weight_decay_mask: Which parameters decay, as in `optax.add_decayed_weights`.
        nesterov: See `scale_by_max_belief`.
        debias_max: See `scale_by_max_belief`.

    Returns:
        An `optax.GradientTransformation`.

    Raises:
        ValueError: a hyperparameter whose number is known is out of range.

    .. note::
        Elementwise clipping (`optax.clip`) before AdaBelief is a known cause of
        instability in recurrent models: clipped gradients are all equal, so g - m and
        with it s go to zero. The maximum bounds the step, but prefer
        `optax.clip_by_global_norm`. Good values of both eps differ by model: 1e-8 for
        CNNs, 1e-16 for transformers, 1e-12 to 1e-16 for LSTMs (the authors' table).

    >>> solver = max_adabelief(0.3)
    >>> params = jnp.array([1.0, 2.0, 3.0])
    >>> loss = lambda x: jnp.sum(x**2)
    >>> state = solver.init(params)
    >>> for _ in range(5):
    ...     updates, state = solver.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     print(f"{loss(params):.2f}")
    10.33
    7.22
    4.76
    2.95
    1.72

    References:
        Zhuang et al., `AdaBelief Optimizer <https://arxiv.org/abs/2010.07468>`_, 2020;
        Reddi et al., `On the Convergence of Adam and Beyond
        <https://openreview.net/forum?id=ryQu7f-RZ>`_, 2018 (the maximum).
    """
    belief = scale_by_max_belief(
        b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, debias_max=debias_max
    )
    decay = decoupled_decay(weight_decay, weight_decay_mask)
    return optax.chain(belief, *decay, optax.scale_by_learning_rate(learning_rate))


def decoupled_decay(
    weight_decay: float | jax.Array | None, mask: Any
) -> list[optax.GradientTransformation]:
    """The link of a chain that decays weights; none for None.

    Raises:
        ValueError: a mask without a decay would be ignored.
    """
    if weight_decay is None and mask is not None:
        raise ValueError(
            "weight_decay_mask has no effect with weight_decay=None. Set weight_decay, "
            "or leave the mask out."
        )
    if weight_decay is None:
        return []
    return [optax.add_decayed_weights(weight_decay, mask)]
