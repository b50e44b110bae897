"""A few hundred single faults on the wire; `wire_faults.py` runs thousands."""

from pathlib import Path

from tests.checkpoint import wire_faults


def test_single_faults_are_detected_or_survived(tmp_path: Path) -> None:
    tally, wrong = wire_faults.run(200, seed=0, folder=tmp_path, workers=8)
    assert wrong == []
    ends = {result for _, _, result in tally}
    assert ends == {"survived", "detected", "not reached"}
    reached = [key for key in tally if key[2] != "not reached"]
    assert {kind for _, kind, _ in reached} == set(wire_faults.KINDS)
