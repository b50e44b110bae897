"""Fits recover planted scalars under noise; files, what they apply to, past runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtft.planner.cluster import topology
from dtft.planner.cluster.catalog import device_type, link
from dtft.planner.cluster.hardware import (
    CARRIED_OVER,
    CATALOG,
    CollectiveKind,
    Curve,
    Efficiency,
)
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.calibration import (
    Calibration,
    PastRun,
    apply_calibration,
    fit_terms,
    learn,
    left_out_error,
    link_key,
    read_log,
)
from dtft.planner.cost.collectives import collective_s
from dtft.planner.cost.compute import added_s, matmul_s, memory_s
from dtft.planner.cost.fitting import (
    CollectiveTime,
    ConvolutionTime,
    ElementTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
    fit,
    fit_convolutions,
    fit_elements,
    fit_link,
    fit_matmuls,
    fit_memory,
    fit_overlap,
    fit_peak,
)
from dtft.planner.cost.mesh_topology import DeviceGroup

KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "permute",
)


def noisy(seconds: float, rng: np.random.Generator, outliers: float = 0.0) -> float:
    """A measurement 3 % off; some many times too long."""
    late = 5.0 if rng.random() < outliers else 1.0
    return float(seconds * np.exp(rng.normal(0, 0.03)) * late)


@pytest.mark.parametrize("seed", range(3))
def test_matmuls_give_back_efficiency_and_launch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    planted = Efficiency(e0=0.62, x0=90.0, launch_s=9e-6, misaligned=0.5)
    device = replace(device_type("h100"), efficiency=planted)
    times = []
    for m in (16, 128, 512, 2048, 8192):
        for n, k in ((256, 256), (1024, 4096), (2048, 2048), (4096, 4096)):
            true = matmul_s(device, m, n, k) + planted.launch_s
            times.append(MatmulTime(m=m, n=n, k=k, seconds=noisy(true, rng, 0.05)))
    fitted, found = fit_matmuls(device_type("h100"), "bfloat16", times)
    assert fitted.efficiency.e0 == pytest.approx(0.62, rel=0.06)
    assert fitted.efficiency.x0 == pytest.approx(90, rel=0.3)
    assert fitted.efficiency.launch_s == pytest.approx(9e-6, rel=0.15)
    assert found.residual < 0.05 and found.num == 20
    for scalar in ("e0", "launch_s"):
        off = abs(np.log(found.values[scalar] / getattr(planted, scalar)))
        assert off < 4 * found.errors[scalar] < 0.5


def test_a_cpu_gets_the_peak_that_it_reached() -> None:
    device = device_type("cpu")
    times = [
        MatmulTime(m=m, n=512, k=512, seconds=2 * m * 512**2 / 9e9 + 3e-6)
        for m in (16, 32, 64, 512, 1024)
    ]
    fitted, found = fit_matmuls(device, "float32", times)
    assert fitted.peak("float32") == pytest.approx(9e9, rel=0.02)
    assert fitted.efficiency.e0 == pytest.approx(1, rel=0.05)
    assert found.worst < 0.2
    assert fitted.peak("float64") == pytest.approx(fitted.peak("float32") / 2)
    assert fit_peak(fitted, "float64", times).peak("float64") == pytest.approx(
        fitted.peak("float32"), rel=0.05
    )


def test_float32_of_a_gpu_is_measured_as_tensorfloat32() -> None:
    device = device_type("a100")
    times = [
        MatmulTime(m=m, n=4096, k=4096, seconds=2 * m * 4096**2 / 100e12)
        for m in (2048, 4096, 8192)
    ]
    fitted = fit_peak(device, "float32", times)
    assert fitted.peak("float32") == pytest.approx(100e12 / 0.75, rel=0.1)
    assert fitted.peak("float32", "highest") == device.peak("float32", "highest")
    older = fit_peak(device_type("v100"), "float32", times)
    assert older.peak("float32") == older.peak("float32", "highest") > 100e12


def test_memory_gives_back_its_bandwidth() -> None:
    rng = np.random.default_rng(0)
    times = [
        MemoryTime(num_bytes=size, seconds=noisy(4e-6 + size / 2.5e12, rng))
        for size in (10**5, 10**6, 10**7, 10**8, 10**9)
    ]
    device, found = fit_memory(device_type("h100"), times)
    assert device.memory_bandwidth == device_type("h100").memory_bandwidth
    reached = device.memory_bandwidth * device.efficiency.memory
    assert reached == pytest.approx(2.5e12, rel=0.05) and found.residual < 0.05
    cpu, _ = fit_memory(device_type("cpu"), times)
    assert cpu.memory_bandwidth == pytest.approx(2.5e12, rel=0.05)


def test_nothing_is_a_cache_beyond_which_little_was_measured() -> None:
    """Four processes on two cores: the largest stream was slow by chance."""
    times = [
        MemoryTime(num_bytes=size, seconds=size / 3e9 * (4 if size == 2**27 else 1))
        for size in (2**18, 2**20, 2**23, 2**25, 2**27)
    ]
    device, _ = fit_memory(device_type("cpu"), times)
    assert device.efficiency.cache_bytes <= 2**23


def test_small_arrays_stay_in_a_cache() -> None:
    """What half a machine's memory streams and its cache gave, with noise."""
    rng = np.random.default_rng(0)
    planted = Efficiency(memory=1.0, cache_bytes=2e6, cache_gain=6.0)
    known = replace(device_type("cpu"), memory_bandwidth=3e9, efficiency=planted)
    times = [
        MemoryTime(num_bytes=size, seconds=noisy(float(memory_s(known, size)), rng))
        for size in (250_000, 500_000, 1_000_000, 2_000_000, 8_000_000, 128_000_000)
    ]
    device, found = fit_memory(device_type("cpu"), times)
    assert device.efficiency.cache_bytes == 2e6 and found.worst < 0.15
    assert device.efficiency.cache_gain == pytest.approx(6, rel=0.2)
    assert device.memory_bandwidth == pytest.approx(3e9, rel=0.1)


def test_operations_that_are_no_products_give_back_their_time() -> None:
    rng = np.random.default_rng(0)
    times = [
        ElementTime(
            simple=simple,
            special=special,
            seconds=noisy(simple * 2e-10 + special * 3e-9, rng),
        )
        for simple, special in ((8e4, 0.0), (2e4, 1e4), (1e5, 1e4), (6e4, 1e4))
    ]
    device, found = fit_elements(device_type("cpu"), times)
    assert device.efficiency.simple_s == pytest.approx(2e-10, rel=0.15)
    assert device.efficiency.special_s == pytest.approx(3e-9, rel=0.15)
    assert found.residual < 0.1


def test_convolutions_give_back_the_channels_that_halve_their_speed() -> None:
    rng = np.random.default_rng(0)
    device = device_type("cpu")
    fast = device.peak("float32") * device.efficiency.e0
    times = [
        ConvolutionTime(
            flops=1e8, channels=n, seconds=noisy(1e8 / fast * (1 + 60 / n), rng)
        )
        for n in (8, 32, 128)
    ]
    fitted, found = fit_convolutions(device, "float32", times)
    assert fitted.efficiency.c0 == pytest.approx(60, rel=0.15)
    assert found.residual < 0.1


def test_odd_channels_and_copies_are_told_apart_from_few() -> None:
    rng = np.random.default_rng(0)
    device = device_type("cpu")
    device = replace(device, efficiency=replace(device.efficiency, strided_s=1e-8))
    fast = device.peak("float32") * device.efficiency.e0
    times = [
        ConvolutionTime(
            flops=1e8,
            channels=n,
            odd=odd,
            strided=across,
            seconds=noisy(
                1e8 / fast * (1 + 40 / n) * (4 if odd else 1) + across * 1e-8, rng
            ),
        )
        for n, odd, across in ((8, False, 1e5), (32, False, 3e5), (32, True, 0.0))
    ]
    fitted, _ = fit_convolutions(device, "float32", times)
    assert fitted.efficiency.c0 == pytest.approx(40, rel=0.15)
    assert fitted.efficiency.odd == pytest.approx(4, rel=0.15)
    again, _ = fit_convolutions(device, "float32", times[:2])
    assert again.efficiency.odd == 1.0, "nothing odd was measured"


@pytest.mark.parametrize("sizes", [(2, 8), (2, 4, 8), (4,)])
def test_collectives_give_back_the_curve(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    curve = Curve(latency_s=12e-6, bandwidth=33e9, half_bytes=4e5)
    planted = replace(link("ib-400g"), curve=curve)
    times = []
    for kind in KINDS:
        for n in sizes:
            for size in np.geomspace(1e3, 1e8, 8).astype(int).tolist():
                group = DeviceGroup(sizes=(n,), links=(planted,))
                true = collective_s(kind, size, group)
                times.append(
                    CollectiveTime(
                        kind=kind,
                        num_bytes=size,
                        num_devices=n,
                        seconds=noisy(true, rng, 0.03),
                    )
                )
    fitted, fits = fit_link(link("ib-400g"), times)
    assert fitted.curve.bandwidth == pytest.approx(33e9, rel=0.05)
    assert fitted.curve.latency_s == pytest.approx(12e-6, rel=0.15)
    assert set(fitted.measured) == set(KINDS)
    assert set(fits) == {"all", *(f"{kind} of {n}" for kind in KINDS for n in sizes)}
    assert all(found.residual < 0.06 for found in fits.values())
    assert fits["all"].errors["bandwidth"] < 0.05


def test_a_kind_that_is_slower_gets_its_own_curve() -> None:
    port = link("nvlink-3")
    group = DeviceGroup(sizes=(8,), links=(port,))
    times = [
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_devices=8,
            seconds=collective_s(kind, size, group) * (4 if kind == "permute" else 1),
        )
        for kind in KINDS
        for size in (10**4, 10**6, 10**8, 10**9)
    ]
    fitted, _ = fit_link(port, times)
    known = DeviceGroup(sizes=(8,), links=(fitted,))
    factors: dict[CollectiveKind, int] = {"permute": 4, "all_gather": 1}
    for kind, factor in factors.items():
        expected = factor * collective_s(kind, 1e9, group)
        assert collective_s(kind, 1e9, known) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("kappa, fraction", [(1.25, 1.0), (1.0, 0.5), (1.1, 0.8)])
def test_overlap_gives_back_how_much_is_hidden(kappa: float, fraction: float) -> None:
    planted = Efficiency(overlap_kappa=kappa, overlap_fraction=fraction)
    times = [
        OverlapTime(
            compute_s=1.0,
            collective_s=collective,
            together_s=1.0 + float(added_s(planted, collective, 1.0)),
        )
        for collective in (0.2, 0.6, 1.0, 2.0)
    ]
    fitted, off = fit_overlap(Efficiency(), times)
    assert off < 0.01
    for time in times:
        again = 1 + added_s(fitted, time.collective_s, 1.0)
        assert again == pytest.approx(time.together_s, rel=0.02)


def test_what_does_not_overlap_has_fraction_zero() -> None:
    times = [
        OverlapTime(compute_s=1.0, collective_s=m, together_s=(1.0 + m) * 1.02)
        for m in (0.2, 1.0, 2.0)
    ]
    fitted, _ = fit_overlap(Efficiency(), times)
    assert fitted.overlap_fraction == 0


def test_a_scalar_that_nothing_decides_keeps_its_start() -> None:
    found = fit(lambda v: v["a"] * np.ones(3), {"a": 1.0, "b": 7.0}, [2.0, 2.0, 2.0])
    assert found.values["a"] == pytest.approx(2, rel=1e-3)
    assert found.values["b"] == pytest.approx(7)
    with pytest.raises(ValueError, match="all above 0 s"):
        fit(lambda v: v["a"], {"a": 1.0}, [])
    with pytest.raises(ValueError, match="all above 0 s"):
        fit(lambda v: v["a"], {"a": 1.0}, [0.0])


H100 = Cluster.parse("4x8xh100")


def calibration(**changes: object) -> Calibration:
    """One as `dtft calibrate` makes it."""
    levels = H100.uniform.levels
    fast = replace(levels[0].link, curve=Curve(latency_s=1e-6, bandwidth=3e11))
    made = Calibration(
        device="h100",
        fabric=(link_key(levels[0].link),),
        num_devices=8,
        software="jax 0.10.2",
        peak_flops={"bfloat16": 9e14},
        memory_bandwidth=3e12,
        efficiency=Efficiency(e0=0.7, dispatch_s=1e-4),
        links={link_key(levels[0].link): fast},
        errors={"matmul: e0": 0.02},
        residuals={"matmul": 0.04, "memory": 0.01, "collectives on x, all": 0.1},
    )
    return replace(made, **changes)


def test_a_calibration_replaces_what_was_measured_and_nothing_else() -> None:
    cluster = apply_calibration(H100, calibration())
    pool = cluster.uniform
    assert pool.device.efficiency.e0 == 0.7 and pool.device.peak("bfloat16") == 9e14
    assert pool.levels[0].link.curve.bandwidth == 3e11
    assert pool.levels[1] == H100.uniform.levels[1]
    assert pool.device.memory_bytes == H100.uniform.device.memory_bytes
    assert cluster.fingerprint != H100.fingerprint
    mixed = apply_calibration(Cluster.parse("8xh100+8xa100"), calibration())
    assert mixed.pools[0].device.efficiency.e0 == 0.7
    assert mixed.pools[1] == Cluster.parse("8xa100").uniform
    assert apply_calibration(Cluster.parse("h100"), calibration()).uniform.levels == ()
    kept = topology.cluster_from_text(cluster.to_json())
    assert kept.uniform.trust == pool.trust


def test_a_calibration_replaces_the_link_between_pools_too() -> None:
    pair = Cluster.parse("8xh100+8xh100")
    measured = replace(link("ib-400g"), curve=Curve(latency_s=2e-6, bandwidth=3e10))
    made = calibration(links={link_key(link("ib-400g")): measured})
    cluster = apply_calibration(pair, made)
    assert cluster.between == measured
    assert cluster.uniform.levels[-1].link == measured
    single = apply_calibration(Cluster.parse("h100+h100"), made)
    assert single.uniform.levels[0].link == measured
    assert apply_calibration(pair, calibration()).between == pair.between


def test_a_calibration_is_not_carried_elsewhere() -> None:
    with pytest.raises(ValueError, match="is of h100, the cluster 8xa100 has a100"):
        apply_calibration(Cluster.parse("8xa100"), calibration())
    other = calibration(links={"NVLink 1 GB/s": link("nvlink-4")})
    with pytest.raises(ValueError, match="Never carry a calibration to another fabric"):
        apply_calibration(H100, other)
    with pytest.raises(ValueError, match="the cluster h100.h100 has InfiniBand 48 GB"):
        apply_calibration(Cluster.parse("h100+h100"), other)


def test_a_calibration_of_before_is_read() -> None:
    items = json.loads(calibration().to_json())
    for new in ("odd", "window_s", "window_back_s"):
        del items["efficiency"][new]
    efficiency = Calibration.from_json(json.dumps(items)).efficiency
    assert (efficiency.odd, efficiency.window_s, efficiency.window_back_s) == (1, 0, 0)


def test_a_calibration_survives_its_file() -> None:
    made = calibration(
        scales={"compute": 1.1}, num_runs=3, residuals={"runs": 0.1, "matmul": 0.2}
    )
    text = made.to_json()
    assert Calibration.from_json(text) == made
    assert Calibration.from_json(text).to_json() == text


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"schema": 9},
            "schema=9 is not a calibration that this dtft reads. Allowed: 1",
        ),
        ({"schema": None}, "schema=None"),
        ({"strange": 1}, "has not what a calibration has"),
        ({"links": None}, "(links=None. Allowed: an object"),
        ({"num_devices": "8"}, "(num_devices='8'. Allowed: a whole number"),
        ({"peak_flops": {"bfloat16": -1}}, "(peak_flops['bfloat16']=-1. Allowed:"),
        ({"efficiency": {"e0": 7}}, "no device is so"),
        ({"num_runs": 2}, "residuals has no 'runs'"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(
    change: dict[str, object], said: str
) -> None:
    items = json.loads(calibration().to_json()) | change
    with pytest.raises(ValueError) as raised:
        Calibration.from_json(json.dumps(items))
    assert said in str(raised.value) and "dtft calibrate" in str(raised.value)
    with pytest.raises(ValueError, match="is no JSON"):
        Calibration.from_json("{")


def test_a_calibration_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    twice = calibration().to_json().replace('"e0"', '"e0": 1, "e0"', 1).encode()
    for content, said in (
        (b"\xff\xfe", "it is no text"),
        (b"{}", "schema=None"),
        (twice, "is no calibration: the key e0 stands more than once in an object, "),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"calibration \S*c\.json.*{said}"):
            Calibration.read(path)


def test_the_source_and_the_interval_say_what_supports_them() -> None:
    terms = {"compute": 2.0, "collectives": 1.0, "launch": 0.1}
    wide = CATALOG.interval_s(terms)
    trusts = [
        apply_calibration(H100, made).uniform.trust
        for made in (
            calibration(),
            calibration(num_runs=9, residuals={"runs": 0.02}, scales={"compute": 1.1}),
        )
    ]
    measured, learnt = (trust.interval_s(terms) for trust in trusts)
    for low, high in (wide, measured, learnt):
        assert low <= 3.1 < high
    # The catalog's figures are as near to published steps as fitted ones that are
    # carried over; a calibration adds the error of its own fits.
    catalog, fitted, past = (high - low for low, high in (wide, measured, learnt))
    assert past < catalog < fitted < 1.25 * catalog
    assert H100.uniform.trust.source.startswith("catalog (uncalibrated): ")
    assert trusts[0].source == "calibration level 1 (8 x h100, jax 0.10.2)"
    levelled = calibration(scales={"compute": 1.1}, num_runs=3)
    assert "level 2" in levelled.source and "3 past runs" in levelled.source


def runs(num: int, seed: int = 0) -> list[PastRun]:
    """Runs of which computing takes 1.3 and collectives 0.8 of what was predicted."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num):
        terms = {
            "compute": float(rng.uniform(1, 3)),
            "collectives": float(rng.uniform(0.2, 3)),
            "bubble": 0.0,
        }
        true = 1.3 * terms["compute"] + 0.8 * terms["collectives"]
        made.append(
            PastRun(
                device="h100",
                fabric=calibration().fabric,
                software="jax 0.10.2",
                plan=str(number),
                terms=terms,
                step_s=noisy(true, rng),
            )
        )
    return made


def test_past_runs_correct_the_terms() -> None:
    found = fit_terms(runs(12))
    assert found.values["compute"] == pytest.approx(1.3, rel=0.05)
    assert found.values["collectives"] == pytest.approx(0.8, rel=0.1)
    assert found.values["bubble"] == 1
    assert found.residual < 0.05


def test_the_error_of_past_runs_is_that_of_runs_that_were_left_out() -> None:
    """One run says how far off an uncorrected prediction is; many say how far off the
    corrected ones are, and a wild one among many does not widen the interval."""
    (one,) = runs(1)
    alone = abs(one.step_s / sum(one.terms.values()) - 1)
    assert left_out_error([one]) == pytest.approx(
        max(alone, CARRIED_OVER.errors["compute"])
    )
    many = runs(30)
    assert left_out_error(many) < 0.06
    wild = [replace(many[0], step_s=9 * many[0].step_s), *many[1:]]
    assert left_out_error(wild) < 0.1
    learnt = learn(calibration(), many)
    expected = left_out_error(many)
    assert learnt.term_errors == {"compute": expected, "collectives": expected}
    before = replace(learnt, residuals={"runs": 0.02})  # of a file of before
    assert before.term_errors["compute"] == pytest.approx(0.038)


def test_few_runs_move_the_terms_little() -> None:
    """One run cannot tell the terms apart; both are drawn towards 1."""
    one = fit_terms(runs(1)).values
    assert 1 < one["compute"] < 1.35
    many = fit_terms(runs(30)).values
    assert abs(many["collectives"] - 0.8) < abs(one["collectives"] - 0.8)
    with pytest.raises(ValueError, match="runs is empty"):
        fit_terms([])


def test_only_runs_of_the_same_cluster_and_software_are_learnt_from() -> None:
    own = runs(10)
    foreign = [replace(run, software="jax 0.12", step_s=99.0) for run in runs(10)]
    foreign += [replace(run, device="a100", step_s=99.0) for run in runs(10)]
    learnt = learn(calibration(), [*foreign, *own])
    assert learnt == learn(calibration(), own)
    assert learnt.num_runs == 10 and learnt.level == 2
    assert learn(calibration(), foreign) == calibration()
    trust = apply_calibration(H100, learnt).uniform.trust
    assert trust.scale("compute") == pytest.approx(1.3, rel=0.1)
    assert trust.scale("launch") == 1


def test_the_log_of_runs_is_read_back() -> None:
    text = "\n".join(run.to_json() for run in runs(3)) + "\n\n"
    assert read_log(text) == runs(3)
    with pytest.raises(ValueError, match="line 4 of the log of runs is no run"):
        read_log(text.strip() + '\n{"plan": 1}\n')
    with pytest.raises(ValueError, match="line 1 of"):
        read_log("nonsense")
    twice = runs(1)[0].to_json()[:-1] + ', "step_s": 1.0}'
    with pytest.raises(ValueError, match="line 1 of .* key step_s stands more than"):
        read_log(twice)
