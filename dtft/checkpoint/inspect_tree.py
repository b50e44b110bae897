"""Looks at stored steps that hold the user's own trees, not a job's leaves by path.

`ReplicatedCheckpointManager` writes a record and fingerprints beside them; stock Orbax
writes neither, so its values cannot be verified. Must not know how it is shown.
"""

from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from dtft.checkpoint.stored import StoredSteps
from dtft.checkpoint.tree import to_paths
from dtft.checkpoint.wanted import wanted_of

Leaf = tuple[tuple[int, ...], str, int, str]
"""Shape, dtype, bytes of one number, and fingerprint or ""."""


def leaves_and_items(
    directory: Path, step: int
) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """The leaves by path, as they are stored, and the items that are JSON."""
    stored = _steps_in(directory)
    found = stored.record(step)
    if found is None:
        return _stock_leaves(stored.stock_metadata(step)), {}
    record, prints = found
    leaves: dict[str, Leaf] = {}
    for leaf in record.leaves:
        name = leaf.impl or leaf.dtype
        size = np.dtype(leaf.dtype).itemsize
        leaves[leaf.path] = leaf.shape, name, size, prints.get(leaf.path, "")
    beside = {"metrics": record.metrics, "custom_metadata": record.custom_metadata}
    items = dict(record.json_items)
    return leaves, items | {name: value for name, value in beside.items() if value}


def _stock_leaves(metadata: Any) -> dict[str, Leaf]:
    tree = getattr(metadata, "tree", metadata)
    leaves: dict[str, Leaf] = {}
    for path, leaf in to_paths(tree).items():
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            dtype = np.dtype(leaf.dtype)
            leaves[path] = tuple(leaf.shape), dtype.name, dtype.itemsize, ""
    return leaves


def read_all(directory: Path, step: int) -> None:
    """Reads every value of a step and compares fingerprints.

    Raises:
        CheckpointUnreadable: the step is damaged.
        ValueError: stock Orbax wrote it, and there is nothing to compare with.
    """
    stored = _steps_in(directory)
    found = stored.record(step)
    if found is None:
        raise ValueError(
            f"{directory / str(step)} was written by stock Orbax, which keeps no "
            "fingerprints: whether its values are right cannot be told."
        )
    record, prints = found
    stored.read(step, record, prints, wanted_of(record, None))


def _steps_in(directory: Path) -> StoredSteps:
    return StoredSteps(epath.Path(directory.absolute()))  # Orbax takes no other
