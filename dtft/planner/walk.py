"""Follows a JAX program equation by equation and notes what it is made of.

Decides how calls, loops, branches and rematerialized parts are entered, and how dims
go through them; what an operator does to dims and costs is asked of `linking` and
`flops`. Must not know meshes, devices or which argument is what (`trace` does).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from dtft.planner.calls import Body, bodies, opened, while_trips
from dtft.planner.dims import Dims, Numbers
from dtft.planner.flops import count
from dtft.planner.graph import Kind, Loop, item_bits
from dtft.planner.linking import link

Known = int | Literal
"""An array of the program: the index of its value, or a number of its text."""

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


class Draft(NamedTuple):
    """A value before dims are final."""

    shape: tuple[int, ...]
    dtype: str
    dims: Numbers


@dataclass(slots=True)
class Step:
    """An operator before dims are final."""

    primitive: str
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    summed: Numbers
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    whole: Numbers
    again: bool
    within: tuple[int, ...]
    trips: int
    name: str


class Walk:
    """What was found so far."""

    def __init__(self) -> None:
        self.dims = Dims()
        self.values: list[Draft] = []
        self.steps: list[Step] = []
        self.loops: list[Loop | None] = []
        self.endless: Counter[str] = Counter()
        """Bytes of one pass of the loops whose trips are not known."""
        self._dtypes: dict[Any, str] = {}

    def value(self, aval: Any, dims: Numbers | None = None) -> int:
        """A new array; its dims are new where none are given."""
        shape = tuple(getattr(aval, "shape", ()))
        dtype = self._dtype(getattr(aval, "dtype", None))
        numbers = self.dims.news(shape) if dims is None else dims
        self.values.append(Draft(shape, dtype, numbers))
        return len(self.values) - 1

    def held(self, known: Known) -> int:
        """The array's value; a number of the text becomes one."""
        return self.value(known.aval) if isinstance(known, Literal) else known

    def run(self, body: Body, operands: Sequence[Known], frame: Frame) -> list[Known]:
        """Follows a body from its operands to its results."""
        jaxpr = opened(body)
        known: dict[Any, Known] = {v: self.value(v.aval) for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.eqns:
            read = [a if isinstance(a, Literal) else known[a] for a in eqn.invars]
            results = self._equation(eqn, read, frame)
            known.update(zip(eqn.outvars, results, strict=True))
        return [a if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> Sequence[Known]:
        called = bodies(eqn)
        if not called:
            return self._operator(eqn, operands, frame)
        inner = self._inside(eqn, frame)
        enter = _ENTER.get(eqn.primitive.name)
        if enter is not None:
            return enter(self, eqn, operands, inner)
        return self.run(called[0], operands, inner)

    def _inside(self, eqn: JaxprEqn, frame: Frame) -> Frame:
        stack = str(eqn.source_info.name_stack)
        again = frame.again or (frame.recomputes and _AGAIN in stack)
        if eqn.primitive.name in ("jit", "pjit"):
            stack = (
                f"{stack}/jit({eqn.params['name']})"
                if stack
                else (f"jit({eqn.params['name']})")
            )
        recomputes = frame.recomputes or bool(eqn.params.get("differentiated"))
        return frame._replace(
            name=_joined(frame.name, stack), again=again, recomputes=recomputes
        )

    def _operator(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> tuple[int, ...]:
        found = link(self.dims, eqn, [self._numbers(known) for known in operands])
        outputs = tuple(
            self.value(atom.aval, numbers)
            for atom, numbers in zip(eqn.outvars, found.outputs, strict=True)
        )
        name = eqn.primitive.name
        kind, flops = count(
            name,
            [atom.aval for atom in eqn.invars],
            [atom.aval for atom in eqn.outvars],
            eqn.params,
        )
        stack = str(eqn.source_info.name_stack)
        self.steps.append(
            Step(
                primitive=name,
                kind=kind,
                inputs=tuple(k for k in operands if not isinstance(k, Literal)),
                outputs=outputs,
                flops=flops * frame.members,
                summed=found.summed,
                contracted=_contracted(eqn),
                whole=found.whole,
                again=frame.again or (frame.recomputes and _AGAIN in stack),
                within=frame.within,
                trips=frame.trips,
                name=_joined(frame.name, stack),
            )
        )
        return outputs

    def _scan(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        params = eqn.params
        length, consts, carry = (
            params["length"],
            params["num_consts"],
            params["num_carry"],
        )
        place, inner = self._loop(frame, length)
        along = self.dims.new(length, loop=True)
        before = [self.held(known) for known in operands[consts : consts + carry]]
        sliced = [self.held(known) for known in operands[consts + carry :]]
        into = [self._copy(index) for index in before]
        parts = [self._part(index, along) for index in sliced]
        start = len(self.steps)
        results = self.run(params["jaxpr"], [*operands[:consts], *into, *parts], inner)
        out = [self.held(known) for known in results]
        after = self._carried(before, out[:carry])
        whole = [
            self.value(atom.aval, (along, *self.values[index].dims))
            for atom, index in zip(eqn.outvars[carry:], out[carry:], strict=True)
        ]
        self.loops[place] = Loop(
            length=length,
            primitive="scan",
            operators=(start, len(self.steps)),
            sliced=tuple(zip(sliced, parts, strict=True)),
            stacked=tuple(zip(out[carry:], whole, strict=True)),
            carried=tuple(zip(before, into, out[:carry], after, strict=True)),
            again=frame.again,
        )
        return [*after, *whole]

    def _while(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        condition, body = bodies(eqn)
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        second += first
        known = [k.val if isinstance(k, Literal) else None for k in operands]
        trips = while_trips(eqn, known)
        place, inner = self._loop(frame, 1 if trips is None else trips)
        before = [self.held(known) for known in operands[second:]]
        into = [self._copy(index) for index in before]
        start = len(self.steps)
        self.run(condition, [*operands[:first], *into], inner)
        results = self.run(body, [*operands[first:second], *into], inner)
        out = [self.held(known) for known in results]
        after = self._carried(before, out)
        if trips is None:
            self.endless["while"] += frame.trips * self._bytes_since(start)
        self.loops[place] = Loop(
            length=1 if trips is None else trips,
            primitive="while",
            operators=(start, len(self.steps)),
            carried=tuple(zip(before, into, out, after, strict=True)),
            again=frame.again,
        )
        return list(after)

    def _cond(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        """Every branch is followed; what the costliest does counts."""
        best, kept, start = -1.0, range(0), len(self.steps)
        results: list[list[int]] = []
        chosen: list[int] = []
        for branch in bodies(eqn):
            first = len(self.steps)
            outs = self.run(branch, operands[1:], frame)
            results.append([self.held(known) for known in outs])
            work = sum(step.flops * step.trips for step in self.steps[first:])
            if work > best:
                best, kept, chosen = work, range(first, len(self.steps)), results[-1]
        for number in range(start, len(self.steps)):
            if number not in kept:
                self.steps[number].trips = 0
        for other in results:
            for one, two in zip(chosen, other, strict=True):
                self._join(one, two)
        return list(chosen)

    def _shard_map(
        self, eqn: JaxprEqn, operands: list[Known], frame: Frame
    ) -> list[Known]:
        """Inside, arrays are one device's part; a divided dim is another one there."""
        params, body = eqn.params, opened(bodies(eqn)[0])
        manual = params.get("newly_manual_axes", params.get("manual_axes", ()))
        members = math.prod(params["mesh"].shape[axis] for axis in manual)
        local: list[Known] = []
        for var, known, spec in zip(
            body.invars, operands, params["in_specs"], strict=True
        ):
            dims = self._undivided(self._numbers(known), var.aval.shape, spec)
            local.append(self.value(var.aval, dims))
        inner = frame._replace(members=frame.members * members)
        results = self.run(body, local, inner)
        outs: list[Known] = []
        for atom, known, spec in zip(
            eqn.outvars, results, params["out_specs"], strict=True
        ):
            dims = self._undivided(self._numbers(known), atom.aval.shape, spec)
            outs.append(self.value(atom.aval, dims))
        return outs

    def _undivided(self, dims: Numbers, shape: Sequence[int], spec: Any) -> Numbers:
        """The dims that a spec leaves as they are, and new ones for the others."""
        parts = (*spec, *(None,) * (len(dims) - len(tuple(spec))))
        return tuple(
            self.dims.new(size) if part else number
            for number, size, part in zip(dims, shape, parts, strict=True)
        )

    def _loop(self, frame: Frame, length: int) -> tuple[int, Frame]:
        self.loops.append(None)
        place = len(self.loops) - 1
        within = (*frame.within, place)
        return place, frame._replace(trips=frame.trips * length, within=within)

    def _copy(self, index: int) -> int:
        self.values.append(self.values[index])
        return len(self.values) - 1

    def _part(self, index: int, along: int) -> int:
        """What a loop's body sees in turn of an array."""
        whole = self.values[index]
        self.dims.join(whole.dims[0], along)
        self.values.append(Draft(whole.shape[1:], whole.dtype, whole.dims[1:]))
        return len(self.values) - 1

    def _carried(self, before: list[int], out: list[int]) -> list[int]:
        """What a loop leaves: divided as what it begins with and what it makes."""
        for one, two in zip(before, out, strict=True):
            self._join(one, two)
        return [self._copy(index) for index in before]

    def _join(self, one: int, two: int) -> None:
        pairs = zip(self.values[one].dims, self.values[two].dims, strict=True)
        for left, right in pairs:
            self.dims.join(left, right)

    def _numbers(self, known: Known) -> Numbers:
        if isinstance(known, Literal):
            return self.dims.news(known.aval.shape)
        return self.values[known].dims

    def _dtype(self, dtype: Any) -> str:
        if dtype not in self._dtypes:  # NumPy makes a dtype's name anew each time
            self._dtypes[dtype] = getattr(dtype, "name", "float0")
        return self._dtypes[dtype]

    def _bytes_since(self, start: int) -> int:
        found = 0
        for step in self.steps[start:]:
            for index in (*step.inputs, *step.outputs):
                draft = self.values[index]
                found += math.prod(draft.shape) * item_bits(draft.dtype) // 8
        return found


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


_ENTER = {
    "scan": Walk._scan,
    "while": Walk._while,
    "cond": Walk._cond,
    "shard_map": Walk._shard_map,
}


def _contracted(eqn: JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of the dims that a matmul sums over, in each operand."""
    if eqn.primitive.name != "dot_general":
        return (), ()
    (left, right), _ = eqn.params["dimension_numbers"]
    return tuple(left), tuple(right)
