"""A step whose operators run on several devices, each part where it was placed.

One process drives all devices, which may be of several types: the loss is cut into
segments, every segment and its backward pass is a compiled program on its device, what
others need is sent, and microbatches go through like through a pipeline. Decides where
arrays are before a step; the rest is decided in `placed_cut`, `placed_gradients`,
`placed_update` and `placed_order`. Must not know how operators were placed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtft.planner.jaxprs import traced
from dtft.train.accumulate import Weight
from dtft.train.placed_calls import Key, Transfer
from dtft.train.placed_cut import Cut, cut
from dtft.train.placed_feed import Feed, parts_of
from dtft.train.placed_gradients import Gradients, differentiated
from dtft.train.placed_hub import Hub
from dtft.train.placed_node import Node, Span
from dtft.train.placed_order import Order, order
from dtft.train.placed_timeline import Timeline
from dtft.train.placed_update import Updating, updating

State = dict[str, Any]
"""`{"params": ..., "opt_state": ...}`, every leaf on the device that updates it."""


def make_placed_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    nodes: Sequence[int],
    devices: Mapping[int, Any] | Sequence[Any],
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
        nodes: of each operator of `loss`, numbered as in `dtft.planner.jaxprs`.
        devices: of each node; nodes may share one.
        microbatches: parts of the batch that go through the nodes one after another.
        weight: `(batch) -> scalar`, what a part counts in means, such as its tokens.
        seconds: that each operator is expected to take; by default all are equal.
        deadline_s: after which a step that has not ended is given up.

    Raises:
        ValueError: nodes do not fit the loss or the devices, rows cannot be divided,
            or the loss has no gradient.
    """
    part = jax.eval_shape(lambda whole: parts_of(whole, microbatches)[0], batch)
    program, shape = traced(loss, params, part)
    has_aux = isinstance(shape, tuple) and len(shape) == 2
    at = dict(enumerate(devices)) if isinstance(devices, Sequence) else dict(devices)
    _check(nodes, at)
    divided = cut(program, nodes, seconds)
    count = len(jax.tree.leaves(params))
    gradients = differentiated(divided, count, microbatches)
    keys = [key for key, _ in gradients.gradients]
    like = jax.eval_shape(lambda tree: tree, params)
    update = updating(optimizer, like, keys, gradients.homes)
    each = [
        sum(seconds[n] for n in s.operators) if seconds else 1.0
        for s in divided.segments
    ]
    return PlacedStep(
        cut=divided,
        devices=at,
        microbatches=microbatches,
        order=order(gradients.calls.then(update.calls), microbatches, each),
        deadline_s=deadline_s,
        _gradients=gradients,
        _updating=update,
        _optimizer=optimizer,
        _weight=weight,
        _aux=jax.tree.structure(shape[1]) if has_aux else None,
        _nodes={node: Node(device) for node, device in at.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedStep:
    """First `state = placed.init(params)`, then `placed.step(state, batch)`."""

    cut: Cut
    """The loss in segments."""
    devices: Mapping[int, Any]
    """Of each node."""
    microbatches: int
    """Parts of a batch."""
    order: Order
    """What each node does, in order, with the starts that are expected."""
    deadline_s: float
    """How long a step may take, compiling included."""
    _gradients: Gradients
    _updating: Updating
    _optimizer: optax.GradientTransformation
    _weight: Weight | None
    _aux: Any
    _nodes: Mapping[int, Node]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What a step sends from node to node, by link and kind."""
        calls = self._gradients.calls.then(self._updating.calls)
        return calls.transfers(self.microbatches)

    def init(self, params: Any) -> State:
        """The state at step 0; `params` stay usable."""
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            opt_state = self._optimizer.init(params)
        nodes = [node for _, node in self._updating.state]
        return {
            "params": self._placed(params, self._gradients.homes),
            "opt_state": self._placed(opt_state, nodes),
        }

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """One optimizer step. `state` is donated: it cannot be used afterwards.

        Returns:
            The state, and what the loss returned, as a mean over the batch.

        Raises:
            ValueError: rows of the batch cannot be divided.
            TimeoutError: a node waited until the deadline; says for what.
        """
        after, value, _ = self._step(state, batch, measure=False)
        return after, value

    def measured(self, state: State, batch: Any) -> tuple[State, Any, Timeline]:
        """As `step`, each task done before the next begins on its node, and timed."""
        return self._step(state, batch, measure=True)

    def gradients(self, state: State, batch: Any) -> tuple[Any, Any]:
        """What the loss returned, and its gradients, each on its parameter's device.

        Raises:
            ValueError: as `step`.
            TimeoutError: as `step`.
        """
        wanted = [*self._gradients.results, *self._gradients.gradients]
        tasks = self.order.without(self._updating.calls)
        found, _ = self._run(tasks, state, batch, wanted, measure=False)
        count = len(self._gradients.results)
        gradients = _like(state["params"], found[count:])
        return self._value(found[:count]), gradients

    def _step(
        self, state: State, batch: Any, *, measure: bool
    ) -> tuple[State, Any, Timeline]:
        results, after = self._gradients.results, self._updating.after
        made = [(key, node) for key, node in after if key]
        found, spans = self._run(
            self.order, state, batch, [*results, *made], measure=measure
        )
        arrays = iter(found[len(results) :])
        leaves = [next(arrays) if key else jnp.asarray(it) for key, it in after]
        count = len(self._gradients.homes)
        new = {
            "params": _like(state["params"], leaves[:count]),
            "opt_state": _like(state["opt_state"], leaves[count:]),
        }
        timeline = Timeline(spans=tuple(spans), nodes=tuple(self.devices))
        return new, self._value(found[: len(results)]), timeline

    def _value(self, results: Sequence[Any]) -> Any:
        if self._aux is None:
            return results[0]
        return results[0], jax.tree.unflatten(self._aux, list(results[1:]))

    def _run(
        self,
        tasks: Order,
        state: State,
        batch: Any,
        wanted: Sequence[tuple[Key, int]],
        *,
        measure: bool,
    ) -> tuple[list[Any], list[Span]]:
        stores = self._stores(state, batch)
        spans = self._work(tasks, stores, wanted, measure=measure)
        return [stores[node][key] for key, node in wanted], spans

    def _work(
        self,
        tasks: Order,
        stores: dict[int, dict[Key, Any]],
        wanted: Sequence[tuple[Key, int]],
        *,
        measure: bool,
    ) -> list[Span]:
        """Makes all nodes do their tasks at the same time."""
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

    def _stores(self, state: State, batch: Any) -> dict[int, dict[Key, Any]]:
        """What is on each device when a step begins."""
        stores: dict[int, dict[Key, Any]] = {node: {} for node in self.devices}
        params = jax.tree.leaves(state["params"])
        for leaf, (key, node) in zip(params, self._gradients.gradients, strict=True):
            stores[node][Key("param", key.number)] = leaf
        leaves = jax.tree.leaves(state["opt_state"])
        for leaf, (key, node) in zip(leaves, self._updating.state, strict=True):
            stores[node][key] = leaf
        feed = self._feed(batch, len(params))
        given = [
            (*pair, node)
            for key, node in self._gradients.inputs
            for pair in feed.of(key)
        ]
        given += [(key, value, node) for key, node, value in self._updating.constants]
        for key, value, node in given:
            stores[node][key] = jax.device_put(value, self.devices[node])
        return stores

    def _feed(self, batch: Any, num_params: int) -> Feed:
        parts = parts_of(batch, self.microbatches)
        return Feed(
            cut=self.cut,
            batch=self.cut.arguments[num_params:],
            parts=parts,
            weights=[
                1.0 if self._weight is None else float(self._weight(p)) for p in parts
            ],
        )

    def _placed(self, values: Any, nodes: Sequence[int]) -> Any:
        """Copies on the devices of nodes, one per leaf; the step may donate them."""
        leaves = [jnp.array(leaf, copy=True) for leaf in jax.tree.leaves(values)]
        return _like(
            values,
            [
                jax.device_put(leaf, self.devices[node])
                for leaf, node in zip(leaves, nodes, strict=True)
            ],
        )


def _check(nodes: Sequence[int], devices: Mapping[int, Any]) -> None:
    missing = sorted(set(nodes) - set(devices))
    if missing:
        raise ValueError(
            f"nodes has node {missing[0]}, for which devices has no device. It has "
            f"nodes {sorted(devices)}: add one, or place operators on these only."
        )


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), list(leaves))
