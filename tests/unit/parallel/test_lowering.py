"""JAX is asked which operators a platform has kernels for; placement keeps to it."""

import jax
import jax.numpy as jnp
import pytest

from dtft.parallel.mpmd.lowering import lacking
from dtft.placement.api import place
from dtft.placement.kernels import Kernels
from dtft.planner.cluster.topology import Cluster
from dtft.planner.ir.tracing import trace


def triangle(x: jax.Array) -> jax.Array:
    return jnp.sin(jax.lax.linalg.schur(jnp.cos(x))[0]) @ x


def test_a_program_goes_where_jax_can_lower_it() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    cluster = Cluster.parse("h100+v5e+cpu")
    found = lacking(triangle, x, platforms=cluster)
    assert found == {"cuda": frozenset({1}), "tpu": frozenset({1})}
    placement = place(trace(triangle, x), cluster, kernels=Kernels(lacking=found))
    assert placement.types[placement.of_operator[1]] == "cpu"
    plain = lacking(lambda x: jnp.sin(x) @ x, x, platforms=("cpu", "cuda", "tpu"))
    assert not plain


def test_platforms_that_jax_does_not_lower_for_are_refused() -> None:
    with pytest.raises(ValueError, match="'fpga'. Allowed: .*cpu, cuda, rocm, tpu"):
        lacking(jnp.sin, 1.0, platforms=("fpga",))
    with pytest.raises(ValueError, match="'h100'. Allowed"):
        lacking(jnp.sin, 1.0, platforms="h100")
