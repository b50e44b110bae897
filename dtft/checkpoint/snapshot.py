"""Copies a step's slices from devices into an arena, and back.

Runs in the trainer, at a step boundary: every array must be ready, and the next step
(which donates the buffers) must not have been dispatched. Knows JAX and memory; must
not know steps, agents, peers or commits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtft.checkpoint import digest
from dtft.checkpoint.host_bytes import host_bytes
from dtft.checkpoint.slices import Layout, Slice, offsets_of

_ALIGNMENT = 64
"""Of the memory of XLA's CPU arrays, in bytes."""


class CorruptCopy(RuntimeError):
    """A copy in this host's memory does not match its digest; it was not loaded."""


class SnapshotPlan:
    """Where each slice of a slot is on the devices and in an extent.

    Built once per layout; `write` then only copies.
    """

    def __init__(self, layout: Layout, slot: int, chunk_bytes: int) -> None:
        """Lays the slices of `slot` side by side, in the layout's order."""
        self.slices: tuple[Slice, ...] = layout.slices(slot)
        self.offsets, self.nbytes = offsets_of(self.slices)
        self._chunk_bytes = chunk_bytes

    def write(
        self, arrays: Mapping[str, jax.Array | np.ndarray], extent: memoryview
    ) -> list[bytes]:
        """Copies every slice into `extent`.

        Args:
            arrays: leaf path to global array, all ready; or to a numpy array of which
                every process has all.
            extent: at least `nbytes` bytes of an arena.

        Returns:
            One digest string per slice (16 bytes per chunk), in slice order.
        """
        digests = []
        for piece, offset in zip(self.slices, self.offsets, strict=True):
            target = extent[offset : offset + piece.nbytes]
            source = _bytes_of(arrays[piece.path], piece)
            digests.append(digest.copy_and_digest(source, target, self._chunk_bytes))
        return digests

    def read(
        self,
        extent: memoryview,
        digests: Sequence[bytes],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Any]:
        """Builds the global arrays from an extent, checking every digest.

        A leaf whose struct has no sharding becomes a numpy array.

        Raises:
            CorruptCopy: names the first slice whose bytes do not match.
        """
        copies: dict[str, dict[tuple, np.ndarray]] = {}
        parts = zip(self.slices, self.offsets, digests, strict=True)
        for piece, offset, expected in parts:
            raw = extent[offset : offset + piece.nbytes]
            copy = _aligned(piece.nbytes)
            if digest.copy_and_digest(raw, copy.data, self._chunk_bytes) != expected:
                raise CorruptCopy(
                    f"slice {piece.key} does not match its digest: the copy in this "
                    "host's memory is corrupt and was not loaded."
                )
            value = copy.view(np.dtype(piece.dtype)).reshape(piece.shape)
            copies.setdefault(piece.path, {})[(piece.start, piece.stop)] = value
        return {
            path: _global_array(struct, copies[path])
            for path, struct in abstract.items()
        }


def _bounds(
    index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)


def _bytes_of(array: jax.Array | np.ndarray, piece: Slice) -> memoryview:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return host_bytes(_shard_of(array, piece))


def _shard_of(array: jax.Array, piece: Slice) -> jax.Array:
    for shard in array.addressable_shards:
        if _bounds(shard.index, array.shape) == (piece.start, piece.stop):
            return shard.data
    raise ValueError(
        f"slice {piece.key} is not on this host's devices: the state's sharding "
        f"{array.sharding} differs from the layout that was announced."
    )


def _aligned(nbytes: int) -> np.ndarray:
    """New memory that a CPU device takes over as it is, without copying it again."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


def _global_array(
    struct: jax.ShapeDtypeStruct, copies: Mapping[tuple, np.ndarray]
) -> jax.Array | np.ndarray:
    sharding = struct.sharding
    if sharding is None:
        (whole,) = copies.values()
        return whole
    indices = sharding.addressable_devices_indices_map(struct.shape)
    parts = [
        jax.device_put(copies[_bounds(index, struct.shape)], device)
        for device, index in indices.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, parts)
