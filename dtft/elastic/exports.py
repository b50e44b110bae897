"""The storage exporter of one host: a disposable process that reads the arena.

Starts it, hands it one step at a time and reports how it went. Storage may be slow or
broken: nothing here may hold up training, so every failure is only reported.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.board import Board
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.transport import Credentials
from dtft.elastic.config import AgentConfig
from dtft.elastic.processes import die_with_parent, open_log
from dtft.elastic.restoring import FetchFailed, borrow


class Exporter:
    """One exporter process; answers arrive at `emit` as ("exporter", message)."""

    def __init__(
        self, opening: dict[str, Any], log_path: Path, emit: Callable[..., None]
    ) -> None:
        """Begins to start the process; it opens the directory named in `opening`.

        A thread starts it, as that can take long on a busy machine, and stays while it
        runs, because the process dies with the thread. If it cannot be started, that
        is told as its end.
        """
        self._log_path, self._emit = log_path, emit
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._messages: queue.Queue[Callable[[], dict[str, Any]] | None]
        self._messages = queue.Queue()
        self._messages.put(lambda: {"op": "open", **opening})
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            process = self._start()
        except (OSError, subprocess.SubprocessError) as error:
            text = f"no exporter can be started: {error}"
            self._emit("exporter", self, {"ok": False, "error": text, "ended": True})
            return
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        threading.Thread(target=self._hear, args=(process,), daemon=True).start()
        self._speak(process)

    def _start(self) -> "subprocess.Popen[str]":
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with open_log(self._log_path) as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dtft.checkpoint.exporter"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )

    def save(
        self,
        step: int,
        located: Callable[[], tuple[bytes, Sequence[bytes]]],
        items: dict[str, Any],
        limit_s: float,
    ) -> None:
        """Begins to write one step, which is given up after `limit_s` seconds.

        `located` gives the place of each chunk and the digests of each slice. It is
        called on a thread, for it may have to fetch slices first.
        """

        def message() -> dict[str, Any]:
            places, digests = located()
            return {
                "op": "save",
                "step": step,
                "places": places.hex(),
                "digests": [one.hex() for one in digests],
                "items": items,
                "timeout_s": limit_s,
            }

        self._messages.put(message)

    def _speak(self, process: "subprocess.Popen[str]") -> None:
        """Writes on a thread: a process that is stuck does not read, and pipes fill."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # its end is reported by `_hear`
            with process.stdin as pipe:
                while (message := self._messages.get()) is not None:
                    try:
                        line = json.dumps(message())
                    except FetchFailed as error:
                        self._emit("exporter", self, {"ok": False, "error": str(error)})
                        continue
                    pipe.write(line + "\n")
                    pipe.flush()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                self._emit("exporter", self, json.loads(line))
        self._messages.put(None)
        error = f"exporter ended with code {process.wait()}"
        self._emit("exporter", self, {"ok": False, "error": error, "ended": True})

    def close(self) -> None:
        """Ends the process, and does not wait: storage that hangs may hold it."""
        self._messages.put(None)
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


class ExportDesk:
    """This host's part in exports: pins a step, hands it over, lets it go."""

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        board: Board,
        emit: Callable[..., None],
        exported: Callable[[int, bool, str], None],
    ) -> None:
        """`exported(step, ok, error)` is called once for each step begun."""
        self._config, self._credentials, self._board = config, credentials, board
        self._emit, self._exported = emit, exported
        self._exporter: Exporter | None = None
        self._world: tuple[dict[str, Any], int] | None = None
        self._pinned: dict[int, tuple[Holder, int]] = {}
        self._lent: tuple[Holder, int] | None = None

    def begin(self, holder: Holder | None, order: dict[str, Any]) -> None:
        """Begins to write one committed step, which `holder` should have.

        A step still in writing is given up: the leader orders one export at a time, so
        it has heard of a failure on another host that this host's part waits for.
        """
        step = order["step"]
        if holder is None:
            self._exported(step, False, f"{self._config.host} holds nothing")
            return
        if self._pinned:
            self.close()
        try:
            self._pinned[step] = holder, holder.pin(step)
        except KeyError:
            self._exported(step, False, f"{self._config.host} has dropped step {step}")
            return
        self._save(self._open(holder, order), holder, order)

    def _save(self, exporter: Exporter, holder: Holder, order: dict[str, Any]) -> None:
        """Hands over a pinned step, once what this host did not copy is borrowed."""
        step = order["step"]
        self._board.set("exporting", step)
        items = {**holder.items(step), "config": holder.layout.config}
        pin = self._pinned[step][1]
        limit_s = self._config.timeouts.export

        def located() -> tuple[bytes, Sequence[bytes]]:
            if order["transfers"]:
                borrow(holder, pin, order, self._credentials, limit_s)
            try:
                return holder.pinned(pin)
            except KeyError as error:
                raise FetchFailed("this host", "the export was given up") from error

        exporter.save(step, located, items, limit_s)

    def _open(self, holder: Holder, order: dict[str, Any]) -> Exporter:
        """Keeps the exporter of the last step if its world is the same.

        After a failure none of a world's processes is kept, on any host: the old ones
        would wait for one that is gone.
        """
        opening = {
            "directory": str(self._config.storage_directory),
            "max_to_keep": self._config.storage_keep,
            "rank": order["rank"],
            "world": order["world"],
            "coordinator": order["coordinator"],
            "layout": holder.layout.to_json(),
            "arena": str(holder.path),
            "chunk_bytes": holder.chunk_bytes,
            "slot": order["slot"],
            "devices": len(holder.layout.mesh.positions(order["slot"])),
        }
        world = opening, order["failures"]
        if self._exporter is not None and self._world == world:
            return self._exporter
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
        logs = self._config.run_directory / "logs"
        path = logs / f"{self._config.host}.exporter.log"
        self._exporter, self._world = Exporter(opening, path, self._emit), world
        return self._exporter

    def answer(self, exporter: Exporter, message: dict[str, Any]) -> None:
        """The exporter has written a step, failed, or ended."""
        if exporter is not self._exporter or message.get("op") == "open":
            return
        ok, error = bool(message.get("ok")), message.get("error", "")
        meant = [message["step"]] if "step" in message else list(self._pinned)
        for step in [step for step in meant if step in self._pinned]:
            self._let_go(step)
            self._exported(step, ok, error)
        if not ok:
            self.close()

    def lend(self, holder: Holder | None, step: int) -> None:
        """Keeps a committed step until the next call, for peers to fetch from; -1 keeps
        none. One that was dropped is missed by who asks for it."""
        if holder is None:
            return
        if self._lent is not None:
            lender, pin = self._lent
            lender.unpin(pin)
            self._lent = None
        with contextlib.suppress(KeyError):
            if step >= 0:
                self._lent = holder, holder.pin(step)

    def _let_go(self, step: int) -> None:
        holder, pin = self._pinned.pop(step)
        holder.unpin(pin)
        self._board.set("exporting", 0)

    def close(self) -> None:
        """Ends the exporter; a step that it was writing is not written."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
        for step in list(self._pinned):
            self._let_go(step)

    def stand_down(self) -> None:
        """Ends the exporter, and what is kept for others."""
        self.close()
        if self._lent is not None:
            self.lend(self._lent[0], -1)
