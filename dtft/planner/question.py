"""What is asked of the planner: a traced step, and what each of its arrays is.

Decides which leaves are parameters, optimizer state and batch, and which dims the batch
goes along. Traces, and computes nothing. Must not know clusters, meshes or costs.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import optax
from jax.extend.core import jaxpr_as_fun

from dtft.planner import blocks
from dtft.planner.aligning import same_dims
from dtft.planner.experts import Arrays, arrays_of_experts
from dtft.planner.graph import Graph
from dtft.planner.groups import Group, group
from dtft.planner.partition import Division
from dtft.planner.plan import Remat
from dtft.planner.reads import passes, read_by_model
from dtft.planner.remat import POLICIES, rematerialized
from dtft.planner.trace import trace
from dtft.planner.uncollected import uncollected
from dtft.planner.weights import arrays_of_weights

Role = Literal["parameter", "optimizer", "batch"]
_ROLES: Mapping[str, Role] = {
    "params": "parameter", "optimizer": "optimizer", "batch": "batch",
}  # fmt: skip
"""First part of an argument's path to what it is; entry loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A step to be planned."""

    entry: Literal["step", "loss"]
    graph: Graph
    alias: Mapping[int, int]
    """Dim to the dim that stands for it in equal layers."""
    roles: Mapping[str, Role]
    """Path of each argument's leaf to what it is."""
    program: Graph
    """What constraints are numbered by: the loss alone, or the step itself."""
    again: Callable[[Remat], Graph] | None = None
    """Traces the step with parts of the loss computed again; entry loss only."""

    def root(self, dim: int) -> int:
        """The dim that stands for a dim."""
        return self.alias.get(dim, dim)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Operators that cost alike."""
        return group(self.graph, self.alias)

    @cached_property
    def batch_dims(self) -> tuple[int, ...]:
        """Dims along which there are examples: the first of every batch leaf."""
        return self._of_batch(0)

    @cached_property
    def sequence_dims(self) -> tuple[int, ...]:
        """Dims along which an example goes: the second of the batch leaves' dims.

        Positions of tokens, rows of images; of examples that are vectors, features.
        """
        known = set(self.batch_dims)
        return tuple(dim for dim in self._of_batch(1) if dim not in known)

    @cached_property
    def expert_arrays(self) -> Arrays:
        """Arrays that experts work on and make, each with its dim of experts."""
        known = {*self.batch_dims, *self.sequence_dims}
        parameters = [self.graph.inputs[path] for path in self.paths("parameter")]
        return arrays_of_experts(self.graph, parameters, self.root, known)

    @cached_property
    def weights(self) -> Arrays:
        """Arrays with the dims of a parameter, and which of these is divided first."""
        return arrays_of_weights(self._dims_of_parameters, self.loop_dims)

    @cached_property
    def weight_dims(self) -> frozenset[int]:
        """Dims that parameters have, not only what is computed with them."""
        return frozenset(dim for dims in self._dims_of_parameters for dim in dims)

    @cached_property
    def _dims_of_parameters(self) -> list[list[int]]:
        values = (
            self.graph.values[self.graph.inputs[p]] for p in self.paths("parameter")
        )
        return [[self.root(dim) for dim in value.dims] for value in values]

    @property
    def batch_size(self) -> int:
        """Examples of a step; 0 without a batch dim."""
        dims = self.batch_dims
        return self.graph.dims[dims[0]].sizes[0] if dims else 0

    @property
    def is_batch_alike(self) -> bool:
        """Whether all arrays of the batch have as many rows, so that parts of it can go
        through one after another."""
        dims = [self.graph.dims[dim] for dim in self.batch_dims]
        return len({dim.sizes[0] for dim in dims}) < 2

    @cached_property
    def passes(self) -> Mapping[str, int]:
        """For each argument's leaf, by how many passes of the model it is read."""
        found = passes(self.graph)
        return {path: found[index] for path, index in self.graph.inputs.items()}

    @cached_property
    def loop_dims(self) -> frozenset[int]:
        """Dims that loops go along."""
        return frozenset(n for n, dim in enumerate(self.graph.dims) if dim.loop)

    def changes(self, path: str) -> bool:
        """Whether a step changes an argument's leaf."""
        return self.graph.outputs.get(path) != self.graph.inputs[path]

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits; the same for the same program."""
        values = [(value.shape, value.dtype, value.dims) for value in self.graph.values]
        operators = [
            (op.primitive, op.inputs, op.outputs, op.flops, op.trips, op.summed,
             op.contracted, op.whole, op.again, op.within)
            for op in self.graph.operators
        ]  # fmt: skip
        text = repr((values, operators, list(self.roles.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def rematerialized(self, remat: Remat) -> "Question":
        """The same question with parts of the loss computed again.

        Raises:
            ValueError: the step is the user's own.
        """
        if self.again is None:
            raise ValueError(
                f"remat={remat!r}: the step is the user's own, so nothing in it is "
                "computed again. Allowed: none; or plan by loss= and optimizer=."
            )
        if remat not in self._rematerialized:
            graph = self.again(remat)
            alias = dict(enumerate(blocks.find(graph).dims))
            self._rematerialized[remat] = replace(self, graph=graph, alias=alias)
        return self._rematerialized[remat]

    @cached_property
    def _rematerialized(self) -> dict[Remat, "Question"]:
        """What was traced already."""
        return {}

    def aligned(self, division: Division) -> Division:
        """A division of `graph` as one of `program`: what is the same is divided so."""
        if self.program is self.graph:
            return division
        axes = {dim: division.of(other) for dim, other in self._same_dims.items()}
        axes = {dim: found for dim, found in axes.items() if found}
        return Division(axes=axes, first=self._first(division))

    def _first(self, division: Division) -> Arrays:
        """`Division.first` of the program, which makes no gradients of weights."""
        if division.first.keys().isdisjoint(self.expert_arrays):
            return {}
        program = self.program
        values = {path: program.values[at] for path, at in program.inputs.items()}
        batch = (values[path] for path in self.paths("batch") if path in values)
        examples = {value.dims[0] for value in batch if value.dims}
        known = [path for path in self.paths("parameter") if path in values]
        parameters = [program.inputs[path] for path in known]
        return arrays_of_experts(program, parameters, lambda dim: dim, examples)

    @cached_property
    def _same_dims(self) -> Mapping[int, int]:
        return same_dims(self.program, self.graph)

    def paths(self, role: Role) -> tuple[str, ...]:
        """Leaves of a role, in the order of the arguments."""
        return tuple(path for path, found in self.roles.items() if found == role)

    def _of_batch(self, place: int) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for path in self.paths("batch"):
            value = self.graph.values[self.graph.inputs[path]]
            if len(value.shape) > place and value.shape[place] > 1:
                found[self.root(value.dims[place])] = None
        return tuple(found)


@uncollected()
def of_step(step: Callable[..., Any], state: Any, batch: Any) -> Question:
    """A whole training step of the user: `step(state, batch) -> (state, ...)`."""

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
    return _question("step", graph, roles, graph)


@uncollected()
def of_loss(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
) -> Question:
    """A loss, from which `dtft.train.make_step` makes the step.

    Args:
        loss: `loss(params, batch)`: a scalar, or a scalar and auxiliary values.
        optimizer: an optax transform.
        params: tree of arrays or shapes.
        batch: tree of arrays or shapes; the first dim of each leaf is that of examples.
    """

    def scalar(params: Any, batch: Any) -> jax.Array:
        value = loss(params, batch)
        return value[0] if isinstance(value, tuple) else value

    def traced(remat: Remat) -> Graph:
        def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
            prepared = _prepared(scalar, remat, params, batch)
            gradients = jax.grad(prepared)(params, batch)
            with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
                updates, after = optimizer.update(gradients, optimizer_state, params)
                params = optax.apply_updates(params, updates)
            return {"params": params, "optimizer": after}

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
    return _question("loss", graph, roles, program, traced)


def _prepared(
    loss: Callable[..., jax.Array], remat: Remat, params: Any, batch: Any
) -> Callable[..., jax.Array]:
    """The loss as `make_step` differentiates it."""
    if remat == "none":
        return loss
    program = jax.make_jaxpr(loss)(params, batch)
    run = jaxpr_as_fun(rematerialized(program, POLICIES[remat]))
    return lambda params, batch: run(*jax.tree.leaves((params, batch)))[0]


def _question(
    entry: Literal["step", "loss"],
    graph: Graph,
    roles: Mapping[str, Role],
    program: Graph,
    again: Callable[[Remat], Graph] | None = None,
) -> Question:
    alias = dict(enumerate(blocks.find(graph).dims))
    return Question(
        entry=entry,
        graph=graph,
        alias=alias,
        roles=roles,
        program=program,
        again=again,
    )
