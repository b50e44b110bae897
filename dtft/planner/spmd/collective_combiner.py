"""Which collectives go together: like ones that nothing waits for.

XLA joins collectives of one kind among the same devices that do not need each other:
the sums of all gradients of a loop's body (or outside of loops), and the arrays that
are gathered behind an update. Their latency then counts once. Seen with jax 0.10.2: the
GPU compiler joins all-reduces, all-gathers and reduce-scatters up to 30 MiB. The CPU
compiler joins all-reduces too, but its runtime then sends each array by itself
(`AllReduceThunk` of XLA), so that all that is saved is that devices meet once for all
of them (`Link.meeting`). What waits in a chain, such as the sums of activations, is
never joined.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtft.planner.cluster import CollectiveKind
from dtft.planner.spmd.partitioner import MICRO, CollectiveOp, Sizes

LIMITS: Mapping[str, Mapping[CollectiveKind, float]] = {
    "cpu": {},
}
"""Platform to kind to the most bytes of what is joined; others are as a GPU."""
_TOGETHER: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_ACCELERATOR: Mapping[CollectiveKind, float] = dict.fromkeys(_TOGETHER, 30 * 2.0**20)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What goes together."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    times: float
    """How often it is sent, in a step or for each microbatch."""
    repeated: bool
    """Whether for each microbatch."""
    place: Hashable
    """Where in the program: nothing is joined across loops."""
    is_one: bool = True
    """Whether it is sent as one; otherwise array by array, one right behind another."""
    ahead: bool = False
    """Whether it waits for nothing that is computed: devices need not meet for it."""

    def on(self, sizes: Sizes) -> "Bundle":
        """The same on one mesh, without what has one part: what is equal, is one."""
        axes = tuple(axis for axis in self.axes if sizes.get(axis, 1) > 1)
        repeated = self.repeated and sizes.get(MICRO, 1) > 1
        return replace(self, axes=axes, repeated=repeated)

    def joins(self, other: "Bundle") -> bool:
        """Whether both are one where they are among the same devices."""
        alike = self.kind, self.place, self.times
        return alike == (other.kind, other.place, other.times)


def bundle(
    platform: str, sent: CollectiveOp, times: float, repeated: bool, place: Hashable
) -> Bundle | None:
    """Where a collective that nothing waits for belongs; None if it stays alone."""
    if sent.kind not in _TOGETHER:
        return None
    return Bundle(
        kind=sent.kind,
        axes=sent.axes,
        times=times,
        repeated=repeated,
        place=place,
        is_one=sent.kind in LIMITS.get(platform, _ACCELERATOR),
    )


def messages(platform: str, kind: CollectiveKind, num_bytes: Any) -> Any:
    """In how many messages joined collectives are sent.

    Args:
        platform: of the devices.
        kind: of the collectives.
        num_bytes: of all of them together; a number or an array of them.

    >>> messages("cuda", "all_reduce", np.array([1e6, 40e6])).tolist()
    [1.0, 2.0]
    """
    limit = LIMITS.get(platform, _ACCELERATOR)[kind]
    return np.maximum(1.0, np.ceil(np.asarray(num_bytes) / limit))
