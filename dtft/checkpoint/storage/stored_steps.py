"""Reads and verifies the steps of a storage directory.

A step that dtft wrote has the item `dtft` in addition to the user's items. This item
has the `Record` (tree structures, leaves and JSON items of the step) and a fingerprint
(checksum of the values) per leaf, with which the leaf is verified. A step without this
item was written by stock Orbax, or by dtft of git commit 3d5ab71 or earlier. The values
of every step are read with Orbax.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.state import (
    DEFAULT,
    ITEMS,
    RECORD,
    STATE,
    Kind,
    LeafRecord,
    Record,
    RestoreTarget,
    as_array,
    default_sharding,
    fingerprints,
    json_digest,
    leaf_path,
    listed,
    nested,
    refuse_narrowed,
    struct_of,
    structure_of,
    to_paths,
)
from dtft.checkpoint.storage.orbax_manager import (
    remove_deleted,
    renames_deleted,
    said,
)
from dtft.checkpoint.storage.step_directories import storage_steps

# Former format: steps without a record, written by jobs of commit 3d5ab71 or earlier.
# To be removed with the release after 0.1.


_ENTRIES = frozenset({"items", "empty", "fingerprints"})
"""Keys of a step's JSON item `items` in the former format, that of git commit 3d5ab71
and earlier: the user's JSON items, the empty arrays (which Orbax refuses) and the
fingerprints of the leaves. The step's only other item is `state`, with the arrays by
path."""


def former_items(value: Any) -> Any:
    """Returns the user's JSON items of a step that dtft wrote in its former format.

    `value` is the step's JSON item `items`, which in the former format (git commit
    3d5ab71 and earlier) also has fingerprints. Returns None if `value` has another
    format.
    """
    is_former = isinstance(value, dict) and _ENTRIES <= value.keys()
    return value["items"] if is_former else None


def former_record(step: epath.Path, value: Any) -> tuple[Record, dict[str, str]] | None:
    """Makes the record and fingerprints of a step that dtft wrote in its former format.

    The format is that of git commit 3d5ab71 and earlier. Every leaf is an array. Empty
    arrays are leaves of the record, but the record's tree structure lacks them, because
    it is read from Orbax, which did not store them.

    Args:
        step: the step's directory.
        value: value of the step's JSON item `items`.

    Returns:
        The record and the fingerprints (checksums) by leaf path; None if the step is
        not in the former format.

    Raises:
        Exception: any exception of Orbax on unreadable metadata.
    """
    if former_items(value) is None:
        return None
    found: Any = ocp.StandardCheckpointHandler().metadata(step / STATE)
    full = to_paths(found.tree)
    shapes = {
        path: (tuple(leaf.shape), np.dtype(leaf.dtype).name)
        for path, leaf in full.items()
    }
    shapes |= {
        leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in value["empty"]
    }
    structure, _ = structure_of(jax.tree.structure(nested(full)))
    record = Record(
        default=False,
        structures={STATE: structure},
        json_items={ITEMS: value["items"]},
        leaves=tuple(
            LeafRecord(path=leaf_path(path), kind="array", shape=shape, dtype=dtype)
            for path, (shape, dtype) in shapes.items()
        ),
    )
    prints = value["fingerprints"].items()
    return record, {leaf_path(path): text for path, text in prints}


_NUMBERS: Mapping[Kind, Any] = {"bool": False, "int": 0, "float": 0.0}


logger = logging.getLogger(__name__)


class CheckpointUnreadable(RuntimeError):
    """A step exists in a storage directory, but cannot be read or is corrupt."""


class StoredSteps:
    """A reader of the steps in one storage directory, which verifies their values."""

    def __init__(self, directory: epath.Path) -> None:
        """Stores the path; does not access the directory."""
        self.directory = directory

    def steps(self) -> tuple[int, ...]:
        """Lists the complete steps, ascending; none if the directory does not exist.

        Raises:
            OSError: the directory exists but cannot be listed.
        """
        return storage_steps(self.directory)

    def steps_or(self, last: tuple[int, ...]) -> tuple[int, ...]:
        """Lists the complete steps; returns `last` if they cannot be listed.

        The failure is logged. `last` is the last successful listing.
        """
        try:
            return self.steps()
        except OSError as error:
            logger.warning(
                "the steps in storage (%s) cannot be listed: %s; the last successful "
                "listing is used",
                self.directory,
                error,
            )
        return last

    def record(self, step: int) -> tuple[Record, dict[str, str]] | None:
        """Reads a step's record (description) and the fingerprints of its leaves.

        Returns:
            The record, and fingerprints (checksums of the values) by leaf path. None if
            stock Orbax wrote the step, or if there is no such step.

        Raises:
            CheckpointUnreadable: the step has a record that cannot be read.
        """
        path = self.directory / str(step)
        try:
            if not (path / RECORD).exists():
                value = _json(path / ITEMS) if (path / STATE).exists() else None
                return former_record(path, value)
            beside = _json(path / RECORD)
            digest = beside.pop("digest", None)  # early versions wrote none
            if digest is not None and digest != json_digest(beside):
                raise ValueError("its record does not match its digest")
            return Record.from_json(beside["record"]), beside["fingerprints"]
        except Exception as error:  # Orbax and corrupt files raise any exception
            raise self._unreadable(step, error) from error

    def digest(self, step: int) -> str | None:
        """Reads the stored digest of a step's record and leaf fingerprints.

        Two writes of a step are equal if their digests are. Returns None if there is no
        such step, if it has no digest (one of stock Orbax, or of an early version of
        dtft), or if the digest cannot be read.
        """
        try:
            return _json(self.directory / str(step) / RECORD)["digest"]
        except (KeyError, TypeError, ValueError, OSError):  # e.g. a stock Orbax step
            return None

    def read(
        self,
        step: int,
        record: Record,
        prints: Mapping[str, str],
        wanted: Mapping[str, RestoreTarget | None],
    ) -> tuple[list[Any], dict[str, Any]]:
        """Reads and verifies items of a step: the leaves of trees, and JSON values.

        Args:
            step: number of the step.
            record: the step's record, from `record`.
            prints: the step's fingerprints, from `record`.
            wanted: for each wanted item, by its name, how its leaves are to be restored
                (shardings); None for a JSON item.

        Returns:
            A list of the leaves' values, in the record's order, and a dict from item
            name to JSON value. A leaf's value is a jax array (the key data of a PRNG
            key) or a numpy array. The value is None if the leaf's item is not in
            `wanted`; but an empty array is always returned, as a numpy array.

        Raises:
            CheckpointUnreadable: the step cannot be read, or is corrupt.
            ValueError: jax would narrow a 64-bit leaf (`jax_enable_x64` is off).
        """
        numbers = range(len(record.leaves))
        trees = {
            name: jax.tree.leaves(record.tree(name, numbers))
            for name, item in wanted.items()
            if item is not None
        }
        values: list[Any] = [None] * len(record.leaves)
        for name, mine in trees.items():
            for number in mine:
                values[number] = _abstract(record.leaves[number], number, wanted[name])
        args = {
            name: ocp.args.JsonRestore()
            if item is None
            else ocp.args.StandardRestore(record.tree(name, values))
            for name, item in wanted.items()
        }
        found = self._read(step, args)
        for name, mine in trees.items():
            full = [number for number in mine if values[number] is not None]
            leaves = jax.tree.leaves(found[name])
            for number, value in zip(full, leaves, strict=True):
                values[number] = _plain(record.leaves[number], value)
        self._check(step, record, prints, values)
        for number, leaf in enumerate(record.leaves):
            if 0 in leaf.shape:
                values[number] = as_array(memoryview(b""), leaf)
        return values, {
            name: self._right(step, record, name, found[name])
            for name in wanted
            if name not in trees
        }

    def _right(self, step: int, record: Record, name: str, value: Any) -> Any:
        """Returns a JSON item after checking that it equals the item in the record.

        Args:
            step: number of the step.
            record: the step's record.
            name: name of the item.
            value: the item as Orbax read it. For a step in the former format (git
                commit 3d5ab71 and earlier), the user's items are taken from it.

        Raises:
            CheckpointUnreadable: the item differs from the item in the record.
        """
        if not (self.directory / str(step) / RECORD).exists():
            value = former_items(value)
        if json_digest(value) != json_digest(record.json_items[name]):
            raise self._unreadable(step, ValueError(f"item {name!r} is corrupt"))
        return value

    def _check(
        self,
        step: int,
        record: Record,
        prints: Mapping[str, str],
        values: Sequence[Any],
    ) -> None:
        plain = {
            leaf.path: value
            for leaf, value in zip(record.leaves, values, strict=True)
            if value is not None
        }
        actual = fingerprints(plain)
        bad = [path for path in plain if actual[path] != prints.get(path)]
        if bad:
            raise self._unreadable(step, ValueError(f"corrupt leaves: {listed(bad)}"))

    def stock(self, step: int, args: Any) -> Any:
        """Restores a step that stock Orbax wrote, with a stock Orbax manager.

        `args` are Orbax's restore arguments. Returns what Orbax returns; no values are
        verified.
        """
        with self.manager() as manager:
            return manager.restore(step, args=args)

    def manager(self, *, best_fn: Any = None) -> ocp.CheckpointManager:
        """Opens a read-only stock Orbax manager of the directory.

        `best_fn` is the option of that name of `ocp.CheckpointManagerOptions`.
        """
        options = ocp.CheckpointManagerOptions(
            read_only=True, create=False, save_interval_steps=0, best_fn=best_fn
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def delete(self, step: int) -> None:
        """Removes a step from the directory; all processes must make the same call.

        Raises:
            FileNotFoundError: the directory does not have the step.
        """
        options = ocp.CheckpointManagerOptions(create=False, save_interval_steps=0)
        options = renames_deleted(self.directory, options)
        with ocp.CheckpointManager(self.directory, options=options) as manager:
            manager.delete(step)
        remove_deleted(self.directory)

    def stock_metadata(self, step: int) -> Any:
        """Returns Orbax's `item_metadata` of a step that stock Orbax wrote."""
        unnamed = (self.directory / str(step) / DEFAULT).exists()
        with ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(read_only=True, create=False),
            item_handlers=ocp.StandardCheckpointHandler() if unnamed else None,
        ) as manager:
            return manager.item_metadata(step)

    def _read(self, step: int, args: Mapping[str, Any]) -> Any:
        path = self.directory / str(step)
        # Each process reads its own shards. By default Orbax would wait for all
        # processes of the JAX world, also for those without a slot.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"at{me}"
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
        )
        try:
            with ocp.Checkpointer(
                handler, multiprocessing_options=alone
            ) as checkpointer:
                return checkpointer.restore(path, args=ocp.args.Composite(**args))
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> CheckpointUnreadable:
        others = [str(other) for other in self.steps() if other != step]
        advice = f"Restore another step ({listed(others)}) or m" if others else "M"
        return CheckpointUnreadable(
            f"{self.directory / str(step)} exists but cannot be read "
            f"({said(error)}). Nothing was changed. {advice}ove the directory away."
        )


def _json(item: epath.Path) -> Any:
    """Reads the value of a JSON item; None if the item has no JSON file."""
    file = item / "metadata"
    return json.loads(file.read_text()) if file.exists() else None


def _abstract(leaf: LeafRecord, number: int, wanted: RestoreTarget | None) -> Any:
    """Makes the target of a leaf for Orbax's restore.

    Args:
        leaf: kind, shape and dtype of the saved leaf.
        number: position of the leaf in the record.
        wanted: how the leaf's item is to be restored (shardings).

    Returns:
        A Python number or a numpy array if the saved leaf was one, otherwise a
        `jax.ShapeDtypeStruct` with the wanted sharding, by default on the first local
        device. None for an empty leaf, which Orbax does not store.
    """
    assert wanted is not None
    dtype = np.dtype(leaf.dtype)
    if 0 in leaf.shape:
        return None
    if leaf.kind in _NUMBERS:
        return _NUMBERS[leaf.kind]
    if leaf.kind in ("numpy", "scalar"):
        return np.broadcast_to(np.zeros((), dtype), leaf.shape)  # needs no memory
    target = wanted.targets.get(number)
    sharding = getattr(target, "sharding", None) or wanted.fallback
    return struct_of(leaf, sharding or default_sharding())


def _plain(leaf: LeafRecord, value: Any) -> Any:
    """Converts a restored leaf to the array whose fingerprint (checksum) is checked.

    The result is the key data of a PRNG key, and a numpy array for a number.

    Raises:
        ValueError: jax has narrowed a 64-bit leaf (`jax_enable_x64` is off).
    """
    if leaf.kind == "key":
        return jax.random.key_data(value)
    if not isinstance(value, jax.Array):
        return np.asarray(value, np.dtype(leaf.dtype))
    refuse_narrowed(value.dtype, leaf)
    return value
