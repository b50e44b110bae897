"""Slices, arenas, copies, commits and the storage tier.

Importing this package is light: public names load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
    "AgentGone": "dtft.checkpoint.dialogue",
    "Corrupt": "dtft.checkpoint.versions",
    "CorruptItems": "dtft.checkpoint.sealed_items",
    "NoAgent": "dtft.checkpoint.attach",
    "NotBrought": "dtft.checkpoint.attached_memory",
    "ReplicatedCheckpointManager": "dtft.checkpoint.replicated",
    "ReplicatedOptions": "dtft.checkpoint.options",
    "StorageFailed": "dtft.checkpoint.storing",
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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtft.checkpoint' has no attribute {name!r}. It has: "
            f"{', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
