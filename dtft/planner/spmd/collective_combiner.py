"""Models XLA's collective combiner, which merges independent collectives.

XLA combines collectives that are of one kind, run among the same devices and do not
depend on each other. Examples are the all-reduces of all gradients of a loop's body (or
outside of loops), and the all-gathers after an update. Collectives that are sent as one
message have the latency of a single collective.

Observed with jax 0.10.2: the GPU compiler combines all-reduces, all-gathers and
reduce-scatters up to 30 MiB. The CPU compiler combines all-reduces too, but its runtime
sends each array separately (`AllReduceThunk` of XLA). So on CPU, combining saves only
synchronization: devices wait for each other once for all of the arrays
(`Link.meeting`). Collectives in a chain of dependencies, such as the sums of
activations, are never combined.
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
"""Largest bytes of a combined collective, by platform and kind of collective.

A platform that is not listed has the limits of a GPU. A kind that is not listed for its
platform is not sent as one message.
"""
_TOGETHER: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_ACCELERATOR: Mapping[CollectiveKind, float] = dict.fromkeys(_TOGETHER, 30 * 2.0**20)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Collectives that XLA sends as one message, or that share one synchronization.

    Each collective has a bundle. On a mesh, XLA combines the collectives whose bundles
    are equal, after axes of size one are left out.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    times: float
    """How often the bundle is sent: per microbatch if `repeated`, else per step."""
    repeated: bool
    """Whether `times` counts per microbatch (else per step)."""
    place: Hashable
    """The place in the program, such as the loops around the collectives; only
    collectives with equal places are combined."""
    is_one: bool = True
    """Whether the bundle is sent as one message (several, if it is larger than
    `LIMITS`); otherwise its arrays are sent one after another."""
    ahead: bool = False
    """Whether the bundle depends on no computation, so that devices do not wait for
    each other."""

    def on(self, sizes: Sizes) -> "Bundle":
        """Returns the bundle as it is on a mesh, to compare it with other bundles.

        Leaves out axes of size one. If there is only one microbatch, being sent per
        microbatch becomes being sent per step (`repeated` is false). XLA combines two
        bundles on the mesh if their results are equal.

        Args:
            sizes: map from an axis to its size; also has the number of microbatches
                (`MICRO`). A missing axis has size one.
        """
        axes = tuple(axis for axis in self.axes if sizes.get(axis, 1) > 1)
        repeated = self.repeated and sizes.get(MICRO, 1) > 1
        return replace(self, axes=axes, repeated=repeated)

    def joins(self, other: "Bundle") -> bool:
        """Returns whether XLA may combine two bundles on some mesh.

        Returns True if both have the same kind of collective, are at the same place in
        the program (`place`), and are sent equally often (`times`). XLA combines them
        on meshes on which the axes larger than one are the same, too.
        """
        alike = self.kind, self.place, self.times
        return alike == (other.kind, other.place, other.times)


def bundle(
    platform: str, sent: CollectiveOp, times: float, repeated: bool, place: Hashable
) -> Bundle | None:
    """Makes the bundle that a collective belongs to.

    XLA combines the collectives whose bundles are equal, after axes of size one are
    left out. Returns None for a kind of collective that XLA never combines.

    Args:
        platform: the platform of the devices, such as `cpu` or `cuda`.
        sent: the collective.
        times: how often it is sent: per microbatch if `repeated`, else per step.
        repeated: whether it is sent for each microbatch.
        place: the place in the program, such as the loops around the collective; only
            collectives with equal places are combined.
    """
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
    """Computes the number of messages in which combined collectives are sent.

    Args:
        platform: the platform of the devices, such as `cuda`.
        kind: the kind of the collectives, one that XLA sends as one message on this
            platform; others, such as all kinds on CPU, raise a KeyError.
        num_bytes: bytes of all the collectives together; a number or an array.

    Returns:
        The bytes divided by the limit of a message (30 MiB, `LIMITS`), rounded up; 1
        or more.

    >>> messages("cuda", "all_reduce", np.array([1e6, 40e6])).tolist()
    [1.0, 2.0]
    """
    limit = LIMITS.get(platform, _ACCELERATOR)[kind]
    return np.maximum(1.0, np.ceil(np.asarray(num_bytes) / limit))
