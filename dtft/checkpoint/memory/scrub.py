"""Reads one host's chunks again, one by one, and remembers which are wrong.

A chunk that never changes is kept by reference and never written or sent again, so
nothing else would find a bit that rots in it before the copy is needed. What is found
wrong is given to nobody any more; the next step writes it anew, and a peer is asked to
send it again.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from dtft.checkpoint.memory.chunk_pool import Copy, Shelf
from dtft.checkpoint.memory.incoming import Hosting
from dtft.checkpoint.memory.own_copies import Owning
from dtft.checkpoint.state import ABSENT, DIGEST_BYTES, chunk_digests

Kept = dict[tuple[int, bytes], list[int]]
"""(place, right digest) of one chunk to the steps that have it there."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What came of reading one chunk wherever it is kept."""

    nbytes: int
    """Bytes read."""
    wrong: tuple[str, ...]
    """A description of each copy that was found wrong just now."""


class Scrub:
    """All chunks of one holder, numbered from 0. Thread-safe.

    Takes no lock while it reads: only what seems wrong is read again under it.
    """

    def __init__(self, own: Owning, hosting: Hosting, lock: threading.RLock) -> None:
        """Has read nothing; `lock` is the holder's."""
        self._own, self._hosting, self._lock = own, hosting, lock
        self._shelves: list[tuple[int | None, Shelf]] = [
            (None, own.shelf),
            *hosting.shelves.items(),
        ]

    @property
    def num_chunks(self) -> int:
        """How many chunks there are, in whatever places."""
        return sum(shelf.chunks.num_chunks for _, shelf in self._shelves)

    def known(self) -> list[str]:
        """What was found wrong and is still there, as "step 12: KEY"."""
        with self._lock:
            found = {
                (step, shelf.chunks.slices[index].key)
                for source, shelf in self._shelves
                if shelf.rotten
                for step, copy in self._copies(source)
                for index in shelf.chunks.owners_of(shelf.rotten_in(copy))
            }
        return [f"step {step}: {key}" for step, key in sorted(found)]

    def look(self, number: int) -> Look:
        """Reads a chunk in every place in which some copy has it.

        Raises:
            IndexError: there are not so many chunks.
            ValueError: the memory was given up.
        """
        for source, shelf in self._shelves:
            if number < shelf.chunks.num_chunks:
                return self._look(source, shelf, number)
            number -= shelf.chunks.num_chunks
        raise IndexError("there are not so many chunks")

    def _look(self, source: int | None, shelf: Shelf, number: int) -> Look:
        with self._lock:
            kept = self._kept(source, shelf, number)
        wrong = []
        for place, good in kept:
            if not _is_right(shelf, place, number, good):
                wrong += self._confirmed(source, shelf, number, (place, good))
        nbytes = len(kept) * int(shelf.chunks.sizes[number])
        return Look(nbytes=nbytes, wrong=tuple(wrong))

    def _confirmed(
        self, source: int | None, shelf: Shelf, number: int, at: tuple[int, bytes]
    ) -> list[str]:
        """Marks what is wrong, unless the place was given to others meanwhile."""
        with self._lock:
            steps = self._kept(source, shelf, number).get(at)
            if steps is None or _is_right(shelf, at[0], number, at[1]):
                return []
            shelf.rotten.add((at[0], number))
        (index,) = shelf.chunks.owners_of([number])
        whose = "own copy" if source is None else f"copy for slot {source}"
        names = ", ".join(map(str, sorted(set(steps))))
        return [f"{whose}, step {names}: {shelf.chunks.slices[index].key}"]

    def _kept(self, source: int | None, shelf: Shelf, number: int) -> Kept:
        """Where a chunk lies that is not known to be wrong, and what it should be."""
        (index,) = shelf.chunks.owners_of([number])
        start = (number - int(shelf.chunks.first[index])) * DIGEST_BYTES
        kept: Kept = {}
        for step, copy in self._copies(source):
            place = int(copy.places[number])
            good = copy.digests[index][start : start + DIGEST_BYTES]
            if good and place != ABSENT and (place, number) not in shelf.rotten:
                kept.setdefault((place, good), []).append(step)
        return kept

    def _copies(self, source: int | None) -> Iterator[tuple[int, Copy]]:
        if source is None:
            yield from self._own.copies.items()
            yield from self._own.pins.values()
            return
        for step, copies in self._hosting.copies.items():
            if source in copies:
                yield step, copies[source]


def _is_right(shelf: Shelf, place: int, number: int, good: bytes) -> bool:
    memory = shelf.at(place, number)
    return chunk_digests(memory, shelf.chunks.chunk_bytes) == good
