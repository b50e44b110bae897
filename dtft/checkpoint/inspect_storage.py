"""Looks at a storage directory: its steps, what they hold, whether that is right.

Lists without Orbax; what needs values goes through `StorageTier`. Writes nothing except
a copy of a step into another directory. Must not know how the findings are shown.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One leaf of a stored step."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    fingerprint: str


def checkpoints_in(directory: Path | str) -> Path:
    """The storage directory: itself, or `checkpoints` in a run directory.

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(
            f"DIR {path}: there is no such directory. Give a storage directory, or a "
            "run directory with `checkpoints` in it; or --store, --job and "
            "--secret-file for a live job."
        )
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def list_steps(directory: Path) -> tuple[list[StoredStep], list[str]]:
    """The complete steps, ascending, and the names of what is unfinished."""
    steps, unfinished = [], []
    for path in directory.iterdir():
        if path.name.isdigit():
            found = path.stat()
            size = _bytes_below(path)
            steps.append(
                StoredStep(step=int(path.name), num_bytes=size, written=found.st_mtime)
            )
        elif "orbax-checkpoint-tmp" in path.name:
            unfinished.append(path.name)
    return sorted(steps, key=lambda it: it.step), sorted(unfinished)


def pick(directory: Path, step: int | None) -> int:
    """The wanted step, or the newest.

    Raises:
        ValueError: the directory does not have it; names those it has.
    """
    steps = [found.step for found in list_steps(directory)[0]]
    if not steps:
        raise ValueError(f"DIR {directory} has no complete checkpoint.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(f"--step {step} is not in {directory}. It has: {known}.")
    return steps[-1] if step is None else step


def describe(directory: Path, step: int) -> tuple[list[StoredLeaf], dict[str, Any]]:
    """The leaves of a step by path, and its items; reads no values."""
    from dtft.checkpoint.storage import StorageTier

    tier = StorageTier(directory, read_only=True)
    try:
        leaves = [
            StoredLeaf(
                path=path,
                shape=shape,
                dtype=dtype.name,
                num_bytes=_count(shape) * dtype.itemsize,
                fingerprint=fingerprint,
            )
            for path, (shape, dtype, fingerprint) in sorted(tier.leaves(step).items())
        ]
        return leaves, tier.items(step)
    finally:
        tier.close()


def verify(directory: Path, steps: Iterable[int]) -> dict[int, str]:
    """Reads every value of steps and compares fingerprints.

    Returns:
        For each step "" if all is right, or what is wrong.
    """
    from dtft.checkpoint.storage import CheckpointUnreadable, load_numpy

    found = {}
    for step in steps:
        try:
            load_numpy(directory, step)
            found[step] = ""
        except CheckpointUnreadable as error:
            found[step] = str(error)
    return found


def copy(directory: Path, step: int, target: Path) -> int:
    """Writes a step, checked while it is read, to another directory; returns bytes.

    Raises:
        ValueError: the target is the source, or has the step already.
        CheckpointUnreadable: the step is damaged; nothing was written.
    """
    from dtft.checkpoint.storage import StorageTier

    if target.resolve() == directory.resolve() or (target / str(step)).exists():
        raise ValueError(
            f"--to {target} has step {step} already. Give another directory."
        )
    source = StorageTier(directory, read_only=True)
    try:
        values, items = source.load_numpy(step), source.items(step)
    finally:
        source.close()
    tier = StorageTier(target, max_to_keep=1 + len(_steps_in(target)))
    try:
        tier.save(step, _on_device(values), items)
        tier.wait_until_finished()
    finally:
        tier.close()
    return sum(value.nbytes for value in values.values())


def _steps_in(directory: Path) -> list[StoredStep]:
    return list_steps(directory)[0] if directory.is_dir() else []


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
