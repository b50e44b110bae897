"""The calls that compute a loss and its gradients from a program cut into segments.

Per segment a forward call, which keeps what the backward call needs (residuals) on its
node, and a backward call, which is its transposed derivative. A value that segments of
several nodes use gets a cotangent from each such node, added up where the value was
made; a parameter used on several nodes has one home, where its gradients are added.
Traces only; must not know devices, optimizers or the order of calls.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dtft.train.placed_active import between, check
from dtft.train.placed_calls import EACH, Call, Calls, Key, sends
from dtft.train.placed_cut import Cut, Segment
from dtft.train.placed_ends import Ends
from dtft.train.placed_segment import Split, struct


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """The calls, and where what they need and make is."""

    calls: Calls
    active: frozenset[int]
    """Numbers of the values that lie between a parameter and the loss."""
    homes: tuple[int, ...]
    """Node of each parameter."""
    inputs: tuple[tuple[Key, int], ...]
    """What the caller puts into the stores of nodes: batch, constants and weights."""
    results: tuple[tuple[Key, int], ...]
    """Where each result of the loss is in the end."""
    gradients: tuple[tuple[Key, int], ...]
    """Where the gradient of each parameter is in the end."""


def differentiated(cut: Cut, num_params: int, num_microbatches: int) -> Gradients:
    """Calls for the value and the gradients of a loss.

    Args:
        cut: of a program whose first result is the loss, a scalar.
        num_params: how many of its first arguments are parameters.
        num_microbatches: parts of the batch; each has a `weight`.

    Raises:
        ValueError: the loss is no floating-point scalar that depends on parameters, a
            parameter is no floating-point array, or a result cannot be averaged over
            microbatches.
    """
    return _Differentiation(cut, num_params, num_microbatches).calls()


@dataclass(kw_only=True)
class _Users:
    """Who uses values."""

    by_node: dict[int, dict[int, list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Value, node: segments that a cotangent comes from, ascending."""
    nodes: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nodes that read a key."""


class _Differentiation:
    def __init__(self, cut: Cut, num_params: int, num_microbatches: int) -> None:
        self._cut, self._parts = cut, num_microbatches
        self._params = cut.arguments[:num_params]
        self._batch = set(cut.arguments[num_params:])
        self._maker = {n: s for s in cut.segments for n in s.writes}
        check(cut, self._params, num_microbatches)
        self._active = between(cut, self._params)
        self._users = _Users()
        for index, segment in enumerate(cut.segments):
            for number in segment.reads:
                self._users.nodes[self._key(number)].append(segment.node)
                if number in self._active and self._active.intersection(segment.writes):
                    self._users.by_node[number][segment.node].append(index)
        self._homes = {n: self._home(n) for n in self._params}

    def calls(self) -> Gradients:
        each: list[Call] = []
        for index, segment in enumerate(self._cut.segments):
            each += self._segment(index, segment)
        ends = self._ends()
        first, last = ends.first(), ends.last()
        sent = [key for call in (*first, *each, *last) for key, _ in call.sends]
        return Gradients(
            calls=Calls(
                begin=first,
                each=tuple(each),
                end=last,
                num_bytes={key: self._bytes(key) for key in sent},
            ),
            active=self._active,
            homes=tuple(self._homes[n] for n in self._params),
            inputs=self._inputs(each, last),
            results=tuple(
                (Key("result", place), self._node_of_result(place))
                for place in range(len(self._cut.results))
            ),
            gradients=tuple(
                (Key("gradient", number), self._homes[number])
                for number in self._params
            ),
        )

    # Where things are.

    def _key(self, number: int) -> Key:
        if number in self._params:
            return Key("param", number)
        if number in self._cut.constants:
            return Key("constant", number)
        return Key("value", number, microbatch=EACH)

    def _home(self, param: int) -> int:
        users = self._users.nodes[Key("param", param)]
        return users[0] if users else self._cut.segments[0].node

    def _node_of_result(self, place: int) -> int:
        number = self._cut.results[place]
        assert isinstance(number, int)
        return self._maker[number].node

    def _ends(self) -> Ends:
        by_node, results = self._users.by_node, self._cut.results
        numbers = [number for number in results if isinstance(number, int)]
        return Ends(
            like={
                number: struct(self._cut.variables[number])
                for number in (*self._params, *numbers)
            },
            homes=self._homes,
            summing={
                number: sorted({home, *by_node[number]})
                for number, home in self._homes.items()
            },
            readers=self._users.nodes,
            results=[(n, self._maker[n].node) for n in numbers],
            num_microbatches=self._parts,
        )

    def _bytes(self, key: Key) -> int:
        aval: Any = self._cut.variables[key.number].aval
        return aval.size * aval.dtype.itemsize

    def _inputs(
        self, each: Sequence[Call], end: Sequence[Call]
    ) -> tuple[tuple[Key, int], ...]:
        outside = ("constant", "weight", "total")
        found = {
            (key, call.node)
            for call in (*each, *end)
            for key in call.reads
            if key.kind in outside
            or (key.kind == "value" and key.number in self._batch)
        }
        return tuple(sorted(found, key=str))

    # Calls of each microbatch.

    def _segment(self, index: int, segment: Segment) -> list[Call]:
        program = self._cut.program(segment)
        reads = tuple(map(self._key, segment.reads))
        writes = tuple(map(self._key, segment.writes))
        outgoing = sends(writes, segment.node, self._users.nodes)
        forward = Call(
            node=segment.node,
            phase="forward",
            segment=index,
            reads=reads,
            writes=writes,
            sends=outgoing,
            program=program,
        )
        made = [n for n in segment.writes if n in self._active]
        if not made:
            return [forward]
        used = [n for n in segment.reads if n in self._active]
        split = Split(program, segment, used, made)
        residuals, kept = split.residuals(reads, writes, index)
        both = Call(
            node=segment.node,
            phase="forward",
            segment=index,
            reads=reads,
            writes=(*writes, *kept),
            sends=outgoing,
            program=split.forward(len(writes), kept, residuals),
        )
        return [both, self._backward(index, segment, split, residuals)]

    def _backward(
        self, index: int, segment: Segment, split: "Split", residuals: list[Key]
    ) -> Call:
        arriving = [self._cotangents(number) for number in split.made]
        earlier = [self._earlier(index, n, segment.node) for n in split.used]
        results = [self._later(index, n, segment.node) for n in split.used]
        flat = [key for keys in arriving for key in keys]
        added = [key for key in earlier if key]
        reads = list(dict.fromkeys((*residuals, *flat, *added)))
        place = {key: position for position, key in enumerate(reads)}
        return Call(
            node=segment.node,
            phase="backward",
            segment=index,
            reads=tuple(reads),
            writes=tuple(results),
            sends=self._returned(results, segment.node),
            program=split.backward(
                [self._like(key, split) for key in reads],
                [place[key] for key in residuals],
                [[place[key] for key in keys] for keys in arriving],
                [place[key] if key else None for key in earlier],
            ),
            donated=tuple(place[key] for key in added),
        )

    def _cotangents(self, number: int) -> list[Key]:
        """What adds up to the cotangent of a value that a segment makes."""
        if number == self._cut.results[0]:
            return [Key("weight", microbatch=EACH)]
        return [
            Key("cotangent", number, node, EACH)
            for node in sorted(self._users.by_node[number])
        ]

    def _earlier(self, index: int, number: int, node: int) -> Key | None:
        """What a call adds its cotangent to."""
        if number in self._params:
            return Key("sum", number, node)
        later = [s for s in self._users.by_node[number][node] if s > index]
        return Key("partial", number, later[0], EACH) if later else None

    def _later(self, index: int, number: int, node: int) -> Key:
        """What a call's cotangent, so added, is."""
        if number in self._params:
            return Key("sum", number, node)
        if self._users.by_node[number][node][0] == index:
            return Key("cotangent", number, node, EACH)
        return Key("partial", number, index, EACH)

    def _returned(self, results: Sequence[Key], node: int) -> tuple[Any, ...]:
        makers = {
            key: [self._maker[key.number].node]
            for key in results
            if key.kind == "cotangent"
        }
        return sends(results, node, makers)

    def _like(self, key: Key, split: "Split") -> jax.ShapeDtypeStruct:
        if key.kind == "residual":
            return split.like[key]
        if key.kind == "weight":
            return jax.ShapeDtypeStruct((), jnp.float32)
        return struct(self._cut.variables[key.number])
