"""The storage tier: a directory of Orbax checkpoints, one per step.

Item "state" is a nested dict of arrays, item "items" JSON: what the caller gave, the
leaves that Orbax refuses (empty arrays) and a fingerprint per leaf. Stock Orbax reads
both. Orbax is used here only; this module must not know slots, arenas or who is alive.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dtft.checkpoint.fingerprint import fingerprints
from dtft.checkpoint.opened import OpenedDirectory, said
from dtft.checkpoint.storage_steps import storage_steps
from dtft.checkpoint.tree import listed, nested, to_paths

_ENTRIES = frozenset({"items", "empty", "fingerprints"})
"""What the JSON item holds."""


class CheckpointUnreadable(RuntimeError):
    """A step exists in a storage directory but cannot be read."""


class StorageTier:
    """The checkpoints in one directory, oldest dropped first.

    In a world of several processes every one of them makes the same calls; Orbax
    brings them together. Listing steps needs no other process.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        max_to_keep: int = 3,
        timeout_s: int = 300,
        read_only: bool = False,
    ) -> None:
        """Touches nothing yet: Orbax opens the directory at the first save or restore.

        Args:
            directory: where the steps are; made by the first save.
            max_to_keep: how many of the newest steps a save leaves in place.
            timeout_s: limit of the asynchronous part of one save.
            read_only: refuse to save.
        """
        if max_to_keep < 1:
            raise ValueError(
                f"max_to_keep={max_to_keep} would keep no checkpoint. Allowed: 1 or "
                "more. Set --storage.keep 1 or more."
            )
        self.directory = Path(directory).absolute()
        self._read_only = read_only
        self._opened = OpenedDirectory(
            self.directory, orbax_options(max_to_keep, timeout_s, read_only)
        )

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        items: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to write a step; `wait_until_finished` says when it is safe.

        The arrays must stay as they are until then. A step that exists already is
        replaced: the run that saves now is the one that counts.

        Args:
            step: the step.
            arrays: leaf path to global array.
            items: what is not an array, as JSON values.
            check: called when the fingerprints have been taken and nothing is written
                yet; whatever it raises ends the save.

        Raises:
            ValueError: two paths would have one name in Orbax, or all leaves are empty.
        """
        if self._read_only:
            raise ValueError(
                f"read_only=True: step {step} was not saved to {self.directory}. "
                "Open the storage tier with read_only=False."
            )
        full = {path: array for path, array in arrays.items() if array.size}
        empty = [
            {"path": path, "shape": list(array.shape), "dtype": str(array.dtype)}
            for path, array in arrays.items()
            if not array.size
        ]
        state = nested(full)
        if not state:
            raise ValueError(
                f"arrays of step {step} has no leaf with a value, which Orbax cannot "
                "write. Give at least one array that is not empty."
            )
        saved = {
            "items": dict(items),
            "empty": empty,
            "fingerprints": fingerprints(full),
        }
        check()
        self._opened.save(
            step,
            ocp.args.Composite(
                state=ocp.args.StandardSave(state), items=ocp.args.JsonSave(saved)
            ),
        )

    def wait_until_finished(self) -> None:
        """Waits until the last save is complete; raises what went wrong in it."""
        self._opened.wait_until_finished()

    def restore(
        self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays of a step, bit for bit, on the wanted shardings, and its items.

        Args:
            step: one of `all_steps()`.
            abstract: leaf path to shape, dtype and sharding.

        Raises:
            ValueError: the directory has no such step, or its leaves differ from
                `abstract` in path, shape or dtype; lists expected against found.
            CheckpointUnreadable: the step exists but cannot be read.
        """
        saved = self._json(step)
        _check_fits(abstract, self._saved_leaves(step, saved), self._path(step))
        empty = {leaf["path"] for leaf in saved["empty"]}
        wanted = {path: leaf for path, leaf in abstract.items() if path not in empty}
        found = self._arrays(step, wanted, saved)
        arrays = {
            path: _empty_array(leaf) if path in empty else found[path]
            for path, leaf in abstract.items()
        }
        return arrays, saved["items"]

    def load_numpy(self, step: int) -> dict[str, np.ndarray]:
        """All arrays of a step in host memory, by path; for looking, not training."""
        saved = self._json(step)
        leaves = self._saved_leaves(step, saved)
        empty = {leaf["path"] for leaf in saved["empty"]}
        kept = {path: leaf for path, leaf in leaves.items() if path not in empty}
        # A step that several processes wrote is only read onto a stated sharding.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        wanted = {
            path: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
            for path, (shape, dtype) in kept.items()
        }
        found = self._arrays(step, wanted, saved)
        return {
            path: np.zeros(shape, dtype) if path in empty else np.asarray(found[path])
            for path, (shape, dtype) in sorted(leaves.items())
        }

    def leaves(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype, str]]:
        """Shape, dtype and fingerprint ("" if empty) of every leaf; reads no values."""
        saved = self._json(step)
        return {
            path: (shape, dtype, saved["fingerprints"].get(path, ""))
            for path, (shape, dtype) in self._saved_leaves(step, saved).items()
        }

    def items(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays of a step."""
        return self._json(step)["items"]

    def all_steps(self) -> tuple[int, ...]:
        """The complete steps in the directory, ascending."""
        return storage_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.all_steps(), default=None)

    def close(self) -> None:
        """Waits for a save under way and lets go of the directory."""
        self._opened.close()

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _json(self, step: int) -> dict[str, Any]:
        steps = self.all_steps()
        if step not in steps:
            raise ValueError(
                f"step={step} is not in {self.directory}. It has: "
                f"{listed([str(found) for found in steps])}."
            )
        saved = self._read(step, items=ocp.args.JsonRestore())["items"]
        if not isinstance(saved, dict) or not _ENTRIES <= saved.keys():
            raise CheckpointUnreadable(
                f"{self._path(step)} was not written by dtft: its item 'items' does "
                f"not have the entries {', '.join(sorted(_ENTRIES))}."
            )
        return saved

    def _saved_leaves(
        self, step: int, saved: dict[str, Any]
    ) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        try:
            metadata = self._opened.manager.item_metadata(step)["state"]
            leaves = {
                path: (tuple(leaf.shape), np.dtype(leaf.dtype))
                for path, leaf in to_paths(getattr(metadata, "tree", metadata)).items()
            }
        except Exception as error:
            raise self._unreadable(step, error) from error
        for leaf in saved["empty"]:
            leaves[leaf["path"]] = tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        return leaves

    def _arrays(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        saved: dict[str, Any],
    ) -> dict[str, Any]:
        state = self._read(step, state=ocp.args.StandardRestore(nested(wanted)))
        found = to_paths(state["state"])
        prints = fingerprints(found)
        damaged = [p for p in found if prints[p] != saved["fingerprints"].get(p)]
        if damaged:
            error = ValueError(f"corrupt leaves: {listed(damaged)}")
            raise self._unreadable(step, error)
        return found

    def _read(self, step: int, **args: Any) -> Any:
        try:
            return self._opened.manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> CheckpointUnreadable:
        others = [str(found) for found in self.all_steps() if found != step]
        advice = f"Restore another step ({listed(others)}) or m" if others else "M"
        return CheckpointUnreadable(
            f"{self._path(step)} exists but cannot be read ({said(error)})."
            f" Nothing was changed. {advice}ove the directory away."
        )


def load_numpy(directory: Path | str, step: int) -> dict[str, np.ndarray]:
    """All arrays of a step in host memory, by path."""
    tier = StorageTier(directory, read_only=True)
    try:
        return tier.load_numpy(step)
    finally:
        tier.close()


def orbax_options(
    max_to_keep: int, timeout_s: int, read_only: bool
) -> ocp.CheckpointManagerOptions:
    """How Orbax's manager treats a directory of ours."""
    if read_only:
        return ocp.CheckpointManagerOptions(
            read_only=True, create=False, save_interval_steps=0
        )
    return ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep,
        cleanup_tmp_directories=True,
        async_options=ocp.options.AsyncOptions(timeout_secs=timeout_s),
    )


def _check_fits(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    found: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    where: Path,
) -> None:
    expected = {p: (tuple(v.shape), np.dtype(v.dtype)) for p, v in abstract.items()}
    differ = [
        f"{path}: expected {_text(expected.get(path))}, found {_text(found.get(path))}"
        for path in sorted(expected.keys() | found.keys())
        if expected.get(path) != found.get(path)
    ]
    if differ:
        raise ValueError(
            f"abstract does not fit {where}, {len(differ)} leaves differ: "
            f"{listed(differ)}. Use the config that wrote it, or another run directory."
        )


def _text(leaf: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1].name}{list(leaf[0])}"


def _empty_array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: value[index]
    )
