"""List scheduling of tasks on nodes, with simulated ports, transfers and memory.

Tasks are taken in order of upward rank (HEFT), or in the order of the program, each on
the node where it ends first or on a given node. The upward rank of a task is the
longest path in seconds from the start of the task to the end of the program.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dtft.placement.problem import Problem

# Timelines: busy times of nodes and ports, and bytes that nodes hold.


@dataclass(slots=True)
class Line:
    """Busy intervals of a node or a network port, ascending and without overlap."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def taken_s(self) -> float:
        """Total seconds of the busy intervals."""
        return sum(self.ends) - sum(self.starts)

    def free(self, ready: float, seconds: float) -> float:
        """Finds the first gap of `seconds` seconds that begins at `ready` or later.

        Returns the time at which it begins, in seconds.
        """
        ends = self.ends
        if not ends or ready >= ends[-1]:
            return ready
        starts = self.starts
        for place in range(bisect_right(ends, ready), len(ends)):
            if starts[place] >= ready + seconds:
                break
            ready = ends[place]
        return ready

    def take(self, begin: float, end: float) -> None:
        """Adds a busy interval, which must be longer than 0 and lie in a free gap."""
        starts, ends = self.starts, self.ends
        place = (
            len(ends) if not ends or begin >= ends[-1] else bisect_right(ends, begin)
        )
        # Adjacent intervals are merged, so that searches look at fewer intervals.
        if place and ends[place - 1] == begin:
            place -= 1
            ends[place] = end
        else:
            starts.insert(place, begin)
            ends.insert(place, end)
        if place + 1 < len(starts) and starts[place + 1] == end:
            ends[place] = ends[place + 1]
            del starts[place + 1], ends[place + 1]

    def leave(self, begin: float, end: float) -> None:
        """Removes a busy interval that `take` added."""
        place = bisect_right(self.starts, begin) - 1
        first, last = self.starts[place], self.ends[place]
        parts = [(a, b) for a, b in ((first, begin), (end, last)) if b > a]
        self.starts[place : place + 1] = [a for a, _ in parts]
        self.ends[place : place + 1] = [b for _, b in parts]


class Held:
    """For each value and node, the time interval in which the node holds the value."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, value: int, node: int, begin: float, end: float) -> None:
        """Extends the interval in which a node holds a value to include a time range.

        The range is `begin` to `end`, in seconds. The first call for a value and node
        makes the interval.
        """
        first, last = self._times.get((value, node), (begin, end))
        self._times[value, node] = min(first, begin), max(last, end)

    def peaks(
        self, num_nodes: int, num_bytes: Sequence[float], stays: Sequence[bool]
    ) -> list[float]:
        """Computes the largest number of bytes that each node holds at a time.

        Args:
            num_nodes: the number of nodes.
            num_bytes: bytes of each value.
            stays: whether each value stays in memory to the end of the program, also
                after its interval.
        """
        changes: list[list[tuple[float, float]]] = [[] for _ in range(num_nodes)]
        for (value, node), (begin, end) in self._times.items():
            changes[node].append((begin, num_bytes[value]))
            if not stays[value]:
                changes[node].append((end, -num_bytes[value]))
        return [_peak(some) for some in changes]


def _peak(changes: list[tuple[float, float]]) -> float:
    """Returns the highest running sum of changes, which are pairs of time and bytes.

    Among changes at the same time, decreases count first.
    """
    if not changes:
        return 0.0
    changes.sort()
    return float(max(0.0, np.cumsum([change for _, change in changes]).max()))


# The simulation. A node runs one task at a time, and a port carries one value at a
# time. A value is sent to a node once. Parts of a gradient are added up where they are
# made and sent as one. Memory holds values until their last reader. A task or value may
# fill an earlier gap (insertion; HEFT, Topcuoglu, Hariri and Wu 2002). The order of
# tasks is given. Nodes are given too, or each task takes the node where it ends first.


Sent = tuple[int, int, int, float, float]
"""A transfer: value (index into `Tasks.passed`), source, target, begin and end (s)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The node and times of each task, and all transfers, of one microbatch.

    Times are in seconds from the start of the microbatch.
    """

    node_of: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    sent: tuple[Sent, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Seconds of the tasks on each node."""
    port_s: float
    """Busy seconds of the busiest port."""
    memory_bytes: tuple[float, ...]
    """Peak bytes of each node."""


def schedule(
    problem: Problem,
    order: Sequence[int],
    node_of: Sequence[int] | None = None,
    *,
    among: Sequence[int] | None = None,
) -> Schedule | None:
    """Simulates the tasks and transfers of one microbatch on the nodes.

    Returns None if a node's memory does not suffice, or if `node_of` is None and a task
    has no kernel on the nodes in `among`.

    Args:
        problem: tasks and nodes.
        order: all tasks, each after the tasks whose values it reads.
        node_of: node of each task, which must have the kernels; None: each task takes
            the node where it ends first.
        among: nodes that may run tasks if `node_of` is None; default: all.
    """
    state = _State(problem, among)
    for task in order:
        if node_of is None:
            node = state.best_node(task)
        else:
            node = node_of[task]
            node = node if state.has_room(task, node) else None
        if node is None:
            return None
        state.run(task, node)
    return state.schedule()


class _State:
    """State of the simulation of `schedule`, to which tasks are added one by one.

    It has the busy times of nodes and network ports, and the memory of nodes.
    """

    def __init__(self, problem: Problem, among: Sequence[int] | None) -> None:
        self.of = problem
        num = len(problem.capacity)
        self.open = np.zeros(num)
        """Time in seconds from which each node may run tasks: 0, or infinite if `among`
        lacks the node."""
        if among is not None:
            self.open[[node for node in range(num) if node not in among]] = np.inf
        self.nodes = [Line() for _ in range(num)]
        self.ports = [Line() for _ in range(problem.num_ports)]
        self.at: list[dict[int, float]] = [{} for _ in problem.num_bytes]
        """For each value, a map from a node that holds it to the time of arrival."""
        self.home = [-1] * len(problem.num_bytes)
        self.sums: dict[tuple[int, int], int] = {}
        """Map from a value and a node to one part of the value's gradient (the
        contribution of one reader) on that node. The other parts on the node are added
        to this part."""
        self.left = problem.readers.copy()
        self.live = [0.0] * num
        self.node_of = [-1] * len(problem.seconds)
        self.starts = [0.0] * len(problem.seconds)
        self.ends = [0.0] * len(problem.seconds)
        self.sent: list[Sent] = []
        self.group_at: dict[int, int] = {}

    def best_node(self, task: int) -> int | None:
        """Returns the node on which a task ends first; None if no node can run it.

        A node that can run the task has its kernel and enough free memory. Tasks of a
        group share a node: if another one of the group has a node, that node is the
        only choice.
        """
        of, group = self.of, self.of.tasks.groups[task]
        if group in self.group_at:
            node = self.group_at[group]
            return node if self.has_room(task, node) else None
        ways = self._ways(task)
        best, best_end = None, np.inf
        for bound, node in sorted(ways):
            if bound >= best_end:
                break
            if not self.has_room(task, node):
                continue
            sent = self._bring(task, node)
            ready = max(self._local(task, node), *(end for *_, end in sent), 0.0)
            seconds = of.seconds[task][node]
            end = self.nodes[node].free(ready, seconds) + seconds
            for one in sent:
                self._unsend(one)
            if end < best_end:
                best, best_end = node, end
        return best

    def _ways(self, task: int) -> list[tuple[float, int]]:
        """Returns a lower bound of a task's end on each node that may run the task.

        The entries are pairs: the bound in seconds, and the node. The bound assumes
        that no network port is busy, so that inputs arrive as early as possible.
        """
        of, ready = self.of, self.open
        for value in of.read[task]:
            home = self.home[value]
            if home < 0:
                continue
            since = self.at[value]
            there = of.nodes.byte_s[home] * of.num_bytes[value]
            there += of.nodes.empty_s[home]
            there += since[home]
            for node, moment in since.items():
                there[node] = moment
            ready = np.maximum(ready, there)
        ways = []
        rows = zip(ready.tolist(), of.seconds[task], self.nodes, strict=True)
        for node, (moment, seconds, line) in enumerate(rows):
            if moment + seconds < np.inf:
                ways.append((line.free(moment, seconds) + seconds, node))
        return ways

    def has_room(self, task: int, node: int) -> bool:
        """Whether a node has enough free memory to run a task.

        The task needs memory for its outputs, and for the inputs that the node lacks.
        """
        of = self.of
        more = of.made_bytes[task]
        for value in of.read[task]:
            if node in self.at[value]:
                continue
            if of.sum_of[value] < 0 or self._whole(value) == value:
                more += of.held_bytes[value]
        return self.live[node] + more <= of.capacity[node]

    def run(self, task: int, node: int) -> None:
        """Adds a task on a node, and the transfers of its inputs, to the simulation."""
        of = self.of
        sent = self._bring(task, node)
        ready = max((end for *_, end in sent), default=0.0)
        for value, _, _, _, end in sent:
            self.at[value][node] = end
            self.live[node] += of.held_bytes[value]
        for value in of.read[task]:
            if self.home[value] < 0:
                self.home[value] = node
                self.at[value][node] = 0.0
                self.live[node] += of.held_bytes[value]
            elif of.sum_of[value] >= 0:
                came = self.at[self._whole(value)]
                self.at[value].setdefault(node, came.get(node, 0.0))
        ready = max(ready, self._local(task, node))
        seconds = of.seconds[task][node]
        begin = self.nodes[node].free(ready, seconds)
        end = begin + seconds
        if seconds > 0:
            self.nodes[node].take(begin, end)
        self.node_of[task], self.starts[task], self.ends[task] = node, begin, end
        self.group_at[of.tasks.groups[task]] = node
        self.sent += sent
        self._keep(task, node, end)

    def _keep(self, task: int, node: int, end: float) -> None:
        """Adds a task's outputs to its node's memory; frees values no longer needed.

        `end` is the time in seconds at which the task ends.
        """
        of = self.of
        for value in of.made[task]:
            self.home[value] = node
            self.at[value][node] = end
            if self._whole(value) == value:
                self.live[node] += of.held_bytes[value]
            self._free(value)
        for value in of.read[task]:
            self.left[value] -= 1
            self._free(value)

    def _free(self, value: int) -> None:
        if self.left[value] or self.of.stays[value]:
            return
        if self._whole(value) == value:
            for node in self.at[value]:
                self.live[node] -= self.of.held_bytes[value]

    def _local(self, task: int, node: int) -> float:
        """Returns the latest arrival time, in seconds, of a task's inputs on a node.

        Inputs that the node lacks are not counted. Returns 0.0 if the node has none.
        """
        return max((self.at[v].get(node, 0.0) for v in self.of.read[task]), default=0.0)

    def _bring(self, task: int, node: int) -> list[Sent]:
        """Reserves network ports for sending a task the inputs that its node lacks.

        The input that is ready first is sent first. Returns the transfers.
        """
        of = self.of
        missing = [
            (self.at[value][self.home[value]], value)
            for value in of.read[task]
            if self.home[value] >= 0 and node not in self.at[value]
        ]
        if len(missing) > 1:
            if of.adds[task]:
                missing = self._added(missing)
            missing.sort()
        return [self._send(value, node, since) for since, value in missing]

    def _whole(self, value: int) -> int:
        """Returns the value that a node holds and sends in place of `value`.

        Each reader of a value computes one summand of the value's gradient. The
        summands that were computed on one node are added up there, and only their sum
        is held and sent. If `value` is such a summand, returns the number of one of the
        summands on its node, which stands for the sum. Otherwise returns `value`.
        """
        behind = self.of.sum_of[value]
        if behind < 0:
            return value
        return self.sums.setdefault((behind, self.home[value]), value)

    def _added(self, missing: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Replaces values that are summands of one gradient by their sum on their node.

        Each reader of a value computes a summand of the value's gradient. A node adds
        up those that it has, and sends only the sum. `missing` has the values that
        another node must send, as pairs: the time in seconds when the value is ready,
        and its number. The result has such pairs, too: one for each sum, which is ready
        when its last summand is, and one for each value that is no summand.
        """
        found: dict[int, float] = {}
        for since, value in missing:
            whole = self._whole(value)
            found[whole] = max(since, found.get(whole, 0.0))
        return [(since, value) for value, since in found.items()]

    def _send(self, value: int, node: int, since: float) -> Sent:
        of, home = self.of, self.home[value]
        seconds = of.send_s(value, home, node)
        out, into = of.ports[home][node]
        leaves, comes = self.ports[out], self.ports[into]
        begin, last = since, -1.0
        while begin != last:
            last = begin
            begin = comes.free(leaves.free(begin, seconds), seconds)
        end = begin + seconds
        if seconds > 0:
            leaves.take(begin, end)
            comes.take(begin, end)
        return value, home, node, begin, end

    def _unsend(self, sent: Sent) -> None:
        _, source, target, begin, end = sent
        if end > begin:
            for port in self.of.ports[source][target]:
                self.ports[port].leave(begin, end)

    def schedule(self) -> Schedule | None:
        """Makes the `Schedule` after all tasks were run.

        Returns None if a node's peak memory exceeds its capacity.
        """
        of = self.of
        memory = self._memory()
        if any(most > has for most, has in zip(memory, of.capacity, strict=True)):
            return None
        lines = [line.taken_s for line in self.ports]
        busy = [0.0] * len(self.nodes)
        for task, node in enumerate(self.node_of):
            busy[node] += of.seconds[task][node]
        return Schedule(
            node_of=tuple(self.node_of),
            starts=tuple(self.starts),
            ends=tuple(self.ends),
            sent=tuple(self.sent),
            makespan_s=max(self.ends, default=0.0),
            busy_s=tuple(busy),
            port_s=max(lines, default=0.0),
            memory_bytes=tuple(memory),
        )

    def _memory(self) -> list[float]:
        """Computes each node's peak bytes from the times of tasks and transfers."""
        of, held = self.of, Held()
        for task, node in enumerate(self.node_of):
            for value in of.made[task]:
                whole = self._whole(value)
                held.add(whole, node, self.starts[task], self.ends[task])
        for value, source, target, begin, end in self.sent:
            held.add(value, target, begin, end)
            held.add(value, source, end, end)
        for task, node in enumerate(self.node_of):
            for value in of.read[task]:
                begin = 0.0 if of.producer[value] < 0 else np.inf
                held.add(self._whole(value), node, begin, self.ends[task])
        return held.peaks(len(self.nodes), of.held_bytes, of.stays)


# Orders. The upward rank of a task (HEFT) is the longest path in seconds from its begin
# to the end of the program. Before nodes are known, the seconds of a task are the mean,
# least or most over its nodes.


Taken = Literal["mean", "max", "min"]
TAKEN: tuple[Taken, ...] = ("mean", "max", "min")


def by_rank(problem: Problem, taken: Taken) -> list[int]:
    """Sorts tasks by upward rank, highest first, before their nodes are known.

    The upward rank is the longest path in seconds from the start of a task to the end
    of the program. The seconds of a task are the mean, max or min (`taken`) over the
    nodes that can run it. Transfers take the mean latency and the mean seconds per byte
    over all pairs of nodes.
    """
    seconds = np.where(np.isfinite(problem.array), problem.array, np.nan)
    reduce = {"mean": np.nanmean, "max": np.nanmax, "min": np.nanmin}[taken]
    num = len(problem.capacity)
    pairs = max(num * (num - 1), 1)
    empty_s = float(problem.nodes.empty_s.sum()) / pairs
    byte_s = float(problem.nodes.byte_s.sum()) / pairs
    sending = [empty_s + byte_s * num_bytes for num_bytes in problem.num_bytes]
    return _ordered(problem, reduce(seconds, axis=1).tolist(), lambda v, _: sending[v])


def by_rank_on(problem: Problem, node_of: Sequence[int]) -> list[int]:
    """Sorts tasks by upward rank, highest first, for given nodes of the tasks.

    The upward rank is the longest path in seconds, transfers included, from the start
    of a task to the end of the program.
    """
    seconds = [row[node] for row, node in zip(problem.seconds, node_of, strict=True)]

    def sending_s(value: int, reader: int) -> float:
        source = node_of[problem.producer[value]]
        return problem.send_s(value, source, node_of[reader])

    return _ordered(problem, seconds, sending_s)


def as_they_come(problem: Problem) -> list[int]:
    """Returns the order of the program as an order of tasks: 0, 1, 2, ..."""
    return list(range(len(problem.seconds)))


def _ordered(
    problem: Problem, seconds: Sequence[float], sending_s: Callable[[int, int], float]
) -> list[int]:
    passed = problem.tasks.passed
    ranks = [0.0] * len(seconds)
    for task in reversed(range(len(seconds))):
        behind = 0.0
        for value in problem.made[task]:
            for reader in passed[value].readers:
                behind = max(behind, sending_s(value, reader) + ranks[reader])
        ranks[task] = seconds[task] + behind
    return sorted(range(len(ranks)), key=lambda task: -ranks[task])
