"""The plan: which mesh and shardings, which knobs, what they are predicted to cost.

Values only, with their JSON form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dtft.planner import serialization
from dtft.planner.types import AXES, Remat, Schedule, Spec

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What a plan may set beside shardings."""

    microbatches: int = 1
    """Parts of the batch whose gradients are accumulated, one after another."""
    remat: Remat = "none"
    zero: Literal[0, 1, 2, 3] = 0
    """What is divided over data parallel devices: 1 optimizer state, 2 also gradients,
    3 also parameters (the axis `fsdp`)."""
    offload: bool = False
    """Whether optimizer state is kept in host memory between updates (`Plan.host`)."""
    virtual_stages: int = 1
    """Parts of its layers that each pipeline stage has, one after another."""
    schedule: Schedule = "1f1b"
    """Of a pipeline; what plans without an axis `stage` have means nothing."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Communication that the program does, of one kind at one place."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
    axes: tuple[str, ...]
    num_bytes: int
    """Of the larger of a device's operand and its result, one execution."""
    trips: int
    """Executions in a step."""
    where: str
    """The operator or array it belongs to."""
    seconds: float = 0.0
    """All executions, before overlap."""


@dataclass(frozen=True, kw_only=True)
class AxisUse:
    """Where the devices of a mesh axis lie, and how much of the work it divides."""

    levels: tuple[tuple[float, str], ...]
    """Of each level of the fabric that it goes along, the fastest first: the devices
    (or groups of the level before) that it joins there, and the kind of link. A
    fraction where it does not fill the groups evenly."""
    work: float
    """Share of the operations of matmuls and convolutions (of all, where there are
    none) that it divides. What it does not divide its devices do alike."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of one step, by term."""

    terms: Mapping[str, float]
    """compute, collectives (exposed), bubble, optimizer, offload, launch; seconds.
    Bubble and offload only where there are stages, or state in host memory."""
    low_s: float
    high_s: float
    """The interval that the calibration supports."""
    source: str
    """Where the constants come from, such as `catalog (uncalibrated)`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Term to the factor, in `terms` already, that past runs gave."""

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another candidate, for the ranked table."""

    name: str
    mesh: Mapping[str, int]
    knobs: Knobs
    step_s: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the planner returns; the same for the same question."""

    entry: Literal["step", "loss"]
    """Which entry point it was made by, and can be run by."""
    mesh: Mapping[str, int]
    """Axis name to size, slowest-varying (outermost on the fabric) first."""
    axes: Mapping[str, AxisUse] = field(default_factory=dict)
    """What each axis of the mesh is there for; empty in plans of older files."""
    knobs: Knobs
    state: Mapping[str, Spec]
    """Path of each leaf of the state (entry loss: of the parameters) to its spec; the
    path within that tree, so without the argument's name."""
    batch: Mapping[str, Spec]
    """Path of each leaf of the batch to its spec."""
    optimizer: Mapping[str, Spec] = field(default_factory=dict)
    """Entry loss: path of each leaf of the optimizer state to its spec."""
    host: tuple[str, ...] = ()
    """Entry loss: paths of the leaves of the optimizer state that are kept in host
    memory between updates; empty without the knob `offload`."""
    host_bytes: int = 0
    """Bytes of host memory that each device needs for them."""
    constraints: Mapping[int, Spec] = field(default_factory=dict)
    """Number of an operator to the spec of its first output. Entry step: of the step's
    program; entry loss: of the program of `loss(params, batch)` alone, which is what
    `make_step` differentiates, accumulates and rematerializes."""
    prediction: Prediction
    memory: Mapping[str, int]
    """Bytes of the fullest device by term: parameters, gradients, optimizer,
    activations, buffers, reserve."""
    capacity_bytes: int
    """Memory of that device."""
    collectives: tuple[Collective, ...] = ()
    bound_s: float = 0.0
    """No plan of this step on this cluster is faster than this."""
    alternatives: tuple[Alternative, ...] = ()
    runnable: bool = True
    """False for what-if plans that this entry point or backend cannot run."""
    model_hash: str = ""
    cluster_hash: str = ""
    cluster: str = ""
    """The cluster in words."""
    predicted_for: str = ""
    """The devices that the prediction is of (`Pool.fabric_words`); empty where it is of
    none, as where the replicas were changed since, and in older files."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room for it, the reserve included."""
        return self.memory_bytes <= self.capacity_bytes

    def to_json(self) -> str:
        """The plan as JSON, versioned; equal plans give equal text."""
        return serialization.write_versioned(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan of `to_json`.

        Raises:
            ValueError: no JSON, another version, or not a plan: names the field that
                is none of a plan's, and what is allowed.
        """
        return serialization.read_versioned(
            text,
            Plan,
            name="plan",
            schema=SCHEMA,
            again="Make the plan again with `dtft plan CONFIG --json PATH`.",
            check=_check,
        )


def _check(plan: Plan) -> None:
    """Refuses what a plan never has, whoever changed the file.

    Raises:
        ValueError: names the field.
    """
    _check_choice("", plan.mesh, plan.knobs)
    for at, one in enumerate(plan.alternatives):
        _check_choice(f"alternatives[{at}].", one.mesh, one.knobs)
    mesh = ", ".join(plan.mesh)
    for name in ("state", "batch", "optimizer", "constraints"):
        for path, spec in getattr(plan, name).items():
            used = [axis for axes in spec for axis in axes]
            if len(set(used)) < len(used) or not set(used) <= plan.mesh.keys():
                raise ValueError(
                    f"{name}[{path!r}]={[list(axes) for axes in spec]}. Allowed: axes "
                    f"of its mesh ({mesh}), each once"
                )
    for name, used in (("axes", plan.axes), ("host", plan.host)):
        known = plan.mesh if name == "axes" else plan.optimizer
        if unknown := [one for one in used if one not in known]:
            allowed = mesh if name == "axes" else "paths of its optimizer"
            raise ValueError(f"{name} has {unknown[0]!r}. Allowed: {allowed}")


def _check_choice(where: str, mesh: Mapping[str, int], knobs: Knobs) -> None:
    """Refuses meshes and knobs that nothing can be run on.

    Raises:
        ValueError: names the field.
    """
    if not mesh or not mesh.keys() <= set(AXES) or min(mesh.values()) < 1:
        raise ValueError(
            f"{where}mesh={dict(mesh)}. Allowed: sizes of 1 or more of one or some of "
            f"{', '.join(AXES)}"
        )
    for name in ("microbatches", "virtual_stages"):
        if (number := getattr(knobs, name)) < 1:
            raise ValueError(f"{where}knobs.{name}={number}. Allowed: 1 or more")
