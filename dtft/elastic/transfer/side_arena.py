"""One host's slices of a step under other shardings, in separate memory.

Serves a user's process that restores a step with other shardings than the step was
saved with. The slices are in shared memory (`SideArena`) until the process has read
them. A thread assembles them from committed slices (`Resharding`).
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
    """Holds at most one arena, with a step's slices under the requested shardings.

    An arena is a file in shared memory. A host has this arena in addition to the arenas
    of its copies.
    """

    def __init__(self, directory: Path) -> None:
        """Reserves no memory yet; arenas will lie in `directory`."""
        self._paths = (directory / f"side-{number}" for number in itertools.count())
        self._arena: Arena | None = None

    def fill(
        self, layout: Layout, slot: int, chunk_bytes: int, bring: Bring
    ) -> dict[str, Any]:
        """Frees the former arena; allocates another and fills it with a slot's slices.

        Args:
            layout: the mesh and arrays under which the step is requested.
            slot: this host's slot.
            chunk_bytes: bytes of a chunk, which has one digest.
            bring: fills and verifies the memory of each slice; see
                `restore_executor.bring`.

        Returns:
            For the process: `arena` (path of the memory) and `digests` (for each of the
            slot's slices, the digests of its chunks, joined).

        Raises:
            OSError: not enough memory; names bytes needed and available.
            FetchFailed: `bring` could not fetch or verify a slice.
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
        """Frees the arena; a process that has mapped the arena can still read it.

        Does nothing if there is no arena, or if `path` is neither "" nor the arena's
        path.
        """
        arena = self._arena
        if arena is not None and path in ("", str(arena.path)):
            self._arena = None
            arena.close()
            arena.unlink()


class Resharding:
    """Assembles the slices of a step that this host's process requests.

    Emits the event ("assembled", task, answer) at the end, also after a failure. The
    task is the `SlotTask` (this host's order for a slot) that `begin` was given. The
    answer has the `step`, the requested `layout` as JSON, and either `arena` (path of
    the memory) and `digests` (of each slice's chunks), or `error` (the reason of the
    failure).
    """

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        copies: Copies,
        emit: Callable[..., None],
    ) -> None:
        """Reserves no memory yet."""
        self._config, self._credentials = config, credentials
        self._copies, self._emit = copies, emit
        self._side = SideArena(config.memory_directory)

    def begin(self, task: SlotTask, told: dict[str, Any]) -> None:
        """Assembles and verifies the requested slices on a thread.

        Args:
            task: this host's slot, for which the process requests the step.
            told: the leader's order: `step`, `layout` (the requested mesh and arrays,
                as JSON), `regions` (the pieces of committed slices to read, by host)
                and `digests` of these committed slices.
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
        """Frees the arena that `answer` names, because the requesting process has gone.

        Does nothing if the answer has an error instead of an arena.
        """
        if "arena" in answer:
            self._side.free(answer["arena"])

    def free(self) -> None:
        """Frees the arena, without waiting for the process.

        Call it after the process has read the slices, or has ended.
        """
        self._side.free()
