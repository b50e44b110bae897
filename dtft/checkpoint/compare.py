"""Compares two stored steps leaf by leaf, as bytes. Knows storage directories only."""

from pathlib import Path

import numpy as np

from dtft.checkpoint.storage import load_numpy


def compare(
    directory_a: Path | str, step_a: int, directory_b: Path | str, step_b: int
) -> list[str]:
    """Paths of the leaves that differ in presence, shape, dtype or any bit, sorted.

    Raises:
        ValueError: a directory does not have the step.
        CheckpointUnreadable: a step exists but cannot be read.
    """
    a, b = load_numpy(directory_a, step_a), load_numpy(directory_b, step_b)
    return [p for p in sorted(a.keys() | b.keys()) if not _same(a.get(p), b.get(p))]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
