"""What hyperparameters may be, checked where their number is known.

The number of a traced value (`optax.inject_hyperparams` under `jit`) cannot be judged,
only its dtype. Of an array that is not traced the least and the greatest are.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dtft.optim.numerics import dtype_of

_INJECT = (
    "optax.inject_hyperparams gives hyperparameters the parameters' dtype: pass it "
    "hyperparam_dtype=jnp.float32."
)


def numbers(name: str, value: Any) -> list[float]:
    """What is known now: a number, the least and greatest of an array; none if traced.

    Raises:
        ValueError: no number at all.

    >>> [numbers("b2", x) for x in (0.999, np.array([0.9]), np.arange(4))]
    [[0.999], [0.9], [0.0, 3.0]]
    """
    if _is_unknown(value):
        return []
    try:
        if isinstance(value, (str, bytes, bool)) or jnp.iscomplexobj(value):
            raise TypeError
        if not getattr(value, "ndim", 0):
            return [float(value)]
        array = np.asarray(jax.device_get(value)).astype(float)
    except (TypeError, ValueError):
        array = np.array([])
    if not array.size:
        raise ValueError(
            f"{name}={value!r} is not a number. Give a number, or an array of one."
        )
    return [float(array.min()), float(array.max())][: array.size]


def check_decay(name: str, value: Any, least: str = "0 <=") -> None:
    """A decay: 0 or more, below 1, in a dtype that can hold it.

    Args:
        name: Of the argument, in the error.
        value: Of the argument.
        least: What the error says of 0, which is refused elsewhere if at all.

    >>> check_decay("b2", 1.0)
    Traceback (most recent call last):
    ValueError: b2=1.0 is not a decay. Allowed: 0 <= b2 < 1. Set b2=0.99, say.
    """
    check_wide(name, value)
    for known in numbers(name, value):
        if known < 1 and _rounded(known) == 1:
            raise ValueError(
                f"{name}={known!r} is 1 in float32, so that its average would never "
                "move. Allowed: up to 1 - 6e-8 without jax_enable_x64. Lower it."
            )
        if not 0 <= known < 1:
            raise ValueError(
                f"{name}={known} is not a decay. Allowed: {least} {name} < 1. Set "
                f"{name}=0.99, say."
            )


def check_wide(name: str, value: Any) -> None:
    """Refuses an array of 16 bits or fewer, traced or not: 0.999 is 1 in bfloat16."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise ValueError(
            f"{name} has dtype {dtype}, in which 0.999 rounds to 1 or 1e-16 to 0. "
            f"Allowed: float32 or wider, or a Python number. {_INJECT}"
        )


def check_first_decay(name: str, value: Any) -> None:
    """The decay of a first moment that a second one is measured against: not 0."""
    check_decay(name, value, least="0 <")
    for known in numbers(name, value):
        if _rounded(1 - known) == 1:
            shown = f"{known:g}"
            rounded = "" if known == 0 else f" (1 - {name} is 1 in float32)"
            raise ValueError(
                f"{name}={shown}{rounded} makes the prediction error g - m identically "
                "zero, so the update would be divided by eps alone. Allowed: 0 < "
                f"{name} < 1. Use {name}=0.9, or optax.rmsprop for an optimizer "
                "without a first moment. The base of optax.contrib.schedule_free "
                f"customarily has {name}=0, as schedule_free averages by itself; a "
                "base of this kind needs its first moment all the same: "
                f"{name}=0.5, say, or optax.adam({name}=0) instead."
            )


def check_not_negative(**values: Any) -> None:
    """Each finite and 0 or more."""
    for name, value in values.items():
        for known in numbers(name, value):
            if not 0 <= known < float("inf"):
                raise ValueError(
                    f"{name}={known} is out of range. Allowed: finite, 0 or more. "
                    f"Change {name}."
                )


def check_positive(**values: Any) -> None:
    """Each finite and above 0, also once it is rounded."""
    check_not_negative(**values)
    for name, value in values.items():
        for known in numbers(name, value):
            if _rounded(known) == 0:
                rounded = "" if known == 0 else " is 0 in float32, which"
                raise ValueError(
                    f"{name}={known:g}{rounded} is out of range. Allowed: above 0. "
                    f"Raise {name}."
                )


def check_schedule(name: str, value: Any) -> None:
    """A schedule, or a finite number of 0 or more."""
    if not callable(value):
        check_not_negative(**{name: value})


def check_flags(**values: Any) -> None:
    """Each True or False; a text such as "no" would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(
                f"{name}={value!r} is not a flag. Allowed: True or False. Under "
                f"optax.inject_hyperparams name {name} in static_args."
            )


def whole(name: str, value: Any) -> int | None:
    """The value of a whole number that is known now; None if it is traced.

    Raises:
        ValueError: not a whole number.
    """
    if _is_unknown(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r} is not a whole number. Give an int."
        ) from None


def check_real_moments(gradients: Any, moments: Any) -> None:
    """Refuses a complex gradient of a parameter whose first moment is real."""

    def check(path: Any, gradient: Any, moment: jax.Array) -> None:
        if gradient is None or jnp.iscomplexobj(moment):
            return
        if jnp.issubdtype(dtype_of(gradient), jnp.complexfloating):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} is {dtype_of(gradient)}, but the "
                f"first moment of its parameter is {moment.dtype}: the imaginary part "
                "would be dropped. Allowed: real gradients for real parameters. Take "
                "the real part, or make the parameter complex."
            )

    jax.tree_util.tree_map_with_path(
        check, gradients, moments, is_leaf=lambda x: x is None
    )


def check_moment_dtype(name: str, dtype: Any) -> None:
    """A dtype that an average can be kept in, or None."""
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise ValueError(
            f"{name}={dtype!r} is no dtype. Allowed: floating and complex dtypes, such "
            "as jnp.bfloat16, or None for the parameters' own."
        ) from None
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"{name}={jnp.dtype(dtype)} cannot hold an average. Allowed: floating (or "
            f"complex) dtypes, or None for the parameters' own."
        )


def check_leaves(tree_name: str, tree: Any, mu_dtype: Any = None) -> None:
    """Every leaf a number that can be trained; names the first that is none.

    Args:
        tree_name: What the tree is, in the error.
        tree: Parameters or gradients; None is no leaf.
        mu_dtype: Dtype of a first moment that has to hold each leaf, or None.

    >>> check_leaves("params", {"steps": 3})
    Traceback (most recent call last):
    ValueError: params['steps'] has dtype int32, which gradients do not move. Allowed: \
floating and complex leaves. Leave it out, for example with optax.masked or \
optax.partition.
    """
    real = mu_dtype is not None and not jnp.issubdtype(mu_dtype, jnp.complexfloating)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, dtype = f"{tree_name}{jax.tree_util.keystr(path)}", dtype_of(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"{name} has dtype {dtype}, which gradients do not move. Allowed: "
                "floating and complex leaves. Leave it out, for example with "
                "optax.masked or optax.partition."
            )
        if real and jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"mu_dtype={jnp.dtype(mu_dtype)} would drop the imaginary part of the "
                f"first moment of {name}, which is {dtype}. Allowed: complex dtypes, "
                "or None for the parameters' own."
            )


def _rounded(known: float) -> Any:
    """In the default float: float64 only where jax has it; else 0 if below 1.2e-38."""
    kind = jnp.finfo(jax.dtypes.canonicalize_dtype(float))
    return kind.dtype.type(known if abs(known) >= kind.tiny else 0)


def _is_unknown(value: Any) -> bool:
    """Whether it is traced, or divided over processes so that none sees it whole."""
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return isinstance(value, Tracer)
    return not (value.is_fully_addressable or value.is_fully_replicated)
