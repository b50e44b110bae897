"""`dtft calibrate` on this process's CPU devices, with sizes that take no time.

What the fits make of the times is in tests/unit/planner/test_calibration.py.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import dtft
from dtft.calibration.calibrate import ACCELERATOR, CPU, BenchmarkSizes, measure_devices
from dtft.calibration.microbenchmarks import (
    BenchmarkPace,
    ahead_s,
    behind_s,
    collective,
    make_mesh,
    matmul_s,
)
from dtft.cli.calibrate import table
from dtft.cli.dispatch import main
from dtft.planner.cluster.hardware import CollectiveKind
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.calibration import (
    Calibration,
    PastRun,
    apply_calibration,
    link_key,
)
from dtft.planner.cost.compute import LARGE_BYTES, SMALL_BYTES

TINY = BenchmarkSizes(
    dtypes=("float32", "bfloat16"),
    rows=(8,),
    dims=((16, 32),),
    streams=(2**12, 2**14),
    convolutions=((1, 4, 4),),
    images=(1, 4, 4),
    elements=16,
    strided=(16, 32),
    kinds=ACCELERATOR.kinds,
    collectives=(2**10,),
    meeting=(2**10,),
    ahead=(2**10, 2**12),
    overlap=(16, (2**10,)),
    pace=BenchmarkPace(budget_s=1e-4, repeats=1),
)


@pytest.fixture(scope="module")
def found() -> Calibration:
    return measure_devices(jax.devices()[:2], TINY)


def test_transposed_reads_are_timed_at_the_sizes_that_their_costs_hold_for() -> None:
    assert CPU.strided is not None
    num_bytes = tuple(4 * side**2 for side in CPU.strided)  # of float32
    assert num_bytes == (SMALL_BYTES, LARGE_BYTES)


def test_everything_is_measured(found: Calibration) -> None:
    cluster = Cluster.from_devices(jax.devices()[:2])
    key = link_key(cluster.uniform.levels[0].link)
    assert found.device == "cpu" and found.fabric == (key,) and found.num_devices == 2
    assert found.software == f"jax {jax.__version__}" and found.level == 1
    assert set(found.peak_flops) >= {"float32", "bfloat16"}
    assert set(found.links[key].measured) == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute",
    }  # fmt: skip
    assert {"memory", "matmul", "overlap"} < set(found.residuals)
    link = found.links[key]
    assert link.meeting == link.ahead == {}  # one process


def test_it_applies_to_the_devices_it_was_measured_on(found: Calibration) -> None:
    cluster = Cluster.from_devices(jax.devices()[:2])
    pool = apply_calibration(cluster, Calibration.from_json(found.to_json())).uniform
    assert pool.device.source == found.source
    assert pool.levels[0].link == found.links[found.fabric[0]]


def test_the_table_has_every_scalar_with_its_error(found: Calibration) -> None:
    shown = table(found)
    for part in (
        "2 x cpu",
        "peak float32",
        "e0",
        "all_reduce of 2, loopback",
        "median",
    ):
        assert part in shown
    assert all(len(line) <= 88 for line in shown.splitlines())


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
)
def test_the_program_of_a_collective_has_it_once(kind: CollectiveKind) -> None:
    """And it is not optimized away: taking back one's own part would be."""
    mesh = make_mesh(jax.devices(), 2, 4)
    spec = PartitionSpec(("outer", "group", "inner"))
    program = jax.jit(
        jax.shard_map(
            lambda x: collective(kind, x, 4),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )  # fmt: skip
    )
    text = str(program.lower(np.zeros(8 * 64, np.float32)).compile().as_text())
    names = {"permute": "collective-permute"}
    name = names.get(kind, kind.replace("_", "-"))
    if kind == "reduce_scatter":  # XLA:CPU has none, and adds up everything
        assert text.count(" reduce-scatter(") + text.count(" all-reduce(") == 1
    else:
        assert text.count(f" {name}(") + text.count(f" {name}-start(") == 1


def test_members_of_a_group_are_as_far_apart_as_the_level() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_time_is_above_zero_and_starting_the_program_is_not_in_it() -> None:
    mesh = make_mesh(jax.devices()[:1], 1, 1)
    timed = matmul_s(mesh, 8, 8, 8, "float32", BenchmarkPace(budget_s=2e-3, repeats=3))
    assert timed.seconds > 0 and timed.dispatch_s >= 0


def test_all_reduces_are_timed_behind_computing() -> None:
    """One time for each size; the devices of one process do not wait to be woken."""
    mesh = make_mesh(jax.devices()[:2], 1, 2)
    times = behind_s(mesh, (2**10, 2**12), rounds=1)
    assert len(times) == 2 and np.isfinite(times).all()
    several = behind_s(mesh, (2**20,), rounds=3, kind="all_gather", num=4)
    assert len(several) == 1 and np.isfinite(several).all()


def test_gathers_are_timed_beside_computing() -> None:
    """Layers, gathers, and both: nothing of them is left out by the compiler."""
    mesh = make_mesh(jax.devices()[:2], 1, 2)
    computing, gathers, together = ahead_s(mesh, (2**10, 2**12), rounds=3)
    assert min(computing, gathers, together) > 0
    assert together > gathers


def test_processes_measure_fewer_collectives_and_longer() -> None:
    """What they share is timed longer than what each has for itself."""
    some = CPU.among(4)
    assert CPU.among(1) == CPU
    assert set(some.collectives) < set(CPU.collectives)
    assert some.collectives[0] == min(CPU.collectives)
    assert some.collectives[-1] > 2**21  # as large as the gradient of a layer
    assert some.shared.budget_s > some.pace.budget_s > CPU.pace.budget_s


def test_past_runs_make_it_level_2(
    found: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a plan made with it says so, with terms that are larger by the factor."""
    paths = {name: tmp_path / name for name in ("given", "log", "learnt")}
    paths["given"].write_text(found.to_json())
    run = PastRun(
        device=found.device,
        fabric=found.fabric,
        software=found.software,
        plan="x",
        terms={"compute": 1.0},
        step_s=2.0,
    )
    other = replace(run, software="jax 0.1", step_s=9.0)
    lines = [run.to_json()] * 20 + [other.to_json()]
    paths["log"].write_text("\n".join(lines) + "\n")
    words = ["--from", paths["given"], "--runs", paths["log"], "--out", paths["learnt"]]
    assert main(["calibrate", *map(str, words)]) == 0
    assert "20 of 21 past runs are of this cluster" in capsys.readouterr().out
    learnt = Calibration.read(paths["learnt"])
    assert learnt.level == 2 and learnt.scales["compute"] == pytest.approx(2, rel=0.05)
    asked = {
        "loss": lambda params, batch: jnp.mean(batch @ params),
        "optimizer": optax.sgd(0.1),
        "params": jax.ShapeDtypeStruct((16, 16), jnp.float32),
        "batch": jax.ShapeDtypeStruct((8, 16), jnp.float32),
        "cluster": Cluster.from_devices(jax.devices()[:2]),
        "replica": 2,
    }
    first, second = (
        dtft.plan(**asked, calibration=str(paths[name])).prediction
        for name in ("given", "learnt")
    )
    assert first.source == found.source and second.source == learnt.source
    factor = second.terms["compute"] / first.terms["compute"]
    assert factor == pytest.approx(learnt.scales["compute"])
    assert second.scales == learnt.scales and not first.scales


@pytest.mark.parametrize("sizes", [CPU, ACCELERATOR])
def test_sizes_are_those_of_the_reference(sizes: BenchmarkSizes) -> None:
    assert len(sizes.rows) * len(sizes.dims) == 20
    assert len(sizes.collectives) == 8
    assert all(size % (4 * 64) == 0 for size in sizes.collectives)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--devices", "0"], "--devices 0: Allowed: 1 to 256"),
        (["--devices", "1000000"], "--devices 1000000: Allowed: 1 to 256"),
        (["--devices", "9"], "this machine has 8. Allowed: 1 to 8"),
        (["--out", "/nothing/there.json"], "/nothing"),
        (["--from", "/nothing/there.json"], "calibration /nothing/there.json cannot"),
        (["--runs", "/nothing/there.jsonl"], "--runs /nothing/there.jsonl"),
    ],
)
def test_wrong_words_end_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["calibrate", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "memory ..." not in shown
