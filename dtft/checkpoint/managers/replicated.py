"""The public checkpoint manager: saves steps into memory, some of them into storage.

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

    Steps are stored and sent as JSON and msgpack, which cannot encode numpy and jax
    scalars.

    Args:
        step: an int, or a numpy or jax integer scalar.

    Raises:
        ValueError: `step` has another type (also bool), is negative, or is above
            2**63 - 1 (`LARGEST`).

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
    """A checkpoint manager that keeps steps in memory and some of them in storage.

    `save` returns when the bytes are copied to memory: the arrays may then be donated.
    Every `storage_interval_steps` steps, a separate process writes a step to
    `directory`, in the format of `ocp.CheckpointManager`, so stock Orbax can read the
    step. `close` writes the newest step too. All steps in memory or in storage can be
    restored. A restore checks every saved byte against a checksum; steps that stock
    Orbax wrote have no checksums.

    In a job of one process, `close` also runs when the interpreter exits. Of the steps
    that become due for storage during a write, only the newest is written afterwards.

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

        In a `jax.distributed` job of several processes, every process must make this
        call. Each process attaches to the agent of its host, and waits until all
        processes have attached.

        Args:
            directory: directory of the storage tier; may hold steps that stock Orbax
                wrote. In a job of several processes, every host must see the directory.
            options: intervals, retention and limits.

        Raises:
            ValueError: an option or the directory cannot be used.
            OSError: the directory cannot be listed.
            NoAgent: in a job of several processes, no agent accepts this process; the
                message gives the remedy.
            AgentGone: in a job of several processes, the agent has ended or has
                detached this process.
            TimeoutError: in a job of several processes, some processes did not attach
                in time. The message names these processes, if they are known.
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
            except Exception as trouble:  # must not replace the user's error
                logger.exception(
                    "closing the checkpoint manager of %s failed; its newest steps "
                    "may not be in storage",
                    self._directory,
                )
                if error is not None:
                    error.add_note(f"The checkpoint manager, too: {trouble}")

    # -------------------------------------------------------------------- steps

    @property
    def directory(self) -> epath.Path:
        """The directory of the storage tier."""
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """Returns the steps in memory and in storage, ascending.

        With `read`, the directory is listed again.

        In a job of several processes, every process makes the same call. The call waits
        until the step saved last has all its copies on other hosts, and always lists
        the directory.
        """
        return self._work.all_steps(read)

    def latest_step(self) -> int | None:
        """Returns the newest step of `all_steps`; None if there is no step.

        In a job of several processes, waits like `all_steps` until the step saved last
        has all its copies on other hosts.
        """
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the highest score; without `best_fn` the newest step.

        A score is the value of `best_fn` for a step's metrics, negated if `best_mode`
        is "min". Returns None if there is no step, or if with `best_fn` no step has
        metrics.
        """
        return self._work.best_step()

    def reload(self) -> None:
        """Lists the directory again, to find the changes of other writers.

        In a job of several processes, every process makes the same call, which waits
        like `all_steps`.
        """
        self.all_steps(read=True)

    def reached_preemption(self, step: int) -> bool:
        """Whether a machine will be preempted and all processes must save `step`.

        JAX chooses the step, the same on all processes, after a preemption notice.
        """
        return ocp.utils.reached_preemption(step_number(step))

    def should_save(self, step: int) -> bool:
        """Whether `save` saves `step` without `force`.

        True for a step that is due (see `ReplicatedOptions.save_interval_steps`) or for
        which `reached_preemption` is True. False for a step at or below the newest step
        in memory or storage.
        """
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
        """Copies a step into memory; the arrays may be donated after `save` returns.

        A failed write to storage is raised by `check_for_errors`, not by `save`.

        Args:
            step: number of the step, 0 or more: an int, or a numpy or jax integer.
            args: `ocp.args.StandardSave`, or an `ocp.args.Composite` of `StandardSave`
                and `JsonSave`.
            metrics: the metrics of the step, for `best_fn`: JSON values or scalars.
            force: whether to save a step for which `should_save` is False.
            custom_metadata: JSON values that `metadata` returns.

        Returns:
            Whether the step was saved.

        Raises:
            ValueError: `step` is not a valid number or exists already, `args` or
                `metrics` cannot be saved, `best_fn` fails, or the manager is closed. In
                a job of several processes also: `step` is below the newest step, the
                tree or a sharding differs from the first save, or the values that are
                no arrays have more than 3 MiB.
            OSError: in a job of one process, too little memory for the step; the steps
                saved before remain.
            TimeoutError: in a job of several processes, the agent did not answer in
                time.
            AgentGone: in a job of several processes, the agent has ended or has
                detached this process.
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
        """Restores a step, bit for bit, onto the shardings of `args`.

        A step in memory is read from memory, any other step from storage. In a job of
        one process, a corrupt step in memory is dropped and then read from storage. If
        storage lacks the step and `step` is None, the next older step is restored.

        Args:
            step: one of `all_steps()`; None for the newest.
            args: `ocp.args.StandardRestore` or `Composite`, as for stock Orbax. An
                array for which `args` gives no sharding is restored onto its saved
                sharding; from storage in a job of one process, onto the first local
                device. An array whose target is an uncommitted jax.Array is restored
                uncommitted.

        Raises:
            FileNotFoundError: `all_steps()` does not have the step, or is empty.
            ValueError: the tree, a shape, a dtype or a sharding of `args` does not fit
                the saved step; the manager is closed; or (`Corrupt`) the only copy of
                `step` is corrupt.
            RuntimeError: in a job of several processes, this host's copy is corrupt
                (`CorruptCopy`, `CorruptItems`), the agents could not provide slices
                for other shardings (`NotBrought`), or the agent has ended or has
                detached this process (`AgentGone`).
            TimeoutError: in a job of several processes, the agent did not answer in
                time.
            CheckpointUnreadable: the step is in storage, but cannot be read.
        """
        self._refuse_closed()
        return self._work.restore(None if step is None else step_number(step), args)

    # ----------------------------------------------------------------- metadata

    def item_metadata(self, step: int) -> Any:
        """Returns a `jax.ShapeDtypeStruct` for every leaf, in the saved tree.

        The result can be used as the target of a restore. In a job of one process, only
        leaves of steps in memory have shardings. In a job of several processes, leaves
        of stored steps have shardings, too, if this run has the devices of their mesh.
        For a step that stock Orbax wrote, the result is Orbax's item metadata.

        Raises:
            FileNotFoundError: `all_steps()` does not have the step.
        """
        return self._work.item_metadata(step_number(step))

    def metadata(self, step: int | None = None) -> Any:
        """Returns Orbax's metadata of a step; of the directory if `step` is None.

        Raises:
            FileNotFoundError: `all_steps()` does not have the step.
        """
        return self._work.metadata(None if step is None else step_number(step))

    def metrics(self, step: int) -> Any:
        """Returns the metrics that were saved with a step; None if none were saved.

        In a job of several processes, also None for a step that stock Orbax wrote.

        Raises:
            FileNotFoundError: `all_steps()` does not have the step.
        """
        return self._work.metrics(step_number(step))

    # ---------------------------------------------------------- waiting and ending

    def wait_until_finished(self) -> None:
        """Waits until no step is being written to storage or waits to be written.

        In a job of several processes, waits until the step saved last is committed in
        memory and no step is being written to storage.

        Raises:
            StorageFailed: a write to storage failed, or in a job of one process the
                wait took too long.
            TimeoutError: in a job of several processes, the wait took too long.
            AgentGone: in a job of several processes, the agent has ended or has
                detached this process.
        """
        self._work.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raises StorageFailed, once, if a write to storage has failed.

        In a job of several processes, raises AgentGone instead if the agent has ended
        or has detached this process.
        """
        self._work.check_for_errors()

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being written to storage.

        In a job of several processes: whether the step saved last is being replicated.
        """
        return self._work.is_saving_in_progress()

    def delete(self, step: int) -> None:
        """Removes a step from memory and from storage.

        In a job of several processes the step is removed from storage only, and all
        processes make the same call. The newest step in memory is refused, because lost
        hosts restore from it.

        Raises:
            FileNotFoundError: `all_steps()` does not have the step.
            ValueError: the manager is closed; or in a job of several processes, the
                step is the newest in memory.
            StorageFailed: in a job of one process, pending writes to storage took too
                long.
        """
        self._refuse_closed()
        self._work.delete(step_number(step))

    def close(self) -> None:
        """Writes the newest step to storage, then frees all memory.

        In a job of several processes, the agents keep the memory and this process
        detaches. The memory is freed, or the process detached, also after an error. A
        second call does nothing.

        Raises:
            StorageFailed: this write failed, or an earlier write failed and was not
                raised yet.
            TimeoutError: in a job of several processes, the write took too long.
            AgentGone: in a job of several processes, the agent has ended or has
                detached this process.
        """
        if self._end():
            self._work.close()

    def _end(self) -> bool:
        """Marks the manager as closed; returns whether it was open before."""
        ended, self._closed = self._closed, True
        atexit.unregister(self._leave_at_exit)
        return not ended

    def _leave_at_exit(self) -> None:
        if os.getpid() != self._owner or not self._end():
            return  # a forked child, or closed
        try:
            self._work.leave()
        except Exception:
            logger.exception(
                "closing the checkpoint manager of %s failed; its newest steps may not "
                "be in storage",
                self._directory,
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(
                f"the manager of {self._directory} is closed. Make a new one."
            )
