"""Determines which values of a program have buffers of their own, and their lifetimes.

Each rule was derived from buffer assignments of compiled steps (`python -m
experiments.plan_memory`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dtft.planner.ir import (
    CHEAP,
    LONGEST_ROW,
    RELABELS,
    CountedLoop,
    Graph,
    Operator,
    region,
    relabelled,
)

# Buffers. XLA's GPU compiler keeps results of products and reductions, operands of
# products and stacks of loops; it fuses other values into their readers.


_NEVER_SAVED = (*RELABELS, "convert_element_type", "broadcast_in_dim")
"""Operators whose result the remat policy of `dtft.parallel.fsdp` does not save.

The policy saves the operand instead.
"""
_IN_MATMULS = ("max", "min", "neg", "convert_element_type")
"""Operators that XLA fuses into the matmul that reads their result, such as a cast."""
_EXPANDED = ("erfc",)
"""Functions that XLA computes with dozens of operators (in `gelu`, unless approximate).

XLA computes them once, so their operand and result have buffers.
"""
_READS_FUSED = (*CHEAP, "reduction")
"""Kinds of operators into which XLA fuses the operators that compute their operands, if
these are `CHEAP`, such as elementwise ones."""


class InMemory:
    """Finds the values (arrays of a program) that have a buffer in memory.

    A value without a buffer is fused or is an alias. Operators that read it read the
    buffers of other values instead; these values are called its roots. A value with a
    buffer is its own root. Values are given by their index in `Graph.values`.
    """

    def __init__(self, graph: Graph, *, keeps_all: bool) -> None:
        """Finds the values with buffers.

        Args:
            graph: the program.
            keeps_all: whether the forward pass saves every value that the backward
                pass reads, including results of elementwise operators, as at ZeRO level
                3.
        """
        self.graph = graph
        self.makers: Mapping[int, Operator] = {
            value: operator
            for operator in graph.operators
            for value in operator.outputs
        }
        self._keeps_all = keeps_all
        self._kept = self._find_kept()
        if keeps_all:
            self._kept |= self._saved()
        self._twins = self._find_twins() if keeps_all else {}
        self.roots: dict[int, frozenset[int]] = {}
        self._resolve()

    def root(self, value: int) -> frozenset[int]:
        """Finds the roots of a value: the values whose buffers its readers read.

        This is the value itself if it has a buffer. A value without a buffer is an
        alias of another value, or is fused: its readers compute it from other values.

        Args:
            value: the index of the value in `Graph.values`.
        """
        return self.roots.get(value, frozenset((value,)))

    def all_roots(self, operator: Operator) -> frozenset[int]:
        """Finds the roots of an operator: the values whose buffers it reads.

        A value is an array of the program, given by its index in `Graph.values`.
        """
        return frozenset(r for index in operator.inputs for r in self.root(index))

    def operands_like(self, index: int) -> list[int]:
        """Lists the equally large operands of the operator that computes a value.

        These have as many elements as the value. Bool arrays (masks) and results of
        broadcasts are left out. Returns [] for an argument of the program.

        Args:
            index: the index of the value in `Graph.values`.
        """
        maker, values = self.makers.get(index), self.graph.values
        return [
            operand
            for operand in (maker.inputs if maker else ())
            if values[operand].size == values[index].size
            and values[operand].dtype != "bool"
            and not self._is_broadcast(operand)
        ]

    def _find_kept(self) -> set[int]:
        kept = set(self.graph.outputs.values()) | self.graph.barred
        for operator in self.graph.operators:
            if operator.kind not in CHEAP:
                kept.update(operator.outputs)
            if operator.kind == "matmul":
                kept.update(map(self._read_by_matmul, operator.inputs))
            elif operator.kind not in _READS_FUSED:
                kept.update(operator.inputs)
            elif operator.primitive in _EXPANDED and not self._keeps_all:
                kept.update((*operator.inputs, *operator.outputs))
        kept -= self._folded()
        for loop in self.graph.loops:
            kept.update(outer for _, outer in loop.stacked)
            kept.update(inner for _, inner in loop.sliced)
            for before, _, _, after in loop.carried:
                kept.update((before, after))
        return kept

    def _read_by_matmul(self, index: int) -> int:
        """Finds the value that needs a buffer because a matmul reads the value `index`.

        This is the value itself, unless a rectifier (a maximum, minimum or negation) or
        a cast computes it, which XLA may fuse into the matmul:

        * If the operand of the rectifier or cast is computed from a single array of its
          size, all operators from this array to the matmul are fused, and this array
          has the buffer.
        * If the operand is computed from several arrays of its size, a cast alone is
          fused, and its operand has the buffer. A rectifier is not fused.
        * A cast to fewer bytes is not fused, because the matmul would read more bytes:
          its result has the buffer. Examples are a softmax or a norm in float32 and the
          parameters in mixed precision, each kept for the backward pass. With
          `keeps_all`, such a cast is fused like any other.
        """
        while (maker := self.makers.get(index)) and maker.primitive == "copy":
            index = maker.inputs[0]
        if maker is None or maker.primitive not in _IN_MATMULS:
            return index
        before = index
        while (one := self.makers.get(before)) and one.kind in CHEAP:
            large = self.operands_like(before)
            if len(large) != 1:
                cast = maker.primitive == "convert_element_type"
                fused = cast and not self._narrows(maker)
                return maker.inputs[0] if fused else index
            before = large[0]
        return index if self._narrows(maker) else before

    def _narrows(self, operator: Operator) -> bool:
        """Returns whether an operator casts to fewer bytes, and its result is kept.

        Returns False with `keeps_all` (ZeRO level 3): the backward pass then casts
        again, so the result is not kept.
        """
        if operator.primitive != "convert_element_type" or self._keeps_all:
            return False
        before, after = (
            self.graph.values[index].num_bytes
            for index in (operator.inputs[0], operator.outputs[0])
        )
        return after < before

    def _folded(self) -> set[int]:
        """Finds values without a buffer because XLA scatters into another array.

        If the result of a scatter into zeros is only added to another array, XLA
        scatters directly into this array. The returned values are the results of these
        scatters, and their arrays of zeros.
        """
        readers: dict[int, list[str]] = defaultdict(list)
        for operator in self.graph.operators:
            for index in operator.inputs:
                readers[index].append(operator.primitive)
        found: set[int] = set()
        for operator in self.graph.operators:
            if operator.kind != "scatter" or not operator.inputs:
                continue
            (made,), into = operator.outputs, operator.inputs[0]
            if self._is_broadcast(into) and readers[made] in (["add_any"], ["add"]):
                found |= {made, into}
        return found

    def _saved(self) -> set[int]:
        """Finds the values of the forward pass that are saved for the backward pass.

        These are the values that the forward pass computes outside of loops and the
        backward pass reads. If such a value is the result of a cast, a broadcast or a
        relabeling such as a reshape (`_NEVER_SAVED`), the operand is saved instead.
        """
        found: set[int] = set()
        for operator in self.graph.operators:
            if region(operator) != "backward":
                continue
            for index in operator.inputs:
                maker = self.makers.get(index)
                while maker and maker.primitive in _NEVER_SAVED and maker.inputs:
                    index = relabelled(maker, index)
                    maker = self.makers.get(index)
                if maker and region(maker) == "forward" and not maker.within:
                    found.add(index)
        return found

    def _find_twins(self) -> dict[int, int]:
        """Maps values that depend on constants alone to the first equal value.

        XLA computes equal values once: for example, it keeps one mask of positions for
        all layers. Values that equal no earlier value are left out.
        """
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for operator in self.graph.operators:
            if operator.within or not all(index in same for index in operator.inputs):
                continue
            read = tuple(same[index] for index in operator.inputs)
            for place, index in enumerate(operator.outputs):
                value = self.graph.values[index]
                key = operator.primitive, place, value.shape, value.dtype, read
                same[index] = first.setdefault(key, index)
        return {index: one for index, one in same.items() if index != one}

    def _resolve(self) -> None:
        for loop in self.graph.loops:
            for outer, inner in loop.sliced:
                self.roots[inner] = frozenset((inner, outer))
            for _, inside, _, after in loop.carried:
                self.roots[inside] = frozenset((after,))
                self.roots[after] = frozenset((after,))
            for _, outer in loop.stacked:
                self.roots[outer] = frozenset((outer,))
        for operator in self.graph.operators:
            for value in operator.outputs:
                self.roots[value] = self._roots_of(operator, value)
        for value, roots in self.roots.items():
            self.roots[value] = frozenset(self._through(value, roots))

    def _roots_of(self, operator: Operator, value: int) -> frozenset[int]:
        if operator.primitive in RELABELS and operator.inputs:
            return self.root(relabelled(operator, value))
        if value in self._twins:
            return self.root(self._twins[value])
        if value in self._kept:
            return frozenset((value,))
        return self.all_roots(operator)

    def _through(self, value: int, roots: Iterable[int]) -> Iterator[int]:
        """Yields the given roots of a value, each replaced by its own roots.

        A root is a value whose buffer is read in place of the value's. It may have
        roots itself: the array that a loop slices may be an alias. A root that is the
        value itself is yielded unchanged.
        """
        for root in roots:
            yield from (root,) if root == value else self.root(root)

    def _is_broadcast(self, index: int) -> bool:
        maker = self.makers.get(index)
        return maker is not None and maker.primitive == "broadcast_in_dim"


# Arrays that XLA transposes between the loop that stacks them and the next loop.


def laid_anew(graph: Graph, memory: InMemory, loop: CountedLoop) -> Iterator[int]:
    """Yields the arrays that XLA transposes before a loop slices them.

    XLA transposes an array once for all iterations, in three cases:

    * A matmul of the loop reads the slice, and the matmul's batch dims are not the
      first dims of the slice (queries, keys and values of [B, T, N, H]).
    * The loop only transposes the slice.
    * A transpose lies between the array and the matmul that computes the array.

    The arrays are transposed one after another; each has two buffers during this. They
    are given by their index in `Graph.values`.
    """
    read = {
        index
        for operator in graph.operators[slice(*loop.operators)]
        if operator.kind == "matmul"
        for index in _against_the_grain(graph, operator)
    }
    stacked = {outer: inner for one in graph.loops for inner, outer in one.stacked}
    readers: dict[int, set[str]] = defaultdict(set)
    for operator in graph.operators[slice(*loop.operators)]:
        for index in operator.inputs:
            readers[index].add(operator.primitive)
    for outer, inner in loop.sliced:
        if (
            inner in read
            or readers[inner] == {"transpose"}
            or _is_transposed(memory, stacked.get(outer, outer))
        ):
            yield outer


def _against_the_grain(graph: Graph, product: Operator) -> Iterator[int]:
    """Yields the operands of a matmul that do not begin with the matmul's batch dims.

    Also yields operands that begin with the batch dims in another order than the
    result. Operands are given by their index in `Graph.values`.
    """
    made = graph.values[product.outputs[0]]
    rank = sum(len(graph.values[index].shape) for index in product.inputs[:2])
    for index, summed in zip(product.inputs, product.contracted, strict=False):
        dims = graph.values[index].dims
        num_batch = rank - 2 * len(summed) - len(made.dims)
        places = [place for place in range(len(dims)) if place not in summed]
        batch: list[int] = []
        for dim in made.dims[:num_batch]:
            found = [p for p in places if dims[p] == dim and p not in batch]
            batch += found[:1]
        if batch != list(range(num_batch)):
            yield index


def _is_transposed(memory: InMemory, index: int) -> bool:
    """Returns whether a value is computed from a matmul's result by a transpose.

    Other operators that XLA fuses (`CHEAP`, such as elementwise ones) may lie between
    the matmul and the value, too.

    Args:
        memory: the values of the program that have buffers.
        index: the index of the value in `Graph.values`.
    """
    seen = False
    while (maker := memory.makers.get(index)) and maker.kind in CHEAP:
        seen = seen or maker.primitive == "transpose"
        large = memory.operands_like(index)
        if not large:
            return False
        index = large[0]
    return seen and maker is not None and maker.kind == "matmul"


# Lifetimes: from the operator that allocates a value to its last reader.


_Going = dict[int, list[int]]
"""Map from an operator's index to the values that are freed after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event in a program's memory, such as the allocation of an array's buffer."""

    value: int
    kind: Literal["alloc", "complete", "free", "reuse", "copied", "runs"]
    """The kind of event.

    * `alloc`: the value gets a buffer.
    * `complete`: all of the value is computed. This is after its operator, or, for a
      value that a loop stacks or carries, after the loop.
    * `free`: the buffer of the value is freed.
    * `reuse`: the value allocated next takes the buffer of this value if a mesh axis
      divides a dim in `rows`.
    * `copied`: a temporary copy of the value exists.
    * `runs`: an operator runs whose operands may have to be gathered. `value` is then
      the operator's index in `Graph.operators`.
    """
    rows: tuple[int, ...] = ()
    """For `reuse`: dims of rows that are summed, as in a softmax. If no mesh axis
    divides them, one kernel processes whole rows, and its result has a new buffer."""


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """The memory events of a program, and the buffers that hold each of its values.

    A fused or aliased value has no buffer of its own: its readers read the buffers of
    other values.
    """

    events: tuple[Event, ...]
    """Events in the order of the program. Arguments are alive throughout and are not
    allocated or freed. Nor are results with the path of an argument: they reuse the
    argument's buffer."""
    roots: Mapping[int, frozenset[int]]
    """For each computed value, the values with a buffer that its readers read."""


def follow(graph: Graph, *, keeps_all: bool = False) -> Lifetimes:
    """Computes the lifetimes of a program's values.

    Args:
        graph: the program.
        keeps_all: whether the forward pass saves every value that the backward pass
            reads, including results of elementwise operators, as `jax.checkpoint` with
            the policy of `dtft.parallel.fsdp` does at ZeRO level 3.
    """
    walk = _Walk(graph, keeps_all=keeps_all)
    return Lifetimes(events=tuple(walk.walk()), roots=walk.memory.roots)


class _Walk:
    """Lists the memory events of a program: goes through its operators and loops."""

    def __init__(self, graph: Graph, *, keeps_all: bool) -> None:
        self.graph, self.memory = graph, InMemory(graph, keeps_all=keeps_all)
        self._keeps_all = keeps_all
        self._outer = set(graph.inputs.values())
        self._outer |= {v for p, v in graph.outputs.items() if p in graph.inputs}
        self._last = self._find_last()
        self._empty: dict[int, list[CountedLoop]] = defaultdict(list)
        for loop in graph.loops:
            if loop.operators[0] == loop.operators[1]:
                self._empty[loop.operators[0]].append(loop)
        self._summed = {
            value: operator.summed
            for operator in graph.operators
            if operator.kind == "reduction"
            for value in operator.outputs
        }
        self._scattered = {
            value
            for operator in graph.operators
            if operator.kind == "scatter"
            for value in operator.outputs
        }

    def walk(self) -> Iterable[Event]:
        yield from self._scope((), 0, len(self.graph.operators))

    def _find_last(self) -> dict[int, int]:
        """Maps each value to the last operator that needs its buffer.

        Operators are given by their index in the program. A value from outside of a
        loop that the loop reads lives until the loop ends. Operands of a backward
        matmul live until the next backward matmul (`_next_products`), unless they are
        recomputed. Results of the program live to its end.
        """
        last: dict[int, int] = defaultdict(int)
        made: dict[int, tuple[int, ...]] = {}
        ends = [loop.operators[1] - 1 for loop in self.graph.loops]
        for operator in self.graph.operators:
            made.update(dict.fromkeys(operator.outputs, operator.within))
        for number, loop in enumerate(self.graph.loops):
            if loop.operators[0] == loop.operators[1]:
                continue
            for _, inner in loop.sliced:
                made[inner] = self._loop_stack(number)
        after = self._next_products()
        for number, operator in enumerate(self.graph.operators):
            for index in operator.inputs:
                for root in self.memory.root(index):
                    where = made.get(root, ())
                    inside = [n for n in operator.within if n not in where]
                    read = ends[inside[0]] if inside else number
                    if not inside and not self._is_recomputed(root):
                        read = after.get(number, number)
                    last[root] = max(last[root], read)
        for loop in self.graph.loops:
            first, stop = loop.operators
            read = [before for before, *_ in loop.carried]
            read += [outer for outer, _ in loop.sliced if first == stop]
            for root in (root for index in read for root in self.memory.root(index)):
                last[root] = max(last[root], first)
        for value in self.graph.outputs.values():
            for root in self.memory.root(value):
                last[root] = len(self.graph.operators)
        return last

    def _is_recomputed(self, value: int) -> bool:
        maker = self.memory.makers.get(value)
        return maker is not None and maker.again

    def _next_products(self) -> dict[int, int]:
        """Maps each backward matmul to the next backward matmul of the same loop body.

        Matmuls are given by their index in the program. XLA may swap the two matmuls
        that read one cotangent. So the operands of the first matmul stay alive until
        the second.
        """
        found: dict[int, int] = {}
        waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, operator in enumerate(self.graph.operators):
            if region(operator) != "backward":
                continue
            if operator.kind == "matmul":
                for before in waiting.pop(operator.within, ()):
                    found[before] = number
                waiting[operator.within].append(number)
        return found

    def _loop_stack(self, number: int) -> tuple[int, ...]:
        first = self.graph.loops[number].operators[0]
        within = self.graph.operators[first].within
        return within[: within.index(number) + 1]

    def _scope(self, within: tuple[int, ...], start: int, stop: int) -> Iterable[Event]:
        """Yields the memory events of a loop's body, or of the whole program.

        A loop's body first allocates its slices of the arrays that the loop scans. A
        loop whose body has no operators, and so only moves arrays, runs before the
        operator that follows it.

        Args:
            within: indices (in `Graph.loops`) of the loop and those around it,
                outermost first; () for the whole program.
            start: index of the first operator in the program.
            stop: index after the last operator.
        """
        going: dict[int, list[int]] = defaultdict(list)
        number = start
        if within:
            loop = self.graph.loops[within[-1]]
            for _, inner in loop.sliced:
                yield from self._alloc(inner, start, going)
        while number < stop:
            yield from self._without_operators(number, going)
            first, operator = number, self.graph.operators[number]
            if len(operator.within) > len(within):
                inner = operator.within[len(within)]
                loop = self.graph.loops[inner]
                yield from self._loop((*within, inner), loop, number, going)
                number = loop.operators[1] - 1
            else:
                yield from self._operator(operator, number, going)
            for at in range(first, number + 1):  # a loop's operators were all passed
                for value in going.pop(at, ()):
                    yield Event(value=value, kind="free")
            number += 1
        if not within:
            yield from self._without_operators(stop, going)
        for values in going.values():
            for value in values:
                yield Event(value=value, kind="free")

    def _without_operators(self, number: int, going: _Going) -> Iterable[Event]:
        """Yields the events of loops without operators that run before an operator.

        The body of such a loop only moves arrays.

        Args:
            number: the index of the operator in the program.
            going: map from an operator's index to the values that are freed after it;
                the values of the loops are added in place.
        """
        for loop in self._empty.pop(number, ()):
            yield from self._loop((), loop, number, going)

    def _loop(
        self, within: tuple[int, ...], loop: CountedLoop, number: int, going: _Going
    ) -> Iterable[Event]:
        for value in laid_anew(self.graph, self.memory, loop):
            if value not in self._outer:
                yield Event(value=value, kind="copied")
        for _, outer in loop.stacked:
            yield from self._alloc(outer, number, going)
        for before, _, _, after in loop.carried:
            # One value may start several carried values; it is freed only once.
            if self._takes_place(before, loop.operators[0]) and _forget(going, before):
                yield Event(value=before, kind="free")
            yield from self._alloc(after, number, going)
        yield from self._scope(within, *loop.operators)
        made = [outer for _, outer in loop.stacked]
        made += [after for *_, after in loop.carried]
        yield from (
            Event(value=v, kind="complete") for v in made if v not in self._outer
        )

    def _operator(
        self, operator: Operator, number: int, going: _Going
    ) -> Iterable[Event]:
        if operator.kind not in CHEAP:
            yield Event(value=number, kind="runs")
        for value in operator.outputs:
            if self.memory.root(value) != frozenset((value,)) or value in self._outer:
                continue
            replaced, rows = self._replaced(operator, value, number)
            if replaced is not None and replaced in going.get(number, ()):
                if rows:
                    yield Event(value=replaced, kind="reuse", rows=rows)
                else:
                    going[number].remove(replaced)
                    yield Event(value=replaced, kind="free")
            yield from self._alloc(value, number, going)
            yield Event(value=value, kind="complete")

    def _takes_place(self, before: int, first: int) -> bool:
        """Returns whether an array carried by a loop reuses its initial value's buffer.

        It does if the initial value has a buffer of its own, which is not an
        argument's, and no operator after the loop's first one reads the initial value.

        Args:
            before: the index of the initial value in `Graph.values`.
            first: the index of the loop's first operator in the program.
        """
        alone = self.memory.root(before) == frozenset((before,))
        return alone and before not in self._outer and self._last[before] <= first

    def _replaced(
        self, operator: Operator, value: int, number: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """Finds the operand whose buffer the result of an operator reuses.

        * A scatter reuses the buffer of its first operand.
        * An operator that XLA fuses (`CHEAP`, such as an elementwise one) reuses the
          buffer of a value of equal bytes that it reads and no scatter computes.
        * Other operators reuse no buffer. No operator reuses the buffer of a value that
          a later operator reads.

        A fused operator that reads a sum over rows, as in a softmax or its gradient, is
        part of a kernel that works row by row, and reuses no buffer, except in two
        cases:

        * The operator is in the backward pass, and the forward pass saves all values
          (`keeps_all`, as at ZeRO level 3).
        * The operator is the last reader of a scatter's result with equal bytes. It
          then reuses the buffer of another value, if a row has more than 16384 elements
          (`LONGEST_ROW`) or a mesh axis divides the row's dim.

        Args:
            operator: the operator.
            value: the index of its result in `Graph.values`.
            number: the index of the operator in the program.

        Returns:
            The value whose buffer is reused, or None; and dims, one of which a mesh
            axis must divide for the reuse (() for no condition).
        """
        if operator.kind == "scatter":
            into = operator.inputs[0]
            return (into if self._last.get(into) == number else None), ()
        if operator.kind not in CHEAP:
            return None, ()
        size = self.graph.values[value].num_bytes
        roots = self.memory.all_roots(operator)
        alike = [
            root
            for root in roots
            if self.graph.values[root].num_bytes == size
            and self._last.get(root) == number
        ]
        free = [root for root in alike if root not in self._scattered]
        summed = {dim for root in roots for dim in self._summed.get(root, ())}
        by_rows = not (self._keeps_all and region(operator) == "backward")
        if not free or (summed and by_rows and len(free) == len(alike)):
            return None, ()
        if by_rows:
            by_rows = all(
                self.graph.dims[dim].sizes[-1] <= LONGEST_ROW for dim in summed
            )
        return free[0], tuple(sorted(summed)) if by_rows else ()

    def _alloc(self, value: int, number: int, going: _Going) -> Iterable[Event]:
        if value in self._outer:
            return
        yield Event(value=value, kind="alloc")
        going[max(number, self._last.get(value, number))].append(value)


def _forget(going: _Going, value: int) -> bool:
    """Removes a value from `going`, the values to free after each operator.

    Returns whether the value was in `going`.
    """
    for values in going.values():
        if value in values:
            values.remove(value)
            return True
    return False
