"""Unpacking in bands gives what unpacking at once gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.collectives import all_reduce_symmetric, bands, pack_lower, packing
from tests.support.shard_maps import over_devices
from tests.support.symmetric_matrices import DTYPES, symmetric


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(2, 40),
    band=st.integers(1, 50),
    batch=st.sampled_from([(), (2,), (2, 1)]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_width_of_band(
    n: int, band: int, batch: tuple[int, ...], dtype: Any
) -> None:
    matrix = symmetric(n, batch, dtype)
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(bands, "BAND", band)
        packed = jax.jit(pack_lower)(jnp.asarray(matrix))
        unpacked = jax.jit(lambda own: packing._unpack_in_bands(own, n))(packed)
        assert unpacked.dtype == matrix.dtype
        assert (np.asarray(unpacked) == matrix).all()


def test_large_matrices_are_unpacked_in_bands_in_a_mesh() -> None:
    n = packing.LARGE + 1
    rows = np.stack([symmetric(n) + i for i in range(2)])
    program = over_devices(
        lambda own: all_reduce_symmetric(own, "replica", op="sum"), 2
    )
    assert " while(" in program.lower(jnp.asarray(rows)).compile().as_text()
    assert (np.asarray(program(jnp.asarray(rows))) == rows.sum(0)).all()


def test_unpacking_in_bands_has_a_gradient() -> None:
    n = packing.LARGE
    packed = pack_lower(jnp.asarray(symmetric(n)))
    weights = jnp.asarray(symmetric(n))
    slope = jax.grad(lambda p: (packing.unpack_lower(p, n) * weights).sum())(packed)
    twice = 2 * weights - jnp.diag(jnp.diagonal(weights))
    assert (np.asarray(slope) == np.asarray(pack_lower(twice))).all()
