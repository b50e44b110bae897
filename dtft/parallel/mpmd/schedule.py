"""The calls of a placed step (`PlacedStep`), their order, and the arrays sent.

A call describes a program that one node runs: which arrays the program reads and
writes, and which arrays the node then sends to other nodes. A task is a call for one
microbatch, or a call that is made once in a step. The order of the tasks is computed
before the step runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jax.extend.core import ClosedJaxpr

# A `NodeCall` is one program on one node. A `Key` is the name of an array in the stores
# of nodes. `autodiff` and `update` make the calls, and `executor` runs them.


Phase = Literal["begin", "forward", "backward", "reduce", "finish", "update"]
"""What a call does. `begin`: sends parameters, and sets sums of gradients to zero.
`forward`, `backward`: computes a segment for a microbatch. `reduce`: only sends arrays.
`finish`: computes gradients, or means of the loss's results. `update`: computes a
segment of the optimizer's program."""

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
"""Kinds of arrays. `param`: a parameter. `state`: a leaf of the optimizer state.
`constant`: a constant of the loss's or the optimizer's program. `value`: a value of the
loss's program, including the batch. `residual`: a value that a backward call needs from
the forward call of its segment. `update`: a value of the optimizer's program.
`cotangent`: one node's summand of a value's cotangent. `partial`: the same, while other
calls of the node add to it. `sum`: a gradient to which other microbatches add.
`gradient`: a parameter's gradient, as a mean over the microbatches. `weight`: the
weight of a microbatch. `total`: the sum of the weights. `result`: a result of the loss,
as a mean over the microbatches."""

EACH = -1
"""Placeholder for the microbatch, in calls that are made for each microbatch."""


class Key(NamedTuple):
    """The name of an array, the same on every node and in every process."""

    kind: Kind
    number: int = 0
    """Number of the value in the program. A cotangent, partial, sum or gradient has the
    number of the value that it belongs to. A result has its position among the results,
    a residual among the segment's residuals, a leaf of the optimizer state among the
    leaves. Weights and their total have 0."""
    of: int = 0
    """Node that made a cotangent or sum; segment that made a residual or partial. 1 for
    a constant of the optimizer's program."""
    microbatch: int | None = None
    """Number of the microbatch, or `EACH`; None for an array that exists once in a
    step."""

    def at(self, microbatch: int) -> "Key":
        """Returns the name of the array of one microbatch.

        The name's field `microbatch` gets the number `microbatch` if it has the
        placeholder `EACH`; another name is returned unchanged.
        """
        return self._replace(microbatch=microbatch) if self.microbatch == EACH else self


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeCall:
    """A program on a node, with the arrays that it reads, writes and sends."""

    node: int
    phase: Phase
    segment: int = 0
    """Number of the segment of the loss (phases `forward`, `backward`) or of the
    optimizer's program (`update`). In other phases it distinguishes calls of the same
    phase."""
    reads: tuple[Key, ...] = field(default=(), repr=False)
    writes: tuple[Key, ...] = field(default=(), repr=False)
    sends: tuple[tuple[Key, int], ...] = field(default=(), repr=False)
    """Pairs of an array and the node that gets the array after the call."""
    program: ClosedJaxpr | None = field(default=None, repr=False)
    """Program from reads to writes; None if the call only sends what it reads."""
    donated: tuple[int, ...] = field(default=(), repr=False)
    """Positions in `reads` of the arrays whose memory is donated to the results."""

    @property
    def name(self) -> str:
        """Name of the call: phase and number of the segment, such as `backward 3`."""
        return f"{self.phase} {self.segment}"


class Task(NamedTuple):
    """A call (a program on one node) for a microbatch.

    `microbatch` is None for a call that is made once in a step.
    """

    call: NodeCall
    microbatch: int | None = None

    @property
    def reads(self) -> tuple[Key, ...]:
        """Keys of the arrays that the task reads."""
        return self._of(self.call.reads)

    @property
    def writes(self) -> tuple[Key, ...]:
        """Keys of the arrays that the task writes."""
        return self._of(self.call.writes)

    @property
    def sends(self) -> tuple[tuple[Key, int], ...]:
        """Pairs of the key of an array and the node that gets the array."""
        at = self.microbatch
        if at is None:
            return self.call.sends
        return tuple((key.at(at), node) for key, node in self.call.sends)

    def _of(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        at = self.microbatch
        return keys if at is None else tuple(key.at(at) for key in keys)


@dataclass(frozen=True, kw_only=True, order=True)
class NodeTransfer:
    """The number and bytes of the arrays that a node sends to another node in a step.

    It counts only the arrays of one `kind` (`Key.kind`), such as `cotangent`.
    """

    source: int
    destination: int
    kind: Kind
    count: int
    """Number of arrays."""
    num_bytes: int
    """Bytes of all arrays together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """All calls of a step, each a program on one node.

    Some are made once, before or after the microbatches, the others for each
    microbatch.
    """

    begin: tuple[NodeCall, ...] = ()
    """Calls made once, before the first microbatch."""
    each: tuple[NodeCall, ...] = ()
    """Calls made for each microbatch: the forward call of every segment, and the
    backward call of every segment that makes values with a gradient."""
    end: tuple[NodeCall, ...] = ()
    """Calls made once, after the last microbatch, in an order in which they can run."""
    num_bytes: Mapping[Key, int] = field(default_factory=dict)
    """Map from an array's key to the array's bytes, for each array that is sent."""

    def then(self, more: "Calls") -> "Calls":
        """Returns these calls, followed by those that `more` makes last in a step.

        The added calls are made once, after the last microbatch (`more.end`). The
        result also has the bytes of each array that `more` sends (`num_bytes`). All
        other calls of `more` are left out.
        """
        return replace(
            self,
            end=(*self.end, *more.end),
            num_bytes={**self.num_bytes, **more.num_bytes},
        )

    def transfers(self, num_microbatches: int) -> tuple[NodeTransfer, ...]:
        """Counts the arrays and bytes that a step sends.

        The result has an entry for each pair of nodes and each kind of array
        (`Key.kind`), such as `cotangent`.
        """
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
    """Returns which arrays a node must send: pairs of a key and a receiving node.

    Args:
        keys: keys (names) of the arrays that a node makes.
        node: the node that makes the arrays; it sends nothing to itself.
        wanted: map from a key to the nodes that need its array.
    """
    return tuple(
        (key, other)
        for key in keys
        for other in sorted(set(wanted.get(key, ())))
        if other != node
    )


def usable(program: ClosedJaxpr, candidates: Iterable[int]) -> tuple[int, ...]:
    """Selects arguments that can be donated to a program, by shape and dtype.

    Args:
        program: the program.
        candidates: positions of arguments that are not needed later.

    Returns:
        Positions of arguments. Each argument has the shape and dtype of a result, and
        no two arguments share a result.
    """
    left = Counter((a.shape, a.dtype) for a in program.out_avals)
    found: list[int] = []
    for position in candidates:
        aval = program.in_avals[position]
        if left[aval.shape, aval.dtype]:
            left[aval.shape, aval.dtype] -= 1
            found.append(position)
    return tuple(found)


# The order of each node's calls is one forward, one backward (PipeDream, Narayanan et
# al. 2019; its flushed form as in Megatron-LM 2021), for any graph of segments. The
# call that can start first runs first; a backward call goes before a forward call. The
# number of microbatches between the forward and backward call of a segment is at most
# the number of nodes from the segment to the loss. For a chain of stages this is 1F1B
# as published.


BACKWARD = 2.0
"""Expected seconds of a segment's backward call, as a multiple of the seconds of its
forward call. `order` uses this factor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CallOrder:
    """The tasks of a step, in order for each node, and their expected starts.

    A task is a call for one microbatch, or a call that is made once in a step. Forward
    and backward tasks have an expected start, other tasks have none.
    """

    by_node: Mapping[int, tuple[Task, ...]]
    """Map from a node to its tasks, in order."""
    start_s: Mapping[Task, float]
    """Expected start of each forward and backward task, in seconds, if transfers take
    no time."""
    finish_s: float
    """Expected end of the last forward or backward task, in seconds."""

    def without(self, calls: Calls) -> "CallOrder":
        """Returns the order without those tasks that `calls` adds to the end of a step.

        These tasks are made once, after the last microbatch (`calls.end`). For example,
        without the calls of an optimizer's update a step only computes gradients.
        """
        return replace(
            self,
            by_node={
                node: tuple(task for task in tasks if task.call not in calls.end)
                for node, tasks in self.by_node.items()
            },
        )


def order(calls: Calls, num_microbatches: int, seconds: Sequence[float]) -> CallOrder:
    """Computes the order in which each node runs its tasks of a step.

    A task is a call for one microbatch, or a call that is made once. The order has no
    deadlock, because the calls of a microbatch never wait for a newer microbatch. A
    microbatch is in flight between the forward and the backward call of a segment. A
    segment has at most as many microbatches in flight as there are different nodes that
    compute this segment and all later segments.

    Args:
        calls: the calls of a step.
        num_microbatches: number of microbatches.
        seconds: expected seconds of the forward call of each segment; its backward call
            is expected to take twice as long.
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
    """A simulation of all forward and backward tasks, which finds their order.

    It schedules one call after another: always the one that can start first of those
    whose inputs are scheduled.
    """

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
            # The backward call of a linear segment would not need its forward call.
            if call.phase == "backward":
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
        """Returns the start of every task, and the end of the last task, in seconds.

        In the map of starts, the tasks of each node are in order of execution.
        """
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
        """Returns, for each call, which calls may have to wait until it ends.

        Entry i is the set of the indices of the calls that may wait for call i. A call
        is in its own set, because the same call for the next microbatch waits too.
        """
        found = [{index} for index in range(len(self._calls))]
        for index, before in enumerate(self._before):
            for other in before:
                found[other].add(index)
                if self._back.get(self._calls[index].segment) == index:
                    # A backward call frees a microbatch's place in the segment.
                    found[index].add(other)
        return found

    def _look(self, some: Iterable[int]) -> None:
        """Recomputes the earliest starts of calls for their next microbatch.

        `some` has the indices of the calls. A call that has no next microbatch, or
        waits for a call without a scheduled time, cannot start: `_first` then does not
        select it.
        """
        for index in some:
            ready = self._ready(index)
            if ready is None:
                self._startable.pop(index, None)
            else:
                self._startable[index] = ready

    def _first(self, free: Mapping[int, float]) -> tuple[float, int]:
        """Returns the start and the index of the call that can start first.

        The start is in seconds since the step began. Of calls that can start at the
        same time, a backward call has priority. `free` maps a node to the time at which
        its last scheduled call ends.
        """
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
        """Returns the time when the call `index` can start for its next microbatch.

        The time is in seconds since the step began. Returns None if the call has no
        next microbatch, or if a call for which it must wait is not yet scheduled. A
        call waits for the calls that make its inputs; a forward call also waits for
        calls of an older microbatch (see `_let_in`).
        """
        part = self._next[index]
        if part == self._parts:
            return None
        ends = [self._end.get((before, part)) for before in self._before[index]]
        if self._calls[index].phase == "forward":
            ends.append(self._let_in(index, part))
        return None if None in ends else max((e for e in ends if e), default=0.0)

    def _let_in(self, index: int, part: int) -> float | None:
        """Returns the time from which a segment may begin the microbatch `part`.

        The time is in seconds since the step began. `index` is the index of the
        segment's forward call. At most L microbatches, the segment's limit by
        `_most_in_flight`, may be between its forward and its backward call. For the
        first L microbatches the time is 0.0. A later microbatch waits for the end of
        the segment's backward call for microbatch `part` - L. If the segment has no
        backward call, it waits for the end of all calls of that microbatch. Returns
        None if this end is not yet scheduled.
        """
        gone = part - self._most[self._calls[index].segment]
        if gone < 0:
            return 0.0
        back = self._back.get(self._calls[index].segment)
        if back is not None:
            return self._end.get((back, gone))
        whole = self._done_calls[gone] == len(self._calls)
        return self._done_s[gone] if whole else None


def _most_in_flight(calls: Sequence[NodeCall]) -> dict[int, int]:
    """Maps each segment to its limit of microbatches in flight.

    A microbatch is in flight between the segment's forward and backward call. The limit
    is the number of different nodes of the segment and all later segments.
    """
    nodes: set[int] = set()
    found: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: -call.segment):
        nodes.add(call.node)
        found[call.segment] = len(nodes)
    return found
