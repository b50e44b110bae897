"""Types shared by the planner: mesh axes, specs, rematerialization and schedules."""

from typing import Literal

AXES: tuple[str, ...] = ("replica", "stage", "fsdp", "expert", "sequence", "tensor")
"""Mesh axes in their usual order, outermost first: axes with the most communication
lie innermost."""


Spec = tuple[tuple[str, ...], ...]
"""For each dim of an array, the mesh axes that divide the dim, major first."""

Remat = Literal["none", "dots", "full"]
"""Activations of the forward pass that are kept for the backward pass. `none` keeps
all (no rematerialization), `full` keeps the inputs of blocks, and `dots` also keeps the
results of matmuls and convolutions."""

Schedule = Literal["1f1b", "gpipe", "circular"]
"""Order in which pipeline stages process microbatches. `1f1b`: forward and backward in
turn. `gpipe`: all forward, then all backward. `circular`: as `gpipe`, and each
microbatch passes through all stages once for each chunk of layers of a stage."""
