"""Compiles the training step that a plan describes.

`jit_plan` compiles a user's own step with the plan's shardings and constraints.
`make_step` makes a step from a loss and an optimizer and applies the plan's knobs:
gradient accumulation over microbatches, rematerialization, and the ZeRO levels, which
shard optimizer state, gradients or parameters.
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
from dtft.parallel.plan_shardings import (
    constrained,
    insert,
    mesh_of,
    sharding_tree,
    signature,
)
from dtft.parallel.planning.inputs import (
    Step,
    check_function,
    check_optimizer,
    check_plan,
    check_result,
)
from dtft.planner.ir import POLICIES, rematerialized, traced
from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.planner.types import Spec

# `Update` applies a plan's knobs to the program of a loss: sharding constraints,
# gathered parameters, rematerialized blocks, microbatches, divided optimizer state.


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """Computes and applies gradients with the shardings and settings of a plan.

    Settings are, for example, the number of microbatches and the ZeRO level.
    """

    plan: Plan
    mesh: Mesh
    of_params: Any
    """Tree with the NamedSharding of each parameter between steps."""
    divisions: Any
    """Tree with the NamedSharding of each parameter while its update is computed."""
    sums: Any
    """Tree with the NamedSharding of each parameter's gradient while it is
    accumulated."""
    of_optimizer: Callable[[Any], Any]
    """Function from an optimizer state to a tree with the NamedSharding of each leaf
    between steps, which includes the leaf's memory kind (device or host)."""

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, params: Any, opt_state: Any) -> "Update":
        """Makes the update of a plan for parameters and their optimizer state.

        Args:
            plan: the plan whose shardings and settings are applied.
            mesh: the plan's mesh over the devices.
            params: arrays or ShapeDtypeStructs.
            opt_state: the optimizer's state for `params`, arrays or ShapeDtypeStructs.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
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
        """Makes a function like `jax.value_and_grad(loss, has_aux=True)`.

        The function applies the plan's constraints, remat policy, microbatches and
        shardings of gradients.

        Args:
            loss: `(params, batch, *fixed) -> (scalar, aux)`.
            weight: function from a microbatch to its weight in the mean over
                microbatches; None gives all microbatches the same weight.
            *fixed: trees of arrays that are the same for every microbatch.

        Returns:
            A function `(params, batch) -> ((loss, aux), gradients)`.
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
        """Returns the parameters and the optimizer state after an update.

        With ZeRO level 1 or 2 each device updates the part of a parameter for which it
        holds optimizer state; the parameter is gathered afterwards. With other levels
        each device updates the part of a parameter that it holds. Optimizer state in
        host memory is copied to the device. The output sharding of the jitted step
        places the new state in host memory.
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
        """Gathers parameters over `fsdp`, without a rule for their gradients.

        For programs that are not differentiated, such as evaluation.
        """
        specs = {path: gathered(spec) for path, spec in self.plan.state.items()}
        whole = sharding_tree("params", params, specs, self.mesh)
        return self._constrain(params, whole)

    def _constrain(self, values: Any, shardings: Any) -> Any:
        if self.mesh.size == 1:  # keeps results on one device bit for bit the same
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
        """Adds the plan's sharding constraints, gathers and remat blocks to a loss.

        Gathers are added with ZeRO level 3. Remat blocks are added for the plan's
        setting `remat`, and with ZeRO level 3, so that the backward pass gathers
        parameters again.

        Args:
            program: the traced loss, whose first arguments are the parameters.
            paths: the path of each parameter, in order.
        """
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
    """Returns the spec for each parameter's update: the spec of its optimizer state.

    A leaf of the optimizer state belongs to a parameter if it is floating-point, has
    the parameter's shape, and has the parameter's position in a subtree with the
    structure of `params`. The first such leaf, such as the first moment, gives the
    spec. Paths are not compared as text, because `mu/layer/w` also ends in the path of
    another parameter `w`. A parameter without such a leaf (masked, or with factored
    moments) keeps its own spec.

    Args:
        params: arrays or ShapeDtypeStructs.
        opt_state: the optimizer's state for `params`, arrays or ShapeDtypeStructs.
        of_params: map from the path of each parameter to its spec.
        of_optimizer: map from the path of each optimizer state leaf to its spec.

    In the example the leaf `1/w` of the optimizer state belongs to the parameter `w`:

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
    """Pairs the paths of a subtree of the optimizer state with parameters' paths.

    `node` is the subtree, with a path at each leaf; `names` is the tree of parameters,
    with a path at each leaf. Returns None if the subtree does not have the structure of
    the parameters. Leaves or subtrees that `optax.masked` left out do not count as a
    difference.
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
    """Returns the spec of each parameter's gradient during accumulation.

    A gradient with two or more dims has the spec of its update. The gradient of a
    vector is not divided over `fsdp`, because XLA would propagate the division to all
    arrays that the gradient is computed from, and then gather each of these arrays
    again. In a normalization layer these are all arrays with one number per channel.

    Args:
        updates: map from the path of each parameter to the spec of its update.

    >>> sum_specs({"w": (("fsdp",), ()), "scale": (("fsdp",),)})
    {'w': (('fsdp',), ()), 'scale': ((),)}
    """
    return {p: spec if len(spec) > 1 else gathered(spec) for p, spec in updates.items()}


State = Any
"""The state that a planned step takes and returns.

For a plan of a user's step (`plan.entry == "step"`) this is the user's own state, for a
plan of a loss (`"loss"`) it is `{"params": ..., "opt_state": ...}`.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """The step of a plan, compiled once for each structure, shape and dtype of inputs.

    Call `state = step.init(start)` first, then `state, result = step(state, batch)`.
    `start` is the parameters for a plan of `dtft.plan(loss=...)`, and the whole state
    for a plan of `dtft.plan(step=...)`.
    """

    plan: Plan
    """The plan that the step runs."""
    mesh: Mesh
    """The plan's mesh over the devices."""
    _begin: Callable[[Any], State] | None
    """Function from `start` to the state at step 0; None if `start` is the state."""
    _shardings: Callable[[State], Any]
    """Function from a state to a tree with a NamedSharding for each leaf."""
    _function: Callable[[State, Any], Step]
    """Function from a state and a batch (arrays or ShapeDtypeStructs) to the step that
    is jitted for their structure, shapes and dtypes."""
    _of_result: NamedSharding | None
    """Sharding of the step's second result; None leaves the choice to XLA."""
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, state: State, batch: Any) -> tuple[State, Any]:
        """Runs one step. `state` is donated, so it cannot be used afterwards.

        Returns:
            The new state, and the second result of the user's step. With a plan of
            `dtft.plan(loss=...)` the second result is what the loss returned, as a mean
            over the whole batch.

        Raises:
            ValueError: state or batch does not fit the plan, or the user's step would
                return a state of another tree, shape or dtype; the message names the
                path.
        """
        known = len(self._compiled)
        jitted = self._jitted(state, batch)
        if len(self._compiled) > known:
            state = self.place(state)
        return jitted(state, batch)

    step = __call__

    def init(self, start: Any) -> State:
        """Makes the state at step 0, sharded over the devices.

        `start` is the parameters, or the whole state if the plan was made by
        `dtft.plan(step=...)`. Parameters in `start` stay usable. If `start` is a whole
        state, its leaves that already have the plan's sharding are shared with the
        result, so the first step donates these leaves.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
        """
        if self._begin is None:
            return self.place(start)
        return jax.jit(self._begin, out_shardings=self.state_shardings(start))(start)

    def place(self, state: State) -> State:
        """Puts a state on the devices, with the plan's shardings.

        The state may be a restored checkpoint, for example. Leaves that already have
        the plan's sharding are shared with the result.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
        """
        return jax.device_put(state, self._shardings(state))

    def lower(self, start: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step, so that it can be compiled without being run.

        Args:
            start: the parameters, or the whole state if the plan was made by
                `dtft.plan(step=...)`; arrays or ShapeDtypeStructs.
            batch: arrays or ShapeDtypeStructs.
        """
        return self.trace(start, batch).lower()

    def trace(self, start: Any, batch: Any) -> jax.stages.Traced:
        """Traces the step without lowering it.

        The result can be lowered for a platform that this machine does not have.

        Args:
            start: the parameters, or the whole state if the plan was made by
                `dtft.plan(step=...)`; arrays or ShapeDtypeStructs.
            batch: arrays or ShapeDtypeStructs.
        """
        state, batch = self._abstract(start), jax.eval_shape(lambda it: it, batch)
        return self._jitted(state, batch).trace(state, batch)

    def state_shardings(self, start: Any) -> Any:
        """Returns a NamedSharding for every leaf of the state that `init(start)` makes.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
        """
        return self._shardings(self._abstract(start))

    def batch_shardings(self, batch: Any) -> Any:
        """Returns a NamedSharding for every leaf of a batch.

        Raises:
            ValueError: a leaf does not fit the plan; the message names its path.
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
    """Makes the training step that a plan of `dtft.plan(loss=...)` describes.

    Microbatches: each device cuts its own rows of the batch (dim 0 of every array) into
    equal parts. Loss, aux and gradients are means over the microbatches, weighted by
    `weight`. A loss that is a mean over rows needs no weight. A loss that is a mean
    over unmasked tokens needs the number of unmasked tokens as weight. Gradients are
    accumulated in their own dtype. With several microbatches, aux must consist of
    floating-point means over the batch.

    Rematerialization: the loss is cut into blocks, at points where few bytes pass from
    one block to the next. The backward pass recomputes results inside a block, as the
    plan's `remat` says.

    ZeRO: level 1 updates each parameter on the devices that hold its optimizer state.
    Level 2 also divides gradients in this way, but no gradient of a vector over `fsdp`.
    Level 3 gathers parameters over `fsdp` at each use, and gathers again in the
    backward pass, see `dtft.parallel.fsdp`.

    Args:
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`, a mean over the batch.
        optimizer: any optax transformation.
        plan: a plan for this loss, optimizer and these shapes.
        weight: `(batch) -> scalar`, the weight of a microbatch in the means. A
            microbatch of weight 0 does not count, also if its loss is NaN.
        devices: devices in mesh order; by default JAX's devices: in a single process
            the first ones that the plan uses, in several processes all.

    Returns:
        The step, which is compiled at the first call for each input shape.

    Raises:
        ValueError: the loss cannot be called, the optimizer is no optax transformation,
            or the plan is no Plan; or the plan was not made by `dtft.plan(loss=...)`,
            has a setting that cannot be run here, or needs another number of devices.
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
    """Jits a user's step with the shardings of a plan of `dtft.plan(step=...)`.

    State and batch get the plan's shardings. Values inside the step get the plan's
    sharding constraints. The results change only by rounding.

    Args:
        plan: a plan for this step and these shapes.
        step: `(state, batch) -> (state, anything)`; jitted or not.
        devices: devices in mesh order; by default JAX's devices: in a single process
            the first ones that the plan uses, in several processes all.

    Raises:
        ValueError: the plan is no Plan, the step cannot be called, or the plan was not
            made by `dtft.plan(step=...)`, has a setting that cannot be run here, or
            needs another number of devices.
    """
    check_plan(plan)
    check_function("step", step)
    mesh = mesh_of(plan.mesh, devices)
    check_runnable(plan, "step", mesh.devices.flat[0].platform)
    return _of_step(plan, mesh, step)


def step_of(
    plan: Plan, given: Mapping[str, Any], mesh: Any, platform: str
) -> tuple[PlannedStep, Any]:
    """Makes the step of a plan from the arguments of `dtft.plan`.

    Args:
        plan: a plan for these arguments.
        given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
            `optimizer`, `params`, `batch`.
        mesh: the plan's mesh; an AbstractMesh is enough for lowering.
        platform: JAX's name of the devices' platform.

    Returns:
        The step, and the argument of its `init`: the state or the parameters.

    Raises:
        ValueError: the plan was made for a loss and `given` has a step, or the reverse;
            or the plan cannot be run on the platform.
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
    """Wraps a loss, so that it returns its value and a dict: `{"aux": aux}` or `{}`."""

    def with_aux(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        result: Any = loss(params, batch)
        has_aux = isinstance(result, tuple) and len(result) == 2
        value, aux = cast(Any, result if has_aux else (result, None))
        return value, {"aux": aux} if has_aux else {}

    return with_aux
