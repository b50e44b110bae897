"""The state of a placed step: which arrays it has, and on whose device each of them is.

Decides what a step takes for its state, and refuses the rest by name. Must not know
what is computed, or how it came about which node updates what.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtft.checkpoint.state import to_paths
from dtft.train.plan_arguments import check_like

State = dict[str, Any]
"""`{"params": ..., "opt_state": ...}`, every leaf on the device that updates it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
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
    ) -> "Layout":
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
