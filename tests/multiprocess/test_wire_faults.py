"""A few hundred single faults, all kinds in it; `wire_faults.py` runs thousands."""

from pathlib import Path

import pytest

from tests.support import memory_faults, wire_faults


@pytest.mark.timeout(180)  # they mostly wait, longer on a busy machine
def test_single_faults_are_detected_or_survived(tmp_path: Path) -> None:
    found = wire_faults.run(160, seed=4, folder=tmp_path, workers=16)
    assert found.wrong == []
    ends = {result for _, _, result in found.tally}
    both = {"survived", "detected"}
    assert both <= ends <= {*both, "not reached"}
    reached = [key for key in found.tally if key[2] != "not reached"]
    kinds = {kind.partition(" ")[0] for _, kind, _ in reached}
    assert kinds >= set(wire_faults.KINDS)
    assert {kind for _, kind, _ in reached} >= set(memory_faults.FAULTS)
    assert {scenario for scenario, _, _ in reached} == set(wire_faults.SCENARIOS)
