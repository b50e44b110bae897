"""Brings steps from this process's memory to storage, without holding up training.

Decides when a step is written (one at a time; what becomes due meanwhile is replaced by
the newest step), which stored steps go, and who is told of a failure. Must not know
trees, nor what the user does with a restored step.
"""

import logging
import threading
from typing import Any

from etils import epath

from dtft.checkpoint.options import ReplicatedOptions, is_storage_due, superfluous
from dtft.checkpoint.stored import StoredSteps
from dtft.checkpoint.versions import Version, Versions
from dtft.checkpoint.writer import START_S, StorageWriter

logger = logging.getLogger(__name__)


class StorageFailed(RuntimeError):
    """A step did not reach storage; training and memory are not affected."""


class Storing:
    """The storage side of one manager; the caller holds `condition`."""

    def __init__(
        self,
        directory: epath.Path,
        options: ReplicatedOptions,
        versions: Versions,
        condition: threading.Condition,
    ) -> None:
        """Lists the directory; starts nothing yet."""
        self._options, self._versions = options, versions
        self._condition = condition
        self._writer = StorageWriter(
            directory,
            scored=options.best_fn is not None,
            timeout_s=options.storage_timeout_s,
        )
        self.stored = StoredSteps(directory)
        self._steps: set[int] = set()
        self._metrics: dict[int, Any] = {}
        self._writing: Version | None = None
        self._due = False
        self._failure: StorageFailed | None = None
        self.reload()
        self._tried = max(self._steps, default=None)

    @property
    def steps(self) -> frozenset[int]:
        """The steps that storage has, as of the last write or `reload`."""
        return frozenset(self._steps)

    def reload(self) -> None:
        """Lists the directory again."""
        self._steps = set(self.stored.steps())

    def committed(self, version: Version, *, at_once: bool) -> None:
        """A step is in memory: it is written now, later or never."""
        if at_once or is_storage_due(self._options, version.step, self._tried):
            self._tried = version.step
            self._due = True
            self._begin()

    def write_newest(self) -> None:
        """Writes the newest step in memory, if storage does not have it."""
        self._due = True
        self._begin()

    def _begin(self) -> None:
        newest = max(self._versions.steps, default=None)
        if self._writing is not None or not self._due:
            return
        self._due = False
        if newest is None or newest in self._steps:
            return
        version = self._versions.get(newest)
        self._versions.pin(version)
        self._writing = version
        going = superfluous(
            self._options, {*self._steps, newest}, self.scores({*self._steps, newest})
        )
        self._writer.write(
            lambda error: self._done(version, going, error),
            step=newest,
            memory=version.exported,
            record=version.record.to_json(),
            digests=[one.hex() for one in version.digests],
            chunk_bytes=self._versions.chunk_bytes,
            delete=list(going),
        )

    def _done(self, version: Version, gone: tuple[int, ...], error: str | None) -> None:
        with self._condition:
            self._writing = None
            self._versions.unpin(version)
            if error is None:
                self._steps = {*self._steps, version.step} - set(gone)
                logger.info("step %d is in storage", version.step)
            else:
                self._versions.distrust()
                self._failure = StorageFailed(
                    f"step {version.step} did not reach storage in "
                    f"{self.stored.directory}: {_short(error)}. Steps stored before "
                    "are as they were; the next one that is due is tried again."
                )
                logger.warning("%s", self._failure)
            self._begin()
            self._condition.notify_all()

    def wait(self) -> None:
        """Waits for what is being written or due.

        Raises:
            StorageFailed: that, or a write before, failed; or it took too long.
        """
        limit_s = 2 * (self._options.storage_timeout_s + START_S)
        if not self._condition.wait_for(
            lambda: self._writing is None and not self._due, timeout=limit_s
        ):
            raise StorageFailed(
                f"{limit_s:.0f} s waiting for the exporter of {self.stored.directory}; "
                "limit: ReplicatedOptions.storage_timeout_s"
            )
        self.check()

    def check(self) -> None:
        """Raises the last failure that was not raised yet, as StorageFailed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------- metrics

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        if step in self._versions.steps:
            return self._versions.get(step).record.metrics
        if step not in self._metrics:
            self._metrics[step] = self._stored_metrics(step)
        return self._metrics[step]

    def _stored_metrics(self, step: int) -> Any:
        found = self.stored.record(step)
        if found is not None:
            return found[0].metrics
        with self.stored.manager(best_fn=self._options.best_fn) as manager:
            return manager.metrics(step)

    def scores(self, steps: set[int]) -> dict[int, float | None]:
        """The score of each step; none without `best_fn`."""
        if self._options.best_fn is None:
            return {}
        return {step: self._options.score(self.metrics(step)) for step in steps}

    # -------------------------------------------------------------------- ending

    def delete(self, step: int) -> None:
        """Removes a stored step, after what is being written."""
        self._condition.wait_for(
            lambda: self._writing is None, timeout=self._options.storage_timeout_s
        )
        if step not in self._steps:
            return
        with self.stored.manager(read_only=False) as manager:
            manager.delete(step)
        self._steps.discard(step)
        self._metrics.pop(step, None)

    @property
    def is_writing(self) -> bool:
        """Whether a step is being written."""
        return self._writing is not None

    def end(self) -> None:
        """Ends the exporter. Without `condition`, which the writer's thread needs."""
        self._due = False
        self._writer.close()


def _short(error: str) -> str:
    """The first line, without what Orbax prints of the values."""
    line = error.partition("\n")[0]
    return line if len(line) < 300 else f"{line[:300]}..."
