"""The public checkpoint manager: every saved step in memory, some of them in storage.

The manager implements Orbax's `AbstractCheckpointManager`, so it replaces
`ocp.CheckpointManager` in an existing loop. `LocalSteps` does the work in a job of one
process, `JobSteps` in a job of several processes.
"""

import atexit
import logging
import operator
import os
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.managers.distributed import JobSteps
from dtft.checkpoint.managers.local import LocalSteps
from dtft.checkpoint.managers.options import ReplicatedOptions, checked, is_due
from dtft.checkpoint.managers.save_clock import SaveClock

LARGEST = 2**63 - 1
"""The largest step that every file format and message can hold."""


def step_number(step: Any) -> int:
    """Converts a step to a plain int.

    A step becomes a directory's name, a key, JSON and msgpack, which encode numpy and
    jax scalars differently.

    Args:
        step: an int, or what stands for one exactly: a numpy or jax integer scalar.

    Raises:
        ValueError: it is not one, or negative, or too large.

    >>> import numpy as np
    >>> step_number(np.int64(3))
    3
    >>> step_number(True)
    Traceback (most recent call last):
    ValueError: step=True (bool) is no step. Allowed: whole numbers from 0 to 2**63 \
- 1, of Python, numpy or jax. Give an int.
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = None
    if number is None or not 0 <= number <= LARGEST:
        raise ValueError(
            f"step={step!r:.60} ({type(step).__name__}) is no step. Allowed: whole "
            "numbers from 0 to 2**63 - 1, of Python, numpy or jax. Give an int."
        )
    return number


logger = logging.getLogger(__name__)


class ReplicatedCheckpointManager(ocp.AbstractCheckpointManager):
    """Saves every step into memory in the time of a copy, and restores from there.

    `save` returns when the bytes are copied: the arrays may be donated to the next
    step. Every `storage_interval_steps` a process of its own writes a step to
    `directory`, where stock Orbax reads it as if `ocp.CheckpointManager` had written
    it; so does `close`, which also runs when the interpreter exits. While one is being
    written, the newest of those that are due waits for it. The steps on offer
    are those in memory and those in storage. Every byte restored was checked against a
    digest, and is the byte that was saved.

    >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
    >>> state = {"w": jnp.arange(3.0), "step": 0}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     options = ReplicatedOptions(memory_to_keep=2)
    ...     manager = ReplicatedCheckpointManager(directory, options=options)
    ...     for step in range(3):
    ...         saved = manager.save(step, args=ocp.args.StandardSave(state))
    ...     found = manager.restore(2, args=ocp.args.StandardRestore(state))
    ...     steps = manager.all_steps()
    ...     manager.close()
    >>> steps[-2:], found["w"].tolist(), found["step"]
    ([1, 2], [0.0, 1.0, 2.0], 0)
    """

    def __init__(
        self, directory: epath.PathLike, *, options: ReplicatedOptions | None = None
    ) -> None:
        """Lists the directory; memory is reserved by the first save.

        In a `jax.distributed` job of several processes every one of them makes this
        call: each attaches to the agent of its host, and waits until all have.

        Args:
            directory: of the storage tier; may hold steps that stock Orbax wrote. In a
                job of several processes one that every host sees.
            options: intervals, retention and limits.

        Raises:
            ValueError: an option or the directory does not fit.
            NoAgent: in a job of several processes: there is no agent that takes this
                process; says what to do.
            TimeoutError: the other processes did not attach in time; names them.
        """
        text = os.fspath(directory)
        self._directory = epath.Path(text if "://" in text else os.path.abspath(text))
        self._options = checked(options)
        interval = self._options.save_interval_steps
        self._clock = SaveClock(
            None if interval == "auto" else interval, self._options.automatic
        )
        many = jax.distributed.is_initialized() and jax.process_count() > 1
        work = JobSteps if many else LocalSteps
        self._work: JobSteps | LocalSteps = work(self._directory, self._options)
        self._closed, self._owner = False, os.getpid()
        atexit.register(self._leave_at_exit)

    def __enter__(self) -> "ReplicatedCheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._end():
            try:
                self._work.leave()
            except Exception as trouble:  # the user's error is the one to be seen
                logger.exception("closing the checkpoint manager failed")
                if error is not None:
                    error.add_note(f"The checkpoint manager, too: {trouble}")

    # -------------------------------------------------------------------- steps

    @property
    def directory(self) -> epath.Path:
        """The directory of the storage tier."""
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps on offer, ascending; `read` lists the directory again.

        In a job of several processes all of them call it: it waits until the step
        saved last is safe, and lists the directory each time.
        """
        return self._work.all_steps(read)

    def latest_step(self) -> int | None:
        """The newest step on offer, or None; in a job it waits as `all_steps` does."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step on offer with the best metrics; without `best_fn` the newest."""
        return self._work.best_step()

    def reload(self) -> None:
        """Lists the directory again, in case someone else has changed it."""
        self.all_steps(read=True)

    def reached_preemption(self, step: int) -> bool:
        """Whether the machine is about to be taken away, as JAX knows it."""
        return ocp.utils.reached_preemption(step_number(step))

    def should_save(self, step: int) -> bool:
        """Whether `save` takes this step: see `ReplicatedOptions`."""
        step, latest = step_number(step), self._work.newest()
        if is_due(self._clock.cadence, step, latest):
            return True
        return (latest is None or step > latest) and self.reached_preemption(step)

    # --------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        *,
        args: Any,
        metrics: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Copies a step into memory; the arrays may be donated when this returns.

        Storage that fails is logged and told by `check_for_errors`, never here.

        Args:
            step: 0 or more; also as a numpy or jax integer.
            args: `ocp.args.StandardSave`, or `Composite` of it and `JsonSave`.
            metrics: for `best_fn`, as JSON values or scalars.
            force: save even if `should_save` says no.
            custom_metadata: JSON values that `metadata` gives back.

        Returns:
            Whether the step was saved.

        Raises:
            ValueError: `step` is no number of a step, or exists; or `args` or `metrics`
                cannot be saved. Says why.
            OSError: there is no memory for it. What was saved before stays.
        """
        self._refuse_closed()
        step = step_number(step)
        if not force and not self.should_save(step):
            return False
        at_once = self.reached_preemption(step)
        with self._clock.saving(step, args):
            self._work.save(step, args, metrics, custom_metadata, at_once)
        return True

    # ------------------------------------------------------------------ restore

    def restore(self, step: int | None = None, *, args: Any = None) -> Any:
        """A step as it was saved, bit for bit, onto the shardings of `args`.

        Memory is read first. A copy there with a wrong byte is refused, and storage is
        read; without `step`, the next older step if storage has not got that one.

        Args:
            step: one of `all_steps()`; None for the newest.
            args: `ocp.args.StandardRestore` or `Composite`, as for stock Orbax. Without
                it, and where the tree states no sharding, arrays come back onto the
                sharding that they had: from memory, and in a job of several processes
                from storage, too. An array of the tree that nobody put on a device
                (`not array.committed`) comes back so.

        Raises:
            FileNotFoundError: there is no step, or not this one.
            ValueError: `args` does not fit what was saved; or (`Corrupt`) the only copy
                of `step` is damaged.
            CheckpointUnreadable: the step is in storage, but cannot be read.
        """
        self._refuse_closed()
        return self._work.restore(None if step is None else step_number(step), args)

    # ----------------------------------------------------------------- metadata

    def item_metadata(self, step: int) -> Any:
        """Shape, dtype and sharding of every leaf, in the saved tree.

        In one process the sharding is known of steps in memory, in a job of all steps.
        Leaves are jax.ShapeDtypeStruct, so the result serves as a restore's target; of
        a step that stock Orbax wrote it is what stock Orbax gives.
        """
        return self._work.item_metadata(step_number(step))

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's metadata of a step, or of the directory without `step`."""
        return self._work.metadata(None if step is None else step_number(step))

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        return self._work.metrics(step_number(step))

    # ---------------------------------------------------------- waiting and ending

    def wait_until_finished(self) -> None:
        """Waits until storage has what was due; memory has every step at once.

        Raises:
            StorageFailed: a write to storage failed.
        """
        self._work.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raises StorageFailed, once, if a write to storage has failed."""
        self._work.check_for_errors()

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being written to storage."""
        return self._work.is_saving_in_progress()

    def delete(self, step: int) -> None:
        """Removes a step from memory and from storage.

        In a job of several processes the step is removed from storage only, and all
        processes make the same call. The newest step in memory is refused, because lost
        hosts restore from it.

        Raises:
            FileNotFoundError: there is no such step.
        """
        self._refuse_closed()
        self._work.delete(step_number(step))

    def close(self) -> None:
        """Writes the newest step to storage, then frees all memory.

        Raises:
            StorageFailed: this write failed, or an earlier write failed and was not
                raised yet. The memory is freed in both cases.
        """
        if self._end():
            self._work.close()

    def _end(self) -> bool:
        """Whether this call is the one that ends the manager."""
        ended, self._closed = self._closed, True
        atexit.unregister(self._leave_at_exit)
        return not ended

    def _leave_at_exit(self) -> None:
        if os.getpid() != self._owner or not self._end():
            return  # a forked child, or closed
        try:
            self._work.leave()
        except Exception:
            logger.exception("closing the checkpoint manager failed")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(
                f"the manager of {self._directory} is closed. Make a new one."
            )
