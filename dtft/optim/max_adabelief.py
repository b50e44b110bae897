r"""Max-AdaBelief: AdaBelief whose second moment never shrinks, as an optax transform.

The mathematics is in `max_adabelief`. Imports jax, optax and two helpers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtft._former import renamed
from dtft.optim import checks
from dtft.optim.numerics import (
    abs_squared,
    debias,
    dtype_of,
    hyperparameter,
    moment_dtype,
    widen_beside,
)


class ScaleByMaxBeliefState(NamedTuple):
    """State of `scale_by_max_belief`. A restore needs every field.

    Without `nu_max` the steps after a restore would be larger than those before.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of updates made, int32."""
    mu: optax.Updates
    """First moment m, in `mu_dtype` or the parameters' dtype."""
    nu: optax.Updates
    """Second moment s of the prediction error, real and at least float32."""
    nu_max: optax.Updates
    """The largest s so far, elementwise; dtype as `nu`."""


@renamed(debias_max="bias_correct_max")
def scale_by_max_belief(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = False,
    bias_correct_max: bool = True,
) -> optax.GradientTransformation:
    """Rescales updates according to the Max-AdaBelief algorithm.

    See `max_adabelief` for the equations. Every leaf of the state keeps the dtype that
    `init` gave it, whatever the dtype of the gradients; the update has the dtype of the
    gradient, and is complex where the parameter is. A gradient of None gives an update
    of None and leaves the moments of its parameter as they are.

    Args:
        b1: Decay rate of the first moment, 0 < b1 < 1. A traced 0 cannot be seen, and
            gives m / (sqrt(eps_root t) + eps), a step of 3e6 times the learning rate.
        b2: Decay rate of the second moment, 0 <= b2 < 1. If it is traced, 1
            cannot be seen either, and gives updates of 0; more gives steps of 1e15.
        eps: Term added to the denominator outside of the square root. With `eps` and
            `eps_root` both 0 a gradient that has always been 0 gives 0/0, as in optax.
        eps_root: Term added to the second moment at every step, so that it accumulates,
            as in `optax.adabelief`. To differentiate through the update (as in
            meta-learning) it must not be 0.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter. The
            second moment has no such option: in 16 bits it stops moving. In 8 bits
            the first stops too, half-way to a constant gradient: give parameters of
            float8 `mu_dtype=jnp.bfloat16` or wider.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum is divided by 1 - b2^t. False is the form
            of Reddi et al., whose first step is 35 times the learning rate.

    Returns:
        The corresponding `optax.GradientTransformation`.

    Raises:
        ValueError: A hyperparameter whose number is known is out of range, or an array
            of fewer than 32 bits. `init`: a parameter that is an integer, or complex
            with a real `mu_dtype`. `update`: a gradient that is an integer, or complex
            for a real parameter.

    >>> transform = scale_by_max_belief()
    >>> state = transform.init(jnp.zeros(2))
    >>> update, state = transform.update(jnp.array([1.0, -2.0]), state)
    >>> [round(float(u), 2) for u in update]
    [1.11, -1.11]
    """
    _check_hyperparameters(b1, b2, eps, eps_root, mu_dtype, nesterov, bias_correct_max)

    def init_fn(params: optax.Params) -> ScaleByMaxBeliefState:
        return _init(params, mu_dtype)

    def update_fn(
        updates: optax.Updates,
        state: ScaleByMaxBeliefState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ScaleByMaxBeliefState]:
        del params
        state = _updated_moments(updates, state, b1, b2, eps_root)
        updates = _scaled_first_moment(
            updates, state, b1, b2, eps, nesterov, bias_correct_max
        )
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


@renamed(debias_max="bias_correct_max")
def max_adabelief(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    weight_decay_mask: Any = None,
    *,
    nesterov: bool = False,
    bias_correct_max: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""The Max-AdaBelief optimizer: AdaBelief with AMSGrad's maximum.

    AdaBelief divides by how far gradients are from their prediction. Where gradients
    agree for long, that distance and with it the divisor decay, and steps grow by
    orders of magnitude. Max-AdaBelief divides by the largest distance so far instead.

    With :math:`g_t` the gradient, :math:`\alpha_t` the learning rate and
    :math:`\lambda` the weight decay, from :math:`m_0 = s_0 = s^{\max}_0 = 0`:

    .. math::

        \begin{align*}
        m_t &\leftarrow \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        s_t &\leftarrow \beta_2 s_{t-1} + (1 - \beta_2) |g_t - m_t|^2
            + \bar{\varepsilon} \\
        s^{\max}_t &\leftarrow \max(s^{\max}_{t-1}, s_t) \\
        \hat{m}_t &\leftarrow m_t / (1 - \beta_1^t) \\
        \hat{s}_t &\leftarrow s^{\max}_t / (1 - \beta_2^t) \\
        u_t &\leftarrow -\alpha_t \left( \hat{m}_t / (\sqrt{\hat{s}_t} + \varepsilon)
            + \lambda \theta_{t-1} \right)
        \end{align*}

    With `nesterov=True` :math:`\hat{m}_t` is :math:`\beta_1 m_t / (1 - \beta_1^{t+1}) +
    (1 - \beta_1) g_t / (1 - \beta_1^t)`, with `bias_correct_max=False`
    :math:`\hat{s}_t` is :math:`s^{\max}_t`.

    Args:
        learning_rate: A number of 0 or more, an array or a schedule.
        b1: Decay rate of the first moment, 0 < b1 < 1. A traced 0 cannot be seen, and
            gives m / (sqrt(eps_root t) + eps), a step of 3e6 times the learning rate.
        b2: Decay rate of the second moment, 0 <= b2 < 1. If it is traced, 1
            cannot be seen either, and gives updates of 0; more gives steps of 1e15.
        eps: Term added to the denominator outside of the square root. With `eps` and
            `eps_root` both 0 a gradient that has always been 0 gives 0/0, as in optax.
        eps_root: Term added to the second moment at every step, so that it accumulates,
            as in `optax.adabelief`. To differentiate through the update (as in
            meta-learning) it must not be 0.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter. The
            second moment is real and at least float32. In float8, which it has with
            parameters of float8 unless told otherwise, the first stops half-way to a
            constant gradient: `mu_dtype=jnp.bfloat16` or wider does not.
        weight_decay: Strength of the decoupled weight decay, a number of 0 or more, an
            array or a schedule. The learning rate multiplies it, as in `optax.adamw`.
            None for none. If it is traced its sign cannot be seen, nor that of the
            learning rate: weights grow where it is negative.
        weight_decay_mask: Which parameters decay, as in `optax.add_decayed_weights`: a
            tree of booleans, or a function from parameters to one, which
            `optax.inject_hyperparams` needs named in `static_args`. None for all.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum is divided by 1 - b2^t. False is the form
            of Reddi et al., whose first step is 35 times the learning rate.

    Returns:
        The corresponding `optax.GradientTransformationExtraArgs`.

    Raises:
        ValueError: A hyperparameter whose number is known is out of range, or an array
            of fewer than 32 bits; a mask without a decay. See `scale_by_max_belief` for
            what `init` and `update` refuse.

    Examples:
        >>> solver = max_adabelief(learning_rate=0.3)
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

    Notes:
        *Which maximum.* It is taken over the raw :math:`s_t` and corrected for bias
        afterwards. A maximum over the corrected moment (the default of
        `optax.amsgrad`) is not offered: in the first steps the correction multiplies
        few noisy samples by 1/(1 - b2^t), and the maximum would keep the result for
        ever.

        *What the maximum bounds.* After s has fallen, the step: for a constant gradient
        at the default betas it is 15.5 times the learning rate at most, where
        AdaBelief's reaches millions. While s grows the maximum is s itself, and the
        update is AdaBelief's: for a gradient that rises from 0.01 to 1 in 10,000 steps
        it reaches 1121 times the learning rate in both (AMSGrad's: 1.5). Noise of 1 %
        of the gradient lowers that to 134, of 10 % to 17.5. For a bound that always
        holds, clip the update: `optax.chain(scale_by_max_belief(), optax.clip(16.0),
        optax.scale_by_learning_rate(learning_rate))`; it changes nothing where no
        update is larger (`experiments/step_bounds.py`).

        *The price.* A maximum never forgets. Where gradients are far larger early than
        late it ends further from the optimum than AdaBelief, and one corrupt gradient
        freezes its coordinates for good: `skip_outlier_gradients` rejects it before it
        enters the moments.

        *What accumulates.* :math:`\bar{\varepsilon}` is stored with s at every step, so
        :math:`s_t` has the floor :math:`\bar{\varepsilon} (1 - \beta_2^t) / (1 -
        \beta_2)`: the corrected moment is never below 1e-13 at the defaults, and below
        1e-5 with `eps_root=1e-8`. As :math:`g_t - m_t = \beta_1 (g_t - m_{t-1})`, s has
        a factor :math:`\beta_1^2` and is nothing but the floor if b1 is 0.

        *Against other implementations.* m and s equal those of `optax.adabelief` bit
        for bit. The authors' PyTorch code (adabelief-pytorch) with `amsgrad=True,
        rectify=False` computes the same update; it has a single eps: set `eps` and
        `eps_root` to it. Its decoupled weight decay, `weight_decouple=True`, is
        `weight_decay`. `optax.amsgrad` squares the gradient, not its distance to m, and
        its `eps_root` does not accumulate.

        *Values of eps.* The authors' table: 1e-8 for CNNs, 1e-16 for transformers,
        1e-12 to 1e-16 for LSTMs.

        *Clipping before it.* Elementwise clipping of gradients (`optax.clip`) makes
        them all equal, so that g - m and with it s fall towards the floor: a known
        cause of instability of AdaBelief in recurrent models. Prefer
        `optax.clip_by_global_norm`.

        *Injected hyperparameters.* `optax.inject_hyperparams` casts numbers to the
        dtype of the parameters: with bfloat16 parameters b2 would be 1. Pass it
        `hyperparam_dtype=jnp.float32`; without, it is a ValueError.

    References:
        Zhuang et al., `AdaBelief Optimizer: Adapting Stepsizes by the Belief in
        Observed Gradients <https://arxiv.org/abs/2010.07468>`_, 2020

        Reddi et al., `On the Convergence of Adam and Beyond
        <https://openreview.net/forum?id=ryQu7f-RZ>`_, 2018

    .. seealso::
        `optax.adabelief`, `optax.amsgrad`, `skip_outlier_gradients`, `sync_moments`
    """
    checks.check_schedule("learning_rate", learning_rate)
    return optax.chain(
        scale_by_max_belief(
            b1=b1,
            b2=b2,
            eps=eps,
            eps_root=eps_root,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            bias_correct_max=bias_correct_max,
        ),
        *decoupled_decay(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def decoupled_decay(
    weight_decay: optax.ScalarOrSchedule | None, mask: Any
) -> list[optax.GradientTransformation]:
    """The link of a chain that decays weights; none for None.

    Raises:
        ValueError: a decay out of range; a mask without a decay would be ignored.
    """
    if weight_decay is None and mask is not None:
        raise ValueError(
            "weight_decay_mask has no effect with weight_decay=None. Set weight_decay, "
            "or leave the mask out."
        )
    if weight_decay is None:
        return []
    checks.check_schedule("weight_decay", weight_decay)
    return [optax.add_decayed_weights(weight_decay, _checked_mask(mask))]


def _checked_mask(mask: Any) -> Any:
    """The mask, or the function that makes it, whose leaves are found to be booleans.

    Raises:
        ValueError: no mask, or a leaf of it is no boolean: "no" would count as True.
    """
    leaves = jax.tree.leaves(mask)
    if leaves and all(map(callable, leaves)):  # what optax takes for a function

        def made(params: Any) -> Any:
            found = mask(params)
            _check_booleans("weight_decay_mask(params)", found)
            return found

        return made
    # An array too: what inject_hyperparams makes of a function it took for a schedule.
    if isinstance(mask, (str, bytes, int, float)) or hasattr(mask, "dtype"):
        raise ValueError(
            f"weight_decay_mask={mask!r} is no mask: every parameter would decay, or "
            "none. Allowed: a tree of booleans like the parameters, a function from "
            "parameters to one, or None for all. Under optax.inject_hyperparams name "
            "weight_decay_mask in static_args, or it takes a function for a schedule."
        )
    _check_booleans("weight_decay_mask", mask)
    return mask


def _check_booleans(name: str, mask: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        boolean = isinstance(leaf, (bool, np.bool_)) or (
            isinstance(leaf, jax.Array) and leaf.dtype == jnp.bool_ and not leaf.ndim
        )
        if not boolean:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)}={leaf!r} is not a boolean. "
                "Allowed: True for what decays, False for what does not. Change it to "
                "one of them."
            )


def _check_hyperparameters(
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: Any,
    nesterov: Any,
    bias_correct_max: Any,
) -> None:
    checks.check_first_decay("b1", b1)
    checks.check_decay("b2", b2)
    checks.check_wide("eps", eps)
    checks.check_wide("eps_root", eps_root)
    checks.check_not_negative(eps=eps, eps_root=eps_root)
    checks.check_moment_dtype("mu_dtype", mu_dtype)
    checks.check_flags(nesterov=nesterov, bias_correct_max=bias_correct_max)


def _init(params: optax.Params, mu_dtype: Any) -> ScaleByMaxBeliefState:
    checks.check_leaves("params", params, mu_dtype)

    def first(p: Any) -> jax.Array:
        return jnp.zeros_like(p, dtype=dtype_of(p) if mu_dtype is None else mu_dtype)

    def second(p: Any) -> jax.Array:
        return jnp.zeros_like(p, dtype=moment_dtype(dtype_of(p)))

    return ScaleByMaxBeliefState(
        count=jnp.zeros([], jnp.int32),
        mu=jax.tree.map(first, params),
        nu=jax.tree.map(second, params),
        nu_max=jax.tree.map(second, params),
    )


def _updated_moments(
    updates: optax.Updates,
    state: ScaleByMaxBeliefState,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps_root: jax.typing.ArrayLike,
) -> ScaleByMaxBeliefState:
    """The state with moments that contain the gradients.

    `nu` is `b2 * nu + (1 - b2) * |g - mu|^2 + eps_root`, and `nu_max` its maximum.
    """
    checks.check_leaves("updates", updates)
    checks.check_real_moments(updates, state.mu)

    def first(g: Any, m: jax.Array) -> jax.Array:
        wide = widen_beside(g, m)
        decay = hyperparameter(b1, wide)
        return (1 - decay) * wide + decay * m.astype(wide.dtype)

    def second(g: Any, m: jax.Array, v: jax.Array) -> jax.Array:
        decay = hyperparameter(b2, v)
        error = abs_squared(widen_beside(g, m) - m).astype(v.dtype)
        # This is eps_root, as v >= 0. Were it added as a constant, XLA's CPU compiler
        # would work nu out twice and copy it: 72 instead of 56 bytes per parameter.
        floor = jnp.maximum(-v, hyperparameter(eps_root, v))
        return (1 - decay) * error + decay * v + floor

    mu = _map(first, updates, state.mu)
    nu = _map(second, updates, mu, state.nu, none=-1)
    return ScaleByMaxBeliefState(
        count=jnp.asarray(optax.safe_increment(state.count)),
        mu=jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu),
        nu=nu,
        nu_max=jax.tree.map(jnp.maximum, state.nu_max, nu),
    )


def _scaled_first_moment(
    updates: optax.Updates,
    state: ScaleByMaxBeliefState,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    nesterov: bool,
    bias_correct_max: bool,
) -> optax.Updates:
    """The first moment over the root of the maximum, both corrected for bias.

    Args:
        updates: The gradients that the moments of `state` contain; with `nesterov` they
            enter once more, and they give the dtypes of the result.
        state: After `_updated_moments`.
        b1: As for `scale_by_max_belief`, like all that follow.
        b2: See there.
        eps: See there.
        nesterov: See there.
        bias_correct_max: See there.
    """
    count = state.count

    def corrected(g: jax.Array, m: jax.Array) -> jax.Array:
        if not nesterov:
            return debias(m, b1, count)
        decay = hyperparameter(b1, m)
        ahead = debias(m, b1, jnp.asarray(optax.safe_increment(count)))
        return decay * ahead + (1 - decay) * debias(g, b1, count)

    def scaled(g: Any, m: jax.Array, v_max: jax.Array) -> jax.Array:
        wide = widen_beside(g, m)
        m_hat = corrected(wide, m.astype(wide.dtype))
        v_hat = debias(v_max, b2, count) if bias_correct_max else v_max
        root = jnp.sqrt(v_hat) + hyperparameter(eps, v_hat)
        update = m_hat / root.astype(m_hat.dtype)
        lost = jnp.iscomplexobj(update) and not jnp.iscomplexobj(g)
        return update if lost else update.astype(dtype_of(g))

    return _map(scaled, updates, state.mu, state.nu_max, none=None)


def _map(function: Any, updates: Any, *moments: Any, none: int | None = 0) -> Any:
    """`jax.tree.map` over gradients, some of which may be None.

    Args:
        function: Of a gradient and its moments.
        updates: Gradients.
        *moments: Trees like the parameters.
        none: Which of the moments stands where the gradient is None; None for None.
    """

    def of(g: Any, *own: Any) -> Any:
        if g is None:
            return None if none is None else own[none]
        return function(g, *own)

    return jax.tree.map(of, updates, *moments, is_leaf=lambda x: x is None)
