"""Amounts that axes of a mesh divide, for many meshes at once.

A value with its divisors by name; the sizes of the axes, one number or an array of
them (one per candidate mesh), come when it is evaluated. Pure arithmetic; must not know
what the amounts are of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.graph import Operator
from dtft.planner.links import CollectiveKind

MICRO = "microbatches"
"""Divides the batch like an axis, but in time: results add up and nothing is sent."""
Sizes = Mapping[str, Any]
"""Axis to its size: an int, or an array with one per candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """A number that some axes divide.

    >>> Amount(total=48, axes=("tensor",)).at({"tensor": 4})
    12.0
    """

    total: float
    axes: tuple[str, ...] = ()

    def at(self, sizes: Sizes) -> Any:
        """What each device has of it."""
        return self.total / parts(self.axes, sizes)


def parts(axes: tuple[str, ...], sizes: Sizes) -> Any:
    """Devices along several axes together; axes that are not there have one.

    >>> parts(("replica", "tensor"), {"replica": np.array([2, 4]), "tensor": 2})
    array([4, 8])
    """
    product: Any = 1
    for axis in axes:
        product = product * sizes.get(axis, 1)
    return np.asarray(product) if isinstance(product, np.ndarray) else product


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """One collective: the larger of a device's operand and result is its amount."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    amount: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One execution of an operator on each device."""

    operator: Operator
    divided_by: tuple[str, ...]
    """Axes that divide the floating-point operations."""
    sizes: tuple[Amount, ...]
    """Of a product: rows, columns, depth, batch; empty for everything else."""
    reads: tuple[Amount, ...]
    """Bytes of each operand."""
    writes: tuple[Amount, ...]
    """Bytes of each result."""
    sent: tuple[Sent, ...]
    sides: tuple[Amount, Amount] | None = None
    """Of a convolution: columns that each patch is multiplied by, and the channels of a
    patch."""
    turned_by: tuple[str, ...] = ()
    """Axes that divide what the transposed products which it reads sum over."""

    @property
    def flops(self) -> Amount:
        """Floating-point operations of one execution."""
        return Amount(total=self.operator.flops, axes=self.divided_by)

    @property
    def special(self) -> Amount:
        """Of these, functions such as exp."""
        return Amount(total=self.operator.special, axes=self.divided_by)

    @property
    def strided(self) -> Amount:
        """Elements read across the order in which they lie."""
        return Amount(total=self.operator.strided, axes=self.divided_by)

    @property
    def turned(self) -> Amount:
        """More of these, where any of the axes in `turned_by` has parts."""
        return Amount(total=self.operator.turned, axes=self.divided_by)
