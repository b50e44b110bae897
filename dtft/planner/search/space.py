"""The space of candidates as columns: meshes, orders of axes on the fabric, and knobs.

A knob is a setting of a plan other than its mesh, such as the ZeRO level.
`CAPABILITIES` declares which knobs can be run with each entry (`dtft.plan` with `step=`
or `loss=`) on each backend. Only a what-if search also prices knobs that cannot be run.
The code that runs a plan checks the plan against `CAPABILITIES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dtft.planner.cost import SCHEDULES
from dtft.planner.plan import Knobs, Plan
from dtft.planner.search.meshes import BASELINES, divisors
from dtft.planner.types import AXES, Remat

Entry = Literal["step", "loss"]
Backend = Literal["cpu", "gpu", "tpu"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The knobs that can be run with one entry on one backend.

    A knob is a setting of a plan, such as the ZeRO level. The entry is the argument
    that `dtft.plan` gets: `step=` or `loss=`.
    """

    axes: frozenset[str]
    """Mesh axes that may be larger than 1."""
    microbatches: bool
    """Whether gradients can be accumulated over parts of the batch."""
    remat: frozenset[Remat]
    """Rematerialization policies."""
    zero: frozenset[int]
    """ZeRO levels."""
    constraints: bool = True
    """Whether intermediate values of the program can be given shardings."""
    offload: bool = False
    """Whether optimizer state can be kept in host memory between updates."""


_AXES = frozenset(AXES) - {"stage"}
_STEP = Capabilities(
    axes=_AXES,
    microbatches=False,
    remat=frozenset({"none"}),
    # Level 2 divides gradients. Here they exist only inside the user's step, where
    # constraints divide them.
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
"""The knobs (settings of a plan) that can be run with each entry on each backend.

The entries are `dtft.plan` with `step=` and with `loss=`. Neither entry can run the
axis `stage`, because a step or loss does not declare its layers. The mesh of a training
config can have this axis (`parallel/pipeline.py`).
"""

PLATFORMS: Mapping[str, Backend] = {
    "cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu",
}  # fmt: skip
"""The backend of each platform; keys are platforms of device types and JAX's names."""


def everything(rematerializes: bool) -> Capabilities:
    """Returns all knobs that can be priced, including knobs that cannot be run.

    Args:
        rematerializes: whether rematerialized programs can be traced; if not, "none"
            is the only remat policy.
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
    """Returns a text for each setting of a plan that cannot be run.

    Returns () if every setting can be run with this entry on this backend.

    Args:
        entry: "step" for plans that run by `Plan.jit`, "loss" for plans that run by
            `dtft.train.make_step`.
        backend: JAX's backend.
        mesh: map from an axis to its size.
        knobs: the settings other than the mesh.

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
    """Checks that a plan was made for an entry, and that it can be run on a platform.

    Args:
        plan: the plan to run.
        entry: "step" if `Plan.jit` runs the plan, "loss" if `dtft.train.make_step`
            does.
        platform: JAX's name of the devices' platform.

    Raises:
        ValueError: the plan cannot be run; names the entry, the platform or every knob
            that prevents it.
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


# Candidates are pruned by divisibility, by a lower bound of memory and by the user's
# pins. Stored as columns, tens of thousands of candidates take milliseconds.


REMATS: tuple[Remat, ...] = ("none", "dots", "full")
"""The remat policies; the column `remat` has positions in this tuple."""


@dataclass(frozen=True, kw_only=True)
class MemoryFloor:
    """A lower bound of the bytes of state and gradients on each device.

    State is parameters and optimizer state. The bound holds for every way to divide the
    arrays among devices. `gradients` has the bytes of all gradients; 0 leaves them out.
    """

    parameters: int
    """Bytes of the whole model's parameters."""
    gradients: int
    optimizer: int
    """Bytes of the whole model's optimizer state."""
    capacity: int
    """Bytes of a device that are available for state and gradients."""

    def bytes_of(self, sizes: np.ndarray, zero: np.ndarray) -> np.ndarray:
        """Computes a lower bound of the bytes on each device; float [candidates].

        Each array is assumed to be divided by all axes that may divide it. All axes
        except `replica` and `fsdp` may divide any array. `fsdp` divides the optimizer
        state from ZeRO level 1, gradients from 2 and parameters from 3.

        Args:
            sizes: sizes of the axes; [candidates, axes].
            zero: ZeRO level; [candidates].
        """
        fsdp = sizes[:, AXES.index("fsdp")]
        model = sizes.prod(axis=1) // (sizes[:, AXES.index("replica")] * fsdp)
        state = (self.optimizer, self.gradients, self.parameters)
        each = [
            num_bytes / np.where(zero > level, model * fsdp, model)
            for level, num_bytes in enumerate(state)
        ]
        return np.sum(each, axis=0)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values that a search may give to each axis of the mesh and each setting."""

    num_devices: int
    batch: int
    """Samples in a step."""
    divides: Mapping[str, tuple[int, ...]]
    """For each axis that is searched, the array sizes that the size of the axis must
    divide; () allows any size."""
    data_axes: tuple[str, ...] = ("replica", "fsdp")
    """Axes that divide the batch; an axis that is not searched has size one."""
    levels: tuple[int, ...] = ()
    """The number of members that each level of the fabric joins, innermost first.

    The first level is a host and joins devices; the others join groups. () means one
    level."""
    max_microbatches: int = 1
    why_one_microbatch: str = ""
    """Why the batch cannot be computed in microbatches (parts); '' if it can, or if the
    entry point has none."""
    remat: tuple[Remat, ...] = ("none",)
    zero: tuple[int, ...] = (0, 3)
    """ZeRO levels to search. Levels above 0 divide over `fsdp`: a mesh has an axis
    `fsdp` larger than one exactly if its level is above 0."""
    memory: MemoryFloor | None = None
    """Lower bound of the memory of a candidate, by which candidates are left out; None
    leaves out none."""
    fewer: tuple[int, ...] | None = ()
    """Smaller numbers of devices to search too, besides all devices and the number
    that the batch may require (`MeshRules.fewer`). With None, `decision` keeps only
    meshes of all devices; `enumerate_space` treats None as ()."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "batch", "max_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is less than 1. Give 1 or more."
                )
        if not set(self.zero) <= {0, 1, 2, 3}:
            raise ValueError(f"zero={self.zero} has other levels than 0, 1, 2 and 3.")
        unknown = [a for a in (*self.divides, *self.data_axes) if a not in AXES]
        if unknown:
            raise ValueError(
                f"axis {unknown[0]!r} is not an axis of a mesh. Allowed: "
                f"{', '.join(AXES)}."
            )


@dataclass(frozen=True, kw_only=True)
class Reason:
    """The number of candidates that remained after one rule of the enumeration.

    `rule` is the rule in words. Before it there were `of` candidates (or meshes), and
    `left` of them passed it. For a rule that only adds or combines candidates, both
    fields are the number of candidates that the rule made.
    """

    rule: str
    left: int
    of: int

    def __str__(self) -> str:
        return f"{self.left:,} of {self.of:,}: {self.rule}"


@dataclass(frozen=True, kw_only=True)
class SearchCandidate:
    """One candidate of the search: a mesh and the values of the knobs (settings)."""

    mesh: Mapping[str, int]
    """Sizes of the axes, slowest-varying (outermost on the fabric) first."""
    knobs: Knobs
    batch: int
    """Samples in a step; above the requested batch if it had to be rounded up."""
    devices_used: int
    baseline: str
    """The rule of thumb (an entry of `BASELINES`) that the candidate follows; '' for
    none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """A set of candidates as columns: arrays with one entry per candidate."""

    columns: Mapping[str, np.ndarray]
    """int64, one entry per candidate: each of `AXES`, `microbatches`, `zero`, `remat`
    (position in `REMATS`), `offload`, `virtual_stages`, `schedule` (position in
    `SCHEDULES`), `order` (position in `orders`), `batch`, `devices_used`,
    `baseline` (position in `BASELINES`) and `mesh`. The column `mesh` numbers the pairs
    of sizes and order from 0: candidates with equal numbers differ in knobs only."""
    orders: tuple[tuple[str, ...], ...]
    """Orders of the axes on the fabric, slowest-varying first."""
    reasons: tuple[Reason, ...] = field(default=())
    """The number of candidates that each rule left, in the order of application."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage of every candidate, first to last. () means that
    each candidate has equal stages."""

    def __len__(self) -> int:
        return len(self.columns["batch"])

    def __getitem__(self, at: int) -> SearchCandidate:
        row = {name: int(column[at]) for name, column in self.columns.items()}
        zero = row["zero"]
        assert zero in (0, 1, 2, 3)
        return SearchCandidate(
            mesh={axis: row[axis] for axis in self.orders[row["order"]]},
            knobs=Knobs(
                microbatches=row["microbatches"],
                remat=REMATS[row["remat"]],
                zero=zero,
                offload=bool(row["offload"]),
                virtual_stages=row["virtual_stages"],
                stage_layers=self.stage_layers,
                schedule=SCHEDULES[row["schedule"]],
            ),
            batch=row["batch"],
            devices_used=row["devices_used"],
            baseline=BASELINES[row["baseline"]],
        )

    @property
    def sizes(self) -> np.ndarray:
        """Sizes of all mesh axes, in their usual order (`AXES`), for each candidate.

        int64 [candidates, axes]; 1 for an axis that the candidate does not use.
        """
        return np.stack([self.columns[axis] for axis in AXES], axis=1)

    def with_remat(self, remat: Remat) -> "Space":
        """Returns these candidates with one remat policy for all."""
        numbers = np.full(len(self), REMATS.index(remat))
        return replace(self, columns={**self.columns, "remat": numbers})

    def with_offload(self) -> "Space":
        """Returns these candidates with their optimizer state in host memory."""
        columns = {**self.columns, "offload": np.ones(len(self), np.int64)}
        return replace(self, columns=columns)

    def with_chunks(self, num_layers: int, pinned: int | None) -> "Space":
        """Combines each candidate with every number of virtual stages that it allows.

        Virtual stages are the groups of layers that one pipeline stage runs. The
        product of the stages and the virtual stages must divide the number of layers.
        With more than one virtual stage, there must also be two or more stages, and the
        number of stages must divide the number of microbatches. Candidates that allow
        no number of virtual stages are dropped.

        Args:
            num_layers: the number of layers of the model.
            pinned: the only number of virtual stages to combine, if the user has fixed
                it.
        """
        stage, parts = self.columns["stage"], self.columns["microbatches"]
        found = []
        for chunks in divisors(num_layers) if pinned is None else (pinned,):
            fits = num_layers % (stage * chunks) == 0
            fits &= (chunks == 1) | ((stage > 1) & (parts % stage == 0))
            part = self.where(fits)
            numbers = np.full(len(part), chunks)
            found.append({**part.columns, "virtual_stages": numbers})
        columns = {
            name: np.concatenate([part[name] for part in found])
            for name in self.columns
        }
        return replace(self, columns=columns)

    def joined(self, other: "Space") -> "Space":
        """Returns these candidates, followed by those of `other`.

        Both must have the same `orders`, the orders of axes on the fabric.
        """
        columns = {
            name: np.concatenate([column, other.columns[name]])
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns)

    def where(self, mask: np.ndarray) -> "Space":
        """Returns the candidates that a mask or indices select."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        return replace(self, columns=columns)
