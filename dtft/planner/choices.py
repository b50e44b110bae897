"""What there is to choose for a question on like devices: axes, knobs, remats.

Of what can be run (`capabilities`), what this step and these devices have a use for.
Must not know candidates or what they cost.
"""

from collections.abc import Mapping
from typing import Any

from dtft.planner.capabilities import PLATFORMS, Backend, Capabilities
from dtft.planner.cluster import Pool
from dtft.planner.plan import Remat
from dtft.planner.question import Question
from dtft.planner.space import REMATS, Choices
from dtft.planner.staged import layers_of

_MAX_MICROBATCHES = 64


def backend(pool: Pool) -> Backend:
    """The backend that runs programs on such devices.

    Raises:
        ValueError: JAX runs none there.
    """
    platform = pool.device.platform
    if platform not in PLATFORMS:
        raise ValueError(
            f"cluster: JAX runs no programs on {pool.device.name} ({platform}). "
            f"Allowed: devices of {', '.join(PLATFORMS)}; others take part by "
            "placement."
        )
    return PLATFORMS[platform]


def choices_of(
    question: Question, pool: Pool, can: Capabilities, batch: int
) -> Choices:
    """What there is to choose, remat apart.

    Args:
        question: the step.
        pool: like devices.
        can: knobs that are searched.
        batch: what meshes have to divide.
    """
    divides: dict[str, tuple[int, ...]] = {"replica": (), "fsdp": (), "tensor": ()}
    if "sequence" in can.axes and question.sequence_dims:
        sizes = (question.graph.dims[d].sizes[0] for d in question.sequence_dims)
        divides["sequence"] = tuple(sizes)
    if "expert" in can.axes and question.expert_arrays:
        dims = {question.graph.dims[d] for d in question.expert_arrays.values()}
        divides["expert"] = tuple({size for dim in dims for size in dim.sizes})
    # Arrays with other rows than the rest cannot be cut into parts with them.
    parts = can.microbatches and question.is_batch_alike
    layers = layers_of(question, pool.device) if "stage" in can.axes else None
    if layers is not None:
        divides["stage"] = (layers.count,)
    return Choices(
        num_devices=pool.num_devices,
        batch=batch,
        divides={axis: sizes for axis, sizes in divides.items() if axis in can.axes},
        data_axes=("replica", "fsdp", "expert"),
        levels=tuple(level.size for level in pool.levels),
        max_microbatches=min(batch, _MAX_MICROBATCHES) if parts else 1,
        zero=tuple(sorted(can.zero)),
    )


def check_offload(pins: Mapping[str, Any], can: Capabilities, pool: Pool) -> None:
    """Refuses a pinned offload that there is no way to do.

    Raises:
        ValueError: says what it lacks.
    """
    if pins.get("offload") and (not can.offload or pool.host_link is None):
        lacks = "this entry point cannot" if not can.offload else "no link to the host"
        raise ValueError(
            f"offload=True cannot be met on {pool.words}: {lacks}. Plan with loss= and "
            "optimizer=, for devices whose `host_link` is known (`Pool.host_link`)."
        )


def remats(can: Capabilities, pins: Mapping[str, Any]) -> tuple[Remat, ...]:
    """Remat policies in the order in which they save more memory and cost more time."""
    if pins.get("remat") in can.remat:
        return (pins["remat"],)
    return tuple(remat for remat in REMATS if remat in can.remat)
