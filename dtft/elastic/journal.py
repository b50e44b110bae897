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
IDLE_S = 5.0
"""The thread that writes ends when there was nothing to write for so long."""


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
        self._asked, self._done = 0, 0
        self._running, self._hangs = False, False
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
        self._note(kind, fields)
        self._flush()

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        """Has the thread write one more event."""
        record = {"time": time.time(), "event": kind, "by": self._host, **fields}
        with self._changed:
            self._waiting.append(json.dumps(record) + "\n")
            self._asked += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True).start()
            self._changed.notify_all()

    def _flush(self) -> None:
        """Waits until all is written; for a file that hangs only once."""
        with self._changed:
            if self._hangs:
                return
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked, WAIT_S)
            self._hangs = self._done < asked
        if self._hangs:
            _tell(f"{self._path} hangs; training goes on, events wait in memory")

    def _run(self) -> None:
        """Writes what waits, whenever there is more; ends when there is nothing."""
        while True:
            with self._changed:
                more = self._changed.wait_for(lambda: self._asked > self._done, IDLE_S)
                if not more:
                    self._running = False
                    return
                asked, lines = self._asked, list(self._waiting)
            # What follows a line that was torn by a full disk begins anew.
            error = self._append("\n" * self._torn + "".join(lines))
            with self._changed:
                for line in lines if error is None else ():
                    if self._waiting and self._waiting[0] is line:
                        self._waiting.popleft()
                self._done, self._torn = asked, error is not None
                self._hangs = False
                self._changed.notify_all()

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
        """Remembers and records a commit, which waits for nothing.

        Args:
            step: of the commit.
            root: the digest over its slices.
        """
        self.last_commit = step
        self._note("commit", {"step": step, "root": root})

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
