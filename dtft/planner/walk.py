"""Follows a JAX program equation by equation and notes what it is made of.

Decides how calls, loops, branches and rematerialized parts are entered, and how dims
go through them; what an operator does to dims and costs is asked of `linking` and
`flops`. Must not know meshes, devices or which argument is what (`trace` does).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from dtft._jax_internals import scan_arguments
from dtft.planner.dims import Numbers
from dtft.planner.drafts import Drafts, Known, Step
from dtft.planner.flops import count
from dtft.planner.graph import Loop
from dtft.planner.jaxprs import CALLS, bodies
from dtft.planner.linking import link
from dtft.planner.linking_products import contracted
from dtft.planner.trips import while_trips

_AGAIN = "rematted_computation"
"""JAX's mark, in the name stack, of what a backward pass computes again."""


class Frame(NamedTuple):
    """Where in the program the walk is."""

    trips: int = 1
    within: tuple[int, ...] = ()
    members: int = 1
    """Devices that run it at the same time, each on its part (shard_map)."""
    name: str = ""
    recomputes: bool = False
    """Inside the backward pass of a rematerialized function."""
    again: bool = False
    """All of it is computed again."""


class Walk:
    """A program being followed."""

    def __init__(self) -> None:
        self.found = Drafts()
        """What was found so far."""

    def run(self, jaxpr: Jaxpr, operands: Sequence[Known], frame: Frame) -> list[Known]:
        """Follows a body from its operands to its results."""
        known: dict[Any, Known] = {v: self.found.value(v.aval) for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.eqns:
            read = [a if isinstance(a, Literal) else known[a] for a in eqn.invars]
            results = self._equation(eqn, read, frame)
            known.update(zip(eqn.outvars, results, strict=True))
        return [a if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> Sequence[Known]:
        if eqn.primitive.name not in CALLS:
            return self._operator(eqn, operands, frame)
        inner = self._inside(eqn, frame)
        enter = _ENTER.get(eqn.primitive.name, Walk._call)
        return enter(self, eqn, operands, inner)

    def _call(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        (body,) = bodies(eqn)
        return self.run(body, operands, frame)

    def _inside(self, eqn: JaxprEqn, frame: Frame) -> Frame:
        stack = str(eqn.source_info.name_stack)
        again = frame.again or (frame.recomputes and _AGAIN in stack)
        if eqn.primitive.name in ("jit", "pjit"):
            stack = _joined(stack, f"jit({eqn.params['name']})")
        recomputes = frame.recomputes or bool(eqn.params.get("differentiated"))
        return frame._replace(
            name=_joined(frame.name, stack), again=again, recomputes=recomputes
        )

    def _operator(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> tuple[int, ...]:
        found = link(
            self.found.dims, eqn, [self.found.numbers(known) for known in operands]
        )
        outputs = tuple(
            self.found.value(atom.aval, numbers)
            for atom, numbers in zip(eqn.outvars, found.outputs, strict=True)
        )
        name = eqn.primitive.name
        read: list[Any] = [atom.aval for atom in eqn.invars]
        written: list[Any] = [atom.aval for atom in eqn.outvars]
        kind, flops = count(name, read, written, eqn.params)
        stack = str(eqn.source_info.name_stack)
        self.found.steps.append(
            Step(
                primitive=name,
                kind=kind,
                inputs=tuple(k for k in operands if not isinstance(k, Literal)),
                outputs=outputs,
                flops=flops * frame.members,
                summed=found.summed,
                contracted=contracted(eqn),
                whole=found.whole,
                again=frame.again or (frame.recomputes and _AGAIN in stack),
                within=frame.within,
                trips=frame.trips,
                name=_joined(frame.name, stack),
            )
        )
        return outputs

    def _scan(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        found, length = self.found, eqn.params["length"]
        num_consts, carry = scan_arguments(eqn)
        consts = operands[:num_consts]
        held = [found.held(known) for known in operands[len(consts) :]]
        before, sliced = held[:carry], held[carry:]
        place, inner = self._loop(frame, length)
        along = found.dims.new(length, loop=True)
        into = [found.copy(index) for index in before]
        parts = [found.part(index, along) for index in sliced]
        start = len(found.steps)
        (body,) = bodies(eqn)
        results = self.run(body, [*consts, *into, *parts], inner)
        out = [found.held(known) for known in results]
        after = found.carried(before, out[:carry])
        whole = [
            found.value(atom.aval, (along, *found.values[index].dims))
            for atom, index in zip(eqn.outvars[carry:], out[carry:], strict=True)
        ]
        found.loops[place] = Loop(
            length=length,
            primitive="scan",
            operators=(start, len(found.steps)),
            sliced=tuple(zip(sliced, parts, strict=True)),
            stacked=tuple(zip(out[carry:], whole, strict=True)),
            carried=tuple(zip(before, into, out[:carry], after, strict=True)),
            again=frame.again,
        )
        return [*after, *whole]

    def _while(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        found, (condition, body) = self.found, bodies(eqn)
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        texts = [k.val if isinstance(k, Literal) else None for k in operands]
        trips = while_trips(eqn, texts)
        length = 1 if trips is None else trips
        place, inner = self._loop(frame, length)
        before = [found.held(known) for known in operands[second:]]
        into = [found.copy(index) for index in before]
        start = len(found.steps)
        self.run(condition, [*operands[:first], *into], inner)
        results = self.run(body, [*operands[first:second], *into], inner)
        out = [found.held(known) for known in results]
        after = found.carried(before, out)
        if trips is None:
            found.endless["while"] += frame.trips * found.bytes_since(start)
        found.loops[place] = Loop(
            length=length,
            primitive="while",
            operators=(start, len(found.steps)),
            carried=tuple(zip(before, into, out, after, strict=True)),
            again=frame.again,
        )
        return list(after)

    def _cond(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        """Every branch is followed; what the costliest does counts."""
        found, best = self.found, -1.0
        results: list[list[int]] = []
        chosen: list[int] = []
        counted: list[Step] = []
        for branch in bodies(eqn):
            first = len(found.steps)
            outs = self.run(branch, operands[1:], frame)
            results.append([found.held(known) for known in outs])
            steps = found.steps[first:]
            work = sum(step.flops * step.trips for step in steps)
            idle = steps if work <= best else counted
            for step in idle:
                step.trips = 0
            if work > best:
                best, counted, chosen = work, steps, results[-1]
        for other in results:
            for one, two in zip(chosen, other, strict=True):
                found.join(one, two)
        return list(chosen)

    def _shard_map(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> list[Known]:
        """Inside, arrays are one device's part; a divided dim is another one there."""
        params, (body,) = eqn.params, bodies(eqn)
        manual = params.get("newly_manual_axes", params.get("manual_axes", ()))
        members = math.prod(params["mesh"].shape[axis] for axis in manual)
        local = self._through(operands, body.invars, params["in_specs"])
        inner = frame._replace(members=frame.members * members)
        results = self.run(body, local, inner)
        return self._through(results, eqn.outvars, params["out_specs"])

    def _through(
        self, outside: Sequence[Known], atoms: Sequence[Any], specs: Sequence[Any]
    ) -> list[Known]:
        """Arrays as they are on the other side of a shard_map."""
        return [
            self.found.value(
                atom.aval,
                self._undivided(self.found.numbers(known), atom.aval.shape, spec),
            )
            for known, atom, spec in zip(outside, atoms, specs, strict=True)
        ]

    def _undivided(self, dims: Numbers, shape: Sequence[int], spec: Any) -> Numbers:
        """The dims that a spec leaves as they are, and new ones for the others."""
        parts = (*spec, *(None,) * (len(dims) - len(tuple(spec))))
        return tuple(
            self.found.dims.new(size) if part else number
            for number, size, part in zip(dims, shape, parts, strict=True)
        )

    def _loop(self, frame: Frame, length: int) -> tuple[int, Frame]:
        self.found.loops.append(None)
        place = len(self.found.loops) - 1
        within = (*frame.within, place)
        return place, frame._replace(trips=frame.trips * length, within=within)


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


_ENTER = {
    "scan": Walk._scan,
    "while": Walk._while,
    "cond": Walk._cond,
    "shard_map": Walk._shard_map,
}
