"""A step whose operators run on several devices, each part where it was placed.

One process drives all devices, which may be of several types: the loss is cut into
segments, every segment and its backward pass is a compiled program on its device, what
others need is sent, and microbatches go through like through a pipeline. Decides where
arrays are before a step; the rest is decided in `partition`, `autodiff`,
`update` and `schedule`.
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
    """The training step of a loss whose operators have nodes.

    Gradients, and what the loss returns, are means over microbatches, weighted by
    `weight`; in exact arithmetic they are those of the undivided step. The optimizer
    may be any optax transformation of gradients, state and parameters: norms over all
    gradients, too.

    Args:
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`, a mean over the batch.
        optimizer: an optax transformation.
        params: arrays or shapes.
        batch: arrays or shapes of a whole batch, rows in dim 0.
        nodes: of each operator of `loss`, numbered as in `dtft.planner.ir.jaxprs`; or a
            placement of it (`dtft.placement.place`).
        devices: of each node, by number, or of a placement's by name, type or
            platform, as pins of `place` name them; nodes may share one.
        microbatches: parts of the batch that go through the nodes one after another.
        weight: `(batch) -> scalar`, what a part counts in means, such as its tokens;
            a step refuses a batch whose parts all count 0.
        seconds: that each operator is expected to take; by default what the placement
            says, or all segments are equal.
        deadline_s: after which a step that has not ended is given up.

    Raises:
        ValueError: an argument is something else than it may be, nodes do not fit the
            loss or the devices, rows cannot be divided, or the loss has no gradient.
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
    """First `state = placed.init(params)`, then `placed.step(state, batch)`."""

    cut: Cut = field(repr=False)
    """The loss in segments."""
    devices: Mapping[int, Any]
    """Of each node."""
    microbatches: int
    """Parts of a batch."""
    order: CallOrder = field(repr=False)
    """What each node does, in order, with the starts that are expected."""
    deadline_s: float
    """How long a step may take, compiling included."""
    _feed: PlacedFeed = field(repr=False)
    _optimizer: optax.GradientTransformation = field(repr=False)
    _layout: PlacedLayout = field(repr=False)
    _batch: Any = field(repr=False)
    """Shapes."""
    _aux: Any = field(repr=False)
    _nodes: Mapping[int, Node] = field(repr=False)

    @property
    def transfers(self) -> tuple[NodeTransfer, ...]:
        """What a step sends from node to node, by link and kind."""
        calls = self._feed.gradients.calls.then(self._feed.updating.calls)
        return calls.transfers(self.microbatches)

    @property
    def homes(self) -> State:
        """The node of each leaf of the state: it is updated there, and stays there."""
        return self._layout.homes

    def predicted(self, placement: Placement) -> dict[Task, float]:
        """When a placement lets tasks of the first microbatch begin, in seconds."""
        active = self._feed.gradients.active
        return predicted_starts(placement, self.cut, self.order, active)

    def init(self, params: Any) -> State:
        """The state at step 0; `params` stay usable.

        Raises:
            ValueError: another tree, shape or dtype than planned, or shapes without
                values; names the path.
        """
        check_values("params", params)
        check_like("params", params, self._layout.shapes["params"])
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            opt_state = self._optimizer.init(params)
        return self._layout.copied({"params": params, "opt_state": opt_state})

    def moved(self, state: State) -> State:
        """The state of another placement of the loss, copied to where this one has it.

        So a new placement takes over in mid-run; both must have the same optimizer.

        Raises:
            ValueError: no such state, or one with other arrays than planned; names the
                path.
        """
        self._layout.check(state)
        return self._layout.copied(state)

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """One optimizer step. `state` is donated: it cannot be used afterwards.

        Returns:
            The state, and what the loss returned, as a mean over the batch.

        Raises:
            ValueError: state or batch has another tree, shape (rows too) or dtype than
                planned; or the state was donated, or is where another placement has
                it. Names the path.
            TimeoutError: a node waited until the deadline; says for what.
        """
        after, value, _ = self._step(state, batch, measure=False)
        return after, value

    def measured(self, state: State, batch: Any) -> tuple[State, Any, StepTimeline]:
        """As `step`, each task done before the next begins on its node, and timed."""
        return self._step(state, batch, measure=True)

    def gradients(self, state: State, batch: Any) -> tuple[Any, Any]:
        """What the loss returned, and its gradients, each on its parameter's device.

        Raises:
            ValueError: as `step`.
            TimeoutError: as `step`.
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
        """One node's part of a step, for a process that is this node; timed.

        Args:
            node: which one.
            state: as of `init`; what other nodes update is not read.
            batch: the whole batch.
            exchange: with the processes of other nodes.

        Returns:
            The state, new where this node updates it, and what was done when. The loss
            is in no state: the node that computes it sends it to nobody.

        Raises:
            ValueError: as `step`.
            TimeoutError: as `step`.
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
        """What nodes begin with, once state and batch are seen to be as planned."""
        self._layout.check(state)
        self._layout.check_here(state, nodes)
        check_like("batch", batch, self._batch)
        check_values("batch", batch)
        return self._feed.stores(state, batch, nodes)

    def _value(self, stores: Mapping[int, Mapping[Key, Any]]) -> Any:
        """What the loss returns."""
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
        """Makes all nodes do their tasks at the same time; keeps what is made."""
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
