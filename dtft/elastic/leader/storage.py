"""The leader's view of storage: which steps it holds, and whether it works.

From the outcomes of exports, `StorageHealth` makes messages about failing or slow
storage and chooses the time of the next try. `StorageWatch` lists the steps on a
thread: while a network file system hangs or fails, the last listing is used.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from dtft.checkpoint.storage import storage_steps
from dtft.elastic.event_loop import Loop

# Failing storage is reported at the first, second, fourth, eighth ... failure in a row,
# and once more when a write succeeds.

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Longest pause in seconds after a failed export; the pause starts at `FIRST_PAUSE_S`
and doubles with every failure in a row."""
SLOW_S = 60.0
"""Seconds after which an unfinished export is reported, if another step is due."""

_CORRUPT = ("corrupt in this host's memory", "corrupt slices")
"""Words in the error of an export whose copy is corrupt: the exporting host's own, or
that of a peer which lends it slices (`share="divided"`)."""
_ADVICE = (
    (("no space left", "resource_exhausted", "quota"), "free space there"),
    (("read-only file system",), "mount it for writing"),
    (("permission denied", "operation not permitted"), "give this user write access"),
    (
        (
            *("replaced or unmounted", "no such file", "not_found", "not a directory"),
            "stale file handle",
        ),
        "mount the file system again, or put the directory back",
    ),
    (_CORRUPT, "test that memory if this comes again"),
    (("timeouterror", "ended with code"), "see that storage answers; it may be slow"),
)


def advice(error: str) -> str:
    """Returns the advice for a failed export, chosen by words in the error message.

    An error without any of these words gets the advice to read the exporter's log.

    >>> advice("OSError: [Errno 30] Read-only file system: '/nfs/run'")
    'mount it for writing'
    >>> advice("ValueError: bits") is not None
    True
    """
    lowered = error.lower()
    for words, text in _ADVICE:
        if any(word in lowered for word in words):
            return text
    return "see the exporter's log on that host"


def is_corrupt(error: str) -> bool:
    """Whether an export failed because a copy in a host's memory is corrupt.

    >>> is_corrupt("FetchFailed: from host-1: 1 corrupt slices")
    True
    """
    return any(words in error for words in _CORRUPT)


class StorageHealth:
    """Tracks the failed and slow exports of one job; makes messages about them."""

    def __init__(self, directory: Path | str) -> None:
        """Starts with no failure; `directory` is used in messages only."""
        self._directory = directory
        self._failures, self._not_before = 0, 0.0
        self._begun: tuple[int, float] | None = None
        self._told_slow = 0

    def may_try(self, now: float) -> bool:
        """Whether an export may be ordered: the pause after a failure is over.

        `now` is the time in seconds.
        """
        return now >= self._not_before

    def begun(self, step: int, now: float) -> None:
        """Records that the export of a step was ordered at `now`, in seconds."""
        self._begun = step, now

    def failed(self, step: int, host: str, error: str, now: float) -> str | None:
        """Records a failed export.

        Args:
            step: the exported step.
            host: the host that failed, or the hosts that did not answer.
            error: the error.
            now: the time in seconds.

        Returns:
            A message for people at failure 1, 2, 4, 8 ... since the last success, else
            None.
        """
        self._begun = None
        self._failures += 1
        pause = min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 16), LONGEST_PAUSE_S)
        self._not_before = now + pause
        if self._failures & (self._failures - 1):
            return None
        times = f", {self._failures} times in a row" if self._failures > 1 else ""
        return (
            f"storage: step {step} was not written to {self._directory} by {host}"
            f"{times} ({_short(error)}). Training goes on and older steps stay; "
            f"{advice(error)}. The next try is at a step due {pause:.0f} s from now "
            "or later"
        )

    def succeeded(self, step: int) -> str | None:
        """Records a successful export of `step`.

        Returns a message for people if exports have failed before it, else None.
        """
        failures, self._failures, self._not_before = self._failures, 0, 0.0
        self._begun = None
        if not failures:
            return None
        return (
            f"storage: {self._directory} is well again: step {step} was written after "
            f"{failures} failed exports"
        )

    def overdue(self, due: int, now: float) -> str | None:
        """Returns a message if the current export takes 60 s or longer, else None.

        The limit is `SLOW_S`. Returns at most one message for each exported step; None
        also without a current export.

        Args:
            due: another step, whose export is due meanwhile.
            now: the time in seconds.
        """
        if self._begun is None:
            return None
        step, since = self._begun
        if now - since < SLOW_S or self._told_slow == step:
            return None
        self._told_slow = step
        return (
            f"storage: {self._directory} is slow: the export of step {step} has taken "
            f"{now - since:.0f} s so far, and step {due} is due. Training goes on; "
            "steps that become due before this export ends are not exported"
        )


def _short(error: str) -> str:
    """Returns the error's first line; leaves out the middle of a long line.

    Lines are long because Orbax repeats paths.
    """
    line = error.partition("\n")[0]
    return line if len(line) <= 240 else f"{line[:100]} ... {line[-130:]}"


PATIENCE_S = 1.0
"""Seconds after which an unanswered listing counts as silent; healthy storage takes
milliseconds."""


class StorageWatch:
    """Lists the steps in one job's storage directory. Used by the event loop."""

    def __init__(
        self,
        directory: Path,
        loop: Loop,
        *,
        list_steps: Callable[[Path], Iterable[int]] = storage_steps,
    ) -> None:
        """Starts the first listing.

        Args:
            directory: the directory of the storage tier.
            loop: the agent's event loop.
            list_steps: lists the steps that a directory holds; may never return.
        """
        self._directory, self._loop, self._list = directory, loop, list_steps
        self._known: frozenset[int] = frozenset()
        self._written: set[int] = set()
        self._since: float | None = None
        """Time at which the listing in progress began; None if there is none."""
        self._error = ""
        """The error of the last listing that has ended; "" if it succeeded."""
        self._told = ""
        self.look()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that storage holds, in ascending order.

        These are the steps in the last listing that succeeded, and those written since
        that listing began. Storage may hold others by now if listings fail since then.
        """
        return tuple(sorted(self._known | self._written))

    @property
    def newest(self) -> int:
        """The newest step that storage holds; 0 if it holds none."""
        return max(self.steps, default=0)

    @property
    def silent(self) -> bool:
        """Whether storage has not answered a listing for 1 s (`PATIENCE_S`)."""
        since = self._since
        return since is not None and self._loop.now() >= since + PATIENCE_S

    @property
    def trouble(self) -> str:
        """Why the steps that storage holds now are not known; "" if they are.

        The reason is that storage has not answered for 1 s, or that the last listing
        failed.
        """
        if self.silent:
            return f"does not answer within {PATIENCE_S:g} s"
        return f"cannot be listed ({self._error})" if self._error else ""

    @property
    def settled(self) -> bool:
        """Whether the known steps can be used now, without waiting for a listing.

        True if no listing is in progress, or if storage has not answered for 1 s. In
        the second case the steps of the last listing that succeeded are used.
        """
        return self._since is None or self.silent

    def look(self) -> None:
        """Starts a listing of the steps in storage, unless one is in progress."""
        if self._since is not None:
            return
        self._since = self._loop.now()
        directory, before = self._directory, frozenset(self._written)
        self._loop.aside(
            lambda: frozenset(self._list(directory)), partial(self._looked, before)
        )

    def _looked(
        self, before: frozenset[int], outcome: "Future[frozenset[int]]"
    ) -> None:
        self._since = None
        if (error := outcome.exception()) is not None:
            self._error = _short(f"{type(error).__name__}: {error}")
            return
        self._error = ""
        self._written -= before  # now the listing says whether storage has them
        self._known = outcome.result()

    def wrote(self, step: int) -> None:
        """Records that a step was just written to storage."""
        self._written.add(step)

    def news(self) -> str | None:
        """Returns a message if storage fails, fails in another way, or answers again.

        Each change is told once: returns None if there was none since the last call.
        """
        if self.trouble == self._told:
            return None
        self._told = self.trouble
        if not self._told:
            return f"storage {self._directory} answers again"
        newest = max(self._known, default=0)
        known = f"step {newest} was the newest seen" if newest else "none was seen"
        check = "its server is up" if self.silent else "it is mounted and can be read"
        return (
            f"storage {self._directory} {self._told}; training goes on, and of its "
            f"steps {known}. See that {check}"
        )


def newest_stored(directory: Path, limit_s: float = PATIENCE_S) -> int:
    """Returns the newest step in storage; 0 if none is found in time.

    Returns 0 if storage holds no step, cannot be listed, or does not answer within
    `limit_s` seconds. For commands, which have no event loop.
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
