"""Brings steps from this process's memory to storage, without holding up training.

Decides when a step is written (one at a time; of those that become due meanwhile the
newest waits, and keeps its memory), which stored steps go, and who is told of a
failure. Must not know trees, nor what the user does with a restored step.
"""

import contextlib
import dataclasses
import logging
import threading
from typing import Any

from etils import epath

from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.exporter_client import START_S, ExporterProcess
from dtft.checkpoint.job_layout import config_of, dynamic_part
from dtft.checkpoint.options import ReplicatedOptions, is_storage_due, superfluous
from dtft.checkpoint.stored import StoredSteps
from dtft.checkpoint.versions import Version, Versions

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
        self._exporter: ExporterProcess | None = None
        self._opening: dict[str, Any] = {}
        """What the exporter was told first."""
        self.stored = StoredSteps(directory)
        self._steps: set[int] = set()
        self._metrics: dict[int, Any] = {}
        self._writing: Version | None = None
        self._replaced: tuple[int, ...] = ()
        """Steps that go once the one in writing is there."""
        self._waiting: list[Version] = []
        """Due and pinned: one, and once the manager closes the newest step as well."""
        self._closing = False
        self._failure: tuple[int, str] | None = None
        """Step and reason of the last failure that nobody was told."""
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
            self._drop_waiting()
            self._wait_for_turn(version)
            self._begin()
        elif self._exporter is None:
            # The newest step is written at the latest when the process ends, and from
            # Python 3.12 on no thread can be started then.
            with contextlib.suppress(RuntimeError):
                self._exporter_for(version)

    def write_newest(self) -> None:
        """Writes the newest step in memory, if storage does not have it.

        It goes first; what is due besides follows, if that is still worth keeping.
        """
        self._closing = True
        newest = max(self._versions.steps, default=None)
        if newest is None or newest in self._steps:
            return
        version = self._versions.get(newest)
        if version is not self._writing and version not in self._waiting:
            self._wait_for_turn(version)
            self._begin()

    def give_way(self) -> bool:
        """Gives up steps that wait for storage; whether that made memory free."""
        return self._drop_waiting() > 0

    def _wait_for_turn(self, version: Version) -> None:
        self._versions.pin(version)
        self._waiting.append(version)

    def _drop_waiting(self, below: int | None = None) -> int:
        """Forgets the steps that wait (`below` a step), and says how many."""
        going = [one for one in self._waiting if below is None or one.step < below]
        for version in going:
            logger.info("step %d does not go to storage after all", version.step)
            self._waiting.remove(version)
            self._versions.unpin(version)
        return len(going)

    def _begin(self) -> None:
        while self._writing is None and self._waiting:
            version = max(self._waiting, key=lambda one: one.step)
            self._waiting.remove(version)
            going = self._going(version.step)
            if version.step in self._steps or version.step in going:
                self._versions.unpin(version)
            else:
                self._write(version, going)

    def _write(self, version: Version, going: tuple[int, ...]) -> None:
        """Hands a pinned version to the exporter."""
        self._writing, self._replaced = version, going
        try:
            exporter = self._exporter_for(version)
            pieces = version.record.layout.slices(0)
            chunks = Chunks.of(pieces, self._versions.chunk_bytes)
            fields = {
                "step": version.step,
                "memory": version.exported,
                "places": bytes(chunks.num_chunks).hex(),
                "digests": [one.hex() for one in version.digests],
                "items": dynamic_part(version.record),
                "delete": going,
            }
            exporter.save(lambda: fields, self._options.storage_timeout_s)
        except Exception as error:  # there is no thread to be had, say
            self._done(f"{type(error).__name__}: {error}")

    def _exporter_for(self, version: Version) -> ExporterProcess:
        """That of the step before, if the tree is the same; else a new one."""
        record = version.record
        layout = dataclasses.replace(record.layout, config=config_of(record))
        opening = {
            "directory": str(self.stored.directory),
            "layout": layout.to_json(),
            "chunk_bytes": self._versions.chunk_bytes,
            "scored": self._options.best_fn is not None,
            "shared": True,
            "limit_s": self._options.storage_timeout_s,
        }
        if self._exporter is None or self._opening != opening:
            self._end_exporter()
            self._exporter = ExporterProcess(opening, self._heard)
            self._opening = opening
        return self._exporter

    def _heard(self, exporter: ExporterProcess, answer: dict[str, Any]) -> None:
        """The exporter has written the step, failed, or ended. From another thread."""
        with self._condition:
            if exporter is not self._exporter or answer.get("op") == "open":
                return
            if not answer["ok"]:
                self._end_exporter()  # Orbax's threads may still be at that step
            if self._writing is not None:
                self._done(None if answer["ok"] else answer["error"])

    def _end_exporter(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _going(self, step: int) -> tuple[int, ...]:
        """The stored steps that go once `step` is there; none if that is not known."""
        stored = {*self._steps, step}
        try:
            return superfluous(self._options, stored, self.scores(stored))
        except Exception as error:  # the user's function, or what storage holds
            logger.warning(
                "step %d goes to storage, but none is removed for it: %s", step, error
            )
            return ()

    def _done(self, error: str | None) -> None:
        """The step in writing is in storage, or why it is not."""
        version, self._writing = self._writing, None
        assert version is not None
        self._versions.unpin(version)
        if error is None:
            self._steps = {*self._steps, version.step} - set(self._replaced)
            for step in self._replaced:
                self._metrics.pop(step, None)
            logger.info("step %d is in storage", version.step)
        else:
            self._versions.distrust()
            self._failure = version.step, _short(error)
            logger.warning("%s", self._text(*self._failure))
            self._drop_waiting(below=version.step)
        try:
            self._begin()
        finally:
            self._condition.notify_all()

    def _text(self, step: int, reason: str) -> str:
        """What is told of a failure, and what follows from it."""
        later = max((one for one in self._steps if one > step), default=None)
        if later is not None:
            follows = f"Step {later} did, after it."
        elif self._closing:
            follows = (
                "Steps stored before are as they were. The manager is closed, so it is "
                "not tried again."
            )
        else:
            follows = (
                "Steps stored before are as they were; the next one that is due is "
                "tried again."
            )
        return (
            f"step {step} did not reach storage in {self.stored.directory}: {reason}. "
            f"{follows}"
        )

    def wait(self) -> None:
        """Waits for what is being written or due.

        Raises:
            StorageFailed: that, or a write before, failed; or it took too long.
        """
        self._wait_idle()
        self.check()

    def _wait_idle(self) -> None:
        steps = [one.step for one in (self._writing, *self._waiting) if one is not None]
        limit_s = len(steps) * (self._options.storage_timeout_s + START_S)
        if not self._condition.wait_for(
            lambda: self._writing is None and not self._waiting, timeout=limit_s
        ):
            raise StorageFailed(
                f"{limit_s:.0f} s waiting for steps {steps} to reach storage in "
                f"{self.stored.directory}; limit: ReplicatedOptions.storage_timeout_s"
            )

    def check(self) -> None:
        """Raises the last failure that was not raised yet, as StorageFailed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StorageFailed(self._text(*failure))

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
        return {step: self.score(step, self.metrics(step)) for step in steps}

    def score(self, step: int, metrics: Any) -> float | None:
        """The score of a step with these metrics; None without metrics or `best_fn`.

        Raises:
            ValueError: `best_fn` does not take them.
        """
        try:
            return self._options.score(metrics)
        except Exception as error:
            raise ValueError(
                f"best_fn does not take the metrics of step {step}, {metrics!r:.80}: "
                f"{type(error).__name__}: {error}. Give `save` metrics of which it "
                "makes a number, or none; delete a stored step that has others."
            ) from error

    # -------------------------------------------------------------------- ending

    def delete(self, step: int) -> None:
        """Removes a stored step, after what is being written.

        Raises:
            StorageFailed: that takes too long.
        """
        for version in [one for one in self._waiting if one.step == step]:
            self._waiting.remove(version)
            self._versions.unpin(version)
        self._wait_idle()
        if step in self._steps:
            with self.stored.manager(read_only=False) as manager:
                manager.delete(step)
            self._steps.discard(step)
        self._metrics.pop(step, None)
        if self._tried == step:
            self._tried = max(self._steps, default=None)

    @property
    def is_writing(self) -> bool:
        """Whether a step is being written."""
        return self._writing is not None

    def end(self) -> None:
        """Ends the exporter; a step that it was writing is not written."""
        with self._condition:
            self._drop_waiting()
            self._end_exporter()
            if self._writing is not None:
                self._done("the manager was closed")


def _short(error: str) -> str:
    """The first line, without what Orbax prints of the values."""
    line = error.partition("\n")[0]
    return line if len(line) < 300 else f"{line[:300]}..."
