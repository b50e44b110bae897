"""Predicts every row of a table of training runs: time, TFLOP/s and memory.

The generic entry point behind `dtft plan predict`: any (model shape, cluster, parallel
layout). Text in, text out. Must not know files or command lines.
"""

import math
from dataclasses import dataclass

from dtft.planner import catalog
from dtft.planner.capabilities import PLATFORMS
from dtft.planner.cluster import Cluster, Pool
from dtft.planner.device import DeviceType
from dtft.planner.row_scales import Scales, scales_of
from dtft.planner.row_table import Habits, Row, Table
from dtft.planner.rows import step_cost
from dtft.planner.transformer_memory import memory

STEP, RATE, MEMORY, FITS = (
    "predicted_step_s",
    "predicted_tflops_per_gpu",
    "predicted_memory_bytes",
    "predicted_fits",
)
"""Columns that are added; the last is `yes` or `no`."""


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """What a row is predicted to take."""

    terms: dict[str, float]
    """Seconds by term; see `rows.STAGE_TERMS`, `rows.STEP_TERMS`, and `bubble`."""
    tflops_per_gpu: float
    """As `tflops_per_gpu` of the published tables: what is computed again counts."""
    memory: dict[str, int]
    """Bytes of the fullest device by term."""
    capacity_bytes: int
    """Of a device."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device has room for it."""
        return self.memory_bytes <= self.capacity_bytes


def predict_row(row: Row, pool: Pool, scales: Scales) -> RowPrediction:
    """The prediction of one row.

    Args:
        row: The model and its layout.
        pool: At least as many devices as the layout has.
        scales: Scalars of the device type, such as `scales_of(name)`.
    """
    found = step_cost(row.shape, row.layout, pool).terms(scales.vector())
    terms = {name: float(seconds) for name, seconds in found.items()}
    flops = row.shape.flops(row.layout.global_batch, row.layout.recompute)
    rate = flops / sum(terms.values()) / row.layout.gpus
    return RowPrediction(
        terms=terms,
        tflops_per_gpu=rate / 1e12,
        memory=dict(memory(row.shape, row.layout)),
        capacity_bytes=pool.device.memory_bytes,
    )


def predict_table(text: str, cluster: str) -> tuple[Table, tuple[RowPrediction, ...]]:
    """The table with the predicted columns, and the predictions.

    Args:
        text: Comma-separated, with the columns of `row_table.REQUIRED`.
        cluster: A name of the catalog, sized by each row's `gpus`; or any cluster that
            `Cluster.parse` reads, which must be large enough for every row.

    Raises:
        ValueError: the table or a row cannot be read or run, or the cluster is unknown,
            too small, or of devices that JAX runs nothing on; the text names row and
            column.
    """
    table = Table.parse(text)
    found = []
    device = pool_of(cluster, 1).device
    if device.platform not in PLATFORMS:
        raise ValueError(
            f"cluster {cluster}: no training step runs on {device.name} "
            f"({device.platform}). Allowed: devices of {', '.join(PLATFORMS)}."
        )
    scales = scales_of(catalog.canonical(cluster), device.name)
    for row in table.rows(habits_of(device)):
        try:
            pool = pool_of(cluster, row.layout.gpus)
        except ValueError as error:
            raise ValueError(f"{row.where}, column gpus: {error}") from None
        found.append(predict_row(row, pool, scales))
    columns = {
        STEP: [f"{row.step_s:.6g}" for row in found],
        RATE: [f"{row.tflops_per_gpu:.5g}" for row in found],
        MEMORY: [row.memory_bytes for row in found],
        FITS: ["yes" if row.fits else "no" for row in found],
    }
    return table.with_columns(columns), tuple(found)


def habits_of(device: DeviceType) -> Habits:
    """What programs for a device do unless the table says otherwise."""
    return Habits(fused=any(name.startswith("float8") for name in device.peak_flops))


def pool_of(cluster: str, gpus: int) -> Pool:
    """At least `gpus` devices: exactly as many where only a name is given.

    Raises:
        ValueError: the cluster is unknown, has several pools, or fewer devices.

    >>> pool_of("a100", 24).words, pool_of("4x8xH100", 16).words
    ('3x8xa100', '4x8xh100')
    """
    if (name := catalog.canonical(cluster)) in catalog.MACHINES:
        machine = catalog.machine(name)
        if machine.torus_dims or not machine.per_host:
            return Cluster.parse(f"{gpus}x{name}").uniform
        # Full hosts, or one in part; a count that fills none has hosts of what divides.
        inside = gpus
        if gpus > machine.per_host:
            inside = math.gcd(gpus, machine.per_host)
        return Cluster.parse(f"{gpus // inside}x{inside}x{name}").uniform
    pool = Cluster.parse(cluster).uniform
    if pool.num_devices < gpus:
        raise ValueError(
            f"{gpus} devices, but cluster {cluster!r} has {pool.num_devices}. Give a "
            f"larger one, or only the name ({pool.device.name}) to size it by each row."
        )
    return pool
