"""Predicts the peak memory of a step on one device.

* `schedule`: the order in which XLA runs the operators.
* `liveness`: which values have a buffer of their own, and their lifetimes.
* `peak`: bytes at the moment of peak memory, for thousands of meshes at once.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.memory.peak import RESERVE, LivenessTrace, PeakModel, Timeline

_PUBLIC = {
    "LivenessTrace": "peak",
    "PeakModel": "peak",
    "RESERVE": "peak",
    "Timeline": "peak",
}

__all__ = [
    "LivenessTrace",
    "PeakModel",
    "RESERVE",
    "Timeline",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
