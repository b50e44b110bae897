"""The workload of a plan: a traced step, and what its arrays and dims stand for.

`of_step` and `of_loss` trace the user's functions, without executing them, and make a
`Workload`. A workload records which leaves are parameters, optimizer state and batch,
which dims index examples, positions and experts, and whether the forward pass, the
backward pass or both read an argument.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import optax
from jax.extend.core import jaxpr_as_fun

from dtft.planner.gc_pause import gc_paused
from dtft.planner.ir import (
    POLICIES,
    PRODUCTS,
    Graph,
    Operator,
    OpGroup,
    ReadPoint,
    Value,
    find_read_order,
    find_repeats,
    group_operators,
    region,
    rematerialized,
    same_dims,
    trace,
)
from dtft.planner.software import XLA, Software
from dtft.planner.spmd import ShardingAssignment
from dtft.planner.types import Remat

# Expert dims are found from matmuls alone. An expert dim is a batch dim of a matmul of
# which one operand or the result is a parameter or has the dims of a parameter: each
# index of the dim has weights of its own. Layers of experts, ensembles and other stacks
# of small models have such a dim. A contracted dim may have the same number as a dim of
# the result (square weights between residual sums): such a dim is no expert dim.


Arrays = Mapping[frozenset[int], int]
"""Map from the set of dims of an array to the dim that mesh axes divide first, such as
the expert dim. Dims are numbers in `Graph.dims`."""


def arrays_of_experts(
    graph: Graph,
    parameters: Sequence[int],
    root: Callable[[int], int],
    examples: Container[int] = (),
) -> Arrays:
    """Finds the inputs and outputs of expert layers, each with its expert dim.

    An expert dim is a batch dim of a matmul whose weights have the dim, too: each index
    of the dim (each expert) has weights of its own. Returns a map from the set of dims
    of each input and output of such matmuls to the expert dim; the weights are left
    out.

    The map is needed if one mesh axis divides both examples and experts. The axis then
    divides the arrays of the map by expert, and all other activations by example.
    Examples are exchanged (all-to-all) before and after the experts, and each device
    has the weights of its own experts only.

    Args:
        graph: a traced step or loss.
        parameters: numbers of the values that are parameters.
        root: function from a dim to its representative; the dims at the same position
            of equal layers have one representative.
        examples: dims that are not expert dims, such as the dims of examples.

    Source: GShard, arXiv 2006.16668, section 3.2. XLA's partitioning was read from
    compiled programs (`tests/compiled/test_expert_axis.py`).
    """
    found: dict[frozenset[int], int] = {}
    for arrays, weights, shared in _products(graph, parameters, root):
        for dim in sorted(shared):
            if dim not in examples:
                found |= {dims: dim for dims in arrays if dims != weights}
    return found


def _products(
    graph: Graph, parameters: Sequence[int], root: Callable[[int], int]
) -> Iterator[tuple[tuple[frozenset[int], ...], frozenset[int], frozenset[int]]]:
    """Finds the matmuls in which exactly one array has the dims of a parameter.

    This array is an operand (the weights), or the result of a matmul that computes the
    gradient of weights. Dims that a loop iterates over are left out.

    Args:
        graph: a traced step or loss.
        parameters: numbers of the values that are parameters.
        root: function from a dim to its representative; the dims at the same position
            of equal layers have one representative.

    Yields:
        The sets of dims of both operands and the result, the set of dims of the array
        that has the dims of a parameter, and the batch dims of the matmul.
    """

    def kept(dims: Iterable[int]) -> frozenset[int]:
        return frozenset(root(dim) for dim in dims if not graph.dims[dim].loop)

    def dims_of(value: Value) -> frozenset[int]:
        return kept(value.dims)

    known = {dims_of(graph.values[index]) for index in parameters}
    for operator in graph.operators:
        if operator.primitive != "dot_general" or len(operator.inputs) != 2:
            continue
        indices = (*operator.inputs, operator.outputs[0])
        arrays = tuple(dims_of(graph.values[index]) for index in indices)
        weights = [dims for dims in arrays if dims in known]
        if len(weights) == 1:
            yield arrays, weights[0], kept(_batch_dims(graph, operator))


def _batch_dims(graph: Graph, operator: Operator) -> tuple[int, ...]:
    """Returns the batch dims of a `dot_general`: the first dims of its result."""
    left, right = (len(graph.values[index].dims) for index in operator.inputs)
    made = graph.values[operator.outputs[0]].dims
    return made[: left + right - 2 * len(operator.contracted[0]) - len(made)]


def sources(graph: Graph) -> dict[int, int]:
    """Finds the values that are an argument, or a converted or sliced argument.

    Conversions are casts, transposes and other operators of kind `layout`. Slices and
    carried values inside of a loop are followed back to the argument that the loop
    slices or starts from.

    Returns:
        Map from the number of a value to the number of the argument's value.
    """
    source = {index: index for index in graph.inputs.values()}
    outside = {inner: outer for loop in graph.loops for outer, inner in loop.sliced}
    outside |= {inside: a for loop in graph.loops for a, inside, _, _ in loop.carried}
    stacked = {inner: outer for loop in graph.loops for inner, outer in loop.stacked}
    for operator in graph.operators:
        for index in operator.inputs:
            outer = index
            while outer in outside:
                outer = outside[outer]
            if outer in source:
                source[index] = source[outer]
                if operator.kind == "layout":
                    made = {v for o in operator.outputs for v in (o, stacked.get(o, o))}
                    source |= dict.fromkeys(made, source[outer])
    return source


_OF_PARTS = ("pad", "concatenate")
"""Operators that make an array from smaller ones, such as the gradient of a slice."""


def gradients(question: "Workload") -> dict[int, str]:
    """Finds the values that are gradients of parameters, or summands of a gradient.

    The search goes back from each updated parameter, through the update and through
    element-wise and `layout` operators (such as reshapes and casts) of the backward
    pass, to the results of other operators of the backward pass. The search follows
    operands with as many elements as the result; of a pad or concatenation it follows
    all operands.

    Args:
        question: the traced step.

    Returns:
        Map from the number of a value of the backward pass to its parameter's path.
    """
    graph = question.graph
    makers = {index: made for made in graph.operators for index in made.outputs}
    inner = {outer: inside for loop in graph.loops for inside, outer in loop.stacked}
    inner |= {after: out for loop in graph.loops for _, _, out, after in loop.carried}
    found: dict[int, str] = {}
    for path, role in question.roles.items():
        if role != "parameter" or path not in graph.outputs:
            continue
        waiting, seen = [graph.outputs[path]], set[int]()
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            if index in inner:
                waiting.append(inner[index])
                continue
            operator = makers.get(index)
            where = region(operator) if operator is not None else "forward"
            if operator is None or where == "forward":
                continue
            if where == "backward" and operator.kind not in ("elementwise", "layout"):
                found[index] = path
                continue
            size, parts = graph.values[index].size, operator.primitive in _OF_PARTS
            waiting += [
                part
                for part in operator.inputs
                if graph.values[part].size == size or parts
            ]
    return found


def passes(graph: Graph) -> dict[int, int]:
    """Counts the passes (forward, backward) that read each argument.

    Reading a converted, transposed or sliced argument counts as reading the argument.
    An argument that a loop reads whole in every iteration counts as read in the forward
    pass only, because the array that was gathered for the forward pass is kept for the
    loop of the backward pass.

    Args:
        graph: the graph of a step.

    Returns:
        Map from the value number of each argument to its number of passes.
    """
    source = sources(graph)
    stacked = {inner: outer for loop in graph.loops for inner, outer in loop.stacked}
    read: dict[int, set[str]] = {index: set() for index in graph.inputs.values()}
    by_turns = {inner for loop in graph.loops for _, inner in loop.sliced}
    by_turns |= {inside for loop in graph.loops for _, inside, _, _ in loop.carried}
    for operator in graph.operators:
        for index in source.keys() & operator.inputs:
            if operator.kind == "layout":
                made = {v for o in operator.outputs for v in (o, stacked.get(o, o))}
                by_turns |= made if index in by_turns else set()
            elif region(operator) != "update":
                kept = operator.within and index not in by_turns
                read[source[index]].add("forward" if kept else region(operator))
    return {index: len(regions) for index, regions in read.items()}


def read_by_model(graph: Graph) -> set[int]:
    """Finds the arguments that the forward or backward pass reads, whole or in slices.

    Returns the numbers of their values.
    """
    inner = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    found: set[int] = set()
    for operator in graph.operators:
        if region(operator) != "update":
            for index in operator.inputs:
                while index in inner:
                    index = inner[index]
                found.add(index)
    return found & set(graph.inputs.values())


def arrays_of_weights(
    parameters: Sequence[Sequence[int]], loops: Container[int]
) -> Arrays:
    """Maps the dims of each parameter to the dim that mesh axes divide first.

    A key is the set of dims of a parameter. The same parameter without the dims in
    `loops` is a key, too. Parameters with fewer than two dims outside of `loops` are
    left out.

    The dim that is divided first is the one that the fewest parameters have: a layer's
    inner width, not the width that all layers share. So if one axis divides both
    widths, the two matmuls of a layer work on the same part of the inner width. If the
    shared width were divided first, XLA would gather the array between the two matmuls:
    up to 16 GiB in compiled steps.

    The keys are sets of dims, so they also match a gradient whose dims JAX gives in
    another order than the parameter's.

    Args:
        parameters: dims of each parameter; dims of equal layers have one number.
        loops: dims that a loop iterates over: arrays inside the loop lack these dims.

    >>> width, hidden, words, layers = 0, 1, 2, 3
    >>> up, down = [layers, width, hidden], [layers, hidden, width]
    >>> found = arrays_of_weights([up, down, [words, width], [layers, width]], {layers})
    >>> found[frozenset({width, hidden})] == hidden
    True
    >>> found[frozenset({width, words})] == words
    True
    """
    often = Counter(dim for dims in parameters for dim in set(dims))

    def first(dims: Iterable[int]) -> int:
        return min(dims, key=often.__getitem__)

    found: dict[frozenset[int], int] = {}
    for dims in parameters:
        inside = [dim for dim in dims if dim not in loops]
        if len(inside) > 1:
            found |= dict.fromkeys(map(frozenset, (dims, inside)), first(inside))
    return found


Role = Literal["parameter", "optimizer", "batch"]
_ROLES: Mapping[str, Role] = {
    "params": "parameter", "optimizer": "optimizer", "batch": "batch",
}  # fmt: skip
"""With entry `loss`: map from the first part of an argument's path to its role."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A traced training step, and what its arrays and dims stand for.

    `entry` says what the user gave: a whole step, or a loss and an optimizer. `graph`
    is the traced step.
    """

    entry: Literal["step", "loss"]
    graph: Graph
    alias: Mapping[int, int]
    """Map from a dim of any layer to the dim at the same position that stands for all
    equal layers."""
    roles: Mapping[str, Role]
    """Map from the path of each argument's leaf to its role: `parameter`, `optimizer`
    (state) or `batch`."""
    program: Graph
    """Graph with the operators that `Plan.constraints` refers to by number: that of the
    loss alone with entry `loss`, `graph` itself with entry `step`."""
    again: Callable[[Remat], Graph] | None = None
    """Function that traces the step with rematerialization; None with entry `step`."""
    software: Software = XLA
    """The software that runs the step."""

    def root(self, dim: int) -> int:
        """Returns the representative of a dim.

        The dims at the same position of equal layers have one representative. Any other
        dim is its own representative.
        """
        return self.alias.get(dim, dim)

    @cached_property
    def groups(self) -> tuple[OpGroup, ...]:
        """Groups of operators of equal cost, which is computed once for each group."""
        fuses = self.software.fuses
        return group_operators(self.graph, self.alias, fuses=fuses)

    @cached_property
    def read_order(self) -> tuple[ReadPoint, ...]:
        """How early in the forward pass parameters are first read: points (t, c).

        After the share t of the forward pass, the share c of the bytes of all
        parameters has been read (`ir.read_order`). Only parameters that have a gradient
        count. If no gradient is found, all parameters count.
        """
        trained = set(gradients(self).values())
        inputs = {path: self.graph.inputs[path] for path in self.paths("parameter")}
        frozen = [at for path, at in inputs.items() if trained and path not in trained]
        return find_read_order(self.graph, tuple(inputs.values()), frozen)

    @cached_property
    def batch_dims(self) -> tuple[int, ...]:
        """Dims that index examples: the first dim of each batch leaf with examples.

        A batch leaf has examples if it has `num_examples` rows. Dims of size 1 are left
        out.
        """
        values = (self.graph.values[self.graph.inputs[p]] for p in self._of_examples)
        return tuple({self.root(v.dims[0]): None for v in values if v.shape[0] > 1})

    @cached_property
    def sequence_dims(self) -> tuple[int, ...]:
        """Dims that index positions in an example: the second dim of each batch leaf.

        Dims of size 1 and dims in `batch_dims` are left out. The dims are positions of
        tokens, rows of images, or features of vectors.
        """
        found: dict[int, None] = {}
        for path in self.paths("batch"):
            value = self.graph.values[self.graph.inputs[path]]
            if len(value.shape) > 1 and value.shape[1] > 1:
                found[self.root(value.dims[1])] = None
        known = set(self.batch_dims)
        return tuple(dim for dim in found if dim not in known)

    @cached_property
    def expert_arrays(self) -> Arrays:
        """Inputs and outputs of expert layers, each with the dim that numbers experts.

        The map is from the set of an array's dims to its expert dim; it is empty if the
        model has no experts.
        """
        known = {*self.batch_dims, *self.sequence_dims}
        parameters = [self.graph.inputs[path] for path in self.paths("parameter")]
        return arrays_of_experts(self.graph, parameters, self.root, known)

    @cached_property
    def weights(self) -> Arrays:
        """Maps the set of a parameter's dims to the dim that mesh axes divide first.

        This holds for all arrays with these dims, such as the parameter's gradient.
        """
        return arrays_of_weights(self._dims_of_parameters, self.loop_dims)

    @cached_property
    def weight_dims(self) -> frozenset[int]:
        """The dims of all parameters together."""
        return frozenset(dim for dims in self._dims_of_parameters for dim in dims)

    @cached_property
    def _dims_of_parameters(self) -> list[list[int]]:
        values = (
            self.graph.values[self.graph.inputs[p]] for p in self.paths("parameter")
        )
        return [[self.root(dim) for dim in value.dims] for value in values]

    @property
    def batch_size(self) -> int:
        """The number that the product of the sizes of the data axes must divide.

        It is the number of examples, unless a reshape splits or merges their dim. Then
        it is the greatest common divisor of the sizes that the dim has in the program.
        0 if no batch leaf has more than one row.
        """
        dims = (self.graph.dims[dim] for dim in self.batch_dims)
        return math.gcd(*(size for dim in dims for size in dim.sizes))

    @cached_property
    def num_examples(self) -> int:
        """The number of examples in a step; 0 if no batch leaf has rows.

        The rows of a leaf are the size of its first dim. Leaves with one row do not
        count beside others. If all batch leaves have equally many rows, this is the
        number of examples. Otherwise the first dim of one leaf is chosen, by these
        rules in turn:

        * Not a dim that is the second dim of a leaf with another number of rows: such a
          dim indexes positions. It is chosen only if there is no other.
        * The dim whose matmuls, convolutions and kernels have the most operations. In a
          program without these, all operators count.
        * The dim of the leaf with the most rows.

        If leaves with the chosen dim differ in rows, because one of them is flattened,
        the number of examples is the fewest rows.
        """
        graph = self.program
        values = [graph.values[graph.inputs[path]] for path in self.paths("batch")]
        values = [value for value in values if value.shape]
        several = [value for value in values if value.shape[0] > 1]
        numbers = {value.shape[0] for value in several or values}
        if len(numbers) < 2:
            return max(numbers, default=0)
        work = _flops_by_dim(graph)

        def rank(value: Value) -> tuple[bool, float, int]:
            rows, dim = value.shape[0], value.dims[0]
            others = (one.dims[1:2] for one in several if one.shape[0] != rows)
            return (dim,) not in others, work[dim], rows

        dim = max(several, key=rank).dims[0]
        return min(value.shape[0] for value in several if value.dims[0] == dim)

    @cached_property
    def _of_examples(self) -> tuple[str, ...]:
        """Paths of the batch leaves with `num_examples` rows."""
        graph, rows = self.graph, (self.num_examples,)
        return tuple(
            path
            for path in self.paths("batch")
            if graph.values[graph.inputs[path]].shape[:1] == rows
        )

    @property
    def constant_bytes(self) -> int:
        """Bytes of the arrays that the step or loss closes over.

        XLA keeps such an array whole on every device, as a constant of the program.
        """
        values = self.graph.values
        return sum(values[index].num_bytes for index in self.graph.constants)

    @cached_property
    def why_one_microbatch(self) -> str:
        """Why the batch cannot be computed in microbatches (parts); '' if it can.

        Each part has rows of all arrays, and the step returns the mean of what the loss
        returns for the parts. So all batch leaves with dims must have equally many
        rows, and auxiliary values must be means: no integers, and no rows of examples.
        """
        graph = self.program
        values = {
            path: graph.values[graph.inputs[path]] for path in self.paths("batch")
        }
        rows = {path: value.shape[0] for path, value in values.items() if value.shape}
        if len(set(rows.values())) > 1:
            return "arrays of the batch have unlike numbers of rows"
        examples = {values[path].dims[0] for path in self._of_examples}
        for path, index in graph.outputs.items() if self.entry == "loss" else ():
            number, _, name = path.partition("/")
            value = graph.values[index]
            if number != "1":
                continue
            if not value.dtype.startswith(("float", "bfloat")):
                return (
                    f"the loss returns {_aux(name)} of dtype {value.dtype}, and parts "
                    "of a batch have no mean of it"
                )
            if not examples.isdisjoint(value.dims):
                return (
                    f"the loss returns {_aux(name)} with rows of examples, of which "
                    "each part of a batch has its own"
                )
        return ""

    @cached_property
    def passes(self) -> Mapping[str, int]:
        """The number of passes that read each leaf of the arguments, by its path.

        The passes are forward and backward.
        """
        found = passes(self.graph)
        return {path: found[index] for path, index in self.graph.inputs.items()}

    @cached_property
    def loop_dims(self) -> frozenset[int]:
        """Dims that loops iterate over, such as a dim of stacked layers."""
        return frozenset(n for n, dim in enumerate(self.graph.dims) if dim.loop)

    def changes(self, path: str) -> bool:
        """Returns whether a step changes the leaf of its arguments at a path.

        False if the step's result has the same value at this path. True if the result
        has no value there, as for leaves of the batch.
        """
        return self.graph.outputs.get(path) != self.graph.inputs[path]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the step's graph and its arguments' roles, in 12 hexadecimal digits.

        A role is parameter, optimizer state or batch.
        """
        values = [(value.shape, value.dtype, value.dims) for value in self.graph.values]
        operators = [
            (op.primitive, op.inputs, op.outputs, op.flops, op.trips, op.summed,
             op.contracted, op.whole, op.again, op.within)
            for op in self.graph.operators
        ]  # fmt: skip
        text = repr((values, operators, list(self.roles.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def rematerialized(self, remat: Remat) -> "Workload":
        """Returns the workload with its loss rematerialized by the policy `remat`.

        Raises:
            ValueError: the workload was made from the user's whole step. The error is
                raised for `none`, too.
        """
        if self.again is None:
            raise ValueError(
                f"remat={remat!r}: the step is the user's own, so nothing in it is "
                "computed again. Allowed: none; or plan by loss= and optimizer=."
            )
        if remat not in self._rematerialized:
            graph = self.again(remat)
            alias = dict(enumerate(find_repeats(graph).dims))
            self._rematerialized[remat] = replace(self, graph=graph, alias=alias)
        return self._rematerialized[remat]

    @cached_property
    def _rematerialized(self) -> dict[Remat, "Workload"]:
        """Cache of rematerialized workloads by policy."""
        return {}

    def aligned(self, division: ShardingAssignment) -> ShardingAssignment:
        """Converts a sharding assignment for dims of `graph` to one for `program`.

        If the user gave a loss, `program` is the loss, traced alone, with dims of its
        own. Each of them gets the mesh axes of the dim of `graph` that corresponds to
        it, as the same dim of the same array. If the user gave a whole step, `program`
        is `graph`, and the assignment is returned unchanged.
        """
        if self.program is self.graph:
            return division
        axes = {dim: division.of(other) for dim, other in self._same_dims.items()}
        axes = {dim: found for dim, found in axes.items() if found}
        return ShardingAssignment(axes=axes, first=self._first(division))

    def _first(self, division: ShardingAssignment) -> Arrays:
        """Finds the arrays of `program` that are divided by expert, not by example.

        These are inputs and outputs of the loss's expert layers, as a map from the set
        of an array's dims to its expert dim. The map is empty if `division`, which is
        for dims of `graph`, divides no such arrays by expert.
        """
        if division.first.keys().isdisjoint(self.expert_arrays):
            return {}
        program = self.program
        values = {path: program.values[at] for path, at in program.inputs.items()}
        examples = {values[p].dims[0] for p in self._of_examples if p in values}
        known = [path for path in self.paths("parameter") if path in values]
        parameters = [program.inputs[path] for path in known]
        return arrays_of_experts(program, parameters, lambda dim: dim, examples)

    @cached_property
    def _same_dims(self) -> Mapping[int, int]:
        return same_dims(self.program, self.graph)

    def paths(self, role: Role) -> tuple[str, ...]:
        """Lists the paths of the arguments' leaves with a role, such as `parameter`.

        The leaves are in the order of the arguments.
        """
        return tuple(path for path, found in self.roles.items() if found == role)


def _aux(name: str) -> str:
    return f"the auxiliary value {name!r}" if name else "an auxiliary value"


def _flops_by_dim(graph: Graph) -> Mapping[int, float]:
    """Maps each dim to the arithmetic operations of a step's products with this dim.

    Products are matmuls, convolutions and custom kernels (such as Pallas calls). In a
    program without products, all operators count.
    """
    heavy = [op for op in graph.operators if op.kind in PRODUCTS] or graph.operators
    found: dict[int, float] = defaultdict(float)
    for op in heavy:
        values = (graph.values[index] for index in (*op.inputs, *op.outputs))
        for dim in {dim for value in values for dim in value.dims}:
            found[dim] += op.flops * op.trips
    return found


@gc_paused()
def of_step(step: Callable[..., Any], state: Any, batch: Any) -> Workload:
    """Traces a user's whole training step: `step(state, batch) -> (state, ...)`.

    The step may also return the state alone. A leaf of the state that the forward or
    backward pass reads counts as a parameter, any other leaf of the state as optimizer
    state.
    """

    def named(state: Any, batch: Any) -> Any:
        made = step(state, batch)
        after, *rest = made if isinstance(made, tuple) else (made,)
        return {"state": after, "rest": rest}

    graph = trace(named, state=state, batch=batch)
    read = read_by_model(graph)
    roles: dict[str, Role] = {}
    for path, index in graph.inputs.items():
        if path.split("/")[0] == "batch":
            roles[path] = "batch"
        else:
            roles[path] = "parameter" if index in read else "optimizer"
    return _workload("step", graph, roles, graph)


@gc_paused()
def of_loss(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    software: Software = XLA,
) -> Workload:
    """Traces the step that `dtft.train.make_step` makes from a loss.

    Args:
        loss: function `loss(params, batch)` that returns a scalar, or a scalar and
            auxiliary values.
        optimizer: an optax transform.
        params: tree of arrays or shapes.
        batch: tree of arrays or shapes; the first dim of each leaf with as many rows as
            the step has examples (`Workload.num_examples`) indexes examples.
        software: the software that runs the step.
    """

    def with_aux(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        result = loss(params, batch)
        return result if isinstance(result, tuple) else (result, ())

    def traced(remat: Remat) -> Graph:
        def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
            prepared = _prepared(with_aux, remat, params, batch)
            differentiated = jax.value_and_grad(prepared, has_aux=True)
            result, gradients = differentiated(params, batch)
            with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
                updates, after = optimizer.update(gradients, optimizer_state, params)
                params = optax.apply_updates(params, updates)
            return {"params": params, "optimizer": after, "loss": result}

        return trace(
            lambda params, optimizer, batch: step(params, optimizer, batch),
            params=params,
            optimizer=state,
            batch=batch,
        )

    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(optimizer.init, params)
    graph = traced("none")
    roles: dict[str, Role] = {path: _ROLES[path.split("/")[0]] for path in graph.inputs}
    program = trace(
        lambda params, batch: loss(params, batch), params=params, batch=batch
    )
    found = _workload("loss", graph, roles, program, traced)
    return replace(found, software=software)


def _prepared(
    loss: Callable[..., tuple[jax.Array, Any]], remat: Remat, params: Any, batch: Any
) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the loss, rematerialized as `dtft.train.make_step` does.

    Args:
        loss: returns the loss and auxiliary values.
        remat: the policy; with "none", `loss` itself is returned.
        params: tree of arrays or shapes.
        batch: tree of arrays or shapes.
    """
    if remat == "none":
        return loss
    program = jax.make_jaxpr(loss)(params, batch)
    run = jaxpr_as_fun(rematerialized(program, POLICIES[remat]))

    def rematerializing(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, *aux = run(*jax.tree.leaves((params, batch)))
        return value, aux

    return rematerializing


def _workload(
    entry: Literal["step", "loss"],
    graph: Graph,
    roles: Mapping[str, Role],
    program: Graph,
    again: Callable[[Remat], Graph] | None = None,
) -> Workload:
    alias = dict(enumerate(find_repeats(graph).dims))
    return Workload(
        entry=entry,
        graph=graph,
        alias=alias,
        roles=roles,
        program=program,
        again=again,
    )
