"""What the leader tells people: lines on stdout and the run's `events.jsonl`.

Also reads which steps storage holds (finished directories only). Decides nothing.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from dtft.elastic.recovery import RecoveryReport


class Journal:
    """The run's event log; appended to by whichever host leads."""

    def __init__(self, run_directory: Path, host: str) -> None:
        """Events go to `events.jsonl` in the run directory."""
        self._path, self._host = run_directory / "events.jsonl", host
        self.last_commit = 0

    def say(self, text: str) -> None:
        """Prints one line for people, and records it."""
        print(f"dtft: {text}", flush=True)
        self.event("message", text=text)

    def event(self, kind: str, **fields: Any) -> None:
        """Appends one event with the wall-clock time."""
        record = {"time": time.time(), "event": kind, "by": self._host, **fields}
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def committed(self, step: int) -> None:
        """Remembers and records a commit."""
        self.last_commit = step
        self.event("commit", step=step)

    def recovery(self, report: RecoveryReport, detected: float, ended: float) -> None:
        """Prints the recovery line and records every figure."""
        fields = dataclasses.asdict(report)
        fields["steps_lost"] = report.steps_lost
        self.event("recovery", detected=detected, ended=ended, **fields)
        print(f"dtft: {report.line()}", flush=True)


def read_events(run_directory: Path) -> list[dict[str, Any]]:
    """All events of a run so far; a torn last line is left out."""
    path = run_directory / "events.jsonl"
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def storage_steps(directory: Path) -> list[int]:
    """Steps whose checkpoint is complete: Orbax renames a directory when it is."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
