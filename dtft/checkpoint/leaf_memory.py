"""This process's memory for leaves: several places for each, taken when needed.

Place p of a leaf is where it lies in the p-th of several extents that are laid out
alike. Steps that have a leaf in common refer to one place (`pool.py` counts them), so a
leaf that does not change needs no more memory than one. Must not know steps, digests or
what a leaf is.
"""

import os
import secrets

import numpy as np

from dtft.checkpoint.arena import Arena
from dtft.checkpoint.chunks import ABSENT
from dtft.checkpoint.pool import PlacePool
from dtft.checkpoint.slices import Slice, offsets_of

MOST_PLACES = ABSENT - 1


class Extent:
    """Memory for every leaf once, shared with the exporter by `path`."""

    def __init__(self, nbytes: int) -> None:
        """Reserves it.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
        """
        name = f"dtft-{os.getpid()}-{secrets.token_hex(4)}"
        self.arena = Arena.create(name, max(nbytes, 1))
        try:
            self._descriptor = os.open(self.arena.path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            self.arena.unlink()
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Gives the memory back."""
        self.arena.close()
        os.close(self._descriptor)


class LeafMemory:
    """The places of the leaves of one layout. Not thread-safe.

    >>> leaf = Slice(path="w", start=(0,), stop=(4,), dtype="uint8")
    >>> memory = LeafMemory((leaf,))
    >>> one, other = memory.acquire(), memory.acquire()
    >>> one.tolist(), other.tolist(), len(memory.paths)
    ([0], [1], 2)
    >>> memory.pool.release(one)
    >>> memory.acquire().tolist(), len(memory.view(0, 0))
    ([0], 4)
    >>> memory.close()
    """

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        """Reserves nothing yet; each of `slices` is a whole leaf."""
        self.slices = slices
        self._offsets, self._nbytes = offsets_of(slices)
        self.pool = PlacePool(len(slices), MOST_PLACES)
        self._extents: dict[int, Extent] = {}

    def acquire(self) -> np.ndarray:
        """[leaves] uint8: a free place of each leaf, the lowest, referred to once.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
            RuntimeError: all places of a leaf are in use.
        """
        places = self.pool.acquire(np.arange(len(self.slices)))
        if places is None:
            raise RuntimeError(f"all {MOST_PLACES} places of a leaf are in use")
        try:
            for place in sorted({0, *places.tolist()} - set(self._extents)):
                self._extents[place] = Extent(self._nbytes)
        except BaseException:
            self.pool.release(places)
            raise
        return places

    def view(self, place: int, index: int) -> memoryview:
        """The bytes of one leaf at one of its places."""
        arena = self._extents[place].arena
        return arena.view(self._offsets[index], self.slices[index].nbytes)

    @property
    def paths(self) -> dict[int, str]:
        """Of each extent in use its path, which the exporter opens."""
        return {place: extent.path for place, extent in self._extents.items()}

    def trim(self) -> bool:
        """Gives back what nobody refers to; whether that is all of it."""
        free = self.pool.free_places
        for place in [place for place in self._extents if free[place]]:
            self._extents.pop(place).close()
        return not self._extents

    def close(self) -> None:
        """Gives all of it back."""
        for extent in self._extents.values():
            extent.close()
        self._extents.clear()
