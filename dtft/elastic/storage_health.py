"""What people are told of storage that fails or is slow, and when it is tried again.

Decides from outcomes and a clock that others give: one line for the first failure, then
for the second, fourth, eighth ... in a row, and one when storage is well again. Must
not know who exports, nor touch a directory.
"""

from pathlib import Path

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""A failed export is not repeated at once: the pause doubles with every failure."""
SLOW_S = 60.0
"""An export that takes longer than this, and than its interval, is told."""

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
    (("corrupt in this host's memory",), "test that memory if this comes again"),
    (("timeouterror", "ended with code"), "see that storage answers; it may be slow"),
)


def advice(error: str) -> str:
    """What to do about a failed export, from what it said.

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


class StorageHealth:
    """One job's storage as its leader sees it."""

    def __init__(self, directory: Path | str) -> None:
        """Takes storage to be well; `directory` is for messages."""
        self._directory = directory
        self._failures, self._not_before = 0, 0.0
        self._begun: tuple[int, float] | None = None
        self._told_slow = 0

    def may_try(self, now: float) -> bool:
        """Whether an export that is merely due may be ordered at this moment."""
        return now >= self._not_before

    def begun(self, step: int, now: float) -> None:
        """An export was ordered."""
        self._begun = step, now

    def failed(self, step: int, host: str, error: str, now: float) -> str | None:
        """A step was not written; the line for people, if this time has one."""
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
        """A step was written; the line for people if that had failed before."""
        failures, self._failures, self._not_before = self._failures, 0, 0.0
        self._begun = None
        if not failures:
            return None
        return (
            f"storage: {self._directory} is well again: step {step} was written after "
            f"{failures} failed exports"
        )

    def overdue(self, due: int, now: float) -> str | None:
        """A step is due while another is still written; said once for each of these."""
        if self._begun is None:
            return None
        step, since = self._begun
        if now - since < SLOW_S or self._told_slow == step:
            return None
        self._told_slow = step
        return (
            f"storage: {self._directory} is slow: step {step} has been in writing for "
            f"{now - since:.0f} s and step {due} is due. Training goes on; what is due "
            "meanwhile is left out"
        )


def _short(error: str) -> str:
    """Errors of Orbax repeat paths; the beginning and the end say what it was."""
    line = error.partition("\n")[0]
    return line if len(line) <= 240 else f"{line[:100]} ... {line[-130:]}"
