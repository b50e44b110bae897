"""The directory of a run: its path, its creation, and a lock against other runs.

Also checks that a run can continue from the checkpoints of its directory.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from dtft.checkpoint.storage import StorageBusy, alone_in, storage_steps
from dtft.config import (
    CheckpointConfig,
    ConfigError,
    Experiment,
    refuse_other,
    to_json,
)


def with_run_dir(experiment: Experiment) -> Experiment:
    """Returns the experiment with `log.run_dir` set; by default runs/<name>-<time>."""
    if experiment.log.run_dir:
        return experiment
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = f"runs/{experiment.name}-{started}"
    return replace(experiment, log=replace(experiment.log, run_dir=folder))


def recorded_storage(directory: Path) -> Path:
    """Returns the storage directory of the run whose config.json is in `directory`.

    Raises:
        FileNotFoundError: the directory has no config.json.
        ValueError: config.json is not JSON.
    """
    saved = json.loads((directory / "config.json").read_text())
    named = saved["checkpoint"].get("storage_directory", "")  # "": of before the key
    return CheckpointConfig(storage_directory=named).storage_path(directory)


def config_to_continue(experiment: Experiment, directory: Path) -> str:
    """Returns the text of config.json if the directory's run is continued, else "".

    A run is continued if the directory has config.json and the experiment's storage has
    a checkpoint.

    Raises:
        ConfigError: the checkpoints were made by a config that differs in the model,
            the data or another key that must be equal. Or the experiment's storage has
            no checkpoint, but the storage that config.json names has one. In both cases
            no file was changed.
    """
    try:
        saved = (directory / "config.json").read_text()
    except FileNotFoundError:
        return ""
    now = experiment.checkpoint.storage_path(directory)
    if storage_steps(now):
        refuse_other(saved, to_json(experiment), directory)
        return saved
    before = recorded_storage(directory)
    if storage_steps(before):
        raise ConfigError(
            f"checkpoint.storage_directory={experiment.checkpoint.storage_directory!r}:"
            f" {now} has no checkpoint, and those of log.run_dir={directory} are in "
            f"{before}. Nothing was changed. Move them there, or set --checkpoint."
            f"storage_directory {before} to continue, or --log.run_dir to a new "
            "directory."
        )
    return ""


def make_directory(directory: Path, flag: str = "log.run_dir") -> None:
    """Makes a directory if it does not exist; checks that it can be written to.

    `flag` is the key of the config that names the directory, for the error message.

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
            f"{flag}={directory} cannot be written to ({why}). Allowed: a directory, "
            f"or a path where one can be made. Set --{flag}."
        )


_MARK = ".run"
"""Name of the folder in a storage directory that a run locks. Exporters lock the
storage directory itself for every step that they write."""


@contextmanager
def only_run_in(
    directory: Path,
    storage: Path | None = None,
    *,
    flag: str = "log.run_dir",
    mark: str = "",
) -> Iterator[None]:
    """Locks a run directory against other runs for the time of a `with` block.

    The directory is made if it does not exist. `storage`, the run's storage directory,
    is made too, and locked by a folder in it, unless it is inside of the run directory.
    Directories that are empty at the end, because the run was refused, are removed. If
    this process dies, the kernel releases the locks.

    Args:
        directory: the run directory.
        storage: the run's storage directory; None makes and locks none.
        flag: the flag that sets `directory`, for the error message.
        mark: name of a folder that is made in `directory` and locked in its place. Runs
            that are parts of this run can then lock `directory`.

    Raises:
        ConfigError: a directory cannot be made or written to, or another run uses it.
    """
    with _locked(directory / mark, flag, directory):
        if storage is None or storage.is_relative_to(directory.resolve()):
            yield
            return
        flag = "checkpoint.storage_directory"
        try:
            make_directory(storage, flag)
            with _locked(storage / _MARK, flag, storage):
                yield
        finally:
            with suppress(OSError):  # not empty
                storage.rmdir()


@contextmanager
def _locked(directory: Path, flag: str, value: Path) -> Iterator[None]:
    """Makes and locks a directory for the time of a `with` block.

    Afterwards the directory is removed if it is empty.

    Args:
        directory: the directory.
        flag: the key of the config that sets the directory, for the error message.
        value: the key's value, for the error message.

    Raises:
        ConfigError: the directory cannot be made or written to, or another run uses it.
    """
    make_directory(directory, flag)
    with ExitStack() as held:
        try:
            held.enter_context(alone_in(directory, 0.0))
        except StorageBusy as error:
            raise ConfigError(
                f"{flag}={value} belongs to a run that has not ended, and its "
                "logs and checkpoints would be mixed with this one's. Wait for it, or "
                f"set --{flag} to a directory of its own."
            ) from error
        try:
            yield
        finally:
            with suppress(OSError):  # not empty
                directory.rmdir()
