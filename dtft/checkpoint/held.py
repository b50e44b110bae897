"""Which copies one host has of a step, own and peers' together, and which are right.

Looks through both kinds of shelves: for what can be sent, what a check finds, and what
a restore can take from here. Must not know who asks, who is alive, nor what is
committed. Not thread-safe.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dtft.checkpoint.owning import Owning
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.receiving import Hosting
from dtft.checkpoint.shelf import Copy, Read, Shelf
from dtft.checkpoint.slices import Slice


class Held:
    """All copies on one host."""

    def __init__(self, own: Owning, hosting: Hosting) -> None:
        """Looks at both whenever it is asked."""
        self._own, self._hosting = own, hosting

    def steps(self) -> tuple[int, ...]:
        """The steps of which something is held, ascending."""
        return tuple(sorted({*self._own.copies, *self._hosting.copies}))

    def items(self, step: int) -> dict[str, Any]:
        """The items (data position and so on) that came with the copies of `step`."""
        found = self._own.items.get(step)
        return self._hosting.items[step] if found is None else found

    def _copies(self, step: int) -> Iterator[tuple[Shelf, Copy]]:
        if step in self._own.copies:
            yield self._own.shelf, self._own.copies[step]
        for source, copy in self._hosting.copies.get(step, {}).items():
            yield self._hosting.shelves[source], copy

    def listed(self, step: int) -> list[tuple[str, Parts, bytes]]:
        """Slice key, bytes and recorded digest of every copy of `step`, not read."""
        return [
            (piece.key, parts, digests)
            for shelf, copy in self._copies(step)
            for piece, parts, digests in shelf.held(copy)
        ]

    def sendable(self, step: int) -> dict[str, Parts]:
        """Every slice of `step` that peers can have, pinned ones too; reads nothing."""
        found = {key: parts for key, parts, _ in self.listed(step)}
        for pinned, copy in self._own.pins.values():
            if pinned == step:
                for piece, parts, _ in self._own.shelf.held(copy):
                    found.setdefault(piece.key, parts)
        return found

    # --------------------------------------------------------------- verified

    def recorded(self) -> dict[int, dict[str, bytes]]:
        """step -> slice key -> digest of every copy, as when it was last verified.

        Copies for peers that are known to be wrong are forgotten.
        """
        self._hosting.forget_rotten()
        copies = {
            step: {key: digests for key, _, digests in self.listed(step)}
            for step in self.steps()
        }
        return {step: found for step, found in copies.items() if found}

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, digests: Mapping[str, bytes], items: dict, read: bool
    ) -> list[Slice]:
        """Begins an own copy of `step` with every byte of it that is here and right.

        Returns:
            The own slices that must be fetched; see `Holder.begin_restore`.
        """
        own_slices = self._own.shelf.chunks.slices
        expected = [digests.get(piece.key) for piece in own_slices]
        lacking = self._own.begin_restore(step, expected, items, read)
        hosted = self._hosted_right(step) if lacking else {}
        missing = []
        for index in lacking:
            piece, good = own_slices[index], expected[index]
            found = None if good is None else hosted.get((piece.key, good))
            if good is None or found is None:
                missing.append(piece)
            else:
                self._own.fill(step, index, found, good)
        return missing

    def _hosted_right(self, step: int) -> dict[tuple[str, bytes], Parts]:
        """Verified hosted slices: a spare that hosted one before may own it now."""
        found = {}
        for source, copy in self._hosting.copies.get(step, {}).items():
            shelf, read = self._hosting.shelves[source], Read()
            for piece, parts, digests in shelf.held(copy):
                mine = piece in self._own.shelf.index
                if mine and shelf.right(copy, shelf.index[piece], read):
                    found[piece.key, digests] = parts
        return found
