"""What the processes of a job tell their agents, and what they want back.

Decides which options make sense in a job, what all processes must say alike, and where
each leaf of a restore shall go. Must not know agents, memory or bytes.
"""

from typing import Any

import jax
import numpy as np
from etils import epath

from dtft.checkpoint import placing
from dtft.checkpoint.options import ReplicatedOptions
from dtft.checkpoint.record import LeafRecord, Record
from dtft.checkpoint.slices import Layout, Leaf
from dtft.checkpoint.wanted import Wanted

KEEP_ALL = 2**31 - 1


def refuse_unfit(directory: epath.Path, options: ReplicatedOptions) -> None:
    """Raises ValueError for what has no meaning in a job of several processes."""
    for name, allowed in (("best_fn", None), ("memory_to_keep", 1)):
        if getattr(options, name) != allowed:
            raise ValueError(
                f"{name}={getattr(options, name)!r}: in a job of several processes "
                f"memory and storage keep the newest steps. Allowed: {allowed}. Leave "
                f"ReplicatedOptions.{name} out."
            )
    if "://" in str(directory):
        raise ValueError(
            f"directory={directory}: in a job of several processes the agents write "
            "to a path that every host sees. Give a mounted directory."
        )


def terms_of(
    directory: epath.Path, options: ReplicatedOptions, processes: int
) -> dict[str, Any]:
    """What every process of the job must say alike, and which one this is."""
    return {
        "process": jax.process_index(),
        "terms": {
            "processes": processes,
            "directory": str(directory),
            "storage_interval_steps": options.storage_interval_steps,
            "max_to_keep": options.max_to_keep or KEEP_ALL,
            "chunk_bytes": options.chunk_bytes,
            "storage_timeout_s": options.storage_timeout_s,
        },
    }


def wanted_structs(
    record: Record, wanted: dict[str, Wanted | None], layout: Layout
) -> dict[str, Any]:
    """For every wanted leaf shape, dtype and, if it becomes an array, sharding."""
    structs: dict[str, Any] = {}
    for name, item in wanted.items():
        if item is None:
            continue
        for number in jax.tree.leaves(record.tree(name, range(len(record.leaves)))):
            leaf = record.leaves[number]
            sharding = _wanted_sharding(
                leaf, item.targets.get(number), item.fallback, layout.leaves[number]
            )
            structs[leaf.path] = jax.ShapeDtypeStruct(
                leaf.shape, np.dtype(leaf.dtype), sharding=sharding
            )
    return structs


def _wanted_sharding(leaf: LeafRecord, target: Any, fallback: Any, saved: Leaf) -> Any:
    on_devices = placing.kind_wanted(target, leaf) in ("array", "key")
    on_devices = on_devices and leaf.kind in ("array", "key")
    sharding = (getattr(target, "sharding", None) or fallback) if on_devices else None
    if sharding is None and saved.spec:
        raise ValueError(
            f"leaf {leaf.path!r} is divided over processes and the target has no "
            "sharding. Give StandardRestore a tree of arrays, or of "
            "jax.ShapeDtypeStruct with sharding."
        )
    return sharding or (placing.default_sharding() if on_devices else None)
