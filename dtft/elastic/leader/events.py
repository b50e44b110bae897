"""The leader's messages: lines on stdout and the run's `events.jsonl`."""

import contextlib
import dataclasses
import json
import math
import os
import queue
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from dtft.elastic.leader.recovery import RecoveryReport

KEPT_EVENTS = 10_000
"""Largest number of events kept in memory while the event log cannot be written."""
HANGS_S = 1.0
"""Seconds after which a write counts as hanging; a healthy disk takes milliseconds."""
IDLE_S = 5.0
"""Seconds without an event after which the writing thread ends."""


class Journal:
    """The leading host's messages on stdout, and its events in the run's event log.

    Calls return at once, because threads print and write. While the log cannot be
    written, the newest 10,000 events wait in memory (`KEPT_EVENTS`), and older events
    are lost. A line that cannot be printed is dropped.
    """

    def __init__(self, run_directory: Path, host: str) -> None:
        """Opens no file yet; the log is `events.jsonl` in the run directory.

        Args:
            run_directory: the run directory.
            host: the leading host's name, written into each event.
        """
        self._path, self._host = run_directory / "events.jsonl", host
        self._waiting: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: dict[str, str] = {}
        self._changed = threading.Condition(threading.RLock())
        self._asked = self._done = 0
        self._begun = math.inf
        """Monotonic time at which the current write began; infinity between writes."""
        self._running = self._hangs = self._torn = self._speaking = False
        self.last_commit = 0

    def say(self, text: str) -> None:
        """Prints a message and appends it to the event log."""
        self._tell(text)
        self.event("message", text=text)

    def _tell(self, text: str) -> None:
        """Prints a line, but does not log it.

        A separate thread prints, because a write to stdout may block.
        """
        with self._changed:
            self._lines.put(text)
            if not self._speaking:
                self._speaking = True
                threading.Thread(target=self._speak, daemon=True).start()

    def _speak(self) -> None:
        while True:
            with self._changed:
                if self._lines.empty():
                    self._speaking = False
                    self._changed.notify_all()
                    return
                text = self._lines.get()
            with contextlib.suppress(OSError):  # stdout may be on a full disk
                print(f"dtft: {text}", flush=True)

    def say_once(self, topic: str, text: str) -> None:
        """Prints and logs `text`, unless it was the last text on the same `topic`.

        `topic` is any name, such as "waiting". An empty text is not printed, but lets a
        later call print the topic's last text again.
        """
        if text and self._said.get(topic) != text:
            self.say(text)
        self._said[topic] = text

    def event(self, kind: str, **fields: Any) -> None:
        """Queues an event for the event log.

        Args:
            kind: what has happened, such as "commit".
            fields: further values of the event. The wall-clock time and the leading
                host's name are added.
        """
        record = {"time": time.time(), "event": kind, "by": self._host, **fields}
        with self._changed:
            self._waiting.append(json.dumps(record) + "\n")
            self._asked += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True).start()
            self._changed.notify_all()
            if time.monotonic() > self._begun + HANGS_S and not self._hangs:
                self._hangs = True
                self._tell(f"{self._path} hangs; training goes on, events wait")

    def close(self, limit_s: float = HANGS_S) -> None:
        """Waits until events are written and lines printed, at most `limit_s` seconds.

        Events count as written once their write has been tried: if it has failed, they
        stay in memory, and this call does not wait for another try.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._done >= self._asked and not self._speaking, limit_s
            )

    def _run(self) -> None:
        """Writes the waiting events, on a thread of its own.

        Ends after 5 s (`IDLE_S`) without an event; the next event starts a new thread.
        Events whose write failed are tried again with the next event.
        """
        while True:
            with self._changed:
                more = self._changed.wait_for(lambda: self._asked > self._done, IDLE_S)
                if not more:
                    self._running = False
                    return
                asked, lines = self._asked, list(self._waiting)
                self._begun = time.monotonic()
            # After a line torn by a full disk, writing continues on a new line.
            error = self._append("\n" * self._torn + "".join(lines))
            with self._changed:
                for line in lines if error is None else ():
                    if self._waiting and self._waiting[0] is line:
                        self._waiting.popleft()
                self._done, self._torn = asked, error is not None
                self._begun, self._hangs = math.inf, False
                self._changed.notify_all()

    def _append(self, text: str) -> OSError | None:
        left = memoryview(text.encode())
        try:
            # Without a file object, which costs more than the write of a line.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._torn:
                self._tell(
                    f"{self._path} cannot be written ({error.strerror}); training goes "
                    "on, events wait in memory. Free space there, or mount it for "
                    "writing"
                )
            return error
        return None

    def committed(self, step: int, root: str) -> None:
        """Queues a commit event for the log; stores the step as `last_commit`.

        Args:
            step: the committed step.
            root: one digest over the digests of all slices of the step.
        """
        self.last_commit = step
        self.event("commit", step=step, root=root)

    def recovery(self, report: RecoveryReport, detected: float, ended: float) -> None:
        """Prints the line of a recovery's report, and logs the report's fields.

        Args:
            report: the cost of the recovery.
            detected: wall-clock time in seconds at which the failure was noticed.
            ended: wall-clock time in seconds at which every slot trained again.
        """
        fields = dataclasses.asdict(report)
        fields["steps_lost"] = report.steps_lost
        self.event("recovery", detected=detected, ended=ended, **fields)
        self._tell(report.line())


def read_events(run_directory: Path) -> list[dict[str, Any]]:
    """Reads the events of a run so far; returns [] if there is no event log.

    Skips lines that are not JSON, such as a line torn by a full disk.
    """
    return EventReader(run_directory).new()


class EventReader:
    """Reads the events of a run while the run's leaders log them."""

    def __init__(self, run_directory: Path) -> None:
        """Reads nothing yet; the event log need not exist."""
        self._path = run_directory / "events.jsonl"
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the events that were logged since the last call.

        Skips lines that are not JSON, such as a line torn by a full disk. A line that
        is not complete is read by a later call.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._read += len(complete)
        events = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events
