"""Two stored steps are compared bit by bit."""

from pathlib import Path

import jax
import numpy as np

from dtft.checkpoint.storage.directory import StorageTier, compare_steps


def save(directory: Path, step: int, **values: np.ndarray) -> None:
    tier = StorageTier(directory)
    tier.save(step, {path: jax.device_put(v) for path, v in values.items()}, {})
    tier.close()


def test_differences_are_named(tmp_path: Path) -> None:
    zeros, nan = np.zeros(3, np.float32), np.full(2, np.nan, np.float32)
    empty = np.zeros((0, 2), np.float32)
    save(tmp_path / "a", 1, a=zeros, nan=nan, sign=zeros, shape=empty, only=zeros)
    save(tmp_path / "b", 2, a=zeros, nan=nan, sign=-zeros, shape=empty.T)
    found = compare_steps(tmp_path / "a", 1, tmp_path / "b", 2)
    assert found == ["only", "shape", "sign"]
    assert compare_steps(tmp_path / "a", 1, tmp_path / "a", 1) == []
