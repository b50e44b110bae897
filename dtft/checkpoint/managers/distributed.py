"""The steps of a job of several processes: in host memory, and some in storage.

`JobSteps` implements `ReplicatedCheckpointManager` in a `jax.distributed` job. Every
process makes the same calls. The module converts trees to slices and back, and decides
whether a step is read from memory or from storage; all processes decide the same.
Agents replicate and commit the steps.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from dtft.checkpoint.managers.agent_client import AttachedMemory, NotBrought, SaveArgs
from dtft.checkpoint.managers.agent_link import attach
from dtft.checkpoint.managers.local import StorageFailed
from dtft.checkpoint.managers.options import ReplicatedOptions, chosen_step
from dtft.checkpoint.state import (
    Layout,
    Leaf,
    LeafRecord,
    Record,
    RestoreTarget,
    is_free_target,
    item_metadata,
    kind_wanted,
    listed,
    record_of,
    restore_result,
    restore_targets,
    struct_of,
)
from dtft.checkpoint.storage import (
    StoredSteps,
    config_of,
    dynamic_part,
    layout_difference,
    layout_of,
    moved_leaf,
    record_in,
    same_slices,
)

# Encodes the shardings of a saved step as JSON values, and decodes these values.
#
# Slices do not record the mesh of an array, so a restore whose target has no sharding
# needs the saved shardings. A saved device is found by its id, or by its process if the
# ids have changed.


ELSEWHERE = -1
"""Number in `shardings_json` of a leaf without a saved partition spec. Such a leaf is
no jax.Array, or its sharding is not a NamedSharding over devices of all processes."""
Numbered = tuple[int, int]
"""Identifies a device: (process index, device id)."""


def shardings_json(shardings: Sequence[Sharding | None]) -> dict[str, Any]:
    """Encodes the shardings of leaves as JSON values.

    Args:
        shardings: the sharding of each leaf; None for a leaf that is no jax.Array.

    Returns:
        A dict with three lists. `meshes` has the distinct meshes. `specs` has the
        distinct partition specs: each is an index into `meshes`, then the axes of each
        dim. `leaves` has for each leaf an index into `specs`, or `ELSEWHERE` (-1) if
        the leaf's sharding is not a NamedSharding over devices of all processes.

    In the example, the second leaf has spec 0: dim 0 is undivided, and axis "x" of
    mesh 0 divides dim 1.

    >>> mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    >>> found = shardings_json([None, NamedSharding(mesh, PartitionSpec(None, "x"))])
    >>> found["leaves"], found["specs"], found["meshes"][0]["names"]
    ([-1, 0], [[0, None, 'x']], ['x'])
    """
    meshes: dict[Mesh, int] = {}
    specs: dict[tuple[Any, ...], int] = {}
    leaves: list[int] = []
    for sharding in shardings:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if not isinstance(mesh, Mesh) or _is_local(mesh):
            leaves.append(ELSEWHERE)
            continue
        assert isinstance(sharding, NamedSharding)
        spec = meshes.setdefault(mesh, len(meshes)), *sharding.spec
        leaves.append(specs.setdefault(spec, len(specs)))
    return {
        "meshes": [_mesh_json(mesh) for mesh in meshes],
        "specs": [[_plain(part) for part in spec] for spec in specs],
        "leaves": leaves,
    }


def _is_local(mesh: Mesh) -> bool:
    """Whether a mesh covers only some of the job's processes."""
    processes = {device.process_index for device in mesh.devices.flat}
    return len(processes) < jax.process_count()


def _plain(part: Any) -> Any:
    return list(part) if isinstance(part, tuple) else part


def _mesh_json(mesh: Mesh) -> dict[str, Any]:
    return {
        "names": [str(name) for name in mesh.axis_names],
        "sizes": list(mesh.devices.shape),
        "types": [kind.name for kind in mesh.axis_types],
        "devices": [[it.process_index, it.id] for it in mesh.devices.flat],
    }


def shardings_had(record: Record) -> list[NamedSharding | None]:
    """Decodes the saved sharding of each leaf, on the devices of this run.

    Args:
        record: describes the saved step: its items, leaves and shardings.

    Returns:
        The sharding of each leaf, in the order of `record.leaves`. None for a leaf
        without a saved sharding, and for a leaf whose mesh needs devices that this run
        lacks.
    """
    raw = record.shardings
    if raw is None:
        return [None] * len(record.leaves)
    devices = jax.devices()
    meshes = [_mesh_on(mesh, devices) for mesh in raw["meshes"]]
    found = [_sharding(spec, meshes) for spec in raw["specs"]]
    return [None if number == ELSEWHERE else found[number] for number in raw["leaves"]]


def _sharding(
    spec: Sequence[Any], meshes: Sequence[Mesh | None]
) -> NamedSharding | None:
    number, *parts = spec
    mesh = meshes[number]
    if mesh is None:
        return None
    axes = (tuple(part) if isinstance(part, list) else part for part in parts)
    return NamedSharding(mesh, PartitionSpec(*axes))


def _mesh_on(raw: Mapping[str, Any], devices: Sequence[Any]) -> Mesh | None:
    wanted = [(process, ident) for process, ident in raw["devices"]]
    known = {(device.process_index, device.id): device for device in devices}
    there = renumbered(wanted, list(known))
    if there is None:
        return None
    array = np.array([known[pair] for pair in there], object).reshape(raw["sizes"])
    types = tuple(AxisType[name] for name in raw["types"])
    return Mesh(array, tuple(raw["names"]), axis_types=types)


def renumbered(
    wanted: Sequence[Numbered], there: Sequence[Numbered]
) -> list[Numbered] | None:
    """Chooses a device of this run for each saved device, in the order of `wanted`.

    If this run has all saved devices, the result is `wanted`. Otherwise the saved
    devices of each process are matched, by order of id, with this run's devices of the
    same process. Returns None if a process now has fewer devices than were saved.

    Args:
        wanted: (process index, device id) of each saved device.
        there: (process index, device id) of each device of this run.

    >>> renumbered([(1, 9), (0, 4)], [(0, 4), (1, 9)])
    [(1, 9), (0, 4)]
    >>> renumbered([(0, 9), (0, 4)], [(0, 0), (0, 1), (1, 2)])
    [(0, 1), (0, 0)]
    >>> renumbered([(0, 4), (1, 9)], [(0, 4)])
    """
    if set(wanted) <= set(there):
        return list(wanted)
    found: dict[Numbered, Numbered] = {}
    for process in {process for process, _ in wanted}:
        mine = sorted(pair for pair in wanted if pair[0] == process)
        theirs = sorted(pair for pair in there if pair[0] == process)
        if len(theirs) < len(mine):
            return None
        found |= dict(zip(mine, theirs, strict=False))
    return [found[pair] for pair in wanted]


def placed(
    record: Record, wanted: Mapping[str, RestoreTarget | None]
) -> dict[str, RestoreTarget | None]:
    """Gives targets without a sharding the sharding that their leaf was saved with.

    Only targets of arrays are changed. A target stays unchanged if its leaf was saved
    without a sharding. All targets of an item stay unchanged if the item has a default
    sharding (`RestoreTarget.fallback`), which its targets get later.

    Args:
        record: describes the saved step: its items, leaves and shardings.
        wanted: item name to the user's targets for its leaves, from `restore_targets`;
            None for a JSON item.

    Raises:
        ValueError: this run lacks devices for the saved mesh of a leaf; the message
            names the leaf, the mesh and the devices.
    """
    had = shardings_had(record)
    return {
        name: None if item is None else _item_placed(record, name, item, had)
        for name, item in wanted.items()
    }


def _item_placed(
    record: Record, name: str, item: RestoreTarget, had: Sequence[NamedSharding | None]
) -> RestoreTarget:
    targets = dict(item.targets)
    numbers = jax.tree.leaves(record.tree(name, range(len(record.leaves))))
    for number in [] if item.fallback else numbers:
        leaf, target = record.leaves[number], targets.get(number)
        if leaf.kind not in ("array", "key") or getattr(target, "sharding", None):
            continue
        if kind_wanted(target, leaf) not in ("array", "key"):
            continue
        sharding = had[number]
        if sharding is None:
            _refuse_lost(record, number)
            continue
        like = struct_of(leaf, None) if target is None else target
        targets[number] = jax.ShapeDtypeStruct(
            like.shape, like.dtype, sharding=sharding
        )
    return dataclasses.replace(item, targets=targets)


def _refuse_lost(record: Record, number: int) -> None:
    """Raises ValueError for a leaf that was saved with a sharding, else does nothing.

    Called for leaves to which `shardings_had` gives None. If such a leaf was saved with
    a sharding, this run lacks devices of its mesh.

    Args:
        record: describes the saved step: its items, leaves and shardings.
        number: position of the leaf in `record.leaves`.
    """
    raw = record.shardings
    if raw is None or raw["leaves"][number] == ELSEWHERE:
        return
    mesh, *spec = raw["specs"][raw["leaves"][number]]
    devices = dict(Counter(device.process_index for device in jax.devices()))
    raise ValueError(
        f"leaf {record.leaves[number].path!r} was saved over {spec} of a mesh "
        f"{_text(raw['meshes'][mesh])}, which this run's devices (per process: "
        f"{devices}) do not make up, and the target states no sharding. Give "
        "StandardRestore a tree of arrays, or of jax.ShapeDtypeStruct with sharding."
    )


def _text(mesh: Mapping[str, Any]) -> str:
    axes = zip(mesh["names"], mesh["sizes"], strict=True)
    return "(" + ", ".join(f"{name}: {size}" for name, size in axes) + ")"


# --------------------------------- options and restore targets that processes agree on


KEEP_ALL = 2**31 - 1


def refuse_unfit(directory: epath.Path, options: ReplicatedOptions) -> None:
    """Checks that a job of several processes can use the directory and the options.

    Raises:
        ValueError: an option is for jobs of one process, or the directory is a URL.
    """
    for name, allowed in (("best_fn", None), ("memory_to_keep", 1)):
        if getattr(options, name) != allowed:
            raise ValueError(
                f"{name}={getattr(options, name)!r}: in a job of several processes "
                f"memory and storage keep the newest steps. Allowed: {allowed}. Leave "
                f"ReplicatedOptions.{name} out."
            )
    if "://" in str(directory):
        raise ValueError(
            f"directory={directory}: in a job of several processes the agents write "
            "to a path that every host sees. Give a mounted directory."
        )


def terms_of(
    directory: epath.Path, options: ReplicatedOptions, processes: int
) -> dict[str, Any]:
    """Makes the fields of the message that `attach` sends to the agent.

    Args:
        directory: the directory of the storage tier.
        options: the options of the checkpoint manager.
        processes: the number of processes of the job.

    Returns:
        "process", the index of this process; and "terms", the settings that must be
        equal on all processes of the job.
    """
    return {
        "process": jax.process_index(),
        "terms": {
            "processes": processes,
            "directory": str(directory),
            "storage_interval_steps": options.storage_interval_steps,
            "max_to_keep": options.max_to_keep or KEEP_ALL,
            "chunk_bytes": options.chunk_bytes,
            "storage_timeout_s": options.storage_timeout_s,
        },
    }


def wanted_structs(
    record: Record, wanted: dict[str, RestoreTarget | None], layout: Layout
) -> dict[str, Any]:
    """Maps leaf path to a `jax.ShapeDtypeStruct`, for the leaves of `wanted`'s items.

    The sharding of a struct is None if the leaf is read as one whole numpy array.

    Args:
        record: the record of the saved step.
        wanted: item name to its `RestoreTarget`, from `placed`; None for a JSON item,
            which has no leaves.
        layout: the layout of the saved step.

    Raises:
        ValueError: a leaf was saved divided over processes, but has no sharding to be
            read onto. Its target is a numpy array or a number, or neither the target
            nor `RestoreTarget.fallback` has a sharding. (Not raised if the target is an
            uncommitted jax.Array: its leaf is read whole.)
    """
    structs: dict[str, Any] = {}
    for name, item in wanted.items():
        if item is None:
            continue
        for number in jax.tree.leaves(record.tree(name, range(len(record.leaves)))):
            leaf = record.leaves[number]
            sharding = _wanted_sharding(
                leaf, item.targets.get(number), item.fallback, layout.leaves[number]
            )
            structs[leaf.path] = jax.ShapeDtypeStruct(
                leaf.shape, np.dtype(leaf.dtype), sharding=sharding
            )
    return structs


def _wanted_sharding(leaf: LeafRecord, target: Any, fallback: Any, saved: Leaf) -> Any:
    """Returns the sharding onto which a leaf is read; None for a whole numpy array.

    If the target is an uncommitted jax.Array, the leaf is read whole.

    Args:
        leaf: the leaf's kind (jax array, PRNG key, numpy array, number), shape and
            dtype when it was saved.
        target: the user's leaf; None restores the kind that was saved.
        fallback: the sharding if the target has none, or None.
        saved: the leaf with its saved partition spec.

    Raises:
        ValueError: the leaf was saved divided over processes, but is restored as a
            numpy array or a number, or `target` and `fallback` give no sharding.
    """
    on_devices = kind_wanted(target, leaf) in ("array", "key")
    if on_devices and is_free_target(target):
        return None
    on_devices = on_devices and leaf.kind in ("array", "key")
    sharding = (getattr(target, "sharding", None) or fallback) if on_devices else None
    if sharding is None and saved.spec:
        raise ValueError(
            f"leaf {leaf.path!r} was saved divided over processes ({saved.spec}) and "
            "the target has no sharding. Give StandardRestore a tree of arrays, or of "
            "jax.ShapeDtypeStruct with sharding."
        )
    return sharding


logger = logging.getLogger(__name__)


class JobSteps:
    """The implementation of `ReplicatedCheckpointManager` for several processes.

    The agents of the hosts keep the newest committed step in memory, and write some
    steps to storage.
    """

    def __init__(self, directory: epath.Path, options: ReplicatedOptions) -> None:
        """Lists the directory, attaches to this host's agent, waits for all processes.

        Args:
            directory: the directory of the storage tier.
            options: the options of the checkpoint manager.

        Raises:
            ValueError: an option or the directory cannot be used in a job of several
                processes.
            OSError: the directory cannot be listed.
            NoAgent: no agent accepts this process.
            AgentGone: the agent has ended, or has detached this process.
            TimeoutError: some processes did not attach in time.
        """
        refuse_unfit(directory, options)
        self._options, self._stored = options, StoredSteps(directory)
        self._processes = jax.process_count()
        self._listed = self._stored.steps()  # before the agent is taken: it may fail
        """The stored steps, as of the last successful listing of the directory."""
        attached = attach(options.agent, terms_of(directory, options, self._processes))
        self._memory = AttachedMemory(
            attached,
            slot=jax.process_index(),
            chunk_bytes=options.chunk_bytes,
            directory=Path(directory),
        )
        self._looks: tuple[Any, ...] | None = None
        self._layout: Layout | None = None
        """The layout announced at the first save; None before."""
        self._shardings: dict[str, Any] | None = None
        """The shardings of the last save, from `shardings_json`; None before a save."""

    # -------------------------------------------------------------------- steps

    def all_steps(self, read: bool = False) -> list[int]:
        """Returns the steps in memory and in storage, ascending.

        Waits first until the step saved last has all its copies on other hosts.

        Every call lists the directory, whatever the value of `read`.
        """
        del read  # agents write to the directory, so every call lists it
        self._memory.wait_until_finished()
        here = self._memory.in_memory
        return sorted({*self._in_storage(), *([] if here is None else [here])})

    def _in_storage(self) -> tuple[int, ...]:
        """Lists the stored steps; on failure, returns the last successful listing."""
        self._listed = self._stored.steps_or(self._listed)
        return self._listed

    def newest(self) -> int | None:
        """Returns the step saved last.

        Before the first save, this is the newest step in memory or in storage. Returns
        None if memory and storage have no step. Does not wait for copies or for
        other processes.
        """
        if self._memory.saved is not None:
            return self._memory.saved
        return max(self._in_storage(), default=None)

    def best_step(self) -> int | None:
        """Returns the newest step, or None if there is no step.

        No step ranks as better, because a job of several processes has no `best_fn`.
        """
        return max(self.all_steps(), default=None)

    def _chosen(self, step: int | None) -> int:
        places = f"the memory of the job nor in {self._stored.directory}"
        return chosen_step(step, self.all_steps(), places)

    # --------------------------------------------------------------------- save

    def save(
        self, step: int, args: Any, metrics: Any, custom_metadata: Any, at_once: bool
    ) -> None:
        """Copies this process's slices of a step into the memory of its agent.

        Waits first until the agents have replicated the previous step.

        Args:
            step: number of the step.
            args: `ocp.args.StandardSave`, or an `ocp.args.Composite` of `StandardSave`
                and `JsonSave`.
            metrics: the metrics of the step: JSON values or scalars.
            custom_metadata: JSON values that `metadata` returns.
            at_once: whether to request that the step is written to storage, even if the
                option `storage_interval_steps` does not make it due.

        Raises:
            ValueError: the step is not above the newest step, `args` or `metrics`
                cannot be saved, or the tree or a sharding differs from the first save.
            AgentGone: the agent has ended, or has detached this process.
            TimeoutError: the agent did not answer in time.
        """
        self._memory.check()
        newest = self.newest()
        if newest is not None and step <= newest:
            raise StepAlreadyExistsError(
                f"step={step} is not above step {newest}, the newest one. Allowed in a "
                "job of several processes: steps that grow."
            )
        record, values = record_of(args, metrics, custom_metadata)
        record = self._announce(record, values)
        self._memory.wait_until_finished()
        arrays = {
            leaf.path: _as_saved(leaf, value)
            for leaf, value in zip(record.leaves, values, strict=True)
        }
        jax.block_until_ready([v for v in arrays.values() if isinstance(v, jax.Array)])
        items = dynamic_part(record)
        self._memory.save(step, args=SaveArgs(arrays=arrays, items=items))
        if at_once:
            self._memory.ask_storage(step, store=True)

    def _announce(self, record: Record, values: list[Any]) -> Record:
        """Sends the layout (mesh and leaves) to the agent at the first save.

        At later saves, checks that the layout is the same.

        Args:
            record: describes the save: its items and leaves, without shardings.
            values: the values of the leaves, in the order of `record.leaves`.

        Returns:
            The record, with the shardings of the values.

        Raises:
            ValueError: the layout differs from the layout of the first save.
        """
        shardings = [getattr(value, "sharding", None) for value in values]
        looks = record.default, record.structures, record.leaves, shardings
        if self._looks == looks:
            return dataclasses.replace(record, shardings=self._shardings)
        layout = layout_of(record.leaves, shardings, self._processes, config_of(record))
        if self._layout is None:
            self._memory.announce(layout)
        elif layout.digest != self._layout.digest:
            raise ValueError(
                f"the tree differs from that of the first save of this run: "
                f"{layout_difference(self._layout, layout)}. Allowed in a job of "
                "several processes: the same leaves on the same shardings at every "
                "step."
            )
        self._looks, self._layout = looks, layout
        self._shardings = shardings_json(shardings)
        return dataclasses.replace(record, shardings=self._shardings)

    # ------------------------------------------------------------------ restore

    def restore(self, step: int | None, args: Any) -> Any:
        """Restores a step from the agents' memory, or else from storage.

        If the requested shardings need slices that a process did not save, the agents
        fetch these slices from peers. For the errors, see
        `ReplicatedCheckpointManager.restore`.

        Args:
            step: one of `all_steps()`; None for the newest.
            args: `ocp.args.StandardRestore` or `Composite`, with the requested
                shardings. An array for which `args` gives no sharding is restored onto
                its saved sharding.
        """
        chosen = self._chosen(step)
        if chosen != self._memory.in_memory:
            return self._from_storage(chosen, args)
        found = self._memory.locate(chosen)
        layout = Layout.from_json(found["layout"])
        record = record_in(layout, found["items"])
        if record is None:
            raise ValueError(f"step {chosen} in memory is not a tree of this API.")
        wanted = placed(record, restore_targets(record, args))
        abstract = wanted_structs(record, wanted, layout)
        arrays = self._read(found, chosen, record, layout, abstract)
        values = [arrays.get(leaf.path) for leaf in record.leaves]
        nowhere = [None] * len(values)
        return restore_result(record, values, dict(record.json_items), wanted, nowhere)

    def _read(
        self,
        found: dict[str, Any],
        step: int,
        record: Record,
        saved: Layout,
        abstract: dict[str, Any],
    ) -> dict[str, Any]:
        """Reads the leaves in `abstract` from the agents' memory.

        If every process has saved the slices that its requested shardings need, each
        reads the memory of its own agent. Otherwise the agents fetch slices from peers.

        Args:
            found: where the step is in this host's memory, from
                `AttachedMemory.locate`.
            step: the newest committed step.
            record: describes the saved step: its items and leaves.
            saved: the layout (mesh and leaves) of the saved step.
            abstract: leaf path to shape, dtype and requested sharding.

        Returns:
            Leaf path to array.

        Raises:
            NotBrought: the agents could not provide the slices; the message names the
                first leaf of which a process needs a slice that it did not save.
            CorruptCopy: a slice does not match its digests.
        """
        leaves = [leaf for leaf in record.leaves if leaf.path in abstract]
        shardings = [abstract[leaf.path].sharding for leaf in leaves]
        wanted = layout_of(leaves, shardings, self._processes)
        if same_slices(saved, wanted):  # the result is the same on every process
            return self._memory.read(found, abstract)
        try:
            return self._memory.read_on(step, wanted, abstract)
        except NotBrought as error:
            first = moved_leaf(saved, wanted)
            raise NotBrought(f"{error} The first one: {first}.") from error

    def _from_storage(self, step: int, args: Any) -> Any:
        found = self._stored.record(step)
        if found is None:
            return self._stored.stock(step, args)
        record, prints = found
        wanted = placed(record, restore_targets(record, args))
        values, items = self._stored.read(step, record, prints, wanted)
        return restore_result(record, values, items, wanted, [None] * len(values))

    # ----------------------------------------------------------------- metadata

    def _record(self, step: int) -> Record | None:
        """Reads the description of a step (its items, leaves and metrics).

        Returns None for a step that stock Orbax wrote.
        """
        if step == self._memory.in_memory:
            found = self._memory.locate(step)
            return record_in(Layout.from_json(found["layout"]), found["items"])
        stored = self._stored.record(step)
        return stored[0] if stored else None

    def item_metadata(self, step: int) -> Any:
        """Returns a `jax.ShapeDtypeStruct` for every leaf, with its saved sharding.

        The structs are in the saved tree; for named items, in a Composite of trees.
        The sharding is None if none was saved, or if this run lacks devices of its
        mesh. For a step that stock Orbax wrote, the result is Orbax's item metadata.
        """
        step = self._chosen(step)
        record = self._record(step)
        if record is None:
            return self._stored.stock_metadata(step)
        return item_metadata(record, shardings_had(record))

    def metadata(self, step: int | None) -> Any:
        """Returns Orbax's metadata of a step; of the directory if `step` is None."""
        record = None if step is None else self._record(self._chosen(step))
        if step is None or record is None:
            with self._stored.manager() as manager:
                return manager.metadata(step)
        return ocp.metadata.StepMetadata(
            item_metadata=self.item_metadata(step),
            metrics=record.metrics or {},
            custom_metadata=record.custom_metadata or {},
        )

    def metrics(self, step: int) -> Any:
        """Returns the metrics that were saved with a step.

        Returns None if none were saved, or if stock Orbax wrote the step.
        """
        record = self._record(self._chosen(step))
        return record.metrics if record else None

    # ---------------------------------------------------------- waiting and ending

    def wait_until_finished(self) -> None:
        """Waits until the step saved last is committed.

        Waits also until a running write to storage has ended. Does not wait before the
        first save.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            StorageFailed: a write to storage failed.
            TimeoutError: the wait took longer than twice the option
                `storage_timeout_s`.
        """
        if self._has_saved:
            self._flush(store=False)
        self.check_for_errors()

    @property
    def _has_saved(self) -> bool:
        """Whether this run has called `save` and there is a step to wait for.

        The step to wait for is the step saved last. If the first save failed, it is the
        step that could be restored at the start of this run; the result is False if
        there was none.
        """
        return self._layout is not None and self._memory.saved is not None

    def _flush(self, *, store: bool) -> str:
        assert self._memory.saved is not None
        limit_s = 2 * self._options.storage_timeout_s
        return self._memory.flush(self._memory.saved, store=store, limit_s=limit_s)

    def check_for_errors(self) -> None:
        """Raises the error of an agent that has gone, or of a failed write to storage.

        Raises:
            AgentGone: the agent has ended, or has detached this process.
            StorageFailed: a write to storage has failed since the last call. Of several
                such failures, only the last is raised.
        """
        self._memory.check()
        errors, self._memory.storage_errors = self._memory.storage_errors, []
        if errors:
            raise StorageFailed(errors[-1])

    def is_saving_in_progress(self) -> bool:
        """Whether the agents still replicate the step saved last."""
        return self._memory.is_replicating

    def delete(self, step: int) -> None:
        """Removes a step from storage; every process makes the same call.

        Raises:
            ValueError: the step is the newest commit in memory, from which lost hosts
                are restored.
            FileNotFoundError: `all_steps()` does not have the step.
        """
        if self._chosen(step) == self._memory.in_memory:
            raise ValueError(
                f"step={step} is the newest commit in memory, from which lost hosts "
                "are restored. It goes when the next step is saved. Allowed: older "
                f"steps ({listed(list(map(str, self._in_storage())))})."
            )
        self._stored.delete(step)

    def close(self) -> None:
        """Writes the newest step to storage, if a step was saved, and detaches.

        The step remains in the agents' memory.

        Raises:
            StorageFailed: this write failed, or an earlier write failed and was not
                raised yet.
            AgentGone: the agent has ended, or has detached this process.
            TimeoutError: the write took longer than twice the option
                `storage_timeout_s`.
        """
        try:
            error = self._flush(store=True) if self._has_saved else ""
            self.check_for_errors()
        finally:
            self._memory.leave()
        if error:
            raise StorageFailed(error)

    def leave(self) -> None:
        """Detaches without a write to storage; the agents keep the committed steps."""
        self._memory.leave()


def _as_saved(leaf: LeafRecord, value: Any) -> jax.Array | np.ndarray:
    if leaf.kind == "key":
        return jax.random.key_data(value)
    if isinstance(value, jax.Array):
        return value
    return np.asarray(value, np.dtype(leaf.dtype))
