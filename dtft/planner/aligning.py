"""Which dims of a loss's program are which of the step's: the same divided alike.

The forward pass of a traced step has the loss's operators in their order, among those
that derivatives add. Decides which of them are twins; pure, must not know divisions,
meshes or costs.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher

from dtft.planner.graph import Graph, Operator
from dtft.planner.groups import CHEAP, region


def same_dims(program: Graph, graph: Graph) -> dict[int, int]:
    """Dim of a loss's program to the dim of the step's that it is.

    Args:
        program: of the loss alone.
        graph: of a step that differentiates this loss, with arguments of the same
            paths. Dims that only its operators have are found by those of the same
            primitive and shapes in the same order; cheap ones are left out, which
            derivatives have rules of their own for.
    """
    found: dict[int, int] = {}
    for path, index in program.inputs.items():
        _join(found, program, index, graph, graph.inputs[path])
    ours = _heavy(program.operators)
    theirs = _heavy(op for op in graph.operators if region(op) == "forward")
    keys = [_key(program, op) for op in ours], [_key(graph, op) for op in theirs]
    # Long programs repeat the same few operators: none of them is junk.
    for first, second, count in SequenceMatcher(
        None, *keys, autojunk=False
    ).get_matching_blocks():
        for one, other in zip(
            ours[first : first + count], theirs[second : second + count], strict=True
        ):
            for index, twin in zip(_values(one), _values(other), strict=True):
                _join(found, program, index, graph, twin)
    return found


def _heavy(operators: Iterable[Operator]) -> list[Operator]:
    return [op for op in operators if op.kind not in CHEAP]


def _values(operator: Operator) -> tuple[int, ...]:
    return *operator.inputs, *operator.outputs


def _key(graph: Graph, operator: Operator) -> object:
    arrays = tuple(
        (graph.values[index].shape, graph.values[index].dtype)
        for index in _values(operator)
    )
    return operator.primitive, len(operator.within), arrays


def _join(
    found: dict[int, int], program: Graph, index: int, graph: Graph, other: int
) -> None:
    pairs = zip(program.values[index].dims, graph.values[other].dims, strict=True)
    for dim, twin in pairs:
        found.setdefault(dim, twin)
