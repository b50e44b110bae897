"""The plan: mesh, shardings, further settings (knobs), and predicted time and memory.

The classes here hold values only, with their JSON form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dtft.planner import serialization
from dtft.planner.types import AXES, Remat, Schedule, Spec

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings of a plan besides the mesh and the shardings."""

    microbatches: int = 1
    """The number of batch parts whose gradients are accumulated one after another."""
    remat: Remat = "none"
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: which arrays the axis `fsdp` divides, besides the batch. 0: none. 1:
    the optimizer state. 2: also gradients. 3: also parameters."""
    offload: bool = False
    """Whether optimizer state is kept in host memory between updates; `Plan.host` lists
    its leaves."""
    virtual_stages: int = 1
    """The number of chunks of layers on each pipeline stage (interleaving)."""
    stage_layers: tuple[int, ...] = ()
    """The number of layers of each pipeline stage, first to last; () if all stages have
    equally many."""
    schedule: Schedule = "1f1b"
    """Schedule of the pipeline; without effect in plans without an axis `stage`."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a step: its kind, mesh axes, bytes, and where it comes from.

    It comes from an operator, or from an array such as a parameter.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
    axes: tuple[str, ...]
    num_bytes: int
    """Bytes of one execution: of a device's operand or of its result, whichever is
    larger."""
    trips: int
    """The number of executions in a step."""
    where: str
    """Description of the collective's operator or array in words, such as `gradient of`
    a parameter's path, or pass, primitive and shape of the operator."""
    seconds: float = 0.0
    """Seconds of all executions in a step, including those that computation hides."""


ComputeKind = Literal["products", "attention", "element-wise", "other"]
"""Kinds of work. `products`: matmuls and convolutions outside of attention.
`attention`: attention, with its matmuls and softmax. `element-wise`: operators that XLA
fuses, such as element-wise functions and casts. `other`: all other operators, such as
reductions, gathers, scatters and sorts."""


@dataclass(frozen=True, kw_only=True)
class ComputeShare:
    """Seconds in a step of one operator, or of all operators with one description.

    `where` is the description, such as `gradient of` a parameter.
    """

    where: str
    """`gradient of` and the path of the parameter whose gradient the operator computes.
    For other matmuls, convolutions and kernels, the path of the parameter that they
    read, and `forward` or `backward`. For all other operators, primitive and shape in
    place of the path."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AxisUse:
    """Fabric levels of a mesh axis, and the share of the work that the axis divides.

    A fabric level is, for example, NVLink within a host or the network between hosts.
    """

    levels: tuple[tuple[float, str], ...]
    """For each fabric level of the axis, innermost first: the number of devices (or
    groups of the level before) that the axis joins on the level, and the kind of link.
    The number is a fraction if the axis does not fill the groups evenly."""
    work: float
    """Share of the matmul and convolution flops that the axis divides; in a program
    without matmuls and convolutions, the share of all flops. The devices of the axis
    replicate the rest."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of one step: parts that add up (terms), such as `compute`."""

    terms: Mapping[str, float]
    """Seconds of each term: compute, collectives (the part that computing does not
    hide), bubble, optimizer, offload, launch. Bubble and offload are left out if they
    are 0."""
    low_s: float
    high_s: float
    """Upper end of the prediction interval, in seconds; `low_s` is the lower end. The
    interval is meant to hold 80 % of measured step times (`cluster.INTERVAL_SHARE`);
    `Accuracy.interval_s` computes it."""
    source: str
    """Origin of the cost model's constants, such as `catalog (uncalibrated)`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Map from a term to the factor fitted to past runs, by which the seconds in
    `terms` are already multiplied."""

    @property
    def step_s(self) -> float:
        """Seconds of one step: the sum of `terms`."""
        return sum(self.terms.values())

    @property
    def relative_error(self) -> float:
        """Half the width of the step time's prediction interval, divided by `step_s`.

        0 if `step_s` is 0. Reports round predicted seconds to the digits that this
        error allows.
        """
        width_s, step_s = self.high_s - self.low_s, self.step_s
        return max(0.0, width_s / 2 / step_s) if step_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A candidate of the search: its mesh, settings, predicted step time and memory.

    `memory_bytes` are the bytes that it needs on the fullest device. `fits` says
    whether the device has so much memory.
    """

    name: str
    mesh: Mapping[str, int]
    knobs: Knobs
    step_s: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of the planner: mesh, shardings, settings, predicted time and memory.

    A search with equal inputs gives equal plans.
    """

    entry: Literal["step", "loss"]
    """What `dtft.plan` was given: `loss` for a loss and an optimizer, `step` for a
    whole training step. A plan of `loss` is run by `dtft.train.make_step`, a plan of
    `step` by `plan.jit`."""
    mesh: Mapping[str, int]
    """Map from axis name to size, slowest-varying (outermost on the fabric) first."""
    axes: Mapping[str, AxisUse] = field(default_factory=dict)
    """Fabric levels and work share of each mesh axis larger than 1. Empty after a
    change of the number of replicas, and in older files."""
    knobs: Knobs
    state: Mapping[str, Spec]
    """Map from the path of each state leaf (with entry `loss`: of each parameter) to
    its spec. The path is within the tree and lacks the argument's name."""
    batch: Mapping[str, Spec]
    """Map from the path of each leaf of the batch to its spec."""
    optimizer: Mapping[str, Spec] = field(default_factory=dict)
    """With entry `loss`: map from the path of each optimizer state leaf to its spec."""
    host: tuple[str, ...] = ()
    """With entry `loss`: paths of the optimizer state leaves that are kept in host
    memory between updates; empty without the knob `offload`."""
    host_bytes: int = 0
    """Bytes of host memory that each device needs for the leaves of `host`."""
    constraints: Mapping[int, Spec] = field(default_factory=dict)
    """Map from the number of an operator to the spec of its first output. With entry
    `step`: operators of the step's program. With entry `loss`: operators of the program
    of `loss(params, batch)` alone, which `make_step` differentiates, accumulates and
    rematerializes."""
    prediction: Prediction
    memory: Mapping[str, int]
    """Bytes that the plan needs on the fullest device, by what they hold: parameters,
    gradients, optimizer, activations, batch, reserve (memory that is kept free). With a
    pipeline, each entry is that of the stage where it is largest."""
    capacity_bytes: int
    """Memory of the fullest device, in bytes."""
    collectives: tuple[Collective, ...] = ()
    compute: Mapping[ComputeKind, float] = field(default_factory=dict)
    """Seconds of the term `compute` by kind of work. Empty in older files."""
    dearest: tuple[ComputeShare, ...] = ()
    """The operators that take the most seconds of `compute`, most seconds first."""
    examples: int = 0
    """Examples in a step; 0 if unknown."""
    at_peak_s: float = 0.0
    """Seconds of the matmuls, convolutions and custom kernels of the forward and
    backward pass at the peak FLOP/s of all devices, without recomputed ones."""
    bound_s: float = 0.0
    """Lower bound in seconds of the step time of any plan on this cluster. It counts
    no communication."""
    roofline: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step that this plan keeps each resource of a device busy, if the
    resource works at its peak: `compute`, `memory bandwidth`, and the links of each
    level, such as `InfiniBand between hosts`. Empty in older files."""
    alternatives: tuple[Alternative, ...] = ()
    left_out: tuple[Alternative, ...] = ()
    """At most one candidate: the fastest of those that are predicted faster than the
    plan, but are ranked behind it, because some of their devices repeat the work of
    others. () if there is none."""
    runnable: bool = True
    """Whether `dtft.train.make_step` (with entry `step`: `plan.jit`) can run the plan
    on its backend. False only if the search was told to include settings that cannot be
    run (`what_if`), and the plan has one."""
    model_hash: str = ""
    cluster_hash: str = ""
    cluster: str = ""
    """Description of the cluster in words."""
    predicted_for: str = ""
    """Devices and kinds of links that the prediction is for, in words, such as
    `2x8xh100 by NVLink and InfiniBand`. Empty if the prediction does not hold for this
    plan, for example after a change of the number of replicas, and in older files."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the plan needs on the fullest device: the sum of `memory`.

        The sum includes a reserve that is kept free. With a pipeline it is an upper
        bound, because each entry of `memory` is that of the stage where it is largest.
        """
        return sum(self.memory.values())

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: `at_peak_s` as a share of the predicted step time.

        `at_peak_s` is the time that the step's matmuls, convolutions and custom kernels
        take at the peak FLOP/s of all devices. 0 if either time is 0 (unknown).
        """
        step_s = self.prediction.step_s
        return self.at_peak_s / step_s if step_s else 0.0

    @property
    def roofline_s(self) -> float:
        """Lower bound in seconds of this plan's step time, communication included.

        This is the largest entry of `roofline`: the seconds that the busiest resource
        needs at its peak. 0 if `roofline` is empty.
        """
        return max(self.roofline.values(), default=0.0)

    @property
    def bound_by(self) -> str:
        """Name of the resource that is busy longest, such as `compute`.

        This is the resource with the most seconds in `roofline`; '' if `roofline` is
        empty.
        """
        return max(self.roofline, key=lambda name: self.roofline[name], default="")

    @property
    def fits(self) -> bool:
        """Whether `memory_bytes` is at most a device's memory, `capacity_bytes`."""
        return self.memory_bytes <= self.capacity_bytes

    def to_json(self) -> str:
        """Writes the plan as versioned JSON, which `from_json` reads."""
        return serialization.write_versioned(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan from the JSON that `to_json` writes.

        Raises:
            ValueError: the text is not JSON, has another version, or is not a plan;
                the message names the wrong field and its allowed values.
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
    """Checks mesh, knobs, specs, `axes` and `host` of a plan read from a file.

    `axes` has, for each mesh axis, its fabric levels and the share of the step's work
    that it divides. `host` has the paths of optimizer state that is kept in host
    memory. Mesh and knobs of the candidates that the plan lists beside the selected one
    (`alternatives`, `left_out`) are checked, too.

    Raises:
        ValueError: a field has a value that is not allowed; the message names the
            field.
    """
    _check_choice("", plan.mesh, plan.knobs)
    for at, one in enumerate(plan.alternatives):
        _check_choice(f"alternatives[{at}].", one.mesh, one.knobs)
    for at, one in enumerate(plan.left_out):
        _check_choice(f"left_out[{at}].", one.mesh, one.knobs)
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
    """Checks a mesh and knobs: axes are known, and sizes and counts are 1 or more.

    The counts are `microbatches`, `virtual_stages` and those of `stage_layers`, which
    has one number for each stage. Names of fields in errors begin with `where`, such as
    `alternatives[0].`.

    Raises:
        ValueError: a value is not allowed; the message names the field.
    """
    if not mesh or not mesh.keys() <= set(AXES) or min(mesh.values()) < 1:
        raise ValueError(
            f"{where}mesh={dict(mesh)}. Allowed: sizes of 1 or more of one or some of "
            f"{', '.join(AXES)}"
        )
    for name in ("microbatches", "virtual_stages"):
        if (number := getattr(knobs, name)) < 1:
            raise ValueError(f"{where}knobs.{name}={number}. Allowed: 1 or more")
    layers, stages = knobs.stage_layers, mesh.get("stage", 1)
    if layers and (len(layers) != stages or min(layers) < 1):
        raise ValueError(
            f"{where}knobs.stage_layers={list(layers)}. Allowed: a number of 1 or more "
            f"for each of the {stages} stages of its mesh; none for equal stages"
        )
