"""How dims go through products and lookups: matmuls, convolutions, gather, scatter.

One function per primitive; each decides which dims are the same, summed, or needed
whole. Pure; must not know loops, meshes or costs.
"""

from typing import Any

from dtft.planner.dims import Case, Linked


def contracted(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of the dims that a product sums over, in each operand; else empty.

    Of a convolution the channels in; the places of its kernel are not counted.
    """
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        return (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)
    if eqn.primitive.name != "dot_general":
        return (), ()
    (left, right), _ = eqn.params["dimension_numbers"]
    return tuple(left), tuple(right)


def dot(case: Case) -> Linked:
    """Batch dims, then those of the left operand, then those of the right."""
    (left_sum, right_sum), (left_batch, right_batch) = case.params["dimension_numbers"]
    left, right = case.operands[:2]
    for i, j in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        case.dims.join(left[i], right[j])
    free_left = (n for i, n in enumerate(left) if i not in (*left_sum, *left_batch))
    free_right = (n for i, n in enumerate(right) if i not in (*right_sum, *right_batch))
    outputs = (*(left[i] for i in left_batch), *free_left, *free_right)
    return Linked(outputs=(outputs,), summed=tuple(left[i] for i in left_sum))


def ragged_dot(case: Case) -> Linked:
    """Rows of `left` in groups, each with its own matrix; the common layout only."""
    left, right, groups = case.operands[:3]
    if len(left) != 2 or len(right) != 3 or len(case.results[0]) != 2:
        return Linked(
            outputs=(case.dims.news(case.results[0]),), whole=(*left, *right, *groups)
        )
    case.join_all([(left[1], right[1]), (right[0], groups[0])])
    return Linked(
        outputs=((left[0], right[2]),), summed=(left[1],), whole=(left[0], right[0])
    )


def convolution(case: Case) -> Linked:
    """Examples and channels go through; a window needs its neighbours (halo)."""
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
    """Indexed dims of which one element is taken are looked up where they are.

    Divided over devices each looks up what it has, and the results are summed.
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
    """Each device updates what it has; updates that add up may be divided, too."""
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
