"""One storage directory as Orbax sees it: opened late, given up if it moved or failed.

A directory can vanish while a step is written (an unmounted file system, a rename), and
Orbax then makes a new one of the same name with half of the step in it. So a step is
only given its name while the directory is the one in which the step was begun.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.storage.step_directories import UNFINISHED


class StorageMoved(OSError):
    """The storage directory is not the one in which a step was begun."""


class OpenedDirectory:
    """The Orbax manager of one directory, opened at its first use.

    After a save that failed it is opened anew, because the old manager counts the step
    that is not there and would drop an older one for it.
    """

    def __init__(
        self, directory: epath.Path, options: ocp.CheckpointManagerOptions
    ) -> None:
        """Touches nothing yet.

        Args:
            directory: of the steps.
            options: of Orbax.
        """
        self.directory, self._options = directory, options
        self._kinds: dict[str, type] = {}
        """Item name to the kind of what is saved of it, of the last save."""
        self._opened: ocp.CheckpointManager | None = None
        self._home: tuple[int, int] | None = None
        self._saving: int | None = None
        self._generation = 0

    @property
    def manager(self) -> ocp.CheckpointManager:
        """The manager; opens the directory if need be."""
        if self._opened is None:
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
            # Called when all bytes are written and before the step gets its name. An
            # override in a class of ours would be named in the checkpoint's metadata.
            self._check_still_wanted(generation)
            finalize(directory)

        last.finalize = checked
        return handlers

    def _check_still_wanted(self, generation: int) -> None:
        """Refuses what a manager writes on after its save was said to have failed.

        Orbax reports the first of several failures; the others' threads go on, and
        the directory may be back before they are done.
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
        """Begins to write a step, in place of one of the same number.

        Args:
            step: the step.
            items: item name to `ocp.args.StandardSave` or `JsonSave`; the last is JSON.
            metrics: what Orbax keeps beside them if its options have a `best_fn`.
            custom_metadata: what Orbax keeps beside them.
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
        """Waits until the last save is complete; raises what went wrong in it."""
        if self._opened is None:
            return
        try:
            self._opened.wait_until_finished()
        except BaseException:
            self._forget()
            raise
        self._saving = None

    def reload(self) -> None:
        """Lists the directory again, where others write to it, too."""
        if self._opened is not None:
            self._try(lambda manager: manager.reload())

    def delete(self, step: int) -> None:
        """Removes a step."""
        self._try(lambda manager: manager.delete(step))

    def _try(self, act: Callable[[ocp.CheckpointManager], None]) -> None:
        try:
            act(self.manager)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Lets go after a failure and frees what the unfinished step takes."""
        self._opened, step, self._saving = None, self._saving, None
        self._generation += 1
        if step is not None and jax.process_index() == 0:
            for path in self.directory.glob(f"{step}{UNFINISHED}*"):
                _remove(path)

    def close(self) -> None:
        """Waits for a save under way and lets go of the directory."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _remove(path: epath.Path) -> None:
    """Removes what can be; the next one that opens the directory does the rest."""
    if "://" not in str(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.rmtree()


def said(error: Exception) -> str:
    """An error of Orbax for people: its first line, without TensorStore's own spec.

    >>> said(ValueError("a chunk is gone [tensorstore_spec='{...}']"))
    'ValueError: a chunk is gone'
    """
    text = str(error).partition("\n")[0].partition(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {text}"


def _identity(directory: epath.Path) -> tuple[int, int] | None:
    """What a directory is, whatever it is called; None if there is none."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino
