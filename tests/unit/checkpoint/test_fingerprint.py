"""Fingerprints: the same for every sharding, different for every changed bit."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state.array_bytes import fingerprints
from tests.support.states import state

VALUES = {path: value for path, value in state().items() if value.size}


def test_host_and_device_agree_on_every_dtype() -> None:
    dtypes = [np.int8, np.uint16, np.float16, ml_dtypes.float8_e4m3fn, np.complex64]
    more = {f"{d.__name__}": np.arange(6).astype(d).reshape(2, 3) for d in dtypes}
    values = VALUES | more
    on_device = {path: jax.device_put(value) for path, value in values.items()}
    assert fingerprints(values) == fingerprints(on_device)


@pytest.mark.parametrize(
    "spec", [PartitionSpec("a"), PartitionSpec("b", "a"), PartitionSpec(("a", "b"))]
)
def test_sharding_does_not_matter(spec: PartitionSpec) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    value = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    sharded = jax.device_put(value, NamedSharding(mesh, spec))
    assert fingerprints({"x": sharded}) == fingerprints({"x": value})


def test_order_and_the_low_words_of_64_bit_values_count() -> None:
    a = np.array([1.0, 2.0], np.float64)
    tiny = np.array([1.0, np.nextafter(2.0, 3.0)], np.float64)
    found = fingerprints({"a": a, "tiny": tiny, "swapped": a[::-1]})
    assert len(set(found.values())) == 3


def test_arrays_on_different_devices_may_be_mixed() -> None:
    first, second = jax.devices()[:2]
    value = np.ones(3, np.float32)
    arrays = {"a": jax.device_put(value, first), "b": jax.device_put(value, second)}
    assert len({*fingerprints(arrays).values()}) == 1


def test_every_single_bit_counts() -> None:
    value = np.zeros(4, np.uint32)
    flips = {"none": value}
    for bit in range(128):
        changed = value.copy()
        changed[bit // 32] ^= np.uint32(1 << (bit % 32))
        flips[str(bit)] = changed
    assert len(set(fingerprints(flips).values())) == 129
