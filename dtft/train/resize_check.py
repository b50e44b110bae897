"""How a drill judges a run whose mesh changed on the way.

Such a run cannot end bit for bit like an undisturbed one: another number of replicas
adds the same numbers in another order. So two things are judged instead: that the state
restored onto each new mesh was the committed one, bit for bit, and that the losses stay
within rounding of the undisturbed run's. Reads what the runs wrote; must not change or
run anything.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.elastic.leader import read_events

LOSS_TOLERANCE = 1e-4
"""Largest difference of a step's loss, as part of the undisturbed run's first loss.

float32 sums in another order differ by about 1e-7; training amplifies that a little at
every step. A row used twice or left out, or one wrong leaf, shows at 1e-3 and more."""

Events = Sequence[dict[str, Any]]
Epoch = tuple[int, int]
Segments = Sequence[tuple[Epoch, int, int]]
"""(epoch, after step, up to step) of what survived."""


def resizes(control: Path, events: Events) -> list[dict[str, Any]]:
    """Every restore onto another mesh: what was committed, what was restored.

    `control_root` is the digest over the undisturbed run's state at that step, where
    the disturbed one was on the same mesh until then; null otherwise.
    """
    roots = {
        event["step"]: event.get("root")
        for event in read_events(control)
        if event["event"] == "commit"
    }
    found: list[dict[str, Any]] = []
    slots: list[int] = []
    for event in events:
        if event["event"] == "assignment":
            slots.append(len(event["slots"]))
        elif event["event"] == "resized":
            entry = {k: v for k, v in event.items() if k not in ("time", "event", "by")}
            entry["hosts"] = slots[-2:]
            same_mesh = set(slots[:-1]) == {slots[0]}
            entry["control_root"] = roots.get(event["step"]) if same_mesh else None
            known = {entry["committed_root"], entry["restored_root"]}
            known |= {entry["control_root"]} - {None}
            entry["bit_exact"] = len(known) == 1 and not event["differing"]
            found.append(entry)
    return found


def compare_losses(control: Path, faulted: Path, segments: Segments) -> dict[str, Any]:
    """The losses of the surviving steps beside those of the undisturbed run."""
    expected = {step: loss for (_, step), loss in _losses(control).items()}
    found = _losses(faulted)
    scale = abs(expected[min(expected)]) if expected else 1.0
    differences: dict[int, float] = {}
    missing: list[int] = []
    for epoch, begin, end in segments:
        for step in range(begin + 1, end + 1):
            if (epoch, step) in found and step in expected:
                differences[step] = abs(found[epoch, step] - expected[step]) / scale
            else:
                missing.append(step)
    worst = max(differences, key=lambda step: differences[step], default=0)
    largest = differences.get(worst, float("inf"))
    return {
        "steps": len(differences),
        "missing": missing,
        "largest_difference": largest,
        "at_step": worst,
        "tolerance": LOSS_TOLERANCE,
        "within_tolerance": not missing and largest <= LOSS_TOLERANCE,
    }


def _losses(directory: Path) -> dict[tuple[Epoch, int], float]:
    """(epoch, step) -> loss."""
    losses = {}
    path = directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill; its step did not survive
        epoch = entry["generation"], entry["attempt"]
        losses[epoch, entry["step"]] = float(entry["loss"])
    return losses


def resize_lines(record: dict[str, Any]) -> list[str]:
    """What a drill's record says of other sizes, for people."""
    lines = []
    for it in record["resized"]:
        how = "equal bit for bit to" if it["bit_exact"] else "DIFFERENT from"
        lines.append(
            f"dtft: from {it['hosts'][0]} to {it['hosts'][-1]} hosts at step "
            f"{it['step']}: {it['leaves']} leaves on the new mesh are {how} the commit"
        )
    if curve := record.get("loss_curve"):
        right = "within" if curve["within_tolerance"] else "NOT within"
        lines.append(
            f"dtft: losses of {curve['steps']} steps differ by at most "
            f"{curve['largest_difference']:.1e} of the first, {right} "
            f"{curve['tolerance']:.0e}"
        )
    return lines
