"""What hyperparameters may be, checked where their number is known.

The number of a traced value (`optax.inject_hyperparams` under `jit`) or of an array
cannot be judged, only its dtype.
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


def number(name: str, value: Any) -> float | None:
    """The value of a scalar that is known now; None if it is traced or an array.

    Raises:
        ValueError: no number at all.
    """
    if _is_unknown(value):
        return None
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={value!r} is not a number. Give a number, or an array of one."
        ) from None


def check_decay(name: str, value: Any) -> None:
    """A decay: 0 or more, below 1, in a dtype that can hold it.

    >>> check_decay("b2", 1.0)
    Traceback (most recent call last):
    ValueError: b2=1.0 is not a decay. Allowed: 0 <= b2 < 1. Set b2=0.999, say.
    """
    check_wide(name, value)
    known = number(name, value)
    default = jax.dtypes.canonicalize_dtype(float)  # float64 only where jax has it
    if known is not None and known < 1 and np.asarray(known, default) == 1:
        raise ValueError(
            f"{name}={known!r} is 1 in float32, so that its average would never move. "
            "Allowed: up to 1 - 6e-8 without jax_enable_x64. Lower it."
        )
    if known is not None and not 0 <= known < 1:
        raise ValueError(
            f"{name}={known} is not a decay. Allowed: 0 <= {name} < 1. Set "
            f"{name}=0.999, say."
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
    check_decay(name, value)
    if number(name, value) == 0:
        raise ValueError(
            f"{name}=0 makes the prediction error g - m identically zero, so the "
            f"update would be divided by eps alone. Allowed: 0 < {name} < 1. Use "
            f"{name}=0.9, or optax.rmsprop for an optimizer without a first moment. "
            f"The base of optax.contrib.schedule_free customarily has {name}=0, as "
            "schedule_free averages by itself; a base of this kind needs its first "
            f"moment all the same: {name}=0.5, say, or optax.adam({name}=0) instead."
        )


def check_not_negative(**values: Any) -> None:
    """Each finite and 0 or more."""
    for name, value in values.items():
        known = number(name, value)
        if known is not None and not 0 <= known < float("inf"):
            raise ValueError(
                f"{name}={known} is out of range. Allowed: finite, 0 or more. Change "
                f"{name}."
            )


def check_positive(**values: Any) -> None:
    """Each finite and above 0."""
    check_not_negative(**values)
    for name, value in values.items():
        if number(name, value) == 0:
            raise ValueError(f"{name}=0 is out of range. Allowed: above 0.")


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


def check_real_moment(gradient: jax.Array, moment: jax.Array) -> None:
    """Refuses a complex gradient of a parameter whose first moment is real."""
    if jnp.iscomplexobj(gradient) and not jnp.iscomplexobj(moment):
        raise ValueError(
            f"a gradient is {gradient.dtype}, but the first moment of its parameter is "
            f"{moment.dtype}: the imaginary part would be dropped. Allowed: real "
            "gradients for real parameters. Take the real part, or make the parameter "
            "complex."
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


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Tracer) or bool(getattr(value, "ndim", 0))
