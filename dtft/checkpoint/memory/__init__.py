"""The memory tier of one process: slices of several steps, and their place in memory.

* `arena`: shared memory that outlives a trainer; `chunk_pool`: several buffers for each
  chunk, so that a new step can be written while the last commit is kept.
* `replica_store`: a host's copies of its own slices (`own_copies`) and of its peers'
  slices (`incoming`), in one arena; `verification` reads and checks the copies again.
* `local_store`: the steps of one process without an agent; `snapshot`: copies slices
  from devices into an arena and back. Both import JAX; the other modules do not.

`replication` decides which host keeps which copies; `transport` moves the bytes.
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
    from dtft.checkpoint.memory.own_copies import Restoring
    from dtft.checkpoint.memory.replica_store import ReplicaStore
    from dtft.checkpoint.memory.snapshot import (
        CopiedStep,
        CorruptCopy,
        Snapshot,
        SnapshotPlan,
    )
    from dtft.checkpoint.memory.verification import VerifiedCopies

_PUBLIC = {
    "AlignedAllocator": "arena",
    "Arena": "arena",
    "CopiedStep": "snapshot",
    "Corrupt": "local_store",
    "CorruptCopy": "snapshot",
    "DEFAULT_DIRECTORY": "arena",
    "Receiving": "incoming",
    "ReplicaStore": "replica_store",
    "Restoring": "own_copies",
    "Snapshot": "snapshot",
    "SnapshotPlan": "snapshot",
    "VerifiedCopies": "verification",
    "Version": "local_store",
    "Versions": "local_store",
    "arena_bytes": "arena",
}

__all__ = [
    "AlignedAllocator",
    "Arena",
    "CopiedStep",
    "Corrupt",
    "CorruptCopy",
    "DEFAULT_DIRECTORY",
    "Receiving",
    "ReplicaStore",
    "Restoring",
    "Snapshot",
    "SnapshotPlan",
    "VerifiedCopies",
    "Version",
    "Versions",
    "arena_bytes",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
