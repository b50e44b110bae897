"""What plans can really be run: per entry point and backend the knobs that work.

The published list: search stays within it, and whoever runs a plan checks it against
it. Pure; must not know devices, models or how a plan is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dtft.planner.meshes import AXES
from dtft.planner.plan import Knobs, Plan, Remat

Entry = Literal["step", "loss"]
Backend = Literal["cpu", "gpu", "tpu"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one entry point can do on one backend."""

    axes: frozenset[str]
    """Mesh axes that may be larger than 1."""
    microbatches: bool
    """Whether gradients can be accumulated over parts of the batch."""
    remat: frozenset[Remat]
    """Rematerialization policies."""
    zero: frozenset[int]
    """ZeRO levels."""
    constraints: bool = True
    """Whether values inside the program can be given shardings."""
    offload: bool = False
    """Whether optimizer state can be kept in host memory between updates."""


_AXES = frozenset(AXES) - {"stage"}
_STEP = Capabilities(
    axes=_AXES,
    microbatches=False,
    remat=frozenset({"none"}),
    # Gradients (level 2) exist only inside of the user's step: constraints divide them.
    zero=frozenset({0, 1, 3}),
)
_LOSS = Capabilities(
    axes=_AXES,
    microbatches=True,
    remat=frozenset({"none", "dots", "full"}),
    zero=frozenset({0, 1, 2, 3}),
    offload=True,
)
CAPABILITIES: Mapping[tuple[Entry, Backend], Capabilities] = {
    ("step", "cpu"): _STEP,
    ("step", "gpu"): _STEP,
    ("step", "tpu"): _STEP,
    ("loss", "cpu"): _LOSS,
    ("loss", "gpu"): _LOSS,
    ("loss", "tpu"): _LOSS,
}
"""The list. No backend has `stage`: entry points take any step or loss, and nobody has
said what its layers are. A config's own mesh can have it (`train/pipelined.py`)."""

PLATFORMS: Mapping[str, Backend] = {
    "cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu",
}  # fmt: skip
"""Platforms of device types, and what JAX calls them, to the backend of each."""


def everything(rematerializes: bool) -> Capabilities:
    """All knobs that can be priced, whether or not anything runs them.

    Args:
        rematerializes: whether programs with parts computed again can be traced.
    """
    return Capabilities(
        axes=frozenset(AXES),
        microbatches=True,
        remat=_LOSS.remat if rematerializes else _STEP.remat,
        zero=frozenset({0, 1, 2, 3}),
        offload=True,
    )


def unsupported(
    entry: Entry, backend: Backend, mesh: Mapping[str, int], knobs: Knobs
) -> tuple[str, ...]:
    """The knobs that cannot be run, in words; empty when the plan can be.

    >>> unsupported("step", "cpu", {"replica": 8}, Knobs(microbatches=4))
    ('microbatches=4: entry step on cpu runs microbatches=1',)
    """
    can, reasons = CAPABILITIES[entry, backend], []
    where = f"entry {entry} on {backend} runs"
    for axis, size in mesh.items():
        if size > 1 and axis not in can.axes:
            reasons.append(f"mesh.{axis}={size}: {where} {_listed(can.axes)}")
    if knobs.microbatches > 1 and not can.microbatches:
        reasons.append(f"microbatches={knobs.microbatches}: {where} microbatches=1")
    if knobs.remat not in can.remat:
        reasons.append(f"remat={knobs.remat}: {where} {_listed(can.remat)}")
    if knobs.zero not in can.zero:
        reasons.append(f"zero={knobs.zero}: {where} {_listed(can.zero)}")
    if knobs.offload and not can.offload:
        reasons.append(f"offload=True: {where} offload=False")
    return tuple(reasons)


def check_runnable(plan: Plan, entry: Entry, platform: str) -> None:
    """Refuses a plan that this entry point cannot run on these devices.

    Args:
        plan: what is to be run.
        entry: the entry point that is to run it.
        platform: JAX's name of the devices' platform.

    Raises:
        ValueError: names the entry point or every knob that does not work.
    """
    if plan.entry != entry:
        other = {"step": "plan.jit(step)", "loss": "make_step(loss, optimizer, plan)"}
        raise ValueError(
            f"plan.entry={plan.entry!r}: this plan was made for {other[plan.entry]}, "
            f"not for {other[entry]}. Use that, or make a plan with {entry}=..."
        )
    if platform not in PLATFORMS:
        raise ValueError(
            f"platform={platform!r} is not one that plans are run on. Known: "
            f"{', '.join(PLATFORMS)}."
        )
    reasons = unsupported(entry, PLATFORMS[platform], plan.mesh, plan.knobs)
    if reasons:
        raise ValueError(
            f"this plan cannot be run here ({'; '.join(reasons)}): it is a what-if "
            "plan. Make one without --what-if, or pin these knobs."
        )


def _listed(names: frozenset[str] | frozenset[Remat] | frozenset[int]) -> str:
    return ", ".join(sorted(map(str, names)))
