"""One host's part in exports to storage.

Pins a committed step, hands it to this host's exporter process and lets it go. Storage
may be slow or broken: nothing here may hold up training, so every failure is only
reported.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import ProgressBoard
from dtft.checkpoint.memory import ReplicaStore
from dtft.checkpoint.storage import ExporterProcess, Hear
from dtft.checkpoint.transport import Credentials
from dtft.elastic.job import AgentConfig
from dtft.elastic.processes import die_with_parent, open_log
from dtft.elastic.transfer import FetchFailed, borrow


def start_exporter(
    opening: dict[str, Any], log_path: Path, hear: Hear
) -> ExporterProcess:
    """Begins to start an exporter that dies with this process; see its class."""
    return ExporterProcess(
        opening,
        hear,
        open_log=functools.partial(open_log, log_path),
        preexec_fn=die_with_parent,
    )


def save_fields(
    step: int,
    memory: Path,
    buffers: bytes,
    digests: Sequence[bytes],
    items: dict[str, Any],
) -> dict[str, Any]:
    """What an exporter is told of a step.

    Args:
        step: the step.
        memory: the arena.
        buffers: of each chunk of the slot's own slices its buffer in the arena.
        digests: of each slice.
        items: what is not an array.
    """
    return {
        "step": step,
        "memory": [str(memory)],
        "buffers": buffers.hex(),
        "digests": [one.hex() for one in digests],
        "items": items,
    }


class HostExports:
    """This host's part in exports: pins a step, hands it over, lets it go."""

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        board: ProgressBoard,
        emit: Callable[..., None],
        exported: Callable[[int, bool, str], None],
    ) -> None:
        """`exported(step, ok, error)` is called once for each step begun."""
        self._config, self._credentials, self._board = config, credentials, board
        self._emit, self._exported = emit, exported
        self._exporter: ExporterProcess | None = None
        self._world: tuple[dict[str, Any], int] | None = None
        self._pinned: dict[int, tuple[ReplicaStore, int]] = {}
        self._lent: tuple[ReplicaStore, int] | None = None

    def begin(self, holder: ReplicaStore | None, order: dict[str, Any]) -> None:
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

    def _save(
        self, exporter: ExporterProcess, holder: ReplicaStore, order: dict[str, Any]
    ) -> None:
        """Hands over a pinned step, once what this host did not copy is borrowed."""
        step = order["step"]
        self._board.set("exporting", step)
        items = {**holder.items(step), "config": holder.layout.config}
        pin = self._pinned[step][1]
        limit_s = self._config.timeouts.export

        def fields() -> dict[str, Any]:
            if order["transfers"]:
                borrow(holder, pin, order, self._credentials, limit_s)
            try:
                buffers, digests = holder.pinned(pin)
            except KeyError as error:
                raise FetchFailed("this host", "the export was given up") from error
            return save_fields(step, holder.path, buffers, digests, items)

        exporter.save(fields, limit_s)

    def _open(self, holder: ReplicaStore, order: dict[str, Any]) -> ExporterProcess:
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
        emit = functools.partial(self._emit, "exporter")
        self._exporter, self._world = start_exporter(opening, path, emit), world
        return self._exporter

    def answer(self, exporter: ExporterProcess, message: dict[str, Any]) -> None:
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

    def lend(self, holder: ReplicaStore | None, step: int) -> None:
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
