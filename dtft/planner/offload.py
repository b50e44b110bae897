"""Optimizer state in host memory: which arrays, what it costs, how much room it makes.

State comes to the device for each update and goes back after it, over the link to the
host's memory (PCIe, CXL). Arithmetic only; must not know programs or plans.

What XLA's GPU compiler does with such a step (jax 0.10.2, H100 target): arrays come and
go by asynchronous copies, up to about a dozen on their way at once, and one that is
copied is on the device as a whole. So a few large arrays, such as those of a scan over
layers, leave no room behind; many small ones leave nearly all of theirs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.links import Link

LEAST_BYTES = 2**16
"""Arrays that are smaller on each device stay there: a copy costs a latency."""
NUM_UNDER_WAY = 16
"""Arrays, of the largest, that are on the device at once (compiled: 6 to 14)."""
MOST_UNDER_WAY = 1.25
"""Of all that is kept on the host, the most that is on the device at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Away:
    """What one device keeps in host memory; one entry per candidate, or a number."""

    host_bytes: Any
    """In host memory."""
    device_bytes: Any
    """Of it, the most that is on the device at one time."""
    seconds: Any
    """That an update takes longer: all of it there and back."""


def away(link: Link, arrays: Iterable[tuple[int, Any]]) -> Away:
    """What arrays that rest in host memory take, those that are worth a copy.

    No time is taken to be hidden: what the copies wait for (gradients) comes last.

    Args:
        link: from a device to its host's memory.
        arrays: how many there are alike, and bytes of each on one device.

    >>> from dtft.planner.links import Curve
    >>> pcie = Link(kind="PCIe", curve=Curve(latency_s=0.0, bandwidth=1e10), source="")
    >>> found = away(pcie, [(64, 1e8), (9, 100.0)])
    >>> round(float(found.host_bytes) / 1e9, 2), float(found.device_bytes) / 1e9
    (6.4, 1.6)
    >>> round(float(found.seconds), 3)
    1.28
    """
    host: Any = 0.0
    largest: Any = 0.0
    seconds: Any = 0.0
    for count, num_bytes in arrays:
        there = np.where(np.asarray(num_bytes) >= LEAST_BYTES, num_bytes, 0.0)[()]
        host = host + count * there
        largest = np.maximum(largest, there)
        copy_s = link.curve.seconds(there * link.shared_by)
        seconds = seconds + 2 * count * np.where(there > 0, copy_s, 0.0)[()]
    on_device = np.minimum(MOST_UNDER_WAY * host, NUM_UNDER_WAY * largest)
    return Away(host_bytes=host, device_bytes=on_device, seconds=seconds)
