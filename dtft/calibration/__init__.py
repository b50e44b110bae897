"""Micro-benchmarks on the devices at hand, and the calibration that they make.

* `calibrate`: which sizes are measured, and what the times say of the devices.
* `microbenchmarks`: times of single operations, on images, and of collectives.

The file and its formulas are in `dtft.planner.cost`, `dtft calibrate` is in `dtft.cli`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.calibration.calibrate import measure_devices
    from dtft.calibration.microbenchmarks import agreed

_PUBLIC = {
    "agreed": "microbenchmarks",
    "measure_devices": "calibrate",
}

__all__ = [
    "agreed",
    "measure_devices",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
