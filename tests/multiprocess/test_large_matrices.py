"""Matrices as large as real layers; in a child: a crash would end pytest."""

import os
import subprocess
import sys

import pytest

SIZES = (2047, 2048)
CHECK = """
import jax, jax.numpy as jnp, numpy as np
from dtft.collectives import (
    cholesky_decode, cholesky_encode, pack_lower, unpack_lower,
)
from dtft.collectives.packing import mirror_lower
for n in {sizes}:
    print("size", n, flush=True)
    full = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    matrix = (full + full.T) / np.float32(4 * n**0.5) + np.eye(n, dtype=np.float32)
    packed = jax.jit(pack_lower)(matrix)
    assert np.array_equal(jax.jit(lambda p: unpack_lower(p, n))(packed), matrix)
    assert np.array_equal(jax.jit(mirror_lower)(np.tril(matrix)), matrix)
    code = jax.jit(cholesky_encode)(matrix)
    back = jax.jit(lambda p: cholesky_decode(p, n))(code.packed)
    assert bool(code.ok) and np.abs(back - matrix).max() < 1e-4
"""


@pytest.mark.timeout(150)
def test_large_matrices_are_packed_and_factored() -> None:
    """jaxlib 0.10.2 overran the stack in `where(mask, a, a.T)` at these sizes."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(sizes=SIZES)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
