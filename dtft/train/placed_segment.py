"""A segment as two programs: forward with residuals, and backward.

The backward program is the transposed derivative as `jax.vjp` has it, so rules of
derivatives hold. What it needs is kept, not computed again; what the segment reads or
writes anyway is not kept twice. Traces only; must not know nodes or microbatches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from dtft.planner.ir import is_var
from dtft.train.placed_calls import EACH, Key
from dtft.train.placed_cut import Segment


class Split:
    """A segment's forward and backward programs."""

    def __init__(
        self,
        program: ClosedJaxpr,
        segment: Segment,
        used: Sequence[int],
        made: Sequence[int],
    ) -> None:
        """Traces it, differentiated: `used` of what it reads, `made` of its writes."""
        self.used, self.made = used, made
        self.like: dict[Key, jax.ShapeDtypeStruct] = {}
        run = _transposable(program, segment, used, made)
        likes = [struct(var) for var in program.jaxpr.invars]
        self._traced, shapes = jax.make_jaxpr(run, return_shape=True)(*likes)
        self._tree = jax.tree.structure(shapes[1])
        written = dict(zip(segment.writes, program.jaxpr.outvars, strict=True))
        self._dtypes = [struct(written[number]).dtype for number in made]

    def residuals(
        self, reads: Sequence[Key], writes: Sequence[Key], index: int
    ) -> tuple[list[Key], list[Key]]:
        """Keys of what the backward program needs, and of those that are new.

        What is read or written anyway is not kept twice.
        """
        jaxpr = self._traced.jaxpr
        known: dict[Any, Key] = dict(zip(jaxpr.invars, reads, strict=True))
        for var, key in zip(jaxpr.outvars, writes, strict=False):
            if is_var(var):
                known.setdefault(var, key)
        keys: list[Key] = []
        kept: list[Key] = []
        for position, atom in enumerate(jaxpr.outvars[len(writes) :]):
            key = known.get(atom) if is_var(atom) else None
            if key is None:
                key = Key("residual", position, index, EACH)
                kept.append(key)
                if is_var(atom):
                    known[atom] = key
            self.like[key] = struct(atom)
            keys.append(key)
        return keys, kept

    def forward(
        self, num_writes: int, kept: Sequence[Key], residuals: Sequence[Key]
    ) -> ClosedJaxpr:
        """From what is read to what is written and the residuals that are new."""
        jaxpr = self._traced.jaxpr
        outvars = list(jaxpr.outvars)
        new = [outvars[num_writes + residuals.index(key)] for key in kept]
        pruned = jaxpr.replace(outvars=[*outvars[:num_writes], *new])
        return ClosedJaxpr(pruned, self._traced.consts)

    def backward(
        self,
        likes: Sequence[jax.ShapeDtypeStruct],
        residuals: Sequence[int],
        arriving: Sequence[Sequence[int]],
        earlier: Sequence[int | None],
    ) -> ClosedJaxpr:
        """From residuals, cotangents and what is added to, all by position."""
        dtypes = self._dtypes

        def run(*read: jax.Array) -> list[jax.Array]:
            transposed = jax.tree.unflatten(self._tree, [read[p] for p in residuals])
            cotangents = tuple(
                sum(
                    (read[p].astype(dtype) for p in some[1:]),
                    read[some[0]].astype(dtype),
                )
                for some, dtype in zip(arriving, dtypes, strict=True)
            )
            found = transposed(cotangents)
            return [
                value if place is None else read[place] + value
                for value, place in zip(found, earlier, strict=True)
            ]

        return jax.make_jaxpr(run)(*likes)


def _transposable(
    program: ClosedJaxpr, segment: Segment, used: Sequence[int], made: Sequence[int]
) -> Callable[..., Any]:
    """From what a segment reads to what it writes, and its transposed derivative."""
    run = jaxpr_as_fun(program)
    places = [segment.reads.index(number) for number in used]

    def forward(*read: jax.Array) -> tuple[list[jax.Array], Any]:
        def of_used(*values: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
            arguments = list(read)
            for place, value in zip(places, values, strict=True):
                arguments[place] = value
            written = dict(zip(segment.writes, run(*arguments), strict=True))
            return tuple(written[n] for n in made), written

        _, transposed, written = jax.vjp(
            of_used, *(read[place] for place in places), has_aux=True
        )
        return [written[n] for n in segment.writes], transposed

    return forward


def struct(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape of a variable, or of a constant, of a program."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
