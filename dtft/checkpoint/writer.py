"""This process's end of its storage exporter: one step at a time, on its own thread.

Starts `tree_exporter.py`, hands it a step, and reports how it went. Storage may be
slow, full or broken; nothing here may hold up or end training. Must not know which
step is due, nor what a step is.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from etils import epath

logger = logging.getLogger(__name__)

START_S = 60.0
"""What an exporter may take beyond the limit of a write: its imports."""

Done = Callable[[str | None], None]
"""Called once for each write, from another thread: None, or why it failed."""


class StorageWriter:
    """At most one exporter process, started by the first write."""

    def __init__(
        self, directory: epath.Path, *, scored: bool, timeout_s: float
    ) -> None:
        """Starts nothing yet."""
        self._timeout_s = timeout_s
        self._opening = {
            "op": "open",
            "directory": str(directory),
            "scored": scored,
            "save_limit_s": timeout_s,
        }
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._closed = threading.Lock(), False
        self._failed: int | None = None
        """The step that the running exporter could not write last."""

    def write(self, done: Done, **fields: Any) -> None:
        """Begins to write a step; the one before must be done."""
        self._thread = threading.Thread(
            target=self._write, args=(done, fields), name="dtft storage", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the process at once; a write under way fails."""
        with self._lock:
            self._closed = True
            self._end()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._close_pipes()

    def _write(self, done: Done, fields: dict[str, Any]) -> None:
        error: str | None = "the thread that writes was ended"
        try:
            error = self._tried(fields)
        finally:  # whatever ends this thread, nobody waits for it any more
            done(error)

    def _tried(self, fields: dict[str, Any]) -> str | None:
        """Why a step was not written, or None."""
        if self._failed == fields["step"]:  # Orbax's threads may still be at that one
            with self._lock:
                self._end()
        try:
            answer = self._exchange({"op": "save", **fields})
            if answer["ok"]:
                return None
            error, ended = answer["error"], answer.get("ended", False)
        except OSError as problem:
            error, ended = f"the exporter ended: {problem}", True
        except Exception as problem:
            logger.exception("writing step %s to storage failed", fields["step"])
            error, ended = f"{type(problem).__name__}: {problem}", True
        self._failed = None if ended else fields["step"]
        if ended:  # the next write starts afresh
            with self._lock:
                self._end()
        return error

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(message | {"timeout_s": self._timeout_s})
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        # The exporter ends itself at its own limit, which comes first unless it hangs.
        timer = threading.Timer(self._timeout_s + START_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(text + "\n")
            process.stdin.flush()
            for line in process.stdout:
                answer = json.loads(line)
                if answer["op"] == "save":
                    return answer
        finally:
            timer.cancel()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        raise OSError(f"code {process.returncode}")

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._end()
            self._close_pipes()
            if self._closed:
                raise OSError("the manager was closed")
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.tree_exporter"],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._opening) + "\n")
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a disk
                self._process.wait(timeout=10)

    def _close_pipes(self) -> None:
        """Only when no thread can be reading from them."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):  # what could not be sent any more
                process.stdin.close()
            process.stdout.close()
