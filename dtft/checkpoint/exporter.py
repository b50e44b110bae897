"""Writes committed steps from an agent's arena to storage: a disposable process.

``python -m dtft.checkpoint.exporter`` reads one JSON object per line on stdin and
answers one per line on stdout. The exporting hosts' processes form a CPU world of their
own and see the arena as read-only views, whose digests they check: what went wrong in
memory must not get a good fingerprint. Must not know training, peers or commits.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.departure import from_hex, refuse_corrupt
from dtft.checkpoint.export_plan import ExportWorld, export_world
from dtft.checkpoint.job_layout import record_in
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.record import LeafRecord, experiment_record
from dtft.checkpoint.save_server import serve
from dtft.checkpoint.slices import Layout, Slice, slice_at
from dtft.checkpoint.storage import StorageTier

JOIN_S = 60
"""The processes of one export start within this time of each other, or give up."""
HEARTBEAT_S = 10


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the first message says."""

    directory: str
    """Storage directory."""
    max_to_keep: int
    """Steps that storage keeps."""
    rank: int
    """This process in the export world."""
    world: int
    """Number of exporting processes."""
    coordinator: str
    """host:port that rank 0 serves; "" in a world of one."""
    layout: str
    """The layout as JSON."""
    arena: str
    """Path of the arena file."""
    slot: int
    """The slot whose own slices lie in the arena, from its start."""
    devices: int
    """CPU devices of this process: at least the slot's part of the sub-mesh."""
    chunk_bytes: int
    """Bytes under one digest."""


class ArenaExporter:
    """One slot's part of the export: arena views in, a step in storage out."""

    def __init__(self, opening: Opening) -> None:
        """Joins the export world and maps the arena.

        Raises:
            ValueError: the message does not fit the layout.
        """
        self._layout = Layout.from_json(opening.layout)
        self._world = export_world(self._layout)
        self._positions = self._world.mesh.positions(opening.slot)
        _check(opening, self._world, len(self._positions))
        _join(opening, self._layout)
        self._mesh = _mesh(self._world, opening.rank)
        pieces = self._layout.slices(opening.slot)
        self._chunks = Chunks.of(pieces, opening.chunk_bytes)
        self._index = {piece: index for index, piece in enumerate(pieces)}
        self._arena = Path(opening.arena)
        self._tier = StorageTier(opening.directory, max_to_keep=opening.max_to_keep)

    def save(
        self, *, step: int, places: str, digests: list[str], items: dict[str, Any]
    ) -> int:
        """Writes one step and waits for it; returns the bytes of this slot's slices.

        Args:
            step: the step.
            places: in hex, the place of each chunk of this slot's own slices.
            digests: in hex, of each of the slot's slices in the layout's order.
            items: what is not an array.

        Raises:
            ValueError: the places are not in the arena, or do not match the digests.
        """
        # Mapped for each save: an agent may replace a file by one of another size.
        with open(self._arena, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = np.frombuffer(bytes.fromhex(places), np.uint8)
        num_places = len(memory) // max(self._chunks.nbytes, 1)
        if len(at) != self._chunks.num_chunks or (at >= num_places).any():
            raise ValueError(
                f"places={places:.40} are not places of the {self._chunks.num_chunks} "
                f"chunks of this slot: {self._arena} has at most {num_places} of each. "
                "Send one byte, as two hex digits, for each chunk."
            )
        whole, expected = memoryview(memory), from_hex(digests)
        arrays = self._arrays(whole, at)
        record = record_in(self._layout, items)
        if record is None:
            record, values = experiment_record(arrays, items)
        else:
            values = [_as_given(leaf, arrays[leaf.path]) for leaf in record.leaves]

        def check() -> None:
            self._check(whole, at, step, expected)

        self._tier.write(step, record, values, check)
        self._tier.wait_until_finished()
        return int(self._chunks.sizes.sum())

    def _check(
        self, memory: memoryview, places: np.ndarray, step: int, digests: list[bytes]
    ) -> None:
        copies = (
            (piece.key, self._chunks.parts(memory, places, index), expected)
            for (piece, index), expected in zip(
                self._index.items(), digests, strict=True
            )
        )
        refuse_corrupt(step, copies, self._chunks.chunk_bytes)

    def _arrays(self, memory: memoryview, places: np.ndarray) -> dict[str, jax.Array]:
        devices = self._mesh.devices
        arrays = {}
        for leaf in self._layout.leaves:
            spec = jax.sharding.PartitionSpec(*(axes or None for axes in leaf.spec))
            parts = []
            for position in self._positions:
                piece = slice_at(self._world.mesh, leaf, position)
                found = self._chunks.parts(memory, places, self._index[piece])
                parts.append(jax.device_put(_array(found, piece), devices[position]))
            arrays[leaf.path] = jax.make_array_from_single_device_arrays(
                leaf.shape,
                jax.sharding.NamedSharding(self._mesh, spec),
                parts,
                dtype=np.dtype(leaf.dtype),
            )
        return arrays


def _check(opening: Opening, world: ExportWorld, needed: int) -> None:
    if opening.world != len(world.slots):
        raise ValueError(
            f"world={opening.world} does not fit the layout: slots {world.slots} hold "
            f"every slice. Start {len(world.slots)} exporters."
        )
    if world.slots[opening.rank] != opening.slot:
        raise ValueError(
            f"slot={opening.slot} is not that of rank={opening.rank}. The slots in "
            f"rank order are {world.slots}."
        )
    if opening.devices < needed:
        raise ValueError(
            f"devices={opening.devices} is below the {needed} that slot {opening.slot} "
            f"has in the export mesh. Send devices={needed} or more."
        )


def _join(opening: Opening, layout: Layout) -> None:
    """Makes the CPU world; nothing may have touched a device before."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", opening.devices)
    wide = any(np.dtype(leaf.dtype).itemsize >= 8 for leaf in layout.leaves)
    jax.config.update("jax_enable_x64", wide)
    if opening.world == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        opening.coordinator,
        num_processes=opening.world,
        process_id=opening.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=5,
    )


def _mesh(world: ExportWorld, rank: int) -> jax.sharding.Mesh:
    by_process: dict[int, list[Any]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    if jax.process_index() != rank:
        raise RuntimeError(f"rank {rank} became JAX process {jax.process_index()}")
    free = {slot: iter(by_process[rank]) for rank, slot in enumerate(world.slots)}
    devices = np.array([next(free[slot]) for slot in world.mesh.slots], dtype=object)
    return jax.sharding.Mesh(
        devices.reshape(world.mesh.axis_sizes), world.mesh.axis_names
    )


def _as_given(leaf: LeafRecord, array: jax.Array) -> Any:
    """A leaf as the user gave it to `save`."""
    if leaf.kind == "array":
        return array
    if leaf.kind == "key":
        return jax.random.wrap_key_data(array, impl=leaf.impl)
    whole = np.asarray(array, np.dtype(leaf.dtype))
    return whole.item() if leaf.kind in ("bool", "int", "float") else whole


def _array(parts: Parts, piece: Slice) -> np.ndarray:
    """A slice as an array: a view on the arena, unless it lies there in pieces."""
    dtype = np.dtype(piece.dtype)
    if not piece.nbytes:
        return np.zeros(piece.shape, dtype)
    return np.frombuffer(parts.whole(), np.uint8).view(dtype).reshape(piece.shape)


if __name__ == "__main__":
    serve(lambda fields: ArenaExporter(Opening(**fields)))
