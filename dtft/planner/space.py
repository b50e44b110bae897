"""The outer search space: every mesh, order on the fabric and knob that may be best.

Decides which candidates are worth a price, from divisibility, a floor of memory and the
pins of the user; holds them as columns, so that tens of thousands take milliseconds.
Must not know what a candidate costs or how arrays are divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dtft.planner.baselines import BASELINES
from dtft.planner.meshes import AXES, divisors
from dtft.planner.plan import Knobs, Remat
from dtft.planner.stages import SCHEDULES

REMATS: tuple[Remat, ...] = ("none", "dots", "full")
"""What numbers in the column `remat` stand for."""


@dataclass(frozen=True, kw_only=True)
class MemoryFloor:
    """What no device can do without, whatever arrays are divided how."""

    parameters: int
    """Bytes of the whole model's parameters."""
    gradients: int
    optimizer: int
    """Bytes of its optimizer state."""
    capacity: int
    """Bytes that a device has for them."""

    def bytes_of(self, sizes: np.ndarray, zero: np.ndarray) -> np.ndarray:
        """Bytes on each device: nothing is on fewer than the axes that may divide it.

        All axes but `replica` and `fsdp` may divide anything; `fsdp` divides optimizer
        state from zero=1 on, gradients from 2, parameters from 3.

        Args:
            sizes: of the axes; [candidates, axes].
            zero: level; [candidates].
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
    """What a plan may choose from."""

    num_devices: int
    batch: int
    """Samples in a step."""
    divides: Mapping[str, tuple[int, ...]]
    """Axes to search, each with sizes that it has to divide, all of them; () any."""
    data_axes: tuple[str, ...] = ("replica", "fsdp")
    """Axes that the batch is divided over; those that are not searched count as one."""
    levels: tuple[int, ...] = ()
    """Devices, then groups, that each level of the fabric joins, innermost first; the
    first is a host. () for one level."""
    max_microbatches: int = 1
    remat: tuple[Remat, ...] = ("none",)
    zero: tuple[int, ...] = (0, 3)
    """Levels to search. Those above 0 divide over `fsdp`: a mesh has an axis `fsdp`
    larger than one exactly where the level is above 0."""
    memory: MemoryFloor | None = None
    fewer: tuple[int, ...] | None = ()
    """Numbers of devices, fewer than there are, to look at beside all of them and
    those that the batch needs; None: only all of them."""

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
    """What one rule left of the candidates."""

    rule: str
    left: int
    of: int

    def __str__(self) -> str:
        return f"{self.left:,} of {self.of:,}: {self.rule}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the space."""

    mesh: Mapping[str, int]
    """Axes larger than one, slowest-varying (outermost on the fabric) first."""
    knobs: Knobs
    batch: int
    """Samples in a step; more than asked for where the batch had to be rounded up."""
    devices_used: int
    baseline: str
    """One of `BASELINES`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """Candidates as columns; the same for the same question."""

    columns: Mapping[str, np.ndarray]
    """int64, one entry per candidate: each of `AXES`, `microbatches`, `zero`, `remat`
    (position in `REMATS`), `offload`, `virtual_stages`, `schedule` (position in
    `SCHEDULES`), `order` (position in `orders`), `batch`, `devices_used`,
    `baseline` (position in `BASELINES`) and `mesh` (from 0 on, one number for each pair
    of sizes and order: candidates that share it differ in knobs only)."""
    orders: tuple[tuple[str, ...], ...]
    """Orders of the axes on the fabric, slowest-varying first."""
    reasons: tuple[Reason, ...] = field(default=())
    """What each rule left, in the order in which they were applied."""

    def __len__(self) -> int:
        return len(self.columns["batch"])

    def __getitem__(self, at: int) -> Candidate:
        row = {name: int(column[at]) for name, column in self.columns.items()}
        zero = row["zero"]
        assert zero in (0, 1, 2, 3)
        return Candidate(
            mesh={axis: row[axis] for axis in self.orders[row["order"]]},
            knobs=Knobs(
                microbatches=row["microbatches"],
                remat=REMATS[row["remat"]],
                zero=zero,
                offload=bool(row["offload"]),
                virtual_stages=row["virtual_stages"],
                schedule=SCHEDULES[row["schedule"]],
            ),
            batch=row["batch"],
            devices_used=row["devices_used"],
            baseline=BASELINES[row["baseline"]],
        )

    @property
    def sizes(self) -> np.ndarray:
        """Sizes of the axes, in the order of `AXES`; int64 [candidates, axes]."""
        return np.stack([self.columns[axis] for axis in AXES], axis=1)

    def with_remat(self, remat: Remat) -> "Space":
        """The same candidates, all with one remat."""
        numbers = np.full(len(self), REMATS.index(remat))
        return replace(self, columns={**self.columns, "remat": numbers})

    def with_offload(self) -> "Space":
        """The same candidates, all with optimizer state in host memory."""
        columns = {**self.columns, "offload": np.ones(len(self), np.int64)}
        return replace(self, columns=columns)

    def with_chunks(self, num_layers: int, pinned: int | None) -> "Space":
        """Pipelines with every number of virtual stages that their layers allow.

        Args:
            num_layers: of the model; whole chunks of them.
            pinned: the number of virtual stages, if it is given.
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
        """These candidates, then others of the same orders."""
        columns = {
            name: np.concatenate([column, other.columns[name]])
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns)

    def where(self, mask: np.ndarray) -> "Space":
        """The candidates that a mask or indices select."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        return Space(columns=columns, orders=self.orders, reasons=self.reasons)
