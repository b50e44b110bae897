"""The plans that people use without a planner, always among the candidates.

Decides the sizes of their meshes, or the nearest that work. Must not know knobs or
costs.
"""

from dataclasses import dataclass

import numpy as np

from dtft.planner.meshes import AXES, Meshes, MeshRules

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
