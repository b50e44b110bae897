"""Packing, symmetric all-reduce and Cholesky factors (test T9 of the reference)."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from dtft.collectives import (
    WireCosts,
    all_reduce_symmetric,
    broadcast_factor,
    cholesky_decode,
    cholesky_encode,
    measure_wires,
    pack_lower,
    packed_size,
    qr_combine,
    reduce_factors,
    unpack_lower,
    unpack_triangle,
)
from tests.support.shard_maps import over_devices
from tests.support.symmetric_matrices import DTYPES, symmetric


def definite(n: int, condition: float, dtype: Any = np.float32) -> np.ndarray:
    """Eigenvalues from 1 down to 1/condition, evenly in the exponent."""
    basis, _ = np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))
    values = np.logspace(0, -np.log10(condition), n)
    return ((basis * values) @ basis.T).astype(dtype)


def smallest_eigenvalue(matrix: Any) -> float:
    return float(np.linalg.eigvalsh(np.asarray(matrix, np.float64)).min())


def product(factor: Any) -> np.ndarray:
    wide = np.asarray(factor, np.float64)
    return wide @ wide.swapaxes(-1, -2)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(0, 9),
    batch=st.sampled_from([(), (2,), (2, 1), (0,)]),
    dtype=st.sampled_from(DTYPES),
)
def test_packing_is_exact(n: int, batch: tuple[int, ...], dtype: Any) -> None:
    with jax.enable_x64(True):
        matrix = symmetric(n, batch, dtype)
        above = matrix + np.triu(np.ones((n, n), matrix.dtype), 1)  # must not be read
        packed, square, triangle = jax.jit(there_and_back)(jnp.asarray(above))
        assert packed.shape == (*batch, packed_size(n)) and packed.dtype == matrix.dtype
        assert (np.asarray(square) == matrix).all()
        assert (np.asarray(triangle) == np.tril(matrix)).all()


def there_and_back(matrix: jax.Array) -> tuple[jax.Array, ...]:
    packed, n = pack_lower(matrix), matrix.shape[-1]
    return packed, unpack_lower(packed, n), unpack_triangle(packed, n)


def test_bfloat16_factors_travel_as_two_bytes() -> None:
    """On CPU a collective of bfloat16 would send float32."""
    program = over_devices(
        lambda d: (
            all_reduce_symmetric(
                d, "replica", wire="cholesky", wire_dtype=jnp.bfloat16
            ),
            broadcast_factor(d, 0, "replica", wire_dtype=jnp.bfloat16),
        ),
        2,
    )
    compiled = program.lower(jnp.ones((2, 3, 3))).compile().as_text()
    sends = re.findall(r"= (\w+)\[[^=]*(?:all-gather|collective-permute)\(", compiled)
    assert sends and set(sends) == {"u16"}


@pytest.mark.parametrize("n", [2048, 2049])
def test_packed_bytes(n: int) -> None:
    assert packed_size(n) <= 0.501 * n * n


def test_shapes_that_cannot_be_packed() -> None:
    for wrong in (jnp.ones((2, 3)), jnp.ones(4), jnp.asarray(1.0)):
        with pytest.raises(ValueError, match=r"Allowed: \[..., n, n\]"):
            pack_lower(wrong)
    with pytest.raises(ValueError, match=r"n=4 needs \[..., 10\]"):
        unpack_lower(jnp.ones(6), 4)


@pytest.mark.parametrize("num", [2, 4])
def test_sum_of_packed_is_packed_sum(num: int) -> None:
    """Bit for bit: whole numbers; the wires agree, and results are symmetric."""
    rows = np.stack([symmetric(6, (2,)) + i for i in range(num)])

    def reduce_all(own: jax.Array) -> list[jax.Array]:
        return [
            all_reduce_symmetric(own, "replica", op="sum", wire="packed"),
            all_reduce_symmetric(own, "replica", op="sum", algorithm="ring"),
            all_reduce_symmetric(own, "replica", op="sum", wire="full"),
            unpack_lower(jax.lax.psum(pack_lower(own), "replica"), 6),
        ]

    for result in over_devices(reduce_all, num)(jnp.asarray(rows)):
        assert (np.asarray(result) == rows.sum(0)).all()


def test_results_are_exactly_symmetric_and_wires_agree() -> None:
    rows = np.stack([definite(15, 10.0 ** (i + 1)) for i in range(3)])

    def reduce_all(own: jax.Array) -> dict[str, jax.Array]:
        wires = ("full", "packed", "cholesky")
        return {
            wire: all_reduce_symmetric(own, "replica", op="mean", wire=wire)
            for wire in wires
        } | {"ring": all_reduce_symmetric(own, "replica", op="mean", algorithm="ring")}

    for result in over_devices(reduce_all, 3)(jnp.asarray(rows)).values():
        assert (np.asarray(result) == np.asarray(result).T).all()
        np.testing.assert_allclose(result, rows.mean(0), atol=1e-6)


def test_a_sum_of_cholesky_coded_matrices_is_5_and_not_9() -> None:
    rows = jnp.array([1.0, 4.0]).reshape(2, 1, 1)
    total = over_devices(
        lambda d: all_reduce_symmetric(d, "replica", op="sum", wire="cholesky"), 2
    )(rows)
    assert total.item() == 5.0
    combined = qr_combine(jnp.sqrt(rows[0]), jnp.sqrt(rows[1]))
    np.testing.assert_allclose(product(combined), 5.0, rtol=1e-6)


@pytest.mark.parametrize("exponent", [2, 4, 6])
def test_a_bfloat16_factor_keeps_definiteness(exponent: int) -> None:
    """While rounding the matrix itself does not, from condition 1e4 on."""
    matrix = jnp.asarray(definite(64, 10.0**exponent))
    code = cholesky_encode(matrix, wire_dtype=jnp.bfloat16)
    assert code.packed.dtype == jnp.bfloat16 and code.ok and code.jitter == 0
    decoded = cholesky_decode(code.packed, 64)
    assert smallest_eigenvalue(decoded) > 0
    error = np.linalg.norm(decoded - matrix) / np.linalg.norm(matrix)
    assert error < 1e-2
    rounded = np.asarray(matrix).astype(jnp.bfloat16)
    if exponent >= 4:
        assert smallest_eigenvalue(rounded) < 0


def test_what_is_not_definite_has_a_defined_result() -> None:
    batch = np.stack(
        [
            np.eye(2),
            np.ones((2, 2)),  # singular: the documented jitter
            np.zeros((2, 2)),
            np.array([[1, 2], [2, 1]]),  # eigenvalue -1: refused
            np.array([[np.nan, 0], [0, 1]]),
        ]
    ).astype(np.float32)
    code = cholesky_encode(jnp.asarray(batch), jitter=1e-6)
    assert code.ok.tolist() == [True, True, True, False, False]
    assert code.jitter[0] == 0 and 0 < code.jitter[1] <= 1e-5
    assert 0 < code.jitter[2] < 1e-18
    assert np.isfinite(np.asarray(code.packed)).all()
    assert (np.asarray(code.packed)[3:] == 0).all()
    np.testing.assert_allclose(
        cholesky_decode(code.packed, 2)[:3], batch[:3], atol=1e-4
    )
    result = over_devices(
        lambda d: all_reduce_symmetric(d, "replica", wire="cholesky"), 2
    )(jnp.asarray(batch[2:4]))
    assert np.isnan(np.asarray(result)).all()


def test_an_owner_factors_for_all() -> None:
    rows = np.stack([definite(9, 100.0) * (i + 1) for i in range(3)])

    def factors(own: jax.Array) -> tuple[jax.Array, jax.Array]:
        exact = broadcast_factor(own, 1, "replica")
        return exact, broadcast_factor(own, 2, "replica", wire_dtype=jnp.bfloat16)

    exact, rounded = over_devices(factors, 3)(jnp.asarray(rows))
    assert (np.asarray(exact) == np.tril(exact)).all()
    np.testing.assert_allclose(product(exact), rows[1], atol=1e-6)
    assert (np.asarray(rounded).astype(jnp.bfloat16) == np.asarray(rounded)).all()
    local = broadcast_factor(jnp.asarray(rows[1]), 0, None)
    np.testing.assert_allclose(local, exact, atol=1e-6)
    refused = broadcast_factor(-jnp.eye(2), 0, None)
    assert np.isnan(np.asarray(refused)[1]).all()


@pytest.mark.parametrize("num", [2, 5])
def test_factors_are_reduced_without_forming_a_matrix(num: int) -> None:
    rows = np.stack([np.linalg.cholesky(definite(6, 10.0**i)) for i in range(num)])
    batched = jnp.asarray(np.stack([rows, 2 * rows], axis=1))
    result = over_devices(lambda own: reduce_factors(own, "replica"), num)(batched)
    wanted = product(batched).sum(0)
    np.testing.assert_allclose(product(result), wanted, atol=1e-4)
    assert (np.diagonal(result, axis1=-2, axis2=-1) >= 0).all()
    assert (np.asarray(result) == np.tril(result)).all()
    assert (reduce_factors(batched[0], None) == batched[0]).all()


def test_one_device_gives_what_a_mesh_of_one_gives() -> None:
    lopsided = jnp.array([[1.0, 9.0], [2.0, 3.0]])
    assert all_reduce_symmetric(lopsided, None).tolist() == [[1.0, 2.0], [2.0, 3.0]]
    factor = jnp.array([[-2.0, 9.0], [1.0, 3.0]])
    assert reduce_factors(factor, None).tolist() == [[2.0, 0.0], [-1.0, 3.0]]
    one = over_devices(lambda own: reduce_factors(own, "replica"), 1)(factor[None])
    np.testing.assert_allclose(one, reduce_factors(factor, None), atol=1e-6)


def test_factors_below_float32_are_widened() -> None:
    factors = jnp.ones((2, 1, 1), jnp.bfloat16)
    total = over_devices(lambda own: reduce_factors(own, "replica"), 2)(factors)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, 2**0.5, rtol=1e-6)


def test_qr_combine_in_float64_is_accurate() -> None:
    with jax.enable_x64(True):
        one, two = (jnp.asarray(definite(20, c, np.float64)) for c in (1e3, 1e6))
        combined = qr_combine(jnp.linalg.cholesky(one), jnp.linalg.cholesky(two))
        error = np.linalg.norm(product(combined) - (one + two))
        assert error / np.linalg.norm(one + two) < 2e-15


def test_options_that_do_not_go_together() -> None:
    d = jnp.eye(2)
    with pytest.raises(ValueError, match="does not go with wire='cholesky'"):
        all_reduce_symmetric(d, None, wire="cholesky", algorithm="ring")
    with pytest.raises(ValueError, match="wire='half' is unknown"):
        all_reduce_symmetric(d, None, wire="half")  # pyright: ignore
    with pytest.raises(ValueError, match="op='max' is unknown here"):
        all_reduce_symmetric(d, None, op="max")  # pyright: ignore
    with pytest.raises(ValueError, match="wire_dtype=.*is not floating"):
        all_reduce_symmetric(d, None, wire_dtype=jnp.int8)
    with pytest.raises(ValueError, match="dtype int32. Allowed: floating"):
        cholesky_encode(jnp.eye(2, dtype=jnp.int32))
    with pytest.raises(ValueError, match="jitter=0 must be > 0"):
        cholesky_encode(d, jitter=0)
    assert (all_reduce_symmetric(d, None) == d).all()


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e10, jnp.float16), (1e-18, jnp.float16), (1e6, jnp.float8_e4m3fn)],
)
def test_a_factor_that_the_wire_cannot_hold_is_not_ok(scale: float, dtype: Any) -> None:
    code = cholesky_encode(scale * jnp.eye(2), wire_dtype=dtype)
    assert not bool(code.ok)
    assert (np.asarray(cholesky_decode(code.packed, 2)) == 0).all()


def test_jitter_is_relative_for_small_matrices_too() -> None:
    small = jnp.array([[1.0, 2.0], [2.0, 4.0]]) * 1e-26
    code = cholesky_encode(small)
    decoded = np.asarray(cholesky_decode(code.packed, 2), np.float64)
    assert bool(code.ok)
    np.testing.assert_allclose(decoded, np.asarray(small, np.float64), rtol=1e-3)


def test_factors_that_do_not_go_together_are_refused() -> None:
    one = jnp.eye(2)
    for other in (jnp.eye(3), jnp.eye(2, dtype=jnp.bfloat16)):
        with pytest.raises(ValueError, match="second is"):
            qr_combine(one, other)
    narrow = jnp.eye(2, dtype=jnp.bfloat16)
    assert qr_combine(narrow, narrow).dtype == jnp.float32
    with pytest.raises(ValueError, match="Allowed: floating"):
        all_reduce_symmetric(jnp.ones((2, 2), jnp.int32), None, wire="cholesky")
    with pytest.raises(ValueError, match="n=4.0"):
        unpack_lower(jnp.ones(10), 4.0)  # pyright: ignore[reportArgumentType]


def _gradients(function: Any, matrices: Any) -> np.ndarray:
    """Of a weighted sum of a function's result, on all devices at once."""
    n = matrices.shape[-1]
    weights = np.arange(1.0, n * n + 1, dtype=np.float32).reshape(n, n)
    loss = over_devices(lambda own: (weights * function(own)).sum(), len(matrices))
    return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(matrices)))


WIRES: Any = ("full", "packed", "cholesky")


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_of_every_wire_is_that_of_the_sum(op: Any) -> None:
    rows = np.stack([definite(5, 100.0) * (i + 1) for i in range(3)])
    full, packed, cholesky = (
        _gradients(
            lambda d, wire=wire: all_reduce_symmetric(d, "replica", op=op, wire=wire),
            rows,
        )
        for wire in WIRES
    )
    assert np.abs(packed).max() > 1
    np.testing.assert_allclose(full, packed, rtol=1e-6)
    np.testing.assert_allclose(cholesky, packed, rtol=1e-6)


@pytest.mark.parametrize("axis", ["replica", None])
def test_a_broadcast_factor_is_not_differentiated(axis: Any) -> None:
    rows = np.stack([definite(3, 10.0)] * 2)
    with pytest.raises(ValueError, match="broadcast_factor: matrix is differentiated"):
        _gradients(
            lambda d: jax.lax.psum(broadcast_factor(d, 0, axis) @ d, "replica"), rows
        )
    stopped = _gradients(
        lambda d: jax.lax.psum(
            broadcast_factor(jax.lax.stop_gradient(d), 0, axis) @ d, "replica"
        ),
        rows,
    )
    assert np.abs(stopped).max() > 0


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_a_wire_that_would_round_exact_matrices_is_refused(dtype: Any) -> None:
    matrix = jnp.asarray(symmetric(3, dtype=dtype)) * 1_000_003
    for wire in ("full", "packed"):
        with pytest.raises(ValueError, match=f"would round a matrix of {matrix.dtype}"):
            all_reduce_symmetric(matrix, "replica", wire=wire, wire_dtype=jnp.bfloat16)


def test_lists_in_the_place_of_matrices_and_a_traced_owner_are_refused() -> None:
    matrix: Any = [[1.0, 0.0], [0.0, 1.0]]
    calls: dict[str, Any] = {
        "matrix": lambda: (pack_lower(matrix), all_reduce_symmetric(matrix, None)),
        "packed": lambda: unpack_lower(matrix[0], 2),
        "first": lambda: qr_combine(matrix, matrix),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} is a list. Allowed: one array"):
            call()
    with pytest.raises(ValueError, match="owner is a traced .*int32"):
        jax.jit(lambda owner: broadcast_factor(jnp.eye(2), owner, None))(0)


def test_auto_takes_the_wire_that_was_measured_the_cheapest() -> None:
    rows = np.stack([definite(6, 100.0) * (i + 1) for i in range(2)])
    others: Any = {"full": 2.0, "packed": 2.0, "cholesky": 2.0}
    for cheapest in others:
        costs = WireCosts(seconds={6: {**others, cheapest: 1.0}, 600: others})
        auto, named = (
            over_devices(
                lambda d, options=options: all_reduce_symmetric(
                    d, "replica", **options
                ),
                2,
            ).lower(jnp.asarray(rows))
            for options in ({"wire": "auto", "costs": costs}, {"wire": cheapest})
        )
        assert auto.as_text() == named.as_text()
    # Factors cannot be summed in a ring, and integers have none.
    costs = WireCosts(seconds={6: {**others, "cholesky": 1.0, "packed": 1.5}})
    possible: Any = ((rows, "ring"), (rows.astype(np.int32), "native"))
    for matrices, algorithm in possible:
        reduced = over_devices(
            lambda d, how=algorithm: all_reduce_symmetric(
                d, "replica", wire="auto", costs=costs, algorithm=how
            ),
            2,
        )(jnp.asarray(matrices))
        np.testing.assert_allclose(reduced, matrices.sum(0), rtol=1e-5)


def test_wires_are_measured_on_the_mesh() -> None:
    mesh = jax.make_mesh((2,), ("replica",), (AxisType.Auto,))
    costs = measure_wires(mesh, "replica", [4, 16], rounds=2)
    assert costs.seconds.keys() == {4, 16}
    assert all(s > 0 for found in costs.seconds.values() for s in found.values())
    with pytest.raises(ValueError, match="axis_name='fsdp' is not an axis of the mesh"):
        measure_wires(mesh, "fsdp", [4])
    with pytest.raises(ValueError, match="wire='auto' with costs=None"):
        all_reduce_symmetric(jnp.eye(2), None, wire="auto")
    with pytest.raises(ValueError, match="wire='packed' with costs=WireCosts"):
        all_reduce_symmetric(jnp.eye(2), None, costs=costs)


def test_wires_run_in_one_order_however_they_are_given() -> None:
    mesh = jax.make_mesh((2,), ("replica",), (AxisType.Auto,))
    orders: list[Any] = [["cholesky", "full"], {"full", "cholesky"}]
    for wires in orders:
        costs = measure_wires(mesh, "replica", [4], wires=wires, rounds=1)
        assert list(costs.seconds[4]) == ["full", "cholesky"]


@pytest.mark.parametrize("seconds", [{}, {4: {}}, {0: {"full": 1.0}}])
def test_costs_that_hold_nothing_are_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds={.* Allowed: .*measure_wires"):
        WireCosts(seconds=seconds)


def test_costs_are_wire_costs() -> None:
    costs: Any = {2: {"full": 1.0}}
    with pytest.raises(ValueError, match="costs={.* is a dict. Allowed: a WireCosts"):
        all_reduce_symmetric(jnp.eye(2), None, wire="auto", costs=costs)
