"""optax's own suites pass with our optimizers wherever they pass with `adabelief`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import optax_suite

ROOT = Path(__file__).parents[2]
LEAST = {"alias": 16, "contrib": 27, "float64": 1, "sharding": 3}
"""Tests that each suite has for one optimizer, at least."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", optax_suite.SUITES)
@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(it, marks=pytest.mark.more if "guarded" in it else ())
        for it in optax_suite.OURS
    ],
)
def test_our_optimizers_pass_where_adabelief_does(ours: str, suite: str) -> None:
    if optax_suite.source(suite) is None:
        pytest.skip(f"this release of optax ships no {optax_suite.SUITES[suite]}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.optax_suite", suite, ours],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    outcomes = {(row["optimizer"], row["test"]): row for row in rows}
    assert len(outcomes) == len(rows)
    passed = {
        test
        for (name, test), row in outcomes.items()
        if name == optax_suite.THEIRS and row["outcome"] == "passed"
    }
    assert len(passed) >= LEAST[suite]
    wrong = {
        test: outcomes[ours, test]["text"][-1000:]
        for test in passed
        if outcomes[ours, test]["outcome"] != "passed"
    }
    assert not wrong
