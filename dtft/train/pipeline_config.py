"""How a pipeline over `mesh.stage` works, as options of an experiment.

Decides which options fit together and how the layers of a model are shared out. Must
stay free of jax imports.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How rows pass through the stages of a mesh that has some.

    Idle of each stage: `(stages - 1) / (microbatches x virtual_stages + stages - 1)`.
    """

    microbatches: int = 4
    """Parts in which the rows of a replica follow each other."""
    schedule: Literal["gpipe", "circular"] = "gpipe"
    """`gpipe`: rows pass each stage once; `circular`: `virtual_stages` times."""
    virtual_stages: int = 1
    """Chunks of neighbouring layers that each stage has, one per round (`circular`)."""
    layers: tuple[int, ...] = ()
    """Layers of each chunk, in the order in which rows pass them: stage 0 has the
    first, stage 1 the second ...; empty for equally many, the rest in front."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"pipeline.{name}={getattr(self, name)} is not positive. "
                    f"Set --pipeline.{name} to 1 or more."
                )
        if (self.schedule == "circular") != (self.virtual_stages > 1):
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} does not go together with "
                f"pipeline.virtual_stages={self.virtual_stages}. Allowed: gpipe with "
                "1, circular with 2 or more. Set --pipeline.virtual_stages."
            )
        if any(number < 1 for number in self.layers):
            raise ValueError(
                f"pipeline.layers={self.layers} has a chunk without layers. Set "
                "--pipeline.layers to numbers of 1 or more."
            )

    def chunks(self, stages: int, num_layers: int) -> tuple[int, ...]:
        """Layers of each chunk, in the model's order; chunk c is on stage c % stages.

        Args:
            stages: of the mesh.
            num_layers: of the model.

        Raises:
            ValueError: the layers cannot be shared out so.

        >>> PipelineConfig().chunks(stages=3, num_layers=8)
        (3, 3, 2)
        """
        count = stages * self.virtual_stages
        if num_layers < count:
            raise ValueError(
                f"mesh.stage={stages} x pipeline.virtual_stages={self.virtual_stages} "
                f"is more than the model's {num_layers} layers. Set --mesh.stage or "
                "--pipeline.virtual_stages lower, or use a model with more layers."
            )
        if not self.layers:
            each, more = divmod(num_layers, count)
            return (each + 1,) * more + (each,) * (count - more)
        if len(self.layers) != count or sum(self.layers) != num_layers:
            raise ValueError(
                f"pipeline.layers={self.layers} does not share out the model's "
                f"{num_layers} layers. Allowed: {count} numbers (mesh.stage x pipeline."
                f"virtual_stages) with the sum {num_layers}. Set --pipeline.layers."
            )
        return self.layers

    def row_parts(self, stages: int) -> int:
        """What the rows of a replica must be a multiple of.

        >>> PipelineConfig(microbatches=4).row_parts(stages=6)
        12
        """
        return math.lcm(self.microbatches, stages)

    def check_rows(self, stages: int, rows: int) -> None:
        """Refuses a batch that the schedule cannot pass on in equal parts.

        Args:
            stages: of the mesh.
            rows: of one replica's batch (of one part of it, with fsdp).

        Raises:
            ValueError: says what divides what.
        """
        if self.schedule == "circular" and self.microbatches % stages:
            raise ValueError(
                f"pipeline.microbatches={self.microbatches} is not a multiple of "
                f"mesh.stage={stages}, but circular rounds are of so many. Set "
                f"--pipeline.microbatches {-(-self.microbatches // stages) * stages}, "
                "or --pipeline.schedule gpipe."
            )
        parts = {"pipeline.microbatches": self.microbatches, "mesh.stage": stages}
        for name, number in parts.items():
            if rows % number:
                raise ValueError(
                    f"{name}={number} does not divide the {rows} rows that each "
                    "replica has (data.global_batch / (mesh.replica x mesh.fsdp)). Set "
                    f"--{name} to a divisor of them, or change --data.global_batch."
                )
