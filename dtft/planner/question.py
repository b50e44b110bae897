"""What is asked of the planner: a traced step, and what each of its arrays is.

Decides which leaves are parameters, optimizer state and batch, and which dims the batch
goes along. Traces, and computes nothing. Must not know clusters, meshes or costs.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import optax

from dtft.planner import blocks
from dtft.planner.graph import Graph
from dtft.planner.groups import Group, group, region
from dtft.planner.trace import trace

Role = Literal["parameter", "optimizer", "batch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A step to be planned."""

    entry: Literal["step", "loss"]
    graph: Graph
    alias: Mapping[int, int]
    """Dim to the dim that stands for it in equal layers."""
    roles: Mapping[str, Role]
    """Path of each argument's leaf to what it is."""

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
        """Dims along which an example goes: the second of the batch leaves' dims."""
        known = set(self.batch_dims)
        return tuple(dim for dim in self._of_batch(1) if dim not in known)

    @property
    def batch_size(self) -> int:
        """Examples of a step; 0 without a batch dim."""
        dims = self.batch_dims
        return self.graph.dims[dims[0]].sizes[0] if dims else 0

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits; the same for the same program."""
        items = [asdict(value) for value in self.graph.values]
        items += [{**asdict(op), "name": ""} for op in self.graph.operators]
        text = json.dumps([items, dict(self.roles)], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def paths(self, role: Role) -> tuple[str, ...]:
        """Leaves of a role, in the order of the arguments."""
        return tuple(path for path, found in self.roles.items() if found == role)

    def _of_batch(self, place: int) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for path in self.paths("batch"):
            value = self.graph.values[self.graph.inputs[path]]
            if len(value.shape) > place and value.shape[place] > 1:
                dim = value.dims[place]
                found[self.alias.get(dim, dim)] = None
        return tuple(found)


def of_step(step: Callable[..., Any], state: Any, batch: Any) -> Question:
    """A whole training step of the user: `step(state, batch) -> (state, ...)`."""

    def named(state: Any, batch: Any) -> Any:
        made = step(state, batch)
        after, *rest = made if isinstance(made, tuple) else (made,)
        return {"state": after, "rest": rest}

    graph = trace(named, state=state, batch=batch)
    read = _read_by_model(graph)
    roles: dict[str, Role] = {}
    for path, index in graph.inputs.items():
        if path.split("/")[0] == "batch":
            roles[path] = "batch"
        else:
            roles[path] = "parameter" if index in read else "optimizer"
    return _question("step", graph, roles)


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

    def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
        gradients = jax.grad(scalar)(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            updates, after = optimizer.update(gradients, optimizer_state, params)
            return {"params": optax.apply_updates(params, updates), "optimizer": after}

    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(optimizer.init, params)
    graph = trace(
        lambda params, optimizer, batch: step(params, optimizer, batch),
        params=params,
        optimizer=state,
        batch=batch,
    )
    names: dict[str, Role] = {
        "params": "parameter",
        "optimizer": "optimizer",
        "batch": "batch",
    }
    roles = {path: names[path.split("/")[0]] for path in graph.inputs}
    return _question("loss", graph, roles)


def _question(
    entry: Literal["step", "loss"], graph: Graph, roles: Mapping[str, Role]
) -> Question:
    alias = dict(enumerate(blocks.find(graph).dims))
    return Question(entry=entry, graph=graph, alias=alias, roles=roles)


def _read_by_model(graph: Graph) -> set[int]:
    """Arguments that the forward or backward pass reads, directly or converted."""
    inner = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    found: set[int] = set()
    for operator in graph.operators:
        if region(operator) != "update":
            for index in operator.inputs:
                while index in inner:
                    index = inner[index]
                found.add(index)
    return found & set(graph.inputs.values())
