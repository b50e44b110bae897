"""Software: rules of how XLA and PyTorch run a program's operators and collectives.

The planner predicts the time of every program with the same figures of devices and
links. A `Software` value says how a program is run: which operators share a kernel,
when gradients are reduced, and which collectives computation hides. XLA and the PyTorch
programs that published tables were measured with differ in these rules.
"""

from dataclasses import dataclass
from typing import Literal

SoftwareName = Literal["xla", "megatron", "eager"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """Rules of fusion, launch and overlap of the software that runs a step."""

    name: SoftwareName
    fuses: bool = True
    """Whether a compiler fuses operators, by the rules of `ir.fusion`. Otherwise each
    operator is a kernel of its own, which reads and writes whole arrays; reshapes and
    other operators of kind `layout` are free."""
    sums_first: bool = False
    """Whether each device sums the gradients of its microbatches, and the sums are
    reduced over data axes once a step (below ZeRO level 2). Otherwise gradients are
    reduced once per microbatch."""
    flat_state: bool = False
    """Whether ZeRO divides flat buffers of all arrays, in equal parts; from level 1
    gradients are then reduced by reduce-scatter. Otherwise ZeRO divides a dim of each
    array that `fsdp` can divide."""
    hides_state_from: int = 0
    """The ZeRO level from which computation hides collectives of gradients and
    parameters."""
    sum_bytes: int = 0
    """Bytes of one element of the gradient sums over microbatches, if a separate kernel
    adds each gradient to its sum; 0 if the matmul of a gradient adds to the sum."""
    splits_positions: bool = False
    """Sequence parallelism (arXiv 2205.05198): whether the axis `tensor` divides the
    positions of the activations in which it divides no other dim."""
    splits_sends: bool = False
    """Whether each device of a `tensor` group sends only its part of an activation to
    the next pipeline stage (arXiv 2104.04473, section 4.1), not the whole activation.
    """


XLA = Software(name="xla")
MEGATRON = Software(
    name="megatron",
    fuses=False,
    sums_first=True,
    flat_state=True,
    hides_state_from=2,
    sum_bytes=2,
    splits_sends=True,
)
"""Megatron-LM and Megatron-DeepSpeed on PyTorch, with the fused kernels of 2021."""
EAGER = Software(
    name="eager",
    fuses=False,
    sums_first=True,
    flat_state=True,
    hides_state_from=2,
    sum_bytes=4,
)
"""PyTorch without a compiler, with FSDP."""
