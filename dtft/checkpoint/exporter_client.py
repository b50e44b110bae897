"""One storage exporter process, from the side that starts it.

Starts `exporter.py`, hands it one step at a time and reports how each went. Storage may
be slow, full or broken; nothing here may hold up or end training, so every failure is
only reported. Must not know which step is due, nor what a step is.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

START_S = 60.0
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
        runs. If it cannot be started, that is told as its end.

        Args:
            opening: the fields of `exporter.Opening`.
            hear: gets every answer, and the end.
            open_log: gives the file to which the process writes its log; by default the
                caller's stderr.
            preexec_fn: called in the new process before it is an exporter.
        """
        self._hear, self._open_log, self._preexec = hear, open_log, preexec_fn
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._messages: queue.Queue[Callable[[], tuple[str, float]] | None]
        self._messages = queue.Queue()
        self._messages.put(lambda: (json.dumps({"op": "open", **opening}), 0.0))
        threading.Thread(target=self._run, name="dtft exporter", daemon=True).start()

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
            return json.dumps(found), limit_s + START_S

        self._messages.put(message)

    def close(self) -> None:
        """Ends the process, and does not wait: storage that hangs may hold it."""
        self._messages.put(None)
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        try:
            process = self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._tell(f"no exporter can be started: {error}", ended=True)
            return
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        self._speak(process)

    def _start(self) -> "subprocess.Popen[str]":
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(self._open_log()) if self._open_log else None
            return subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.exporter"],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=self._preexec,
            )

    def _speak(self, process: "subprocess.Popen[str]") -> None:
        """Writes on a thread: a process that is stuck does not read, and pipes fill."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # its end is reported by `_listen`
            with process.stdin as pipe:
                while (message := self._messages.get()) is not None:
                    try:
                        line, limit_s = message()
                    except Exception as error:
                        self._tell(f"{type(error).__name__}: {error}")
                        continue
                    self._watch(process, limit_s)
                    pipe.write(line + "\n")
                    pipe.flush()

    def _watch(self, process: "subprocess.Popen[str]", limit_s: float) -> None:
        """Ends the process unless it answers in time; 0 for no limit."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if limit_s:
                self._timer = threading.Timer(limit_s, process.kill)
                self._timer.daemon = True
                self._timer.start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                if answer["op"] == "save":
                    self._watch(process, 0)
                self._hear(self, answer)
        self._watch(process, 0)
        self._messages.put(None)
        self._tell(f"exporter ended with code {process.wait()}", ended=True)

    def _tell(self, error: str, *, ended: bool = False) -> None:
        answer = {"ok": False, "error": error}
        self._hear(self, answer | ({"ended": True} if ended else {}))
