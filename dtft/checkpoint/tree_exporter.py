"""Writes the steps of one process's memory to storage as stock Orbax would: a process.

``python -m dtft.checkpoint.tree_exporter`` speaks as `exporter.py` does. It sees the
memory as read-only views and saves the user's own trees under the user's own names,
with a record beside them (kinds of leaves, empty arrays, fingerprints). Must not know
training, nor when a step is due.
"""

import contextlib
import mmap
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.departure import from_hex, refuse_corrupt
from dtft.checkpoint.one_writer import alone_in
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.placing import as_array
from dtft.checkpoint.record import RECORD, LeafRecord, Record
from dtft.checkpoint.save_server import serve
from dtft.checkpoint.slices import offsets_of
from dtft.checkpoint.storage import stored_items
from dtft.checkpoint.storage_steps import UNFINISHED


class WrittenByAnother(RuntimeError):
    """A step in storage is not the one that was saved here."""


class TreeExporter:
    """Steps of one process, one at a time."""

    def __init__(self, *, directory: str, scored: bool, save_limit_s: float) -> None:
        """Touches nothing yet.

        Args:
            directory: where the steps are; made by the first save.
            scored: whether saves carry metrics, which Orbax then writes.
            save_limit_s: limit of the asynchronous part of one save.
        """
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)  # or 64-bit leaves would be narrowed
        self._directory, self._limit_s = epath.Path(directory), save_limit_s
        self._options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            # Orbax writes metrics only if there is a function of them; which steps go
            # is decided by the process that has the user's function.
            best_fn=(lambda metrics: 0.0) if scored else None,
            async_options=ocp.options.AsyncOptions(timeout_secs=round(save_limit_s)),
        )
        self._opened: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """Opened only while no other process writes: it removes what is unfinished."""
        if self._opened is None:
            self._opened = ocp.CheckpointManager(self._directory, options=self._options)
        return self._opened

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
        """Writes one step, unless it is there already, then deletes others.

        A step that is there is left alone, and right if it is what was saved here: the
        answer to an earlier attempt may have been lost.

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
            WrittenByAnother: the step is there, but another process saved it.
            StorageBusy: another process did not stop writing.
            OSError: and what else Orbax raises; what is unfinished was removed.
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
        items = stored_items(saved, values)
        paths = [leaf.path for leaf in saved.leaves]
        parts = [Parts([view]) for view in views]
        copies = zip(paths, parts, from_hex(digests), strict=True)
        refuse_corrupt(step, copies, chunk_bytes)
        try:
            with self._alone():
                self._manager.reload()
                if step not in self._manager.all_steps():
                    self._write(step, items, saved)
                self._refuse_others(step, items[RECORD].item["digest"])
                self._remove(delete)
        except BaseException:
            self._opened = None  # it may count a step that is not there
            raise
        return sum(piece.nbytes for piece in pieces)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        if "://" in str(self._directory):
            return contextlib.nullcontext()  # an object store has no locks
        self._directory.mkdir(parents=True, exist_ok=True)
        # Told here, before the server gives up the save without a reason.
        return alone_in(Path(self._directory), 0.8 * self._limit_s)

    def _write(self, step: int, items: dict[str, Any], saved: Record) -> None:
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                metrics=saved.metrics,
                custom_metadata=saved.custom_metadata,
                force=True,
            )
            self._manager.wait_until_finished()
        except BaseException:
            for path in self._directory.glob(f"{step}{UNFINISHED}*"):
                with contextlib.suppress(OSError):  # the next one that opens does it
                    path.rmtree()
            raise

    def _refuse_others(self, step: int, expected: str) -> None:
        """Compares the digest beside a step with that of what was to be written."""
        wanted = ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
        try:
            found = self._manager.restore(step, args=wanted)[RECORD]["digest"]
        except (KeyError, TypeError, ValueError, OSError):  # stock Orbax wrote it, say
            found = None
        if found != expected:
            raise WrittenByAnother(
                f"another manager has written step {step} to {self._directory}, and it "
                "stays there. Give each manager a directory of its own, or delete the "
                "step first"
            )

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
