"""Starts a storage exporter process and sends steps to the process.

`ExporterProcess` runs `exporter` as a subprocess and passes its answers to a callback.
Every failure of storage or of the process is only reported to the callback, because
slow, full or broken storage must not block or end training.
"""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

from dtft._priority import lower_priority

logger = logging.getLogger(__name__)

NICENESS = 5
"""Niceness of an exporter: the training on its host goes first."""

EXPORTER_START_S = 60.0
"""Seconds that an exporter gets on top of the limit of a save, because a new exporter
first imports JAX. An exporter that has not answered by then is killed."""

END_S = 5.0
"""Seconds in which an exporter must end after it has closed its stdout."""

Hear = Callable[["ExporterProcess", dict[str, Any]], None]
"""Callback that receives each answer; it runs on threads of `ExporterProcess`. Every
answer has `ok`, and an answer about a failure also has `error`. An answer that the
process sent has the `op` of the message that it answers, and the `step` if that message
has one. An answer with `ended` reports the end of the process. If the callback raises
an exception, the process is killed, and its end is reported."""


class ExporterProcess:
    """A subprocess that writes steps to storage; it is not restarted after its end."""

    def __init__(
        self,
        opening: dict[str, Any],
        hear: Hear,
        *,
        open_log: Callable[[], IO[bytes]] | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        """Starts the process on a thread, and sends it the message "open".

        Starting a process can take long on a busy machine, so a thread does it. A
        process that cannot be started is reported as ended. All threads are started
        here, because from Python 3.12 on no thread can be started while the interpreter
        shuts down. During that shutdown, a checkpoint manager that was not closed still
        saves its newest step.

        Args:
            opening: the fields of `exporter.Opening`.
            hear: called with this object and an answer, for every answer of the process
                and at its end (an answer with `ended`).
            open_log: opens the file for the process's stderr; by default the process
                inherits the caller's stderr.
            preexec_fn: called in the new process before the exporter runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._hear, self._open_log, self._preexec = hear, open_log, preexec_fn
        self._process: Future[subprocess.Popen[str]] = Future()
        self._closed = False
        self._ended = False
        self._deadline_s: float | None = None
        """Time at which the process is killed, in seconds on the monotonic clock. None:
        no save is running."""
        self._condition = threading.Condition()
        self._messages: queue.Queue[Callable[[], tuple[str, float]] | None]
        self._messages = queue.Queue()
        self._messages.put(lambda: (json.dumps({"op": "open", **opening}), 0.0))
        try:
            for run in (self._listen, self._guard, self._speak):
                threading.Thread(target=run, name="dtft exporter", daemon=True).start()
        except RuntimeError as error:
            self._process.set_exception(OSError(str(error)))  # ends started threads
            raise

    def save(self, fields: Callable[[], dict[str, Any]], limit_s: float) -> None:
        """Begins to write one step, with a limit of `limit_s` seconds.

        The process ends itself at the limit. A process that hangs is killed 60 s
        (`EXPORTER_START_S`) later.

        Args:
            fields: returns the arguments of `exporter.Exporter.save`. Called on a
                thread, as it may have to fetch slices. An exception of `fields` is
                reported as a failed answer without `op` and `step`.
            limit_s: limit of the save in seconds, from the return of `fields`.
        """

        def message() -> tuple[str, float]:
            found = {"op": "save", **fields(), "timeout_s": limit_s}
            return json.dumps(found), limit_s + EXPORTER_START_S

        self._messages.put(message)

    def close(self) -> None:
        """Kills the process without waiting for its end, which storage may delay."""
        self._messages.put(None)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            if self._process.done() and self._process.exception() is None:
                self._process.result().kill()

    def _start(self) -> "subprocess.Popen[str]":
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(self._open_log()) if self._open_log else None
            process = subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.storage.exporter"],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                preexec_fn=self._preexec,
                # Ctrl-C reaches the caller's whole process group. It must not end the
                # exporter, because the caller may then write its newest step. The
                # exporter ends at the end of its stdin.
                process_group=0,
            )
            lower_priority(NICENESS, process.pid)
            return process

    def _speak(self) -> None:
        """Starts the process and writes the messages to its stdin.

        Kills the process after `close`, or if a write fails. Runs on a thread of its
        own, because a write waits while the pipe is full.
        """
        try:
            process = self._start()
        except Exception as error:
            self._process.set_exception(error)
            return
        with self._condition:
            self._process.set_result(process)
            if self._closed:
                process.kill()
        assert process.stdin is not None
        # `_listen` reports the end of the process.
        with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
            at_end.callback(process.kill)  # the callback `hear` may raise
            pipe = at_end.enter_context(process.stdin)
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
        """Sets the seconds in which the process must answer a save, or be killed.

        `limit_s` of 0: there is no limit.
        """
        with self._condition:
            self._deadline_s = time.monotonic() + limit_s if limit_s else None
            self._condition.notify_all()

    def _guard(self) -> None:
        """Kills the process if it has not answered a save by the deadline of the save.

        Runs on a thread of its own, and returns when the process has ended.
        """
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
        """Passes each answer, and the end of the process, to the callback `hear`."""
        try:
            process = self._process.result()
        except Exception as error:
            self._end(f"no exporter can be started: {error}")
            return
        assert process.stdout is not None
        failure = ""
        try:
            with process.stdout as lines:
                for line in lines:
                    self._take(line)
        except Exception as error:
            logger.exception(
                "an answer of the process that writes steps to storage could not be "
                "handled; the process is killed"
            )
            failure = f"an answer could not be handled: {type(error).__name__}: {error}"
            process.kill()
        self._messages.put(None)
        self._end(failure or _how_it_ended(process))
        process.wait()  # so that the kernel forgets it

    def _take(self, line: str) -> None:
        """Passes a line of the process's output to `hear` if the line is an answer.

        Other lines are only logged: a library may print before the exporter has
        redirected the output of libraries.
        """
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not {"op", "ok"} <= answer.keys():
            if line.strip():
                logger.warning("exporter printed %r", line.strip()[:300])
            return
        if answer["op"] == "save":
            self._expect(0)
        self._hear(self, answer)

    def _end(self, error: str) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify_all()
        self._tell(error, ended=True)

    def _tell(self, error: str, *, ended: bool = False) -> None:
        answer = {"ok": False, "error": error}
        self._hear(self, answer | ({"ended": True} if ended else {}))


def _how_it_ended(process: "subprocess.Popen[str]") -> str:
    """Waits for the end of a process that has closed its stdout; describes the end.

    Kills the process if it has not ended within 5 s (`END_S`).
    """
    try:
        return f"exporter ended with code {process.wait(END_S)}"
    except subprocess.TimeoutExpired:
        process.kill()
        return f"exporter closed its output but did not end in {END_S:.0f} s"
