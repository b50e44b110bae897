"""Who sends what to whom, so that every host has its slices of any new layout.

Identity is the slice: (leaf path, global index range, dtype). Where a needed slice is
not one that was committed, it is assembled from the committed slices that it overlaps.
The order of devices, the mesh, its axes and the number of hosts may all have changed.
Pure and deterministic; decided once per way of being divided, so it takes a second or
two at 10,000 hosts. Must not know addresses, digests or how bytes travel.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.commit import Commit
from dtft.checkpoint.inventory import Inventory, check_slots
from dtft.checkpoint.needs import Lost, Wanted, find_needs
from dtft.checkpoint.overlap import Bundle, Region
from dtft.checkpoint.routes import Routes, route
from dtft.checkpoint.slices import Layout

MIN_GRAIN = 64 * 1024
"""A piece of a slice of at most this many bytes is not cut further."""
GRAINS = 64
"""Pieces above this fraction of a sender's even load may be cut to even it out."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one host fetches from another."""

    source: str
    target: str
    regions: tuple[Region, ...]
    """In the order of the target's leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(region.moved.nbytes for region in self.regions)


@dataclass(frozen=True, eq=False, kw_only=True)
class RestorePlan:
    """Every needed byte exactly once: in own memory, or in one transfer.

    Kept as numbers; a host's regions are made when it is asked for. Leaves without
    elements have nothing to move and appear nowhere.
    """

    step: int
    hosts: tuple[str, ...]
    """Everyone concerned, ascending."""
    bundles: tuple[Bundle, ...]
    own_cells: Wanted
    """What targets hold themselves."""
    absent_cells: Wanted
    """What targets lack."""
    routes: Routes
    """Where that comes from; sorted by target, then source."""

    def own(self, host: str) -> tuple[Region, ...]:
        """What a host takes from its own memory."""
        at, wanted = self._at(host), self.own_cells
        rows = np.flatnonzero(wanted.target == at)
        return _ordered(
            region
            for bundle, cell in zip(wanted.bundle[rows], wanted.cell[rows], strict=True)
            for region in self.bundles[bundle].regions(
                cell, 0, int(self.bundles[bundle].nbytes[cell])
            )
        )

    def transfers_to(self, host: str) -> tuple[Transfer, ...]:
        """What a host fetches, by source."""
        at = self._at(host)
        first, last = np.searchsorted(self._targets, [at, at + 1])
        found: dict[int, list[Region]] = {}
        for index in range(first, last):
            found.setdefault(int(self.routes.source[index]), []).extend(
                self._regions(index)
            )
        return tuple(
            Transfer(source=self.hosts[source], target=host, regions=_ordered(regions))
            for source, regions in sorted(found.items())
        )

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, by target, then source; at most one for each pair."""
        targets = [self.hosts[at] for at in np.unique(self._targets)]
        return tuple(found for host in targets for found in self.transfers_to(host))

    @functools.cached_property
    def sent(self) -> Mapping[str, int]:
        """Host to the bytes that it sends to others; who sends nothing is absent."""
        sent = np.zeros(len(self.hosts), np.int64)
        np.add.at(sent, self.routes.source, self.routes.stop - self.routes.start)
        return {self.hosts[at]: int(sent[at]) for at in np.flatnonzero(sent)}

    @functools.cached_property
    def _targets(self) -> np.ndarray:
        return self.absent_cells.target[self.routes.need]

    def _at(self, host: str) -> int:
        if host not in self._index:
            raise ValueError(
                f"host={host!r} is not in this plan. Allowed: {self.hosts[:4]} ..."
            )
        return self._index[host]

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {host: index for index, host in enumerate(self.hosts)}

    def _regions(self, index: int) -> Iterator[Region]:
        need = self.routes.need[index]
        return self.bundles[self.absent_cells.bundle[need]].regions(
            int(self.absent_cells.cell[need]),
            int(self.routes.start[index]),
            int(self.routes.stop[index]),
        )


def plan_restore(
    commit: Commit,
    holdings: Inventory,
    new_layout: Layout,
    *,
    slots: Sequence[str],
    alive: Collection[str],
    domains: Mapping[str, str] | None = None,
) -> RestorePlan | Lost:
    """Plans all transfers of a restore onto any layout.

    A host uses its own memory first. The rest is shared evenly over the hosts that hold
    it, several at once, near ones first as far as no sender has more than 1.2 times its
    share for it.

    Args:
        commit: what is restored.
        holdings: verified holders of the commit's slices, in the layout of the commit.
        new_layout: what is needed; its leaves must be those of the commit, or some.
        slots: the host of each slot of the new layout.
        alive: hosts that can send. All in `slots` are taken to be alive.
        domains: host to its failure domain, "power/rack"; hosts not named are near to
            nobody.

    Returns:
        The plan, or what no live host holds.

    Raises:
        ValueError: the arguments do not fit together, or a leaf is not the commit's.
    """
    if commit.layout != holdings.layout.digest:
        raise ValueError(
            f"holdings are of layout {holdings.layout.digest}, but step {commit.step} "
            f"was committed in layout {commit.layout}. Give the commit's own layout."
        )
    check_slots(new_layout, slots)
    hosts = tuple(sorted({*holdings.hosts, *slots}))
    found = find_needs(holdings, new_layout, hosts, slots, {*alive, *slots})
    if isinstance(found, Lost):
        return found
    grain = MIN_GRAIN
    if len(found.needs.target):
        senders = len(np.unique(np.concatenate(found.needs.senders)))
        grain = max(grain, int(found.needs.nbytes.sum()) // (senders * GRAINS))
        routes = route(found.needs, _numbered(hosts, domains or {}))
    else:
        nothing = np.zeros(0, np.int64)
        routes = Routes(need=nothing, source=nothing, start=nothing, stop=nothing)
    return RestorePlan(
        step=commit.step,
        hosts=hosts,
        bundles=found.bundles,
        own_cells=found.own,
        absent_cells=found.absent,
        routes=_cut(routes, found.absent, found.bundles, grain),
    )


def _cut(
    routes: Routes, absent: Wanted, bundles: Sequence[Bundle], grain: int
) -> Routes:
    """The routes with ends where cells can be cut, by target, then source."""
    start, stop = routes.start.copy(), routes.stop.copy()
    bundle, cell = absent.bundle[routes.need], absent.cell[routes.need]
    for index, one in enumerate(bundles):
        for offset in (start, stop):
            inside = (offset > 0) & (offset < absent.nbytes[routes.need])
            rows = np.flatnonzero(inside & (bundle == index))
            offset[rows] = one.cut(cell[rows], offset[rows], grain)
    order = np.lexsort((routes.need, routes.source, absent.target[routes.need]))
    order = order[start[order] < stop[order]]
    return Routes(
        need=routes.need[order],
        source=routes.source[order],
        start=start[order],
        stop=stop[order],
    )


def _numbered(hosts: Sequence[str], domains: Mapping[str, str]) -> np.ndarray:
    """[hosts, levels]: a number for each domain at each level, widest first."""
    # A host without a domain is one of its own, whose name no domain can have.
    names = [domains.get(host, f"\0{host}").split("/") for host in hosts]
    num_levels = max(len(name) for name in names) if domains else 0
    numbers = np.zeros((len(hosts), num_levels), np.int64)
    for level in range(num_levels):
        known: dict[tuple[str, ...], int] = {}
        for row, name in zip(numbers, names, strict=True):
            row[level] = known.setdefault(tuple(name[: level + 1]), len(known))
    return numbers


def _ordered(regions: Iterator[Region] | list[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda region: region.moved.key))
