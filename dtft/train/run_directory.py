"""The directory of a run: its path, its creation, and a lock against other runs."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from dtft.checkpoint.storage import StorageBusy, alone_in
from dtft.config import ConfigError, Experiment


def with_run_dir(experiment: Experiment) -> Experiment:
    """Sets `log.run_dir` from the experiment's name and the time, if it is not set."""
    if experiment.log.run_dir:
        return experiment
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = f"runs/{experiment.name}-{started}"
    return replace(experiment, log=replace(experiment.log, run_dir=folder))


def make_run_directory(directory: Path) -> None:
    """Makes a run directory, if none exists.

    Raises:
        ConfigError: the directory cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(directory, os.W_OK) else "no permission, or read-only"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise ConfigError(
            f"log.run_dir={directory} cannot be written to ({why}). Allowed: a "
            "directory, or a path where one can be made. Set --log.run_dir."
        )


@contextmanager
def only_run_in(directory: Path) -> Iterator[None]:
    """Makes a run directory and locks it against other runs until the body ends.

    A directory that stays empty, because the run was refused, is removed again. The
    kernel releases the lock when its process ends.

    Raises:
        ConfigError: the directory cannot be made or written to, or another run uses it.
    """
    make_run_directory(directory)
    with ExitStack() as held:
        try:
            held.enter_context(alone_in(directory, 0.0))
        except StorageBusy as error:
            raise ConfigError(
                f"log.run_dir={directory} belongs to a run that has not ended, and its "
                "logs and checkpoints would be mixed with this one's. Wait for it, or "
                "set --log.run_dir to a directory of its own."
            ) from error
        try:
            yield
        finally:
            with suppress(OSError):  # not empty
                directory.rmdir()
