"""The step of a plan, compiled: of a user's own step, or of a loss and an optimizer.

`jit_plan` gives a user's step the plan's shardings and constraints. `make_step` makes a
step of a loss and an optimizer and puts the plan's knobs into it: gradients accumulated
over microbatches, parts of the loss computed again, optimizer state, gradients or
parameters divided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state import from_paths, to_paths
from dtft.parallel.fsdp import Gathering, gathered
from dtft.parallel.grad_accumulation import Loss, Weight, accumulated, parts_of
from dtft.parallel.planning.inputs import (
    Step,
    check_function,
    check_optimizer,
    check_plan,
    check_result,
)
from dtft.parallel.sharding import (
    constrained,
    insert,
    mesh_of,
    sharding_tree,
    signature,
)
from dtft.planner.ir import POLICIES, rematerialized, traced
from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.planner.types import Spec

# A plan's knobs in the program of a loss: sharding constraints, gathered parameters,
# rematerialized blocks, microbatches, divided optimizer state.


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


State = Any
"""Entry step: the user's. Entry loss: `{"params": ..., "opt_state": ...}`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A plan's step, compiled on first use for each kind of state and batch.

    `state = step.init(start)`, then `state, result = step(state, batch)`. `start` is
    what was planned: the parameters, or the whole state for a step of the user's own.
    """

    plan: Plan
    """What is run."""
    mesh: Mesh
    """The plan's mesh over the devices."""
    _begin: Callable[[Any], State] | None
    """From what was planned to the state at step 0; None: that is the state."""
    _shardings: Callable[[State], Any]
    """From a state to a NamedSharding per leaf."""
    _function: Callable[[State, Any], Step]
    """From an abstract state and batch to what is jitted."""
    _of_result: NamedSharding | None
    """Of what a step returns beside the state; None: as the compiler likes."""
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, state: State, batch: Any) -> tuple[State, Any]:
        """One step. `state` is donated: it cannot be used afterwards.

        Returns:
            The state, and what the step (the loss, for the whole batch) returned.

        Raises:
            ValueError: state or batch are not those of the plan; names the path.
        """
        known = len(self._compiled)
        jitted = self._jitted(state, batch)
        if len(self._compiled) > known:
            state = self.place(state)
        return jitted(state, batch)

    step = __call__

    def init(self, start: Any) -> State:
        """The state at step 0, each device with its part.

        Parameters stay usable; a state of the user's own as far as it had to be moved.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        if self._begin is None:
            return self.place(start)
        return jax.jit(self._begin, out_shardings=self.state_shardings(start))(start)

    def place(self, state: State) -> State:
        """The state, such as a restored one, with each device's part on it.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return jax.device_put(state, self._shardings(state))

    def lower(self, start: Any, batch: Any) -> jax.stages.Lowered:
        """The step, to be compiled without being run.

        Args:
            start: parameters or state as for `init`, arrays or ShapeDtypeStructs.
            batch: arrays or ShapeDtypeStructs.
        """
        return self.trace(start, batch).lower()

    def trace(self, start: Any, batch: Any) -> jax.stages.Traced:
        """As `lower`, not lowered yet, such as for a platform that is not here."""
        state, batch = self._abstract(start), jax.eval_shape(lambda it: it, batch)
        return self._jitted(state, batch).trace(state, batch)

    def state_shardings(self, start: Any) -> Any:
        """A NamedSharding for every leaf of the state that `start` begins.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return self._shardings(self._abstract(start))

    def batch_shardings(self, batch: Any) -> Any:
        """A NamedSharding for every leaf of a batch.

        Raises:
            ValueError: names the path that does not fit the plan.
        """
        return sharding_tree("batch", batch, self.plan.batch, self.mesh)

    def _abstract(self, start: Any) -> State:
        return jax.eval_shape(self._begin or (lambda state: state), start)

    def _jitted(self, state: State, batch: Any) -> Any:
        key = signature((state, batch))
        if key not in self._compiled:
            self._compiled[key] = self._jit(state, batch)
        return self._compiled[key]

    def _jit(self, state: State, batch: Any) -> Any:
        of_state, of_batch = self._shardings(state), self.batch_shardings(batch)
        return jax.jit(
            self._function(state, batch),
            donate_argnums=0,
            in_shardings=(of_state, of_batch),
            out_shardings=(of_state, self._of_result),
        )


def make_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    weight: Weight | None = None,
    devices: Sequence[Any] | None = None,
) -> PlannedStep:
    """The training step that a plan of `dtft.plan(loss=...)` describes.

    Microbatches: rows of the batch (dim 0 of every array) in equal parts, each device
    its own; the result is the mean over the parts, weighted by `weight`. So a loss that
    is a mean over rows needs none, one that is a mean over unmasked tokens needs their
    number. Gradients are added up in their own dtype; what the loss returns beside its
    value must then be floating-point means, too.

    Rematerialization: by block, see `dtft.planner.ir.remat`.

    ZeRO: 1 updates each parameter where its optimizer state is, 2 keeps gradients
    divided alike, 3 gathers parameters over `fsdp` where they are used, in the backward
    pass again, see `dtft.parallel.fsdp`.

    Args:
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`, a mean over the batch.
        optimizer: any optax transformation.
        plan: made for this loss, optimizer and shapes.
        weight: `(batch) -> scalar`, what a part counts in the mean over microbatches.
        devices: in mesh order; by default as many as it needs of those JAX has.

    Returns:
        The compiled step and its shardings.

    Raises:
        ValueError: something else in the place of the loss, the optimizer or the plan;
            the plan is of another entry point, has a knob that cannot be run here, or
            needs another number of devices.
    """
    check_function("loss", loss)
    check_optimizer(optimizer)
    check_plan(plan)
    mesh = mesh_of(plan.mesh, devices)
    check_runnable(plan, "loss", mesh.devices.flat[0].platform)
    return _of_loss(plan, mesh, loss, optimizer, weight)


def jit_plan(
    plan: Plan, step: Step, *, devices: Sequence[Any] | None = None
) -> PlannedStep:
    """The user's step as a plan of `dtft.plan(step=...)` says.

    State and batch have the plan's shardings, values inside the step its constraints;
    the mathematics is the step's own.

    Args:
        plan: made for this step and these shapes.
        step: `(state, batch) -> (state, anything)`; jitted or not.
        devices: in mesh order; by default as many as it needs of those JAX has.

    Raises:
        ValueError: the plan is of another entry point, has a knob that cannot be run
            here, or needs another number of devices.
    """
    check_plan(plan)
    check_function("step", step)
    mesh = mesh_of(plan.mesh, devices)
    check_runnable(plan, "step", mesh.devices.flat[0].platform)
    return _of_step(plan, mesh, step)


def step_of(
    plan: Plan, given: Mapping[str, Any], mesh: Any, platform: str
) -> tuple[PlannedStep, Any]:
    """The step of a plan for what was asked, and what it starts from.

    Args:
        plan: of this question.
        given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
            `optimizer`, `params`, `batch`.
        mesh: of the plan; without devices it is enough for lowering.
        platform: of the devices.

    Raises:
        ValueError: the plan is of another entry point, or cannot be run on such
            devices.
    """
    if "step" in given:
        check_runnable(plan, "step", platform)
        return _of_step(plan, mesh, given["step"]), given["state"]
    check_runnable(plan, "loss", platform)
    step = _of_loss(plan, mesh, given["loss"], given["optimizer"], None)
    return step, given["params"]


def _of_step(plan: Plan, mesh: Mesh, step: Step) -> PlannedStep:
    def function(state: State, batch: Any) -> Step:
        check_result(jax.eval_shape(step, state, batch), state)
        return constrained(step, plan.constraints, mesh)

    return PlannedStep(
        plan=plan,
        mesh=mesh,
        _begin=None,
        _shardings=lambda state: sharding_tree("state", state, plan.state, mesh),
        _function=function,
        _of_result=None,
    )


def _of_loss(
    plan: Plan,
    mesh: Mesh,
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    weight: Weight | None,
) -> PlannedStep:
    def begin(params: Any) -> State:
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            return {"params": params, "opt_state": optimizer.init(params)}

    def update_of(state: State) -> Update:
        _check_state(state)
        return Update.of(plan, mesh, state["params"], state["opt_state"])

    def shardings(state: State) -> Any:
        update = update_of(state)
        return {
            "params": update.of_params,
            "opt_state": update.of_optimizer(state["opt_state"]),
        }

    def function(like: State, batch: Any) -> Step:
        del batch
        planned = update_of(like)
        gradients_of = planned.gradients(_with_aux(loss), weight)

        def update(state: State, batch: Any) -> tuple[State, Any]:
            params = state["params"]
            (value, aux), gradients = gradients_of(params, batch)
            after, opt_state = planned.apply(
                optimizer, gradients, state["opt_state"], params
            )
            result = (value, aux["aux"]) if aux else value
            return {"params": after, "opt_state": opt_state}, result

        return update

    return PlannedStep(
        plan=plan,
        mesh=mesh,
        _begin=begin,
        _shardings=shardings,
        _function=function,
        _of_result=NamedSharding(mesh, PartitionSpec()),
    )


def _check_state(state: State) -> None:
    if isinstance(state, dict) and state.keys() == {"params", "opt_state"}:
        return
    kind = f"a {type(state).__name__}"
    if isinstance(state, dict):
        kind = f"a dict of {', '.join(map(str, state)) or 'nothing'}"
    raise ValueError(
        f"state is {kind}. Allowed: what init(params) or the step "
        "before returned, a dict of params and opt_state."
    )


def _with_aux(loss: Callable[..., Any]) -> Loss:
    """A loss that always returns something beside its value."""

    def with_aux(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        result: Any = loss(params, batch)
        has_aux = isinstance(result, tuple) and len(result) == 2
        value, aux = cast(Any, result if has_aux else (result, None))
        return value, {"aux": aux} if has_aux else {}

    return with_aux
