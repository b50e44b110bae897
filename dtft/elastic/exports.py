"""The storage exporter of one host: a disposable process that reads the arena.

Starts it, hands it one step at a time and reports how it went. Storage may be slow or
broken: nothing here may hold up training, so every failure is only reported.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtft.elastic.processes import die_with_parent


class Exporter:
    """One exporter process; answers arrive at `emit` as ("exporter", message)."""

    def __init__(
        self, opening: dict[str, Any], log_path: Path, emit: Callable[..., None]
    ) -> None:
        """Starts the process and opens the storage directory named in `opening`."""
        self.opening = opening
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.exporter"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )
        self._emit = emit
        threading.Thread(target=self._hear, daemon=True).start()
        self._send({"op": "open", **opening})

    def save(self, step: int, extent_offset: int, items: dict[str, Any]) -> None:
        """Begins to write one step."""
        self._send(
            {
                "op": "save",
                "step": step,
                "extent_offset": extent_offset,
                "items": items,
            }
        )

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # its end is reported by `_hear`

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._emit("exporter", self, json.loads(line))
        error = f"exporter ended with code {self._process.wait()}"
        self._emit("exporter", self, {"ok": False, "error": error, "ended": True})

    def close(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait(timeout=10)
