"""Which steps storage holds, asked without waiting for storage.

A network file system that hangs must not hold up the leader: it is looked at beside the
event loop, and while it does not answer its last answer counts.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from dtft.checkpoint.storage import storage_steps
from dtft.elastic.event_loop import Loop

PATIENCE_S = 1.0
"""Storage that answers later is silent; healthy storage takes milliseconds."""


class StorageWatch:
    """One job's storage directory. Used by the event loop."""

    def __init__(
        self,
        directory: Path,
        loop: Loop,
        *,
        list_steps: Callable[[Path], Iterable[int]] = storage_steps,
    ) -> None:
        """Looks for the first time.

        Args:
            directory: the storage tier.
            loop: of the agent.
            list_steps: says which steps a directory holds; may take for ever.
        """
        self._directory, self._loop, self._list = directory, loop, list_steps
        self._known: frozenset[int] = frozenset()
        self._written: set[int] = set()
        self._since: float | None = None
        """When the question was asked that is not answered yet."""
        self._told = False
        self.look()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that storage held when it last answered, and what came since."""
        return tuple(sorted(self._known | self._written))

    @property
    def newest(self) -> int:
        """The newest of these steps, 0 for none."""
        return max(self.steps, default=0)

    @property
    def silent(self) -> bool:
        """Whether a question is unanswered for longer than healthy storage takes."""
        since = self._since
        return since is not None and self._loop.now() >= since + PATIENCE_S

    @property
    def settled(self) -> bool:
        """Whether the last question is answered, or will not be in time."""
        return self._since is None or self.silent

    def look(self) -> None:
        """Asks storage, unless an earlier question is still unanswered."""
        if self._since is not None:
            return
        self._since = self._loop.now()
        self._written.clear()
        directory = self._directory
        self._loop.aside(lambda: frozenset(self._list(directory)), self._looked)

    def _looked(self, outcome: "Future[frozenset[int]]") -> None:
        self._since = None
        error = outcome.exception()
        self._known = frozenset() if error is not None else outcome.result()

    def wrote(self, step: int) -> None:
        """Somebody has just written a step there."""
        self._written.add(step)

    def news(self) -> str | None:
        """A line for people when storage has stopped or begun to answer."""
        if self.silent == self._told:
            return None
        self._told = self.silent
        if not self._told:
            return f"storage {self._directory} answers again"
        newest = max(self._known, default=0)
        known = f"step {newest} was the newest seen" if newest else "none was seen"
        return (
            f"storage {self._directory} does not answer within {PATIENCE_S:g} s; "
            f"training goes on, and of its steps {known}. See that its server is up"
        )


def newest_stored(directory: Path, limit_s: float = PATIENCE_S) -> int:
    """The newest step that storage shows within `limit_s` seconds, 0 for none.

    For commands, which have no event loop.
    """
    found: queue.SimpleQueue[int] = queue.SimpleQueue()

    def look() -> None:
        with contextlib.suppress(OSError):
            found.put(max(storage_steps(directory), default=0))

    threading.Thread(target=look, daemon=True).start()
    try:
        return found.get(timeout=limit_s)
    except queue.Empty:
        return 0
