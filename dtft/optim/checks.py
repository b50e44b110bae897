"""What hyperparameters may be, checked where their number is known.

A traced value (`optax.inject_hyperparams` under `jit`) or an array cannot be judged and
passes. Knows jax only.
"""

import operator
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer


def number(name: str, value: Any) -> float | None:
    """The value of a scalar that is known now; None if it is traced or an array.

    Raises:
        ValueError: no number at all.
    """
    if _is_unknown(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={value!r} is not a number. Give a number, or an array of one."
        ) from None


def check_decay(name: str, value: Any) -> None:
    """A decay: 0 or more, below 1.

    >>> check_decay("b2", 1.0)
    Traceback (most recent call last):
    ValueError: b2=1.0 is not a decay. Allowed: 0 <= b2 < 1. Set b2=0.999, say.
    """
    known = number(name, value)
    if known is not None and not 0 <= known < 1:
        raise ValueError(
            f"{name}={known} is not a decay. Allowed: 0 <= {name} < 1. Set "
            f"{name}=0.999, say."
        )


def check_first_decay(name: str, value: Any) -> None:
    """The decay of a first moment that a second one is measured against: not 0."""
    if number(name, value) == 0:
        raise ValueError(
            f"{name}=0 makes the prediction error g - m identically zero, so the "
            f"update would be divided by eps alone. Allowed: 0 < {name} < 1. Use "
            f"{name}=0.9, or optax.rmsprop for an optimizer without a first moment."
        )
    check_decay(name, value)


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


def check_moment_dtype(name: str, dtype: Any) -> None:
    """A dtype that an average can be kept in, or None."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"{name}={jnp.dtype(dtype)} cannot hold an average. Allowed: floating (or "
            f"complex) dtypes, or None for the parameters' own."
        )


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Tracer) or bool(getattr(value, "ndim", 0))
