"""Which dims index experts, and in which arrays they are divided before examples are.

Found from products alone: a dim of experts is in both operands and the result of a
product, and one of the three is (or is shaped as) a parameter, so that each of its
entries has weights of its own. Layers of experts, ensembles and other stacks of small
models all have such a dim. Pure; must not know meshes or costs.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from dtft.planner.graph import Graph, Value

Arrays = Mapping[frozenset[int], int]
"""Dims of an array, as a set, to the one among them that is of experts."""


def arrays_of_experts(
    graph: Graph,
    parameters: Sequence[int],
    root: Callable[[int], int],
    examples: Container[int] = (),
) -> Arrays:
    """Arrays that experts work on and make, each with its dim of experts.

    What goes to experts and comes from them. Where one axis of a mesh divides examples
    and experts, it divides these by expert and all others by example; so that examples
    are exchanged (all-to-all) on their way to the experts and back, and each device
    has the weights of its own experts only.

    Args:
        graph: a traced step or loss.
        parameters: values that are parameters.
        root: dim to the dim that stands for it in equal layers.
        examples: dims that are known to be of something else.

    Source: GShard, arXiv 2006.16668, section 3.2; what XLA makes of it was read from
    compiled programs (`tests/train/test_expert_axis.py`).
    """
    found: dict[frozenset[int], int] = {}
    for arrays, weights in _products(graph, parameters, root):
        shared = frozenset.intersection(*arrays)
        for dim in sorted(shared):
            if not graph.dims[dim].loop and dim not in examples:
                found |= {dims: dim for dims in arrays if dims != weights}
    return found


def _products(
    graph: Graph, parameters: Sequence[int], root: Callable[[int], int]
) -> Iterator[tuple[tuple[frozenset[int], ...], frozenset[int]]]:
    """Operands and result of each product with weights, as sets, and which are those.

    Of the gradient of weights the result is shaped as the weights are.
    """

    def dims_of(value: Value) -> frozenset[int]:
        kept = (dim for dim in value.dims if not graph.dims[dim].loop)
        return frozenset(map(root, kept))

    known = {dims_of(graph.values[index]) for index in parameters}
    for operator in graph.operators:
        if operator.kind != "matmul" or len(operator.inputs) != 2:
            continue
        indices = (*operator.inputs, operator.outputs[0])
        arrays = tuple(dims_of(graph.values[index]) for index in indices)
        weights = [dims for dims in arrays if dims in known]
        if len(weights) == 1:
            yield arrays, weights[0]
