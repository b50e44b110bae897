"""Propagates dims through operators: finds dims that are divided in the same way.

Each dim of an array has a number. Two dims share one number if some operator derives
one from the other, or matches both in its operands. So a batch dim keeps its number
through every layer, and so does the width of a residual stream. `link` applies the rule
of an equation's primitive: a function from the equation with the dims of its operands
(`Case`) to the dims of its results (`Linked`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.planner.ir.flops import (
    ATTENTION,
    KERNEL_DIMS,
    KernelDims,
    attention_dims,
    kernel_name,
)
from dtft.planner.ir.graph import Dim

Numbers = tuple[int, ...]


class Dims:
    """Disjoint sets of dims (union-find); dims of one set are divided in the same way.

    Dims are numbered in the order in which they are added. In the example, a dim of
    size 4 and a dim of size 8 share a set, so `of` returns both sizes.

    >>> dims = Dims()
    >>> a, b, c = dims.new(4), dims.new(8), dims.new(8)
    >>> dims.join(a, b)
    >>> dims.find(a) == dims.find(b), dims.find(c) == dims.find(b)
    (True, False)
    >>> dims.of(a)
    Dim(sizes=(4, 8), loop=False)
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[set[int]] = []
        self._loop: list[bool] = []

    def new(self, size: int, *, loop: bool = False) -> int:
        """Adds a dim in a set of its own; returns its number.

        Args:
            size: size of the dim.
            loop: whether a scan slices or stacks arrays along the dim, so that each
                iteration needs another part of it.
        """
        self._parent.append(len(self._parent))
        self._sizes.append({size})
        self._loop.append(loop)
        return len(self._parent) - 1

    def news(self, shape: Sequence[int]) -> Numbers:
        """Adds new dims for all dims of an array; returns their numbers."""
        return tuple(self.new(size) for size in shape)

    def find(self, number: int) -> int:
        """Returns the number of a dim's set: the lowest number of its dims."""
        parent = self._parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    def join(self, one: int, other: int) -> None:
        """Joins the sets of two dims; the lower number represents the joined set."""
        low, high = sorted((self.find(one), self.find(other)))
        if low == high:
            return
        self._parent[high] = low
        self._sizes[low] |= self._sizes[high]
        self._loop[low] |= self._loop[high]

    def of(self, number: int) -> Dim:
        """Returns the sizes of the dims in a dim's set, and whether any has `loop`."""
        root = self.find(number)
        return Dim(sizes=tuple(sorted(self._sizes[root])), loop=self._loop[root])


@dataclass(frozen=True, kw_only=True, slots=True)
class Linked:
    """What a primitive's rule finds for an equation: the dims of its results.

    It also has two sets of operand dims: those that the equation sums over (dividing
    them leaves partial sums), and those that must not be divided.
    """

    outputs: tuple[Numbers, ...]
    """Dims of each result."""
    summed: Numbers = ()
    """Dims that the equation sums over, or otherwise reduces to one element."""
    whole: Numbers = ()
    """Dims of operands that the equation needs undivided."""


class Case:
    """One equation with the dims of its operands: what the rules of primitives get.

    `dims` has all dims of the program, which rules join. `params` has the equation's
    parameters. `operands` has the numbers of each operand's dims. `shapes` and
    `results` are the shapes of operands and results.
    """

    def __init__(self, dims: Dims, eqn: Any, operands: Sequence[Numbers]) -> None:
        self.dims, self.params = dims, eqn.params
        self.operands = operands
        self.shapes = [tuple(atom.aval.shape) for atom in eqn.invars]
        self.results = [tuple(atom.aval.shape) for atom in eqn.outvars]

    def kept(self, sources: Sequence[int | None], result: int = 0) -> Numbers:
        """Returns the dims of a result of the equation.

        Args:
            sources: for each dim of the result, the dim that it is divided like, or
                None for a new dim.
            result: index of the result.
        """
        shape = self.results[result]
        return tuple(
            self.dims.new(size) if source is None else source
            for source, size in zip(sources, shape, strict=True)
        )

    def join_all(self, groups: Sequence[Sequence[int]]) -> None:
        """Joins all dims of each group, which are then divided in the same way."""
        for group in groups:
            for other in group[1:]:
                self.dims.join(group[0], other)


# Products and lookups: matmul, convolution, gather, scatter. The function of each
# primitive joins equal dims, and returns the reduced and the indivisible dims.


def contracted(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the positions of the contracted dims in both operands of an equation.

    For a `dot_general`, these are all contracted dims. For a convolution, these are the
    input channels, not the window dims. Both tuples are empty for any other primitive,
    such as `ragged_dot_general`.
    """
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        return (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)
    if eqn.primitive.name != "dot_general":
        return (), ()
    (left, right), _ = eqn.params["dimension_numbers"]
    return tuple(left), tuple(right)


def dot(case: Case) -> Linked:
    """Derives the dims of a matmul's result from those of the operands in `case`.

    The result has the batch dims, then the free dims of the left operand, then the free
    dims of the right operand. Contracted dims and batch dims of both operands are
    joined.
    """
    return _product(case, case.params["dimension_numbers"])


def _product(case: Case, numbers: Any, groups: Sequence[int] = ()) -> Linked:
    """Derives the dims of the result of a plain or ragged matmul from its operands'.

    Args:
        case: the equation.
        numbers: its contracted and batch dims, in the form of the `dimension_numbers`
            of `dot_general`.
        groups: positions of the dims of the right operand that number the groups of a
            ragged matmul, and that the result lacks.
    """
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left, right = case.operands[:2]
    for i, j in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        case.dims.join(left[i], right[j])
    gone = (*right_sum, *right_batch, *groups)
    free_left = (n for i, n in enumerate(left) if i not in (*left_sum, *left_batch))
    free_right = (n for i, n in enumerate(right) if i not in gone)
    outputs = (*(left[i] for i in left_batch), *free_left, *free_right)
    return Linked(outputs=(outputs,), summed=tuple(left[i] for i in left_sum))


def ragged_dot(case: Case) -> Linked:
    """Derives the dims of a ragged matmul's result from those of its operands.

    A ragged matmul multiplies each group of rows by its own matrix. Its dims are those
    of a matmul. But the ragged dim (the rows of all groups) and the dim that numbers
    the groups must not be divided. If the ragged dim is contracted, as in the gradient
    of the matrices, the dim that numbers the groups is the result's first dim. If the
    operand of group sizes has several dims, no operand may be divided.
    """
    numbers = case.params["ragged_dot_dimension_numbers"]
    left, right, sizes = case.operands[:3]
    if len(sizes) != 1:
        return Linked(
            outputs=(case.dims.news(case.results[0]),), whole=(*left, *right, *sizes)
        )
    case.join_all([(sizes[0], right[i]) for i in numbers.rhs_group_dimensions])
    dot_numbers = numbers.dot_dimension_numbers
    found = _product(case, dot_numbers, numbers.rhs_group_dimensions)
    (ragged,) = numbers.lhs_ragged_dimensions
    (made,) = found.outputs
    if ragged in dot_numbers[0][0]:
        made = (sizes[0], *made)
    return Linked(outputs=(made,), summed=found.summed, whole=(left[ragged], sizes[0]))


def convolution(case: Case) -> Linked:
    """Derives the dims of a convolution's result from those of the operands in `case`.

    Examples and output channels may be divided, as in the operands. Input channels may
    be divided too; the results are then partial sums. Window dims must not be divided,
    because a window reads elements of the next device (halo). A convolution with groups
    of examples (`batch_group_count`) must not have its examples or output channels
    divided. One with groups of channels (`feature_group_count`) must not have its
    channels divided, unless it is depthwise.
    """
    numbers = case.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left, right = case.operands[:2]
    sources: list[int | None] = [None] * len(case.results[0])
    summed: list[int] = []
    whole = [left[i] for i in lhs[2:]] + [right[i] for i in rhs[2:]]
    channels, examples = left[lhs[1]], left[lhs[0]]
    ins, outs = right[rhs[1]], right[rhs[0]]
    if case.params["batch_group_count"] == 1:
        sources[out[0]] = examples
    else:
        whole += [examples, outs]
    if case.params["feature_group_count"] == 1:
        case.dims.join(channels, ins)
        summed.append(channels)
        if case.params["batch_group_count"] == 1:
            sources[out[1]] = outs
    elif case.params["feature_group_count"] == case.shapes[0][lhs[1]] and (
        case.shapes[1][rhs[0]] == case.shapes[0][lhs[1]]
    ):
        case.dims.join(channels, outs)  # depthwise: each channel by itself
        sources[out[1]] = channels
    else:
        whole += [channels, outs]
    outputs = case.kept(sources)
    return Linked(outputs=(outputs,), summed=tuple(summed), whole=tuple(whole))


def gather(case: Case) -> Linked:
    """Derives the dims of a gather's result from those of the operands in `case`.

    Each device looks up the elements that it has.

    A dim of the operand that is taken whole is divided like the dim of the result that
    it becomes. A dim along which one element is taken may be divided; the results of
    the devices are then summed. Dims along which several but not all elements are taken
    must not be divided.
    """
    numbers, sizes = case.params["dimension_numbers"], case.params["slice_sizes"]
    operand, indices = case.operands[:2]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(operand)) if i not in gone]
    sources: list[int | None] = [None] * len(case.results[0])
    whole: list[int] = []
    for place, i in zip(numbers.offset_dims, window, strict=True):
        if sizes[i] == case.shapes[0][i]:
            sources[place] = operand[i]
        else:
            whole.append(operand[i])
    free = (p for p in range(len(sources)) if p not in numbers.offset_dims)
    for place, number in zip(free, indices[:-1], strict=False):
        sources[place] = number
    for i, j in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        case.dims.join(operand[i], indices[j])
    summed = tuple(operand[i] for i in numbers.collapsed_slice_dims)
    return Linked(outputs=(case.kept(sources),), summed=summed, whole=tuple(whole))


def scatter(case: Case, adds: bool) -> Linked:
    """Derives the dims of a scatter's result, which are those of its operand in `case`.

    Each device updates its part of the operand. If the scatter combines updates with
    the operand (`adds`; scatter-add and others), the dims that number the updates may
    be divided too. If the updates replace elements, these dims must not be divided.
    """
    numbers = case.params["dimension_numbers"]
    operand, indices, updates = case.operands[:3]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(operand)) if i not in gone]
    whole: list[int] = []
    for place, i in zip(numbers.update_window_dims, window, strict=True):
        if case.shapes[2][place] == case.shapes[0][i]:
            case.dims.join(operand[i], updates[place])
        else:
            whole += [operand[i], updates[place]]
    free = [p for p in range(len(updates)) if p not in numbers.update_window_dims]
    case.join_all(
        [(indices[i], updates[p]) for i, p in enumerate(free) if i < len(indices) - 1]
    )
    parallel = set()
    for i, j in zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    ):
        case.dims.join(operand[i], indices[j])
        parallel.add(case.dims.find(operand[i]))
    looped = [updates[p] for p in free if case.dims.find(updates[p]) not in parallel]
    summed = tuple(looped) if adds else ()
    whole += [] if adds else looped
    return Linked(outputs=(operand,), summed=summed, whole=tuple(whole))


def attention(case: Case) -> Linked:
    """Derives the dims of the results of cuDNN's attention, whose operands `case` has.

    Examples and heads may be divided; positions and features must not be. If keys and
    values have fewer heads than queries, a device needs whole groups of query heads.

    In the forward pass, the operands are queries, keys, values, bias, lengths and
    offsets of sequences, and page tables. The results are the output and the logarithms
    of the sums of each row. The backward pass has three more operands: the logarithms
    and the output of the forward pass, and the output's gradient. The results of the
    backward pass are the gradients of queries, keys, values and, if there is one, bias.
    """
    along, heads = attention_dims(case.params)
    query, key, value, bias = case.operands[:4]
    case.join_all([(one[0], query[0]) for one in (key, value)])
    case.join_all([(one[heads], query[heads]) for one in (key, value)])
    like = list(query)
    like[-1] = value[-1]
    rows = query[0], query[heads], query[along]
    whole = [*(one[i] for one in (query, key, value) for i in (along, -1))]
    if len(bias) == len(query):  # examples, heads, positions of queries and of keys
        whole += bias[2:]
        for place, number in ((0, query[0]), (1, query[heads])):
            if case.shapes[3][place] > 1:
                case.dims.join(bias[place], number)
    for numbers, shape in zip(case.operands[4:10], case.shapes[4:10], strict=True):
        if shape[:1] == case.shapes[0][:1]:
            case.dims.join(numbers[0], query[0])
    if len(case.operands) == 10:  # forward
        outputs = [tuple(like)]
        for shape in case.results[1:]:
            sources: list[int | None] = list(rows)
            if shape[0] != case.shapes[0][0]:  # a row for each of several sequences
                sources[0] = None
            outputs.append(case.kept(sources, 1))
        return Linked(outputs=tuple(outputs), whole=tuple(whole))
    sums, output, gradient = case.operands[10:]
    if case.shapes[10][0] == case.shapes[0][0]:
        case.join_all(list(zip(sums, rows, strict=True)))
    for made in (output, gradient):
        case.join_all(list(zip(made, like, strict=True)))
    outputs = [query, key, value, bias][: len(case.results)]
    gone = (
        place for place in (0, 1) if bias and case.shapes[3][place : place + 1] == (1,)
    )
    summed = [rows[place] for place in gone] if len(outputs) == 4 else []
    return Linked(outputs=tuple(outputs), summed=tuple(summed), whole=tuple(whole))


# `link`, and the rules of all other primitives.


def link(dims: Dims, eqn: Any, operand_dims: Sequence[Numbers]) -> Linked:
    """Derives the dims of an equation's results from the dims of its operands.

    Uses the rule of the equation's primitive. A registered kernel may name its dims by
    letters, as in einsum (`_named`). In all other equations, dims at the same position
    of operands and results are divided in the same way (`_alike`).

    Args:
        dims: all dims of the program; joined in place.
        eqn: a JAX equation that calls no other program.
        operand_dims: the dims of each operand; () for scalars.
    """
    case = Case(dims, eqn, operand_dims)
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(case)
    named = KERNEL_DIMS.get(kernel_name(eqn.primitive.name, eqn.params))
    return _alike(case) if named is None else _named(case, named)


def _named(case: Case, named: KernelDims) -> Linked:
    """Derives the dims of the results of a kernel registered with letters for its dims.

    Dims to which `register_kernel` gave the same letter are joined.

    Args:
        case: the call of the kernel.
        named: letters of the dims of operands and results.

    Raises:
        ValueError: the number of arrays of the call, or of dims of an array, differs
            from that of `named`.
    """
    texts = *named.operands, *named.results
    shapes = *case.shapes, *case.results
    if [len(text) for text in texts] != [len(shape) for shape in shapes]:
        letters = f"{','.join(named.operands)}->{','.join(named.results)}"
        raise ValueError(
            f"dims={letters!r} of a registered kernel, but the program calls it with "
            f"arrays of the shapes {', '.join(map(str, shapes))}. Allowed: a letter "
            "for each dim. Change dims in `dtft.planner.register_kernel`."
        )
    known: dict[str, int] = {}
    for letters, operand in zip(named.operands, case.operands, strict=True):
        for letter, number in zip(letters, operand, strict=True):
            if letter in known:
                case.dims.join(known[letter], number)
            known.setdefault(letter, number)
    outputs = tuple(
        case.kept([known.get(letter) for letter in letters], result)
        for result, letters in enumerate(named.results)
    )
    whole = tuple(known[letter] for letter in sorted(named.whole) if letter in known)
    return Linked(outputs=outputs, whole=whole)


def _alike(case: Case) -> Linked:
    """Joins each dim of a result with the dims at its position in operands (`case`).

    This is the rule of elementwise operators, and the default for unknown primitives.
    An operand takes part if its shape is the result's, except for dims of size 1, which
    are broadcast and not joined. An operand that fits no result must not be divided
    over devices: the result lists its dims as undivided (`Linked.whole`).
    """
    outputs: list[Numbers] = []
    fitting: set[int] = set()
    for result, shape in enumerate(case.results):
        sources: list[int | None] = [None] * len(shape)
        for index, operand in enumerate(case.operands):
            if not operand or not _repeats(case.shapes[index], shape):
                continue
            fitting.add(index)
            for place, number in enumerate(operand):
                known = sources[place]
                if case.shapes[index][place] != shape[place]:
                    continue
                if known is None:
                    sources[place] = number
                else:
                    case.dims.join(known, number)
        outputs.append(case.kept(sources, result))
    odd = set(range(len(case.operands))) - fitting
    whole = tuple(number for index in sorted(odd) for number in case.operands[index])
    return Linked(outputs=tuple(outputs), whole=whole)


def _repeats(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether a shape equals the shape of a result after a broadcast of size-1 dims."""
    if len(shape) != len(result):
        return False
    return all(size in (1, after) for size, after in zip(shape, result, strict=True))


def _fresh(case: Case) -> Linked:
    """Returns new dims for the results of `case`, which share none with the operands.

    This is the rule of iota and random numbers, for example.
    """
    outputs = tuple(case.dims.news(shape) for shape in case.results)
    return Linked(outputs=outputs)


def _broadcast(case: Case) -> Linked:
    sources: list[int | None] = [None] * len(case.results[0])
    places = zip(case.params["broadcast_dimensions"], case.operands[0], strict=True)
    for (place, number), size in zip(places, case.shapes[0], strict=True):
        if case.results[0][place] == size:
            sources[place] = number
    return Linked(outputs=(case.kept(sources),))


def _transpose(case: Case) -> Linked:
    order = case.params["permutation"]
    return Linked(outputs=(tuple(case.operands[0][place] for place in order),))


def _squeeze(case: Case) -> Linked:
    gone = set(case.params["dimensions"])
    kept = (n for i, n in enumerate(case.operands[0]) if i not in gone)
    return Linked(outputs=(tuple(kept),))


def factor_groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Groups the dims of a reshape's operand with the dims of the result they become.

    Returns for each group the positions of its dims in the operand, and the positions
    of its dims in the result. Dims of size 1 at the end may be in no group.

    Args:
        before: the shape of the operand.
        after: the shape of the result.

    In the example, dims of 2 and 3 are merged into 6, and a dim of 4 is split.

    >>> factor_groups((2, 3, 4), (6, 2, 2))
    [([0, 1], [0]), ([2], [1, 2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        size, other = before[i], after[j]
        i, j = i + 1, j + 1
        while size != other:
            if size < other and i < len(before):
                size, i = size * before[i], i + 1
                left.append(i - 1)
            elif other < size and j < len(after):
                other, j = other * after[j], j + 1
                right.append(j - 1)
            else:
                break
        groups.append((left, right))
    return groups


def _reshape(case: Case) -> Linked:
    """Derives the dims of a reshape's result from those of the operand in `case`.

    Each group of operand dims becomes a group of result dims (`factor_groups`). The
    first dims of size > 1 of both groups are divided in the same way. The other dims of
    size > 1 of the operand's group must not be divided. The result gets new dims if the
    array has no elements, or if the reshape permutes dims (`dimensions`).
    """
    before, after = case.shapes[0], case.results[0]
    if math.prod(before) == 0 or case.params.get("dimensions") is not None:
        return _fresh(case)
    operand = case.operands[0]
    sources: list[int | None] = [None] * len(after)
    whole: list[int] = []
    for left, right in factor_groups(before, after):
        lefts = [i for i in left if before[i] > 1]
        rights = [j for j in right if after[j] > 1]
        if lefts and rights:
            sources[rights[0]] = operand[lefts[0]]
            whole += [operand[i] for i in lefts[1:]]
    outputs = case.kept(sources)
    for place, source in enumerate(sources):
        if source is not None:  # sizes may differ: both must be divisible
            case.dims.join(source, case.dims.new(after[place]))
    return Linked(outputs=(outputs,), whole=tuple(whole))


def _reduce(case: Case) -> Linked:
    gone = set(case.params.get("axes", case.params.get("dimensions", ())))
    operand = case.operands[0]
    for other in case.operands[1:]:
        if len(other) == len(operand):
            case.join_all(list(zip(operand, other, strict=True)))
    kept = tuple(number for i, number in enumerate(operand) if i not in gone)
    summed = tuple(operand[i] for i in sorted(gone))
    return Linked(outputs=(kept,) * len(case.results), summed=summed)


def _along(case: Case, place: int) -> Linked:
    """Derives the dims of results of operators along one dim, such as sort or cumsum.

    Results have the dims of the operands in `case`. The operand's dim at position
    `place`, along which the operator works, must not be divided.
    """
    full = [i for i, shape in enumerate(case.shapes) if shape == case.results[0]]
    case.join_all(list(zip(*(case.operands[i] for i in full), strict=True)))
    operand = case.operands[full[0]]
    return Linked(outputs=(operand,) * len(case.results), whole=(operand[place],))


def _cumulative(case: Case) -> Linked:
    return _along(case, case.params["axis"])


def _sort(case: Case) -> Linked:
    return _along(case, case.params["dimension"])


def _resized(case: Case) -> Linked:
    """Derives the dims of the results of slices and pads from the operand in `case`.

    Dims of unchanged size are kept. Dims of the operand whose size changes must not be
    divided.
    """
    operand = case.operands[0]
    outputs: list[Numbers] = []
    whole: set[int] = set()
    for result, shape in enumerate(case.results):
        sources: list[int | None] = []
        for number, size, after in zip(operand, case.shapes[0], shape, strict=True):
            sources.append(number if size == after else None)
            if size != after:
                whole.add(number)
        outputs.append(case.kept(sources, result))
    return Linked(outputs=tuple(outputs), whole=tuple(sorted(whole)))


def _windowed(case: Case) -> Linked:
    """Derives the dims of the results of windowed operators, such as max pooling.

    Dims of the operand in `case` with a window of one element are kept. Dims with
    larger windows must not be divided.
    """
    sizes = case.params["window_dimensions"]
    outputs: list[Numbers] = []
    whole: set[int] = set()
    arrays = [operand for operand in case.operands if len(operand) == len(sizes)]
    for numbers, size in zip(zip(*arrays, strict=True), sizes, strict=True):
        if size > 1:
            whole |= set(numbers)
        else:
            case.join_all([numbers])
    for result in range(len(case.results)):
        pairs = zip(case.operands[0], sizes, strict=True)
        sources = [number if size == 1 else None for number, size in pairs]
        outputs.append(case.kept(sources, result))
    return Linked(outputs=tuple(outputs), whole=tuple(sorted(whole)))


def _each(case: Case) -> Linked:
    """Gives each result the dims of the operand at the same position in `case`.

    This is the rule of operators whose results are their operands in the same order.
    """
    return Linked(outputs=tuple(case.operands))


def _update_slice(case: Case) -> Linked:
    operand, update = case.operands[:2]
    whole: list[int] = []
    for number, other, size, after in zip(
        operand, update, case.shapes[0], case.shapes[1], strict=True
    ):
        if size == after:
            case.dims.join(number, other)
        else:
            whole += [number, other]
    return Linked(outputs=(operand,), whole=tuple(whole))


def _concatenate(case: Case) -> Linked:
    place = case.params["dimension"]
    groups = list(zip(*case.operands, strict=True))
    case.join_all([group for i, group in enumerate(groups) if i != place])
    sources: list[int | None] = list(case.operands[0])
    sources[place] = None
    return Linked(outputs=(case.kept(sources),), whole=tuple(groups[place]))


def _reverse(case: Case) -> Linked:
    operand = case.operands[0]
    whole = tuple(operand[place] for place in case.params["dimensions"])
    return Linked(outputs=(operand,), whole=whole)


def _last(count: int) -> Callable[[Case], Linked]:
    """Makes the rule of operators that work on the last `count` dims, such as Cholesky.

    The rule is a function that derives the dims of an equation's results. The last
    `count` dims of operands must not be divided. Other dims of unchanged size are kept.
    """

    def rule(case: Case) -> Linked:
        operand = case.operands[0]
        before = len(operand) - count
        outputs = []
        for result, shape in enumerate(case.results):
            sources: list[int | None] = [None] * len(shape)
            for place in range(min(before, len(shape))):
                if shape[place] == case.shapes[0][place]:
                    sources[place] = operand[place]
            outputs.append(case.kept(sources, result))
        for other, shape in zip(case.operands[1:], case.shapes[1:], strict=True):
            if shape[:before] == case.shapes[0][:before]:
                case.join_all(list(zip(operand[:before], other[:before], strict=True)))
        whole = (n for numbers in case.operands for n in numbers[before:])
        return Linked(outputs=tuple(outputs), whole=tuple(whole))

    return rule


def _fft(case: Case) -> Linked:
    return _last(len(case.params["fft_lengths"]))(case)


_RULES: dict[str, Callable[[Case], Linked]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    **dict.fromkeys(
        (
            "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
            "reduce_or", "reduce_xor", "argmax", "argmin", "reduce",
        ),
        _reduce,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative
    ),
    "sort": _sort,
    **dict.fromkeys(
        (
            "reduce_window_sum", "reduce_window_max", "reduce_window_min",
            "reduce_window", "select_and_scatter_add", "select_and_gather_add",
        ),
        _windowed,
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "split", "top_k"), _resized),
    "optimization_barrier": _each,
    "dynamic_update_slice": _update_slice,
    "concatenate": _concatenate,
    "rev": _reverse,
    "dot_general": dot,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": convolution,
    **dict.fromkeys(ATTENTION, attention),
    "gather": gather,
    "scatter": lambda case: scatter(case, adds=False),
    **dict.fromkeys(
        ("scatter-add", "scatter_add", "scatter-sub", "scatter-mul", "scatter-min",
         "scatter-max"),
        lambda case: scatter(case, adds=True),
    ),
    **dict.fromkeys(
        ("iota", "random_bits", "random_seed", "random_split", "random_fold_in",
         "random_wrap", "random_unwrap", "threefry2x32", "rng_bit_generator"),
        _fresh,
    ),
    **dict.fromkeys(("cholesky", "qr", "eigh", "svd", "lu", "triangular_solve"),
                    _last(2)),
    "fft": _fft,
}  # fmt: skip
