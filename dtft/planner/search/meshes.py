"""Sizes of mesh axes: which are possible, which are nearest where none are, and the
usual meshes.

Data parallelism, FSDP and the Megatron rule are always candidates, so that no plan is
predicted slower than they are.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.types import AXES

# Sizes are products of divisors that use all devices and divide the batch. If no such
# mesh exists, the batch is rounded up or fewer devices are used.


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """Sizes of meshes, a row each."""

    sizes: np.ndarray
    """Of the axes, in the order of `AXES`; int64 [meshes, axes]."""
    batch: np.ndarray
    """Samples in a step, at least those asked for; int64 [meshes]."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def devices_used(self) -> np.ndarray:
        """Devices of each mesh; int64 [meshes]."""
        return self.sizes.prod(axis=1)

    def where(self, mask: np.ndarray) -> "Meshes":
        """Those that a mask or indices select."""
        return Meshes(sizes=self.sizes[mask], batch=self.batch[mask])

    def joined(self, other: "Meshes") -> "Meshes":
        """Both, in a fixed order, without repeats."""
        rows = np.concatenate([self._rows, other._rows])
        rows = np.unique(rows, axis=0)
        return Meshes(sizes=rows[:, :-1], batch=rows[:, -1])

    @property
    def _rows(self) -> np.ndarray:
        return np.concatenate([self.sizes, self.batch[:, None]], axis=1)


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return (*low, *(number // part for part in reversed(low) if part**2 != number))


def factorisations(number: int, allowed: Sequence[Sequence[int]]) -> np.ndarray:
    """All ways to write a number as a product with one factor from each set.

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
    """How many ways there are to write a number as an ordered product.

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
    """What sizes axes may have."""

    num_devices: int
    batch: int
    """Samples in a step."""
    divides: Mapping[str, tuple[int, ...]]
    """For each axis that may be larger than one, sizes it has to divide, all of them;
    none: any size."""
    data_axes: tuple[str, ...]
    """Axes that the batch is divided over."""
    pins: Mapping[str, int]
    """Axes whose size is given."""

    def allowed(self, num_devices: int) -> list[tuple[int, ...]]:
        """For each axis the sizes it may have in a mesh of so many devices."""
        return [self.sizes_of(axis, num_devices) for axis in AXES]

    def sizes_of(self, axis: str, num_devices: int) -> tuple[int, ...]:
        """The sizes an axis may have in a mesh of so many devices."""
        sizes = (1,)
        if axis in self.divides:
            sizes = divisors(math.gcd(num_devices, *self.divides[axis]))
        pin = self.pins.get(axis)
        return sizes if pin is None else tuple(size for size in sizes if size == pin)

    def slots(self, sizes: np.ndarray) -> np.ndarray:
        """Parts that meshes divide the batch into; int64 [meshes]."""
        return sizes[:, [AXES.index(axis) for axis in self.data_axes]].prod(axis=1)

    def all(self, num_devices: int) -> Meshes:
        """Meshes of so many devices, the batch rounded up to what they divide."""
        return self.rounded_up(factorisations(num_devices, self.allowed(num_devices)))

    def rounded_up(self, sizes: np.ndarray) -> Meshes:
        """Meshes with the least batch that each divides."""
        slots = self.slots(sizes)
        return Meshes(sizes=sizes, batch=-(-self.batch // slots) * slots)

    def exact(self, num_devices: int) -> Meshes:
        """Meshes of so many devices that divide the batch as it is."""
        meshes = self.all(num_devices)
        return meshes.where(meshes.batch == self.batch)

    def workable(self) -> Meshes:
        """Meshes of all devices, with the batch rounded up where none divides it.

        Without a mesh that divides the batch (five devices, a prime batch), each mesh
        gets the next larger batch, as long as no slot has nothing but padding.
        """
        exact = self.exact(self.num_devices)
        if self._enough(exact):
            return exact
        meshes = self.all(self.num_devices)
        slots = self.slots(meshes.sizes)
        return meshes.where((meshes.batch == self.batch) | (slots <= self.batch))

    def fewer(self) -> Meshes:
        """Meshes of the most devices, but not all, that divide the batch as it is.

        None where all devices can be used so. Where no number of devices divides it
        (a prime batch), also those of the largest power of two: models have dims that
        it divides, and few that, say, five devices do.
        """
        exact = self.exact(self.num_devices)
        if self._enough(exact):
            return exact.where(np.zeros(len(exact), bool))
        best = exact
        power = 1 << self.num_devices.bit_length() - 1
        if power < self.num_devices:
            best = exact.joined(self.exact(power))
        for num_devices in range(self.num_devices - 1, 0, -1):
            if math.gcd(num_devices, self.batch) == 1 and len(best):
                continue  # only meshes that do not divide the batch
            meshes = self.exact(num_devices)
            if self._enough(meshes):
                return meshes
            best = best if len(best) else meshes
        return best.where(best.devices_used < self.num_devices)

    def _enough(self, meshes: Meshes) -> bool:
        """Whether any mesh divides the batch, if it can be divided at all."""
        free = [
            axis
            for axis in self.data_axes
            if axis in self.divides and self.pins.get(axis) != 1
        ]
        least = 2 if free and self.batch > 1 else 1
        return bool((self.slots(meshes.sizes) >= least).any())


DATA_PARALLEL, FSDP, MEGATRON, MEGATRON_FSDP = range(1, 5)
BASELINES = ("", "data parallel", "fsdp", "megatron", "megatron with fsdp")
"""What the numbers stand for; 0 is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """A mesh that a rule of thumb gives."""

    number: int
    """Position in `BASELINES`."""
    meshes: Meshes
    """One mesh."""
    divided: bool
    """Whether state is divided over the data parallel devices (zero above 0)."""


def baselines(rules: MeshRules, host_size: int) -> list[Baseline]:
    """Pure data parallel, FSDP over everything, and the Megatron rule with either.

    Megatron rule: the largest `tensor` that is allowed within a host, the rest data
    parallel. Where the rest cannot divide the batch, the batch is rounded up, and with
    more slots than samples fewer devices are used.

    Args:
        rules: what sizes are allowed; baselines against its pins are left out.
        host_size: devices that the fastest link joins.
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
    """Sizes with an axis for all devices that `tensor` leaves, or as many as work."""
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
