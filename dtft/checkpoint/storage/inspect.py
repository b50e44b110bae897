"""Inspects a storage directory: lists, describes, verifies and copies its steps.

Listing uses file names and Orbax's metadata files, without importing Orbax. Values are
read through `StoredSteps`. Only `copy_step` writes, into another directory. A job may
delete old steps meanwhile; a step whose directory is gone is left out.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.storage.step_directories import (
    COMMIT_FILE,
    DELETED,
    UNFINISHED,
    storage_steps,
)

if TYPE_CHECKING:
    from dtft.checkpoint.storage.stored_steps import StoredSteps


_METADATA = "_CHECKPOINT_METADATA"
_TREE, _JSON = "StandardCheckpointHandler", "JsonCheckpointHandler"


def items_in(step: Path) -> dict[str, Any] | None:
    """Reads the names of a step's items (its named parts) from Orbax's metadata.

    Returns:
        Maps item name to the class name of its Orbax handler; empty if the metadata
        names no items. None if the metadata is unreadable.
    """
    try:
        found = json.loads((step / _METADATA).read_text())
        items = found["item_handlers"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return items if isinstance(items, dict) else {}


def missing_from(step: Path) -> str:
    """Describes the first missing or unreadable file of a step; "" if there is none.

    Checks file names and Orbax's metadata only, so the check is cheap; `verify_step`
    reads values. Orbax gives a step's directory its final name when the step is
    complete. So missing files point to an interrupted copy or to deleted files.
    """
    names = items_in(step)
    if names is None:
        return f"incomplete: it has no readable {_METADATA}"
    gone = sorted(name for name in names if not (step / name).is_dir())
    if gone:
        return f"incomplete: it has no item {', '.join(gone)}"
    for name, handler in names.items():
        if file := _missing_file(step / name, str(handler).rpartition(".")[2]):
            return f"incomplete: item {name} has no readable {file}"
    whole = (step / COMMIT_FILE).exists()
    if whole and not all((step / name / COMMIT_FILE).exists() for name in names):
        return f"incomplete: an item has no {COMMIT_FILE}"
    return ""


def _missing_file(item: Path, handler: str) -> str:
    """Names a missing or unreadable metadata file of an item; "" if there is none.

    `handler` is the class name of the item's Orbax handler. Only items that are trees
    or JSON are checked. For a JSON item a file of any name suffices, because the name
    can be configured in Orbax.
    """
    if handler == _JSON:
        try:
            files = set(os.listdir(item))
        except FileNotFoundError:
            files = set()
        return "" if files - {COMMIT_FILE} else "metadata"
    if handler != _TREE:
        return ""
    try:
        tree = json.loads((item / "_METADATA").read_bytes())
    except (OSError, ValueError):
        return "_METADATA"
    manifest = "manifest.ocdbt"
    return manifest if tree.get("use_ocdbt") and not (item / manifest).exists() else ""


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """The directory of one stored step."""

    step: int
    num_bytes: int
    """Total size of the files in the directory, in bytes."""
    written: float
    """Modification time of the directory, in seconds since the epoch."""
    problem: str = ""
    """Describes a missing or unreadable file, as `missing_from` does; "" if there is
    none."""


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One leaf of a stored step."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype; for a PRNG key, the name of its implementation."""
    num_bytes: int
    fingerprint: str
    """The stored checksum of the values; "" for an empty leaf, and for a step of stock
    Orbax."""


def checkpoints_in(directory: Path | str) -> Path:
    """Finds the storage directory: `checkpoints` in a run directory, else the argument.

    Returns an absolute path.

    Raises:
        FileNotFoundError: the directory does not exist.
        ValueError: the directory is that of one step, or an item in one.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise FileNotFoundError(
            f"DIR {path}: there is no such directory. Give a storage directory, or a "
            "run directory with `checkpoints` in it; or --store, --job and "
            "--secret-file for a live job."
        )
    for above in (path, path.parent):
        if items_in(above) is not None:
            raise ValueError(
                f"DIR {path} is (in) the directory of one step. Give the storage "
                f"directory, {above.parent}; --step names a step."
            )
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def list_steps(directory: Path) -> tuple[list[StoredStep], list[str]]:
    """Lists the complete steps, ascending, and the directories of unfinished steps.

    An unfinished step is a directory whose name has Orbax's suffix for temporary
    directories. The second list has the names of these directories, sorted.
    """
    found = [_described(directory / str(it)) for it in storage_steps(directory)]
    steps = [it for it in found if it is not None]
    unfinished = {path.name for path in directory.glob(f"*{UNFINISHED}*")}
    return steps, sorted(unfinished - {DELETED})


def _described(path: Path) -> StoredStep | None:
    """Describes the step in a directory; None if the directory is gone."""
    num_bytes, problem = _bytes_below(path), missing_from(path)
    try:
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return StoredStep(
        step=int(path.name), num_bytes=num_bytes, written=written, problem=problem
    )


def pick_step(directory: Path, step: int | None) -> int:
    """Returns `step`, or if it is None the newest step without missing files.

    Raises:
        ValueError: the directory does not have the step, files of the step are missing,
            or every step has missing files.
    """
    found = list_steps(directory)[0]
    problems = {it.step: it.problem for it in found if it.problem}
    if step in problems:
        raise ValueError(f"--step {step} of {directory} is {problems[step]}.")
    steps = [it.step for it in found if not it.problem]
    if not steps:
        raise ValueError(f"DIR {directory} has no complete checkpoint.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(f"--step {step} is not in {directory}. It has: {known}.")
    return steps[-1] if step is None else step


def describe_step(
    directory: Path, step: int
) -> tuple[list[StoredLeaf], dict[str, Any]]:
    """Describes a step without reading the values of arrays.

    Returns:
        The leaves, sorted by path, and a dict from name to JSON value. The dict has the
        step's JSON items, and "metrics" and "custom_metadata" if the step has any. A
        step of dtft's own training loop has only one JSON item, which is a dict; the
        returned dict then has the entries of this item. For a step of stock Orbax the
        leaves have no fingerprints, and the dict is empty.

    Raises:
        CheckpointUnreadable: the record that dtft stored with the step cannot be read.
        FileNotFoundError: the step was deleted meanwhile.
    """
    with _while_it_exists(directory, step):
        return _leaves_and_items(directory, step)


@contextlib.contextmanager
def _while_it_exists(directory: Path, step: int) -> Iterator[None]:
    """Replaces an error of the body by FileNotFoundError if the step is gone by then.

    The message says that the step was deleted meanwhile. Other errors are unchanged.
    """
    try:
        yield
    except Exception as error:
        if not (directory / str(step)).is_dir():
            raise _gone(directory, [step]) from error
        raise


def _gone(directory: Path, steps: Iterable[int]) -> FileNotFoundError:
    names = ", ".join(map(str, steps))
    return FileNotFoundError(
        f"DIR {directory}: step {names} was deleted meanwhile, for example by the job "
        "that keeps only its newest steps. Give another step."
    )


def _leaves_and_items(
    directory: Path, step: int
) -> tuple[list[StoredLeaf], dict[str, Any]]:
    from dtft.checkpoint.state import ITEMS, is_experiment
    from dtft.checkpoint.storage.directory import shown_paths

    stored = _stored(directory)
    found = stored.record(step)
    if found is None:
        return _stock_leaves(stored.stock_metadata(step)), {}
    record, prints = found
    leaves = [
        _leaf(path, leaf.shape, leaf.dtype, leaf.impl, prints.get(leaf.path, ""))
        for path, leaf in zip(shown_paths(record), record.leaves, strict=True)
    ]
    items = dict(record.json_items)
    if is_experiment(record):
        items = items[ITEMS]
    beside = {"metrics": record.metrics, "custom_metadata": record.custom_metadata}
    items |= {name: value for name, value in beside.items() if value}
    return sorted(leaves, key=lambda leaf: leaf.path), items


def _stock_leaves(metadata: Any) -> list[StoredLeaf]:
    from dtft.checkpoint.state import to_paths

    leaves = to_paths(getattr(metadata, "tree", metadata))
    return [
        _leaf(path, tuple(leaf.shape), leaf.dtype)
        for path, leaf in sorted(leaves.items())
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]


def _leaf(
    path: str, shape: tuple[int, ...], dtype: Any, impl: str = "", fingerprint: str = ""
) -> StoredLeaf:
    """Makes a `StoredLeaf` and computes its size in bytes.

    `impl` is the implementation of a PRNG key, "" for other leaves.
    """
    import numpy as np

    found = np.dtype(dtype)
    return StoredLeaf(
        path=path,
        shape=shape,
        dtype=impl or found.name,
        num_bytes=math.prod(shape) * found.itemsize,
        fingerprint=fingerprint,
    )


def verify_step(directory: Path, steps: Iterable[int]) -> dict[int, str]:
    """Reads all values of each step and compares their fingerprints with those stored.

    A fingerprint is a checksum of an array's values.

    Returns:
        Maps each step to a description of its error; "" if the step is intact. A step
        of stock Orbax, which has no fingerprints, counts as an error. A step that was
        deleted meanwhile is left out.

    Raises:
        FileNotFoundError: all steps were deleted meanwhile.
    """
    from dtft.checkpoint.storage.stored_steps import CheckpointUnreadable

    found, steps = {}, list(steps)
    for step in steps:
        try:
            _read_all(directory, step)
            found[step] = ""
        except (CheckpointUnreadable, ValueError) as error:
            if (directory / str(step)).is_dir():
                found[step] = str(error)
    if steps and not found:
        raise _gone(directory, steps)
    return found


def _read_all(directory: Path, step: int) -> None:
    from dtft.checkpoint.state import restore_targets

    path = directory / str(step)
    if problem := missing_from(path):
        raise ValueError(f"{path} is {problem}.")
    stored = _stored(directory)
    found = stored.record(step)
    if found is None:
        raise ValueError(
            f"{path} was written by stock Orbax, which keeps no fingerprints: whether "
            "its values are right cannot be told."
        )
    record, prints = found
    stored.read(step, record, prints, restore_targets(record, None))


def copy_step(directory: Path, step: int, target: Path) -> int:
    """Copies the files of a step to another directory; returns their size in bytes.

    The step is read and verified first, and its copy at the end. If copying is
    interrupted or fails, or the copy is corrupt, the copied files are removed.

    Raises:
        ValueError: the target is the source or has the step already, the target cannot
            be written to, files of the step are missing, or the step has no
            fingerprints because stock Orbax wrote it.
        CheckpointUnreadable: the step is corrupt (then nothing was written), or the
            copy is corrupt.
        FileNotFoundError: the step was deleted meanwhile.
    """
    if target.resolve() == directory.resolve() or (target / str(step)).exists():
        raise ValueError(
            f"--to {target} has step {step} already. Give another directory."
        )
    with _while_it_exists(directory, step):
        _read_all(directory, step)
        _copy(directory / str(step), target)
    try:
        _read_all(target, step)
    except BaseException:
        shutil.rmtree(target / str(step), ignore_errors=True)
        raise
    return _bytes_below(target / str(step))


def _copy(step: Path, target: Path) -> None:
    """Copies a step's directory into `target`; an incomplete copy has another name.

    Raises:
        ValueError: the directory cannot be copied, or the copy cannot be renamed.
    """
    size, half = _bytes_below(step), target / f"{step.name}{UNFINISHED}"
    shutil.rmtree(half, ignore_errors=True)  # of a copy that was killed
    try:
        shutil.copytree(step, half)
        half.rename(target / step.name)
    except OSError as error:
        raise ValueError(
            f"--to {target}: step {step.name} cannot be copied there "
            f"({_reason(error)}). Allowed: a directory, or a path where one can be "
            f"made, with {size} bytes of space. Give another directory."
        ) from error
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _reason(error: OSError) -> str:
    """Returns the system's text of an error, such as "No space left on device".

    If the error lists those of several files (`shutil.Error`), returns the text of the
    first.
    """
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][-1])
    return error.strerror or str(error)


def _stored(directory: Path) -> "StoredSteps":
    from etils import epath

    from dtft.checkpoint.storage.stored_steps import StoredSteps

    return StoredSteps(epath.Path(directory.absolute()))  # Orbax needs an absolute path


def _bytes_below(directory: Path) -> int:
    """Returns the bytes of all files in a directory; skips files that vanish."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(folder, name))
    return total
