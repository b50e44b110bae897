"""Replicated checkpoints: steps in the memory of several hosts, and in storage.

`state` describes leaves (the arrays of the state) and slices (the pieces of leaves that
hosts keep), and `memory` keeps the slices' bytes. `replication` decides which hosts get
copies and when a step is committed. `transport` moves bytes between hosts, and
`storage` writes steps to a directory. `managers` are the checkpoint managers of a
training loop. Importing this package is light: public names load on first use.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.managers import AgentGone as AgentGone
    from dtft.checkpoint.managers import NoAgent as NoAgent
    from dtft.checkpoint.managers import NotBrought as NotBrought
    from dtft.checkpoint.managers import (
        ReplicatedCheckpointManager as ReplicatedCheckpointManager,
    )
    from dtft.checkpoint.managers import ReplicatedOptions as ReplicatedOptions
    from dtft.checkpoint.managers import StorageFailed as StorageFailed
    from dtft.checkpoint.memory import Corrupt as Corrupt
    from dtft.checkpoint.state import CorruptItems as CorruptItems

_PUBLIC = {
    "AgentGone": "managers.agent_link",
    "Corrupt": "memory.local_store",
    "CorruptItems": "state.sealed_items",
    "NoAgent": "managers.agent_link",
    "NotBrought": "managers.agent_client",
    "ReplicatedCheckpointManager": "managers.replicated",
    "ReplicatedOptions": "managers.options",
    "StorageFailed": "managers.local",
}

__all__ = [
    "AgentGone",
    "Corrupt",
    "CorruptItems",
    "NoAgent",
    "NotBrought",
    "ReplicatedCheckpointManager",
    "ReplicatedOptions",
    "StorageFailed",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
