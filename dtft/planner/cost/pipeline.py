"""Seconds of a pipeline and its microbatches in flight, for three schedules.

The inputs are seconds of stages and the numbers of stages, microbatches and chunks. A
chunk is a part of a stage's layers. The inputs of `pipeline_s` may be numpy arrays.

Sources: GPipe arXiv 1811.06965; 1F1B and interleaving arXiv 2104.04473; memory of
interleaving arXiv 2205.05198, section 4.2.3.
"""

from typing import Any

import numpy as np

from dtft.planner.types import Schedule

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "circular")


def pipeline_s(stage_s: Any, counts: Any, microbatches: Any, chunks: Any) -> Any:
    """Computes the seconds of all microbatches of a step through a pipeline.

    The formula is m max t + (sum t - max t) / chunks, for m microbatches that take t
    seconds on each stage. The second summand is the time to fill and drain the
    pipeline. The formula is the same for all three schedules. It is exact for GPipe,
    and for the other schedules if all stages take equally long. With unequal stages
    1F1B may be faster: stages before the slowest stage run ahead.

    Args:
        stage_s: seconds of one microbatch, forward and backward, on each kind of stage
            (stages of one kind take equally long); [..., kinds], 0 for kinds without a
            stage.
        counts: the number of stages of each kind, [..., kinds].
        microbatches: the number of microbatches in a step.
        chunks: the number of parts of each stage's layers; a microbatch passes through
            the pipeline that many times.

    >>> float(pipeline_s([1.0], [4], microbatches=8, chunks=1))
    11.0
    >>> float(pipeline_s([1.0, 1.5], [3, 1], microbatches=8, chunks=2))
    13.5
    """
    longest = np.max(stage_s, -1)
    every = np.sum(np.multiply(stage_s, counts), -1)
    return (microbatches * longest + (every - longest) / chunks)[()]


def in_flight(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> float:
    """Returns the number of microbatches whose activations the first stage keeps.

    No stage keeps more than the first. GPipe and circular keep all microbatches. 1F1B
    on p stages keeps at most p microbatches; with v > 1 chunks (parts of its layers)
    per stage, it keeps the activations of at most p + (p - 1) / v whole microbatches.

    >>> in_flight("gpipe", 4, 16, 1), in_flight("1f1b", 4, 16, 1)
    (16, 4)
    >>> in_flight("1f1b", 4, 16, 2)
    5.5
    """
    if schedule != "1f1b":
        return microbatches
    if chunks == 1:
        return min(microbatches, stages)
    return min(microbatches, stages + (stages - 1) / chunks)


def transfers(chunks: Any) -> Any:
    """Returns how often a stage sends to another stage per microbatch.

    The stage sends the activations and the gradients of each chunk (part of its
    layers).
    """
    return 2 * chunks
