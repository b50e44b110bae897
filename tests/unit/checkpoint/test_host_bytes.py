"""The bytes of an array on one device: row by row, whatever lies on the device."""

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from dtft.checkpoint.state.array_bytes import host_bytes

TURNED = [((5, 3), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4), (0, 2, 1))]


@pytest.mark.parametrize(("shape", "order"), TURNED)
def test_numbers_that_lie_in_another_order_come_row_by_row(shape, order) -> None:
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    turned = Format(Layout(order), SingleDeviceSharding(jax.devices()[0]))
    array = jax.device_put(value, turned)
    assert array.format.layout.major_to_minor == order
    assert bytes(host_bytes(array)) == value.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        np.array([[-0.0, np.nan], [1.0, np.inf]], np.float32),
        np.array([1, -8, 7], ml_dtypes.int4),
        np.array([0.1, -2.0], ml_dtypes.float8_e4m3fn),
        np.array([0.1, -0.0], ml_dtypes.bfloat16),
        np.array(3, np.int32),
        np.array([True, False]),
        np.zeros((0, 3), np.float32),
    ],
    ids=lambda value: value.dtype.name,
)
def test_every_dtype(value: np.ndarray) -> None:
    assert bytes(host_bytes(jnp.asarray(value))) == value.tobytes()


def test_what_was_read_can_still_be_donated() -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.arange(1024.0)
    assert len(host_bytes(array)) == 4096
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(array)
    assert array.is_deleted()
