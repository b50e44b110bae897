"""Users' trees in a storage directory as stock Orbax writes them, and a record beside.

Says what Orbax is asked to save of a record, and writes the arrays of a job of several
processes that way. Must not know arenas, slots, or who trains.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dtft.checkpoint.fingerprint import fingerprints
from dtft.checkpoint.job_layout import record_in
from dtft.checkpoint.opened import OpenedDirectory
from dtft.checkpoint.record import RECORD, LeafRecord, Record
from dtft.checkpoint.sealed_items import digest_of
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.storage import orbax_options


class TreeTier:
    """Writes steps of a user's tree; every process of a world makes the same calls."""

    def __init__(
        self, directory: str, layout: Layout, *, max_to_keep: int, timeout_s: int = 300
    ) -> None:
        """Touches nothing yet; `layout` says what the tree looks like."""
        self._directory, self._layout = Path(directory).absolute(), layout
        self._options = orbax_options(max_to_keep, timeout_s, read_only=False)
        self._opened: OpenedDirectory | None = None

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        items: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to write a step, in place of one of the same number.

        Args:
            step: the step.
            arrays: leaf path to global array; they stay as they are until it is done.
            items: what was saved beside them.
            check: called when the fingerprints have been taken and nothing is written
                yet; whatever it raises ends the save.
        """
        record = record_in(self._layout, items)
        assert record is not None
        values = [_as_given(leaf, arrays[leaf.path]) for leaf in record.leaves]
        args = ocp.args.Composite(**items_of(record, values))
        check()
        names = tuple(record.structures), (*record.json_items, RECORD)
        if self._opened is None or self._opened.names != names:
            self.close()
            self._opened = OpenedDirectory(self._directory, self._options, *names)
        self._opened.save(step, args, record.custom_metadata)

    def wait_until_finished(self) -> None:
        """Waits until the last save is complete; raises what went wrong in it."""
        if self._opened is not None:
            self._opened.wait_until_finished()

    def close(self) -> None:
        """Lets go of the directory."""
        if self._opened is not None:
            self._opened.close()


def _as_given(leaf: LeafRecord, array: jax.Array) -> Any:
    """A leaf as the user gave it; None for an empty array, which Orbax refuses."""
    if not array.size:
        return None
    if leaf.kind == "array":
        return array
    if leaf.kind == "key":
        return jax.random.wrap_key_data(array, impl=leaf.impl)
    whole = np.asarray(array, np.dtype(leaf.dtype))
    return whole.item() if leaf.kind in ("bool", "int", "float") else whole


def items_of(record: Record, values: list[Any]) -> dict[str, Any]:
    """What Orbax is asked to save: the user's items, and the record beside them."""
    items: dict[str, Any] = {
        name: ocp.args.StandardSave(record.tree(name, values))
        for name in record.structures
    }
    for name, value in record.json_items.items():
        items[name] = ocp.args.JsonSave(value)
    beside = {"record": record.to_json(), "fingerprints": prints(record, values)}
    beside["digest"] = digest_of(beside)
    return items | {RECORD: ocp.args.JsonSave(beside)}


def prints(record: Record, values: list[Any]) -> dict[str, str]:
    """A fingerprint for every leaf that is not empty, by path."""
    plain: dict[str, Any] = {}
    for leaf, value in zip(record.leaves, values, strict=True):
        if leaf.kind == "key":
            plain[leaf.path] = jax.random.key_data(value)
        elif value is not None:
            is_jax = isinstance(value, jax.Array)
            plain[leaf.path] = value if is_jax else np.asarray(value, leaf.dtype)
    return fingerprints(plain)
