"""Which steps storage holds, asked without waiting for storage longer than a moment.

A network file system that hangs must not hold up the leader: it is looked at on a
thread, and while it does not answer its last answer counts. Must not know what is
decided from the answer.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from dtft.elastic.journal import steps_seen

WAIT_S = 1.0
"""How long the leader waits for an answer; healthy storage takes milliseconds."""


class StorageWatch:
    """One job's storage directory. Asked from one thread."""

    def __init__(
        self,
        directory: Path,
        *,
        list_steps: Callable[[Path], Iterable[int]] = steps_seen,
        wait_s: float = WAIT_S,
    ) -> None:
        """Looks at nothing yet.

        Args:
            directory: the storage tier.
            list_steps: says which steps a directory holds; may take for ever.
            wait_s: how long it is waited for, in seconds.
        """
        self._directory, self._list, self._wait_s = directory, list_steps, wait_s
        self._changed = threading.Condition()
        self._looking, self._known = False, frozenset[int]()
        self._written: set[int] = set()
        self._late, self._told = False, False

    def steps(self) -> tuple[int, ...]:
        """The steps that storage holds now, or held when it last answered."""
        with self._changed:
            if not self._looking and not self._late:
                self._looking = True
                self._written.clear()
                threading.Thread(target=self._look, daemon=True).start()
                self._changed.wait_for(lambda: not self._looking, self._wait_s)
            # An answer that came late counts once: the next would be late as well.
            self._late = self._looking
            return tuple(sorted(self._known))

    @property
    def newest(self) -> int:
        """The newest of these steps, 0 for none."""
        return max(self.steps(), default=0)

    @property
    def silent(self) -> bool:
        """Whether the last question is still unanswered."""
        with self._changed:
            return self._looking

    def wrote(self, step: int) -> None:
        """Somebody has just written a step there."""
        with self._changed:
            self._written.add(step)
            self._known |= {step}

    def news(self) -> str | None:
        """A line for people when storage has stopped or begun to answer."""
        with self._changed:
            if self._looking == self._told:
                return None
            self._told = self._looking
            if not self._told:
                return f"storage {self._directory} answers again"
            newest = max(self._known, default=0)
            known = f"step {newest} was the newest seen" if newest else "none was seen"
            return (
                f"storage {self._directory} does not answer within {self._wait_s:g} s; "
                f"training goes on, and of its steps {known}. See that its server is up"
            )

    def _look(self) -> None:
        found: Iterable[int] = ()
        try:
            found = self._list(self._directory)
        finally:
            with self._changed:
                self._known = frozenset(found) | self._written
                self._looking = False
                self._changed.notify_all()
