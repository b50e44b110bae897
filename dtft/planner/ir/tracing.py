"""Traces a step or loss with JAX and converts its jaxpr to a `Graph`.

Other modules call `trace`. Tracing computes nothing and allocates no array, so
arguments may be `jax.ShapeDtypeStruct`s of any size. cuDNN's attention is traced on
machines without cuDNN, too. The body of a loop is entered once, and its operators are
counted once for each iteration (`Operator.trips`). A scan has a known number of
iterations. The number of iterations of a while loop is known if the program contains
the start, the step and the bound of a counter as literals. Otherwise the while loop
counts as one iteration.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from dtft._jax_internals import cudnn_assumed, scan_arguments
from dtft._tree_paths import paths_of
from dtft.planner.gc_pause import gc_paused
from dtft.planner.ir.dim_propagation import Dims, Numbers, contracted, link
from dtft.planner.ir.flops import SPECIAL, count, kernel_name
from dtft.planner.ir.graph import (
    CountedLoop,
    Dim,
    Graph,
    Operator,
    OperatorKind,
    Value,
    item_bits,
)
from dtft.planner.ir.jaxprs import CALLS, REMAT, bodies

Known = int | Literal
"""An array of the program: the index of its value, or a literal."""


class Draft(NamedTuple):
    """A value of the graph while the jaxpr is walked through.

    Its dims have temporary numbers (of `dim_propagation.Dims`); dims that are joined
    later get one final number.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: Numbers


@dataclass(slots=True)
class Step:
    """An operator of the graph while the jaxpr is walked through.

    Its dims have temporary numbers (of `dim_propagation.Dims`). It becomes an
    `Operator`, whose fields have the same names, once dims have their final numbers.
    """

    primitive: str
    kind: OperatorKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    summed: Numbers
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    """Positions of the contracted dims in both operands of a matmul or convolution."""
    precision: str
    whole: Numbers
    again: bool
    within: tuple[int, ...]
    manual: bool
    trips: int
    name: str
    unread: bool = False


class Drafts:
    """The values, operators, loops and dims of a graph, collected from the jaxpr."""

    def __init__(self) -> None:
        self.dims = Dims()
        self.values: list[Draft] = []
        self.steps: list[Step] = []
        self.loops: list[CountedLoop | None] = []
        self.needed: set[int] = set()
        """Values that count as needed even if no result of the program depends on them:
        operands and results of operators with side effects, the condition of a loop or
        branch, and arrays that enter or leave a shard_map."""
        self.constants: list[int] = []
        """Arrays that the traced function closes over."""
        self.barred: set[int] = set()
        """Values that the backward pass reads through an optimization barrier
        (`Graph.barred`)."""
        self.endless: Counter[str] = Counter()
        """Bytes that loops with an unknown trip count read and write in a step, by
        primitive. Each of these loops counts as one iteration."""
        self._dtypes: dict[Any, str] = {}

    def value(self, aval: Any, dims: Numbers | None = None) -> int:
        """Adds a value with the shape and dtype of `aval`; returns its index.

        Without `dims`, it gets new dims.
        """
        shape = tuple(getattr(aval, "shape", ()))
        dtype = self._dtype(getattr(aval, "dtype", None))
        numbers = self.dims.news(shape) if dims is None else dims
        self.values.append(Draft(shape, dtype, numbers))
        return len(self.values) - 1

    def held(self, known: Known) -> int:
        """Returns the index of an array's value; adds a new value for a literal.

        Args:
            known: the index of the array's value, which is returned, or a literal.
        """
        return self.value(known.aval) if isinstance(known, Literal) else known

    def copy(self, index: int) -> int:
        """Adds a value with the shape, dtype and dims of value `index`.

        Returns the index of the new value.
        """
        self.values.append(self.values[index])
        return len(self.values) - 1

    def part(self, index: int, along: int) -> int:
        """Adds the slice of an array that one loop iteration reads; returns its index.

        Args:
            index: index of the array's value.
            along: the dim of the loop's iterations, which is joined with the array's
                first dim.
        """
        whole = self.values[index]
        self.dims.join(whole.dims[0], along)
        self.values.append(Draft(whole.shape[1:], whole.dtype, whole.dims[1:]))
        return len(self.values) - 1

    def carried(self, before: list[int], out: list[int]) -> list[int]:
        """Adds the values of a loop's carry after the loop; returns their indices.

        Args:
            before: indices of the carried values before the loop.
            out: indices of the body's results, whose dims are joined with the dims of
                `before`.
        """
        for one, two in zip(before, out, strict=True):
            self.join(one, two)
        return [self.copy(index) for index in before]

    def join(self, one: int, two: int) -> None:
        """Joins the dims of two values, which are then divided in the same way."""
        pairs = zip(self.values[one].dims, self.values[two].dims, strict=True)
        for left, right in pairs:
            self.dims.join(left, right)

    def numbers(self, known: Known) -> Numbers:
        """Returns the numbers of an array's dims; adds new dims if it is a literal."""
        if isinstance(known, Literal):
            shape: tuple[int, ...] = getattr(known.aval, "shape", ())
            return self.dims.news(shape)
        return self.values[known].dims

    def drop_unread(self, results: Iterable[int]) -> None:
        """Marks the operators whose results nothing needs (`Operator.unread`).

        XLA removes these operators. Differentiation leaves such operators behind, for
        example the constants of a `jnp.where` whose gradient is zero. Constants that
        nothing needs are left out of `constants`.

        Args:
            results: the values that the program returns.
        """
        needed, known = self.needed | set(results), -1
        while len(needed) > known:
            known = len(needed)
            for step in reversed(self.steps):
                if not needed.isdisjoint(step.outputs):
                    needed.update(step.inputs)
            for loop in filter(None, self.loops):
                for before, into, out, after in loop.carried:
                    if into in needed or after in needed:
                        needed |= {before, out}
                needed.update(inner for inner, outer in loop.stacked if outer in needed)
                needed.update(outer for outer, inner in loop.sliced if inner in needed)
        for step in self.steps:
            step.unread = bool(step.outputs) and needed.isdisjoint(step.outputs)
        self.constants = [index for index in self.constants if index in needed]

    def bytes_since(self, start: int) -> int:
        """Returns the bytes that the operators from number `start` on read and write.

        Each operator counts with one execution.
        """
        found = 0
        for step in self.steps[start:]:
            for index in (*step.inputs, *step.outputs):
                draft = self.values[index]
                found += math.prod(draft.shape) * item_bits(draft.dtype) // 8
        return found

    def _dtype(self, dtype: Any) -> str:
        if dtype not in self._dtypes:  # NumPy rebuilds a dtype's name on each access
            self._dtypes[dtype] = getattr(dtype, "name", "float0")
        return self._dtypes[dtype]


# Trip counts of while loops. The count is known if one position of the carry grows by a
# known step and the condition compares this position with a known bound.


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def while_trip_count(eqn: JaxprEqn, known: Sequence[Any]) -> int | None:
    """Returns the trip count of a while loop whose counter has known limits and step.

    Args:
        eqn: the loop.
        known: for each operand its value if the operand is a literal, else None.

    Returns:
        The trip count. None if the condition is not a single comparison (other than
        `eq`) of a counter with a bound, if the body does not add a literal number to
        the counter or subtract one, if start or bound is not a literal, or if the
        counter never stops the loop.
    """
    condition, body = bodies(eqn)
    num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = known[num_condition + num_body :]
    loop = _Carry(body, num_body, init, known[num_condition:])
    sides = _comparison(condition, known[:num_condition])
    if sides is None:
        return None
    name, left, right = sides
    for counter, bound, compare in (
        (left, right, name),
        (right, left, _MIRRORED[name]),
    ):
        if not isinstance(counter, _CarryPosition):
            continue
        start, step = init[counter.index], loop.step(counter.index)
        limit = (
            loop.constant(bound.index) if isinstance(bound, _CarryPosition) else bound
        )
        if None not in (start, step, limit):
            return _count(compare, start, limit, step)
    return None


class _CarryPosition:
    def __init__(self, index: int) -> None:
        self.index = index


class _Carry:
    """The values that a while loop carries, and how its body updates each of them.

    A carried value is given by its position in the carry.
    """

    def __init__(
        self, body: Jaxpr, num_consts: int, init: Sequence[Any], consts: Sequence[Any]
    ) -> None:
        self.init, self.outs = init, body.outvars
        self.ins = body.invars[num_consts:]
        self.known: dict[Any, Any] = dict(
            zip(body.invars[:num_consts], consts, strict=False)
        )
        self.made: dict[Any, JaxprEqn] = {
            var: eqn for eqn in body.eqns for var in eqn.outvars
        }

    def constant(self, index: int) -> Any:
        """Returns the carried number at a position if it is the same in all iterations.

        None if the body changes it, or if it is unknown.
        """
        return self.init[index] if self.outs[index] is self.ins[index] else None

    def step(self, index: int) -> Any:
        """Returns the number that one iteration adds to the value at a position.

        None if unknown.
        """
        out = self.outs[index]
        made = None if isinstance(out, Literal) else self.made.get(out)
        if made is None or made.primitive.name not in ("add", "sub"):
            return None
        left, right = made.invars
        if right is self.ins[index] and made.primitive.name == "add":
            left, right = right, left
        if left is not self.ins[index]:
            return None
        step = right.val if isinstance(right, Literal) else self.known.get(right)
        return -step if step is not None and made.primitive.name == "sub" else step


def _comparison(condition: Jaxpr, consts: Sequence[Any]) -> Any:
    """Returns the comparison (its primitive) and both sides of a loop condition.

    A side is a number, a `_CarryPosition` (a value that the loop carries), or None if
    unknown. Returns None if the condition is not a single comparison, or is `eq`.

    Args:
        condition: the program of the condition.
        consts: the values of its first arguments, which the loop does not change; None
            for unknown ones.
    """
    if len(condition.eqns) != 1 or condition.eqns[0].outvars != condition.outvars:
        return None
    eqn = condition.eqns[0]
    if eqn.primitive.name not in _MIRRORED:
        return None
    num_consts = len(consts)
    places = {var: index for index, var in enumerate(condition.invars)}

    def side(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        index = places.get(atom)
        if index is None:
            return None
        return (
            consts[index] if index < num_consts else _CarryPosition(index - num_consts)
        )

    return eqn.primitive.name, side(eqn.invars[0]), side(eqn.invars[1])


def _count(compare: str, start: Any, limit: Any, step: Any) -> int | None:
    """Returns the trip count of a loop that runs while `counter compare limit` holds.

    Returns None if the counter never stops the loop, such as a counter that steps over
    the limit while `compare` is `ne`.
    """
    distance, step = float(limit) - float(start), float(step)
    if compare in ("gt", "ge"):
        distance, step = -distance, -step
    if compare == "ne":
        times = distance / step if step else (math.inf if distance else 0.0)
        return int(times) if times >= 0 and times.is_integer() else None
    at_bound = compare in ("le", "ge")
    if distance < 0 or not (distance or at_bound):
        return 0
    if step <= 0:
        return None
    return math.floor(distance / step) + 1 if at_bound else math.ceil(distance / step)


# The walk enters calls, loops, branches and rematerialized parts. `dim_propagation`
# propagates dims through an operator, and `flops` counts its operations.


_AGAIN = "rematted_computation"
"""JAX's mark in the name stack of operators that a backward pass recomputes."""


class Frame(NamedTuple):
    """The context of the walk: the loops and calls around the current equation.

    `trips`, `within` and `name` are the executions in a step, the loops and the name
    stack of the frame's equations, as the fields of `Operator`.
    """

    trips: int = 1
    within: tuple[int, ...] = ()
    members: int = 1
    """Number of devices that run the equations, each on its part (shard_map)."""
    manual: bool = False
    """Whether the equations are inside of a shard_map."""
    name: str = ""
    recomputes: bool = False
    """Whether the equations are in the backward pass of a rematerialized function."""
    again: bool = False
    """Whether all equations of the frame are recomputed."""


class Walk:
    """Collects the graph of a program, whose jaxpr and called jaxprs it walks through.

    `run` adds one jaxpr; `found` has what was collected so far.
    """

    def __init__(self) -> None:
        self.found = Drafts()
        """The values, operators, loops and dims that were collected so far."""

    def run(self, jaxpr: Jaxpr, operands: Sequence[Known], frame: Frame) -> list[Known]:
        """Adds the operators of a jaxpr to the graph; returns the jaxpr's results.

        An argument or result is the index of its value, or a literal.

        Args:
            jaxpr: the program, or a program that it calls.
            operands: the arguments of the jaxpr.
            frame: the loops and calls around the jaxpr, with the executions of its
                operators.
        """
        constants = [self.found.value(var.aval) for var in jaxpr.constvars]
        self.found.constants += constants
        known: dict[Any, Known] = dict(zip(jaxpr.constvars, constants, strict=True))
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
        self.found.barred.update(_barred(eqn, operands))
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
        if kind in ("kernel", "opaque"):
            name = kernel_name(name, eqn.params)
        stack = str(eqn.source_info.name_stack)
        inputs = tuple(k for k in operands if not isinstance(k, Literal))
        if eqn.effects:
            self.found.needed.update(inputs, outputs)
        self.found.steps.append(
            Step(
                primitive=name,
                kind=kind,
                inputs=inputs,
                outputs=outputs,
                flops=flops * frame.members,
                summed=found.summed,
                contracted=contracted(eqn),
                precision=_precision(eqn),
                whole=found.whole,
                again=frame.again or (frame.recomputes and _AGAIN in stack),
                within=frame.within,
                manual=frame.manual,
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
        found.loops[place] = CountedLoop(
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
        trips = while_trip_count(eqn, texts)
        length = 1 if trips is None else trips
        place, inner = self._loop(frame, length)
        before = [found.held(known) for known in operands[second:]]
        into = [found.copy(index) for index in before]
        start = len(found.steps)
        (going,) = self.run(condition, [*operands[:first], *into], inner)
        found.needed.add(found.held(going))
        results = self.run(body, [*operands[first:second], *into], inner)
        out = [found.held(known) for known in results]
        after = found.carried(before, out)
        if trips is None:
            found.endless["while"] += frame.trips * found.bytes_since(start)
        found.loops[place] = CountedLoop(
            length=length,
            primitive="while",
            operators=(start, len(found.steps)),
            carried=tuple(zip(before, into, out, after, strict=True)),
            again=frame.again,
        )
        return list(after)

    def _cond(self, eqn: JaxprEqn, operands: list[Known], frame: Frame) -> list[Known]:
        """Walks every branch of a `cond`; returns results of the one with most flops.

        The operators of the other branches get `trips` 0.
        """
        found, best = self.found, -1.0
        found.needed.add(found.held(operands[0]))
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
        """Adds the operators of a shard_map; returns the shard_map's results.

        Inside, each array is one device's part. When an array enters or leaves, the
        dims that its spec divides get new numbers. Its other dims keep their numbers.
        """
        params, (body,) = eqn.params, bodies(eqn)
        manual = params.get("newly_manual_axes", params.get("manual_axes", ()))
        members = math.prod(params["mesh"].shape[axis] for axis in manual)
        local = self._through(operands, body.invars, params["in_specs"])
        inner = frame._replace(members=frame.members * members, manual=True)
        results = self.run(body, local, inner)
        return self._through(results, eqn.outvars, params["out_specs"])

    def _through(
        self, outside: Sequence[Known], atoms: Sequence[Any], specs: Sequence[Any]
    ) -> list[Known]:
        """Adds a value for each array that enters or leaves a shard_map.

        Returns the indices of the new values.

        Args:
            outside: the arrays before they enter or leave.
            atoms: the variables of the same arrays after they enter or leave.
            specs: the shard_map's spec of each array.
        """
        self.found.needed.update(k for k in outside if not isinstance(k, Literal))
        return [
            self.found.value(
                atom.aval,
                self._undivided(self.found.numbers(known), atom.aval.shape, spec),
            )
            for known, atom, spec in zip(outside, atoms, specs, strict=True)
        ]

    def _undivided(self, dims: Numbers, shape: Sequence[int], spec: Any) -> Numbers:
        """Returns an array's dims, with a new dim for each dim that a spec divides.

        Args:
            dims: the dims of the array before it enters or leaves a shard_map.
            shape: the array's shape afterwards, with the sizes of new dims.
            spec: the shard_map's spec of the array.
        """
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


def trace(fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> Graph:
    """Traces a function of arrays to a graph of operators, values and dims.

    Args:
        fn: any function that JAX can trace, jitted or not.
        *args: trees of arrays or of `jax.ShapeDtypeStruct`. The path of a leaf begins
            with the number of its argument, such as `0/params/up/kernel`
            (`dtft._tree_paths`).
        **keywords: trees passed by name; their paths begin with the name.

    Returns:
        The graph of one call. Its operators are numbered like `jaxprs.operators`.

    Raises:
        ValueError: a key is empty, or two leaves have one path.

    In the example, the contracted dims of `x` and `w` share the number 1.

    >>> x, w = jax.ShapeDtypeStruct((4, 8), "f4"), jax.ShapeDtypeStruct((8, 2), "f4")
    >>> graph = trace(lambda x, w: jax.numpy.tanh(x @ w), x, w=w)
    >>> [(op.primitive, op.flops) for op in graph.operators]
    [('dot_general', 128), ('tanh', 8)]
    >>> graph.inputs, [graph.values[0].dims, graph.values[1].dims]
    ({'0': 0, 'w': 1}, [(0, 1), (1, 2)])
    """
    with gc_paused(), cudnn_assumed():
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*args, **keywords)
        walk = Walk()
        ins = [walk.found.value(var.aval) for var in closed.jaxpr.invars]
        outs = walk.run(closed.jaxpr, ins, Frame())
        ends = [walk.found.held(known) for known in outs]
        inputs = dict(zip(paths_of(args) + paths_of(keywords), ins, strict=True))
        outputs = dict(zip(paths_of(result), ends, strict=True))
        walk.found.drop_unread(ends)
        return _graph(walk.found, inputs, outputs)


def _barred(eqn: JaxprEqn, operands: Sequence[Known]) -> Iterator[int]:
    """Yields the operands that `jax.checkpoint` puts behind an optimization barrier.

    These are the operands of a backward pass, unless the user allows CSE
    (`prevent_cse=False`), and without literals. An operand is given by the index of its
    value. Yields nothing for equations that are no backward pass of a `jax.checkpoint`.
    """
    if eqn.primitive.name not in REMAT or not eqn.params["differentiated"]:
        return
    prevents = eqn.params["prevent_cse"]
    each = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
    for known, barred in zip(operands, each, strict=True):
        if barred and not isinstance(known, Literal):
            yield known


def _precision(eqn: JaxprEqn) -> str:
    """Returns the `Operator.precision` of an equation; '' for the default precision.

    If the two operands of a product have different levels, returns the higher level, as
    XLA does.
    """
    given = eqn.params.get("precision")
    if given is None:
        return ""
    if isinstance(given, jax.lax.DotAlgorithmPreset):
        return "" if given.name == "DEFAULT" else given.name
    levels = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(one, jax.lax.Precision) for one in levels):
        return ""
    most = max(levels, key=lambda one: one.value)
    return "" if most == jax.lax.Precision.DEFAULT else most.name.lower()


def _graph(found: Drafts, inputs: dict[str, int], outputs: dict[str, int]) -> Graph:
    numbers = _Numbers(found.dims)
    values = tuple(
        Value(shape=draft.shape, dtype=draft.dtype, dims=numbers.of(draft.dims))
        for draft in found.values
    )
    operators = tuple(
        Operator(
            primitive=step.primitive,
            kind=step.kind,
            inputs=step.inputs,
            outputs=step.outputs,
            flops=step.flops,
            special=step.flops if step.primitive in SPECIAL else 0.0,
            trips=step.trips,
            summed=numbers.of(step.summed),
            contracted=step.contracted,
            precision=step.precision,
            whole=numbers.of(step.whole),
            again=step.again,
            within=step.within,
            manual=step.manual,
            name=step.name,
            unread=step.unread,
        )
        for step in found.steps
    )
    unknown = Counter(found.endless)
    for op in operators:
        if op.kind == "opaque" and not op.unread:
            arrays = (values[index] for index in (*op.inputs, *op.outputs))
            unknown[op.primitive] += op.trips * sum(a.num_bytes for a in arrays)
    return Graph(
        values=values,
        operators=operators,
        dims=numbers.dims(),
        loops=tuple(loop for loop in found.loops if isinstance(loop, CountedLoop)),
        inputs=inputs,
        outputs=outputs,
        constants=tuple(found.constants),
        barred=frozenset(found.barred),
        unknown=dict(unknown),
    )


class _Numbers:
    """Gives dims their final numbers (of `Graph.dims`), from 0 in the order of calls.

    Joined dims, which are divided in the same way, get one number.
    """

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self._final: dict[int, int] = {}
        self._known: dict[Sequence[int], tuple[int, ...]] = {}

    def of(self, drafts: Sequence[int]) -> tuple[int, ...]:
        found = self._known.get(drafts)
        if found is None:
            find, final = self._dims.find, self._final
            found = tuple(final.setdefault(find(n), len(final)) for n in drafts)
            self._known[drafts] = found
        return found

    def dims(self) -> tuple[Dim, ...]:
        return tuple(self._dims.of(root) for root in self._final)
