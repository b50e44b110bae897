"""What one stored step's directory is: who wrote it, and whether parts are missing.

Looks at names and at Orbax's own metadata only, so that listing costs little; values
are read by `inspect_storage.py`. Must not know other steps.
"""

import json
from pathlib import Path
from typing import Any, Literal

Writer = Literal["job", "manager", "orbax"]
"""A job's exporters, `ReplicatedCheckpointManager`, or stock Orbax."""
_METADATA = "_CHECKPOINT_METADATA"
_DONE = "commit_success.txt"


def items_in(step: Path) -> dict[str, Any] | None:
    """Names of the items that Orbax says a step has; None if it says nothing."""
    try:
        found = json.loads((step / _METADATA).read_text())
        items = found["item_handlers"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return items if isinstance(items, dict) else {}


def writer_of(step: Path) -> Writer:
    """Who wrote a step."""
    names = set(items_in(step) or ())
    if names == {"state", "items"}:
        return "job"
    return "manager" if "dtft" in names else "orbax"


def missing_from(step: Path) -> str:
    """What a step lacks, in words; "" for nothing that can be seen from outside.

    Orbax gives a step its name when all of it is there, so this is what a copy that was
    interrupted looks like, or a directory that somebody has deleted from.
    """
    names = items_in(step)
    if names is None:
        return f"incomplete: it has no readable {_METADATA}"
    gone = sorted(name for name in names if not (step / name).is_dir())
    if gone:
        return f"incomplete: it has no item {', '.join(gone)}"
    whole = (step / _DONE).exists()
    if whole and not all((step / name / _DONE).exists() for name in names):
        return f"incomplete: an item has no {_DONE}"
    return ""
