"""The steps of one process: in its own memory, some of them in storage.

What `ReplicatedCheckpointManager` does where there is no other process. Brings memory,
storage and reading together under one lock; must not know how steps are laid out in
memory, reach storage, or are read back.
"""

import threading
from typing import Any

from etils import epath
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from dtft.checkpoint.options import ReplicatedOptions, best
from dtft.checkpoint.reading import Reader
from dtft.checkpoint.record import Record, record_of
from dtft.checkpoint.storing import Storing
from dtft.checkpoint.versions import Version, Versions


class LocalSteps:
    """See `ReplicatedCheckpointManager` for what each method promises."""

    def __init__(self, directory: epath.Path, options: ReplicatedOptions) -> None:
        """Lists the directory; memory is reserved by the first save.

        Raises:
            ValueError: an option makes sense with an agent only.
        """
        if options.agent is not None:
            raise ValueError(
                f"agent={options.agent!r}: this is no job of several processes, so "
                "there is no agent to use. Leave ReplicatedOptions.agent out, or call "
                "jax.distributed.initialize first."
            )
        self._options = options
        self._condition = threading.Condition()
        self._versions = Versions(
            keep=options.memory_to_keep, chunk_bytes=options.chunk_bytes
        )
        self._storing = Storing(directory, options, self._versions, self._condition)
        self._reader = Reader(self._versions, self._storing)

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps on offer, ascending; `read` lists the directory again."""
        with self._condition:
            if read:
                self._storing.reload()
            return self._reader.steps()

    def newest(self) -> int | None:
        """The newest step on offer: what `should_save` goes by."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step on offer with the best metrics; without `best_fn` the newest."""
        if self._options.best_fn is None:
            return self.newest()
        with self._condition:
            steps = self._reader.steps()
            return best(steps, self._storing.scores(set(steps)))

    def save(
        self, step: int, args: Any, metrics: Any, custom_metadata: Any, at_once: bool
    ) -> None:
        """Copies a step into memory; it goes to storage when due, or `at_once`."""
        record, values = record_of(args, metrics, custom_metadata)
        self._storing.score(step, record.metrics)  # refuses what it could not go by
        with self._condition:
            if step in self._reader.steps():
                raise StepAlreadyExistsError(
                    f"step={step} exists already: {self._reader.offered}. Allowed: "
                    "a step that does not. Call delete(step) first."
                )
            version = self._write(step, record, values)
            self._storing.committed(version, at_once=at_once)

    def _write(self, step: int, record: Record, values: list[Any]) -> Version:
        try:
            return self._versions.write(step, record, values)
        except OSError:  # a step that waits for storage may hold up none
            if not self._storing.give_way():
                raise
        return self._versions.write(step, record, values)

    def restore(self, step: int | None, args: Any) -> Any:
        """A step, from memory or else from storage."""
        with self._condition:
            return self._reader.restore(step, args)

    def item_metadata(self, step: int) -> Any:
        """A struct for every leaf, in the tree or trees that were saved."""
        with self._condition:
            return self._reader.item_metadata(step)

    def metadata(self, step: int | None) -> Any:
        """Orbax's metadata of a step, or of the directory without `step`."""
        with self._condition:
            return self._reader.metadata(step)

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        with self._condition:
            return self._storing.metrics(self._reader.chosen(step))

    def wait_until_finished(self) -> None:
        """Waits until storage has what was due; memory has every step at once."""
        with self._condition:
            self._storing.wait()

    def check_for_errors(self) -> None:
        """Raises StorageFailed, once, if a write to storage has failed."""
        with self._condition:
            self._storing.check()

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being written to storage."""
        with self._condition:
            return self._storing.is_writing

    def delete(self, step: int) -> None:
        """Removes a step from memory and from storage."""
        with self._condition:
            self._reader.chosen(step)
            self._storing.delete(step)
            if step in self._versions.steps:
                self._versions.drop(step)

    def close(self) -> None:
        """Brings the newest step to storage, then gives all memory back."""
        try:
            with self._condition:
                self._storing.write_newest()
                self._storing.wait()
        finally:
            self._storing.end()
            with self._condition:
                self._versions.close()

    def leave(self) -> None:
        """The process ends, well or not: the newest step goes to storage."""
        self.close()
