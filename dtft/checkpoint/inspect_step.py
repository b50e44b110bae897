"""Whether the directory of one stored step has all of its parts.

Looks at names and at Orbax's own metadata only, so that listing costs little; values
are read by `inspect_storage.py`. Must not know other steps.
"""

import json
from pathlib import Path
from typing import Any

from dtft.checkpoint.storage_steps import COMMIT_FILE

_METADATA = "_CHECKPOINT_METADATA"
_TREE, _JSON = "StandardCheckpointHandler", "JsonCheckpointHandler"


def items_in(step: Path) -> dict[str, Any] | None:
    """Names of the items that Orbax says a step has; None if it says nothing."""
    try:
        found = json.loads((step / _METADATA).read_text())
        items = found["item_handlers"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return items if isinstance(items, dict) else {}


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
    for name, handler in names.items():
        if file := _missing_file(step / name, str(handler).rpartition(".")[2]):
            return f"incomplete: item {name} has no readable {file}"
    whole = (step / COMMIT_FILE).exists()
    if whole and not all((step / name / COMMIT_FILE).exists() for name in names):
        return f"incomplete: an item has no {COMMIT_FILE}"
    return ""


def _missing_file(item: Path, handler: str) -> str:
    """What Orbax cannot read an item without, beside its values; "" if it is there.

    A JSON file may have another name where the user gave Orbax one.
    """
    if handler == _JSON:
        files = {path.name for path in item.iterdir()}
        return "" if files - {COMMIT_FILE} else "metadata"
    if handler != _TREE:
        return ""
    try:
        tree = json.loads((item / "_METADATA").read_bytes())
    except (OSError, ValueError):
        return "_METADATA"
    manifest = "manifest.ocdbt"
    return manifest if tree.get("use_ocdbt") and not (item / manifest).exists() else ""
