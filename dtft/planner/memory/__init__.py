"""Memory: which bytes are alive at the fullest moment of a step on one device.

* `schedule`: the order in which XLA runs the operators.
* `liveness`: which values have memory of their own, and from when until when.
* `peak`: bytes at the fullest moment, for thousands of meshes at once.
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
