"""Cuts a program into segments: groups of equations that one node computes.

Computes the equations of each segment, the order of segments, and the values that each
segment reads and writes. Values have numbers, which are the same in every process that
traces the same program. A placement of `dtft.placement` assigns operators to nodes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dtft.parallel.mpmd.arguments import check_nodes, node_numbers, operator_seconds
from dtft.parallel.mpmd.schedule import CallOrder, Task
from dtft.placement import Placement, words_of_platform
from dtft.planner.ir import REMAT, Graph, bodies, is_var, operators

INLINED = frozenset({"jit", "pjit", "closed_call", "call"})
"""Calls that are replaced by their body. `jax.checkpoint` is replaced, too, if its
operators are on several nodes. Functions with derivative rules (custom_jvp,
custom_vjp), loops and branches are not divided and stay on one node."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """An equation that one node computes as a whole, such as an operator or a loop."""

    eqn: JaxprEqn
    node: int
    operators: tuple[int, int]
    """Range of operator numbers in the equation: the first, and one after the last."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Equations (`Unit`) that a node computes without waiting in between.

    The node waits for other nodes only before the first equation, until it has all
    values that the segment reads.
    """

    node: int
    units: tuple[Unit, ...]
    reads: tuple[int, ...]
    """Numbers of the values that the units read and do not make, ascending."""
    writes: tuple[int, ...]
    """Numbers of the values that other segments or the caller read, ascending."""

    @property
    def operators(self) -> Iterator[int]:
        """Numbers of the segment's operators in the whole program."""
        for unit in self.units:
            yield from range(*unit.operators)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A program that is cut into segments, each computed by one node."""

    segments: tuple[Segment, ...]
    """The segments, in an order in which they can run."""
    arguments: tuple[int, ...]
    """Numbers of the program's arguments."""
    results: tuple[int | Literal, ...]
    """For each result of the program the number of its value, or a literal."""
    constants: Mapping[int, Any]
    """Map from the number of each constant of the program to its array."""
    variables: tuple[Var, ...]
    """The variable of each value, by number."""
    whole: Jaxpr
    """The program before it was cut."""

    def program(self, segment: Segment) -> ClosedJaxpr:
        """Makes a segment's program, from the values it reads to those it writes.

        The values are in the order of `segment.reads` and `segment.writes`.
        """
        jaxpr = self.whole.replace(
            constvars=(),
            invars=[self.variables[number] for number in segment.reads],
            outvars=[self.variables[number] for number in segment.writes],
            eqns=[unit.eqn for unit in segment.units],
        )
        return ClosedJaxpr(jaxpr, ())


def cut(
    program: ClosedJaxpr, nodes: Sequence[int], seconds: Sequence[float] | None = None
) -> Cut:
    """Cuts a program into segments, by the node that runs each operator.

    A segment has equations that a node computes without waiting for other nodes, once
    the values that the segment reads have arrived. Equations are left out if the
    results do not depend on them. An equation that cannot be divided (a loop, a
    function with a derivative rule) runs on the node whose operators in the equation
    take the most seconds.

    Args:
        program: a program from `dtft.planner.ir.traced`.
        nodes: the number of the node of each operator, in the order of
            `dtft.planner.ir.operators`.
        seconds: the seconds of each operator; by default all are equal.

    Raises:
        ValueError: the number of nodes is not the number of operators, or the program
            has effects.
    """
    count = sum(1 for _ in operators(program.jaxpr))
    if len(nodes) != count:
        raise ValueError(
            f"nodes has {len(nodes)} entries, but the program has {count} operators: "
            "one node for each is needed. Place this function with these shapes."
        )
    if program.effects:
        raise ValueError(
            f"the program has effects ({program.effects}): printing and callbacks have "
            "no place in a placed step. Remove them."
        )
    flat = _Flat(nodes, seconds or [1.0] * count)
    flat.body(program.jaxpr, program.consts)
    results = [flat.known(atom) for atom in program.jaxpr.outvars]
    return _Cutting(_needed(flat.units, results), flat).cut(program.jaxpr, results)


class _Flat:
    """A program in which calls such as `jit` (`INLINED`) are replaced by their bodies.

    The results of its equations are new variables, each written once.
    """

    def __init__(self, nodes: Sequence[int], seconds: Sequence[float]) -> None:
        self.units: list[Unit] = []
        self.constants: dict[Var, Any] = {}
        self._nodes, self._seconds = nodes, seconds
        self._number = 0
        self._known: dict[Var, Any] = {}
        self._made: dict[Var, int] = {}

    def known(self, atom: Any) -> Any:
        """Returns the variable or literal that replaces `atom` in the flat program.

        An atom that nothing replaces is returned unchanged.
        """
        return self._known.get(atom, atom) if is_var(atom) else atom

    def body(self, jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            self._known[var] = self._fresh(var)
            self.constants[self._known[var]] = constant
        for eqn in jaxpr.eqns:
            if self._is_inlined(eqn):
                self._inline(eqn)
            else:
                self._keep(eqn)

    def _is_inlined(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name in INLINED:
            return True
        # `jax.checkpoint` may be divided, because that does not change gradients.
        return name in REMAT and len(set(self._nodes_in(eqn))) > 1

    def _inline(self, eqn: JaxprEqn) -> None:
        operands = [self.known(atom) for atom in eqn.invars]
        (jaxpr,) = bodies(eqn)
        held = next(v for v in eqn.params.values() if _holds(v, jaxpr))
        self._known.update(zip(jaxpr.invars, operands, strict=True))
        self.body(jaxpr, held.consts if isinstance(held, ClosedJaxpr) else ())
        results = [self.known(atom) for atom in jaxpr.outvars]
        self._known.update(zip(eqn.outvars, results, strict=True))

    def _keep(self, eqn: JaxprEqn) -> None:
        operands = [self.known(atom) for atom in eqn.invars]
        node = self._node(eqn, operands)
        first, self._number = self._number, self._number + _count(eqn)
        made = [self._fresh(var) for var in eqn.outvars]
        self._known.update(zip(eqn.outvars, made, strict=True))
        self._made.update((var, node) for var in made)
        self.units.append(
            Unit(
                eqn=eqn.replace(invars=operands, outvars=made),
                node=node,
                operators=(first, self._number),
            )
        )

    def _node(self, eqn: JaxprEqn, operands: Sequence[Any]) -> int:
        total: dict[int, float] = defaultdict(float)
        for offset, node in enumerate(self._nodes_in(eqn)):
            total[node] += self._seconds[self._number + offset]
        if total:
            return min(total, key=lambda node: (-total[node], node))
        made = [self._made[atom] for atom in operands if atom in self._made]
        return made[0] if made else self._nodes[0] if len(self._nodes) else 0

    def _nodes_in(self, eqn: JaxprEqn) -> Sequence[int]:
        return self._nodes[self._number : self._number + _count(eqn)]

    def _fresh(self, var: Any) -> Var:
        return Var(var.aval)


def _holds(value: Any, jaxpr: Jaxpr) -> bool:
    return (value.jaxpr if isinstance(value, ClosedJaxpr) else value) is jaxpr


def _count(eqn: JaxprEqn) -> int:
    inside = list(bodies(eqn))
    if not inside:
        return 1
    return sum(1 for body in inside for _ in operators(body))


def _needed(units: Sequence[Unit], results: Sequence[Any]) -> list[Unit]:
    """Selects the units (equations) that the results depend on, in the order given."""
    wanted = {atom for atom in results if is_var(atom)}
    kept: list[Unit] = []
    for unit in reversed(units):
        if wanted.intersection(unit.eqn.outvars):
            kept.append(unit)
            wanted.update(atom for atom in unit.eqn.invars if is_var(atom))
    return kept[::-1]


class _Cutting:
    """Groups units (equations, each with a node) into segments."""

    def __init__(self, units: list[Unit], flat: _Flat) -> None:
        self._units, self._flat = units, flat
        writer = {v: i for i, unit in enumerate(units) for v in unit.eqn.outvars}
        self._before = [
            sorted({writer[a] for a in unit.eqn.invars if is_var(a) and a in writer})
            for unit in units
        ]
        self._after: list[list[int]] = [[] for _ in units]
        for index, before in enumerate(self._before):
            for other in before:
                self._after[other].append(index)

    def cut(self, whole: Jaxpr, results: Sequence[Any]) -> Cut:
        arguments, constants = whole.invars, self._flat.constants
        variables = [*arguments, *constants]
        variables += [v for unit in self._units for v in unit.eqn.outvars]
        number = {var: index for index, var in enumerate(variables)}
        groups = self._groups()
        home = {index: g for g, group in enumerate(groups) for index in group}
        wanted = {atom for atom in results if is_var(atom)}
        outside = {
            var
            for index, unit in enumerate(self._units)
            for var in unit.eqn.outvars
            if var in wanted or self._leaves(index, var, home)
        }
        return Cut(
            segments=tuple(self._segment(g, number, outside) for g in groups),
            arguments=tuple(number[var] for var in arguments),
            results=tuple(number[a] if is_var(a) else a for a in results),
            constants={number[var]: value for var, value in constants.items()},
            variables=tuple(variables),
            whole=whole,
        )

    def _leaves(self, index: int, var: Var, home: Mapping[int, int]) -> bool:
        return any(
            home[after] != home[index] and var in self._units[after].eqn.invars
            for after in self._after[index]
        )

    def _segment(
        self, group: Sequence[int], number: Mapping[Var, int], outside: set[Var]
    ) -> Segment:
        units = tuple(self._units[index] for index in group)
        made = {var for unit in units for var in unit.eqn.outvars}
        read = {a for unit in units for a in unit.eqn.invars if is_var(a)} - made
        return Segment(
            node=units[0].node,
            units=units,
            reads=tuple(sorted(number[var] for var in read)),
            writes=tuple(sorted(number[var] for var in made & outside)),
        )

    def _groups(self) -> list[list[int]]:
        """Groups units (equations) into segments, in an order in which they can run.

        A unit is ready when its inputs are computed. Each segment begins with the ready
        unit whose number of following changes of node (`_changes`) is the largest. The
        segment then takes all units of the same node that can run without waiting for
        other nodes. Returns for each segment the indices of its units.
        """
        waiting = [len(before) for before in self._before]
        ready: dict[int, set[int]] = defaultdict(set)
        for index, count in enumerate(waiting):
            if not count:
                ready[self._units[index].node].add(index)
        changes = self._changes()
        groups: list[list[int]] = []
        while any(ready.values()):
            _, first = min(
                (-changes[index], index) for some in ready.values() for index in some
            )
            groups.append(self._run(self._units[first].node, ready, waiting))
        return groups

    def _run(
        self, node: int, ready: dict[int, set[int]], waiting: list[int]
    ) -> list[int]:
        group: list[int] = []
        while ready[node]:
            index = ready[node].pop()
            group.append(index)
            for after in self._after[index]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready[self._units[after].node].add(after)
        return sorted(group)

    def _changes(self) -> list[int]:
        """Returns, for each unit (equation), how many changes of node follow it.

        A path leads from a unit to a unit that reads one of its results, and so on. It
        changes its node where two successive units are on different nodes. A unit's
        number is the largest number of changes on a path that begins at the unit.
        """
        found = [0] * len(self._units)
        for index in range(len(self._units) - 1, -1, -1):
            node = self._units[index].node
            found[index] = max(
                (
                    found[after] + (self._units[after].node != node)
                    for after in self._after[index]
                ),
                default=0,
            )
        return found


# Converts a placement of `dtft.placement` for a placed step: seconds of each operator,
# the device of each node, and predicted starts of segments.


def where(
    nodes: Sequence[int] | Placement,
    table: Mapping[Any, Any],
    seconds: Sequence[float] | None,
    microbatches: int,
) -> tuple[tuple[int, ...], dict[int, Any], tuple[float, ...] | None]:
    """Finds each operator's node and seconds, and each node's device.

    Args:
        nodes: the number of the node of each operator, or a placement that has these
            numbers.
        table: map from a node's number to its device, from `device_table`. With a
            placement the keys may also be a node's name, type or platform.
        seconds: expected seconds of each operator's forward pass; None takes the
            placement's seconds.
        microbatches: number of microbatches of a step.

    Returns:
        The node of each operator, a map from a node to its device, and the seconds of
        each operator. The seconds are None if neither argument nor placement has them.

    Raises:
        ValueError: a node number or a number of seconds is not allowed, a node has no
            device, a key of `table` fits no node of the placement, or the placement is
            for another number of microbatches.
    """
    if isinstance(nodes, Placement):
        check_microbatches(nodes, microbatches)
        seconds = seconds_of(nodes) if seconds is None else seconds
        table = devices_of(nodes, table)
        nodes = nodes.of_operator
    of_operator = node_numbers(nodes)
    check_nodes(of_operator, table)
    if seconds is not None:
        seconds = operator_seconds(seconds, len(of_operator))
    return of_operator, dict(table), seconds


def seconds_of(placement: Placement) -> tuple[float, ...]:
    """Returns the seconds of each operator's forward pass, by a placement's schedule.

    A task of a placement is a range of operators. The seconds of a task are divided
    equally between its operators.
    """
    took = {run.task: run.end_s - run.start_s for run in placement.schedule}
    return tuple(
        took[task] / (stop - start)
        for task, (start, stop) in enumerate(placement.operators)
        for _ in range(start, stop)
    )


def nodes_of_scopes(graph: Graph, table: Mapping[str, int]) -> tuple[int, ...]:
    """Assigns operators to nodes by the `jax.named_scope` that they are in.

    Scopes that are not in `table` are ignored. An operator in several nested scopes
    gets the node of the innermost scope. An operator outside of the table's scopes gets
    the node of the operator before it. Operators before the first scope get the node of
    the first scope. With a scope for each stage, layers are divided into stages.

    Args:
        graph: the traced loss (`dtft.planner.trace`).
        table: map from a scope to the number of its node.

    Raises:
        ValueError: the program has no operator in one of the scopes.

    The program of the example has five operators: `sin` and `+` in each scope, and the
    sum outside of the scopes.

    >>> import jax, jax.numpy as jnp
    >>> def loss(x):
    ...     for name in ("low", "high"):
    ...         with jax.named_scope(name):
    ...             x = jnp.sin(x) + 1
    ...     return jnp.sum(x)
    >>> from dtft.planner.ir.tracing import trace
    >>> nodes_of_scopes(trace(loss, jax.ShapeDtypeStruct((2,), "f4")), {"high": 1,
    ...     "low": 0})
    (0, 0, 1, 1, 1)
    """
    scopes = {part: None for op in graph.operators for part in op.name.split("/")}
    if unknown := [scope for scope in table if scope not in scopes]:
        raise ValueError(
            f"table has the scope {unknown[0]!r}, in which the program has no "
            f"operator. Allowed: {', '.join(filter(None, scopes)) or 'it has none'}. "
            "A scope is what jax.named_scope(...) names, or a module of NNX."
        )
    found: list[int | None] = []
    for op in graph.operators:
        inside = [table[part] for part in op.name.split("/") if part in table]
        before = found[-1] if found else None
        found.append(inside[-1] if inside else before)
    first = next((node for node in found if node is not None), 0)
    return tuple(first if node is None else node for node in found)


def devices_of(placement: Placement, table: Mapping[Any, Any]) -> dict[int, Any]:
    """Looks up the device of each node of a placement, by the node's number.

    A node for which the table has no device is left out if no operator runs on it.

    Args:
        placement: a placement, whose nodes have names, types and platforms.
        table: map from a node's number, name (`h100:0`), type (`fpga-u280`, or `fpga`)
            or platform (`cuda`, `gpu`) to a device. Numbers take precedence over names,
            names over types, and types over platforms. Any device is allowed for any
            type, such as a CPU device for `fpga`.

    Raises:
        ValueError: the table has no device for a node with operators, or has a key
            that is no number and fits no node.
    """
    found: dict[int, Any] = {}
    words = [_words(placement, node) for node in range(len(placement.nodes))]
    all_words = dict.fromkeys(word for some in words for word in some)
    # More numbers than nodes are allowed, because callers often give all devices.
    strange = [k for k in table if not isinstance(k, int) and k not in all_words]
    if strange:
        raise ValueError(
            f"devices has {strange[0]!r}, but no node of the placement is called so. "
            f"Allowed: {', '.join(all_words)}, or the number of a node."
        )
    for node, some in enumerate(words):
        known = [key for key in (node, *some) if key in table]
        if known:
            found[node] = table[known[0]]
        elif node in placement.node_of:
            raise ValueError(
                f"devices has no device for node {some[0]!r}, which has operators. "
                f"It has {list(table)}: add the node's number, name, or its type "
                f"or platform ({', '.join(dict.fromkeys(some[1:]))})."
            )
    return found


def check_microbatches(placement: Placement, microbatches: int) -> None:
    """Checks that a placement was made for the given number of microbatches.

    Raises:
        ValueError: the numbers differ; the message has both.
    """
    if placement.microbatches != microbatches:
        raise ValueError(
            f"microbatches={microbatches}, but nodes is a placement for "
            f"{placement.microbatches}: what it predicts is of another step. Give the "
            f"same number, or place(..., microbatches={microbatches}) the program of "
            "one such microbatch."
        )


def _words(placement: Placement, node: int) -> tuple[str, ...]:
    """Returns the keys that a device table may have for a node.

    They are the node's name, its type (`fpga-u280`), the first part of the type
    (`fpga`), and its platforms.
    """
    kind = placement.types[node]
    platforms = _platforms(placement, node)
    return (placement.nodes[node], kind, kind.split("-")[0], *platforms)


def _platforms(placement: Placement, node: int) -> tuple[str, ...]:
    if not placement.platforms:
        return ()
    return words_of_platform(placement.platforms[node])


def predicted_starts(
    placement: Placement, cut: Cut, order: CallOrder, active: Collection[int]
) -> dict[Task, float]:
    """Returns the start times that a placement predicts for the first microbatch.

    The start of a forward task is the earliest start of its segment's operators. The
    start of a backward task is the earliest start of their backward passes; operators
    without differentiated results are ignored.

    Args:
        placement: a placement of one microbatch's forward and backward pass.
        cut: the program, cut into segments by the placement.
        order: the tasks of a step; the start times of its tasks are returned.
        active: indices in `cut.variables` of the values that are differentiated.

    Returns:
        Map from a task of microbatch 0 to its predicted start in seconds. A task is
        left out if the placement predicts no start for its operators.
    """
    starts = {run.task: run.start_s for run in placement.schedule}
    task_of = _tasks(placement.operators)
    last = 2 * len(placement.operators) - 1
    ways = {cut.variables[number] for number in active}
    found: dict[Task, float] = {}
    for task in order.start_s:
        if task.microbatch == 0:
            segment = cut.segments[task.call.segment]
            if task.call.phase == "forward":
                mine = {task_of[number] for number in segment.operators}
            else:
                back = (
                    number
                    for unit in segment.units
                    if ways.intersection(unit.eqn.outvars)
                    for number in range(*unit.operators)
                )
                mine = {last - task_of[number] for number in back}
            known = [starts[number] for number in mine if number in starts]
            if known:
                found[task] = min(known)
    return found


def _tasks(operators: Sequence[tuple[int, int]]) -> list[int]:
    return [t for t, (start, stop) in enumerate(operators) for _ in range(start, stop)]
