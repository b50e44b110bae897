"""Makes the calls that update parameters; each node updates its own parameters.

The optimizer's program is cut into segments like the loss. An operator runs on the node
of its largest operand, and nodes send only values that other nodes read. So an
elementwise optimizer sends almost nothing, and an optimizer with a norm over all
gradients sends scalars, such as the sum of squares of each parameter's gradient. The
cut does not change what the optimizer computes. This module only traces programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn

from dtft.parallel.mpmd.partition import INLINED, Cut, Segment, cut
from dtft.parallel.mpmd.schedule import Calls, Key, NodeCall, sends, usable
from dtft.planner.ir import CALLS, bodies, is_var, operators, traced


@dataclass(frozen=True, kw_only=True, eq=False)
class Updating:
    """The calls that compute one update of parameters and optimizer state.

    A call (`NodeCall`) is a program on one node. The other fields have the name (`Key`)
    and the node of each leaf of the optimizer state, of each result, and of each
    constant of the optimizer's program.
    """

    calls: Calls
    state: tuple[tuple[Key, int], ...]
    """Key and node of each leaf of the optimizer state before the update."""
    after: tuple[tuple[Key | None, Any], ...]
    """Key and node of each parameter, then of each leaf of the optimizer state, after
    the update. A leaf that the program sets to a constant has None in place of the key,
    and the constant in place of the node."""
    constants: tuple[tuple[Key, int, Any], ...]
    """Key, node and array for each constant of the program and each node that reads
    it."""


def updating(
    optimizer: optax.GradientTransformation,
    params: Any,
    keys: Sequence[Key],
    homes: Sequence[int],
) -> Updating:
    """Makes the calls (`NodeCall`: a program on one node) that compute one update.

    An update changes parameters and optimizer state. The optimizer is traced, not run.

    Args:
        optimizer: any optax transformation whose update takes only gradients, state and
            parameters.
        params: the parameters, as a tree of ShapeDtypeStructs.
        keys: for each leaf of `params`, the key under which its gradient is stored.
        homes: for each leaf of `params`, the node that has the parameter and its
            gradient.

    Returns:
        The calls, and the keys and nodes of the optimizer state, of the results, and
        of the constants.
    """
    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        state = jax.eval_shape(optimizer.init, params)

        def update(gradients: Any, params: Any, state: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        program, _ = traced(update, params, params, state)
    where = _Where()
    of_state = where.run(program.jaxpr, homes)
    return _Making(cut(program, where.nodes), keys, homes, of_state).calls()


class _Colocated:
    """A set of values that lie on the same node, which may still be unknown.

    Sets are joined as in a union-find structure.
    """

    def __init__(self, node: int | None = None) -> None:
        self.node = node
        self._same: _Colocated | None = None

    def root(self) -> "_Colocated":
        return self if self._same is None else self._same.root()

    def join(self, other: "_Colocated") -> None:
        """Joins this set with `other`; the union has the node of `other`.

        That node may still be unknown.
        """
        mine, its = self.root(), other.root()
        if mine is not its:
            mine._same = its


class _Where:
    """Assigns the operators of an optimizer's program to nodes.

    An operator runs on the node of its largest operand. A leaf of the optimizer state
    gets the node of the gradient or parameter with which an operator first combines the
    leaf. Without such an operator, it gets the node of the first parameter.
    """

    def __init__(self) -> None:
        self._operators: list[_Colocated] = []
        self._default = 0

    @property
    def nodes(self) -> list[int]:
        """The node of each operator of the program that `run` was given, in order."""
        return [self._node(place) for place in self._operators]

    def run(self, jaxpr: Jaxpr, homes: Sequence[int]) -> list[int]:
        """Assigns the operators of the program `jaxpr` to nodes, which `nodes` returns.

        Returns the node of each leaf of the optimizer state. `homes` has the node of
        each parameter, which is also the node of its gradient.
        """
        self._default = homes[0]
        state = [_Colocated() for _ in jaxpr.invars[2 * len(homes) :]]
        self._body(jaxpr, [*map(_Colocated, homes), *map(_Colocated, homes), *state])
        return [self._node(place) for place in state]

    def _node(self, place: _Colocated) -> int:
        node = place.root().node
        return self._default if node is None else node

    def _body(self, jaxpr: Jaxpr, operands: Sequence[_Colocated]) -> list[_Colocated]:
        known: dict[Any, _Colocated] = {var: _Colocated() for var in jaxpr.constvars}
        known.update(zip(jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in INLINED:
                (body,) = bodies(eqn)
                inside = [known[a] if is_var(a) else _Colocated() for a in eqn.invars]
                known.update(zip(eqn.outvars, self._body(body, inside), strict=True))
                continue
            place = self._together(eqn, known)
            known.update((var, place) for var in eqn.outvars)
            within = [op for body in bodies(eqn) for op in operators(body)]
            count = len(within) if eqn.primitive.name in CALLS else 1
            self._operators += [place] * count
        return [known[a] if is_var(a) else _Colocated() for a in jaxpr.outvars]

    def _together(self, eqn: JaxprEqn, known: dict[Any, _Colocated]) -> _Colocated:
        """Returns the set of values on whose node an equation runs.

        The result is the set of the equation's largest operand with a known node.
        Operands without a known node join this set. If no operand has a known node, all
        operands join a new set.

        Args:
            eqn: the equation.
            known: map from a variable to its set, for each variable that `eqn` reads.
        """
        found = [(_size(a), known[a]) for a in eqn.invars if is_var(a)]
        settled = [(size, p) for size, p in found if p.root().node is not None]
        place = max(settled, key=lambda one: one[0])[1] if settled else _Colocated()
        for _, other in found:
            if other.root().node is None:
                other.join(place)
        return place


class _Making:
    """Makes the calls of an update from the segments of an optimizer's program.

    A call (`NodeCall`) is a program on one node.
    """

    def __init__(
        self, divided: Cut, keys: Sequence[Key], homes: Sequence[int], state: list[int]
    ) -> None:
        self._cut, self._homes, self._of_state = divided, homes, state
        count = len(homes)
        arguments = divided.arguments
        self._state = [Key("state", place) for place in range(len(state))]
        params = [Key("param", key.number) for key in keys]
        self._keys = dict(zip(arguments, (*keys, *params, *self._state), strict=True))
        self._keys |= {n: Key("constant", n, 1) for n in divided.constants}
        self._at = dict(zip(arguments, (*homes, *homes, *state), strict=True))
        self._at |= {n: s.node for s in divided.segments for n in s.writes}
        self._results = list(zip(divided.results, (*homes, *state), strict=True))
        assert len(self._results) == count + len(state)

    def calls(self) -> Updating:
        wanted: dict[Key, list[int]] = {}
        for segment in self._cut.segments:
            for number in segment.reads:
                wanted.setdefault(self._key(number), []).append(segment.node)
        for number, node in self._results:
            if isinstance(number, int):
                wanted.setdefault(self._key(number), []).append(node)
        first = self._arguments(wanted)
        made = [
            self._call(index, segment, wanted)
            for index, segment in enumerate(self._cut.segments)
        ]
        calls = (*first, *made)
        return Updating(
            calls=Calls(
                end=calls,
                num_bytes={
                    key: self._bytes(key) for call in calls for key, _ in call.sends
                },
            ),
            state=tuple(zip(self._state, self._of_state, strict=True)),
            after=tuple(
                (self._key(n) if isinstance(n, int) else None, self._end(n, node))
                for n, node in self._results
            ),
            constants=tuple(
                (self._keys[number], node, value)
                for number, value in self._cut.constants.items()
                for node in sorted(set(wanted.get(self._keys[number], ())))
            ),
        )

    def _key(self, number: int) -> Key:
        return self._keys.get(number, Key("update", number))

    def _bytes(self, key: Key) -> int:
        number = next((n for n, k in self._keys.items() if k == key), key.number)
        aval: Any = self._cut.variables[number].aval
        return aval.size * aval.dtype.itemsize

    def _end(self, number: Any, node: int) -> Any:
        """Returns the node that stores a result, or the value of a constant result.

        It is the second entry of the result's pair in `Updating.after`.

        Args:
            number: number of the result's value, or a literal of the program.
            node: the node that stores the result.
        """
        return node if isinstance(number, int) else number.val

    def _arguments(self, wanted: dict[Key, list[int]]) -> list[NodeCall]:
        """Makes the calls that send the program's arguments to other nodes.

        The arguments are gradients, parameters and optimizer state. `wanted` maps an
        array's name to the nodes that read the array.
        """
        away: dict[int, list[tuple[Key, int]]] = {}
        for number in self._cut.arguments:
            key, node = self._keys[number], self._at[number]
            away.setdefault(node, []).extend(sends([key], node, wanted))
        return [
            NodeCall(
                node=node,
                phase="reduce",
                segment=1,
                reads=tuple(dict.fromkeys(key for key, _ in some)),
                sends=tuple(some),
            )
            for node, some in sorted(away.items())
            if some
        ]

    def _call(
        self, index: int, segment: Segment, wanted: dict[Key, list[int]]
    ) -> NodeCall:
        program = self._cut.program(segment)
        writes = tuple(Key("update", number) for number in segment.writes)
        return NodeCall(
            node=segment.node,
            phase="update",
            segment=index,
            reads=tuple(map(self._key, segment.reads)),
            writes=writes,
            sends=sends(writes, segment.node, wanted),
            program=program,
            donated=usable(program, self._free(index, segment)),
        )

    def _free(self, index: int, segment: Segment) -> list[int]:
        """Finds the inputs of a segment that its node does not need later.

        The node needs an input later if a later segment of this node reads it, or if it
        is a result or a constant of the whole program.

        Args:
            index: number of the segment.
            segment: the segment.

        Returns:
            Positions in `segment.reads`. Their arrays can be donated to the segment's
            program.
        """
        later = {
            number
            for other in self._cut.segments[index + 1 :]
            if other.node == segment.node
            for number in other.reads
        }
        later |= {number for number in self._cut.results if isinstance(number, int)}
        later |= set(self._cut.constants)
        return [p for p, n in enumerate(segment.reads) if n not in later]


def _size(atom: Any) -> int:
    return atom.aval.size
