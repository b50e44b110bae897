"""A few hundred single faults, all kinds in it; `wire_faults.py` runs thousands."""

from pathlib import Path

import pytest

from tests.checkpoint import memory_faults, wire_faults


@pytest.mark.timeout(180)  # they mostly wait, longer on a busy machine
def test_single_faults_are_detected_or_survived(tmp_path: Path) -> None:
    found = wire_faults.run(160, seed=4, folder=tmp_path, workers=16)
    assert found.wrong == []
    # What is reached depends on the machine; the thousands say which never was.
    ends = {result for _, _, result in found.tally}
    assert {"survived", "detected"} <= ends
    kinds = {kind for _, kind, _ in found.tally}
    assert {kind.partition(" ")[0] for kind in kinds} >= set(wire_faults.KINDS)
    assert kinds >= set(memory_faults.FAULTS)
    assert {scenario for scenario, _, _ in found.tally} == set(wire_faults.SCENARIOS)
