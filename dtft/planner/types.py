"""Names that every part of the planner shares: mesh axes, specs, rematerialization,
schedules.
"""

from typing import Literal

AXES: tuple[str, ...] = ("replica", "stage", "fsdp", "expert", "sequence", "tensor")
"""Axes of a mesh in the usual order on the fabric: what talks most lies innermost."""


Spec = tuple[tuple[str, ...], ...]
"""For each array dim the mesh axes that divide it, major first; as many as dims."""

Remat = Literal["none", "dots", "full"]
"""What of the forward pass is kept: all; the results of matmuls; block inputs only."""

Schedule = Literal["1f1b", "gpipe", "circular"]
"""In which order stages of a pipeline take microbatches: forward and backward in turn;
all forward, then all backward; the same, going round as often as there are chunks."""
