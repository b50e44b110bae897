"""One host's part in exports to storage.

Pins a committed step (keeps its buffers in memory), passes the step to this host's
exporter process and then unpins the step. Storage may be slow or broken, but exports
must not delay training, so every failure is only reported.
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
    """Starts an exporter: a process that writes steps to storage.

    Returns before the exporter runs. The kernel kills the exporter when the calling
    process ends.

    Args:
        opening: the exporter's settings, which are the fields of its first message
            (see `dtft.checkpoint.storage.exporter.Opening`).
        log_path: the file to which the exporter's stderr is appended.
        hear: called with the `ExporterProcess` and each answer of the exporter; at the
            end of the process the answer has the key "ended".
    """
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
    """Returns the fields of the message that makes an exporter save a step.

    Args:
        step: number of the step.
        memory: path of the arena.
        buffers: one byte for each chunk of the slot's own slices. A chunk has several
            buffers in the arena. The byte is the index, from 0, of the buffer that has
            this step's bytes.
        digests: for each own slice, the digests of its chunks (16 bytes each), joined.
        items: the checkpoint's values that are not arrays.
    """
    return {
        "step": step,
        "memory": [str(memory)],
        "buffers": buffers.hex(),
        "digests": [one.hex() for one in digests],
        "items": items,
    }


class HostExports:
    """This host's part in exports of steps from memory to storage.

    Pins a step (keeps its buffers in memory), passes the step to the exporter process,
    and unpins the step.
    """

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        board: ProgressBoard,
        emit: Callable[..., None],
        exported: Callable[[int, bool, str], None],
    ) -> None:
        """Starts no exporter yet.

        Args:
            config: settings of this host's agent.
            credentials: the job's credentials.
            board: this host's progress board, which shows the step being exported.
            emit: `emit("exporter", exporter, message)` is called on other threads with
                each message of an exporter.
            exported: `exported(step, ok, error)` is called when an export has ended or
                could not begin, but not for an export that was given up, because the
                next began or the exporter was closed.
        """
        self._config, self._credentials, self._board = config, credentials, board
        self._emit, self._exported = emit, exported
        self._exporter: ExporterProcess | None = None
        self._world: tuple[dict[str, Any], int] | None = None
        self._pinned: dict[int, tuple[ReplicaStore, int]] = {}
        self._lent: tuple[ReplicaStore, int] | None = None

    def begin(self, holder: ReplicaStore | None, order: dict[str, Any]) -> None:
        """Pins a step in `holder`, this host's copies, and starts the ordered export.

        An export that still runs is given up first: the leader orders one export at a
        time, so it has already failed on another host. If this host has no copies, or
        has dropped the step, the export ends at once with an error.

        Args:
            holder: this host's copies; None if it has none.
            order: the leader's order: `step`, `slot` (whose slices this host writes),
                `transfers` (slices to fetch from peers first), `rank` and `world`
                (index of this exporter, and number of all), `coordinator` (address at
                which the exporters meet), and `failures` (the number of exports that
                failed or were replaced before this one).
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
        """Makes the exporter write a pinned step.

        First fetches those slices of the slot that this host lacks; `transfers` in the
        leader's order lists them.
        """
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
        """Returns the exporter for an order: the running one, or a new one.

        The running exporter is used if its settings are still right and no export has
        failed or was replaced since its start (`failures` in the order counts them).
        Otherwise it is ended, and a new one is started. After a failure every host thus
        has a new exporter; an old one would wait for exporters of other hosts that have
        ended.
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
        """Handles an exporter's answer: step written, failure, or end of the process.

        Unpins the answer's step, or all steps if the answer names none, and reports
        each as exported or failed. Ends the exporter after a failure. Ignores answers
        of a former exporter and answers to the first message, which opens the storage.
        """
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
        """Keeps a committed step in memory, so that peers can fetch it.

        First frees the step of the previous call; if `step` is -1, does nothing more.
        If this host has no copies (`holder` is None), or `holder` has dropped the step,
        keeps nothing, and peers that fetch the step get an error.
        """
        if self._lent is not None:
            lender, pin = self._lent
            lender.unpin(pin)
            self._lent = None
        with contextlib.suppress(KeyError):
            if holder is not None and step >= 0:
                self._lent = holder, holder.pin(step)

    def _let_go(self, step: int) -> None:
        holder, pin = self._pinned.pop(step)
        holder.unpin(pin)
        self._board.set("exporting", 0)

    def close(self) -> None:
        """Kills the exporter and unpins its steps; a step being written is given up."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
        for step in list(self._pinned):
            self._let_go(step)

    def keep_only(self, slot: int) -> None:
        """Ends the exporter, unless it is one for the slices of `slot`."""
        if self._world is not None and self._world[0]["slot"] != slot:
            self.close()

    def stand_down(self) -> None:
        """Gives up a step being written, and frees the step kept for peers to fetch.

        Keeps an exporter that works without other hosts' exporters and writes nothing:
        this host usually gets the same slot again (`keep_only`), and another start of
        an exporter would slow its training down.
        """
        is_alone = self._world is not None and self._world[0]["world"] == 1
        if self._pinned or not is_alone:
            self.close()
        self.lend(None, -1)
