"""One host's slices of a step in another division, in memory of their own.

For a process that wants a step on other shardings than it was saved with: it reads
them there and is done, so nothing else is kept there (`SideArena`). `Resharding` has
them brought there, on a thread.
"""

import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtft.checkpoint.memory import Arena
from dtft.checkpoint.state import Chunks, Layout, Parts, Slice, digests_of_parts
from dtft.checkpoint.transport import Credentials
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.restore_executor import FetchFailed, bring
from dtft.elastic.transfer.slot_task import SlotTask

Bring = Callable[[Mapping[Slice, Parts]], int]


class SideArena:
    """At most one arena beside those of a host's copies."""

    def __init__(self, directory: Path) -> None:
        """Reserves nothing yet; arenas will lie in `directory`."""
        self._paths = (directory / f"side-{number}" for number in itertools.count())
        self._arena: Arena | None = None

    def fill(
        self, layout: Layout, slot: int, chunk_bytes: int, bring: Bring
    ) -> dict[str, Any]:
        """Has the slices of a slot brought into new memory.

        Args:
            layout: how the step is wanted.
            slot: of this host.
            chunk_bytes: bytes under one digest.
            bring: fills the memory of each slice, checked
                (`restore_executor.bring`).

        Returns:
            `arena` (its path) and `digests` (per slice), for the process.

        Raises:
            OSError: the memory is not there; names bytes needed and available.
        """
        self.free()
        chunks = Chunks.of(layout.slices(slot), chunk_bytes)
        self._arena = arena = Arena.create(next(self._paths), max(chunks.nbytes, 1))
        memory = arena.view(0, arena.size)
        new = {
            piece: Parts([memory[start : start + piece.nbytes]])
            for piece, start in zip(
                chunks.slices, chunks.starts[chunks.first[:-1]].tolist(), strict=True
            )
        }
        bring(new)
        digests = [digests_of_parts(parts.views, chunk_bytes) for parts in new.values()]
        return {"arena": str(arena.path), "digests": digests}

    def free(self, path: str = "") -> None:
        """Gives the memory back; whoever reads it now may finish.

        Args:
            path: of the arena that is meant; by default whichever there is.
        """
        arena = self._arena
        if arena is not None and path in ("", str(arena.path)):
            self._arena = None
            arena.close()
            arena.unlink()


class Resharding:
    """Brings this host's part of a step onto the slices that its process wants.

    Emits ("assembled", formation, answer): the answer has `arena` and `digests`, or
    `error`.
    """

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        copies: Copies,
        emit: Callable[..., None],
    ) -> None:
        """Reserves nothing yet."""
        self._config, self._credentials = config, credentials
        self._copies, self._emit = copies, emit
        self._side = SideArena(config.memory_directory)

    def begin(self, task: SlotTask, told: dict[str, Any]) -> None:
        """Makes the wanted slices and checks them, on a thread.

        Args:
            formation: that the process belongs to.
            told: what the leader says of it, see `ReshardPlans.order_for`.
        """
        args = task, told
        threading.Thread(target=self._assemble, args=args, daemon=True).start()

    def _assemble(self, task: SlotTask, told: dict[str, Any]) -> None:
        config, copies = self._config, self._copies
        holders = [it for it in (copies.holder, *copies.former) if it is not None]
        epoch = dict(zip(("generation", "attempt"), task.epoch, strict=True))

        def fill(new: Mapping[Slice, Parts]) -> int:
            return bring(
                *(new, told | epoch, self._credentials),
                *(config.timeouts.restore, config.chunk_bytes),
                host=config.host,
                holders=holders,
            )

        layout = Layout.from_json(told["layout"])
        answer: dict[str, Any] = {"step": told["step"], "layout": told["layout"]}
        try:
            answer |= self._side.fill(layout, task.slot, config.chunk_bytes, fill)
        except (FetchFailed, OSError, KeyError) as error:
            answer["error"] = str(error)
        self._emit("assembled", task, answer)

    def outdated(self, answer: Mapping[str, Any]) -> None:
        """The process has gone before its answer came."""
        if "arena" in answer:
            self._side.free(answer["arena"])

    def free(self) -> None:
        """The process has read its slices, or has gone."""
        self._side.free()
