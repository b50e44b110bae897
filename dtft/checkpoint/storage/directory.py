"""The storage tier: a directory of Orbax checkpoints, one per step.

Stock Orbax can read each item (named part) of a step by the item's name. A step that
dtft's own training loop (`dtft.train`) saves has two items: `state`, a nested dict
of arrays, and `items`, JSON. Each step that dtft writes also has the item `dtft`,
described in `stored_steps`. `compare_steps` compares two stored steps bit for bit.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dtft.checkpoint.state import (
    ITEMS,
    RECORD,
    STATE,
    Record,
    RestoreTarget,
    experiment_record,
    fingerprints,
    is_experiment,
    json_digest,
    listed,
    state_path,
)
from dtft.checkpoint.storage.orbax_manager import OpenedDirectory
from dtft.checkpoint.storage.stored_steps import CheckpointUnreadable, StoredSteps

BACKGROUND_S = 300
"""Limit of the background part of one save, in seconds."""


class WrittenByAnother(RuntimeError):
    """Storage has a step of the same number, but with other contents."""


class StorageTier:
    """A storage directory: saves and restores checkpoints, and keeps the newest steps.

    If JAX runs in several processes (`jax.distributed`), all processes must make the
    same calls, because a save waits for all processes. Listing steps needs no other
    process.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        max_to_keep: int | None = 3,
        read_only: bool = False,
        scored: bool = False,
        background: bool = True,
    ) -> None:
        """Stores the options; Orbax opens the directory at the first save or deletion.

        Args:
            directory: directory of the steps; the first save creates it.
            max_to_keep: number of the newest steps that a save keeps; None keeps all.
            read_only: whether saves are refused.
            scored: whether Orbax also writes the metrics of a step.
            background: whether a save returns before the step is complete. If one of
                several processes then fails to complete a step, that process reports
                the error only after the other processes have ended their saves.

        Raises:
            ValueError: `max_to_keep` is below 1.
        """
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"max_to_keep={max_to_keep} would keep no checkpoint. Allowed: 1 or "
                "more. Set --checkpoint.storage_keep 1 or more."
            )
        text = str(directory)
        self.directory = epath.Path(text if "://" in text else os.path.abspath(text))
        self._read_only = read_only
        self._stored = StoredSteps(self.directory)
        self._opened = OpenedDirectory(
            self.directory,
            orbax_options(max_to_keep, scored=scored, background=background),
        )

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], items: Mapping[str, Any]
    ) -> None:
        """Begins to write a step of dtft's own training loop.

        `wait_until_finished` waits until the step is complete. The arrays must not
        change before then. An existing step of the same number is replaced.

        Args:
            step: number of the step.
            arrays: leaf path to global array.
            items: name to JSON value, for state that is not an array.

        Raises:
            ValueError: two paths have the same name in Orbax, all leaves are empty, an
                array or an item cannot be saved, or the storage tier is read-only.
        """
        self.write(step, StepToStore(*experiment_record(arrays, items)))

    def write(self, step: int, stored: "StepToStore") -> None:
        """Begins to write a step; `wait_until_finished` waits until it is complete.

        The arrays in `stored` must not change before the step is complete. An existing
        step of the same number is replaced.

        Raises:
            ValueError: the storage tier is read-only.
        """
        if self._read_only:
            raise ValueError(
                f"read_only=True: step {step} was not saved to {self.directory}. "
                "Open the storage tier with read_only=False."
            )
        record = stored.record
        self._opened.save(step, stored.items, record.metrics, record.custom_metadata)

    def write_once(self, step: int, stored: "StepToStore") -> None:
        """Writes a step and waits until it is complete, unless the step exists.

        An existing step is never replaced. It is accepted if its digest (over the
        step's description and the checksums of its leaves) equals that of `stored`: an
        earlier attempt may have written it, although the answer of that attempt was
        lost. Must be called by one process only.

        Raises:
            WrittenByAnother: the step exists with another digest.
        """
        self.reload()
        if step not in self.all_steps():
            self.write(step, stored)
            self.wait_until_finished()
        if self._stored.digest(step) != stored.digest:
            raise WrittenByAnother(
                f"another manager has written step {step} to {self.directory}, and it "
                "stays there. Give each manager a directory of its own, or delete the "
                "step first"
            )

    def reload(self) -> None:
        """Lists the directory again before a save, to see other writers' steps."""
        self._opened.reload()

    def delete(self, steps: Iterable[int]) -> None:
        """Removes the given steps; steps that do not exist are ignored."""
        for step in set(steps) & set(self.all_steps()):
            self._opened.delete(step)

    def wait_until_finished(self) -> None:
        """Waits until the last save is complete; raises the error of a failed save."""
        self._opened.wait_until_finished()

    def restore(
        self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Reads the arrays and the JSON items of a step of dtft's own training loop.

        The restored arrays have the shardings of `abstract`, and are bit-identical to
        the saved arrays.

        Args:
            step: one of `all_steps()`.
            abstract: leaf path to shape, dtype and sharding.

        Returns:
            Leaf path to array, and item name to JSON value, as given to `save`.

        Raises:
            FileNotFoundError: the directory has no such step, or is not mounted.
            ValueError: the step's leaves differ from `abstract` in path, shape or dtype
                (the message lists the differences); or jax would narrow a 64-bit leaf
                (`jax_enable_x64` is off).
            CheckpointUnreadable: the step exists but cannot be read, or is not a step
                of dtft's own training loop.
        """
        record, prints = self._experiment(step)
        paths = shown_paths(record)
        shapes = dict(zip(paths, _shapes(record), strict=True))
        _check_fits(abstract, shapes, self.directory / str(step))
        targets = {number: abstract[path] for number, path in enumerate(paths)}
        wanted = {STATE: RestoreTarget(targets=targets), ITEMS: None}
        values, items = self._stored.read(step, record, prints, wanted)
        found = dict(zip(paths, values, strict=True))
        arrays = {
            path: found[path] if 0 not in leaf.shape else _empty_array(leaf)
            for path, leaf in abstract.items()
        }
        return arrays, items[ITEMS]

    def load_numpy(self, step: int) -> dict[str, np.ndarray]:
        """Reads all leaves of a step as numpy arrays; verifies their fingerprints.

        Returns a dict from leaf path to array.

        Raises:
            FileNotFoundError: the directory does not have the step.
            ValueError: jax would narrow a 64-bit leaf (`jax_enable_x64` is off).
            CheckpointUnreadable: the step cannot be read, is corrupt, or was written by
                stock Orbax.
        """
        record, prints = self._record(step)
        # Orbax reads a step of several processes only onto an explicit sharding.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        wanted = dict.fromkeys(record.structures, RestoreTarget(fallback=here))
        values, _ = self._stored.read(step, record, prints, wanted)
        arrays = map(np.asarray, values)
        return dict(sorted(zip(shown_paths(record), arrays, strict=True)))

    def items(self, step: int) -> dict[str, Any]:
        """Reads the JSON items that `save` wrote with the arrays of a step.

        Raises:
            FileNotFoundError: the directory has no such step, or is not mounted.
            CheckpointUnreadable: the step cannot be read, or is not a step of dtft's
                own training loop.
        """
        return self._experiment(step)[0].json_items[ITEMS]

    def all_steps(self) -> tuple[int, ...]:
        """Lists the complete steps, ascending; none if the directory does not exist.

        Raises an OSError if the directory exists but cannot be listed.
        """
        return self._stored.steps()

    def latest_step(self) -> int | None:
        """Returns the newest complete step; None if the directory has none."""
        return max(self.all_steps(), default=None)

    def close(self) -> None:
        """Waits for a running save and closes the directory."""
        self._opened.close()

    def _record(self, step: int) -> tuple[Record, dict[str, str]]:
        steps = self.all_steps()
        if step not in steps:
            # Not a ValueError, which would end the whole job: the leader has seen the
            # step that it orders to restore, so this host's mount may be at fault.
            raise FileNotFoundError(
                f"step={step} is not in {self.directory}. It has: "
                f"{listed([str(found) for found in steps])}."
            )
        found = self._stored.record(step)
        if found is None:
            raise CheckpointUnreadable(
                f"{self.directory / str(step)} was not written by dtft: it has no item "
                f"{RECORD!r}."
            )
        return found

    def _experiment(self, step: int) -> tuple[Record, dict[str, str]]:
        record, prints = self._record(step)
        if not is_experiment(record):
            names = [*record.structures, *record.json_items]
            raise CheckpointUnreadable(
                f"{self.directory / str(step)} is not the step of an experiment: it "
                f"has the items {listed(names)}, not {STATE} and {ITEMS}."
            )
        return record, prints


def load_numpy(directory: Path | str, step: int) -> dict[str, np.ndarray]:
    """Reads all leaves of a step as numpy arrays; verifies their fingerprints.

    Returns a dict from leaf path to array.

    Raises:
        FileNotFoundError: the directory does not have the step.
        ValueError: jax would narrow a 64-bit leaf (`jax_enable_x64` is off).
        CheckpointUnreadable: the step cannot be read, is corrupt, or was written by
            stock Orbax.
    """
    return StorageTier(directory, read_only=True).load_numpy(step)


def orbax_options(
    max_to_keep: int | None,
    *,
    scored: bool = False,
    background: bool = True,
) -> ocp.CheckpointManagerOptions:
    """Makes the options of an Orbax manager from arguments of `StorageTier`.

    Args:
        max_to_keep: number of the newest steps that a save keeps; None keeps all.
        scored: whether Orbax also writes the metrics of a step.
        background: whether a save returns before the step is complete.
    """
    return ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep,
        cleanup_tmp_directories=True,
        # Orbax writes metrics only if it has a `best_fn`. The process with the user's
        # function decides which steps are deleted.
        best_fn=(lambda metrics: 0.0) if scored else None,
        enable_async_checkpointing=background,
        async_options=ocp.options.AsyncOptions(timeout_secs=BACKGROUND_S),
    )


class StepToStore:
    """The arguments of Orbax's save for one step, with the fingerprints of its arrays.

    A fingerprint is a checksum of an array's values; it is stored with the step.

    Attributes:
        record: describes the step: its structure, the path, shape and dtype of each
            leaf, and its JSON items.
        items: item name to `ocp.args.StandardSave` or `JsonSave`.
        digest: digest of the record and the fingerprints of the leaves.
    """

    def __init__(self, record: Record, values: Sequence[Any]) -> None:
        """Computes the fingerprints of the leaves and the digest.

        Args:
            record: describes the step: its structure, the path, shape and dtype of each
                leaf, and its JSON items.
            values: the values of these leaves, in the record's order; jax arrays are
                global. An empty array is stored as None, because Orbax refuses it.
        """
        full = [
            None if 0 in leaf.shape else value
            for leaf, value in zip(record.leaves, values, strict=True)
        ]
        prints = _fingerprints(record, full)
        beside = {"record": record.to_json(), "fingerprints": prints}
        self.record, self.digest = record, json_digest(beside)
        self.items: dict[str, Any] = {
            name: ocp.args.StandardSave(record.tree(name, full))
            for name in record.structures
        }
        for name, value in record.json_items.items():
            self.items[name] = ocp.args.JsonSave(value)
        self.items[RECORD] = ocp.args.JsonSave({**beside, "digest": self.digest})


def _fingerprints(record: Record, values: Iterable[Any]) -> dict[str, str]:
    """Computes a checksum of each leaf that is not empty; returns path to checksum."""
    plain: dict[str, Any] = {}
    for leaf, value in zip(record.leaves, values, strict=True):
        if value is None:
            continue
        if leaf.kind == "key":
            plain[leaf.path] = jax.random.key_data(value)
        else:
            is_jax = isinstance(value, jax.Array)
            plain[leaf.path] = value if is_jax else np.asarray(value, leaf.dtype)
    return fingerprints(plain)


def shown_paths(record: Record) -> list[str]:
    """Returns the path of each leaf for display, in the order of the record's leaves.

    For a step of dtft's own training loop, the paths are those in its item `state`, as
    they were given to `StorageTier.save`.
    """
    paths = [leaf.path for leaf in record.leaves]
    return list(map(state_path, paths)) if is_experiment(record) else paths


def _shapes(record: Record) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [(leaf.shape, np.dtype(leaf.dtype)) for leaf in record.leaves]


def _check_fits(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    found: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    where: os.PathLike[str],
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


def compare_steps(
    directory_a: Path | str, step_a: int, directory_b: Path | str, step_b: int
) -> list[str]:
    """Compares two stored steps.

    Returns:
        The paths, sorted, of leaves that only one step has, or that differ in shape,
        dtype or any bit.

    Raises:
        FileNotFoundError: a directory does not have the step.
        ValueError: jax would narrow a 64-bit leaf (`jax_enable_x64` is off).
        CheckpointUnreadable: a step exists but cannot be read, is corrupt, or was
            written by stock Orbax.
    """
    a, b = load_numpy(directory_a, step_a), load_numpy(directory_b, step_b)
    return [p for p in sorted(a.keys() | b.keys()) if not _same(a.get(p), b.get(p))]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
