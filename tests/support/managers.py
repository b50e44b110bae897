"""Managers of one process that tests look at in memory only."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from dtft.checkpoint.managers.options import ReplicatedOptions
from dtft.checkpoint.managers.replicated import ReplicatedCheckpointManager

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
NEVER = 10**9
"""An interval that no test reaches."""


def memory_only(path: Path, **changes: Any) -> Any:
    """Storage gets nothing, as if it had been tried at the last step that is due."""
    options = ReplicatedOptions(storage_interval_steps=NEVER, **changes)
    manager = ReplicatedCheckpointManager(path / "storage", options=options)
    work: Any = manager._work
    work._storing._tried = 0
    return manager


def forget(manager: Any) -> None:
    """Closes a manager that has nothing to bring to storage any more."""
    for step in manager._work._versions.steps:
        manager._work._versions.drop(step)
    manager.close()
