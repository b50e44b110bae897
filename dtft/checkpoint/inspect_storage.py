"""Looks at a storage directory: its steps, what they hold, whether that is right.

Lists without Orbax; what needs values goes through `StorageTier` for a job's steps and
`StoredSteps` for others. Writes nothing except a copy of a step into another directory.
Must not know how the findings are shown.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.inspect_step import items_in, missing_from, writer_of
from dtft.checkpoint.storage_steps import UNFINISHED, storage_steps

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """One step's directory."""

    step: int
    num_bytes: int
    """Of its files."""
    written: float
    """Seconds since the epoch."""
    problem: str = ""
    """What is missing, as far as can be seen without reading it."""


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One leaf of a stored step."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    fingerprint: str


def checkpoints_in(directory: Path | str) -> Path:
    """The storage directory: itself, or `checkpoints` in a run directory; absolute.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: it is the directory of one step.
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
    """The steps, ascending, and the names of what is unfinished."""
    steps = [_described(directory / str(it)) for it in storage_steps(directory)]
    unfinished = [path.name for path in directory.glob(f"*{UNFINISHED}*")]
    return steps, sorted(unfinished)


def _described(path: Path) -> StoredStep:
    return StoredStep(
        step=int(path.name),
        num_bytes=_bytes_below(path),
        written=path.stat().st_mtime,
        problem=missing_from(path),
    )


def pick(directory: Path, step: int | None) -> int:
    """The wanted step, or the newest from which nothing is missing.

    Raises:
        ValueError: the directory does not have it; names those it has.
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


def describe(directory: Path, step: int) -> tuple[list[StoredLeaf], dict[str, Any]]:
    """The leaves of a step by path, and its items; reads no values.

    Raises:
        CheckpointUnreadable: the step is damaged.
    """
    if writer_of(directory / str(step)) == "job":
        from dtft.checkpoint.storage import StorageTier

        tier = StorageTier(directory, read_only=True)
        try:
            found = {
                path: (shape, dtype.name, dtype.itemsize, fingerprint)
                for path, (shape, dtype, fingerprint) in tier.leaves(step).items()
            }
            items = tier.items(step)
        finally:
            tier.close()
    else:
        from dtft.checkpoint.inspect_tree import leaves_and_items

        found, items = leaves_and_items(directory, step)
    leaves = [
        StoredLeaf(
            path=path,
            shape=shape,
            dtype=dtype,
            num_bytes=_count(shape) * size,
            fingerprint=fingerprint,
        )
        for path, (shape, dtype, size, fingerprint) in sorted(found.items())
    ]
    return leaves, items


def verify(directory: Path, steps: Iterable[int]) -> dict[int, str]:
    """Reads every value of steps and compares fingerprints.

    Returns:
        For each step "" if all is right, or what is wrong.
    """
    from dtft.checkpoint.storage import CheckpointUnreadable

    found = {}
    for step in steps:
        try:
            _read_all(directory, step)
            found[step] = ""
        except (CheckpointUnreadable, ValueError) as error:
            found[step] = str(error)
    return found


def _read_all(directory: Path, step: int) -> None:
    path = directory / str(step)
    if problem := missing_from(path):
        raise ValueError(f"{path} is {problem}.")
    if writer_of(path) == "job":
        from dtft.checkpoint.storage import load_numpy

        load_numpy(directory, step)
    else:
        from dtft.checkpoint.inspect_tree import read_all

        read_all(directory, step)


def copy(directory: Path, step: int, target: Path) -> int:
    """Writes a step, checked while it is read, to another directory; returns bytes.

    Raises:
        ValueError: the target is the source, or has the step already; or stock Orbax
            wrote the step, so that nothing can be checked.
        CheckpointUnreadable: the step is damaged; nothing was written.
    """
    if target.resolve() == directory.resolve() or (target / str(step)).exists():
        raise ValueError(
            f"--to {target} has step {step} already. Give another directory."
        )
    if writer_of(directory / str(step)) != "job":
        return _copy_files(directory, step, target)
    from dtft.checkpoint.storage import StorageTier

    source = StorageTier(directory, read_only=True)
    try:
        values, items = source.load_numpy(step), source.items(step)
    finally:
        source.close()
    tier = StorageTier(target, max_to_keep=1 + len(storage_steps(target)))
    try:
        tier.save(step, _on_device(values), items)
        tier.wait_until_finished()
    finally:
        tier.close()
    return sum(value.nbytes for value in values.values())


def _copy_files(directory: Path, step: int, target: Path) -> int:
    """The user's own trees must stay as they are, so their files are copied."""
    _read_all(directory, step)
    half = target / f"{step}{UNFINISHED}"
    shutil.copytree(directory / str(step), half)
    half.rename(target / str(step))
    _read_all(target, step)
    return _bytes_below(target / str(step))


def _on_device(values: "dict[str, np.ndarray]") -> dict[str, Any]:
    import jax

    device = jax.local_devices(backend="cpu")[0]
    return {path: jax.device_put(value, device) for path, value in values.items()}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _bytes_below(directory: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )
