"""What nodes call and tell each other in a placed step, and in which order.

Calls are plain values; the order is decided before the step runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jax.extend.core import ClosedJaxpr

# What nodes call and what they tell each other in a placed step, as plain values.
#
# A `NodeCall` is one program on one node, a `Key` the name of an array in the stores of
# nodes. `autodiff` and `update` say which calls there are, `executor` makes them.


Phase = Literal["begin", "forward", "backward", "reduce", "finish", "update"]

Kind = Literal[
    "param",
    "state",
    "constant",
    "value",
    "residual",
    "weight",
    "cotangent",
    "partial",
    "sum",
    "gradient",
    "total",
    "update",
    "result",
]
"""`partial`: a cotangent that calls of the same node still add to. `sum`: a gradient
that microbatches still add to; `weight` and `total`: what microbatches count."""

EACH = -1
"""In a call that is made for each microbatch: the one it is made for."""


class Key(NamedTuple):
    """The name of an array, the same on every node and in every process."""

    kind: Kind
    number: int = 0
    """Of the value that it is, or is the gradient of."""
    of: int = 0
    """Node that made a cotangent or sum; segment that made a residual or partial."""
    microbatch: int | None = None
    """None for what there is once in a step."""

    def at(self, microbatch: int) -> "Key":
        """With the microbatch, if it has one."""
        return self._replace(microbatch=microbatch) if self.microbatch == EACH else self


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeCall:
    """One program on one node."""

    node: int
    phase: Phase
    segment: int = 0
    """Of the forward program, or of the update's."""
    reads: tuple[Key, ...] = field(default=(), repr=False)
    writes: tuple[Key, ...] = field(default=(), repr=False)
    sends: tuple[tuple[Key, int], ...] = field(default=(), repr=False)
    """What other nodes get once it is done."""
    program: ClosedJaxpr | None = field(default=None, repr=False)
    """From reads to writes; None: it only sends what it reads."""
    donated: tuple[int, ...] = field(default=(), repr=False)
    """Reads, by position, whose memory it may use for its results."""

    @property
    def name(self) -> str:
        """Such as `backward 3`."""
        return f"{self.phase} {self.segment}"


class Task(NamedTuple):
    """A call for one microbatch; None for those made once in a step."""

    call: NodeCall
    microbatch: int | None = None

    @property
    def reads(self) -> tuple[Key, ...]:
        """Keys of the arrays it needs."""
        return self._of(self.call.reads)

    @property
    def writes(self) -> tuple[Key, ...]:
        """Keys of the arrays it makes."""
        return self._of(self.call.writes)

    @property
    def sends(self) -> tuple[tuple[Key, int], ...]:
        """Keys of arrays and the nodes that get them."""
        at = self.microbatch
        if at is None:
            return self.call.sends
        return tuple((key.at(at), node) for key, node in self.call.sends)

    def _of(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        at = self.microbatch
        return keys if at is None else tuple(key.at(at) for key in keys)


@dataclass(frozen=True, kw_only=True, order=True)
class NodeTransfer:
    """What is sent from one node to another in a step."""

    source: int
    destination: int
    kind: Kind
    count: int
    """Arrays."""
    num_bytes: int
    """Bytes of all of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """All calls of a step."""

    begin: tuple[NodeCall, ...] = ()
    """Once, before the first microbatch."""
    each: tuple[NodeCall, ...] = ()
    """For each microbatch: forward and backward of every segment."""
    end: tuple[NodeCall, ...] = ()
    """Once, after the last microbatch, in an order that can run."""
    num_bytes: Mapping[Key, int] = field(default_factory=dict)
    """Of what is sent."""

    def then(self, more: "Calls") -> "Calls":
        """With the calls of `more` behind them."""
        return replace(
            self,
            end=(*self.end, *more.end),
            num_bytes={**self.num_bytes, **more.num_bytes},
        )

    def transfers(self, num_microbatches: int) -> tuple[NodeTransfer, ...]:
        """What one step sends between nodes, by link and kind."""
        found: dict[tuple[int, int, Kind], list[int]] = {}
        for call in (*self.begin, *self.each, *self.end):
            times = num_microbatches if call in self.each else 1
            for key, node in call.sends:
                entry = found.setdefault((call.node, node, key.kind), [0, 0])
                entry[0] += times
                entry[1] += times * self.num_bytes[key]
        return tuple(
            NodeTransfer(
                source=link[0],
                destination=link[1],
                kind=link[2],
                count=count,
                num_bytes=num_bytes,
            )
            for link, (count, num_bytes) in sorted(found.items())
        )


def sends(
    keys: Iterable[Key], node: int, wanted: Mapping[Key, Sequence[int]]
) -> tuple[tuple[Key, int], ...]:
    """What a node makes and others want."""
    return tuple(
        (key, other)
        for key in keys
        for other in sorted(set(wanted.get(key, ())))
        if other != node
    )


def usable(program: ClosedJaxpr, candidates: Iterable[int]) -> tuple[int, ...]:
    """Arguments, by position, whose memory some result of the program can have."""
    left = Counter((a.shape, a.dtype) for a in program.out_avals)
    found: list[int] = []
    for position in candidates:
        aval = program.in_avals[position]
        if left[aval.shape, aval.dtype]:
            left[aval.shape, aval.dtype] -= 1
            found.append(position)
    return tuple(found)


# In which order each node makes its calls, decided before the step runs.
#
# One forward, one backward (PipeDream, Narayanan et al. 2019; its flushed form as in
# Megatron-LM 2021), for any graph of segments: of what could start first a backward
# call goes before a forward call, and a segment has no more microbatches between its
# forward and its backward call than there are nodes from it to the loss. For a chain of
# stages this is 1F1B as published.


BACKWARD = 2.0
"""A backward call takes this many times what its forward call takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CallOrder:
    """The tasks of a step."""

    by_node: Mapping[int, tuple[Task, ...]]
    """Of each node, in the order in which it does them."""
    start_s: Mapping[Task, float]
    """When each forward and backward task would begin, if transfers took no time."""
    finish_s: float
    """When the last of these would be done."""

    def without(self, calls: Calls) -> "CallOrder":
        """As if there were not the calls that are made at the end of a step."""
        return replace(
            self,
            by_node={
                node: tuple(task for task in tasks if task.call not in calls.end)
                for node, tasks in self.by_node.items()
            },
        )


def order(calls: Calls, num_microbatches: int, seconds: Sequence[float]) -> CallOrder:
    """The order of all tasks of a step.

    No task waits for ever: the oldest microbatch that is not done can always go on, as
    nothing newer holds its place in any segment.

    Args:
        calls: of one step.
        num_microbatches: parts of the batch.
        seconds: of the forward call of each segment.
    """
    starts, finish_s = _Simulation(calls.each, num_microbatches, seconds).run()
    by_node: dict[int, list[Task]] = defaultdict(list)
    for call in calls.begin:
        by_node[call.node].append(Task(call))
    for task in starts:
        by_node[task.call.node].append(task)
    for call in calls.end:
        by_node[call.node].append(Task(call))
    return CallOrder(
        by_node={node: tuple(tasks) for node, tasks in sorted(by_node.items())},
        start_s=starts,
        finish_s=finish_s,
    )


class _Simulation:
    """The nodes at work."""

    def __init__(
        self, calls: Sequence[NodeCall], num_microbatches: int, seconds: Sequence[float]
    ) -> None:
        self._calls, self._parts = calls, num_microbatches
        self._seconds = [
            seconds[c.segment] * (BACKWARD if c.phase == "backward" else 1.0)
            for c in calls
        ]
        maker = {key: index for index, call in enumerate(calls) for key in call.writes}
        self._before = [
            {maker[key] for key in call.reads if key in maker and key.kind != "sum"}
            for index, call in enumerate(calls)
        ]
        forward = {c.segment: n for n, c in enumerate(calls) if c.phase == "forward"}
        for index, call in enumerate(calls):
            if call.phase == "backward":  # though a linear one could begin before
                self._before[index].add(forward[call.segment])
        self._back = {
            call.segment: index
            for index, call in enumerate(calls)
            if call.phase == "backward"
        }
        self._most = _most_in_flight(calls)
        self._next = [0] * len(calls)
        self._end: dict[tuple[int, int], float] = {}
        self._done_calls = [0] * num_microbatches
        self._done_s = [0.0] * num_microbatches
        self._after = self._followers()
        self._startable: dict[int, float] = {}
        self._look(range(len(calls)))

    def run(self) -> tuple[dict[Task, float], float]:
        """Start of every task, in an order that keeps that of each node."""
        free: dict[int, float] = defaultdict(float)
        starts: dict[Task, float] = {}
        for _ in range(len(self._calls) * self._parts):
            start, index = self._first(free)
            call, part = self._calls[index], self._next[index]
            end = start + self._seconds[index]
            starts[Task(call, part)] = start
            free[call.node] = self._end[index, part] = end
            self._next[index] += 1
            self._done_calls[part] += 1
            self._done_s[part] = max(self._done_s[part], end)
            whole = self._done_calls[part] == len(self._calls)
            self._look(range(len(self._calls)) if whole else self._after[index])
        return starts, max(free.values(), default=0.0)

    def _followers(self) -> list[set[int]]:
        """Of each call those that may start once it is done: itself is one."""
        found = [{index} for index in range(len(self._calls))]
        for index, before in enumerate(self._before):
            for other in before:
                found[other].add(index)
                if self._back.get(self._calls[index].segment) == index:
                    found[index].add(other)  # a place in the segment is free again
        return found

    def _look(self, some: Iterable[int]) -> None:
        """Notes which of some calls could start, and when."""
        for index in some:
            ready = self._ready(index)
            if ready is None:
                self._startable.pop(index, None)
            else:
                self._startable[index] = ready

    def _first(self, free: Mapping[int, float]) -> tuple[float, int]:
        """The task that can start first; a backward one goes before a forward one."""
        found: list[tuple[float, bool, int, int, int]] = []
        for index, ready in self._startable.items():
            call = self._calls[index]
            forward = call.phase == "forward"
            place = call.segment if forward else -call.segment
            start = max(free[call.node], ready)
            found.append((start, forward, self._next[index], place, index))
        start, *_, index = min(found)
        return start, index

    def _ready(self, index: int) -> float | None:
        """When all that a call needs for its next microbatch is there."""
        part = self._next[index]
        if part == self._parts:
            return None
        ends = [self._end.get((before, part)) for before in self._before[index]]
        if self._calls[index].phase == "forward":
            ends.append(self._let_in(index, part))
        return None if None in ends else max((e for e in ends if e), default=0.0)

    def _let_in(self, index: int, part: int) -> float | None:
        """When the microbatch that has to leave a segment first has left it."""
        gone = part - self._most[self._calls[index].segment]
        if gone < 0:
            return 0.0
        back = self._back.get(self._calls[index].segment)
        if back is not None:
            return self._end.get((back, gone))
        whole = self._done_calls[gone] == len(self._calls)
        return self._done_s[gone] if whole else None


def _most_in_flight(calls: Sequence[NodeCall]) -> dict[int, int]:
    """Of each segment: nodes from it to the end."""
    nodes: set[int] = set()
    found: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: -call.segment):
        nodes.add(call.node)
        found[call.segment] = len(nodes)
    return found
