"""Dtype rules that the transforms share: what is widened, and to what.

Strict about promotion: no function here mixes dtypes. Stock optax helpers do
(`optax.tree.update_moment`, `optax.tree.bias_correction`): they would keep a second
moment in bfloat16 and change the state's dtypes where gradients and parameters differ.
"""

from typing import Any

import jax
import jax.numpy as jnp


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, a ShapeDtypeStruct or a Python number.

    >>> str(dtype_of(1.0)), str(dtype_of(jnp.zeros(2, jnp.float8_e4m3fn)))
    ('float32', 'float8_e4m3fn')
    """
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def at_least_float32(dtype: Any) -> Any:
    """The floating or complex dtype, or float32 where it is narrower.

    >>> [str(at_least_float32(d)) for d in ("bfloat16", "float8_e5m2", "complex64")]
    ['float32', 'float32', 'complex64']
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def moment_dtype(dtype: Any) -> Any:
    """Of a second moment: real and at least float32.

    An average in bfloat16 stops moving: from 1 towards 2 with b2=0.999 it stays at 1.
    In float8 one with b1=0.9 does too, so a first moment needs 16 bits.
    """
    return at_least_float32(jnp.finfo(dtype).dtype)


def widen(x: Any, like: Any) -> jax.Array:
    """`x` in the dtype of `like`, but at least float32."""
    return jnp.asarray(x).astype(at_least_float32(dtype_of(like)))


def widen_beside(x: Any, moment: jax.Array) -> jax.Array:
    """`x`, at least float32, and complex where its moment is."""
    wide = widen(x, x)
    if jnp.iscomplexobj(moment) and not jnp.iscomplexobj(wide):
        return wide.astype("complex128" if wide.dtype == "float64" else "complex64")
    return wide


def hyperparameter(value: jax.typing.ArrayLike, like: jax.Array) -> Any:
    """Python numbers stay weak; traced hyperparameters take the dtype of `like`."""
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(like.dtype)


def abs_squared(x: jax.Array) -> jax.Array:
    """The squared magnitude of each element, real."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def debias(
    moment: jax.Array, decay: jax.typing.ArrayLike, count: jax.Array
) -> jax.Array:
    """`moment / (1 - decay^count)`, bit-equal to `optax.tree.bias_correction`."""
    # The default float, as in optax: float32, or float64 where x64 is on.
    exponent = count.astype(float)
    power = hyperparameter(decay, exponent) ** exponent
    return moment / jnp.asarray(1 - power).astype(moment.dtype)
