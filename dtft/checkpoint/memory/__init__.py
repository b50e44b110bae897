"""The memory tier of one process: which versions of which slices it keeps, and where.

* `arena`: shared memory that outlives a trainer; `chunk_pool`: several buffers for each
  chunk, so that a version is staged while the last commit is kept.
* `replica_store`: what a host keeps of its own slices (`own_copies`) and its peers'
  (`incoming`), in one arena; `verification` reads it again.
* `local_store`: the steps of one process without an agent. `snapshot`: from devices
  into an arena and back. These two import JAX, the others do not.

Which copies there should be is decided in `replication`; bytes travel in `transport`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.memory.arena import (
        DEFAULT_DIRECTORY,
        AlignedAllocator,
        Arena,
        arena_bytes,
    )
    from dtft.checkpoint.memory.incoming import Receiving
    from dtft.checkpoint.memory.local_store import Corrupt, Version, Versions
    from dtft.checkpoint.memory.replica_store import ReplicaStore
    from dtft.checkpoint.memory.snapshot import Snapshot, SnapshotPlan
    from dtft.checkpoint.memory.verification import Verified

_PUBLIC = {
    "AlignedAllocator": "arena",
    "Arena": "arena",
    "Corrupt": "local_store",
    "DEFAULT_DIRECTORY": "arena",
    "Receiving": "incoming",
    "ReplicaStore": "replica_store",
    "Snapshot": "snapshot",
    "SnapshotPlan": "snapshot",
    "Verified": "verification",
    "Version": "local_store",
    "Versions": "local_store",
    "arena_bytes": "arena",
}

__all__ = [
    "AlignedAllocator",
    "Arena",
    "Corrupt",
    "DEFAULT_DIRECTORY",
    "Receiving",
    "ReplicaStore",
    "Snapshot",
    "SnapshotPlan",
    "Verified",
    "Version",
    "Versions",
    "arena_bytes",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
