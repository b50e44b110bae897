"""Micro-benchmarks of the local devices, and the calibration fitted to their times.

* `calibrate`: the sizes to measure, and the fit of the constants of the planner's cost
  model, such as bandwidths and efficiencies.
* `microbenchmarks`: times of single operations, convolutions and collectives.

The calibration file and the formulas are in `dtft.planner.cost`. The command `dtft
calibrate` is in `dtft.cli`.
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
