"""A training step whose operators run on several devices by a placement.

One process drives all devices, which may be of several types; `run_node` instead runs
one node in a process of its own. The loss is cut into segments. The forward and the
backward pass of a segment are compiled programs on the segment's device. Devices send
values that other devices read. Microbatches pass through the devices as in a pipeline.
`partition`, `autodiff`, `update` and `schedule` make the calls and their order; this
module puts these parts together and runs steps.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from dtft.parallel.grad_accumulation import Weight
from dtft.parallel.mpmd.arguments import check_given, check_weight, device_table
from dtft.parallel.mpmd.autodiff import differentiated
from dtft.parallel.mpmd.executor import Exchange, Hub, Node, Span, StepTimeline
from dtft.parallel.mpmd.partition import Cut, cut, predicted_starts, where
from dtft.parallel.mpmd.schedule import CallOrder, Key, NodeTransfer, Task, order
from dtft.parallel.mpmd.state import (
    PlacedFeed,
    PlacedLayout,
    State,
    check_values,
    like,
    parts_of,
)
from dtft.parallel.mpmd.update import updating
from dtft.parallel.planning import check_like
from dtft.placement import Placement
from dtft.planner.ir import traced


def make_placed_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    nodes: Sequence[int] | Placement,
    devices: Mapping[Any, Any] | Sequence[Any],
    microbatches: int = 1,
    weight: Weight | None = None,
    seconds: Sequence[float] | None = None,
    deadline_s: float = 600.0,
) -> "PlacedStep":
    """Makes the training step of a loss whose operators are assigned to nodes.

    Gradients and the results of the loss are means over microbatches, weighted by
    `weight`. They equal the gradients and results of the undivided step, up to
    rounding, if the weight is the number that the loss divides by, such as the number
    of tokens. A loss that is a mean over rows needs no weights. The optimizer may be
    any optax transformation of gradients, state and parameters, also one with norms
    over all gradients.

    Args:
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`, a mean over the batch.
        optimizer: an optax transformation.
        params: tree of arrays or ShapeDtypeStructs.
        batch: tree of arrays or ShapeDtypeStructs of a whole batch, with rows in dim 0.
        nodes: for each operator of `loss`, in the order of `dtft.planner.ir.operators`,
            the number of the node that runs the operator; or a placement of `loss` that
            `dtft.placement.place` made.
        devices: the JAX device of each node, by the node's number. With a placement
            also by the name, type or platform of a node. Nodes may share a device.
        microbatches: number of parts of the batch, which pass through the nodes one
            after another.
        weight: `(batch) -> scalar`, the weight of a microbatch in means, such as its
            number of tokens; None gives all microbatches the same weight. A microbatch
            of weight 0 does not count: the rows of another microbatch are computed in
            its place. A step raises ValueError if a weight is negative or not finite,
            or if all weights are 0.
        seconds: expected seconds of each operator's forward pass; by default the
            placement's seconds, or equal times for all segments.
        deadline_s: seconds after which a step that has not ended raises TimeoutError.

    Raises:
        ValueError: an argument has a value that is not allowed, nodes do not fit the
            loss or the devices, rows cannot be divided, or the loss has side effects or
            no gradient.
    """
    check_given(loss, optimizer, params, batch, microbatches)
    part = jax.eval_shape(lambda whole: parts_of(whole, microbatches)[0], batch)
    program, shape = traced(loss, params, part)
    has_aux = isinstance(shape, tuple) and len(shape) == 2
    if weight is not None:
        check_weight(weight, part)
    of_operator, at, seconds = where(
        nodes, device_table(devices), seconds, microbatches
    )
    divided = cut(program, of_operator, seconds)
    count = len(jax.tree.leaves(params))
    gradients = differentiated(divided, count, microbatches)
    keys = [key for key, _ in gradients.gradients]
    planned = jax.eval_shape(lambda *trees: trees, params, batch)
    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        opt_state = jax.eval_shape(optimizer.init, params)
    update = updating(optimizer, planned[0], keys, gradients.homes)
    each = [
        sum(seconds[n] for n in s.operators) if seconds is not None else 1.0
        for s in divided.segments
    ]
    return PlacedStep(
        cut=divided,
        devices=at,
        microbatches=microbatches,
        order=order(gradients.calls.then(update.calls), microbatches, each),
        deadline_s=deadline_s,
        _feed=PlacedFeed(
            cut=divided,
            gradients=gradients,
            updating=update,
            devices=at,
            num_parts=microbatches,
            weight=weight,
        ),
        _optimizer=optimizer,
        _layout=PlacedLayout.of(
            planned[0],
            opt_state,
            homes=gradients.homes,
            opt_homes=[node for _, node in update.state],
            devices=at,
        ),
        _batch=planned[1],
        _aux=jax.tree.structure(shape[1]) if has_aux else None,
        _nodes={node: Node(device) for node, device in at.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedStep:
    """A training step that runs on several devices by a placement.

    A step consists of tasks. A task is a program that one node runs, for one microbatch
    or once in a step.

    Call `state = placed.init(params)` first, then `placed.step(state, batch)`.
    """

    cut: Cut = field(repr=False)
    """The loss, cut into segments."""
    devices: Mapping[int, Any]
    """Map from a node's number to its device."""
    microbatches: int
    """Number of microbatches in a batch."""
    order: CallOrder = field(repr=False)
    """The tasks of each node (calls of programs, each for one microbatch) in order,
    with their expected start times."""
    deadline_s: float
    """Longest duration of a step in seconds, including compilation."""
    _feed: PlacedFeed = field(repr=False)
    _optimizer: optax.GradientTransformation = field(repr=False)
    _layout: PlacedLayout = field(repr=False)
    _batch: Any = field(repr=False)
    """Tree of ShapeDtypeStructs that every batch must match."""
    _aux: Any = field(repr=False)
    _nodes: Mapping[int, Node] = field(repr=False)

    @property
    def transfers(self) -> tuple[NodeTransfer, ...]:
        """Counts and bytes of the arrays that a step sends from node to node.

        There is an entry for each pair of nodes and each kind of array (`Key.kind`),
        such as `cotangent`.
        """
        calls = self._feed.gradients.calls.then(self._feed.updating.calls)
        return calls.transfers(self.microbatches)

    @property
    def homes(self) -> State:
        """The number of the node that stores and updates each leaf of the state.

        A tree like the state, with these numbers as leaves.
        """
        return self._layout.homes

    def predicted(self, placement: Placement) -> dict[Task, float]:
        """Returns the start times that a placement predicts, in seconds, by task.

        The tasks are forward and backward calls (programs on one node) for the first
        microbatch. Tasks without a predicted start are left out. `placement` is the
        placement by which this step was made.
        """
        active = self._feed.gradients.active
        return predicted_starts(placement, self.cut, self.order, active)

    def init(self, params: Any) -> State:
        """Makes the state at step 0 on the nodes' devices; `params` stay usable.

        Raises:
            ValueError: the tree, a shape or a dtype is not the planned one, or a leaf
                is a ShapeDtypeStruct; the message names the path.
        """
        check_values("params", params)
        check_like("params", params, self._layout.shapes["params"])
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            opt_state = self._optimizer.init(params)
        return self._layout.copied({"params": params, "opt_state": opt_state})

    def moved(self, state: State) -> State:
        """Copies a state of another placed step to the devices of this step.

        A run can change its placement in this way. Both placed steps must have the same
        loss and optimizer.

        Raises:
            ValueError: `state` has another tree, shape or dtype than planned, a leaf is
                a ShapeDtypeStruct, or `state` was donated to a step.
        """
        self._layout.check(state)
        return self._layout.copied(state)

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Runs an optimizer step. `state` is donated, so it cannot be used afterwards.

        Returns:
            The new state, and the results of the loss, as means over the batch.

        Raises:
            ValueError: state or batch has another tree, shape (rows too) or dtype than
                planned, or a leaf that is a ShapeDtypeStruct; the state was donated
                before, or is on the devices of another placement; or the weight of a
                microbatch in the means is negative or not finite, or all are 0.
            TimeoutError: a node waited for an array until the deadline (the message
                names the array), or a node still computed 5 s after the deadline.
        """
        after, value, _ = self._step(state, batch, measure=False)
        return after, value

    def measured(self, state: State, batch: Any) -> tuple[State, Any, StepTimeline]:
        """Runs a step as `step` does, and times its tasks.

        On each node a task ends before the next task begins, so the step takes longer
        than with `step`. Returns the new state, the results of the loss, and the
        timeline.
        """
        return self._step(state, batch, measure=True)

    def gradients(self, state: State, batch: Any) -> tuple[Any, Any]:
        """Computes the results of the loss and the gradients, without an update.

        Each gradient is on the device of its parameter. `state` stays usable.

        Returns:
            The results of the loss, as means over the batch, and the tree of gradients.

        Raises:
            ValueError: state or batch has another tree, shape or dtype than planned,
                the state was donated or is on other devices, or the weight of
                a microbatch in the means is negative or not finite, or all are 0.
            TimeoutError: a node waited for an array until the deadline, or still
                computed 5 s after the deadline.
        """
        made = self._feed.gradients.gradients
        tasks = self.order.without(self._feed.updating.calls)
        stores = self._stores(state, batch, list(self.devices))
        self._work(tasks, stores, made, measure=False)
        gradients = [stores[node][key] for key, node in made]
        return self._value(stores), like(state["params"], gradients)

    def run_node(
        self, node: int, state: State, batch: Any, exchange: Exchange
    ) -> tuple[State, list[Span]]:
        """Runs and times one node's tasks of a step.

        For a process that has only this node; other processes run the other nodes.

        Args:
            node: number of the node.
            state: a state from `init` or a step. This node's leaves are donated. The
                values of other nodes' leaves are not read.
            batch: the whole batch.
            exchange: sends arrays to and receives arrays from other nodes' processes.

        Returns:
            The state, in which this node's leaves are updated, and the times of the
            tasks. What the loss returns is left out.

        Raises:
            ValueError: state or batch has another tree, shape or dtype than planned,
                the state was donated or is on another device, or the weight of
                a microbatch in the means is negative or not finite, or all are 0.
            TimeoutError: the node waited for an array until the deadline; the message
                names the array.
        """
        made = (*self._feed.gradients.results, *self._feed.updating.after)
        began = time.monotonic()
        stores = self._stores(state, batch, [node])
        spans = self._nodes[node].run(
            self.order.by_node.get(node, ()),
            stores[node],
            exchange,
            began + self.deadline_s,
            wanted=[key for key, at in made if key and at == node],
            began=began,
        )
        return self._feed.state(state, stores), spans

    def _step(
        self, state: State, batch: Any, *, measure: bool
    ) -> tuple[State, Any, StepTimeline]:
        stores = self._stores(state, batch, list(self.devices))
        made = [(key, node) for key, node in self._feed.updating.after if key]
        spans = self._work(self.order, stores, made, measure=measure)
        timeline = StepTimeline(spans=tuple(spans), nodes=tuple(self.devices))
        return self._feed.state(state, stores), self._value(stores), timeline

    def _stores(
        self, state: State, batch: Any, nodes: Sequence[int]
    ) -> dict[int, dict[Key, Any]]:
        """Checks state and batch; returns the arrays with which `nodes` begin a step.

        The result maps a node to a dict from an array's name (`Key`) to the array.

        Raises:
            ValueError: state or batch has another tree, shape or dtype than planned,
                the state was donated or is on other devices, or the weight of
                a microbatch in the means is negative or not finite, or all are 0.
        """
        self._layout.check(state)
        self._layout.check_here(state, nodes)
        check_like("batch", batch, self._batch)
        check_values("batch", batch)
        return self._feed.stores(state, batch, nodes)

    def _value(self, stores: Mapping[int, Mapping[Key, Any]]) -> Any:
        """Collects the results of the loss from the nodes' arrays.

        `stores` maps a node to its arrays by name, as after `_work`. Returns what the
        loss returns: a scalar, or a scalar and auxiliary values.
        """
        found = [stores[node][key] for key, node in self._feed.gradients.results]
        if self._aux is None:
            return found[0]
        return found[0], jax.tree.unflatten(self._aux, found[1:])

    def _work(
        self,
        tasks: CallOrder,
        stores: dict[int, dict[Key, Any]],
        made: Sequence[tuple[Key, int]],
        *,
        measure: bool,
    ) -> list[Span]:
        """Runs the tasks of all nodes at the same time; returns their measured times.

        Args:
            tasks: the tasks of each node, in order.
            stores: map from a node to its arrays by name. Afterwards it has the results
                of the loss and the arrays of `made`.
            made: name and node of further arrays that are kept.
            measure: whether tasks are timed; if not, the result is empty.

        Raises:
            TimeoutError: a node waited for an array until the deadline, or still
                computed 5 s after the deadline.
        """
        wanted = [*self._feed.gradients.results, *made]
        kept = {node: [k for k, at in wanted if at == node] for node in self.devices}
        hub = Hub(self.devices)
        began = time.monotonic()
        deadline = began + self.deadline_s

        def work(number: int) -> list[Span]:
            return self._nodes[number].run(
                tasks.by_node.get(number, ()),
                stores[number],
                hub.exchange(number),
                deadline,
                wanted=kept[number],
                began=began if measure else None,
            )

        return hub.all(work, deadline)
