"""How long a pipeline of stages takes, and how much it keeps: three schedules.

Arithmetic on seconds of a stage and counts of stages, microbatches and chunks; all of
them may be numpy arrays.

Sources: reference section 7; GPipe arXiv 1811.06965; 1F1B and interleaving arXiv
2104.04473; memory of interleaving arXiv 2205.05198, section 4.2.3.
"""

from typing import Any

import numpy as np

from dtft.planner.types import Schedule

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "circular")


def pipeline_s(
    first_s: Any,
    middle_s: Any,
    last_s: Any,
    stages: Any,
    microbatches: Any,
    chunks: Any,
) -> Any:
    """Seconds from the first microbatch into the pipeline to the last one out of it.

    (m - 1) max t + sum t, where filling and draining take 1 / chunks of it. The same
    for all three schedules: exact for GPipe, and for the others where all stages take
    as long. Where they do not 1F1B may be faster: stages before the slowest run ahead.

    Args:
        first_s: of one microbatch on the first stage, forward and backward.
        middle_s: of one on any stage between.
        last_s: of one on the last stage.
        stages: 2 or more.
        microbatches: of one step.
        chunks: parts of its layers that each stage has; a microbatch goes round as
            often.

    >>> float(pipeline_s(1.0, 1.0, 1.0, stages=4, microbatches=8, chunks=1))
    11.0
    >>> float(pipeline_s(1.0, 1.0, 1.5, stages=4, microbatches=8, chunks=2))
    13.5
    """
    longest = np.maximum(np.maximum(first_s, last_s), np.where(stages > 2, middle_s, 0))
    every = first_s + last_s + (stages - 2) * middle_s
    return (microbatches * longest + (every - longest) / chunks)[()]


def in_flight(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> float:
    """Microbatches whose activations the fullest stage, the first one, keeps at once.

    GPipe and circular keep all of them; 1F1B as many as there are stages; with chunks
    1 + (p - 1) / (p v) times as many.

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
    """Times that a stage sends for each microbatch: activations on, gradients back."""
    return 2 * chunks
