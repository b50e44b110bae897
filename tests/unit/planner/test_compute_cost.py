"""Matmul time with whole tiles and waves, memory, overlap."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.cluster.catalog import device_type
from dtft.planner.cluster.hardware import DeviceType, Efficiency
from dtft.planner.cost.compute import (
    added_s,
    elementwise_s,
    launch_s,
    matmul_s,
    memory_s,
    shape_factor,
)

A100 = device_type("a100")
PLAIN = DeviceType(
    name="plain",
    platform="other",
    peak_flops={"float32": 1e12},
    memory_bytes=2**34,
    memory_bandwidth=1e11,
    efficiency=Efficiency(e0=0.5, memory=0.5, fuse=0.25),
    source="test",
)


def test_a_large_matmul_takes_its_flops_over_the_peak() -> None:
    expected = 2 * 4096**3 / (0.5 * 1e12)
    assert matmul_s(PLAIN, 4096, 4096, 4096, dtype="float32") == pytest.approx(expected)
    together = matmul_s(PLAIN, 4096, 4096, 4096, batch=3, dtype="float32")
    assert together == pytest.approx(3 * expected)


def test_a_thin_matmul_takes_its_bytes() -> None:
    expected = (4096 + 4096**2 + 4096) * 4 / (0.5 * 1e11)
    assert matmul_s(PLAIN, 1, 4096, 4096, dtype="float32") == pytest.approx(expected)


def test_few_rows_are_less_efficient() -> None:
    slow = replace(PLAIN, efficiency=replace(PLAIN.efficiency, x0=512.0))
    times = [
        matmul_s(slow, rows, 8192, 8192, dtype="float32") for rows in (512, 1 << 22)
    ]
    assert times[0] / 512 == pytest.approx(2 * times[1] / (1 << 22), rel=1e-3)


def test_the_cliff_of_hidden_sizes() -> None:
    """Reference section 3: h 14400 gave 94 TFLOP/s, h 13824 gave 120 (heads 96, 64)."""

    def speed(hidden: int, heads: int) -> float:
        tokens, tensor = 2048, 4
        head = hidden // heads
        shapes = [
            (tokens, 3 * hidden // tensor, hidden, 1),
            (tokens, hidden, hidden // tensor, 1),
            (tokens, 4 * hidden // tensor, hidden, 1),
            (tokens, hidden, 4 * hidden // tensor, 1),
            (tokens, tokens, head, heads // tensor),
            (tokens, head, tokens, heads // tensor),
        ]
        flops = sum(2 * m * n * k * batch for m, n, k, batch in shapes)
        return flops / sum(matmul_s(A100, m, n, k, b) for m, n, k, b in shapes)

    assert speed(13824, 64) > 1.05 * speed(14400, 96)
    assert speed(13824, 64) > speed(13824, 128)


def test_whole_tiles_and_full_waves_lose_nothing() -> None:
    square = replace(A100, cores=64)
    assert shape_factor(square, 1024, 1024, 1024) == 1
    assert shape_factor(square, 1024, 1024 + 128, 1024) == pytest.approx(72 / 128)
    assert shape_factor(square, 1024, 1024, 1024 + 32) < 1
    assert shape_factor(square, 1024, 1024, 1024 - 4) == pytest.approx(1020 / 1024 / 2)


@given(
    st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**5),
    st.integers(1, 64), st.sampled_from(["bfloat16", "float32", "int8", "float64"]),
)  # fmt: skip
def test_a_matmul_is_never_faster_than_peak_or_memory(
    m: int, n: int, k: int, batch: int, dtype: str
) -> None:
    seconds = matmul_s(A100, m, n, k, batch, dtype)
    assert seconds >= 2 * m * n * k * batch / A100.peak(dtype)
    assert seconds >= (m * k + k * n + m * n) * batch / A100.memory_bandwidth
    assert 0 < shape_factor(A100, m, n, k, batch, dtype) <= 1


@given(
    st.sampled_from(["h100", "a100", "tpu-v5p", "cpu"]),
    st.tuples(*[st.integers(1, 600)] * 4),
    st.tuples(*[st.integers(0, 300)] * 4),
    st.floats(0, 512),
    st.sampled_from([1, 2, 3, 4]),
)
def test_no_matmul_takes_longer_than_a_larger_one(
    name: str, sizes: tuple[int, ...], more: tuple[int, ...], x0: float, few: int
) -> None:
    device = device_type(name)
    device = replace(device, efficiency=replace(device.efficiency, x0=x0))
    steps = (1, 16, 16, 1)  # of whole aligned rows
    small = [n * step for n, step in zip(sizes, steps, strict=True)]
    extra = [n * step for n, step in zip(more, steps, strict=True)]
    large = [n + m for n, m in zip(small, extra, strict=True)]
    least, most = (
        matmul_s(device, m, n, k, batch) for m, n, k, batch in (small, large)
    )
    assert least <= most * (1 + 1e-9)
    thinner = matmul_s(device, small[0], small[1], few, small[3])
    assert thinner <= least * (1 + 1e-9)


@given(st.lists(st.tuples(*[st.integers(1, 20000)] * 3), min_size=1, max_size=20))
def test_arrays_give_what_each_number_gives(shapes: list[tuple[int, int, int]]) -> None:
    m, n, k = np.array(shapes).T
    together = matmul_s(A100, m, n, k, batch=2)
    alone = [matmul_s(A100, *shape, batch=2) for shape in shapes]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_broadcasting() -> None:
    rows, columns = np.array([[128], [256]]), np.array([[64, 128, 4096]])
    assert matmul_s(A100, rows, columns, 512).shape == (2, 3)


def test_memory_launch_and_what_fusion_leaves() -> None:
    assert memory_s(PLAIN, 1e9) == pytest.approx(1e9 / 0.5e11)
    assert elementwise_s(PLAIN, 1e9) == pytest.approx(1e9 / 0.5e11)
    assert launch_s(A100, 1000) == pytest.approx(1000 * A100.efficiency.launch_s)
    np.testing.assert_allclose(memory_s(PLAIN, np.array([0, 5e10])), [0, 1])


@pytest.mark.parametrize(
    ("name", "dtype", "priced_as"),
    [
        ("a100", "float8_e5m2", "float16"),  # as XLA widens it
        ("h100", "float4_e2m1fn", "float16"),
        ("h100", "int4", "int8"),
        ("v100", "int8", "float32"),
        ("v100", "bfloat16", "float32"),  # its tensor cores have float16 only
        ("t4", "bfloat16", "float32"),
        ("a100", "int32", "float32"),  # not as float64, the slowest that is listed
        ("gb300", "int32", "float32"),
        ("cpu", "bfloat16", "float32"),
        ("cpu", "int8", "float32"),
        ("tpu-v5p", "float8_e4m3fn", "bfloat16"),
        ("tpu-v5p", "float64", "bfloat16"),
        ("a10g", "float64", "tensorfloat32"),
    ],
)
def test_a_dtype_without_a_peak_is_priced_by_a_rule_and_said(
    name: str, dtype: str, priced_as: str
) -> None:
    device = device_type(name)
    rate = device.rate(dtype)
    assert not rate.listed and rate.priced_as == priced_as
    assert rate.flops == device.peak(dtype) == device.peak_flops[priced_as]
    said = device.unlisted_text(rate)
    start = f"{dtype} has no known peak on {name}: priced as {priced_as}"
    assert said.startswith(start)
    assert ("which it cannot exceed" in said) == (dtype == "float64")
    has_float16 = dtype == "bfloat16" and name in ("v100", "t4")
    assert (". float16 has" in said) == has_float16


def test_formats_of_float8_have_one_peak_and_complex_is_of_reals() -> None:
    h100 = device_type("h100")
    assert h100.rate("float8_e5m2").listed
    assert h100.peak("float8_e5m2") == h100.peak("float8_e4m3fn") > h100.peak("float16")
    assert A100.rate("complex128") == A100.rate("float64")
    assert A100.rate("complex64").wanted == "tensorfloat32"


@pytest.mark.parametrize(
    ("name", "precision", "share"),
    [
        ("a100", "", 312 / 156), ("a100", "high", 312 / 156),
        ("a100", "highest", 312 / 19.5), ("a100", "TF32_TF32_F32_X3", 3 * 312 / 156),
        ("a100", "BF16_BF16_F32", 1), ("a100", "BF16_BF16_F32_X9", 9),
        ("a100", "F32_F32_F32", 16), ("tpu-v5p", "", 1), ("tpu-v5p", "high", 3),
        ("tpu-v5p", "highest", 6),
    ],
)  # fmt: skip
def test_precision_says_what_float32_is_computed_in(
    name: str, precision: str, share: float
) -> None:
    device = device_type(name)
    found = device.rate("float32", precision)
    assert found.listed
    assert device.peak("bfloat16") / found.flops == pytest.approx(share)
    longer = matmul_s(device, *(8192,) * 3, dtype="float32", precision=precision)
    assert longer >= 8192**3 * 2 / found.flops
    assert device.peak("bfloat16", precision) in (found.flops, device.peak("bfloat16"))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 3), st.floats(0, 1))
def test_overlap_hides_but_never_pays(
    collective: float, compute: float, kappa: float, fraction: float
) -> None:
    efficiency = Efficiency(overlap_kappa=kappa, overlap_fraction=fraction)
    added = added_s(efficiency, collective, compute)
    assert max(0.0, collective - compute) <= added + 1e-12
    assert added <= collective + 1e-12


def test_overlap_of_the_reference() -> None:
    none = Efficiency(overlap_fraction=0.0)
    assert added_s(none, 2.0, 8.0) == 2.0
    free = Efficiency(overlap_kappa=1.0)
    assert added_s(free, 2.0, 8.0) == 0 and added_s(free, 9.0, 8.0) == 1


def test_what_is_in_the_cache_is_fast_unless_it_was_not_used_just_now() -> None:
    near = replace(PLAIN.efficiency, cache_bytes=1e6, cache_gain=4.0)
    cached = replace(PLAIN, efficiency=near)
    assert memory_s(cached, 1e6) == pytest.approx(memory_s(PLAIN, 1e6) / 4)
    assert memory_s(cached, 1e6, cold=True) == pytest.approx(memory_s(PLAIN, 1e6))
    beyond = memory_s(cached, 5e6) - memory_s(cached, 1e6)
    assert beyond == pytest.approx(memory_s(PLAIN, 4e6))


def test_functions_cost_more_than_the_bytes_they_move() -> None:
    slow = replace(PLAIN, efficiency=replace(PLAIN.efficiency, special_s=1e-9))
    assert elementwise_s(slow, 4e3, simple=1e3) == elementwise_s(PLAIN, 4e3)
    assert elementwise_s(slow, 4e3, simple=1e3, special=1e3) == pytest.approx(1e-6)


def test_a_matrix_by_a_vector_takes_what_reading_it_takes() -> None:
    device = device_type("rtx4090")
    for m, n in ((8, 1), (1, 8), (1, 1)):
        num_bytes = 2 * (2e8 * (m + n) + m * n)
        assert matmul_s(device, m, n, 2e8) == memory_s(device, num_bytes)


def test_cores_share_the_sum_of_a_product_with_few_tiles() -> None:
    device = device_type("h100")
    tile_m, tile_n, tile_k = device.tile
    one_tile = shape_factor(device, tile_m, tile_n, 4096 * tile_k)
    assert one_tile == 1.0  # all 132 cores have a part of k
    few_steps = shape_factor(device, tile_m, tile_n, 3 * tile_k)
    assert few_steps == pytest.approx(1 / device.cores)  # too short to be divided
    half_full = shape_factor(device, device.cores * tile_m, tile_n, 4096 * tile_k)
    assert half_full == 1.0


@pytest.mark.parametrize("m", [1, 8, 128, 768, 4096])
def test_a_longer_sum_never_takes_less(m: int) -> None:
    times = matmul_s(A100, m, 768, 64 * np.arange(1, 2000))
    assert np.all(np.diff(times) >= -1e-12 * times[1:])
