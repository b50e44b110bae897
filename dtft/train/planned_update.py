"""Gradients and updates as a plan says, inside of a jitted step.

Puts a plan's knobs into the program of a loss: constraints, gathered parameters, blocks
computed again, microbatches, divided optimizer state. Traces only; must not know what a
state consists of beside parameters and optimizer state, or how a step is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh

from dtft.checkpoint.state import from_paths, to_paths
from dtft.planner.ir import POLICIES, rematerialized, traced
from dtft.planner.plan import Plan
from dtft.planner.types import Spec
from dtft.train.accumulate import Loss, Weight, accumulated, parts_of
from dtft.train.constrained import insert
from dtft.train.gathered import Gathering, gathered
from dtft.train.plan_shardings import sharding_tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """How one plan computes gradients and applies them."""

    plan: Plan
    mesh: Mesh
    of_params: Any
    """A NamedSharding per parameter."""
    divisions: Any
    """A NamedSharding per parameter: where its update is computed."""
    sums: Any
    """A NamedSharding per parameter: how its gradient is added up."""
    of_optimizer: Callable[[Any], Any]
    """From an optimizer state to a NamedSharding per leaf, kept where it rests."""

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, params: Any, opt_state: Any) -> "Update":
        """The update of a plan for parameters and their optimizer state.

        Args:
            plan: whose knobs and specs are applied.
            mesh: the plan's mesh over the devices.
            params: arrays or ShapeDtypeStructs.
            opt_state: the optimizer's state for them, arrays or ShapeDtypeStructs.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        specs = plan.state
        if plan.knobs.zero in (1, 2):
            specs = update_specs(params, opt_state, plan.state, plan.optimizer)
        added = sum_specs(specs) if plan.knobs.zero == 2 else plan.state
        of_params, divisions, sums = (
            sharding_tree("params", params, each, mesh)
            for each in (plan.state, specs, added)
        )

        def of_optimizer(state: Any) -> Any:
            return sharding_tree("optimizer", state, plan.optimizer, mesh, plan.host)

        return cls(
            plan=plan,
            mesh=mesh,
            of_params=of_params,
            divisions=divisions,
            sums=sums,
            of_optimizer=of_optimizer,
        )

    def gradients(
        self, loss: Callable[..., Any], weight: Weight | None = None, *fixed: Any
    ) -> Callable[[Any, Any], tuple[tuple[jax.Array, Any], Any]]:
        """As `jax.value_and_grad(loss, has_aux=True)`, with the plan's knobs.

        Args:
            loss: `(params, batch, *fixed) -> (scalar, aux)`.
            weight: what a part of the batch counts; by default all are equal.
            *fixed: trees of arrays that are the same for every part.
        """
        plan, parts = self.plan, self.plan.knobs.microbatches
        return accumulated(
            self._prepared(loss, fixed),
            parts,
            weight,
            pin=lambda gradients: self._constrain(gradients, self.sums),
            divide=lambda batch: parts_of(batch, parts, plan.batch, self.mesh),
        )

    def apply(
        self,
        optimizer: optax.GradientTransformation,
        gradients: Any,
        opt_state: Any,
        params: Any,
    ) -> tuple[Any, Any]:
        """The parameters and optimizer state after an update.

        Each parameter is updated where its optimizer state is, and gathered then. State
        that rests in host memory comes to the device; what it becomes goes back as the
        step's result, whose sharding says so.
        """
        opt_state = self._on_device(opt_state)
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            gradients = self._constrain(gradients, self.divisions)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            after = optax.apply_updates(params, updates)
        after = self._constrain(after, self.divisions)
        return self._constrain(after, self.of_params), opt_state

    def _on_device(self, opt_state: Any) -> Any:
        if not self.plan.host:
            return opt_state
        specs, mesh = self.plan.optimizer, self.mesh
        here = sharding_tree("optimizer", opt_state, specs, mesh)
        leaves = to_paths(opt_state)
        moved = {
            path: jax.device_put(leaves[path], sharding.with_memory_kind("device"))
            for path, sharding in to_paths(here).items()
            if path in self.plan.host
        }
        return from_paths(opt_state, {**leaves, **moved})

    def gathered(self, params: Any) -> Any:
        """Parameters that are whole over `fsdp`, for what is not differentiated."""
        specs = {path: gathered(spec) for path, spec in self.plan.state.items()}
        whole = sharding_tree("params", params, specs, self.mesh)
        return self._constrain(params, whole)

    def _constrain(self, values: Any, shardings: Any) -> Any:
        if self.mesh.size == 1:  # what one device compiles stays the same
            return values
        return jax.lax.with_sharding_constraint(values, shardings)

    def _prepared(self, loss: Callable[..., Any], fixed: tuple[Any, ...]) -> Loss:
        def prepared(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            args = (params, batch, *fixed)
            program, shape = traced(loss, *args)
            changed = self._changed(program, list(to_paths(params)))
            results = jaxpr_as_fun(changed)(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shape), results)

        return prepared

    def _changed(self, program: ClosedJaxpr, paths: list[str]) -> ClosedJaxpr:
        """The loss's program with constraints, gathers and blocks."""
        plan = self.plan
        program = insert(program, plan.constraints, self.mesh)
        policy, last, joined = POLICIES.get(plan.knobs.remat), False, None
        if plan.knobs.zero == 3:
            gathering = Gathering(mesh=self.mesh)
            specs = {index: plan.state[path] for index, path in enumerate(paths)}
            program, joined = gathering.apply(program, specs), gathering.gathers
            if policy is None:
                policy, last = gathering.policy, True
        if policy is None:
            return program
        return rematerialized(program, policy, last=last, joined=joined)


def update_specs(
    params: Any,
    opt_state: Any,
    of_params: Mapping[str, Spec],
    of_optimizer: Mapping[str, Spec],
) -> dict[str, Spec]:
    """For each parameter how its update is divided: as its first moment is.

    A leaf of the optimizer state belongs to a parameter if it has the parameter's place
    in a subtree with the structure of `params`, and its shape. Names decide nothing:
    `mu/layer/w` ends in the path of a parameter `w`, too. Parameters that no such leaf
    belongs to (masked, or factored moments) keep their own spec.

    Args:
        params: arrays or ShapeDtypeStructs.
        opt_state: the optimizer's state for them, likewise.
        of_params: path of each parameter to its spec.
        of_optimizer: path of each leaf of the optimizer state to its spec.

    >>> w = jax.ShapeDtypeStruct((4,), "float32")
    >>> update_specs(
    ...     {"w": w}, (0, {"w": w}), {"w": ((),)}, {"0": (), "1/w": (("replica",),)}
    ... )
    {'w': (('replica',),)}
    """
    states = to_paths(opt_state)
    paths = from_paths(opt_state, {path: path for path in states})
    names = from_paths(params, {name: name for name in to_paths(params)})
    leaves = to_paths(params)

    def alike(node: Any) -> bool:
        return _places(node, names) is not None

    found = dict(of_params)
    for node in reversed(jax.tree.leaves(paths, is_leaf=alike)):
        for path, name in _places(node, names) or ():
            own, state = leaves[name], states[path]
            trained = jax.numpy.issubdtype(state.dtype, jax.numpy.inexact)
            if trained and np.shape(state) == np.shape(own):
                found[name] = of_optimizer[path]
    return found


def _places(node: Any, names: Any) -> list[tuple[str, str]] | None:
    """Of each leaf in a node of the optimizer state its path and its parameter's.

    None where the node has not the structure of the parameters, of which
    `optax.masked` may have left out leaves or whole subtrees.
    """
    moments, structure = jax.tree.flatten(node, is_leaf=_is_masked)
    try:
        parts = structure.flatten_up_to(names)
    except (ValueError, TypeError):
        return None
    kept = [
        pair for pair in zip(moments, parts, strict=True) if not _is_masked(pair[0])
    ]
    if not kept or not all(isinstance(name, str) for _, name in kept):
        return None
    return kept


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def sum_specs(updates: Mapping[str, Spec]) -> dict[str, Spec]:
    """For each parameter how its gradient is divided while it is added up.

    As its update, but vectors are whole: from a divided one XLA divides all that it was
    computed of, in a normalization everything of one number per channel, and gathers
    each of these again.

    Args:
        updates: path of each parameter to the spec of its update.

    >>> sum_specs({"w": (("fsdp",), ()), "scale": (("fsdp",),)})
    {'w': (('fsdp',), ()), 'scale': ((),)}
    """
    return {p: spec if len(spec) > 1 else gathered(spec) for p, spec in updates.items()}
