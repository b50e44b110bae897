"""The calls of a placed step that are made once: before and after its microbatches.

Before, parameters go to nodes that use them beside their home and sums begin at zero;
after, sums of gradients meet at the homes of their parameters, and results of the loss
become means. Traces only; must not know devices or segments.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtft.train.placed_calls import Call, Key, sends, usable

_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """What the calls made once depend on."""

    like: Mapping[int, jax.ShapeDtypeStruct]
    """Of parameters and results."""
    homes: Mapping[int, int]
    """Node of each parameter."""
    summing: Mapping[int, Sequence[int]]
    """Nodes where gradients of a parameter arise, its home among them."""
    readers: Mapping[Key, Sequence[int]]
    """Nodes that read a parameter."""
    results: Sequence[tuple[int, int]]
    """Number and node of each result."""
    num_microbatches: int

    @property
    def _nodes(self) -> list[int]:
        return sorted({node for nodes in self.summing.values() for node in nodes})

    def first(self) -> tuple[Call, ...]:
        """The calls before the first microbatch."""
        return tuple(map(self._begin, self._nodes))

    def last(self) -> tuple[Call, ...]:
        """The calls after the last microbatch."""
        return (*self._reduce(), *self._finish(), *self._results())

    def _begin(self, node: int) -> Call:
        """Sends parameters to where they are used too, and begins sums at zero."""
        mine = [n for n in self.homes if self.homes[n] == node]
        summed = [n for n in self.homes if node in self.summing[n]]
        likes = [self.like[n] for n in summed]

        def zeros() -> list[jax.Array]:
            return [jnp.zeros(like.shape, like.dtype) for like in likes]

        return Call(
            node=node,
            phase="begin",
            writes=tuple(Key("sum", number, node) for number in summed),
            sends=sends((Key("param", number) for number in mine), node, self.readers),
            program=jax.make_jaxpr(zeros)(),
        )

    def _reduce(self) -> list[Call]:
        """Sums go to the homes of their parameters."""
        calls: list[Call] = []
        for node in self._nodes:
            away = [
                (Key("sum", number, node), self.homes[number])
                for number in self.homes
                if node in self.summing[number] and node != self.homes[number]
            ]
            if away:
                reads = tuple(key for key, _ in away)
                calls.append(
                    Call(node=node, phase="reduce", reads=reads, sends=tuple(away))
                )
        return calls

    def _finish(self) -> list[Call]:
        """Sums of all nodes over the total weight: the gradients."""
        calls: list[Call] = []
        for node in self._nodes:
            mine = [n for n in self.homes if self.homes[n] == node]
            parts = [[Key("sum", n, s) for s in self.summing[n]] for n in mine]
            reads = [key for keys in parts for key in keys]
            if not mine:
                continue
            likes = [[self.like[k.number] for k in p] for p in parts]
            program = jax.make_jaxpr(_over)(_SCALAR, likes)
            calls.append(
                Call(
                    node=node,
                    phase="finish",
                    reads=(Key("total"), *reads),
                    writes=tuple(Key("gradient", number) for number in mine),
                    program=program,
                    donated=usable(program, range(1, 1 + len(reads))),
                )
            )
        return calls

    def _results(self) -> list[Call]:
        """Means of results over microbatches, weighted."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, (_, node) in enumerate(self.results):
            places[node].append(place)
        return [self._means(node, some) for node, some in sorted(places.items())]

    def _means(self, node: int, places: Sequence[int]) -> Call:
        parts = range(self.num_microbatches)
        numbers = [self.results[place][0] for place in places]
        values = [[Key("value", n, microbatch=j) for j in parts] for n in numbers]
        distinct = list(dict.fromkeys(key for keys in values for key in keys))
        at = {key: position for position, key in enumerate(distinct)}

        def means(total: Any, weights: list[Any], found: list[Any]) -> list[Any]:
            return [
                _mean(total, weights, [found[at[key]] for key in keys])
                for keys in values
            ]

        likes = [self.like[key.number] for key in distinct]
        weights = [Key("weight", microbatch=j) for j in parts]
        return Call(
            node=node,
            phase="finish",
            segment=1,
            reads=(Key("total"), *weights, *distinct),
            writes=tuple(Key("result", place) for place in places),
            program=jax.make_jaxpr(means)(_SCALAR, [_SCALAR] * len(parts), likes),
        )


def _over(total: jax.Array, parts: list[list[jax.Array]]) -> list[jax.Array]:
    return [sum(some[1:], some[0]) / total.astype(some[0].dtype) for some in parts]


def _mean(total: jax.Array, weights: list[jax.Array], found: list[jax.Array]) -> Any:
    if len(found) == 1:
        return found[0]
    scaled = [v * w.astype(v.dtype) for v, w in zip(found, weights, strict=True)]
    return sum(scaled[1:], scaled[0]) / total.astype(scaled[0].dtype)
