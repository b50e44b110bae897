"""Which slots copy which of their slices at a commit, when the work is divided.

A slice that d slots own needs only `copies` of them to copy it. Who does rotates from
commit to commit, so that each of them does copies/d of the work, and the bytes of all
are compared within ceil(d / copies) commits. Slices with too few owners are copied by
all of them, and pushed, as ever. Pure and deterministic, so that every host computes
the same. Must not know hosts, who is alive, or how bytes travel.
"""

import functools
from collections.abc import Sequence

import numpy as np

from dtft.checkpoint.partition import leaves_by_spec, nbytes_of, partition_of
from dtft.checkpoint.placement import interleaved
from dtft.checkpoint.slices import Layout


class Shares:
    """The shares of every slot of a layout, turn by turn.

    >>> from dtft.checkpoint.slices import Leaf, MeshLayout
    >>> mesh = MeshLayout(axis_names=("replica",), axis_sizes=(3,), slots=(0, 1, 2))
    >>> layout = Layout(mesh=mesh, leaves=(Leaf(path="w", shape=(4,), dtype="int8"),))
    >>> shares = Shares(layout, copies=2)
    >>> [[bool(shares.of(slot, turn)[0]) for slot in range(3)] for turn in range(3)]
    [[True, True, False], [True, False, True], [False, True, True]]
    """

    def __init__(
        self, layout: Layout, copies: int, domains: Sequence[str] | None = None
    ) -> None:
        """Decides in which order the owners of each slice take turns.

        Args:
            layout: mesh and leaves.
            copies: failure domains that every slice shall be in.
            domains: per slot the name of what fails together, as in `place`.

        Raises:
            ValueError: `domains` does not fit the layout.
        """
        num_slots = layout.mesh.num_slots
        self._domains = [str(slot) for slot in range(num_slots)]
        if domains is not None:
            self._domains = list(domains)
        if len(self._domains) != num_slots:
            raise ValueError(
                f"domains has {len(self._domains)} entries, but the layout has "
                f"{num_slots} slots: give one domain per slot."
            )
        self.layout, self._copies = layout, copies
        self._wanted = min(copies, len(set(self._domains)))
        self._rank = {slot: at for at, slot in enumerate(interleaved(self._domains))}
        self._begins = _begins(layout)

    def of(self, slot: int, turn: int) -> np.ndarray:
        """[slices of the slot] bool: whether it copies each of them at this turn.

        A slice without bytes costs nothing and is copied by all.
        """
        slices, turns = self.layout.slices(slot), self._turns(slot)
        return np.array(
            [
                not piece.nbytes
                or slot
                in self._copiers(owners, (begin + turn * self._copies) % len(owners))
                for piece, (owners, begin) in zip(slices, turns, strict=True)
            ],
            bool,
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the host's layout)
    def _turns(self, slot: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For every slice of a slot its owners, in turn, and who of them begins."""
        found = {}
        for spec, leaves in leaves_by_spec(self.layout).items():
            partition = partition_of(self.layout.mesh, spec)
            parts, slots = partition.owned
            for part in parts[slots == slot].tolist():
                owners = tuple(
                    sorted(partition.owners[part], key=self._rank.__getitem__)
                )
                for leaf in leaves:
                    piece = partition.slice_of(self.layout.leaves[leaf], part)
                    found[piece] = owners, self._begins[leaf] + part
        return tuple(found[piece] for piece in self.layout.slices(slot))

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _copiers(self, owners: tuple[int, ...], begin: int) -> frozenset[int]:
        """The first owners from `begin` on, round and round, in enough domains."""
        chosen: list[int] = []
        domains: set[str] = set()
        for slot in owners[begin:] + owners[:begin]:
            if len(chosen) >= self._copies and len(domains) >= self._wanted:
                break
            chosen.append(slot)
            domains.add(self._domains[slot])
        return frozenset(chosen)


def _begins(layout: Layout) -> list[int]:
    """Per leaf a number that says who begins: as many bytes begin with each owner."""
    begins = [0] * len(layout.leaves)
    loads: dict[int, list[int]] = {}
    for spec, leaves in leaves_by_spec(layout).items():
        partition = partition_of(layout.mesh, spec)
        count = max(map(len, partition.owners))
        load = loads.setdefault(count, [0] * count)
        sizes = {leaf: nbytes_of(layout.leaves[leaf]) for leaf in leaves}
        for leaf in sorted(leaves, key=lambda leaf: -sizes[leaf]):
            begins[leaf] = load.index(min(load))
            load[begins[leaf]] += sizes[leaf] // partition.num_parts
    return begins
