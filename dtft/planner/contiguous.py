"""Cutting a row of unequal items into stretches for unlike nodes: the fullest is least.

Exact where there are few kinds of nodes: the least limit under which all items find
room is searched for, and for each limit it is known, for every number of nodes of each
kind, how far these reach (taking as much as possible is best for a set of nodes in a
given order). With many kinds only some orders of nodes are looked at. Pure arithmetic;
must not know what items are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST_STATES = 600
"""Beyond so many sets of nodes only some orders are looked at."""
_ORDERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Items `start` to `stop`, without the latter, on a node."""

    node: int
    start: int
    stop: int


def split(
    seconds: Floats,
    *,
    num_bytes: Floats | None = None,
    capacity: Floats | None = None,
) -> tuple[Stretch, ...] | None:
    """The stretches whose slowest is least; None where the items find no room.

    Args:
        seconds: `[items, nodes]`, infinite where a node cannot have an item.
        num_bytes: of each item, `[items]`.
        capacity: bytes that each node has, `[nodes]`.

    Returns:
        Stretches in the order of items; nodes without items have none.

    >>> rows = split(np.array([[1.0, 3.0]] * 4))
    >>> sorted((one.node, one.stop - one.start) for one in rows)
    [(0, 3), (1, 1)]
    """
    row = _Row(seconds, num_bytes, capacity)
    kinds = row.kinds()
    states = np.prod([len(nodes) + 1 for nodes in kinds])
    if states <= _MOST_STATES:
        return row.best(lambda limit: row.in_any_order(kinds, limit))
    found = [
        row.best(lambda limit, order=order: row.along(order, limit))
        for order in _orders(seconds)
    ]
    return min((f for f in found if f is not None), key=row.slowest, default=None)


_Under = Callable[[float], tuple[Stretch, ...] | None]
"""The stretches of which none takes longer than a limit; None if there are none."""


class _Row:
    """Items, added up, so that a stretch's seconds are a difference."""

    def __init__(
        self, seconds: Floats, num_bytes: Floats | None, capacity: Floats | None
    ) -> None:
        self.num, num_nodes = seconds.shape
        self.seconds = seconds
        finite = np.where(np.isfinite(seconds), seconds, 0.0)
        self.upto = np.vstack([np.zeros(num_nodes), np.cumsum(finite, axis=0)])
        self.ends = _next_infinite(seconds)
        sizes = np.zeros(self.num) if num_bytes is None else num_bytes
        self.bytes = np.concatenate([[0.0], np.cumsum(sizes)])
        most = np.full(num_nodes, np.inf) if capacity is None else capacity
        self.capacity = np.asarray(most, float)

    def kinds(self) -> list[list[int]]:
        """Nodes that are the same to this row."""
        found: dict[bytes, list[int]] = {}
        for node in range(self.seconds.shape[1]):
            key = self.seconds[:, node].tobytes() + self.capacity[node].tobytes()
            found.setdefault(key, []).append(node)
        return list(found.values())

    def reach(self, node: int, start: int, limit: float) -> int:
        """The first item that a stretch from `start` has no room for on a node."""
        upto = self.upto[:, node]
        by_time = int(np.searchsorted(upto, upto[start] + limit, "right")) - 1
        most = self.bytes[start] + self.capacity[node]
        by_bytes = int(np.searchsorted(self.bytes, most, "right")) - 1
        return max(start, min(by_time, by_bytes, int(self.ends[start, node])))

    def along(self, order: Sequence[int], limit: float) -> tuple[Stretch, ...] | None:
        """The stretches if nodes come in an order; None if items are left over."""
        start, found = 0, []
        for node in order:
            stop = self.reach(node, start, limit)
            if stop > start:
                found.append(Stretch(node=node, start=start, stop=stop))
            start = stop
        return tuple(found) if start == self.num else None

    def in_any_order(
        self, kinds: Sequence[Sequence[int]], limit: float
    ) -> tuple[Stretch, ...] | None:
        """The stretches in the best order; None if items are left over."""
        none = (0,) * len(kinds)
        far: dict[tuple[int, ...], int] = {none: 0}
        last: dict[tuple[int, ...], int] = {none: 0}
        for used in product(*(range(len(nodes) + 1) for nodes in kinds)):
            for kind, number in enumerate(used):
                if not number:
                    continue
                before = (*used[:kind], number - 1, *used[kind + 1 :])
                stop = self.reach(kinds[kind][number - 1], far[before], limit)
                if stop > far.get(used, -1):
                    far[used], last[used] = stop, kind
            if far[used] == self.num:
                return self.along(list(_back(used, last, kinds))[::-1], limit)
        return None

    def slowest(self, stretches: Sequence[Stretch]) -> float:
        """Seconds of the stretch that takes longest."""
        return max(
            float(self.upto[one.stop, one.node] - self.upto[one.start, one.node])
            for one in stretches
        )

    def best(self, under: _Under) -> tuple[Stretch, ...] | None:
        """The stretches of the least limit that there are any for."""
        best = under(np.inf)
        if not best:
            return best
        high, low = self.slowest(best), 0.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            found = under(middle)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, self.slowest(found))
        return best


def _next_infinite(seconds: Floats) -> NDArray[np.int64]:
    """For each place and node the next item that the node cannot have."""
    num = len(seconds)
    places = np.where(np.isfinite(seconds), num, np.arange(num)[:, None])
    ends = np.minimum.accumulate(places[::-1], axis=0)[::-1]
    return np.vstack([ends, np.full(seconds.shape[1], num)])


def _back(
    used: tuple[int, ...],
    last: dict[tuple[int, ...], int],
    kinds: Sequence[Sequence[int]],
) -> Iterator[int]:
    """Nodes of a state, last stretch first."""
    while any(used):
        kind = last[used]
        yield kinds[kind][used[kind] - 1]
        used = (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _orders(seconds: Floats) -> Iterator[Sequence[int]]:
    """Some orders of many unlike nodes: fastest first or last, and drawn ones."""
    finite = np.where(np.isfinite(seconds), seconds, np.nan)
    lacking = np.isnan(finite).sum(0)
    mean = np.nansum(finite, axis=0) / np.maximum(len(seconds) - lacking, 1)
    order = np.lexsort([mean, lacking])
    yield order.tolist()
    yield order[::-1].tolist()
    rng = np.random.default_rng(0)
    for _ in range(_ORDERS - 2):
        yield rng.permutation(len(order)).tolist()
