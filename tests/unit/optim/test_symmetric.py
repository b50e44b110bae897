"""The exchange of Shampoo's statistics between replicas, on CPU devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dtft.config.optimizers import ShampooConfig
from dtft.optim import average_gradients, exchange_symmetric, shampoo
from dtft.optim.kronecker import gram, inverse_root


def _own(num: int, shape: tuple[int, ...]) -> Any:
    """Gradients that differ per replica: [replicas, ...]."""
    return jax.random.normal(jax.random.key(7), (num, *shape))


def _over(num: int, function: Any, own: Any) -> Any:
    """The result of every replica, [replicas, ...]."""
    mesh = Mesh(np.asarray(jax.devices()[:num]), ("replica",))

    def of_one(rows: Any) -> Any:
        result = function(jax.tree.map(lambda x: jnp.squeeze(x, 0), rows))
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), result)

    over = PartitionSpec("replica")
    mapped = jax.shard_map(
        of_one, mesh=mesh, in_specs=over, out_specs=over, check_vma=False
    )
    return jax.jit(mapped)(own)


def _reduced(num: int, rows: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the replicas get of their [2, 8, 8] statistics, and the true mean."""
    statistics = jax.vmap(lambda g: gram(g)[0])(_own(num, (2, 8, rows)))
    found = _over(num, exchange_symmetric("replica", **options), statistics)
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
    np.testing.assert_array_equal(found, np.asarray(found).swapaxes(-1, -2))
    return np.asarray(found[0]), np.mean(np.asarray(statistics, np.float64), axis=0)


def test_packed_equals_full_bit_for_bit_for_two() -> None:
    full, mean = _reduced(2, 4, wire="full")
    packed, _ = _reduced(2, 4, wire="packed")
    np.testing.assert_array_equal(full, packed)
    np.testing.assert_allclose(full, mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["native", "ring", "tree", "gather"])
@pytest.mark.parametrize("wire", ["full", "packed"])
def test_every_algorithm_gives_the_mean(wire: Any, algorithm: Any) -> None:
    found, mean = _reduced(3, 4, wire=wire, algorithm=algorithm)
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-5)


def test_cholesky_adds_the_jitter_of_singular_matrices() -> None:
    found, mean = _reduced(3, 4, wire="cholesky")  # rank 4 of 8 each
    added = np.linalg.eigvalsh(found - mean)
    scale = np.abs(np.diagonal(mean, axis1=1, axis2=2)).max()
    assert -1e-5 * scale < added.min() and added.max() < 1e-3 * scale
    regular, mean = _reduced(2, 32, wire="cholesky")
    np.testing.assert_allclose(regular, mean, rtol=1e-4, atol=1e-4)


def test_cholesky_in_bfloat16_stays_definite_and_packed_is_clipped() -> None:
    """The eigenvalues that rounding makes negative count as zero in the root."""
    factor, lossy = (
        _reduced(2, 4, wire=wire, wire_dtype="bfloat16")[0]
        for wire in ("cholesky", "packed")
    )
    largest = np.linalg.eigvalsh(factor).max()
    assert np.linalg.eigvalsh(factor).min() > -1e-6 * largest
    singular, mean = _reduced(2, 2, wire="packed", wire_dtype="bfloat16")
    assert np.linalg.eigvalsh(mean).min() > -1e-6 > np.linalg.eigvalsh(singular).min()
    for statistic in (lossy, singular):
        root = np.asarray(inverse_root(jnp.asarray(statistic), 0.25, 1e-4))
        assert np.isfinite(root).all() and np.linalg.eigvalsh(root).min() > 0


def test_statistics_are_local_and_the_direction_is_of_the_mean() -> None:
    """Every replica makes the same update, equal to that of one with both at hand."""
    own = _own(2, (6, 4))
    options: Any = {"precondition_frequency": 1, "beta_preconditioner": 1.0}

    def step(gradient: jax.Array) -> Any:
        solver = average_gradients(
            shampoo(0.1, exchange=exchange_symmetric("replica"), **options), "replica"
        )
        return solver.update(gradient, solver.init(gradient), gradient)[0]

    updates = _over(2, step, own)
    np.testing.assert_array_equal(updates[0], updates[1])

    def both(increment: Any) -> Any:
        del increment
        parts = [gram(g[None]) for g in own]
        sides = [sum(side) / 2 for side in zip(*parts, strict=True)]
        return jax.tree.unflatten(structure, sides)

    mean = own.mean(0)
    plain: Any = shampoo(0.1, **options)
    structure = jax.tree.structure(plain.init(mean)[0].statistics)
    whole: Any = shampoo(0.1, exchange=both, **options)
    expected, _ = jax.jit(whole.update)(mean, whole.init(mean), mean)
    np.testing.assert_allclose(updates[0], expected, rtol=1e-3, atol=1e-4)
    different, _ = jax.jit(plain.update)(mean, plain.init(mean), mean)
    assert not np.allclose(different, expected, rtol=0.05)


def test_config_refuses_what_would_be_ignored() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"wire_dtype": "bfloat16"}, "which sends nothing"),
        ({"wire": "cholesky", "algorithm": "ring"}, "native with optim.wire="),
        (
            {"precondition_frequency": 3, "statistics_every": 2},
            "a multiple of optim",
        ),
        ({"b1": 0.0}, "0 < b1 < 1"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            ShampooConfig(**options)
    with pytest.raises(ValueError, match="--optim.wire none"):
        ShampooConfig(wire="full").check_mesh(2)
    with pytest.raises(ValueError, match="optim.wire='none'"):
        ShampooConfig().build("replica")
