"""Checks hyperparameters, parameters and gradients of optimizers.

A failed check raises a ValueError. If a hyperparameter is an array, its smallest and
its largest element are checked. Some values are not known: a traced value
(`optax.inject_hyperparams` under `jit`), and an array that this process cannot read
completely, because it has neither all shards nor a full copy. At most the dtype of such
a value is checked. The argument `name` of a check is the hyperparameter's name, for the
error.
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
    """Returns the numbers to check: a number, or the smallest and largest of an array.

    An array of one element gives one number. Returns an empty list for a traced value,
    and for an array that this process cannot read completely, because it has neither
    all shards nor a full copy.

    Raises:
        ValueError: `value` is not a number or an array of numbers, or is empty.

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
    """Raises a ValueError unless a value is a decay rate: 0 or more and below 1.

    Also refuses a number that rounds to 1 in JAX's default float dtype (float32, or
    float64 if enabled), and floating arrays of 16 bits or fewer.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        least: Lower bound as the error shows it. This check accepts 0 in any case.

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
    """Raises a ValueError for a floating array of 16 bits or fewer, traced or not.

    In bfloat16 a decay rate of 0.999 rounds to 1.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise ValueError(
            f"{name} has dtype {dtype}, in which 0.999 rounds to 1 or 1e-16 to 0. "
            f"Allowed: float32 or wider, or a Python number. {_INJECT}"
        )


def check_first_decay(name: str, value: Any) -> None:
    """Raises a ValueError unless a first moment's decay rate is above 0 and below 1.

    Also refuses a decay rate b1 so small that 1 - b1 rounds to 1. The first moment m is
    then the gradient g, so the prediction error g - m, which is squared and averaged
    into the second moment, is 0.
    """
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
    """Raises a ValueError unless every value is finite and 0 or more."""
    for name, value in values.items():
        for known in numbers(name, value):
            if not 0 <= known < float("inf"):
                raise ValueError(
                    f"{name}={known} is out of range. Allowed: finite, 0 or more. "
                    f"Change {name}."
                )


def check_positive(**values: Any) -> None:
    """Raises a ValueError unless every value is finite and above 0.

    Also refuses a value that rounds to 0 or is subnormal in JAX's default float dtype.
    """
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
    """Raises a ValueError unless a value is callable or a finite number >= 0.

    A callable counts as a schedule; its results are not checked.
    """
    if not callable(value):
        check_not_negative(**{name: value})


def check_flags(**values: Any) -> None:
    """Raises a ValueError unless every value is a bool.

    So a string such as "no" is refused; Python would treat the string as true.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(
                f"{name}={value!r} is not a flag. Allowed: True or False. Under "
                f"optax.inject_hyperparams name {name} in static_args."
            )


def whole(name: str, value: Any) -> int | None:
    """Returns `value` as an int; None for a traced value.

    Also returns None for an array that this process cannot read completely.

    Raises:
        ValueError: `value` is not an integer; a float such as 3.0 is refused too.
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
    """Raises a ValueError if a gradient is complex and its first moment is real.

    Gradients of None are not checked.
    """

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
    """Raises a ValueError unless a dtype is floating, complex or None."""
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
    """Raises a ValueError unless every leaf is floating or complex.

    The error names the first leaf that is not.

    Args:
        tree_name: Name of the tree, for the error.
        tree: Parameters or gradients; None does not count as a leaf.
        mu_dtype: Dtype of the first moment. A complex leaf with a real `mu_dtype` is
            refused. None for the dtype of each leaf.

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
    """Rounds a number to JAX's default float dtype; subnormal numbers become 0.

    The dtype is float64 if JAX has float64 enabled, else float32.
    """
    kind = jnp.finfo(jax.dtypes.canonicalize_dtype(float))
    return kind.dtype.type(known if abs(known) >= kind.tiny else 0)


def _is_unknown(value: Any) -> bool:
    """Whether a value is traced, or an array that this process cannot read completely.

    Such an array is divided over the devices of several processes.
    """
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return isinstance(value, Tracer)
    return not (value.is_fully_addressable or value.is_fully_replicated)
