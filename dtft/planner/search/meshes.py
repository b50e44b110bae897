"""Enumerates sizes of mesh axes, and the meshes of common rules of thumb.

The rules of thumb are data parallelism, FSDP, and the Megatron rule (tensor parallelism
within a host) with each of them. Their meshes are candidates unless a pin (a size that
the user has fixed) rules them out.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.types import AXES

# The sizes of a mesh are divisors whose product is the number of devices, and the data
# axes divide the batch. If no such mesh exists, the batch is rounded up or fewer
# devices are used.


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """Several meshes, one per row, each with its batch."""

    sizes: np.ndarray
    """Sizes of the axes, in the order of `AXES`; int64 [meshes, axes]."""
    batch: np.ndarray
    """Samples in a step, at least the requested batch; int64 [meshes]."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def devices_used(self) -> np.ndarray:
        """The number of devices of each mesh; int64 [meshes]."""
        return self.sizes.prod(axis=1)

    def where(self, mask: np.ndarray) -> "Meshes":
        """Returns the meshes that a mask or indices select."""
        return Meshes(sizes=self.sizes[mask], batch=self.batch[mask])

    def joined(self, other: "Meshes") -> "Meshes":
        """Returns the meshes of both objects, sorted and without duplicates."""
        rows = np.concatenate([self._rows, other._rows])
        rows = np.unique(rows, axis=0)
        return Meshes(sizes=rows[:, :-1], batch=rows[:, -1])

    @property
    def _rows(self) -> np.ndarray:
        return np.concatenate([self.sizes, self.batch[:, None]], axis=1)


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a positive number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return (*low, *(number // part for part in reversed(low) if part**2 != number))


def factorisations(number: int, allowed: Sequence[Sequence[int]]) -> np.ndarray:
    """Finds all ways to write a number as a product with one factor from each set.

    Args:
        number: the product.
        allowed: for each factor the values that it may have.

    Returns:
        int64 [ways, factors], in lexicographic order.

    >>> factorisations(4, [(1, 2, 4), (1, 2)]).tolist()
    [[2, 2], [4, 1]]
    """
    found = np.zeros((1, 0), np.int64)
    left = np.array([number], np.int64)
    for choice in allowed:
        parts = np.array(sorted(choice), np.int64)
        row, part = np.nonzero(left[:, None] % parts == 0)
        found = np.concatenate([found[row], parts[part, None]], axis=1)
        left = left[row] // parts[part]
    return found[left == 1]


def num_factorisations(number: int, num_factors: int) -> int:
    """Counts the ways to write a number as a product of `num_factors` factors.

    Each order of the same factors counts as another way.

    >>> num_factorisations(4096, 6), num_factorisations(12, 2)
    (6188, 6)
    """
    if num_factors == 0:
        return int(number == 1)
    ways = 1
    for prime in _prime_factors(number):
        exponent = next(e for e in range(64) if number % prime ** (e + 1))
        ways *= math.comb(exponent + num_factors - 1, num_factors - 1)
    return ways


def _prime_factors(number: int) -> list[int]:
    return [part for part in divisors(number) if len(divisors(part)) == 2]


@dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The sizes that axes of a mesh may have."""

    num_devices: int
    batch: int
    """Samples in a step."""
    divides: Mapping[str, tuple[int, ...]]
    """For each axis that may be larger than one, the array sizes that it must divide;
    an empty tuple allows any size."""
    data_axes: tuple[str, ...]
    """Axes that divide the batch."""
    pins: Mapping[str, int]
    """Sizes of axes that the user has fixed."""

    def allowed(self, num_devices: int) -> list[tuple[int, ...]]:
        """Returns the sizes allowed for each axis of a mesh of `num_devices` devices.

        The axes are in their usual order, outermost first (`AXES`).
        """
        return [self.sizes_of(axis, num_devices) for axis in AXES]

    def sizes_of(self, axis: str, num_devices: int) -> tuple[int, ...]:
        """Returns the allowed sizes of an axis in a mesh of `num_devices` devices.

        Returns () if the size that the user has fixed is not allowed.
        """
        sizes = (1,)
        if axis in self.divides:
            sizes = divisors(math.gcd(num_devices, *self.divides[axis]))
        pin = self.pins.get(axis)
        return sizes if pin is None else tuple(size for size in sizes if size == pin)

    def slots(self, sizes: np.ndarray) -> np.ndarray:
        """Counts the parts into which each mesh divides the batch; int64 [meshes].

        Args:
            sizes: sizes of the axes; int64 [meshes, axes].
        """
        return sizes[:, [AXES.index(axis) for axis in self.data_axes]].prod(axis=1)

    def all(self, num_devices: int) -> Meshes:
        """Returns all meshes of `num_devices` devices that the rules allow.

        The batch of each mesh is rounded up to a multiple of the number of parts into
        which the mesh divides it.
        """
        return self.rounded_up(factorisations(num_devices, self.allowed(num_devices)))

    def rounded_up(self, sizes: np.ndarray) -> Meshes:
        """Makes meshes of given sizes, each with a rounded-up batch.

        The batch of a mesh is the least multiple, not below `batch`, of the number of
        parts into which the mesh divides the batch.

        Args:
            sizes: sizes of the axes; int64 [meshes, axes].
        """
        slots = self.slots(sizes)
        return Meshes(sizes=sizes, batch=-(-self.batch // slots) * slots)

    def exact(self, num_devices: int) -> Meshes:
        """Returns the meshes of `num_devices` devices that need no rounded-up batch."""
        meshes = self.all(num_devices)
        return meshes.where(meshes.batch == self.batch)

    def workable(self) -> Meshes:
        """Returns the meshes of all devices, if needed with a rounded-up batch.

        Returns only meshes that divide the batch exactly, if one of them divides it
        into two or more parts. (One part counts as two if the batch is one sample, or
        if no axis may divide it.) Otherwise, as with five devices and a prime batch,
        also returns meshes whose batch is rounded up, except meshes with more parts
        than samples.
        """
        exact = self.exact(self.num_devices)
        if self._enough(exact):
            return exact
        meshes = self.all(self.num_devices)
        slots = self.slots(meshes.sizes)
        return meshes.where((meshes.batch == self.batch) | (slots <= self.batch))

    def fewer(self) -> Meshes:
        """Returns meshes of fewer devices, if no mesh of all devices divides the batch.

        The result is empty if a mesh of all devices divides the batch into two or more
        parts. (One part counts as two if the batch is one sample, or if no axis may
        divide it.) Otherwise one number of devices is selected, and all meshes of this
        number that divide the batch exactly are returned. The selected number is the
        first of these that exists:

        * The largest number below all devices with a mesh that divides the batch into
          two or more parts.
        * The largest power of two up to all devices, if the rules allow a mesh of it.
          The batch may then be undivided, as with a large prime batch. A power of two
          divides dims of most models, unlike, say, five.
        * The largest number with an allowed mesh.

        The result is empty if the selected number is the number of all devices.
        """
        exact = self.exact(self.num_devices)
        if self._enough(exact):
            return exact.where(np.zeros(len(exact), bool))
        best = exact
        power = 1 << self.num_devices.bit_length() - 1
        if power < self.num_devices:
            best = exact.joined(self.exact(power))
        for num_devices in range(self.num_devices - 1, 0, -1):
            is_prime_to_batch = math.gcd(num_devices, self.batch) == 1
            if self._least_parts > 1 and is_prime_to_batch and len(best):
                continue  # no data axis larger than one divides the batch
            meshes = self.exact(num_devices)
            if self._enough(meshes):
                return meshes
            best = best if len(best) else meshes
        return best.where(best.devices_used < self.num_devices)

    def _enough(self, meshes: Meshes) -> bool:
        """Whether any of the meshes divides the batch into two or more parts.

        One part counts as two if the batch is one sample, or if no axis may divide it.
        """
        return bool((self.slots(meshes.sizes) >= self._least_parts).any())

    @property
    def _least_parts(self) -> int:
        """The least number of parts into which a mesh should divide the batch: two.

        It is one if the batch is one sample, or if no axis may divide the batch. This
        is so if each data axis is not searched, or fixed by the user at size one.
        """
        free = [
            axis
            for axis in self.data_axes
            if axis in self.divides and self.pins.get(axis) != 1
        ]
        return 2 if free and self.batch > 1 else 1


DATA_PARALLEL, FSDP, MEGATRON, MEGATRON_FSDP = range(1, 5)
BASELINES = ("", "data parallel", "fsdp", "megatron", "megatron with fsdp")
"""Names of the baselines by number; 0 is no baseline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """A mesh from a common rule of thumb, such as data parallelism on all devices."""

    number: int
    """Position in `BASELINES`."""
    meshes: Meshes
    """The mesh, as a single row."""
    divided: bool
    """Whether the data parallel devices divide the state (ZeRO level above 0)."""


def baselines(rules: MeshRules, host_size: int) -> list[Baseline]:
    """Makes the baselines: data parallelism, FSDP, and the Megatron rule with each.

    Data parallelism and FSDP use all devices. The Megatron rule takes the largest
    allowed size of `tensor` within a host, and data parallelism or FSDP over the other
    devices. The rule is left out if the size of `tensor` is one. If the size of
    `replica` or `fsdp` does not divide the batch, the batch is rounded up. If there are
    fewer samples than the size of `replica` or `fsdp`, a smaller size is used.

    Args:
        rules: the allowed sizes; baselines that contradict its pins are left out.
        host_size: the number of devices that the innermost fabric level joins.
    """
    tensors = rules.sizes_of("tensor", rules.num_devices)
    tensor = max([size for size in tensors if size <= host_size], default=1)
    found: list[Baseline] = []
    for number, parts, axis in (
        (DATA_PARALLEL, 1, "replica"),
        (FSDP, 1, "fsdp"),
        (MEGATRON, tensor, "replica"),
        (MEGATRON_FSDP, tensor, "fsdp"),
    ):
        if axis not in rules.divides or (number >= MEGATRON and parts == 1):
            continue
        mesh = _mesh(rules, parts, axis)
        if all(mesh[at] == rules.pins.get(name, mesh[at]) for name, at in _PLACES):
            meshes = rules.rounded_up(mesh[np.newaxis])
            divided = axis == "fsdp"
            found.append(Baseline(number=number, meshes=meshes, divided=divided))
    return found


_PLACES = tuple((axis, at) for at, axis in enumerate(AXES))


def _mesh(rules: MeshRules, tensor: int, axis: str) -> np.ndarray:
    """Returns the sizes of a mesh with `tensor` and one more axis; int64 [axes].

    Args:
        rules: the allowed sizes.
        tensor: the size of the axis `tensor`.
        axis: the other axis; it takes as many of the remaining devices as the rules
            allow.
    """
    rest = rules.num_devices // tensor
    mesh = np.ones(len(AXES), np.int64)
    mesh[AXES.index("tensor")] = tensor
    sizes = rules.divides[axis]
    for size in range(rest, 0, -1):
        fits = all(number % size == 0 for number in sizes)
        samples = rules.batch if axis in rules.data_axes else size
        if fits and (samples % size == 0 or (size == rest and size <= samples)):
            mesh[AXES.index(axis)] = size
            break
    return mesh
