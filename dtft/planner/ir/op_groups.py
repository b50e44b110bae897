"""Groups operators of equal cost, so that costs are computed once for each group.

The groups include memory traffic that no equation shows: copies that loops make into
and out of stacked arrays, and reads with a stride because of a transpose.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from dtft.planner.ir.flops import SPECIAL
from dtft.planner.ir.fusion import CHEAP, moved_bytes, unfused_bytes
from dtft.planner.ir.graph import Graph, Operator, item_bits


def awaited(graph: Graph, waits: Mapping[int, bool]) -> frozenset[int]:
    """Returns the numbers of the values that marked operators need.

    These are the operands of marked operators, and the values from which unmarked
    operators compute these operands. The planner marks the operators that make the
    forward or backward pass wait for their operands, such as matmuls (`_waits`).

    Args:
        graph: the program.
        waits: map from the number of each operator to whether the operator is marked.
    """
    sources = _sources(graph, waits)
    open_ = [i for n, op in enumerate(graph.operators) if waits[n] for i in op.inputs]
    found: set[int] = set()
    while open_:
        index = open_.pop()
        if index not in found:
            found.add(index)
            open_ += sources.get(index, ())
    return frozenset(found)


def _sources(graph: Graph, waits: Mapping[int, bool]) -> dict[int, list[int]]:
    """Maps each value to the values that its operator or loop computes it from.

    Values are given by their index in `Graph.values`. `waits` says for the number of
    each operator whether it is marked. Results of marked operators are left out.
    """
    sources: dict[int, list[int]] = {}

    def comes(value: int, *values: int) -> None:
        sources.setdefault(value, []).extend(values)

    for number, operator in enumerate(graph.operators):
        for output in operator.outputs:
            if not waits[number]:
                comes(output, *operator.inputs)
    for loop in graph.loops:
        for inside, outside in loop.stacked:
            comes(outside, inside)
        for outside, inside in loop.sliced:
            comes(inside, outside)
        for before, into, out, after in loop.carried:
            comes(into, before, out)
            comes(after, out)
    return sources


def nobody_waits(operator: Operator, known: frozenset[int]) -> bool:
    """Whether only the update, or nothing, needs the sums of an operator.

    True for a matmul that computes a parameter's gradient, for example: a mesh axis
    that divides the summed dims leaves partial sums, and no later operator of the
    backward pass needs the reduced sums. False for an operator that sums over no dims.

    Args:
        operator: the operator.
        known: numbers of the values that the forward or backward pass waits for: its
            matmuls and similar operators (`_waits`) read them, or values computed from
            them. The result of `awaited`.
    """
    return bool(operator.summed) and not known.intersection(operator.outputs)


# Copies of loops. A scan over layers keeps weights, residuals and gradients as stacks.
# XLA fills a stack with zeros before the loop, copies the result of each iteration into
# it, and copies the slice of each iteration out if its reader is not a fused loop. No
# equation of the program shows this traffic. On CPU it is two fifths of a step of a
# small scanned transformer.


def loop_copies(graph: Graph, fused: Container[str]) -> Iterator[tuple[Operator, int]]:
    """Yields an operator for each copy that a loop makes of slices of an array.

    The operators are not in the program: they represent copies that XLA adds. In each
    iteration, XLA copies the slice that it reads out of a stacked array, unless all its
    readers read it in place, and the slice that it computes into a stacked result.

    Args:
        graph: the program.
        fused: kinds of operators that read a slice in place, without a copy.

    Yields:
        Pairs of an operator, which copies one slice in each iteration, and the bytes
        that one copy moves, divided by the slice's bytes: 2 (read and write) for a
        slice that is read; 3 for a slice of a result, whose memory is filled with zeros
        first.
    """
    copied = {
        index
        for operator in graph.operators
        if operator.kind not in fused
        for index in operator.inputs
    }
    for loop in graph.loops:
        start, end = loop.operators
        if start == end:
            continue
        first = graph.operators[start]
        for _, part in loop.sliced:
            if part in copied:
                yield _copy(first, part, "dynamic_slice"), 2
        for part, _ in loop.stacked:  # zero fill, read, write
            yield _copy(first, part, "dynamic_update_slice"), 3


def _copy(first: Operator, part: int, primitive: str) -> Operator:
    """Makes an operator that copies a slice of a stacked array in a loop.

    Args:
        first: the first operator of the loop's body.
        part: the number of the slice's value.
        primitive: the primitive of the new operator.
    """
    return Operator(
        primitive=primitive,
        kind="layout",
        inputs=(part,),
        outputs=(part,),
        flops=0.0,
        trips=first.trips,
        within=first.within,
        name=first.name,
    )


# Transposed reads. The gradient of a weight is a product and a transpose. XLA merges
# both into one product with exchanged operands, unless an all-reduce of a partial sum
# stands between them, because a mesh axis divides a contracted dim. A compiler that
# keeps every array in the order of its dims, as XLA's CPU backend does, then leaves the
# transpose to the readers. An update with two moments reads every element twice, each
# time from another cache line: more than half of a step of a small MLP with data
# parallelism. If the product contracts several dims (examples and positions), XLA
# copies its left operand so that these dims come last. The result is then in order, but
# every array that the operand is computed from is read transposed (six for the gradient
# of GELU). A convolution needs channels last. The gradient of a kernel has examples as
# channels, so its input is copied.


_SAME = ("convert_element_type", "copy", "name", "optimization_barrier")
"""Operators that keep the order of elements, and are fused with their readers."""
_KEPT = SPECIAL | {"div", "rem", "sqrt", "rsqrt"}
"""Functions that XLA computes once for all of their readers (`IsExpensive`)."""


_NATIVE_BITS = 32
"""Least bits of an element for which XLA merges a matmul with the transpose of its
result.

XLA converts a result of fewer bits before the transpose, and so cannot merge both.
"""


def transposed_reads(graph: Graph) -> Mapping[int, Operator]:
    """Counts the elements that operators read with a stride, because of a transpose.

    The elements of a transposed array count for each elementwise operator that reads
    the array. If no operator reads it (it only leaves its loop or the program), they
    count for the transpose. A transpose that keeps the last dim moves whole rows, and
    its elements do not count.

    XLA merges some transposes with the matmul whose result they transpose (`_folded`),
    unless a mesh axis divides the contracted dims. The elements of these results are
    counted apart (`Operator.turned`), because they are read with a stride only if such
    an axis exists. All other elements are counted in `Operator.strided`.

    XLA copies the left operand of a convolution, or of a matmul that contracts several
    dims, if the contracted dims are not the operand's last dims. The operand's elements
    then count for the convolution or matmul, once per array from which the operand is
    computed. A matmul that contracts one dim reads rows and columns equally fast.

    Returns:
        Map from an operator's number to a copy of the operator with its elements;
        operators that read nothing with a stride are left out.

    In the example, operator 1 multiplies the 16 elements of a transposed array.

    >>> from dtft.planner.ir.graph import Value
    >>> values = tuple(Value(shape=s, dtype="float32", dims=d) for s, d in
    ...     (((2, 8), (0, 1)), ((8, 2), (1, 0)), ((8, 2), (1, 0))))
    >>> turned, scaled = (Operator(primitive=p, kind=k, inputs=(n,), outputs=(n + 1,),
    ...     flops=0.0, trips=1) for n, (p, k) in
    ...     enumerate((("transpose", "layout"), ("mul", "elementwise"))))
    >>> graph = Graph(values=values, operators=(turned, scaled), dims=(), loops=(),
    ...     inputs={}, outputs={})
    >>> found = transposed_reads(graph)
    >>> {number: (one.strided, one.turned) for number, one in found.items()}
    {1: (16.0, 0.0)}
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        for index in set(operator.inputs):
            readers[index].append(number)
    makers = {i: op for op in graph.operators for i in op.outputs}
    found: dict[int, Operator] = {}
    in_order: set[int] = set()
    for number, operator in enumerate(graph.operators):
        if _copies_left(graph, operator):
            arrays = _fused(graph, operator.inputs[0], makers)
            size = graph.values[operator.inputs[0]].size
            found[number] = replace(operator, strided=float(size * len(arrays)))
            in_order.update(operator.outputs)
        if not _turns(graph, operator) or operator.inputs[0] in in_order:
            continue
        size = float(graph.values[operator.outputs[0]].size)
        alone = len(readers[operator.inputs[0]]) == 1
        product = makers.get(operator.inputs[0]) if alone else None
        over = _folded(graph, operator, product)
        fused = _readers(graph, operator.outputs[0], readers)
        for reader in [number] if fused is None else fused:
            known = found.get(reader, graph.operators[reader])
            found[reader] = _reading(known, size, over)
    return found


def _reading(operator: Operator, size: float, over: tuple[int, ...]) -> Operator:
    """Returns an operator with `size` more elements that it reads with a stride.

    The elements are added to `Operator.strided` if `over` is empty, else to
    `Operator.turned`. `over` has the contracted dims of a matmul, if the stride exists
    only where a mesh axis divides one of these dims.
    """
    if not over:
        return replace(operator, strided=operator.strided + size)
    dims = tuple(sorted({*operator.turned_over, *over}))
    return replace(operator, turned=operator.turned + size, turned_over=dims)


def _folded(
    graph: Graph, turned: Operator, product: Operator | None
) -> tuple[int, ...]:
    """Returns the contracted dims of a matmul that XLA merges with a transpose.

    XLA exchanges the operands of a matmul of matrices, or of stacks of matrices, if the
    transpose swaps rows and columns, nothing else reads the matmul's result, and its
    elements have 32 bits or more (`_NATIVE_BITS`). Returns () if XLA does not merge
    matmul and transpose.

    Args:
        graph: the program.
        turned: a transpose.
        product: the operator that computes the transposed array; None if no operator
            does, or if something else reads this array, too.
    """
    if product is None or product.kind != "matmul" or len(product.contracted[0]) != 1:
        return ()
    made, after = (graph.values[op.outputs[0]] for op in (product, turned))
    ranks = {len(graph.values[index].shape) for index in product.inputs}
    if ranks != {len(made.dims)} or item_bits(made.dtype) < _NATIVE_BITS:
        return ()
    *stack, rows, columns = made.dims
    return product.summed if after.dims == (*stack, columns, rows) else ()


def _copies_left(graph: Graph, operator: Operator) -> bool:
    """Whether XLA copies an operator's left operand so that contracted dims come last.

    False for all operators but matmuls and convolutions.

    A matmul that contracts a single dim needs no copy.
    """
    places = operator.contracted[0]
    least = {"matmul": 2, "convolution": 1}.get(operator.kind)
    if least is None or len(places) < least:
        return False
    last = len(graph.values[operator.inputs[0]].shape)
    return sorted(places) != list(range(last - len(places), last))


def _fused(graph: Graph, index: int, makers: Mapping[int, Operator]) -> set[int]:
    """Returns the arrays that XLA reads when it copies value `index` to another layout.

    XLA fuses the elementwise operators that compute the value into the copy, and
    recomputes them for other readers. Expensive functions, such as exp, divisions and
    square roots, are not fused. Values and arrays are given by their index in
    `Graph.values`; `makers` has the operator that computes each value.
    """
    size, read, seen, open_ = graph.values[index].size, set[int](), {index}, [index]
    while open_:
        one = open_.pop()
        maker = makers.get(one)
        if maker is None or not _is_fused(maker):
            read.add(one)
            continue
        large = {i for i in maker.inputs if graph.values[i].size == size}
        open_ += large - seen
        seen |= large
    return read or {index}


def _is_fused(maker: Operator) -> bool:
    if maker.kind == "elementwise":
        return maker.primitive not in _KEPT
    return maker.primitive in (*_SAME, "broadcast_in_dim")  # its operand is small


def _turns(graph: Graph, operator: Operator) -> bool:
    """Whether an operator is a transpose that puts another dim last.

    Dims of size 1 are ignored.
    """
    if operator.primitive != "transpose":
        return False
    before, after = (
        [dim for dim, size in zip(value.dims, value.shape, strict=True) if size > 1]
        for value in (
            graph.values[operator.inputs[0]],
            graph.values[operator.outputs[0]],
        )
    )
    return before[-1:] != after[-1:]


def _readers(
    graph: Graph, index: int, readers: Mapping[int, list[int]]
) -> list[int] | None:
    """Returns the numbers of the elementwise operators that read a value.

    A cast, copy, name or optimization barrier keeps the order of elements. Such a
    reader is replaced by the elementwise operators that read its result; it is returned
    itself if no operator reads its result. Other readers are left out, so the list may
    be empty. Returns None if no operator reads the value at all.

    Args:
        graph: the program.
        index: the index of the value.
        readers: the numbers of all operators that read each value.
    """
    if not readers.get(index):
        return None
    found = []
    for number in readers[index]:
        operator = graph.operators[number]
        if operator.kind == "elementwise":
            found.append(number)
        elif operator.primitive in _SAME:
            further = _readers(graph, operator.outputs[0], readers)
            found += [number] if further is None else further
    return found


# Groups. A step of thousands of operators has only dozens of distinct ones. Layers
# repeat, and elementwise operators over the same dims differ only in bytes, which are
# added up.


@dataclass(frozen=True, kw_only=True, slots=True)
class OpGroup:
    """A group of operators whose cost is computed once, from one of the operators.

    The operators of a group are in the same part of the step. They have equal cost, or
    are operators that XLA fuses (`CHEAP`, such as elementwise ones) over the same dims,
    or copies of slices with the same dims (`loop_copies`).
    """

    operator: Operator
    """A representative of the group."""
    times: float
    """Executions of all operators of the group in a step. In a group of operators of
    unequal size: their total bytes divided by the bytes of `operator`."""
    region: str
    """The part of the step: forward, backward or update."""
    last: bool = False
    """Whether the group sums over dims, and only the update, or nothing, needs the sums
    (`nobody_waits`)."""
    copies: bool = False
    """Whether the group represents copies that loops make of slices of stacked arrays;
    `loop_copies` finds them."""
    moved: float = 1.0
    """Bytes that the kernels of a GPU or TPU read and write for the group
    (`fusion.moved_bytes`), divided by the bytes of the operands and results of its
    operators. For `fusion.PRODUCTS`, such as matmuls, only copies of operands into
    another order are counted."""
    members: tuple[int, ...] = ()
    """Numbers of the operators of the group; empty for copies of loops."""

    @property
    def uncached(self) -> bool:
        """Whether the group reads bytes that were not used recently.

        True for groups of the update, which reads the training state, and for copies of
        slices of a loop's stacked arrays. No cache has these bytes.
        """
        return self.copies or self.region == "update"


def region(operator: Operator) -> str:
    """Returns the part of the step that an operator is in, from its name stack.

    The part is forward, backward or update. JAX writes `jvp(...)` around the names of
    the forward pass, and `transpose(jvp(...))` around those of the backward pass.
    Operators outside of differentiated functions are in the update.

    >>> from dtft.planner.ir.graph import Operator
    >>> made = Operator(primitive="mul", kind="elementwise", inputs=(), outputs=(),
    ...     flops=0.0, trips=1, name="transpose(jvp(layer))/mul")
    >>> region(made)
    'backward'
    """
    if "transpose(" in operator.name:
        return "backward"
    return "forward" if "jvp(" in operator.name else "update"


def group_operators(
    graph: Graph, alias: Mapping[int, int], *, fuses: bool = True
) -> tuple[OpGroup, ...]:
    """Groups the operators of a program; the cost is computed once for each group.

    Returns first the groups of equal operators, then the groups of operators that XLA
    fuses (`CHEAP`, such as elementwise ones) over the same dims, then the groups of
    loop copies. Leaves out operators that do not run or whose results nothing needs.

    Args:
        graph: the program.
        alias: if layers repeat, map from a dim of any layer to the dim that stands for
            the dims at the same position of all equal layers. A dim that is not in the
            map stands for itself.
        fuses: whether a compiler fuses operators into kernels. Otherwise each operator
            is a kernel, and loops copy nothing.
    """
    across = transposed_reads(graph)
    times: Counter[object] = Counter()
    first: dict[object, Operator] = {}
    cheap: dict[object, list[Operator]] = defaultdict(list)
    known = awaited(graph, {n: _waits(op) for n, op in enumerate(graph.operators)})
    last: dict[object, bool] = {}
    moved = moved_bytes(graph) if fuses else unfused_bytes(graph)
    numbers: dict[object, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        if operator.unread or not operator.trips:
            continue
        key = _key(graph, operator, alias)
        operator = across.get(number, operator)
        if operator.kind in CHEAP:
            cheap[key].append(operator)
            numbers[key].append(number)
            continue
        is_last = nobody_waits(operator, known)
        key = key, operator.within if is_last else None
        first.setdefault(key, operator)
        last[key] = is_last
        times[key] += operator.trips
        numbers[key].append(number)
    shares = {key: _share(graph, moved, some) for key, some in numbers.items()}
    found = [
        OpGroup(
            operator=first[k],
            times=count,
            region=region(first[k]),
            last=last[k],
            moved=shares[k],
            members=tuple(numbers[k]),
        )
        for k, count in times.items()
    ]
    readers = _num_readers(graph)
    for key, operators in cheap.items():
        group = _merged(graph, operators, _moved(graph, operators, readers))
        fused = group.region == "update"  # its bytes are those after fusion already
        group = replace(group, members=tuple(numbers[key]))
        found.append(group if fused else replace(group, moved=shares[key]))
    return (*found, *(_copied(graph, alias) if fuses else ()))


def _share(graph: Graph, moved: Mapping[int, float], numbers: list[int]) -> float:
    """Returns the bytes that kernels move, per byte of operators' operands and results.

    This is `OpGroup.moved` of a group of these operators.

    Args:
        graph: the program.
        moved: map from the number of an operator to the bytes of its kernels in a step.
        numbers: the operators' numbers.

    Returns:
        The ratio; 0 if the operators have no bytes.
    """
    operators = [graph.operators[number] for number in numbers]
    own = sum(graph.bytes_of(operator) * operator.trips for operator in operators)
    return sum(moved.get(number, 0.0) for number in numbers) / own if own else 0.0


def _copied(graph: Graph, alias: Mapping[int, int]) -> list[OpGroup]:
    """Groups the copies that loops make of slices of stacked arrays.

    Slices with the same dims form one group. `alias` maps a dim of any layer to the dim
    that stands for all equal layers (`group_operators`).
    """
    alike: dict[object, list[tuple[Operator, int]]] = defaultdict(list)
    for operator, passes in loop_copies(graph, CHEAP):
        alike[_key(graph, operator, alias)].append((operator, passes))
    found = []
    for copies in alike.values():
        moved = sum(passes * op.trips * graph.bytes_of(op) / 2 for op, passes in copies)
        merged = _merged(graph, [operator for operator, _ in copies], moved)
        found.append(replace(merged, copies=True))
    return found


def _waits(operator: Operator) -> bool:
    """Whether the forward or backward pass stands still until an operand has arrived.

    An operand arrives when the collective that reduces or gathers it has ended. True
    for matmuls and other operators that XLA runs on their own. False for operators of
    the update, and for operators that XLA fuses (`CHEAP`, such as elementwise ones).
    False also for reductions: the gradient of a bias is a sum over sequences and then
    over positions, and nothing else in the backward pass needs these sums.
    """
    passing = (*CHEAP, "reduction")
    return operator.kind not in passing and region(operator) != "update"


def _moved(
    graph: Graph, operators: list[Operator], readers: Mapping[int, int]
) -> float:
    """Returns the bytes in a step that fusible operators over the same dims move.

    In the forward and backward pass, these are the bytes of all operands and results of
    each operator; the factor `OpGroup.moved` (on CPU `Efficiency.fuse`) later removes
    the bytes that fusion saves. In the optimizer's update, the operators are one fused
    kernel, of which only the values that enter or leave it count. Operators in a loop's
    body are a kernel of their own, which runs in every iteration.

    Args:
        graph: the program.
        operators: operators that XLA fuses (`CHEAP`, such as elementwise ones), all in
            one part of the step.
        readers: the number of readers of each value (`_num_readers`).
    """
    if region(operators[0]) != "update":
        return sum(graph.bytes_of(op) * op.trips for op in operators)
    kernels: dict[tuple[int, ...], list[Operator]] = defaultdict(list)
    for operator in operators:
        kernels[operator.within].append(operator)
    found = 0.0
    for together in kernels.values():
        made = {index for op in together for index in op.outputs}
        read = Counter(index for op in together for index in set(op.inputs))
        kept = {index for index in made if readers[index] > read[index]}
        outside = (read.keys() - made) | kept
        once = sum(graph.values[index].num_bytes for index in outside)
        found += once * together[0].trips
    return found


def _num_readers(graph: Graph) -> Counter[int]:
    """Counts the readers of each value: operators, loops, and the program's caller.

    A loop reads the arrays that it slices, the initial values of what it carries, and
    the values of its body that it carries on or stacks.
    """
    found = Counter(index for op in graph.operators for index in set(op.inputs))
    found.update(graph.outputs.values())
    for loop in graph.loops:
        found.update(outer for outer, _ in loop.sliced)
        found.update(inner for inner, _ in loop.stacked)
        for before, _, out, _ in loop.carried:
            found.update((before, out))
    return found


def _key(graph: Graph, operator: Operator, alias: Mapping[int, int]) -> object:
    values = [graph.values[i] for i in (*operator.inputs, *operator.outputs)]
    if operator.kind in CHEAP:
        dims = {alias.get(d, d) for v in values for d in v.dims}
        whole = {alias.get(d, d) for d in operator.whole}
        return region(operator), frozenset(dims), frozenset(whole)
    shapes = tuple((v.shape, v.dtype, _roots(v.dims, alias)) for v in values)
    summed, whole = _roots(operator.summed, alias), _roots(operator.whole, alias)
    summed = (summed, operator.contracted, operator.precision)
    return operator.primitive, shapes, summed, whole, operator.flops, region(operator)


def _roots(dims: tuple[int, ...], alias: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(alias.get(dim, dim) for dim in dims)


def _merged(graph: Graph, operators: list[Operator], total: float) -> OpGroup:
    """Makes one group of operators; the operator with the most bytes represents it.

    The group's cost is that of one execution of this operator, times a number
    (`OpGroup.times`): `total`, the bytes that all operators read and write in a step,
    divided by the bytes of that execution.
    """
    largest = max(operators, key=graph.bytes_of)
    own = graph.bytes_of(largest)
    flops = sum(operator.flops * operator.trips for operator in operators)
    times = total / own if own else float(sum(op.trips for op in operators))
    special = sum(operator.special * operator.trips for operator in operators)
    across = sum(operator.strided * operator.trips for operator in operators)
    turned = sum(operator.turned * operator.trips for operator in operators)
    over = {dim for operator in operators for dim in operator.turned_over}
    each = times or 1.0
    stands = replace(
        largest,
        flops=flops / each,
        special=special / each,
        strided=across / each,
        turned=turned / each,
        turned_over=tuple(sorted(over)),
    )
    return OpGroup(operator=stands, times=times, region=region(largest))
