"""What the leader tells people: lines on stdout and the run's `events.jsonl`.

Also reads which steps storage holds (finished directories only). Decides nothing.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from dtft.elastic.recovery import RecoveryReport

KEPT_EVENTS = 10_000
"""Events kept in memory while they cannot be written."""
WAIT_S = 1.0
"""So long is the file waited for; a disk that is well takes milliseconds."""


class Journal:
    """The run's event log; appended to by whichever host leads.

    A disk that is full, read-only or hangs holds up nothing: a thread writes, events
    wait in memory, and what is said is still said.
    """

    def __init__(self, run_directory: Path, host: str) -> None:
        """Events go to `events.jsonl` in the run directory."""
        self._path, self._host = run_directory / "events.jsonl", host
        self._waiting: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._said: dict[str, str] = {}
        self._changed = threading.Condition()
        self._writing, self._hangs = False, False
        self._torn = False
        self.last_commit = 0

    def say(self, text: str) -> None:
        """Prints one line for people, and records it."""
        _tell(text)
        self.event("message", text=text)

    def say_once(self, topic: str, text: str) -> None:
        """Says what is new about a topic; "" is said by being silent."""
        if text and self._said.get(topic) != text:
            self.say(text)
        self._said[topic] = text

    def event(self, kind: str, **fields: Any) -> None:
        """Appends one event with the wall-clock time."""
        record = {"time": time.time(), "event": kind, "by": self._host, **fields}
        with self._changed:
            self._waiting.append(json.dumps(record) + "\n")
        self._flush()

    def _flush(self) -> None:
        """Has what waits written; a file that hangs is waited for only once."""
        with self._changed:
            if not self._writing:
                self._writing = True
                self._hangs = False
                threading.Thread(target=self._write, daemon=True).start()
            if self._hangs:
                return
            self._changed.wait_for(lambda: not self._writing, WAIT_S)
            self._hangs = self._writing
        if self._hangs:
            _tell(f"{self._path} hangs; training goes on, events wait in memory")

    def _write(self) -> None:
        """Writes what waits, until nothing does or it cannot be written."""
        while True:
            with self._changed:
                lines = list(self._waiting)
                # What follows a line that was torn by a full disk begins anew.
                text = "\n" * self._torn + "".join(lines)
            error = self._append(text) if lines else None
            with self._changed:
                if error is None:
                    for line in lines:
                        if self._waiting and self._waiting[0] is line:
                            self._waiting.popleft()
                self._torn = error is not None
                if error is not None or not self._waiting:
                    self._writing = False
                    self._changed.notify_all()
                    return

    def _append(self, text: str) -> OSError | None:
        try:
            with open(self._path, "a") as file:
                file.write(text)
        except OSError as error:
            if not self._torn:
                _tell(
                    f"{self._path} cannot be written ({error.strerror}); training goes "
                    "on, events wait in memory. Free space there, or mount it for "
                    "writing"
                )
            return error
        return None

    def committed(self, step: int, root: str) -> None:
        """Remembers and records a commit; `root` is the digest over its slices."""
        self.last_commit = step
        self.event("commit", step=step, root=root)

    def recovery(self, report: RecoveryReport, detected: float, ended: float) -> None:
        """Prints the recovery line and records every figure."""
        fields = dataclasses.asdict(report)
        fields["steps_lost"] = report.steps_lost
        self.event("recovery", detected=detected, ended=ended, **fields)
        _tell(report.line())


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # stdout may be a file on a full disk
        print(f"dtft: {text}", flush=True)


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
    named = [path for path in directory.iterdir() if path.name.isdigit()]
    return sorted(int(path.name) for path in named if path.is_dir())


def steps_seen(directory: Path) -> list[int]:
    """As `storage_steps`; none where storage cannot be read: the leader goes on."""
    try:
        return storage_steps(directory)
    except OSError:
        return []
