"""What `experiments/gpu_steps.py` measures, without a GPU, and what it makes of it."""

import math
import sys
from dataclasses import replace

import gpu_steps
import jax
import pytest
from gpu_steps import CASES, TABLE, Case, Measurement, Row, cluster_of

SMALL = Case(
    name="small", width=16, layers=2, heads=2, length=8, batch=4, vocabulary=64
)
KINDS = (
    replace(SMALL, dtype="float32", remat=True),
    replace(SMALL, width=96, llama=True, fused=True),
)


def table() -> list[Measurement]:
    return [Measurement.from_json(line) for line in TABLE.read_text().splitlines()]


def test_the_table_has_a_case_once_for_each_device() -> None:
    for device in {row.device for row in table()}:
        cases = [row.case for row in table() if row.device == device]
        assert cases == list(CASES[: len(cases)])
    assert {row.case for row in table()} == set(CASES)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.words)
def test_a_step_is_measured_where_jax_runs(case: Case) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = gpu_steps.measure(case, cudnn=False)
    assert math.log(64) * 0.8 < found.loss < math.log(64) * 1.2
    assert found.step_s > 0 and found.memory_bytes > 0
    assert Measurement.from_json(found.to_json()) == found


def test_errors_are_of_the_measured_step() -> None:
    measured = next(row for row in table() if row.case.name == "small")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plan = gpu_steps.predict(measured.case, cluster_of(measured.device))
    said = plan.prediction
    for step_s, holds in ((said.low_s * 0.9, False), (said.step_s * 1.1, True)):
        row = Row(measured=replace(measured, step_s=step_s), plan=plan)
        assert row.holds == holds
    assert row.error == pytest.approx(1 / 1.1 - 1)
    assert plan.knobs.microbatches == 1 and plan.knobs.remat == "none"


def test_measuring_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", "--measure"])
    with pytest.raises(SystemExit, match="gpu_steps: error: this needs a GPU"):
        gpu_steps.main()


def test_a_device_that_the_catalog_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="'Voodoo 2' is not in the planner's catalog"):
        cluster_of("Voodoo 2")
