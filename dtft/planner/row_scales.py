"""The scalars between catalog figures and what published training runs took.

Level 2 of calibration for transformers run by Megatron-like programs. The values are
results of fits (`experiments/public_measurements.py`), which tests repeat. Must not
know how a step is made of terms (`rows`).
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Scales:
    """How many times the catalog's figure each kind of time takes."""

    matmul: float = 1.0
    """Matrix products, beside peak, efficiency and shape factor of the device type."""
    memory: float = 1.0
    """Bytes through device memory, beside its bandwidth."""
    launch: float = 1.0
    """Starts of kernels. Far above 1 in eager programs: the catalog's figure is what a
    device needs, a host that runs Python between layers needs more."""
    fast_link: float = 1.0
    """Collectives inside a host."""
    network: float = 1.0
    """Collectives between hosts, which meet others on the way."""
    next_stage: float = 1.0
    """Sending to the next pipeline stage, in a host or not: only neighbours talk."""

    def vector(self) -> np.ndarray:
        """As numbers, in the order of the fields."""
        return np.array(astuple(self))

    @classmethod
    def of(cls, values: np.ndarray) -> "Scales":
        """From numbers, in the order of the fields.

        >>> Scales.of(Scales(launch=3.0).vector()).launch
        3.0
        """
        return cls(**dict(zip(cls.names(), map(float, values), strict=True)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields."""
        return tuple(field.name for field in fields(cls))


SPREADS = Scales(
    matmul=0.2, memory=0.1, launch=2.0, fast_link=0.5, network=1.0, next_stage=0.5
)
"""How well each figure of the catalog is known, as a standard deviation of its
logarithm: memory streams are alike everywhere, matrix products nearly so; what a host
does between kernels and what others do to a network is known by its order only."""

BIGSCIENCE = Scales(
    matmul=0.963,
    memory=0.997,
    launch=26.94,
    fast_link=1.442,
    network=4.349,
    next_stage=0.890,
)
"""Fitted to the 21 rows of the BigScience ranking set (Jean Zay, A100 80 GB)."""


LLM_FOUNDRY_H100 = Scales(
    matmul=1.278,
    memory=0.977,
    launch=14.78,
    fast_link=0.856,
    network=1.152,
    next_stage=0.890,
)
"""Fitted to the 70 bfloat16 rows of llm-foundry on H100, drawn to those of A100."""


def elsewhere(fitted: Scales) -> Scales:
    """Scalars for another cluster of like devices, and another program.

    Only what belongs to the device is carried over. Links are as the catalog has them,
    and so are starts of kernels: they were fitted to one fabric and one program
    (reference section 7: key scalars by device type, fabric, software version).
    """
    return Scales(matmul=fitted.matmul, memory=fitted.memory)


FITTED: Mapping[str, Scales] = {
    "jean-zay": BIGSCIENCE,
    "h100": elsewhere(LLM_FOUNDRY_H100),
    "h200": elsewhere(LLM_FOUNDRY_H100),
}
"""Machine or device type to the scalars of published runs on it."""


def scales_of(*names: str) -> Scales:
    """The scalars of the first name that has some; else the device's of A100.

    Args:
        names: Machine, then device type, as the catalog spells them.

    >>> scales_of("jean-zay", "a100").network > scales_of("selene", "a100").network
    True
    """
    known = (FITTED[name] for name in names if name in FITTED)
    return next(known, elsewhere(BIGSCIENCE))
