"""Makes the calls that compute a loss and its gradients, from a cut program (`Cut`).

A cut program consists of segments, each of which is computed by one node (a device or
process). A call is a program on one node: the forward or the backward program of a
segment, or a program that runs once in a step.

This module has four parts: values with a gradient, the forward and backward program of
a segment, calls made once in a step, and calls of each microbatch. The module traces
programs, but does not run them. The number of a value is its index in `Cut.variables`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from dtft.parallel.mpmd.partition import Cut, Segment
from dtft.parallel.mpmd.schedule import EACH, Calls, Key, NodeCall, sends, usable
from dtft.planner.ir import is_var

# -------------------------------------------- values of a loss that have a gradient


def check(cut: Cut, params: Sequence[int], num_microbatches: int) -> None:
    """Checks that loss and parameters have gradients and all results are allowed.

    Each result must be computed by the program. With several microbatches it must also
    be floating-point or complex, so that it can be averaged.

    Args:
        cut: a program, cut into segments, whose first result is the loss.
        params: indices of the parameters in `cut.variables`.
        num_microbatches: number of microbatches.

    Raises:
        ValueError: a result or parameter is not allowed; the message names the result
            or parameter and the allowed values.
    """
    maker = {number for segment in cut.segments for number in segment.writes}
    loss = cut.results[0]
    aval: Any = cut.variables[loss].aval if isinstance(loss, int) else None
    made = isinstance(loss, int) and loss in maker
    is_real = aval is not None and jnp.issubdtype(aval.dtype, jnp.floating)
    if aval is None or not made or aval.shape or not is_real:
        raise ValueError(
            f"loss returns {aval}: a floating-point scalar that it computes is "
            "needed. Return the mean over the batch."
        )
    for place, number in enumerate(params):
        if not is_float(cut.variables[number].aval):
            raise ValueError(
                f"params: leaf {place} is {cut.variables[number].aval}, which "
                "has no gradient. Use floating-point arrays only; what is no "
                "parameter belongs into the batch, or into the loss."
            )
    for place, number in enumerate(cut.results):
        if not isinstance(number, int) or number not in maker:
            raise ValueError(
                f"loss returns, as result {place}, an argument or a constant as "
                "it is: only what it computes can be returned. Leave it out."
            )
        if num_microbatches > 1 and not is_float(cut.variables[number].aval):
            raise ValueError(
                f"loss returns, as result {place}, "
                f"{cut.variables[number].aval}: with "
                f"{num_microbatches} microbatches floating-point means over the batch "
                "are allowed, which can be averaged. Return a mean, or nothing."
            )


def between(cut: Cut, params: Sequence[int]) -> frozenset[int]:
    """Finds the values on a path of operators from a parameter to the loss.

    Args:
        cut: a program, cut into segments, whose first result is the loss.
        params: indices of the parameters in `cut.variables`.

    Returns:
        The indices in `cut.variables` of the values. All of them are floating-point or
        complex.

    Raises:
        ValueError: the loss depends on no floating-point parameter.
    """
    units = [unit for s in cut.segments for unit in s.units]
    variables = cut.variables
    moved: set[Var] = {variables[n] for n in params if is_float(variables[n].aval)}
    for unit in units:
        if moved.intersection(a for a in unit.eqn.invars if is_var(a)):
            moved.update(v for v in unit.eqn.outvars if is_float(v.aval))
    loss = cut.results[0]
    assert isinstance(loss, int)
    ways = moved.intersection([variables[loss]])
    for unit in reversed(units):
        if ways.intersection(unit.eqn.outvars):
            ways.update(moved.intersection(filter(is_var, unit.eqn.invars)))
    found = frozenset(n for n, var in enumerate(variables) if var in ways)
    if loss not in found:
        raise ValueError(
            "loss does not depend on any floating-point parameter: there is "
            "nothing to differentiate. Use params in the loss."
        )
    return found


def is_float(aval: Any) -> bool:
    """Returns whether an abstract value is floating-point or complex."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


class Split:
    """Makes the forward and the backward program of a segment.

    A segment is a part of the loss that one node computes. The backward program is from
    `jax.vjp`, so custom derivative rules apply. The values that it needs from the
    forward pass (residuals) are kept and not recomputed. A residual that the segment
    also reads or writes is not kept twice.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        segment: Segment,
        used: Sequence[int],
        made: Sequence[int],
    ) -> None:
        """Traces the segment's program together with its derivative.

        Args:
            program: the segment's program, from the values that the segment reads to
                those that it writes.
            segment: the segment.
            used: indices (in `Cut.variables`) of the values that the segment reads and
                with respect to which the program is differentiated.
            made: indices of the values that the segment writes and that are
                differentiated.
        """
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
        """Returns the keys of all residuals, and of the residuals that are new.

        A residual is a value that the backward program needs from the forward pass; a
        key (`Key`) is an array's name. A residual that the segment also reads or writes
        has the key of this value, and is not new.

        Args:
            reads: keys of the values that the segment reads.
            writes: keys of the values that the segment writes.
            index: number of the segment, for the keys of new residuals.
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
        """Makes the forward program, which also returns the new residuals.

        The program maps the values that the segment reads to the values that the
        segment writes, followed by the residuals of `kept` (values that the backward
        program needs).

        Args:
            num_writes: number of values that the segment writes.
            kept: keys of the new residuals, from `residuals`.
            residuals: keys of all residuals, from `residuals`.
        """
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
        """Makes the backward program of the segment.

        The program maps the cotangents of `self.made`, the values that the segment
        writes, to the cotangents of `self.used`, the values that the segment reads.

        Args:
            likes: shapes and dtypes of the program's arguments.
            residuals: positions, among the arguments, of the values that are kept from
                the forward pass.
            arriving: for each value of `made` the positions of the arguments whose sum
                is the value's cotangent.
            earlier: for each value of `used` the position of the argument, such as a
                sum over microbatches, to which the value's cotangent is added. None if
                the cotangent is not added to an argument.
        """
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
    """Makes a function that runs a segment, and also returns its vjp function.

    The vjp function takes cotangents of `made` and returns cotangents of `used`.

    Args:
        program: the segment's program.
        segment: the segment.
        used: indices (in `Cut.variables`) of the values that the segment reads and with
            respect to which the program is differentiated.
        made: indices of the values that the segment writes and that are differentiated.
    """
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
    """Makes the ShapeDtypeStruct, with weak type, of a variable or literal."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


# Calls that are made once in a step. Before the microbatches, parameters are sent from
# their home node to the other nodes that read them, and sums of gradients are set to
# zero. After the microbatches, the sums of all nodes are added on the home nodes of the
# parameters, and the means of the loss's results are computed.


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """Makes the calls that run once in a step, before or after the microbatches.

    A call (`NodeCall`) is a program on one node. The calls before the microbatches send
    parameters, and set sums of gradients to zero. The calls after the microbatches add
    the sums of all nodes, and compute the means of gradients and of the loss's results.
    """

    like: Mapping[int, jax.ShapeDtypeStruct]
    """Map from the number of a parameter or result to its shape and dtype."""
    homes: Mapping[int, int]
    """Map from the number of a parameter to its home node, the node that stores and
    updates it."""
    summing: Mapping[int, Sequence[int]]
    """Map from the number of a parameter to the nodes that sum its gradient, including
    its home node."""
    readers: Mapping[Key, Sequence[int]]
    """Map from a key, such as a parameter's, to the nodes that read its array."""
    results: Sequence[tuple[int, int]]
    """Number and node of each result of the loss."""
    num_microbatches: int

    @property
    def _nodes(self) -> list[int]:
        return sorted({node for nodes in self.summing.values() for node in nodes})

    def first(self) -> tuple[NodeCall, ...]:
        """Makes the calls that run before the first microbatch.

        There is one for each node that stores parameters or sums their gradients.
        """
        return tuple(map(self._begin, self._nodes))

    def last(self) -> tuple[NodeCall, ...]:
        """Makes the calls that run after the last microbatch of a step."""
        return (*self._reduce(), *self._finish(), *self._results())

    def _begin(self, node: int) -> NodeCall:
        """Makes a node's first call: sends parameters, sets sums of gradients to zero.

        The parameters that the node stores are sent to the other nodes that read them.
        """
        mine = [n for n in self.homes if self.homes[n] == node]
        summed = [n for n in self.homes if node in self.summing[n]]
        likes = [self.like[n] for n in summed]

        def zeros() -> list[jax.Array]:
            return [jnp.zeros(like.shape, like.dtype) for like in likes]

        return NodeCall(
            node=node,
            phase="begin",
            writes=tuple(Key("sum", number, node) for number in summed),
            sends=sends((Key("param", number) for number in mine), node, self.readers),
            program=jax.make_jaxpr(zeros)(),
        )

    def _reduce(self) -> list[NodeCall]:
        """Makes the calls that send sums of gradients to the parameters' home nodes.

        The home node of a parameter stores and updates it.
        """
        calls: list[NodeCall] = []
        for node in self._nodes:
            away = [
                (Key("sum", number, node), self.homes[number])
                for number in self.homes
                if node in self.summing[number] and node != self.homes[number]
            ]
            if away:
                reads = tuple(key for key, _ in away)
                calls.append(
                    NodeCall(node=node, phase="reduce", reads=reads, sends=tuple(away))
                )
        return calls

    def _finish(self) -> list[NodeCall]:
        """Makes the calls that compute gradients on the parameters' home nodes.

        The calls add the sums of all nodes, and divide the result by the sum of the
        weights of all microbatches.
        """
        calls: list[NodeCall] = []
        for node in self._nodes:
            mine = [n for n in self.homes if self.homes[n] == node]
            parts = [[Key("sum", n, s) for s in self.summing[n]] for n in mine]
            reads = [key for keys in parts for key in keys]
            if not mine:
                continue
            likes = [[self.like[k.number] for k in p] for p in parts]
            program = jax.make_jaxpr(_over)(_SCALAR, likes)
            calls.append(
                NodeCall(
                    node=node,
                    phase="finish",
                    reads=(Key("total"), *reads),
                    writes=tuple(Key("gradient", number) for number in mine),
                    program=program,
                    donated=usable(program, range(1, 1 + len(reads))),
                )
            )
        return calls

    def _results(self) -> list[NodeCall]:
        """Makes the calls that average the loss's results over the microbatches.

        The means are weighted by the weights of the microbatches.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for place, (_, node) in enumerate(self.results):
            places[node].append(place)
        return [self._means(node, some) for node, some in sorted(places.items())]

    def _means(self, node: int, places: Sequence[int]) -> NodeCall:
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
        return NodeCall(
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


# Calls of each microbatch. Each segment has a forward call, which keeps residuals on
# its node, and a backward call. A value that segments of several nodes read gets a
# cotangent from each of these nodes; the node that made the value adds the cotangents.
# A parameter that several nodes read has one home node, which adds its gradients.


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """The calls that compute a loss and its gradients.

    A call (`NodeCall`) is a program on one node. Three fields have the name (`Key`) and
    the node of arrays: `inputs` of the arrays that the caller provides, `results` of
    the loss's results, and `gradients` of the gradient of each parameter.
    """

    calls: Calls
    active: frozenset[int]
    """Numbers of the floating-point values on a path from a parameter to the loss."""
    homes: tuple[int, ...]
    """Home node of each parameter: the node that stores and updates it."""
    inputs: tuple[tuple[Key, int], ...]
    """Key and node of each array that the caller puts into a node's store: batch,
    constants and weights."""
    results: tuple[tuple[Key, int], ...]
    """For each result of the loss its key, and the node that has it after the step."""
    gradients: tuple[tuple[Key, int], ...]
    """For each parameter the key of its gradient, and the node that has the gradient
    after the step."""


def differentiated(cut: Cut, num_params: int, num_microbatches: int) -> Gradients:
    """Makes the calls (`NodeCall`: a program on one node) for a loss and its gradients.

    Args:
        cut: a program, cut into segments, whose first result is the loss, a scalar.
        num_params: number of parameters, which are the program's first arguments.
        num_microbatches: number of microbatches, each with a `weight`.

    Raises:
        ValueError: the loss is no floating-point scalar that depends on parameters, a
            parameter is no floating-point array, or a result is not computed by the
            loss or cannot be averaged over microbatches.
    """
    return _Differentiation(cut, num_params, num_microbatches).calls()


@dataclass(kw_only=True)
class _Users:
    """The nodes that read each value, and the segments that add to its cotangent."""

    by_node: dict[int, dict[int, list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Map from a value's number to a map from a node to the numbers of the node's
    segments that make a cotangent of the value, ascending."""
    nodes: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Map from a key to the nodes that read its array."""


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
        each: list[NodeCall] = []
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

    # Keys, nodes and sizes of arrays.

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
        self, each: Sequence[NodeCall], end: Sequence[NodeCall]
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

    def _segment(self, index: int, segment: Segment) -> list[NodeCall]:
        program = self._cut.program(segment)
        reads = tuple(map(self._key, segment.reads))
        writes = tuple(map(self._key, segment.writes))
        outgoing = sends(writes, segment.node, self._users.nodes)
        forward = NodeCall(
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
        both = NodeCall(
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
    ) -> NodeCall:
        arriving = [self._cotangents(number) for number in split.made]
        earlier = [self._earlier(index, n, segment.node) for n in split.used]
        results = [self._later(index, n, segment.node) for n in split.used]
        flat = [key for keys in arriving for key in keys]
        added = [key for key in earlier if key]
        reads = list(dict.fromkeys((*residuals, *flat, *added)))
        place = {key: position for position, key in enumerate(reads)}
        return NodeCall(
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
        """Returns the keys (names) of the arrays whose sum is the cotangent of a value.

        `number` is the value's index in `Cut.variables`. Each node with a backward call
        for the value makes one of these arrays, for each microbatch. For the loss there
        is one array, the weight of the microbatch.
        """
        if number == self._cut.results[0]:
            return [Key("weight", microbatch=EACH)]
        return [
            Key("cotangent", number, node, EACH)
            for node in sorted(self._users.by_node[number])
        ]

    def _earlier(self, index: int, number: int, node: int) -> Key | None:
        """Returns the key of the sum to which a backward call adds a value's cotangent.

        Args:
            index: number of the segment whose backward call it is.
            number: index of the value in `Cut.variables`.
            node: node of the segment.

        Returns:
            For a parameter, a key whose `kind` is `sum`: the node's sum over
            microbatches, which begins at zero. For another value, a key whose `kind` is
            `partial`: the cotangent that the node's previous backward call for the
            value wrote; None if the node has no such call.
        """
        if number in self._params:
            return Key("sum", number, node)
        later = [s for s in self._users.by_node[number][node] if s > index]
        return Key("partial", number, later[0], EACH) if later else None

    def _later(self, index: int, number: int, node: int) -> Key:
        """Returns the key (name) of the cotangent that a backward call writes.

        Args:
            index: number of the segment whose backward call it is.
            number: index in `Cut.variables` of a value that the segment reads; the
                cotangent is this value's.
            node: node of the segment.

        Returns:
            For a parameter, a key whose `kind` is `sum`: the node's sum over
            microbatches. For another value, the `kind` is `cotangent` if this is the
            node's last backward call for the value. Else it is `partial`: the node's
            next backward call for the value adds to this array.
        """
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
