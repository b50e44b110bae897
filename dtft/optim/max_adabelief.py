r"""Max-AdaBelief: AdaBelief with a running maximum of the second moment, for optax.

The docstring of `max_adabelief` has the equations.
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
    """State of `scale_by_max_belief`. A checkpoint needs every field.

    Without `nu_max` the steps after a restore would be larger than the steps before.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of updates made, int32."""
    mu: optax.Updates
    """First moment m, in `mu_dtype` or the parameters' dtype."""
    nu: optax.Updates
    """Second moment s of the prediction error (the gradient minus m), real and at least
    float32."""
    nu_max: optax.Updates
    """Largest s so far, elementwise, in the dtype of `nu`."""


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

    See `max_adabelief` for the equations. Every leaf of the state keeps its dtype from
    `init`, whatever the dtype of the gradients. The update has the dtype of the
    gradient; if the first moment is complex, the update is complex too. A gradient of
    None gives an update of None and leaves the moments of its parameter unchanged.

    Args:
        b1: Decay rate of the first moment, 0 < b1 < 1. A traced number is not checked:
            with 0 the second moment is made of `eps_root` alone, and a gradient of 1
            gives a step of 3e6 times the learning rate.
        b2: Decay rate of the second moment, 0 <= b2 < 1. A traced number is not
            checked: with 1 updates are 0 (if `bias_correct_max`). Above 1 a gradient of
            1 leaves `nu_max` at 0, so `eps` alone divides, and the step is 1e16 times
            the learning rate.
        eps: Term added to the denominator outside of the square root. If `eps` and
            `eps_root` are both 0, a gradient that has always been 0 gives 0/0, as in
            optax.
        eps_root: Term added to the second moment at every step, so that the terms
            accumulate, as in `optax.adabelief`. `eps_root` must not be 0 if the update
            is differentiated, as in meta-learning.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter. In 8
            bits the first moment stops half-way to a constant gradient: for parameters
            of float8 use `mu_dtype=jnp.bfloat16` or wider. The second moment has no
            such option, because it stops moving in 16 bits already.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum is divided by 1 - b2^t. False gives the
            form of Reddi et al., whose first step is 35 times the learning rate.

    Returns:
        The corresponding `optax.GradientTransformation`.

    Raises:
        ValueError: A hyperparameter is out of range (a traced number is not checked),
            or is a floating array of fewer than 32 bits. In `init`: a parameter is an
            integer, or is complex with a real `mu_dtype`. In `update`: a gradient is an
            integer, or is complex for a real first moment.

    The first update of each element is the sign of the gradient divided by b1:
    1 / 0.9 = 1.11.

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

    AdaBelief divides each step by the distance between gradients and their prediction,
    the first moment. If gradients hardly change over many steps, this distance decays,
    and steps grow by orders of magnitude. Max-AdaBelief divides each step by the
    largest distance so far.

    With :math:`g_t` the gradient, :math:`\theta_t` the parameter, :math:`\alpha_t` the
    learning rate, :math:`\lambda` the weight decay, :math:`\varepsilon` `eps` and
    :math:`\bar{\varepsilon}` `eps_root`, from :math:`m_0 = s_0 = s^{\max}_0 = 0`:

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
        b1: Decay rate of the first moment, 0 < b1 < 1. A traced number is not checked:
            with 0 the second moment is made of `eps_root` alone, and a gradient of 1
            gives a step of 3e6 times the learning rate.
        b2: Decay rate of the second moment, 0 <= b2 < 1. A traced number is not
            checked: with 1 updates are 0 (if `bias_correct_max`). Above 1 a gradient of
            1 leaves the maximum at 0, so `eps` alone divides, and the step is 1e16
            times the learning rate.
        eps: Term added to the denominator outside of the square root. If `eps` and
            `eps_root` are both 0, a gradient that has always been 0 gives 0/0, as in
            optax.
        eps_root: Term added to the second moment at every step, so that the terms
            accumulate, as in `optax.adabelief`. `eps_root` must not be 0 if the update
            is differentiated, as in meta-learning.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter. In 8
            bits the first moment stops half-way to a constant gradient: for parameters
            of float8 use `mu_dtype=jnp.bfloat16` or wider. The second moment is real
            and at least float32.
        weight_decay: Strength of the decoupled weight decay, a number of 0 or more, an
            array or a schedule; None for no decay. The decay is multiplied by the
            learning rate, as in `optax.adamw`. The signs of a traced decay and of a
            traced learning rate are not checked; weights grow if one is negative.
        weight_decay_mask: Which parameters decay, as in `optax.add_decayed_weights`: a
            tree of booleans, or a function from parameters to such a tree; None for
            all. Under `optax.inject_hyperparams` name `weight_decay_mask` in its
            `static_args` if the mask is a function.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum is divided by 1 - b2^t. False gives the
            form of Reddi et al., whose first step is 35 times the learning rate.

    Returns:
        The corresponding `optax.GradientTransformationExtraArgs`.

    Raises:
        ValueError: A hyperparameter is out of range (a traced number is not checked),
            or is a floating array of fewer than 32 bits; or the mask is not of
            booleans, or is given without a decay. See `scale_by_max_belief` for the
            errors of `init` and `update`.

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
        *Which maximum.* The maximum is taken over the raw :math:`s_t` and corrected for
        bias afterwards. A maximum over the corrected moment (the default of
        `optax.amsgrad`) is not offered: in the first steps the correction multiplies
        few noisy samples by 1/(1 - b2^t), and the maximum would keep this product for
        ever.

        *What the maximum bounds.* The maximum bounds the step after s has fallen: for a
        constant gradient at the default betas the step is at most 15.5 times the
        learning rate, while AdaBelief's step reaches millions. While s grows, the
        maximum equals s, and the update equals AdaBelief's: for a gradient that rises
        from 0.01 to 1 in 10,000 steps both reach 1121 times the learning rate (AMSGrad
        reaches 1.5). Noise of 1 % of the gradient lowers this to 134, noise of 10 % to
        17.5. For a bound that always holds, clip the update:
        `optax.chain(scale_by_max_belief(), optax.clip(16.0),
        optax.scale_by_learning_rate(learning_rate))`. Updates below the bound are
        unchanged (`experiments/step_bounds.py`).

        *Drawback.* The maximum never decreases. If gradients are far larger early than
        late, Max-AdaBelief ends further from the optimum than AdaBelief. One corrupt
        gradient makes the steps of its coordinates tiny for ever.
        `skip_outlier_gradients` rejects such a gradient before it enters the moments.

        *Floor of s.* :math:`\bar{\varepsilon}` is added to s at every step, so
        :math:`s_t` is at least :math:`\bar{\varepsilon} (1 - \beta_2^t) / (1 -
        \beta_2)`: the corrected moment is never below 1e-13 at the defaults, and never
        below 1e-5 with `eps_root=1e-8`. As :math:`g_t - m_t = \beta_1 (g_t - m_{t-1})`,
        s without the floor has a factor :math:`\beta_1^2`, and s equals the floor if b1
        is 0.

        *Other implementations.* m and s equal those of `optax.adabelief` bit for bit.
        The authors' PyTorch code (adabelief-pytorch) with `amsgrad=True,
        rectify=False` computes the same update. The PyTorch code has a single eps: set
        both `eps` and `eps_root` to this value. Its decoupled weight decay
        (`weight_decouple=True`) is `weight_decay` here. `optax.amsgrad` squares the
        gradient, not the gradient's distance to m, and the `eps_root` of
        `optax.amsgrad` does not accumulate.

        *Values of eps.* The authors recommend 1e-8 for CNNs, 1e-16 for transformers,
        and 1e-12 to 1e-16 for LSTMs.

        *Clipping gradients.* Elementwise clipping of gradients (`optax.clip`) makes
        successive gradients equal, so g - m decays and s falls towards the floor. This
        is a known cause of instability of AdaBelief in recurrent models. Prefer
        `optax.clip_by_global_norm`.

        *Injected hyperparameters.* `optax.inject_hyperparams` casts numbers to the
        dtype of the parameters: with bfloat16 parameters b2 would be 1, which raises a
        ValueError. Pass `hyperparam_dtype=jnp.float32` to `optax.inject_hyperparams`.

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
    """Returns a list with the transform that adds the weight decay; [] without one.

    `mask` says which parameters decay, as in `max_adabelief`.

    Raises:
        ValueError: the decay is out of range, or the mask is not of booleans or is
            given without a decay.
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
    """Returns a mask of weight decay after a check that its leaves are booleans.

    If `mask` is a function, returns a function that calls `mask` and checks the tree
    that it returns.

    Raises:
        ValueError: `mask` is a number, string or array, or a leaf of the mask is not a
            boolean. A string such as "no" would count as True.
    """
    leaves = jax.tree.leaves(mask)
    # A module that is a tree of functions may be one, too.
    if callable(mask) and leaves and all(map(callable, leaves)):

        def made(params: Any) -> Any:
            found = mask(params)
            _check_booleans("weight_decay_mask(params)", found)
            return found

        return made
    # Also an array: inject_hyperparams calls a function as a schedule and passes the
    # result.
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
    """Returns the state with the gradients g added to the moments.

    The new `mu` is `b1 * mu + (1 - b1) * g`. The new `nu` is `b2 * nu + (1 - b2) *
    |g - mu|^2 + eps_root` with the new `mu`. The new `nu_max` is the maximum of
    `nu_max` and the new `nu`.
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
        # Equals eps_root, because v >= 0. With a constant instead, XLA's CPU compiler
        # would compute nu twice and copy it: 72 instead of 56 bytes per parameter.
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
    """Divides the first moment by the root of the maximum, both corrected for bias.

    Args:
        updates: The gradients that were last added to the moments. Each result has the
            dtype of its gradient, but is complex if the first moment is complex.
            Only with `nesterov` are the values of the gradients read.
        state: The result of `_updated_moments`.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Term added to the root of the maximum.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum is divided by 1 - b2^t before the root is
            taken, with t the number of updates.
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
    """Maps a function over trees of gradients and moments; gradients may be None.

    Args:
        function: Called with a gradient and the moments of the same leaf.
        updates: Gradients.
        *moments: Trees like the parameters.
        none: Index of the moment that is returned where the gradient is None. If
            `none` is None, None is returned there.
    """

    def of(g: Any, *own: Any) -> Any:
        if g is None:
            return None if none is None else own[none]
        return function(g, *own)

    return jax.tree.map(of, updates, *moments, is_leaf=lambda x: x is None)
