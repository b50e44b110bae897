"""Computes the seconds of a step from base seconds and scalars that multiply them.

`StepCost` has the base seconds of candidates: the seconds by the catalog's figures of
devices and links. Stages of a pipeline with equal work are one kind of stage; some of
the seconds are for one microbatch on each kind, the others for a whole step. `Scales`
has the scalars, one per kind of work or link. The scalars are fitted to measured steps,
and a fit computes the base seconds of each step only once. `pipeline` computes the base
seconds from the prices of operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from dtft.planner.cluster import LinkKind
from dtft.planner.cost import pipeline_s


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors (scalars) on the catalog's seconds, one per kind of work or link."""

    matmul: float = 1.0
    """Factor on matmuls, convolutions and kernels, beside peak, efficiency and shape
    factor of the device."""
    memory: float = 1.0
    """Factor on seconds of bytes through device memory."""
    launch: float = 1.0
    """Factor on kernel launches. It is far above 1 in eager programs: the catalog has
    the launch time of the device, and a host that runs Python between layers is
    slower."""
    fast_link: float = 1.0
    """Factor on collectives that use no InfiniBand or Ethernet, such as those inside a
    host."""
    network: float = 1.0
    """Factor on collectives that use InfiniBand or Ethernet, as between hosts; other
    jobs use the network too."""
    next_stage: float = 1.0
    """Factor on sends to the next pipeline stage, inside or between hosts."""

    def vector(self) -> np.ndarray:
        """Returns the scalars as an array, in the order of the fields."""
        return np.array(astuple(self))

    @classmethod
    def of(cls, values: np.ndarray) -> "Scales":
        """Makes the scalars from an array in the order of the fields.

        >>> Scales.of(Scales(launch=3.0).vector()).launch
        3.0
        """
        return cls(**dict(zip(cls.names(), map(float, values), strict=True)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the fields, in the order of `vector`."""
        return tuple(field.name for field in fields(cls))


NETWORKS: tuple[LinkKind, ...] = ("InfiniBand", "Ethernet")
"""Kinds of links that are networks: `Scales.network` multiplies the seconds of their
collectives, and `Scales.fast_link` those of all other links."""
_SCALE = {name: number for number, name in enumerate(Scales.names())}
_NEAR, _FAR = "fast_link", "network"
STAGE_SCALES = ("matmul", "memory", "launch", _NEAR, _FAR, "next_stage")
"""Columns of `StepCost.stages`, each named as the scalar that multiplies it."""
LINK_SCALES = (_NEAR, _FAR)
"""Columns of `StepCost.behind` and `StepCost.state`, each named as the scalar that
multiplies it."""
STEP_TERMS = (
    "matmul", "elementwise", "launch", "tensor", "pipeline", "data", "optimizer",
    "bubble",
)  # fmt: skip
"""Terms of a step: matmuls, convolutions and kernels; bytes through memory; kernel
launches; collectives of activations; sends to the next stage and back; collectives of
gradients and parameters; the optimizer update; and waiting for other stages."""
COLLECTIVE_TERMS = ("tensor", "pipeline", "data")
"""The terms of `STEP_TERMS` that are seconds of collectives; a prediction has one
relative error for their sum, and one for the sum of all other terms."""


def terms_of_accuracy(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Sums the terms of a step into `compute` and `collectives`.

    The terms `tensor`, `pipeline` and `data` are collectives, all others count as
    compute. A prediction has one relative error for each of these two sums.

    Args:
        terms: map from a term to its seconds, a number or an array.

    >>> terms_of_accuracy({"matmul": 3.0, "data": 0.5, "bubble": 1.0})
    {'compute': 4.0, 'collectives': 0.5}
    """
    found: dict[str, Any] = {"compute": 0.0, "collectives": 0.0}
    for name, seconds in terms.items():
        key = "collectives" if name in COLLECTIVE_TERMS else "compute"
        found[key] = found[key] + seconds
    return found


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Base seconds of a step, for many candidates.

    Base seconds are those by the catalog's figures of devices and links. `terms`
    multiplies them by scalars (`Scales`). The first dim of each array has one entry per
    candidate.
    """

    stages: np.ndarray
    """Base seconds of one microbatch, by scalar (`STAGE_SCALES`): matmuls, convolutions
    and kernels; bytes; launches; collectives of activations on fast links and on
    networks; and sends. float [rows, kinds, 6]. Stages with equal work are one kind."""
    counts: np.ndarray
    """The number of stages of each kind, [rows, kinds]."""
    behind: np.ndarray
    """Base seconds of a microbatch's collectives that computation can hide, on fast
    links and on networks (`LINK_SCALES`); float [rows, kinds, 2]."""
    state: np.ndarray
    """Base seconds per step of collectives of gradients and parameters that nothing
    hides, on fast links and on networks (`LINK_SCALES`); float [rows, 2]."""
    optimizer: np.ndarray
    """Base seconds of the update, [rows]; the scalar `Scales.memory` multiplies it."""
    dispatch: np.ndarray
    """Base seconds that the host takes to start a step, [rows]; the scalar
    `Scales.launch` multiplies them."""
    num_microbatches: np.ndarray
    virtual_stages: np.ndarray
    overlap_slowdown: np.ndarray
    """Factor on the time of computation that runs beside collectives, [rows]."""
    overlap_share: np.ndarray
    """The share of computation that collectives can overlap, [rows]."""
    order: np.ndarray
    """Pairs (t, c), float [rows, pairs, 2]: the share c of the collectives in `behind`
    can be hidden only by the share t of the computation. They are the collectives of
    the parameters that the forward pass reads first (`ir.read_order`)."""

    def terms(self, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Computes the seconds of a step by term (`STEP_TERMS`), for each candidate.

        The base seconds are multiplied by `scales`. The terms of forward and backward
        pass are the seconds of an average stage for all microbatches. The term `bubble`
        is what the pipeline adds: to fill and drain it, and to wait for slower
        stages.

        Args:
            scales: factors on the base seconds, in the order of `Scales.names`.

        Returns:
            Map from term to seconds; float [candidates] each.
        """
        seconds = self.stages * scales[[_SCALE[name] for name in STAGE_SCALES]]
        links = scales[[_SCALE[name] for name in LINK_SCALES]]
        behind = (self.behind * links).sum(-1)
        exposed = self._exposed(behind, seconds[..., :2].sum(-1))
        tensor = seconds[..., 3:5].sum(-1)
        parts = np.stack([*np.moveaxis(seconds[..., :3], -1, 0), tensor, exposed,
                          seconds[..., 5]])  # fmt: skip
        stage_s = parts.sum(0)
        microbatches = self.num_microbatches
        total = pipeline_s(stage_s, self.counts, microbatches, self.virtual_stages)
        share = self.counts / self.counts.sum(-1)[:, None]
        mean = microbatches * (parts * share).sum(-1)
        names = ("matmul", "elementwise", "launch", "tensor", "data", "pipeline")
        found: dict[str, np.ndarray] = dict(zip(names, mean, strict=True))
        found["data"] = found["data"] + self.state @ links
        found["optimizer"] = self.optimizer * scales[_SCALE["memory"]]
        found["launch"] = found["launch"] + self.dispatch * scales[_SCALE["launch"]]
        waits = np.maximum(total - mean.sum(0), 0.0)  # rounding errors may be negative
        found["bubble"] = np.where(self.counts.sum(-1) > 1, waits, 0.0)
        return {name: found[name] for name in STEP_TERMS}

    def take(self, rows: np.ndarray) -> "StepCost":
        """Returns the candidates (rows of all arrays) with the given indices."""
        return StepCost(
            **{one.name: getattr(self, one.name)[rows] for one in fields(StepCost)}
        )

    def step_s(self, scales: np.ndarray) -> np.ndarray:
        """Computes the seconds of a step, the sum of `terms`; float [candidates].

        Args:
            scales: factors on the base seconds, in the order of `Scales.names`.
        """
        return np.add.reduce(list(self.terms(scales).values()))

    def _exposed(self, behind: np.ndarray, computing: np.ndarray) -> np.ndarray:
        """Computes by how much overlapped collectives lengthen the computation.

        The result is the seconds of collectives that computation cannot hide, plus the
        seconds by which the hidden collectives slow computation down. What can be
        hidden is limited by the share of computation that collectives can overlap
        (`overlap_share`), and by the order in which parameters are read (`order`).

        Args:
            behind: seconds of the collectives alone, of one microbatch.
            computing: seconds of the computation alone, of one microbatch.

        Returns:
            Seconds; like both arguments float [candidates, kinds of stages].
        """
        overlapped = self.overlap_share[:, None] * computing
        t, c = self.order[:, None, :, 0], self.order[:, None, :, 1]
        bare = (c * behind[..., None] - t * overlapped[..., None]).max(-1)
        hidden = behind - np.maximum(bare, 0.0)
        slowed = np.minimum(self.overlap_slowdown - 1.0, 1.0)[:, None] * hidden
        return behind - hidden + slowed


def stack(costs: Sequence[StepCost]) -> StepCost:
    """Concatenates the candidates of several `StepCost` objects into one.

    Arrays of an object with fewer kinds of stages, or fewer limits of overlap
    (`StepCost.order`), are padded with zeros. A padded kind has no stages, and a padded
    limit limits nothing, so the seconds of a candidate do not change.
    """
    kinds = max(cost.counts.shape[1] for cost in costs)
    pairs = max(cost.order.shape[1] for cost in costs)

    def padded(cost: StepCost, name: str) -> np.ndarray:
        value = getattr(cost, name)
        if name not in ("stages", "counts", "behind", "order"):
            return value
        most = pairs if name == "order" else kinds
        missing = [(0, 0), (0, most - value.shape[1])]
        return np.pad(value, missing + [(0, 0)] * (value.ndim - 2))

    return StepCost(
        **{
            field.name: np.concatenate([padded(cost, field.name) for cost in costs])
            for field in fields(StepCost)
        }
    )
