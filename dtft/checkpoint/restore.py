"""Who sends what to whom, so that every host has its slices of any layout.

The one planner of restores: after a loss, onto another mesh, and for exports. Identity
is the slice: (leaf path, global index range, dtype). A slice that is also one of the
wanted layout moves whole, unless it is so large that several senders share it; another
one is assembled from the committed slices that it overlaps. The order of devices, the
mesh, its axes and the number of hosts may all have changed. Pure and deterministic;
decided once per way of being divided, so it takes a second or two at 10,000 hosts.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.inventory import Inventory, check_slots
from dtft.checkpoint.needs import Lost, Wanted, find_needs
from dtft.checkpoint.overlap import Bundle, Region
from dtft.checkpoint.routes import Routes, route
from dtft.checkpoint.slices import Layout

WHOLE_BYTES = 64 << 20
"""A piece of a slice of at most this many bytes is not cut between senders. Whoever
sends a part of it sends the whole chunks around that part (4 MiB each by default)."""
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
        wanted, rows = self.own_cells, self._own_rows(host)
        return _ordered(
            region
            for bundle, cell in zip(wanted.bundle[rows], wanted.cell[rows], strict=True)
            for region in self.bundles[bundle].regions(
                cell, 0, int(self.bundles[bundle].nbytes[cell])
            )
        )

    def read_by(self, host: str) -> list[str]:
        """Keys of the committed slices that a host's slices are made of."""
        fetched = (it for one in self.transfers_to(host) for it in one.regions)
        return sorted({region.old.key for region in (*self.own(host), *fetched)})

    def moves_whole(self, host: str) -> bool:
        """Every slice of a host is a committed one, and comes from one place."""
        own = np.unique(self.own_cells.bundle[self._own_rows(host)])
        fetched = (it for one in self.transfers_to(host) for it in one.regions)
        return all(self.bundles[index].unchanged for index in own) and all(
            region.whole for region in fetched
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

    def _own_rows(self, host: str) -> np.ndarray:
        at = self._at(host)
        order, targets = self._own_order
        return order[slice(*np.searchsorted(targets, [at, at + 1]))]

    @functools.cached_property
    def _own_order(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.own_cells.target, kind="stable")
        return order, self.own_cells.target[order]

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
    holdings: Inventory,
    new_layout: Layout,
    *,
    slots: Sequence[str | None],
    alive: Collection[str],
    domains: Mapping[str, str] | None = None,
    whole_bytes: int = WHOLE_BYTES,
) -> RestorePlan | Lost:
    """Plans all transfers of a restore onto any layout.

    A host uses its own memory first. The rest is shared evenly over the hosts that hold
    it, several at once, near ones first as far as no sender has more than 1.2 times its
    share for it.

    Args:
        holdings: verified holders of the commit's slices, in the layout of the commit.
        new_layout: what is needed; its leaves must be those of the commit, or some.
        slots: the host of each slot of the new layout; None if nobody there needs its
            slices.
        alive: hosts that can send. All in `slots` are taken to be alive.
        domains: host to its failure domain, "power/rack"; hosts not named are near to
            nobody.
        whole_bytes: pieces of slices of at most so many bytes are not cut.

    Returns:
        The plan, or what no live host holds.

    Raises:
        ValueError: the arguments do not fit together, or a leaf is not the commit's.
    """
    check_slots(new_layout, slots)
    targets = {host for host in slots if host is not None}
    hosts = tuple(sorted({*holdings.hosts, *targets}))
    found = find_needs(holdings, new_layout, hosts, slots, {*alive, *targets})
    if isinstance(found, Lost):
        return found
    grain = whole_bytes
    if len(found.needs.target):
        senders = len(np.unique(np.concatenate(found.needs.senders)))
        grain = max(grain, int(found.needs.nbytes.sum()) // (senders * GRAINS))
        routes = route(found.needs, _numbered(hosts, domains or {}))
    else:
        nothing = np.zeros(0, np.int64)
        routes = Routes(need=nothing, source=nothing, start=nothing, stop=nothing)
    return RestorePlan(
        hosts=hosts,
        bundles=found.bundles,
        own_cells=found.own,
        absent_cells=found.absent,
        routes=_settled(routes, found.absent, found.bundles, grain),
    )


def _settled(
    routes: Routes, absent: Wanted, bundles: Sequence[Bundle], grain: int
) -> Routes:
    """The routes with ends where cells can be cut, by target, then source.

    A piece that several hosts share, but that cannot be cut, is sent by the one that is
    furthest behind its shares of such pieces so far. The largest piece comes first.
    """
    need, names = routes.need, routes.source.tolist()
    right = np.flatnonzero(routes.start)  # rows whose need begins in the row before
    low, high = _cuts(right, routes, absent, bundles, grain)
    pieces: dict[tuple[int, int, int], list[int]] = {}
    piece_of = zip(need[right].tolist(), low.tolist(), high.tolist(), strict=True)
    for index, piece in enumerate(piece_of):
        pieces.setdefault(piece, []).append(index)
    behind = dict.fromkeys(names, 0)  # bytes
    sizes, ends = (high - low).tolist(), low.copy()
    for found in sorted(pieces.values(), key=lambda them: -sizes[them[0]]):
        first = found[0]
        rows = range(int(right[first]) - 1, int(right[found[-1]]) + 1)
        inside = np.minimum(routes.stop[rows], high[first])
        inside -= np.maximum(routes.start[rows], low[first])
        for row, share in zip(rows, inside.tolist(), strict=True):
            behind[names[row]] += share
        best = max(rows, key=lambda row: behind[names[row]])
        behind[names[best]] -= sizes[first]
        for index in found:
            ends[index] = (high if right[index] > best else low)[index]
    start, stop = routes.start.copy(), routes.stop.copy()
    start[right] = stop[right - 1] = ends
    order = np.lexsort((need, routes.source, absent.target[need]))
    order = order[start[order] < stop[order]]
    return Routes(
        need=need[order],
        source=routes.source[order],
        start=start[order],
        stop=stop[order],
    )


def _cuts(
    rows: np.ndarray,
    routes: Routes,
    absent: Wanted,
    bundles: Sequence[Bundle],
    grain: int,
) -> tuple[np.ndarray, np.ndarray]:
    """As `Bundle.cuts`, for the starts of some rows of the routes."""
    need, offset = routes.need[rows], routes.start[rows]
    low, high = offset.copy(), offset.copy()
    for index in np.unique(absent.bundle[need]):
        at = np.flatnonzero(absent.bundle[need] == index)
        cells = absent.cell[need[at]]
        low[at], high[at] = bundles[index].cuts(cells, offset[at], grain)
    return low, high


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
