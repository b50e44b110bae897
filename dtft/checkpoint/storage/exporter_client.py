"""One storage exporter process, from the side that starts it.

Starts `exporter`, hands it one step at a time and reports how each went. Storage may
be slow, full or broken; nothing here may hold up or end training, so every failure is
only reported.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

EXPORTER_START_S = 60.0
"""What an exporter may take beyond the limit of a save: its imports."""

Hear = Callable[["ExporterProcess", dict[str, Any]], None]
"""Called from other threads with each answer: `ok`, else `error`; `op` and `step`, if
the answer is to a message; `ended`, if the process will answer no more."""


class ExporterProcess:
    """A process that writes steps; a new one is started after it has ended."""

    def __init__(
        self,
        opening: dict[str, Any],
        hear: Hear,
        *,
        open_log: Callable[[], IO[bytes]] | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        """Begins to start the process, which opens the directory named in `opening`.

        A thread starts it, as that can take long on a busy machine, and stays while it
        runs. If it cannot be started, that is told as its end. No thread is started
        later: from Python 3.12 on none can be while the interpreter shuts down, which
        is when a manager that nobody closed saves its newest step.

        Args:
            opening: the fields of `exporter.Opening`.
            hear: gets every answer, and the end.
            open_log: gives the file to which the process writes its log; by default the
                caller's stderr.
            preexec_fn: called in the new process before it is an exporter.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._hear, self._open_log, self._preexec = hear, open_log, preexec_fn
        self._process: Future[subprocess.Popen[str]] = Future()
        self._closed = False
        self._ended = False
        self._deadline_s: float | None = None
        """When the process is ended, on the monotonic clock; None if it owes nothing"""
        self._condition = threading.Condition()
        self._messages: queue.Queue[Callable[[], tuple[str, float]] | None]
        self._messages = queue.Queue()
        self._messages.put(lambda: (json.dumps({"op": "open", **opening}), 0.0))
        try:
            for run in (self._listen, self._guard, self._speak):
                threading.Thread(target=run, name="dtft exporter", daemon=True).start()
        except RuntimeError as error:
            self._process.set_exception(OSError(str(error)))  # ends those that run
            raise

    def save(self, fields: Callable[[], dict[str, Any]], limit_s: float) -> None:
        """Begins to write one step, which is given up after `limit_s` seconds.

        The process ends itself then; if it hangs, it is ended `START_S` later.

        Args:
            fields: gives the arguments of `exporter.Exporter.save`. Called on a thread,
                for it may have to fetch slices first; if it raises, that is answered.
            limit_s: of the save, from the moment at which `fields` has returned.
        """

        def message() -> tuple[str, float]:
            found = {"op": "save", **fields(), "timeout_s": limit_s}
            return json.dumps(found), limit_s + EXPORTER_START_S

        self._messages.put(message)

    def close(self) -> None:
        """Ends the process, and does not wait: storage that hangs may hold it."""
        self._messages.put(None)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            if self._process.done() and self._process.exception() is None:
                self._process.result().kill()

    def _start(self) -> "subprocess.Popen[str]":
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(self._open_log()) if self._open_log else None
            return subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.storage.exporter"],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=self._preexec,
            )

    def _speak(self) -> None:
        """Starts the process and writes to it, whose pipe may be full: on a thread."""
        try:
            process = self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._process.set_exception(error)
            return
        with self._condition:
            self._process.set_result(process)
            if self._closed:
                process.kill()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # its end is reported by `_listen`
            with process.stdin as pipe:
                while (message := self._messages.get()) is not None:
                    try:
                        line, limit_s = message()
                    except Exception as error:
                        self._tell(f"{type(error).__name__}: {error}")
                        continue
                    self._expect(limit_s)
                    pipe.write(line + "\n")
                    pipe.flush()

    def _expect(self, limit_s: float) -> None:
        """Ends the process unless it answers in time; 0 for no limit."""
        with self._condition:
            self._deadline_s = time.monotonic() + limit_s if limit_s else None
            self._condition.notify_all()

    def _guard(self) -> None:
        """Ends the process at its deadline, until it has ended."""
        with self._condition:
            while not self._ended:
                if self._deadline_s is None:
                    self._condition.wait()
                elif (left_s := self._deadline_s - time.monotonic()) > 0:
                    self._condition.wait(left_s)
                else:
                    self._deadline_s = None
                    self._process.result().kill()

    def _listen(self) -> None:
        """Tells of answers and of the end."""
        try:
            process = self._process.result()
        except (OSError, subprocess.SubprocessError) as error:
            self._end(f"no exporter can be started: {error}")
            return
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                if answer["op"] == "save":
                    self._expect(0)
                self._hear(self, answer)
        self._messages.put(None)
        self._end(f"exporter ended with code {process.wait()}")

    def _end(self, error: str) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify_all()
        self._tell(error, ended=True)

    def _tell(self, error: str, *, ended: bool = False) -> None:
        answer = {"ok": False, "error": error}
        self._hear(self, answer | ({"ended": True} if ended else {}))
