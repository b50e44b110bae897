"""Slices, arenas, copies, commits and the storage tier.

Importing this package is light: public names load on first use.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.attach import NoAgent as NoAgent
    from dtft.checkpoint.attached_memory import NotBrought as NotBrought
    from dtft.checkpoint.dialogue import AgentGone as AgentGone
    from dtft.checkpoint.options import ReplicatedOptions as ReplicatedOptions
    from dtft.checkpoint.replicated import (
        ReplicatedCheckpointManager as ReplicatedCheckpointManager,
    )
    from dtft.checkpoint.sealed_items import CorruptItems as CorruptItems
    from dtft.checkpoint.storing import StorageFailed as StorageFailed
    from dtft.checkpoint.versions import Corrupt as Corrupt

_PUBLIC = {
    "AgentGone": "dialogue",
    "Corrupt": "versions",
    "CorruptItems": "sealed_items",
    "NoAgent": "attach",
    "NotBrought": "attached_memory",
    "ReplicatedCheckpointManager": "replicated",
    "ReplicatedOptions": "options",
    "StorageFailed": "storing",
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
