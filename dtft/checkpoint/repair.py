"""Copies that really exist, and what restores their number after a loss.

Decides from verified holdings alone: a data-parallel copy that was not verified does
not count. A job is healthy when nothing is left to push. Pure and deterministic. Must
not know steps, addresses or how bytes travel.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dtft.checkpoint.inventory import HeldLeaves, Inventory
from dtft.checkpoint.partition import Partition, nbytes_of, partition_of
from dtft.checkpoint.slices import Slice


@dataclass(frozen=True, kw_only=True)
class HostPush:
    """Slices of a commit that one host sends to another, to be kept there."""

    source: str
    target: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """All slices of a table at one part, from one host to another."""

    source: str
    target: str
    table: int
    part: int


@dataclass(frozen=True, kw_only=True)
class Repair:
    """How many copies there are, and the pushes that bring them up."""

    holdings: Inventory = field(repr=False)
    wanted: int
    """min(copies, live failure domains): what every slice shall have."""
    slices_with: Mapping[int, int]
    """Number of live failure domains to the number of slices that are in so many."""
    rows: tuple[Row, ...] = field(repr=False)
    """The pushes in compact form, in the order in which they were decided."""

    @property
    def effective_copies(self) -> int:
        """Live failure domains that every slice is in now, at least."""
        return min(self.slices_with, default=self.wanted)

    @property
    def lost(self) -> int:
        """Slices of which no copy is left."""
        return self.slices_with.get(0, 0)

    @property
    def healthy(self) -> bool:
        """Every slice has the copies it shall have."""
        return self.effective_copies >= self.wanted

    @functools.cached_property
    def pushes(self) -> tuple[HostPush, ...]:
        """By source, then target; at most one for each pair."""
        routes: dict[tuple[str, str], list[Slice]] = {}
        for row in self.rows:
            routes.setdefault((row.source, row.target), []).extend(self._slices(row))
        return tuple(
            HostPush(source=source, target=target, slices=tuple(pieces))
            for (source, target), pieces in sorted(routes.items(), key=lambda r: r[0])
        )

    def _slices(self, row: Row) -> Iterator[Slice]:
        layout, table = self.holdings.layout, self.holdings.tables[row.table]
        partition = partition_of(layout.mesh, table.spec)
        for leaf in table.leaves:
            yield partition.slice_of(layout.leaves[leaf], row.part)


def re_replication(
    holdings: Inventory,
    *,
    alive: Collection[str],
    copies: int,
    domains: Mapping[str, str] | None = None,
) -> Repair:
    """Counts the copies on live hosts and chooses the pushes that are missing.

    Each new copy goes to a domain that has none yet, to the host that was given least
    so far and, among those, holds least; it comes from the holder that sends least.

    Args:
        holdings: verified holders of every slice of a commit.
        alive: hosts that can hold and send, spares included.
        copies: failure domains that every slice shall be in.
        domains: host to its failure domain; hosts not named are each their own.

    Raises:
        ValueError: `copies` is below 1.
    """
    if copies < 1:
        raise ValueError(
            f"copies={copies} is below 1. Set copies; 2 survives the loss of any host."
        )
    chooser = _Chooser(holdings, sorted(alive), copies, domains or {})
    counts: dict[int, int] = {}
    rows: list[Row] = []
    for index, table in enumerate(holdings.tables):
        size = chooser.size(table)
        for part, holders in enumerate(table.holders):
            living = chooser.living(holders)
            count = chooser.count(living)
            # A slice without elements is never lost: it can be made from nothing.
            if living or size:
                counts[count] = counts.get(count, 0) + len(table.leaves)
            if living and count < chooser.wanted:
                pairs = chooser.choose(living, chooser.wanted - count, size)
                rows += [
                    Row(source=source, target=target, table=index, part=part)
                    for source, target in pairs
                ]
    return Repair(
        holdings=holdings,
        wanted=chooser.wanted,
        slices_with=dict(sorted(counts.items())),
        rows=tuple(rows),
    )


class _Chooser:
    """Who gets and who sends, given what was decided so far."""

    def __init__(
        self,
        holdings: Inventory,
        alive: list[str],
        copies: int,
        domains: Mapping[str, str],
    ) -> None:
        self._holdings, self._alive = holdings, alive
        known: dict[str, int] = {}
        # A host without a domain is one of its own, whose name no domain can have.
        names = [domains.get(host, f"\0{host}") for host in alive]
        self._domain = np.array([known.setdefault(n, len(known)) for n in names], int)
        self.wanted = min(copies, len(known))
        at = {host: index for index, host in enumerate(alive)}
        self._at = [at.get(host, -1) for host in holdings.hosts]
        self._domain_list = self._domain.tolist()
        self._sent = np.zeros(len(alive), np.int64)
        self._given = np.zeros(len(alive), np.int64)
        self._partitions: dict[int, Partition] = {}

    def size(self, table: HeldLeaves) -> int:
        """Bytes of one part of all leaves of a table."""
        layout = self._holdings.layout
        num_parts = len(table.holders)
        return sum(nbytes_of(layout.leaves[leaf]) // num_parts for leaf in table.leaves)

    def living(self, holders: tuple[int, ...]) -> list[int]:
        """Live holders, as positions among the live hosts."""
        return [at for holder in holders if (at := self._at[holder]) >= 0]

    def count(self, living: list[int]) -> int:
        """Domains that they are in."""
        return len({self._domain_list[at] for at in living})

    def choose(
        self, living: list[int], missing: int, size: int
    ) -> Iterator[tuple[str, str]]:
        """(source, target) of each missing copy."""
        free = ~np.isin(self._domain, self._domain[living])
        for _ in range(missing):
            source = min(living, key=lambda at: (self._sent[at], at))
            able = np.flatnonzero(free)
            least = able[self._given[able] == self._given[able].min()]
            target = int(least[self._held[least].argmin()])
            self._sent[source] += size
            self._given[target] += size
            free &= self._domain != self._domain[target]
            yield self._alive[source], self._alive[target]

    @functools.cached_property
    def _held(self) -> np.ndarray:
        """[hosts] int64: bytes that each live host holds already."""
        held = np.zeros(len(self._alive) + 1, np.int64)
        at = np.array(self._at, np.int64)
        for table in self._holdings.tables:
            holders = [np.array(found, np.int64) for found in table.holders]
            # The dead are counted at the end, which nobody reads.
            np.add.at(held, at[np.concatenate(holders)], self.size(table))
        return held[:-1]
