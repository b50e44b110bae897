"""Writes the steps of one process's memory to storage as stock Orbax would: a process.

``python -m dtft.checkpoint.tree_exporter`` speaks as `exporter.py` does. It sees the
memory as read-only views and saves the user's own trees under the user's own names,
with a record beside them (kinds of leaves, empty arrays, fingerprints). Must not know
training, nor when a step is due.
"""

import mmap
from typing import Any

import jax
import orbax.checkpoint as ocp

from dtft.checkpoint.departure import from_hex, refuse_corrupt
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.placing import as_array
from dtft.checkpoint.record import LeafRecord, Record
from dtft.checkpoint.save_server import serve
from dtft.checkpoint.slices import offsets_of
from dtft.checkpoint.tree_tier import items_of


class TreeExporter:
    """Steps of one process, one at a time."""

    def __init__(self, *, directory: str, scored: bool, save_limit_s: float) -> None:
        """Opens a directory for writing.

        Args:
            directory: where the steps are; made by the first save.
            scored: whether saves carry metrics, which Orbax then writes.
            save_limit_s: limit of the asynchronous part of one save.
        """
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)  # or 64-bit leaves would be narrowed
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,
                # Orbax writes metrics only if there is a function of them; which steps
                # go is decided by the process that has the user's function.
                best_fn=(lambda metrics: 0.0) if scored else None,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=round(save_limit_s)
                ),
            ),
        )

    def save(
        self,
        *,
        step: int,
        memory: list[str],
        record: dict[str, Any],
        digests: list[str],
        chunk_bytes: int,
        delete: list[int],
    ) -> int:
        """Writes one step in place of what is there, then deletes others.

        Args:
            step: the step.
            memory: of each leaf the path of the memory that it is in, in which
                `offsets_of` says where each leaf has its place.
            record: the `Record` as JSON.
            digests: of each leaf, in hex.
            chunk_bytes: bytes under one digest.
            delete: steps that go once this one is complete.

        Returns:
            The bytes of the leaves.

        Raises:
            ValueError: the memory does not match the digests.
        """
        saved = Record.from_json(record)
        mapped = {path: _mapped(path) for path in set(memory)}
        pieces = saved.layout.slices(0)
        offsets, _ = offsets_of(pieces)
        views = [
            memoryview(mapped[path])[offset : offset + piece.nbytes]
            for path, piece, offset in zip(memory, pieces, offsets, strict=True)
        ]
        values = [
            _value(leaf, view) for leaf, view in zip(saved.leaves, views, strict=True)
        ]
        items = items_of(saved, values)
        paths = [leaf.path for leaf in saved.leaves]
        parts = [Parts([view]) for view in views]
        copies = zip(paths, parts, from_hex(digests), strict=True)
        refuse_corrupt(step, copies, chunk_bytes)
        self._manager.reload()
        self._remove([step])
        self._manager.save(
            step,
            args=ocp.args.Composite(**items),
            metrics=saved.metrics,
            custom_metadata=saved.custom_metadata,
            force=True,
        )
        self._manager.wait_until_finished()
        self._remove(delete)
        return sum(piece.nbytes for piece in pieces)

    def _remove(self, steps: list[int]) -> None:
        for step in set(steps) & set(self._manager.all_steps()):
            self._manager.delete(step)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _value(leaf: LeafRecord, view: memoryview) -> Any:
    """A leaf as it is given to Orbax; None for an empty array, which it refuses."""
    array = as_array(view, leaf)
    if not array.size:
        return None
    if leaf.kind in ("bool", "int", "float"):
        return array.item()
    if leaf.kind == "array":
        return jax.device_put(array)
    if leaf.kind == "key":
        return jax.random.wrap_key_data(jax.device_put(array), impl=leaf.impl)
    return array


if __name__ == "__main__":
    serve(lambda fields: TreeExporter(**fields))
