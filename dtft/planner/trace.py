"""A user's step or loss as a `Graph`: traced by JAX, followed, and its dims made final.

Decides the paths of arguments and results. Nothing is computed and no array is made:
arguments may be `jax.ShapeDtypeStruct`s of any size. Must not know devices, meshes or
costs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dtft.planner.dims import Dims
from dtft.planner.drafts import Drafts
from dtft.planner.flops import SPECIAL
from dtft.planner.graph import Dim, Graph, Loop, Operator, Value
from dtft.planner.uncollected import uncollected
from dtft.planner.walk import Frame, Walk


def trace(fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> Graph:
    """The operators, values and dims of a function of arrays.

    Args:
        fn: any function that JAX can trace, jitted or not.
        *args: trees of arrays or of `jax.ShapeDtypeStruct`. The path of a leaf begins
            with the number of its argument, such as `0/params/up/kernel`.
        **keywords: the same, passed by name; paths begin with the name.

    Returns:
        The graph of one call. Its operators have the numbers of `jaxprs.operators`.

    Raises:
        ValueError: two leaves have the same path.

    >>> x, w = jax.ShapeDtypeStruct((4, 8), "f4"), jax.ShapeDtypeStruct((8, 2), "f4")
    >>> graph = trace(lambda x, w: jax.numpy.tanh(x @ w), x, w=w)
    >>> [(op.primitive, op.flops) for op in graph.operators]
    [('dot_general', 128), ('tanh', 8)]
    >>> graph.inputs, [graph.values[0].dims, graph.values[1].dims]
    ({'0': 0, 'w': 1}, [(0, 1), (1, 2)])
    """
    with uncollected():
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*args, **keywords)
        walk = Walk()
        ins = [walk.found.value(var.aval) for var in closed.jaxpr.invars]
        outs = walk.run(closed.jaxpr, ins, Frame())
        ends = [walk.found.held(known) for known in outs]
        inputs = dict(zip(_paths(args) + _paths(keywords), ins, strict=True))
        outputs = dict(zip(_paths(result), ends, strict=True))
        return _graph(walk.found, inputs, outputs)


def _paths(tree: Any) -> list[str]:
    """Keys of each leaf joined with "/", in tree order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves
    ]
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise ValueError(
            f"tree has two leaves at path {twice[0]!r}: keys that differ only by type "
            "or contain '/' are not allowed. Rename one of them."
        )
    return paths


def _graph(found: Drafts, inputs: dict[str, int], outputs: dict[str, int]) -> Graph:
    numbers = _Numbers(found.dims)
    values = tuple(
        Value(shape=draft.shape, dtype=draft.dtype, dims=numbers.of(draft.dims))
        for draft in found.values
    )
    operators = tuple(
        Operator(
            primitive=step.primitive,
            kind=step.kind,
            inputs=step.inputs,
            outputs=step.outputs,
            flops=step.flops,
            special=step.flops if step.primitive in SPECIAL else 0.0,
            trips=step.trips,
            summed=numbers.of(step.summed),
            contracted=step.contracted,
            whole=numbers.of(step.whole),
            again=step.again,
            within=step.within,
            name=step.name,
        )
        for step in found.steps
    )
    unknown = Counter(found.endless)
    for op in operators:
        if op.kind == "opaque":
            arrays = (values[index] for index in (*op.inputs, *op.outputs))
            unknown[op.primitive] += op.trips * sum(a.num_bytes for a in arrays)
    return Graph(
        values=values,
        operators=operators,
        dims=numbers.dims(),
        loops=tuple(loop for loop in found.loops if isinstance(loop, Loop)),
        inputs=inputs,
        outputs=outputs,
        unknown=dict(unknown),
    )


class _Numbers:
    """Final numbers of dims, in the order in which they first occur."""

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self._final: dict[int, int] = {}
        self._known: dict[Sequence[int], tuple[int, ...]] = {}

    def of(self, drafts: Sequence[int]) -> tuple[int, ...]:
        found = self._known.get(drafts)
        if found is None:
            find, final = self._dims.find, self._final
            found = tuple(final.setdefault(find(n), len(final)) for n in drafts)
            self._known[drafts] = found
        return found

    def dims(self) -> tuple[Dim, ...]:
        return tuple(self._dims.of(root) for root in self._final)
