"""How a drill judges a run whose mesh changed."""

import json
from pathlib import Path

import pytest

from dtft.drills.compare import compare_losses, resize_lines, resizes


def write(directory: Path, name: str, entries: list[dict]) -> None:
    directory.mkdir(exist_ok=True)
    text = "\n".join(json.dumps(entry) for entry in entries) + "\n"
    (directory / name).write_text(text)


def losses(generation: int, *values: float, first: int = 1) -> list[dict]:
    return [
        {"step": step, "generation": generation, "attempt": 1, "loss": loss}
        for step, loss in enumerate(values, first)
    ]


@pytest.mark.parametrize(
    "faulted, largest, right",
    [
        ([*losses(1, 2.0, 1.0), *losses(2, 0.5, first=3)], 0.0, True),
        ([*losses(1, 2.0, 1.0, 9.0), *losses(2, 0.5, first=3)], 0.0, True),  # redone
        ([*losses(1, 2.0, 1.00002), *losses(2, 0.5, first=3)], 1e-5, True),
        ([*losses(1, 2.0, 1.02), *losses(2, 0.5, first=3)], 1e-2, False),
        (losses(1, 2.0, 1.0, 0.5), 0.0, False),  # step 3 of generation 2 is missing
    ],
)
def test_losses_of_what_survived_are_compared(tmp_path, faulted, largest, right):
    control, other = tmp_path / "control", tmp_path / "faulted"
    write(control, "metrics.jsonl", losses(1, 2.0, 1.0, 0.5))
    write(other, "metrics.jsonl", faulted)
    found = compare_losses(control, other, [((1, 1), 0, 2), ((2, 1), 2, 3)])
    assert found["within_tolerance"] is right
    assert found["largest_difference"] == pytest.approx(largest, rel=1e-6)


def assignment(*hosts: str) -> dict:
    return {"event": "assignment", "slots": list(hosts)}


def resized(step: int, **changes: object) -> dict:
    same = {"committed_root": "r", "restored_root": "r", "differing": [], "leaves": 2}
    return {"event": "resized", "step": step, **same, **changes}


@pytest.mark.parametrize(
    "control_root, changes, right",
    [
        ("r", {}, True),
        ("other", {}, False),
        ("r", {"restored_root": "x"}, False),
        ("r", {"differing": ["w"]}, False),
    ],
)
def test_what_was_restored_must_be_what_was_committed(
    tmp_path, control_root, changes, right
):
    commits = [{"event": "commit", "step": s, "root": control_root} for s in (4, 8)]
    write(tmp_path, "events.jsonl", commits)
    events = [
        assignment("a", "b"),
        assignment("a", "b", "c"),
        resized(4, **changes),
        assignment("a"),
        resized(8),
    ]
    first, second = resizes(tmp_path, events)
    assert first["bit_exact"] is right
    assert (first["hosts"], second["hosts"]) == ([2, 3], [3, 1])
    # From step 4 on the undisturbed run adds in another order.
    assert second["control_root"] is None and second["bit_exact"]
    (line, _) = resize_lines({"resized": [first, second]})
    assert ("equal bit for bit" in line) is right and "from 2 to 3 hosts" in line
