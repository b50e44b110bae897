"""Which places of which chunks are in use, by reference count.

Every chunk has the same number of places. A version refers to one place of each of its
chunks; versions that share a chunk refer to the same place, which is free again when
the last of them has gone. Vectorised: a version of 10^5 chunks costs little. Must not
know memory, slices or steps. Not thread-safe.
"""

import numpy as np

from dtft.checkpoint.chunks import ABSENT


class PlacePool:
    """Reference counts of places.

    >>> pool = PlacePool(num_chunks=2, num_places=2)
    >>> first = pool.acquire(np.array([0, 1]))
    >>> second = pool.acquire(np.array([1]))
    >>> first.tolist(), second.tolist(), pool.acquire(np.array([1]))
    ([0, 0], [255, 1], None)
    >>> pool.release(first)
    >>> pool.free_places.tolist()
    [True, False]
    """

    def __init__(self, num_chunks: int, num_places: int) -> None:
        """Starts with every place free."""
        if num_chunks < 0 or not 1 <= num_places < ABSENT:
            raise ValueError(
                f"num_chunks={num_chunks}, num_places={num_places}. Allowed: 0 or more "
                f"chunks with 1 to {ABSENT - 1} places. Change the one that is not."
            )
        self.num_places = num_places
        self._counts = np.zeros((num_places, num_chunks), np.uint16)

    @property
    def free_places(self) -> np.ndarray:
        """[places] bool: whether no chunk is there."""
        return (self._counts == 0).all(axis=1)

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """A free place of each of some chunks, now referred to once.

        Args:
            numbers: the numbers of the chunks, each at most once.

        Returns:
            [chunks] uint8, absent for the other chunks; None, and nothing is taken, if
            one of them has no free place.
        """
        free = self._counts[:, numbers] == 0
        if not free.any(axis=0).all():
            return None
        places = self.absent()
        places[numbers] = free.argmax(axis=0)
        self._counts[places[numbers], numbers] = 1
        return places

    def absent(self) -> np.ndarray:
        """[chunks] uint8: a version that has no chunk."""
        return np.full(self._counts.shape[1], ABSENT, np.uint8)

    def retain(self, places: np.ndarray) -> None:
        """One more reference to the place of each chunk that is not absent."""
        self._counts[self._in_use(places)] += 1

    def release(self, places: np.ndarray) -> None:
        """One reference less; a place that nobody refers to is free."""
        self._counts[self._in_use(places)] -= 1

    def _in_use(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.flatnonzero(places != ABSENT)
        at = places[numbers], numbers
        if numbers.size and not self._counts[at].all():
            wrong = int(numbers[self._counts[at] == 0][0])
            raise ValueError(
                f"places has place {places[wrong]} for chunk {wrong}, which is free. "
                "Acquire it first, and release it once per acquire or retain."
            )
        return at
