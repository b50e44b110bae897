"""Optimizer state in host memory: which arrays, what it costs, how much room it makes.

State comes to the device for each update and goes back after it, over the link to the
host's memory (PCIe, CXL). Arithmetic only; must not know programs or plans.

What XLA's GPU compiler does with such a step (jax 0.10.2, H100 target): arrays come and
go by asynchronous copies, up to about a dozen on their way at once, and one that is
copied is on the device as a whole. So a few large arrays, such as those of a scan over
layers, leave no room behind; many small ones leave nearly all of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dtft.planner.links import Link

LEAST_BYTES = 2**16
"""Arrays that are smaller on each device stay there: a copy costs a latency."""
NUM_UNDER_WAY = 16
"""Arrays, of the largest, that are on the device at once (compiled: 6 to 14)."""
MOST_UNDER_WAY = 1.25
"""Of all that is kept on the host, the most that is on the device at once."""


def moved(arrays: Mapping[str, float]) -> tuple[str, ...]:
    """Paths of the arrays that are worth a copy.

    Args:
        arrays: path to the bytes on one device.
    """
    return tuple(path for path, size in arrays.items() if size >= LEAST_BYTES)


def on_device_bytes(sizes: Iterable[float]) -> float:
    """The most that is on a device at one time of what is kept on the host.

    Args:
        sizes: bytes of each array on one device.

    >>> on_device_bytes([4.0] * 64), on_device_bytes([100.0, 100.0])
    (64.0, 250.0)
    """
    known = list(sizes)
    most = NUM_UNDER_WAY * max(known, default=0.0)
    return min(MOST_UNDER_WAY * sum(known), most)


def offload_s(link: Link, sizes: Sequence[float]) -> float:
    """Seconds that an update takes longer: all state there and back.

    None of it is taken to be hidden: what the copies wait for (gradients) comes last.

    Args:
        link: from a device to its host's memory.
        sizes: bytes of each array on one device.

    >>> from dtft.planner.links import Curve
    >>> pcie = Link(kind="PCIe", curve=Curve(latency_s=0.0, bandwidth=1e10), source="")
    >>> offload_s(pcie, [5e9, 5e9])
    2.0
    """
    if not sizes:
        return 0.0
    each = link.curve.seconds(np.asarray(sizes) * link.shared_by)
    return 2 * float(np.sum(each))
