"""Checkpoints of a job of one process.

Every saved step is copied into the process's own memory, and some steps are also
written to storage.

`LocalSteps` implements `ReplicatedCheckpointManager` for one process. `Reader` chooses
the copy of a step to read. `Storing` decides which steps are written to storage and
when, without blocking training.
"""

import contextlib
import copy
import dataclasses
import logging
import threading
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from dtft.checkpoint.managers.options import (
    ReplicatedOptions,
    best,
    chosen_step,
    is_storage_due,
    superfluous,
)
from dtft.checkpoint.memory import Corrupt, Version, Versions
from dtft.checkpoint.state import (
    Chunks,
    Record,
    item_metadata,
    listed,
    record_of,
    restore_result,
    restore_targets,
)
from dtft.checkpoint.storage import (
    EXPORTER_START_S,
    ExporterProcess,
    StoredSteps,
    config_of,
    dynamic_part,
)

logger = logging.getLogger(__name__)


class StorageFailed(RuntimeError):
    """A step was not written to storage, or not in time; the steps in memory stay."""


class Storing:
    """The writer of steps from memory to storage, through an exporter process.

    The caller of every public method except `end` and `score` holds the lock
    `condition` that `__init__` was given.

    One step is written at a time. Of the steps that become due meanwhile, only the
    newest step waits and keeps its memory.
    """

    def __init__(
        self,
        directory: epath.Path,
        options: ReplicatedOptions,
        versions: Versions,
        condition: threading.Condition,
    ) -> None:
        """Lists the directory; no exporter is started yet.

        Args:
            directory: the directory of the storage tier.
            options: the options of the checkpoint manager.
            versions: the steps in this process's memory.
            condition: guards `versions` and this object; notified after each write.
        """
        self._options, self._versions = options, versions
        self._condition = condition
        self._exporter: ExporterProcess | None = None
        self._opening: dict[str, Any] = {}
        """Fields of the first message to the current exporter process; {} before the
        first exporter."""
        self.stored = StoredSteps(directory)
        self._metrics: dict[int, Any] = {}
        self._writing: Version | None = None
        self._replaced: tuple[int, ...] = ()
        """Stored steps that are deleted once the step being written is stored."""
        self._waiting: list[Version] = []
        """Steps in memory that wait to be written to storage, pinned so that no save
        reuses their buffers. At most one, and on `close` also the newest step."""
        self._closing = False
        self._failure: tuple[int, str] | None = None
        """(step, reason) of the last failure that was not raised yet."""
        self._steps = set(self.stored.steps())
        self._tried = max(self._steps, default=None)

    @property
    def steps(self) -> frozenset[int]:
        """The steps in storage, as far as this process knows.

        Changes that other writers make are seen only after `reload`.
        """
        return frozenset(self._steps)

    def reload(self) -> None:
        """Lists the directory again; on failure, keeps the last listing."""
        self._steps = set(self.stored.steps_or(tuple(self._steps)))

    def committed(self, version: Version, *, at_once: bool) -> None:
        """Queues a step for storage if the step is due, or if `at_once` is True.

        A queued step replaces the step that waits in the queue. If the step is not
        queued and no exporter (the process that writes to storage) runs, starts one.
        The exporter is then ready at the interpreter's exit, when the newest step is
        written but no thread can be started. Called after the step was committed to
        memory.

        Args:
            version: the step in memory.
            at_once: whether to queue a step that is not due.
        """
        if at_once or is_storage_due(self._options, version.step, self._tried):
            self._tried = version.step
            self._drop_waiting()
            self._wait_for_turn(version)
            self._begin()
        elif self._exporter is None:
            # The newest step is written when the process ends at the latest. From
            # Python 3.12 on, no thread can be started then.
            with contextlib.suppress(RuntimeError):
                self._exporter_for(version)

    def write_newest(self) -> None:
        """Queues the newest step in memory for storage, when the manager closes.

        Queues nothing if memory has no step, if storage has the newest step, or if the
        newest step is queued or being written. The newest step is written before an
        older step in the queue. The older step is written only if the write of the
        newest step succeeds and retention keeps the older step.
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
        """Drops the steps that wait for storage, so that a save can use their memory.

        Returns:
            Whether a step was dropped.
        """
        return self._drop_waiting() > 0

    def _wait_for_turn(self, version: Version) -> None:
        self._versions.pin(version)
        self._waiting.append(version)

    def _drop_waiting(self, below: int | None = None) -> int:
        """Drops the steps that wait for storage; with `below`, only steps below it.

        Returns:
            The number of dropped steps.
        """
        going = [one for one in self._waiting if below is None or one.step < below]
        for version in going:
            logger.info(
                "step %d was waiting to be written to storage and will not be written",
                version.step,
            )
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
        """Makes the exporter process write a step; an error counts as a failed write.

        Args:
            version: the step in memory, already pinned so that its memory is not
                reused.
            going: the stored steps to delete once this step is stored.
        """
        self._writing, self._replaced = version, going
        try:
            exporter = self._exporter_for(version)
            pieces = version.record.layout.slices(0)
            chunks = Chunks.of(pieces, self._versions.chunk_bytes)
            fields = {
                "step": version.step,
                "memory": version.exported,
                "buffers": bytes(chunks.num_chunks).hex(),
                "digests": [one.hex() for one in version.digests],
                "items": dynamic_part(version.record),
                "delete": going,
            }
            exporter.save(lambda: fields, self._options.storage_timeout_s)
        except Exception as error:  # for instance, no thread can be started
            self._done(f"{type(error).__name__}: {error}")

    def _exporter_for(self, version: Version) -> ExporterProcess:
        """Returns an exporter process that can write steps with the tree of `version`.

        An exporter for another tree is ended, and a new exporter is started.
        """
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
        """Records the result of the current write from an exporter's answer.

        A failure also ends the exporter process. Answers of former exporters, and
        answers to the first message ("open"), are ignored. Called on the threads of
        `ExporterProcess`.
        """
        with self._condition:
            if exporter is not self._exporter or answer.get("op") == "open":
                return
            if not answer["ok"]:
                self._end_exporter()  # Orbax's threads may still write that step
            if self._writing is not None:
                self._done(None if answer["ok"] else answer["error"])

    def _end_exporter(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _going(self, step: int) -> tuple[int, ...]:
        """Returns the stored steps to delete once `step` is stored.

        If metrics cannot be read or `best_fn` fails, logs a warning and returns ().
        """
        stored = {*self._steps, step}
        try:
            return superfluous(self._options, stored, self.scores(stored))
        except Exception as error:  # from `best_fn`, or from reading storage
            logger.warning(
                "step %d will be stored, but no older step is deleted for it, because "
                "the steps cannot be ranked: %s",
                step,
                error,
            )
            return ()

    def _done(self, error: str | None) -> None:
        """Records the result of the current write and begins the next write.

        After a failure, older steps that wait for storage are dropped. The next save
        then copies unchanged leaves, too, because the failed step may be corrupt in
        memory.

        Args:
            error: the reason of the failure; None if the step is in storage.
        """
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
        """Formats the message that `step` was not stored, with the reason.

        The message also names a later step that is in storage. Without a later step, it
        says whether the next step that is due will be tried.
        """
        later = max((one for one in self._steps if one > step), default=None)
        if later is not None:
            follows = f"Step {later} did, after it."
        elif self._closing:
            follows = (
                "Steps stored before are unchanged. The manager is closed, so it is "
                "not tried again."
            )
        else:
            follows = (
                "Steps stored before are unchanged; the next step that is due is "
                "tried again."
            )
        return (
            f"step {step} did not reach storage in {self.stored.directory}: {reason}. "
            f"{follows}"
        )

    def wait(self) -> None:
        """Waits until no step is being written or waits to be written.

        Raises:
            StorageFailed: a write failed during the wait, or before it without having
                been raised; or the wait took longer than its limit. The limit is
                `storage_timeout_s` + `EXPORTER_START_S` (60) seconds, times the number
                of pending writes.
        """
        self._wait_idle()
        self.check()

    def _wait_idle(self) -> None:
        steps = [one.step for one in (self._writing, *self._waiting) if one is not None]
        limit_s = len(steps) * (self._options.storage_timeout_s + EXPORTER_START_S)
        if not self._condition.wait_for(
            lambda: self._writing is None and not self._waiting, timeout=limit_s
        ):
            raise StorageFailed(
                f"{limit_s:.0f} s waiting for steps {steps} to reach storage in "
                f"{self.stored.directory}; limit: ReplicatedOptions.storage_timeout_s"
            )

    def check(self) -> None:
        """Raises StorageFailed for the last failed write, if it was not raised yet."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StorageFailed(self._text(*failure))

    # ------------------------------------------------------------------- metrics

    def metrics(self, step: int) -> Any:
        """Returns the metrics that were saved with a step; None if none were saved.

        Raises:
            CheckpointUnreadable: the step's record in storage cannot be read.
        """
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
        """Maps each step to its score; None for a step without metrics.

        A score is the value of `best_fn`, negated if `best_mode` is "min", so that a
        higher score is better. The result is empty if the options have no `best_fn`.

        Raises:
            ValueError: `best_fn` fails for the metrics of a step.
            CheckpointUnreadable: a step's record in storage cannot be read.
        """
        if self._options.best_fn is None:
            return {}
        return {step: self.score(step, self.metrics(step)) for step in steps}

    def score(self, step: int, metrics: Any) -> float | None:
        """Computes a step's score from metrics; None without metrics or `best_fn`.

        A score is the value of `best_fn`, negated if `best_mode` is "min", so that a
        higher score is better.

        Raises:
            ValueError: `best_fn` fails for these metrics; the message names the step.
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
        """Removes a step from storage, after the pending writes have ended.

        A pending write of this step is dropped, unless it has begun.

        Raises:
            StorageFailed: the pending writes take longer than the limit of `wait`.
        """
        for version in [one for one in self._waiting if one.step == step]:
            self._waiting.remove(version)
            self._versions.unpin(version)
        self._wait_idle()
        if step in self._steps:
            self.stored.delete(step)
            self._steps.discard(step)
        self._metrics.pop(step, None)
        if self._tried == step:
            self._tried = max(self._steps, default=None)

    @property
    def is_writing(self) -> bool:
        """Whether a step is being written to storage."""
        return self._writing is not None

    def end(self) -> None:
        """Ends the exporter process; steps that wait for storage are not written.

        A running write counts as failed.
        """
        with self._condition:
            self._drop_waiting()
            self._end_exporter()
            if self._writing is not None:
                self._done("the manager was closed")


def _short(error: str) -> str:
    """Returns the first line of an error, cut to 300 characters and "..." if longer."""
    line = error.partition("\n")[0]
    return line if len(line) < 300 else f"{line[:300]}..."


class Reader:
    """A reader of steps: from memory, or from storage if memory lacks the step.

    The caller of every method holds the lock that guards the steps in storage (the
    condition of the `Storing`). A step in memory that does not match its digests is
    never returned.
    """

    def __init__(self, versions: Versions, storing: Storing) -> None:
        """Stores references to the steps in memory and the steps in storage."""
        self._versions, self._storing = versions, storing

    def steps(self) -> list[int]:
        """Returns the steps in memory and in storage, ascending."""
        return sorted({*self._versions.steps, *self._storing.steps})

    @property
    def offered(self) -> str:
        """The steps in memory and in storage as text, for messages."""
        return listed([str(step) for step in self.steps()])

    def chosen(self, step: int | None) -> int:
        """Returns the requested step; for None, the newest in memory or storage.

        Raises:
            FileNotFoundError: neither memory nor storage has the step; or `step` is
                None, and both have no step.
        """
        places = f"memory nor in {self._storing.stored.directory}"
        return chosen_step(step, self.steps(), places)

    def restore(self, step: int | None, args: Any) -> Any:
        """Restores a step, from storage if memory lacks the step.

        A corrupt step in memory is dropped and then read from storage. If storage lacks
        the step and `step` is None, the next older step is restored. For the errors,
        see `ReplicatedCheckpointManager.restore`.

        Args:
            step: one of `steps()`; None for the newest.
            args: `ocp.args.StandardRestore` or `Composite`, as for stock Orbax.
        """
        while True:
            chosen = self.chosen(step)
            if chosen not in self._versions.steps:
                return self._from_storage(chosen, args)
            try:
                return self._from_memory(chosen, args)
            except Corrupt as error:
                if chosen not in self._storing.steps and step is not None:
                    raise
                logger.warning(
                    "%s The step is restored from storage; without a copy there, an "
                    "older step is restored.",
                    error,
                )

    def _from_memory(self, step: int, args: Any) -> Any:
        wanted = restore_targets(self._versions.get(step).record, args)
        version, values = self._versions.read(step)
        items = copy.deepcopy(dict(version.record.json_items))
        return restore_result(version.record, values, items, wanted, version.shardings)

    def _from_storage(self, step: int, args: Any) -> Any:
        stored = self._storing.stored
        found = stored.record(step)
        if found is None:
            return stored.stock(step, args)
        record, prints = found
        wanted = restore_targets(record, args)
        values, items = stored.read(step, record, prints, wanted)
        return restore_result(record, values, items, wanted, [None] * len(values))

    def item_metadata(self, step: int) -> Any:
        """Returns a `jax.ShapeDtypeStruct` for every leaf, in the saved tree.

        For a save of named items, returns a Composite of such trees.
        Only leaves of steps in memory have shardings. For a step that stock Orbax
        wrote, the result is Orbax's item metadata.
        """
        step = self.chosen(step)
        if step in self._versions.steps:
            version = self._versions.get(step)
            return item_metadata(version.record, version.shardings)
        found = self._storing.stored.record(step)
        if found is not None:
            return item_metadata(found[0], [None] * len(found[0].leaves))
        return self._storing.stored.stock_metadata(step)

    def metadata(self, step: int | None) -> Any:
        """Returns Orbax's metadata of a step; of the directory if `step` is None."""
        if step is not None and self.chosen(step) in self._versions.steps:
            record = self._versions.get(step).record
            return ocp.metadata.StepMetadata(
                item_metadata=self.item_metadata(step),
                metrics=record.metrics or {},
                custom_metadata=record.custom_metadata or {},
            )
        with self._storing.stored.manager() as manager:
            found = manager.metadata(step)
        if step is None:
            return found
        return dataclasses.replace(found, item_metadata=self.item_metadata(step))


class LocalSteps:
    """The implementation of `ReplicatedCheckpointManager` for a job of one process.

    `ReplicatedCheckpointManager` documents the methods.
    """

    def __init__(self, directory: epath.Path, options: ReplicatedOptions) -> None:
        """Lists the directory; memory is reserved by the first save.

        Args:
            directory: the directory of the storage tier.
            options: the options of the checkpoint manager.

        Raises:
            ValueError: the option `agent` is set, or `memory_to_keep` is above 252.
            OSError: the directory cannot be listed.
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
        """Returns the steps in memory and in storage, ascending.

        With `read`, the directory is listed again.
        """
        with self._condition:
            if read:
                self._storing.reload()
            return self._reader.steps()

    def newest(self) -> int | None:
        """Returns the newest step of `all_steps`; None if there is no step."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the highest score; without `best_fn` the newest step.

        A score is the value of `best_fn` for a step's metrics, negated if `best_mode`
        is "min". Returns None if there is no step, or if with `best_fn` no step has
        metrics.
        """
        if self._options.best_fn is None:
            return self.newest()
        with self._condition:
            steps = self._reader.steps()
            return best(steps, self._storing.scores(set(steps)))

    def save(
        self, step: int, args: Any, metrics: Any, custom_metadata: Any, at_once: bool
    ) -> None:
        """Copies a step into memory; queues it for storage if it is due or `at_once`.

        With `at_once`, a step that is not due is queued, too.

        Raises:
            ValueError: the step exists, `args` or `metrics` cannot be saved, or
                `best_fn` fails.
            OSError: too little memory for the step.
        """
        record, values = record_of(args, metrics, custom_metadata)
        self._storing.score(step, record.metrics)  # refuses metrics without a score
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
        except OSError:  # a step that waits for storage must not prevent a save
            if not self._storing.give_way():
                raise
        return self._versions.write(step, record, values)

    def restore(self, step: int | None, args: Any) -> Any:
        """Restores a step from memory, or from storage if memory lacks the step."""
        with self._condition:
            return self._reader.restore(step, args)

    def item_metadata(self, step: int) -> Any:
        """Returns a `jax.ShapeDtypeStruct` for every leaf, in the saved tree.

        For a save of named items, returns a Composite of such trees.
        Only leaves of steps in memory have shardings. For a step that stock Orbax
        wrote, the result is Orbax's item metadata.
        """
        with self._condition:
            return self._reader.item_metadata(step)

    def metadata(self, step: int | None) -> Any:
        """Returns Orbax's metadata of a step; of the directory if `step` is None."""
        with self._condition:
            return self._reader.metadata(step)

    def metrics(self, step: int) -> Any:
        """Returns the metrics that were saved with a step; None if none were saved."""
        with self._condition:
            return self._storing.metrics(self._reader.chosen(step))

    def wait_until_finished(self) -> None:
        """Waits until no step is being written to storage or waits to be written.

        Raises:
            StorageFailed: a write failed, or the wait took too long.
        """
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
        """Removes a step from memory and from storage.

        Raises:
            FileNotFoundError: neither memory nor storage has the step.
            StorageFailed: pending writes to storage took too long.
        """
        with self._condition:
            self._reader.chosen(step)
            self._storing.delete(step)
            if step in self._versions.steps:
                self._versions.drop(step)

    def close(self) -> None:
        """Writes the newest step to storage, then frees all memory.

        The memory is freed also if the write fails.

        Raises:
            StorageFailed: a write failed or took too long.
        """
        try:
            with self._condition:
                self._storing.write_newest()
                self._storing.wait()
        finally:
            self._storing.end()
            with self._condition:
                self._versions.close()

    def leave(self) -> None:
        """Does the same as `close`.

        Called when the interpreter exits, or after an error in the user's `with` block.
        """
        self.close()
