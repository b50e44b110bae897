"""Reads steps that jobs stored before commit 3d5ab71 or at it, without a record.

They have two items: `state`, the arrays by path, and `items`, a JSON object of the
caller's items, the leaves that Orbax refuses (empty arrays) and the fingerprints. To be
removed with the release after 0.1.
"""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.record import ITEMS, STATE, LeafRecord, Record, leaf_path
from dtft.checkpoint.structure import structure_of
from dtft.checkpoint.tree import nested, to_paths

_ENTRIES = frozenset({"items", "empty", "fingerprints"})
"""What the JSON item has."""


def former_items(value: Any) -> Any:
    """The caller's items in the JSON item; None if the format is another one."""
    is_former = isinstance(value, dict) and _ENTRIES <= value.keys()
    return value["items"] if is_former else None


def former_record(step: epath.Path, value: Any) -> tuple[Record, dict[str, str]] | None:
    """Record and fingerprints of a step; None if the format is another one.

    Every leaf is an array. The tree that Orbax has is without empty arrays, and so is
    the record's.

    Args:
        step: the step's directory.
        value: what its JSON item holds.

    Raises:
        Exception: what Orbax raises if it cannot read its own metadata.
    """
    if former_items(value) is None:
        return None
    found: Any = ocp.StandardCheckpointHandler().metadata(step / STATE)
    full = to_paths(found.tree)
    shapes = {
        path: (tuple(leaf.shape), np.dtype(leaf.dtype).name)
        for path, leaf in full.items()
    }
    shapes |= {
        leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in value["empty"]
    }
    structure, _ = structure_of(jax.tree.structure(nested(full)))
    record = Record(
        default=False,
        structures={STATE: structure},
        json_items={ITEMS: value["items"]},
        leaves=tuple(
            LeafRecord(path=leaf_path(path), kind="array", shape=shape, dtype=dtype)
            for path, (shape, dtype) in shapes.items()
        ),
    )
    prints = value["fingerprints"].items()
    return record, {leaf_path(path): text for path, text in prints}
