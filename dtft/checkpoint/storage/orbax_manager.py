"""The Orbax manager of one storage directory, opened lazily and reopened after failure.

A directory can vanish while a step is written (an unmounted file system, a rename).
Orbax then creates a directory of the same name with a part of the step. So a step's
directory gets its final name only if the storage directory is still the one in which
the step was begun. A process can be killed while it deletes a step, so the step's
directory loses its name before its files are removed.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.storage.step_directories import DELETED, UNFINISHED


class StorageMoved(OSError):
    """A step was not completed: its storage directory changed, or its save had failed.

    A directory has changed if it was replaced or unmounted since the step was begun.
    """


class OpenedDirectory:
    """The Orbax manager of one directory, opened at its first use.

    After a failed save a new manager is opened. The old manager would count the missing
    step towards `max_to_keep` and delete an older step too early.
    """

    def __init__(
        self, directory: epath.Path, options: ocp.CheckpointManagerOptions
    ) -> None:
        """Stores the arguments; does not access the directory.

        Args:
            directory: directory of the steps.
            options: options of the Orbax manager.
        """
        self.directory = directory
        self._options = renames_deleted(directory, options)
        self._kinds: dict[str, type] = {}
        """Maps each item of the last save to the class of its save arguments."""
        self._opened: ocp.CheckpointManager | None = None
        self._home: tuple[int, int] | None = None
        self._saving: int | None = None
        self._generation = 0

    @property
    def manager(self) -> ocp.CheckpointManager:
        """The Orbax manager; opens the directory at first use."""
        if self._opened is None:
            # Else Orbax removes these files on a thread, beside the first deletion.
            remove_deleted(self.directory)
            self._opened = ocp.CheckpointManager(
                self.directory,
                options=self._options,
                item_handlers=self._handlers() if self._kinds else None,
            )
            self._home = _identity(self.directory)
        return self._opened

    def _handlers(self) -> dict[str, Any]:
        handlers: dict[str, Any] = {
            name: ocp.JsonCheckpointHandler()
            if kind is ocp.args.JsonSave
            else ocp.StandardCheckpointHandler()
            for name, kind in self._kinds.items()
        }
        last = handlers[next(reversed(handlers))]
        finalize, generation = last.finalize, self._generation

        def checked(directory: Any) -> None:
            # Called after all bytes are written and before the step gets its name. A
            # subclass of the handler would be named in the checkpoint's metadata.
            self._check_still_wanted(generation)
            finalize(directory)

        last.finalize = checked
        return handlers

    def _check_still_wanted(self, generation: int) -> None:
        """Refuses to complete a step after a failed save or a new storage directory.

        Orbax reports the first failure while its other threads still write. A thread
        that ends after the directory is available again must not complete the step.

        `generation` is the number of failures of this object at the time when the Orbax
        manager that writes the step was opened.

        Raises:
            StorageMoved: a save has failed since, or another directory has replaced
                the storage directory.
        """
        if generation != self._generation:
            raise StorageMoved(f"a save to {self.directory} was given up before")
        if _identity(self.directory) != self._home:
            raise StorageMoved(
                f"{self.directory} was replaced or unmounted while step {self._saving} "
                "was being written; the step is left out"
            )

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> None:
        """Begins to write a step; replaces a step of the same number.

        Args:
            step: number of the step.
            items: item name to `ocp.args.StandardSave` or `JsonSave`; the last item
                must be a `JsonSave`.
            metrics: metrics of the step; Orbax stores them if its options have a
                `best_fn`.
            custom_metadata: metadata that Orbax stores with the step.
        """
        if self._opened is not None and _identity(self.directory) != self._home:
            self._forget()
        kinds = {name: type(item) for name, item in items.items()}
        if kinds != self._kinds:
            self.close()
            self._kinds = kinds
        args = ocp.args.Composite(**items)
        manager, self._saving = self.manager, step
        try:
            if step in manager.all_steps():
                manager.delete(step)
                remove_deleted(self.directory)
            manager.save(
                step,
                args=args,
                metrics=metrics,
                force=True,
                custom_metadata=custom_metadata,
            )
        except BaseException:
            self._forget()
            raise

    def wait_until_finished(self) -> None:
        """Waits until the last save is complete; raises the error of a failed save.

        Also removes the files of the steps that Orbax deleted after this save.
        """
        if self._opened is None:
            return
        try:
            self._opened.wait_until_finished()
        except BaseException:
            self._forget()
            raise
        self._saving = None
        remove_deleted(self.directory)

    def reload(self) -> None:
        """Makes Orbax list the directory again, to see the steps of other writers."""
        if self._opened is not None:
            self._try(lambda manager: manager.reload())

    def delete(self, step: int) -> None:
        """Removes a step from the directory.

        After an error, the next use opens a new manager.
        """
        self._try(lambda manager: manager.delete(step))
        remove_deleted(self.directory)

    def _try(self, act: Callable[[ocp.CheckpointManager], None]) -> None:
        try:
            act(self.manager)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drops the manager after a failure, so that the next use opens a new one.

        Process 0 also removes the files of the unfinished step.
        """
        self._opened, step, self._saving = None, self._saving, None
        self._generation += 1
        if step is not None and jax.process_index() == 0:
            _remove_unfinished(self.directory, step)

    def close(self) -> None:
        """Waits for a running save and closes the manager."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            remove_deleted(self.directory)


def renames_deleted(
    directory: epath.Path, options: ocp.CheckpointManagerOptions
) -> ocp.CheckpointManagerOptions:
    """Returns options with which Orbax moves a deleted step out of the list of steps.

    Orbax moves the step's directory into a subdirectory for deleted steps (`DELETED`),
    so no step is listed whose files are removed in part. `remove_deleted` then removes
    the files. For object stores, which cannot rename, `options` are returned unchanged,
    and Orbax removes the files itself.
    """
    if "://" in str(directory):
        return options
    return dataclasses.replace(options, todelete_subdir=DELETED)


def remove_deleted(directory: epath.Path) -> None:
    """Removes the files of deleted steps, which Orbax has moved to a subdirectory.

    The subdirectory is `DELETED`. Only process 0 removes files, because Orbax deletes
    steps only in process 0. Does nothing in object stores.
    """
    if "://" not in str(directory) and jax.process_index() == 0:
        _remove(directory / DELETED)


LATE_WRITES_S = 0.25
"""Seconds without a new file after which TensorStore is taken to write no more."""
REMOVAL_LIMIT_S = 5.0


def _remove_unfinished(directory: epath.Path, step: int) -> None:
    """Removes the files of a step whose save has failed.

    Orbax reports the first error while threads of TensorStore still write, and a late
    write creates the step's directory again. So the files are removed until none has
    appeared for 0.25 s (`LATE_WRITES_S`), for at most 5 s (`REMOVAL_LIMIT_S`). In
    object stores they are removed once. Files that remain are removed when a manager
    next opens the storage directory.

    Args:
        directory: storage directory.
        step: number of the step.
    """
    now = time.monotonic()
    deadline, over = now + REMOVAL_LIMIT_S, now + LATE_WRITES_S
    while now < min(deadline, over):
        for path in directory.glob(f"{step}{UNFINISHED}*"):
            _remove(path)
            over = time.monotonic() + LATE_WRITES_S
        if "://" in str(directory):
            return
        time.sleep(0.01)
        now = time.monotonic()


def _remove(path: epath.Path) -> None:
    """Removes a directory and ignores errors.

    Files that remain are removed when a manager next opens the storage directory.
    """
    if "://" not in str(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.rmtree()


def said(error: Exception) -> str:
    """Returns an error of Orbax as short text for messages.

    It has the type and the first line of the message, without the TensorStore spec.

    >>> said(ValueError("a chunk is gone [tensorstore_spec='{...}']"))
    'ValueError: a chunk is gone'
    """
    text = str(error).partition("\n")[0].partition(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {text}"


def _identity(directory: epath.Path) -> tuple[int, int] | None:
    """Returns device and inode number of a directory; None if it cannot be accessed."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino
