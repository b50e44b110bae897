"""A few hundred single faults, all kinds in it; `wire_faults.py` runs thousands."""

from pathlib import Path

import pytest

from tests.support import memory_faults, wire_faults


@pytest.mark.timeout(180)  # they mostly wait, longer on a busy machine
def test_single_faults_are_detected_or_survived(tmp_path: Path) -> None:
    both, tally = {"survived", "detected"}, set[tuple[str, str, str]]()
    for seed in (4, 5, 6):  # on a busy machine, transfers may end before their faults
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = wire_faults.run(160, seed=seed, folder=folder, workers=16)
        assert found.wrong == []
        tally |= set(found.tally)
        reached = [key for key in tally if key[2] != "not reached"]
        whole = {kind for _, kind, _ in reached}
        kinds = {kind.partition(" ")[0] for kind in whole}
        if kinds >= set(wire_faults.KINDS) and whole >= set(memory_faults.FAULTS):
            break
    assert both <= {result for *_, result in tally} <= {*both, "not reached"}
    assert kinds >= set(wire_faults.KINDS) and whole >= set(memory_faults.FAULTS)
    assert {scenario for scenario, _, _ in reached} == set(wire_faults.SCENARIOS)
