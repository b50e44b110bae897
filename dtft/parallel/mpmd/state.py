"""The state of a placed step: its arrays, and the device of each array.

A placed step (`PlacedStep`) is a training step whose operators run on several nodes. A
node is a thread or a process with one device. This module also puts the inputs of a
step on the devices: the state, the microbatches, and their weights.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtft.checkpoint.state import to_paths
from dtft.parallel.grad_accumulation import check_rows
from dtft.parallel.mpmd.arguments import part_weights
from dtft.parallel.mpmd.autodiff import Gradients
from dtft.parallel.mpmd.partition import Cut
from dtft.parallel.mpmd.schedule import EACH, Key
from dtft.parallel.mpmd.update import Updating
from dtft.parallel.planning import check_like

State = dict[str, Any]
"""`{"params": ..., "opt_state": ...}`, with each leaf on the device of its node."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayout:
    """The shape, dtype and node of each leaf of a state."""

    shapes: State
    homes: State
    """For each leaf the number of the node that stores and updates the leaf."""
    devices: Mapping[int, Any]
    """Map from a node's number to its device."""

    @classmethod
    def of(
        cls,
        params: Any,
        opt_state: Any,
        *,
        homes: Sequence[int],
        opt_homes: Sequence[int],
        devices: Mapping[int, Any],
    ) -> "PlacedLayout":
        """Makes a layout from the shapes and the nodes of all leaves.

        Args:
            params: the parameters, as a tree of ShapeDtypeStructs.
            opt_state: the optimizer state, as a tree of ShapeDtypeStructs.
            homes: for each leaf of `params` the number of its node.
            opt_homes: for each leaf of `opt_state` the number of its node.
            devices: map from a node's number to its device.
        """
        return cls(
            shapes={"params": params, "opt_state": opt_state},
            homes={
                "params": jax.tree.unflatten(jax.tree.structure(params), homes),
                "opt_state": jax.tree.unflatten(
                    jax.tree.structure(opt_state), opt_homes
                ),
            },
            devices=devices,
        )

    def check(self, state: Any) -> None:
        """Checks the structure of a state, but not the devices of its arrays.

        Raises:
            ValueError: the state is no mapping of parameters and optimizer state; its
                tree, a shape or a dtype is not the layout's; a leaf is a
                ShapeDtypeStruct; or an array was donated to a step. If a leaf is wrong,
                the message names its path.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.shapes):
            has = f" of {list(state)!r:.60}" if isinstance(state, Mapping) else ""
            raise ValueError(
                f"state is a {type(state).__name__}{has}. Allowed: what init, moved or "
                f"a step returned, a dict of {' and '.join(self.shapes)}; init(params) "
                "makes one."
            )
        check_like("state", dict(state), self.shapes)
        check_values("state", dict(state))
        for path, leaf in to_paths(dict(state)).items():
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"state {path!r} was given to a step already, which has used its "
                    "memory. Go on with the state that the step returned; what is "
                    "needed for longer is copied before: moved(state)."
                )

    def check_here(self, state: State, nodes: Collection[int]) -> None:
        """Checks that the arrays of a state are on the devices of their nodes.

        Arrays that are not committed to a device are allowed everywhere.

        Args:
            state: a state that passes `check`.
            nodes: numbers of the nodes whose arrays are checked.

        Raises:
            ValueError: an array is on another device; the message names the path and
                both devices.
        """
        homes = to_paths(self.homes)
        for path, leaf in to_paths(dict(state)).items():
            node = homes[path]
            if node not in nodes or not isinstance(leaf, jax.Array):
                continue
            if leaf.committed and leaf.devices() != {self.devices[node]}:
                found = ", ".join(sorted(map(str, leaf.devices())))
                raise ValueError(
                    f"state {path!r} is on {found}, planned was {self.devices[node]}, "
                    f"the device of node {node}. Allowed: what init, moved or step of "
                    "this placed step returned; moved(state) takes over another one's."
                )

    def copied(self, state: State) -> State:
        """Copies a state to the devices of its nodes; a step can donate the copy."""

        def copy(leaf: Any, node: int) -> Any:
            return jax.device_put(jnp.array(leaf, copy=True), self.devices[node])

        return {
            name: jax.tree.map(copy, state[name], self.homes[name]) for name in state
        }


def check_values(name: str, arrays: Any) -> None:
    """Checks that no leaf of a tree is a ShapeDtypeStruct.

    Raises:
        ValueError: a leaf is a ShapeDtypeStruct; the message has `name`, the name of
            the tree, and the path of the first such leaf.
    """
    for path, leaf in to_paths(arrays).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name} {path!r} is {leaf}, which has no values. Allowed: arrays. "
                "Shapes are enough for make_placed_step only."
            )


# Inputs and results of a placed step. A node's store is a dict from the key of an array
# to the array on the node's device. Before a step the stores get the leaves of the
# state, the microbatches and their weights.


def parts_of(batch: Any, num_parts: int) -> list[Any]:
    """Divides a batch into equal parts of consecutive rows.

    Arrays without dims are in every part.

    Args:
        batch: tree of arrays with rows in dim 0.
        num_parts: number of parts.

    Raises:
        ValueError: `num_parts` is below 1, or does not divide the rows of an array (the
            message names the array), or two arrays have different numbers of rows (the
            message names both).

    >>> [part["x"].tolist() for part in parts_of({"x": np.arange(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    if num_parts < 1:
        raise ValueError(f"microbatches={num_parts} is not positive. Give 1 or more.")
    check_rows(batch, num_parts)
    for path, leaf in to_paths(batch).items():
        if np.ndim(leaf) and np.shape(leaf)[0] % num_parts:
            raise ValueError(
                f"microbatches={num_parts}: batch {path!r} has {np.shape(leaf)[0]} "
                f"rows. Use a batch whose rows are a multiple of {num_parts}."
            )

    def part(leaf: Any, index: int) -> Any:
        if not np.ndim(leaf):
            return leaf
        rows = np.shape(leaf)[0] // num_parts
        return leaf[index * rows : (index + 1) * rows]

    return [
        jax.tree.map(lambda leaf, j=j: part(leaf, j), batch) for j in range(num_parts)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedFeed:
    """Puts state and batch into the stores of nodes, and reads the new state.

    The store of a node is a dict from a `Key` to the array on the node's device.
    """

    cut: Cut
    gradients: Gradients
    updating: Updating
    devices: Mapping[int, Any]
    """Map from a node's number to its device."""
    num_parts: int
    """Number of microbatches."""
    weight: Callable[[Any], Any] | None
    """Function from a microbatch to its weight; None gives all microbatches the same
    weight."""

    def stores(
        self, state: Any, batch: Any, nodes: Sequence[int]
    ) -> dict[int, dict[Key, Any]]:
        """Returns the arrays with which nodes begin a step.

        The arrays are the state, the microbatches, their weights, and constants.

        Args:
            state: the state before the step.
            batch: the whole batch.
            nodes: numbers of the nodes whose arrays are returned.

        Returns:
            Map from a node to its store, a dict from an array's name to the array.

        Raises:
            ValueError: rows cannot be divided, a weight of a microbatch is no scalar,
                negative or not finite, or all weights are 0.
        """
        stores: dict[int, dict[Key, Any]] = {node: {} for node in self.devices}
        params = jax.tree.leaves(state["params"])
        for leaf, (key, node) in zip(params, self.gradients.gradients, strict=True):
            stores[node][Key("param", key.number)] = leaf
        leaves = jax.tree.leaves(state["opt_state"])
        for leaf, (key, node) in zip(leaves, self.updating.state, strict=True):
            stores[node][key] = leaf
        parts = _Parts(self, parts_of(batch, self.num_parts))
        given = [
            (at, *one) for key, at in self.gradients.inputs for one in parts.of(key)
        ]
        given += [(node, key, value) for key, node, value in self.updating.constants]
        for node, key, value in given:
            if node in nodes:
                stores[node][key] = jax.device_put(value, self.devices[node])
        return {node: stores[node] for node in nodes}

    def state(self, before: Any, stores: Mapping[int, Mapping[Key, Any]]) -> Any:
        """Reads the state after a step from the stores of nodes.

        `before` is the state before the step. `stores` maps a node to a dict from an
        array's name to the array. A leaf keeps its old array if its node has no store
        in `stores`. A leaf that the optimizer sets to a constant gets a new array with
        this constant.
        """
        old = [
            *jax.tree.leaves(before["params"]),
            *jax.tree.leaves(before["opt_state"]),
        ]
        leaves: list[Any] = []
        for leaf, (key, at) in zip(old, self.updating.after, strict=True):
            if key is None:
                leaves.append(jnp.asarray(at))
            else:
                leaves.append(stores[at][key] if at in stores else leaf)
        count = len(self.gradients.homes)
        return {
            "params": like(before["params"], leaves[:count]),
            "opt_state": like(before["opt_state"], leaves[count:]),
        }


class _Parts:
    """The microbatches of one batch, with their weights.

    A microbatch of weight 0 has the rows of the microbatch with the largest weight. Its
    own rows may give NaN, which a weight of 0 would not remove.
    """

    def __init__(self, feed: PlacedFeed, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._weights = part_weights(feed.weight, parts)
        leaves = [jax.tree.leaves(part) for part in parts]
        heaviest = leaves[self._weights.index(max(self._weights))]
        self._leaves = [
            own if weight else heaviest
            for own, weight in zip(leaves, self._weights, strict=True)
        ]
        self._constants = feed.cut.constants
        numbers = feed.cut.arguments[len(feed.gradients.homes) :]
        self._place = {number: place for place, number in enumerate(numbers)}

    def of(self, key: Key) -> Iterator[tuple[Key, Any]]:
        """Yields names and arrays of an input of a step, such as an array of the batch.

        `key` is the name of the input. A name with the placeholder `EACH` as its
        microbatch gives a pair for each microbatch, another name gives one pair.
        """
        every = key.microbatch == EACH
        for at in range(len(self._parts)) if every else [key.microbatch]:
            yield key._replace(microbatch=at), self._value(key, at)

    def _value(self, key: Key, at: int | None) -> Any:
        if key.kind == "constant":
            return self._constants[key.number]
        if key.kind == "total":
            return np.float32(sum(self._weights))
        assert at is not None
        if key.kind == "weight":
            return np.float32(self._weights[at])
        return self._leaves[at][self._place[key.number]]


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """Makes a tree with the structure of `tree` and the given leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), list(leaves))
