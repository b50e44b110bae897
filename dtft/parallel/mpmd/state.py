"""The state of a placed step: which arrays it has, and on whose device each of them is.

Also what is put on each device before a step: the state, the parts of the batch, and
what each part counts.
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
"""`{"params": ..., "opt_state": ...}`, every leaf on the device that updates it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayout:
    """Where the leaves of a state are."""

    shapes: State
    homes: State
    """Number of the node of each leaf: it is updated there, and stays there."""
    devices: Mapping[int, Any]
    """Of each node."""

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
        """From shapes, and the node of each leaf of the two trees."""
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
        """Refuses what is not the state of such a step, wherever its arrays are.

        Raises:
            ValueError: no mapping of parameters and optimizer state; another tree,
                shape or dtype; arrays that a step was given already, or that are none.
                Names the path.
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
        """Refuses a state that another placement has on other devices.

        Args:
            state: as `check` lets pass.
            nodes: whose arrays are looked at.

        Raises:
            ValueError: names the path and both devices.
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
        """The same on the devices of nodes; a step may donate it."""

        def copy(leaf: Any, node: int) -> Any:
            return jax.device_put(jnp.array(leaf, copy=True), self.devices[node])

        return {
            name: jax.tree.map(copy, state[name], self.homes[name]) for name in state
        }


def check_values(name: str, arrays: Any) -> None:
    """Refuses shapes where arrays are needed.

    Raises:
        ValueError: names the path of the first.
    """
    for path, leaf in to_paths(arrays).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name} {path!r} is {leaf}, which has no values. Allowed: arrays. "
                "Shapes are enough for make_placed_step only."
            )


# What is on each device before a placed step, and what the state is after it.
#
# Puts the leaves of the state, the parts of the batch and what each part counts into
# the stores of nodes.


def parts_of(batch: Any, num_parts: int) -> list[Any]:
    """A batch in equal parts, rows in order; arrays without dims belong to each.

    Args:
        batch: arrays, or shapes, with rows in dim 0.
        num_parts: parts, which divide the rows.

    Raises:
        ValueError: names the array whose rows cannot be divided, or which has others
            than the rest; or no part is wanted.

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
    """The state and the batch of a placed step, as arrays in the stores of nodes."""

    cut: Cut
    gradients: Gradients
    updating: Updating
    devices: Mapping[int, Any]
    """Of each node."""
    num_parts: int
    """Microbatches."""
    weight: Callable[[Any], Any] | None
    """What a part counts; by default all are equal."""

    def stores(
        self, state: Any, batch: Any, nodes: Sequence[int]
    ) -> dict[int, dict[Key, Any]]:
        """What is on the devices of nodes when a step begins.

        Raises:
            ValueError: names the array whose rows cannot be divided; or parts whose
                weights have no mean.
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
        """The state after a step; what other nodes than these update is as before."""
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
    """The parts of one batch."""

    def __init__(self, feed: PlacedFeed, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._leaves = [jax.tree.leaves(part) for part in parts]
        self._weights = part_weights(feed.weight, parts)
        self._constants = feed.cut.constants
        numbers = feed.cut.arguments[len(feed.gradients.homes) :]
        self._place = {number: place for place, number in enumerate(numbers)}

    def of(self, key: Key) -> Iterator[tuple[Key, Any]]:
        """The arrays that a key of a call stands for: `EACH` is one per part."""
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
    """A tree of the same form with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), list(leaves))
