"""Dtype rules that the transforms share.

All functions work under strict dtype promotion. The optax helpers
(`optax.tree.update_moment`, `optax.tree.bias_correction`) mix dtypes: they would keep a
second moment in bfloat16, and would change the state's dtypes if gradients and
parameters differ in dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, a ShapeDtypeStruct or a Python number.

    >>> str(dtype_of(1.0)), str(dtype_of(jnp.zeros(2, jnp.float8_e4m3fn)))
    ('float32', 'float8_e4m3fn')
    """
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def at_least_float32(dtype: Any) -> Any:
    """Returns `dtype` (floating or complex), or float32 if it has fewer than 32 bits.

    >>> [str(at_least_float32(d)) for d in ("bfloat16", "float8_e5m2", "complex64")]
    ['float32', 'float32', 'complex64']
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def moment_dtype(dtype: Any) -> Any:
    """Returns the dtype of a parameter's second moment: real and at least float32.

    An average in bfloat16 stops moving: with b2=0.999 an average of 1 does not move
    towards 2. In float8 an average with b1=0.9 stops too, so a first moment needs 16
    bits.
    """
    return at_least_float32(jnp.finfo(dtype).dtype)


def widen(x: Any, like: Any) -> jax.Array:
    """Casts `x` to the dtype of `like`, or to float32 if this dtype is narrower."""
    return jnp.asarray(x).astype(at_least_float32(dtype_of(like)))


def widen_beside(x: Any, moment: jax.Array) -> jax.Array:
    """Casts `x` to at least float32, and to complex if `moment` is complex."""
    wide = widen(x, x)
    if jnp.iscomplexobj(moment) and not jnp.iscomplexobj(wide):
        return wide.astype("complex128" if wide.dtype == "float64" else "complex64")
    return wide


def hyperparameter(value: jax.typing.ArrayLike, like: jax.Array) -> Any:
    """Converts a hyperparameter for arithmetic with `like`.

    A Python number is returned unchanged, because it is weakly typed. An array is cast
    to the dtype of `like`.
    """
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(like.dtype)


def abs_squared(x: jax.Array) -> jax.Array:
    """Returns the squared magnitude of each element, real."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def debias(
    moment: jax.Array, decay: jax.typing.ArrayLike, count: jax.Array
) -> jax.Array:
    """Returns moment / (1 - decay^count), bit-equal to `optax.tree.bias_correction`."""
    # The default float, as in optax: float32, or float64 where x64 is on.
    exponent = count.astype(float)
    power = hyperparameter(decay, exponent) ** exponent
    return moment / jnp.asarray(1 - power).astype(moment.dtype)
