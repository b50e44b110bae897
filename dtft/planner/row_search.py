"""Every layout of a transformer on a number of devices that fits, and the best of them.

Exhaustive over tp, pp, dp, micro_batch and virtual_stages; the other knobs stay as they
are given. Decides with `rows` and `transformer_memory`; must not know measured times.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dtft.planner.cluster import Pool
from dtft.planner.row_scales import Scales
from dtft.planner.rows import stack, step_cost
from dtft.planner.transformer import Layout, Shape
from dtft.planner.transformer_memory import memory

HEADROOM = 0.1
"""Of a device's memory that stays free: 9 of 10 published BigScience rows needed less
than a tenth more than `transformer_memory` says."""
LARGEST_MICRO_BATCH = 32
LARGEST_TENSOR = 16
"""Two hosts of 8: beyond, every matrix product waits for the network."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, and its predicted seconds."""

    layout: Layout
    step_s: float

    @property
    def split(self) -> tuple[int, int, int]:
        """tp, pp, dp."""
        return self.layout.tp, self.layout.pp, self.layout.dp


def layouts(shape: Shape, like: Layout) -> Iterator[Layout]:
    """All layouts on as many devices as `like`, with its batch and other knobs."""
    for tp in divisors(shape.heads):
        if tp > LARGEST_TENSOR or like.gpus % tp or shape.hidden % tp:
            continue
        for pp in divisors(shape.layers):
            dp, rest = divmod(like.gpus // tp, pp)
            if rest == 0 and like.global_batch % dp == 0:
                split = replace(like, tp=tp, pp=pp, dp=dp, stage_layers=())
                yield from _pipelines(shape, split)


def _pipelines(shape: Shape, split: Layout) -> Iterator[Layout]:
    """Microbatches and virtual stages; interleaving needs them in groups of pp."""
    of_replica = split.global_batch // split.dp
    for micro_batch in divisors(of_replica):
        if micro_batch > LARGEST_MICRO_BATCH:
            continue
        for parts in divisors(shape.layers // split.pp):
            if parts == 1 or (
                split.pp > 1 and of_replica // micro_batch % split.pp == 0
            ):
                yield replace(split, micro_batch=micro_batch, virtual_stages=parts)


def search(
    shape: Shape, like: Layout, pool: Pool, scales: Scales
) -> tuple[Candidate, ...]:
    """All layouts that fit into the pool's devices with headroom, fastest first.

    Raises:
        ValueError: none fits; says how much is missing.
    """
    found = list(layouts(shape, like))
    sizes = [sum(memory(shape, layout).values()) for layout in found]
    room = pool.device.memory_bytes * (1 - HEADROOM)
    fitting = [
        layout for layout, size in zip(found, sizes, strict=True) if size <= room
    ]
    if not fitting:
        raise ValueError(
            f"no layout of {like.gpus} devices fits: the smallest needs "
            f"{min(sizes) / 1e9:.1f} GB of {room / 1e9:.1f} GB ({HEADROOM:.0%} kept "
            "free). Give more devices, zero=1 or more, or recompute=full."
        )
    costs = stack([step_cost(shape, layout, pool) for layout in fitting])
    seconds = costs.step_s(scales.vector())
    order = np.argsort(seconds, kind="stable")
    return tuple(
        Candidate(layout=fitting[number], step_s=float(seconds[number]))
        for number in order
    )


def divisors(number: int) -> tuple[int, ...]:
    """Ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(part for part in range(1, number + 1) if number % part == 0)
