"""Fusion: the bytes that the kernels of a GPU or TPU read and write in device memory.

XLA fuses operators that take little time to compute (`CHEAP`, such as elementwise ones)
into kernels. A kernel reads arrays from memory, computes the operators that lead from
these arrays to one further array, and writes this array. The rules that decide which
arrays are in memory were read from programs that XLA's GPU compiler had compiled
(`experiments/fused_bytes.py`), and are assumed for TPUs. No number is fitted. The rules
are:

* Operands and results of operators that are not `CHEAP`, such as products (matmuls,
  convolutions and custom kernels), arrays that loops slice, stack or carry, and results
  of the program are in memory. Operands of reductions and gathers need not be. All
  other arrays are computed again by each kernel that needs them.
* If all operators that read an array are casts, it is written in the widest dtype of
  their results, unless its own is narrower.
* An array that several kernels need is computed once and written, if this moves fewer
  bytes than computing it in each kernel from other arrays in memory.
* A reduction over the last dims of an array, as in a softmax or layer norm, is part of
  the kernel that reads its result and the same arrays. It is a kernel of its own if its
  operands are computed with exponentials or the like, and several kernels read its
  result.
* Any other reduction is part of a kernel that reads or writes the same large arrays, if
  neither waits for the other's result.
* An operand of a matmul is copied into another order if its batch dims are not first,
  or its contracted dims do not lie together before or after its other dims.
* A scatter changes an array in place. If a scatter into zeros is only added to another
  array, the scatter changes this other array.
* A broadcast that is the same in each iteration of a loop is computed before the loop,
  and its readers read all of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dtft.planner.ir.flops import SPECIAL
from dtft.planner.ir.graph import Graph, Operator

CHEAP = ("elementwise", "layout", "random")
"""Kinds of operators that a compiler fuses with their neighbours."""
PRODUCTS = ("matmul", "convolution", "kernel")
"""Kinds of operators ("products") that XLA does not fuse: each is a kernel of its own.
They have most of a model's operations."""
RELABELS = ("reshape", "squeeze", "transpose", "copy", "optimization_barrier", "name")
"""Operators whose result has their operand's elements, in another shape or order."""
LONGEST_ROW = 16384
"""Number of elements of the longest row that one kernel reduces and reads again. In
compiled steps, rows of 16384 had one kernel; rows of 32768 had several."""
_COSTLY = SPECIAL | {"div"}
"""Functions that XLA does not compute again for several kernels."""


@dataclass(kw_only=True, slots=True)
class Kernel:
    """A kernel that writes one array."""

    number: int
    """Number (position in the program) of the operator whose result is written."""
    value: int
    """Number of the array that is written."""
    reads: frozenset[int]
    """Numbers of the arrays that are read."""
    merged: bool = field(default=False)
    """Whether another kernel, which reads or writes the same arrays, also does the work
    of this kernel."""
    rows: bool = field(default=False)
    """Whether the kernel also reduces rows of the arrays that it reads."""


def moved_bytes(graph: Graph) -> dict[int, float]:
    """Computes the bytes that fused kernels read and write in a step.

    Of `PRODUCTS`, such as matmuls, only copies of operands into another order are
    counted, not the bytes that the product itself reads and writes.

    Args:
        graph: a traced step; sizes are those of all devices together.

    Returns:
        Map from the number of an operator to the bytes of the kernels that write its
        results, in all executions of a step. Operators without such kernels are left
        out.

    In the example, one kernel computes all three operators, and operator 2 (the sum)
    has its bytes.

    >>> import jax
    >>> from dtft.planner.ir import trace
    >>> x = jax.ShapeDtypeStruct((4,), "f4")
    >>> graph = trace(lambda x: jax.numpy.tanh(x * 2) + 1, x)
    >>> moved_bytes(graph)  # one kernel: 16 bytes in, 16 bytes out
    {2: 32.0}
    """
    fusion = _Fusion(graph)
    found: dict[int, float] = defaultdict(float)
    for kernel in fusion.kernels():
        if not kernel.merged:
            found[kernel.number] += fusion.bytes_of(kernel)
    for number, num_bytes in fusion.reordered():
        found[number] += num_bytes
    return dict(found)


def unfused_bytes(graph: Graph) -> dict[int, float]:
    """Computes the bytes that kernels read and write in a step, without fusion.

    Each operator is a kernel that reads and writes whole arrays. Only a gather does not
    read its whole operand: it reads the elements that it looks up. Operators of kind
    `layout` make views, and move nothing. `PRODUCTS`, such as matmuls, are not counted.

    Args:
        graph: a traced step; sizes are those of all devices together.

    Returns:
        Map from the number of an operator to its bytes in all executions of a step.
        Operators that move nothing are left out.

    Each operator of the example reads 16 bytes and writes 16 bytes.

    >>> import jax
    >>> from dtft.planner.ir import trace
    >>> x = jax.ShapeDtypeStruct((4,), "f4")
    >>> unfused_bytes(trace(lambda x: jax.numpy.tanh(x * 2) + 1, x))
    {0: 32.0, 1: 32.0, 2: 32.0}
    """
    found: dict[int, float] = {}
    for number, operator in enumerate(graph.operators):
        views = operator.kind == "layout" or operator.kind in PRODUCTS
        if views or operator.unread or not operator.trips:
            continue
        own = graph.bytes_of(operator)
        if operator.kind in ("gather", "scatter"):  # only rows that are indexed
            sizes = [graph.values[index].num_bytes for index in operator.outputs]
            sizes += [graph.values[index].num_bytes for index in operator.inputs[1:]]
            own = 2 * sum(sizes) if operator.kind == "gather" else own
        found[number] = float(own * operator.trips)
    return found


def relabelled(operator: Operator, index: int) -> int:
    """Finds the operand that has the same elements as one of an operator's results.

    If the operator has as many operands as results, as an optimization barrier has,
    this is the operand at the position of the result. Otherwise it is the first
    operand. Arrays are given by their index in `Graph.values`.

    Args:
        operator: a reshape, transpose or similar operator (`RELABELS`), or a reduction
            of dims of size 1.
        index: the index of the result.
    """
    if len(operator.inputs) == len(operator.outputs):
        return operator.inputs[operator.outputs.index(index)]
    return operator.inputs[0]


class _Fusion:
    """The arrays of a program that are in memory, and the kernels between them.

    Arrays are given by their index in `Graph.values`.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers: dict[int, Operator] = {}
        self.readers: dict[int, list[Operator]] = defaultdict(list)
        for operator in graph.operators:
            self.makers.update(dict.fromkeys(operator.outputs, operator))
            if not operator.unread:
                for index in operator.inputs:
                    self.readers[index].append(operator)
        self._results = set(graph.outputs.values())
        self._into = dict(self._scattered_into())
        self._sums = {total: into for into, _, total in self._into.values()}
        self._hoisted = set(self._find_hoisted())
        self.kept = always = self._find_kept()
        self._roots: dict[int, frozenset[int]] = {}
        self._rows: set[int] = set()
        """Reduced rows that no kernel writes."""
        for _ in range(2):  # fewer kernels need the operands of what is then kept
            consumers = self._count_consumers()
            self.kept = self._resolve(set(always), consumers)

    # Arrays in memory.

    def _resolve(self, kept: set[int], consumers: Mapping[int, int]) -> set[int]:
        """Decides which arrays are in memory, and finds the roots of all arrays.

        The roots of an array are the arrays in memory from which a kernel computes it.
        Adds to `kept` the arrays that are cheaper to write than to compute again, and
        returns `kept`.

        Args:
            kept: the arrays that are in memory in any case.
            consumers: map from an array to the number of kernels that need it.
        """
        self.kept = kept
        for operator in self.graph.operators:
            for index in operator.outputs:
                self._roots[index] = self._find_roots(operator, index)
                if not self._is_recomputed(index, consumers[index]):
                    kept.add(index)
                    self._roots[index] = frozenset((index,))
        return kept

    def _count_consumers(self) -> dict[int, int]:
        """Counts for each array the kernels that need it, matmuls included."""
        found: dict[int, set[int]] = defaultdict(set)
        for operator in reversed(self.graph.operators):
            if operator.unread:
                continue
            needs: set[int] = set()
            for index in operator.outputs:
                alone = operator.kind in PRODUCTS or self.source(index) in self.kept
                needs |= {index} if alone else found[index]
            for index in operator.inputs:
                found[index] |= needs
        return defaultdict(int, {index: len(some) for index, some in found.items()})

    def _is_recomputed(self, index: int, consumers: int) -> bool:
        """Whether an array is computed by each kernel that needs it, not written once.

        True if fewer than two kernels need the array, or if writing the array once and
        reading it in each kernel moves at least as many bytes as computing it in each
        kernel from arrays in memory. For an array that is in memory in any case, the
        result is True too, and nobody uses it.

        Args:
            index: the number of the array.
            consumers: the number of kernels that need the array.
        """
        if consumers < 2 or index in self.kept or self._roots[index] == {index}:
            return True
        values = self.graph.values
        own = values[index].num_bytes
        read = sum(values[root].num_bytes for root in self._roots[index])
        return consumers * read <= read + own + consumers * own

    def _find_kept(self) -> set[int]:
        kept = set(self._results)
        for operator in self.graph.operators:
            if operator.unread or self._relabels(operator):
                continue
            if operator.kind not in CHEAP:
                kept.update(operator.outputs)
            if operator.kind not in (*CHEAP, "reduction", "gather"):
                kept.update(operator.inputs)
        for loop in self.graph.loops:
            for pair in (*loop.sliced, *loop.stacked, *loop.carried):
                kept.update(pair)
        kept = set(map(self.source, kept))
        for scattered, (into, zeros, total) in self._into.items():
            kept -= {scattered, self.source(zeros), total}
            kept.add(self.source(into))
        return kept | self._hoisted

    def source(self, index: int) -> int:
        """Returns the array whose elements an array has, in another shape or order.

        Goes back through reshapes, transposes and copies (`RELABELS`). Returns `index`
        if no such operator makes the array.
        """
        while (maker := self.makers.get(index)) and self._relabels(maker):
            index = relabelled(maker, index)
        return index

    def _relabels(self, operator: Operator) -> bool:
        if not operator.inputs or not operator.outputs:  # a print has no result
            return False
        values = self.graph.values
        sizes = values[operator.inputs[0]].size, values[operator.outputs[0]].size
        same = operator.kind == "reduction" and sizes[0] == sizes[1]
        return same or operator.primitive in RELABELS

    def _find_roots(self, operator: Operator, index: int) -> frozenset[int]:
        """Finds the arrays in memory from which a kernel computes array `index`.

        `operator` is the operator whose result the array is.
        """
        if self._relabels(operator):
            return self.roots(relabelled(operator, index))
        if index in self._sums:
            return self.roots(self._sums[index])
        if index in self.kept:
            return frozenset((index,))
        return self.read_by(operator)

    def roots(self, index: int) -> frozenset[int]:
        """Returns the arrays in memory from which a kernel computes an array.

        This is the array itself if it is in memory.
        """
        return self._roots.get(index, frozenset((index,)))

    def read_by(self, operator: Operator) -> frozenset[int]:
        """Returns the arrays in memory that a kernel reads to compute an operator."""
        return frozenset().union(*map(self.roots, operator.inputs))

    def _scattered_into(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Finds the scatters into zeros whose result is only added to another array.

        Yields:
            The number of the scatter's result, and the numbers of the other array, of
            the zeros and of the sum.
        """
        for operator in self.graph.operators:
            if operator.kind != "scatter" or operator.unread or not operator.inputs:
                continue
            (made, *_), zeros = operator.outputs, operator.inputs[0]
            maker, readers = self.makers.get(self.source(zeros)), self.readers[made]
            if maker is None or maker.primitive != "broadcast_in_dim":
                continue
            if len(readers) == 1 and readers[0].primitive in ("add_any", "add"):
                for into in set(readers[0].inputs) - {made}:
                    yield made, (into, zeros, readers[0].outputs[0])

    def _find_hoisted(self) -> Iterator[int]:
        """Yields results of broadcasts in loops that are the same in each iteration.

        A result is given by the number of its array. Broadcasts that the backward pass
        recomputes are left out.
        """
        varying = {inner for loop in self.graph.loops for _, inner in loop.sliced}
        for loop in self.graph.loops:
            varying.update(into for _, into, _, _ in loop.carried)
        for operator in self.graph.operators:
            if not operator.within:
                continue
            if operator.kind not in CHEAP or not varying.isdisjoint(operator.inputs):
                varying.update(operator.outputs)
            elif operator.primitive == "broadcast_in_dim":
                if not (operator.unread or operator.again):
                    yield from operator.outputs

    # Kernels.

    def kernels(self) -> list[Kernel]:
        """Lists the kernels that are no matmul, convolution or custom kernel, in order.

        The order is that of the operators in the program.
        """
        found = [
            Kernel(number=number, value=index, reads=self.read_by(operator))
            for number, operator in enumerate(self.graph.operators)
            if operator.trips and not operator.unread and operator.kind not in PRODUCTS
            for index in operator.outputs
            if index in self.kept and not self._relabels(operator)
        ]
        readers: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in found:
            for index in kernel.reads:
                readers[index].append(kernel)
        for kernel in reversed(found):
            kernel.merged = self._is_merged(kernel, readers[kernel.value])
        self._merge_columns(found, readers)
        return found

    def _merge_columns(
        self, kernels: Iterable[Kernel], readers: Mapping[int, list[Kernel]]
    ) -> None:
        """Marks reductions that another kernel also computes (`Kernel.merged`).

        The large arrays of a reduction are those that it reads and that have more
        elements than its result. Another kernel also computes the reduction if:

        * it reads or writes all of the large arrays;
        * its loop runs over as many elements as the reduction's;
        * it does not read the reduction's result;
        * the array that it writes is a large array, or the reduction does not read it;
        * it is not merged itself, and computes no reduction of rows.

        Reductions without a kernel of their own (`_is_merged`) are skipped.

        Args:
            kernels: the kernels of the program.
            readers: map from an array to the kernels that read the array.
        """
        values = self.graph.values
        writers = {kernel.value: kernel for kernel in kernels}
        for kernel in kernels:
            operator = self.graph.operators[kernel.number]
            if kernel.merged or operator.kind != "reduction" or not kernel.reads:
                continue
            size = values[kernel.value].size
            large = {index for index in kernel.reads if values[index].size > size}
            if not large:
                continue
            near = [*readers[min(large)], *filter(None, map(writers.get, large))]
            kernel.merged = any(
                other is not kernel
                and not (other.merged or other.rows)
                and self._size(other) == self._size(kernel)
                and large <= other.reads | {other.value}
                and kernel.value not in other.reads
                and other.value not in kernel.reads - large
                for other in near
            )

    def _size(self, kernel: Kernel) -> int:
        """Returns the number of elements that a kernel's loop runs over.

        For a reduction this is the size of its operand. For a kernel of operators that
        take little time to compute (`CHEAP`, such as elementwise ones) it is the size
        of the result. 0 for all others, such as gathers.
        """
        operator = self.graph.operators[kernel.number]
        if operator.kind in CHEAP:
            return self.graph.values[kernel.value].size
        if operator.kind == "reduction":
            return self.graph.values[operator.inputs[0]].size
        return 0

    def _is_merged(self, kernel: Kernel, readers: Iterable[Kernel]) -> bool:
        """Decides whether a row reduction is part of the kernels that read its result.

        If so, the reduction has no kernel of its own: marks the kernels that also
        compute the reduction (`Kernel.rows`) and returns True. Only kernels that read
        or write the same large arrays can do so.

        Args:
            kernel: the kernel of the reduction. For any other kernel, the result is
                False.
            readers: the kernels that read the result.
        """
        operator = self.graph.operators[kernel.number]
        if not self._reduces_rows(operator):
            return False
        values = self.graph.values
        size = values[kernel.value].size
        large = {index for index in kernel.reads if values[index].size > size}
        own = [reader for reader in readers if not reader.merged]
        fitting = [one for one in readers if large <= one.reads | {one.value}]
        if not fitting or (len(own) > 1 and self._is_costly(operator)):
            return False
        for reader in fitting:
            reader.rows = True
        self._rows.add(kernel.value)
        return True

    def _reduces_rows(self, operator: Operator) -> bool:
        if operator.kind != "reduction" or not operator.inputs:
            return False
        values = self.graph.values
        before = values[operator.inputs[0]].shape
        after = values[operator.outputs[0]].shape
        if before[: len(after)] != after or math.prod(after) == 1:
            return False
        return math.prod(before[len(after) :]) <= LONGEST_ROW

    def _is_costly(self, operator: Operator) -> bool:
        """Whether a reduction's operands are computed with exponentials or the like.

        Follows the operands back through arrays that are not in memory, as the kernel
        of the reduction computes these again. Arrays of another size than the
        reduction's first operand are not followed.

        Args:
            operator: the reduction.
        """
        values = self.graph.values
        size = values[operator.inputs[0]].size
        seen, open_ = set[int](), list(operator.inputs)
        while open_:
            index = open_.pop()
            maker = self.makers.get(index)
            if index in seen or index in self.kept or maker is None:
                continue
            seen.add(index)
            if values[index].size == size:
                if maker.primitive in _COSTLY:
                    return True
                open_ += maker.inputs
        return False

    def bytes_of(self, kernel: Kernel) -> float:
        """Computes the bytes that a kernel moves in all executions of a step."""
        values = self.graph.values
        operator = self.graph.operators[kernel.number]
        written = self._written(kernel.value)
        trips = 1 if kernel.value in self._hoisted else operator.trips
        if operator.kind == "scatter":  # indices and updates; elements read and written
            return 3.0 * values[operator.inputs[-1]].num_bytes * trips
        read = [values[index].num_bytes for index in kernel.reads - self._rows]
        if operator.kind == "gather":
            size = values[kernel.value].num_bytes
            return float(trips * (written + sum(min(size, one) for one in read)))
        return float(trips * (written + sum(read)))

    def _written(self, index: int) -> int:
        """Returns the bytes that a kernel writes for an array.

        An array that only casts read is written in the dtype of the casts, if that is
        narrower.
        """
        own, readers = self.graph.values[index].num_bytes, self.readers[index]
        if index in self._results or not readers:
            return own
        if any(one.primitive != "convert_element_type" for one in readers):
            return own
        casts = (self.graph.values[one.outputs[0]].num_bytes for one in readers)
        return min(own, max(casts))

    # Copies of operands.

    def reordered(self) -> Iterator[tuple[int, float]]:
        """Finds the matmuls that read a copy of an operand in another order.

        An array that several matmuls read in one order is copied once, for the first
        matmul.

        Yields:
            The number of the matmul, and the bytes that the copies of one operand read
            and write in a step.
        """
        seen: set[tuple[int, bool]] = set()
        for number, operator in enumerate(self.graph.operators):
            if operator.kind != "matmul" or operator.unread or len(operator.inputs) < 2:
                continue
            made = self.graph.values[operator.outputs[0]]
            operands = operator.inputs[:2]
            ranks = sum(len(self.graph.values[index].shape) for index in operands)
            batch = ranks - 2 * len(operator.contracted[0]) - len(made.shape)
            for index, summed in zip(operands, operator.contracted, strict=True):
                key = self.source(index), batch > 0
                if key in seen or self._in_order(index, made.dims[:batch], summed):
                    continue
                seen.add(key)
                yield number, 2.0 * self.graph.values[index].num_bytes * operator.trips

    def _in_order(
        self, index: int, batch: tuple[int, ...], summed: tuple[int, ...]
    ) -> bool:
        """Whether a matmul can read an operand without a copy in another order.

        This is so if the batch dims are first in memory, and the contracted dims lie
        together and in their order, before or after all other dims.

        Args:
            index: the operand's index in `Graph.values`.
            batch: numbers of the batch dims (`Value.dims`) of the matmul's result.
            summed: positions of the contracted dims among the operand's dims.
        """
        value = self.graph.values[index]
        first: list[int] = []
        for dim in batch:
            places = range(len(value.dims))
            first += [p for p in places if value.dims[p] == dim and p not in first][:1]
        rest = [p for p in range(len(value.dims)) if p not in (*first, *summed)]
        order = [p for p in self._order(index) if value.shape[p] > 1]
        for wanted in ((*first, *rest, *summed), (*first, *summed, *rest)):
            if [p for p in wanted if value.shape[p] > 1] == order:
                return True
        return False

    def _order(self, index: int) -> list[int]:
        """Returns the positions of an array's dims in their order in memory.

        A transposed array lies in the order of the operand of its transpose.
        """
        value, maker = self.graph.values[index], self.makers.get(index)
        if maker is None or maker.primitive != "transpose":
            return list(range(len(value.dims)))
        before = self.graph.values[maker.inputs[0]]
        free, order = list(range(len(value.dims))), []
        for dim, size in zip(before.dims, before.shape, strict=True):
            place = next(
                p for p in free if (value.dims[p], value.shape[p]) == (dim, size)
            )
            free.remove(place)
            order.append(place)
        return order
