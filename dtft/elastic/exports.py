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

from dtft.checkpoint.board import Board
from dtft.checkpoint.holder import Holder
from dtft.elastic.config import AgentConfig
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


class ExportDesk:
    """This host's part in exports: pins a step, hands it over, lets it go."""

    def __init__(
        self,
        config: AgentConfig,
        board: Board,
        emit: Callable[..., None],
        exported: Callable[[int, bool, str], None],
    ) -> None:
        """`exported(step, ok, error)` is called once for each step begun."""
        self._config, self._board = config, board
        self._emit, self._exported = emit, exported
        self._exporter: Exporter | None = None
        self._pinned: dict[int, tuple[Holder, int]] = {}

    def begin(self, holder: Holder, order: dict[str, Any]) -> None:
        """Begins to write one committed step."""
        step = order["step"]
        if step in self._pinned:
            return
        try:
            self._pinned[step] = holder, holder.pin(step)
        except KeyError:
            self._exported(step, False, f"{self._config.host} has dropped step {step}")
            return
        self._open(holder, order)
        assert self._exporter is not None
        self._board.set("exporting", step)
        items = {**holder.items(step), "config": holder.layout.config}
        self._exporter.save(step, holder.own_offset(step), items)

    def _open(self, holder: Holder, order: dict[str, Any]) -> None:
        """Keeps the exporter of the last step if its world is the same."""
        opening = {
            "directory": str(self._config.storage_directory),
            "max_to_keep": self._config.storage_keep,
            "rank": order["rank"],
            "world": order["world"],
            "coordinator": order["coordinator"],
            "layout": holder.layout.to_json(),
            "arena": str(holder.path),
            "slot": order["slot"],
            "devices": len(holder.layout.mesh.positions(order["slot"])),
        }
        if self._exporter is not None and self._exporter.opening == opening:
            return
        if self._exporter is not None:
            self._exporter.close()
        logs = self._config.run_directory / "logs"
        path = logs / f"{self._config.host}.exporter.log"
        self._exporter = Exporter(opening, path, self._emit)

    def answer(self, exporter: Exporter, message: dict[str, Any]) -> None:
        """The exporter has written a step, failed, or ended."""
        if exporter is not self._exporter or message.get("op") == "open":
            return
        ok = bool(message.get("ok"))
        for step in list(self._pinned):
            self._let_go(step)
            self._exported(step, ok, message.get("error", ""))
        if not ok:
            self.close()

    def _let_go(self, step: int) -> None:
        holder, extent = self._pinned.pop(step)
        holder.unpin(extent)
        self._board.set("exporting", 0)

    def close(self) -> None:
        """Ends the exporter; a step that it was writing is not written."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
        for step in list(self._pinned):
            self._let_go(step)
