"""What nodes call and what they tell each other in a placed step, as plain values.

A `Call` is one program on one node, a `Key` the name of an array in the stores of
nodes. Decides nothing: `placed_gradients` and `placed_update` make calls, in
`placed_order` they get their order, `placed_node` makes them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jax.extend.core import ClosedJaxpr

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
class Call:
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

    call: Call
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
class Transfer:
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

    begin: tuple[Call, ...] = ()
    """Once, before the first microbatch."""
    each: tuple[Call, ...] = ()
    """For each microbatch: forward and backward of every segment."""
    end: tuple[Call, ...] = ()
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

    def transfers(self, num_microbatches: int) -> tuple[Transfer, ...]:
        """What one step sends between nodes, by link and kind."""
        found: dict[tuple[int, int, Kind], list[int]] = {}
        for call in (*self.begin, *self.each, *self.end):
            times = num_microbatches if call in self.each else 1
            for key, node in call.sends:
                entry = found.setdefault((call.node, node, key.kind), [0, 0])
                entry[0] += times
                entry[1] += times * self.num_bytes[key]
        return tuple(
            Transfer(
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
