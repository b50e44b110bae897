"""Heuristics of placement: greedy rules, baselines, then moves of single tasks.

The greedy rule (HEFT) takes the tasks in the order of upward rank (the longest path in
seconds from a task to the end of the program), and places each where it ends first. It
runs on all nodes, on only the faster nodes, and with each kind of tasks (such as
matmuls) on the node type that is fastest for this kind. The baselines are all tasks on
one node, contiguous stretches of the program, and random nodes. The baselines are
candidates too, so the result is never slower than a baseline. The search is
deterministic.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dtft.placement.list_scheduler import (
    TAKEN,
    Schedule,
    as_they_come,
    by_rank,
    by_rank_on,
    schedule,
)
from dtft.placement.problem import Problem

# Contiguous partition: splits a row of items into stretches on nodes of unlike speed so
# that the slowest stretch takes the least time. With few kinds of nodes the result is
# exact: a bisection finds the least limit in seconds, and dynamic programming over
# numbers of nodes of each kind finds how many items fit under a limit. (For a given
# order of nodes, giving each node as many items as fit is optimal.) With many kinds,
# only some orders of nodes are tried.


Floats = NDArray[np.float64]
_MOST_STATES = 600
"""Largest number of states (numbers of used nodes of each kind) for which `split` is
exact; with more states it tries `_ORDERS` orders of nodes."""
_ORDERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive items, such as tasks, that run on one node.

    From item `start` up to, but not including, item `stop`.
    """

    node: int
    start: int
    stop: int


def split(
    seconds: Floats,
    *,
    num_bytes: Floats | None = None,
    capacity: Floats | None = None,
) -> tuple[Stretch, ...] | None:
    """Splits a sequence of items into stretches, each of consecutive items on one node.

    Minimizes the seconds of the slowest stretch. Nodes with equal seconds for every
    item and equal memory are of one kind. The split is optimal if the product over the
    kinds of (number of nodes + 1) is at most 600 (`_MOST_STATES`). Otherwise it is the
    best of 8 orders of nodes.

    Args:
        seconds: `[items, nodes]`, infinite where a node cannot run an item.
        num_bytes: bytes of each item, `[items]`; default: 0.
        capacity: bytes of memory of each node, `[nodes]`; default: unlimited.

    Returns:
        Stretches in the order of items, none for a node without items; None if no split
        was found that has all kernels and fits into memory.

    The example has four items, and node 0 is three times as fast as node 1. The output
    lists each node with its number of items.

    >>> rows = split(np.array([[1.0, 3.0]] * 4))
    >>> sorted((one.node, one.stop - one.start) for one in rows)
    [(0, 3), (1, 1)]
    """
    row = _Row(seconds, num_bytes, capacity)
    kinds = row.kinds()
    states = math.prod(len(nodes) + 1 for nodes in kinds)
    if states <= _MOST_STATES:
        return row.best(lambda limit: row.in_any_order(kinds, limit))
    found = [
        row.best(lambda limit, order=order: row.along(order, limit))
        for order in _orders(seconds)
    ]
    return min((f for f in found if f is not None), key=row.slowest, default=None)


_Under = Callable[[float], tuple[Stretch, ...] | None]
"""Function from a limit in seconds to stretches within the limit, or None."""


class _Row:
    """The items that `split` divides, with cumulative sums of their seconds and bytes.

    The seconds of a stretch are the difference of two sums.
    """

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
        """Returns groups of equal nodes: equal seconds for each item, equal memory."""
        found: dict[bytes, list[int]] = {}
        for node in range(self.seconds.shape[1]):
            key = self.seconds[:, node].tobytes() + self.capacity[node].tobytes()
            found.setdefault(key, []).append(node)
        return list(found.values())

    def reach(self, node: int, start: int, limit: float) -> int:
        """Returns the item after a node's longest possible stretch from item `start`.

        The stretch takes at most `limit` seconds, fits into the node's memory, and ends
        before an item that the node cannot run. Returns `start` if not even one item is
        possible.
        """
        upto = self.upto[:, node]
        by_time = int(np.searchsorted(upto, upto[start] + limit, "right")) - 1
        most = self.bytes[start] + self.capacity[node]
        by_bytes = int(np.searchsorted(self.bytes, most, "right")) - 1
        return max(start, min(by_time, by_bytes, int(self.ends[start, node])))

    def along(self, order: Sequence[int], limit: float) -> tuple[Stretch, ...] | None:
        """Gives each node, in the given order, the longest stretch that it can run.

        A stretch takes at most `limit` seconds and fits into the node's memory
        (`reach`). Returns None if items are left over.
        """
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
        """Finds stretches of at most `limit` seconds that cover all items.

        Each stretch fits into its node's memory (`reach`). The nodes may have any
        order; nodes with equal seconds and memory are of one kind. A dynamic program
        finds how many items can be covered with each possible number of nodes of every
        kind.

        Args:
            kinds: the nodes of each kind.
            limit: longest stretch, in seconds.

        Returns:
            The stretches; None if no stretches cover all items.
        """
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
        """Returns the seconds of the slowest stretch."""
        return max(
            float(self.upto[one.stop, one.node] - self.upto[one.start, one.node])
            for one in stretches
        )

    def best(self, under: _Under) -> tuple[Stretch, ...] | None:
        """Finds by bisection the least limit for which `under` returns stretches.

        `under` maps a limit in seconds to stretches that each take at most this time;
        None if there are none. Returns the stretches for the least limit; None if
        there are none even without a limit.
        """
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
    """Finds, from each item onwards, the first item that each node cannot run.

    Returns indices of items, `[items + 1, nodes]`. An entry is the item itself if the
    node cannot run it, and the number of items if the node can run it and all later
    items.
    """
    num = len(seconds)
    places = np.where(np.isfinite(seconds), num, np.arange(num)[:, None])
    ends = np.minimum.accumulate(places[::-1], axis=0)[::-1]
    return np.vstack([ends, np.full(seconds.shape[1], num)])


def _back(
    used: tuple[int, ...],
    last: dict[tuple[int, ...], int],
    kinds: Sequence[Sequence[int]],
) -> Iterator[int]:
    """Yields the nodes of the stretches that `in_any_order` has found, last first.

    Args:
        used: the number of nodes of each kind that have a stretch.
        last: maps a tuple like `used` to the kind of the node that has the last of
            these nodes' stretches.
        kinds: the nodes of each kind.
    """
    while any(used):
        kind = last[used]
        yield kinds[kind][used[kind] - 1]
        used = (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _orders(seconds: Floats) -> Iterator[Sequence[int]]:
    """Yields orders of nodes: fastest first, fastest last, and random orders.

    A node that can run fewer items counts as slower.
    """
    finite = np.where(np.isfinite(seconds), seconds, np.nan)
    lacking = np.isnan(finite).sum(0)
    mean = np.nansum(finite, axis=0) / np.maximum(len(seconds) - lacking, 1)
    order = np.lexsort([mean, lacking])
    yield order.tolist()
    yield order[::-1].tolist()
    rng = np.random.default_rng(0)
    for _ in range(_ORDERS - 2):
        yield rng.permutation(len(order)).tolist()


# Local search: moves of one group of tasks, and of two groups that share a value. The
# search climbs from several placements, the best first, until no move improves the step
# or the tries are used up.


_MOST_ENDS = 6

Step = Callable[[Sequence[int]], float]
"""Function from the node of each task to the number that `Climb` minimises, such as the
seconds of a step; infinite if the placement is not allowed."""


class Climb:
    """Hill climbing: changes a placement while that lowers the value of a function.

    A placement is the node of each task. The number of calls of the function, the
    tries, is limited.
    """

    def __init__(self, problem: Problem, step: Step, tries: int) -> None:
        """Prepares the moves; tries no placement yet.

        Args:
            problem: tasks and nodes.
            step: the function to minimise, from a placement to seconds or bytes.
            tries: the number of calls of `step`, approximately.
        """
        self.groups, self.step, self.left = problem.tasks.together, step, tries
        can = np.isfinite(problem.array)
        self.nodes = [np.flatnonzero(can[group[0]]).tolist() for group in self.groups]
        self.problem = problem

    def best_from(self, starts: Sequence[Sequence[int]]) -> list[int]:
        """Searches for the placement with the lowest value of the function `step`.

        From each start in turn, single groups of tasks are moved until no move lowers
        the value. (The tasks of a group must share a node.) Then pairs of groups are
        moved, from the best placement found. The search ends when no move helps or no
        try is left; later starts may then not be tried.

        Args:
            starts: placements, each the node of every task. A node must be able to run
                its tasks, but may have too little memory for them.
        """
        best, best_s = list(starts[0]), np.inf
        for start in starts:
            self.left -= 1
            found, seconds = self._singly(list(start), self.step(start))
            if seconds < best_s:
                best, best_s = found, seconds
            if self.left <= 0:
                return best
        while self.left > 0:
            found, seconds = self._first(best, best_s, self._of_pairs(best))
            if seconds >= best_s:
                break
            best, best_s = self._singly(found, seconds)
        return best

    def _singly(self, node_of: list[int], seconds: float) -> tuple[list[int], float]:
        """Moves one group of tasks at a time, until no move lowers the value.

        The tasks of a group must share a node. Also ends when no try is left. Begins
        with the placement `node_of` (the node of each task), for which the function has
        the value `seconds`. Returns the last placement and its value.
        """
        idle = 0
        for number in itertools.cycle(range(len(self.groups))):
            if idle == len(self.groups) or self.left <= 0:
                break
            before = seconds
            moves = [{number: node} for node in self.nodes[number]]
            node_of, seconds = self._first(node_of, seconds, moves)
            idle = idle + 1 if seconds >= before else 0
        return node_of, seconds

    def _of_pairs(self, node_of: Sequence[int]) -> Iterator[dict[int, int]]:
        for one, other in _neighbours(self.problem, self.groups):
            here = node_of[self.groups[one][0]], node_of[self.groups[other][0]]
            for there in itertools.product(self.nodes[one], self.nodes[other]):
                if there[0] != here[0] and there[1] != here[1]:
                    yield {one: there[0], other: there[1]}

    def _first(
        self, node_of: list[int], seconds: float, moves: Iterable[dict[int, int]]
    ) -> tuple[list[int], float]:
        """Tries moves, and makes the first move that lowers the value to minimise.

        Begins with the placement `node_of` (the node of each task), whose value of the
        function `self.step` is `seconds`. A move gives some groups of tasks a new node:
        it maps indices in `self.groups` to nodes. Returns the new placement and its
        value; both are unchanged if no move lowers the value, or if no tries are left.
        """
        for move in moves:
            if self.left <= 0:
                break
            tried = list(node_of)
            for number, node in move.items():
                for task in self.groups[number]:
                    tried[task] = node
            if tried == node_of:
                continue
            self.left -= 1
            if (found := self.step(tried)) < seconds * (1 - 1e-12):
                return tried, found
        return node_of, seconds


def _neighbours(
    problem: Problem, groups: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Returns pairs of groups that share a value, as producer and reader or as readers.

    `groups` has the tasks of each group; a pair has two indices into `groups`. A value
    is skipped if its producer and its readers together are more than 6 tasks
    (`_MOST_ENDS`).
    """
    of = {task: number for number, group in enumerate(groups) for task in group}
    found: dict[tuple[int, int], None] = {}
    for value in problem.tasks.passed:
        ends = [of[task] for task in (value.producer, *value.readers) if task >= 0]
        if len(ends) <= _MOST_ENDS:
            pairs = itertools.combinations(sorted(set(ends)), 2)
            found |= dict.fromkeys(pairs)
    return list(found)


# Speeds of node types by class of tasks, and selection of the faster nodes.


Speeds = Mapping[str, Mapping[str, float]]
"""Map from a kind of tasks to a map from a node type to the seconds of all these
tasks."""


def speed_table(problem: Problem) -> Speeds:
    """Computes the seconds that each node type takes for each kind of tasks.

    A task's kind is that of its operator, such as `matmul`, or `loop` or `block`.
    Returns a map from each kind to a map from node type to seconds: those that the
    fastest node of the type takes for all tasks of the kind. Types without a node that
    can run all these tasks are left out. A kind without any type is left out too.
    """
    types, kinds = problem.nodes.alike(), np.array(problem.tasks.kinds)
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(problem.tasks.kinds):
        sums = problem.array[kinds == kind].sum(axis=0)
        each: dict[str, float] = {}
        for name, seconds in zip(types, sums.tolist(), strict=True):
            if seconds < each.get(name, np.inf):
                each[name] = seconds
        if each:
            found[kind] = each
    return found


def faster(problem: Problem) -> Iterator[list[int]]:
    """Yields lists of nodes without the slowest; each list can run every task.

    The slowness of a node is the seconds of all tasks that the node can run, divided by
    the seconds of the same tasks with each task on its fastest node (`_pace`). A list
    has the nodes below one value of slowness. If the nodes have at most four distinct
    values, each value but the least gives a list. Otherwise there is only one list,
    without about the slower half of the values. A list whose nodes lack a kernel for a
    task is skipped.
    """
    num, pace = len(problem.capacity), _pace(problem)
    distinct = sorted(set(pace), reverse=True)
    cuts = distinct[:-1] if len(distinct) <= 4 else [distinct[len(distinct) // 2 - 1]]
    for cut in cuts:
        kept = [node for node in range(num) if pace[node] < cut]
        if kept and np.isfinite(problem.array[:, kept]).any(axis=1).all():
            yield kept


def _pace(problem: Problem) -> list[float]:
    """Returns how many times slower each node is than the fastest node of each task.

    For a node this is the seconds of all tasks that it can run, divided by the seconds
    of the same tasks with each task on its fastest node. The quotient is 1 or more. It
    is infinite for a node that can run no task.
    """
    best = problem.array.min(axis=1, keepdims=True).clip(1e-300)
    ratio = np.where(np.isfinite(problem.array), problem.array / best, np.nan)
    weights = np.where(np.isfinite(problem.array), best, 0.0)
    total = weights.sum(0)
    pace = np.nansum(ratio * weights, axis=0) / np.where(total > 0, total, 1.0)
    return [round(p, 9) if t > 0 else np.inf for p, t in zip(pace, total, strict=True)]


Order = Literal["rank", "traversal"]
BASELINES = ("one node", "contiguous", "random")
_TASKS_LOOKED_AT = 20_000
"""Number of tasks that all tries of moves together schedule by default: the number of
tries is this number divided by the number of tasks. Scheduling 20,000 tasks takes about
0.5 s. With up to `_SMALL` tasks a try schedules each task several times."""
_SMALL = 30
"""Largest number of tasks for which `improve` simulates each move with all orders of
`Search.orders`, and not only with one order."""
_FEW = 20
"""Least number of tries of moves. If `_TASKS_LOOKED_AT` allows fewer, `squeeze` has
this number of tries, and `improve` is skipped unless a number of moves is given."""
_DRAWS = 10
_TRAVERSAL = "earliest finish in the order of the program"
_STARTS = 6
"""Largest number of candidates of `Search.seen` from which `improve` tries moves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best schedule that the heuristics found, and the step times of others."""

    schedule: Schedule
    how: str
    """Text on the rule that found the schedule, such as `everything on one node`."""
    baselines: dict[str, float]
    """Step seconds of each baseline that can run."""
    dropped: dict[str, float]
    """Step seconds of placements on only the faster nodes, each task where it ends
    first. The keys are the names of the nodes left out, such as "cpu:0, cpu:1"."""
    speeds: Speeds


class Search:
    """Makes candidate placements of a problem by several rules, and keeps the best."""

    def __init__(self, problem: Problem, order: Order, microbatches: int) -> None:
        """Prepares the orders of tasks; makes no candidate yet.

        Args:
            problem: tasks and nodes.
            order: which orders of tasks the rules try. `rank`: by upward rank (the
                longest path in seconds from a task to the end of the program), and as
                in the program. `traversal`: only as in the program.
            microbatches: the number of microbatches of a step.
        """
        self.problem, self.microbatches = problem, microbatches
        self.order: Order = order
        self.best: Schedule | None = None
        self.seen: dict[tuple[int, ...], float] = {}
        """Map from a candidate (the node of each task) to its least step seconds."""
        self.orders = [as_they_come(problem), *(some for _, some in self._orders())]
        self.is_tight = False
        """Whether `see` got None, because memory did not suffice for a candidate."""
        self.how = ""

    def step_s(self, found: Schedule) -> float:
        """Computes the seconds of a step from the schedule of one microbatch.

        The first microbatch takes the makespan. Each further microbatch adds the busy
        seconds of the busiest node or network port.
        """
        fullest = max(*found.busy_s, found.port_s)
        return found.makespan_s + (self.microbatches - 1) * fullest

    def see(self, found: Schedule | None, how: str) -> float | None:
        """Records the schedule of a candidate, and returns its step seconds.

        `best` keeps the schedule with the shortest step, and `seen` the step seconds of
        every placement. `how` says by which rule the schedule was found. If `found` is
        None, because memory did not suffice, sets `is_tight` and returns None.
        """
        if found is None:
            self.is_tight = True
            return None
        seconds = self.step_s(found)
        self.seen[found.node_of] = min(seconds, self.seen.get(found.node_of, seconds))
        if self.best is None or seconds < self.step_s(self.best):
            self.best, self.how = found, how
        return seconds

    def on(self, node_of: Sequence[int]) -> Schedule | None:
        """Schedules tasks on given nodes, `node_of`, in the order that `order` names.

        `node_of` has the node of each task. The tasks are in the order of the program
        if `order` is `traversal`, and otherwise ordered by upward rank on these nodes.
        Returns None if memory does not suffice.
        """
        problem = self.problem
        if self.order == "traversal":
            return schedule(problem, as_they_come(problem), node_of)
        return schedule(problem, by_rank_on(problem, node_of), node_of)

    def greedy(self) -> None:
        """Places each task where it ends first, in several orders of tasks.

        The orders are those by upward rank (the longest path in seconds from a task to
        the end of the program), with the mean, max and min seconds of each task over
        the nodes (`by_rank`), and the order of the program. If `order` is `traversal`,
        only the order of the program is used.
        """
        for name, order in self._orders():
            self.see(schedule(self.problem, order), name)
        if self.order == "rank":
            self.see(schedule(self.problem, as_they_come(self.problem)), _TRAVERSAL)

    def without_slow(self) -> dict[str, float]:
        """Places each task where it ends first, on only the faster nodes.

        Makes one candidate for each list of nodes without the slowest (`faster`).

        Returns:
            Step seconds by the names of the nodes left out, for each list whose memory
            suffices.
        """
        problem, found = self.problem, {}
        name, order = next(iter(self._orders()))
        for kept in faster(problem):
            names = problem.nodes.names
            out = ", ".join(names[n] for n in range(len(names)) if n not in kept)
            some = schedule(problem, order, among=kept)
            seconds = self.see(some, f"{name}, without {out}")
            if seconds is not None:
                found[out] = seconds
        return found

    def by_type(self, speeds: Speeds) -> None:
        """Places each task only on nodes of the type that is fastest for its kind.

        A task's kind is that of its operator, such as `matmul`, or `loop` or `block`.
        Among these nodes it takes the one where it ends first. A kind without an entry
        in `speeds`, the result of `speed_table`, may use all nodes. Makes no candidate
        if a task would then have no node.
        """
        types = np.array(self.problem.nodes.alike())
        wanted = {kind: min(s, key=lambda name: s[name]) for kind, s in speeds.items()}
        rows = [
            types == wanted[k] if k in wanted else types == types
            for k in self.problem.tasks.kinds
        ]
        seconds = np.where(np.array(rows), self.problem.array, np.inf)
        if np.isinf(seconds).all(axis=1).any():
            return
        name, order = next(iter(self._orders()))
        some = schedule(self.problem.with_seconds(seconds), order)
        self.see(some, f"{name}, each class on its fastest type")

    def _orders(self) -> Iterator[tuple[str, list[int]]]:
        if self.order == "traversal":
            yield _TRAVERSAL, as_they_come(self.problem)
            return
        for taken in TAKEN:
            words = f"earliest finish by upward rank ({taken} seconds)"
            yield words, by_rank(self.problem, taken)

    def one_node(self) -> float | None:
        """Places all tasks on the fastest node with all kernels and enough memory.

        Returns the step seconds, or None if there is no such node.
        """
        sums = self.problem.array.sum(axis=0)
        for node in np.argsort(sums, kind="stable").tolist():
            if np.isfinite(sums[node]):
                found = self.on([node] * len(self.problem.seconds))
                if found is not None:
                    return self.see(found, "everything on one node")
        return None

    def contiguous(self) -> float | None:
        """Places a contiguous stretch of the program on each node (see `split`).

        The first split ignores the nodes' memory. If it does not fit into memory, a
        second split takes memory into account. Returns the step seconds, or None if
        memory or kernels do not suffice.
        """
        groups = self.problem.tasks.together
        rows = np.stack([self.problem.array[group].sum(0) for group in groups])
        num_bytes = np.array([self._bytes_of(group) for group in groups])
        capacity = np.array(self.problem.capacity)
        for most in (np.full(len(capacity), np.inf), capacity):
            found = split(rows, num_bytes=num_bytes, capacity=most)
            if found is None:
                return None
            node_of = [0] * len(self.problem.seconds)
            for one in found:
                for group in groups[one.start : one.stop]:
                    for task in group:
                        node_of[task] = one.node
            seconds = self.see(self.on(node_of), "stretches of the program")
            if seconds is not None:
                return seconds
        return None

    def _bytes_of(self, group: Sequence[int]) -> float:
        """Returns the bytes of a group's values: arguments read, and values made.

        `group` has the indices of the group's tasks. Values that these tasks read from
        other groups are not counted.
        """
        problem, inside = self.problem, set(group)
        values = {v for task in group for v in problem.made[task] + problem.read[task]}
        return sum(
            problem.held_bytes[value]
            for value in values
            if problem.producer[value] < 0 or problem.producer[value] in inside
        )

    def random(self) -> float | None:
        """Places each group of tasks on a random node with its kernels.

        Takes the first of 10 draws (`_DRAWS`) that fits into memory. Returns the step
        seconds, or None if no draw fits.
        """
        rng, problem = np.random.default_rng(0), self.problem
        can = np.isfinite(problem.array)
        for _ in range(_DRAWS):
            node_of = [0] * len(problem.seconds)
            for group in problem.tasks.together:
                node = int(rng.choice(np.flatnonzero(can[group[0]])))
                for task in group:
                    node_of[task] = node
            found = self.on(node_of)
            if found is not None:
                return self.see(found, "a random node for each task")
        return None

    def squeeze(self) -> list[tuple[int, ...]]:
        """Places tasks with unlimited memory, then moves tasks to use less memory.

        Returns:
            The placements made without memory limits. The last entry is the placement
            after the moves: of those tried, it exceeds the nodes' memory by the fewest
            bytes (0 if it fits).
        """
        roomy = Search(self.problem.roomy(), self.order, self.microbatches)
        roomy.greedy()
        roomy.contiguous()
        capacity = np.array(self.problem.capacity)

        def lacking_bytes(node_of: Sequence[int]) -> float:
            found = roomy.on(node_of)
            if found is None:
                return np.inf
            over = np.maximum(np.array(found.memory_bytes) - capacity, 0.0)
            return float(over.sum())

        tries = max(_TASKS_LOOKED_AT // max(len(self.problem.seconds), 1), _FEW)
        climb = Climb(self.problem, lacking_bytes, tries)
        starts = list(roomy.seen)
        node_of = climb.best_from(starts)
        self.best_on(node_of, "tasks moved until memory sufficed")
        return [*starts, tuple(node_of)]

    def best_on(self, node_of: Sequence[int], how: str) -> float | None:
        """Schedules tasks on given nodes, `node_of`, in several orders of tasks.

        `how` says by which rule the nodes were found. Returns the least step seconds,
        or None if no schedule fits into memory.
        """
        found = [self.see(self.on(node_of), how)]
        for order in self.orders:
            found.append(self.see(schedule(self.problem, order, node_of), how))
        return min((s for s in found if s is not None), default=None)

    def improve(self, moves: int) -> None:
        """Moves tasks of the best candidates to other nodes while the step time falls.

        `moves` is the number of tries. The search starts from up to six of the fastest
        candidates. If memory did not suffice for a candidate, it also starts from
        placements made without memory limits, and from one of these after moves to use
        less memory (`squeeze`).
        """
        ranked = sorted(self.seen.items(), key=lambda item: item[1])
        starts = [node_of for node_of, _ in ranked[:_STARTS]]
        if self.is_tight:
            starts += self.squeeze()
        climb = Climb(self.problem, self._step_on, moves)
        node_of = climb.best_from(starts)
        self.best_on(node_of, f"{self.how}, then tasks moved")

    def _step_on(self, node_of: Sequence[int]) -> float:
        found = [self.on(node_of)]
        if len(node_of) <= _SMALL:
            found += [schedule(self.problem, order, node_of) for order in self.orders]
        return min((self.step_s(one) for one in found if one), default=np.inf)


def find_placement(
    problem: Problem,
    *,
    order: Order = "rank",
    microbatches: int = 1,
    moves: int | None = None,
) -> Found | None:
    """Makes candidate placements by all heuristics; returns that of the shortest step.

    The result also has the step seconds of other candidates. Returns None if no
    candidate fits into memory.

    Args:
        problem: tasks and nodes.
        order: which orders of tasks the greedy rule tries. `rank`: by upward rank
            (HEFT), and as in the program. `traversal`: only as in the program.
        microbatches: the number of microbatches of a step.
        moves: the number of tries to move tasks to other nodes; None: 20,000 divided by
            the number of tasks, or 0 if this is below 20.
    """
    search, speeds = Search(problem, order, microbatches), speed_table(problem)
    search.greedy()
    dropped = search.without_slow()
    search.by_type(speeds)
    found = (search.one_node(), search.contiguous(), search.random())
    named = zip(BASELINES, found, strict=True)
    baselines = {name: seconds for name, seconds in named if seconds is not None}
    if search.best is None:
        search.squeeze()
    if moves is None:
        moves = _TASKS_LOOKED_AT // max(len(problem.seconds), 1)
        moves = moves if moves >= _FEW else 0
    if moves and search.best is not None:
        search.improve(moves)
    if search.best is None:
        return None
    return Found(
        schedule=search.best,
        how=search.how,
        baselines=baselines,
        dropped=dropped,
        speeds=speeds,
    )
