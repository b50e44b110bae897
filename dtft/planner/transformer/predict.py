"""Predicts rows of a table of training runs: seconds of a step by term, and memory.

A term is a part of the predicted seconds, such as `compute`. A row's step is a JAX
program (`program`), for which the planner predicts seconds and memory with the row's
mesh and knobs (settings such as microbatches and ZeRO). Factors (`Scales`) that were
fitted to published runs multiply the planner's seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.cluster import (
    CARRIED_OVER,
    CATALOG,
    MACHINES,
    Accuracy,
    Cluster,
    DeviceType,
    Pool,
    canonical_name,
)
from dtft.planner.cluster import machine as catalog_machine
from dtft.planner.memory import RESERVE
from dtft.planner.search import (
    PLATFORMS,
    PlanSearch,
    Scales,
    Space,
    StepCost,
    terms_of_accuracy,
)
from dtft.planner.software import SoftwareName
from dtft.planner.transformer.model import ITEM_BYTES, ParallelLayout, Shape
from dtft.planner.transformer.program import workload_of
from dtft.planner.transformer.table import DTYPES, Habits, Row, Table
from dtft.planner.types import AXES

# Level 2 of calibration, for programs of PyTorch. The values are results of fits
# (`experiments/public_measurements.py`), which tests repeat.


SPREADS = Scales(
    matmul=0.2, memory=0.1, launch=2.0, fast_link=0.5, network=1.0, next_stage=0.5
)
"""Prior standard deviation of the logarithm of each factor on predicted seconds. Memory
streams and matmuls vary little between systems. Host time between kernels and network
load by other jobs are known only to an order of magnitude."""

A100_SCALES = Scales(
    matmul=0.9318,
    memory=0.9967,
    launch=29.655,
    fast_link=1.5432,
    network=1.5626,
    next_stage=0.7116,
)
"""Factors fitted to the 21 rows of group E of
`experiments/data/bigscience_176b_a100.csv`: 72 layers of width 14336 on A100 of 80
GB."""

H100_SCALES = Scales(
    matmul=1.0542,
    memory=0.9828,
    launch=23.608,
    fast_link=1.3328,
    network=0.7306,
    next_stage=0.7116,
)
"""Factors fitted to the 70 bfloat16 rows of `experiments/data/llmfoundry_fsdp.csv` on
H100, with the factors of A100 as prior."""


def elsewhere(fitted: Scales) -> Scales:
    """Returns the factors that also hold for other clusters and programs.

    Keeps the factors of the device type, `matmul` and `memory`. Factors of links and of
    kernel launches become 1, because their fits hold for one fabric and one program.
    """
    return Scales(matmul=fitted.matmul, memory=fitted.memory)


FITTED: Mapping[str, Scales] = {
    "a100": A100_SCALES,
    "a100-40gb": A100_SCALES,
    "h100": H100_SCALES,
    "h200": H100_SCALES,
}
"""Map from a device type to factors fitted to published runs. The H200 has those of the
H100, the A100 of 40 GB those of the A100 of 80 GB."""


def scales_of(device: str, software: SoftwareName = "megatron") -> Scales:
    """Returns the factors on predicted seconds for any cluster of a device type.

    The factors hold for any program of PyTorch. Device types without fitted factors
    have those of the A100. For XLA all factors are 1, as in `dtft.plan`: no program of
    XLA is among the published runs.

    Args:
        device: name of the device type, as in the catalog.
        software: the software that runs the step.

    >>> scales_of("h200").matmul > scales_of("a100-40gb").matmul
    True
    >>> scales_of("h200", "xla") == Scales()
    True
    """
    if software == "xla":
        return Scales()
    return elsewhere(FITTED.get(device, A100_SCALES))


def accuracy_of(device: DeviceType, software: SoftwareName = "megatron") -> Accuracy:
    """Returns the errors of predictions for a device type and the software of the step.

    If factors were fitted for the device type, the errors are those for a new cluster
    and program (`CARRIED_OVER`). Otherwise, and always for XLA, which has no fitted
    factors, the errors are those of the catalog's figures (`CATALOG`).
    """
    is_fitted = device.name in FITTED and software != "xla"
    return CARRIED_OVER if is_fitted else CATALOG


def search_of(shape: Shape, layout: ParallelLayout, pool: Pool) -> PlanSearch:
    """Returns the planner's search for a model's training step on a pool.

    The step is the program of the layout's software and options. The search computes
    the seconds and memory of plans for it.
    """
    return PlanSearch(workload_of(shape, layout), pool, scatters=True)


def space_of(layouts: Sequence[ParallelLayout]) -> Space:
    """Converts layouts of one program to candidates (meshes with knobs) of the planner.

    `tp`, `cp`, `ep`, `dp` and `pp` are the degrees of tensor, context, expert, data and
    pipeline parallelism. `tp` is innermost on the fabric, then `cp`, `ep`, `dp`, `pp`,
    as in Megatron. The planner's axis `expert` divides examples, too, so `dp` is the
    product of the axis `expert` and the data axis (`fsdp` with ZeRO, else `replica`).
    """
    like = layouts[0]
    divided = like.zero > 0
    data = "fsdp" if divided else "replica"
    sizes = {
        "stage": "pp", data: "replicas", "expert": "ep", "sequence": "cp",
        "tensor": "tp",
    }  # fmt: skip
    rest = tuple(axis for axis in AXES if axis not in sizes)

    def column(name: str) -> np.ndarray:
        return np.array([getattr(layout, name) for layout in layouts], np.int64)

    ones = np.ones(len(layouts), np.int64)
    columns = {axis: ones for axis in rest}
    columns |= {axis: column(name) for axis, name in sizes.items()}
    meshes = np.stack([columns[axis] for axis in sizes], axis=1)
    columns |= {
        "microbatches": column("num_microbatches"),
        "zero": np.where(columns[data] > 1, like.zero, 0),
        "virtual_stages": column("virtual_stages"),
        "batch": column("global_batch"),
        "devices_used": column("gpus"),
        "mesh": np.unique(meshes, axis=0, return_inverse=True)[1].ravel(),
        **dict.fromkeys(
            ("remat", "offload", "schedule", "order", "baseline"), 0 * ones
        ),
    }
    (stage_layers,) = {layout.stage_layers for layout in layouts}
    return Space(
        columns=columns,
        stage_layers=stage_layers,
        orders=(("stage", *rest, data, "expert", "sequence", "tensor"),),
    )


def step_cost(shape: Shape, layout: ParallelLayout, pool: Pool) -> StepCost:
    """Computes the seconds of a step by kind of work and link.

    The seconds are not yet multiplied by factors (`Scales`); `StepCost.terms` does so.

    Args:
        shape: The shape of the model.
        layout: The parallel layout.
        pool: Equal devices, at least as many as the layout has.
    """
    return search_of(shape, layout, pool).step_cost(space_of([layout]))


# Memory. The planner counts parameters, optimizer state and activations. PyTorch keeps
# gradients from the first microbatch to the update, buffers of communication, and
# memory that it does not use.


BUCKET_ITEMS = 500_000_000
"""Largest number of items of a buffer in which gradients are reduced or parameters
gathered under ZeRO (DeepSpeed's default `reduce_bucket_size` and
`allgather_bucket_size`)."""
RESERVE_BYTES = 1_000_000_000
"""Bytes of the CUDA context and workspaces; as many again for the communicators of each
of tp, pp, dp and cp that is above 1."""
FRAGMENTATION = 0.05
"""Share of allocated memory that is assumed to be lost to fragmentation."""


def memory(
    shape: Shape, layouts: Sequence[ParallelLayout], pool: Pool
) -> dict[str, np.ndarray]:
    """Computes the bytes of a device, by what they hold, for layouts of one program.

    Each entry is that of the pipeline stage where it is largest.

    Args:
        shape: The shape of the model.
        layouts: The layouts, all with the same `stage_layers`.
        pool: The devices.

    Returns:
        Map from what the bytes hold, such as `gradients`, to the bytes; one number per
        layout.
    """
    found = search_of(shape, layouts[0], pool).memory_of(space_of(layouts))
    if layouts[0].software == "xla":
        reserve = np.full(len(layouts), RESERVE * pool.device.memory_bytes)
        return {**found, "reserve": reserve}
    dp = np.array([layout.replicas for layout in layouts])
    zero, kept = layouts[0].zero, layouts[0].gradient_bytes
    parts = [dp if zero >= level else 1 for level in (3, 2, 1)]
    held = found["parameters"] / ITEM_BYTES * parts[0]
    # The update needs float32 gradients after the activations are freed.
    wide = 0.0 if kept >= 4 else 4 * held / parts[2]
    found["gradients"] = kept * held / parts[1]
    found["optimizer"] = found["optimizer"] + np.maximum(
        0.0, wide - found["activations"]
    )
    found["buffers"] = np.array(
        [_buffers(shape, one, items) for one, items in zip(layouts, held, strict=True)]
    )
    axes = [sum(n > 1 for n in (one.tp, one.pp, one.dp, one.cp)) for one in layouts]
    fixed = RESERVE_BYTES * (1 + np.array(axes))
    found["reserve"] = fixed + FRAGMENTATION * np.sum(list(found.values()), axis=0)
    return found


def _buffers(shape: Shape, layout: ParallelLayout, held: float) -> float:
    """Computes the bytes of a device's buffers for communication.

    The buffers hold the transfers between pipeline stages, the buckets of ZeRO levels 1
    and 2, and at level 3 the gathered parameters of two layers and the gradient of one.
    `held` is the number of parameters that a device has without ZeRO.
    """
    rows = layout.micro_batch * shape.seq_len // layout.cp * shape.hidden
    total = 4.0 * rows * ITEM_BYTES if layout.pp > 1 else 0.0
    if layout.zero == 0 or layout.replicas == 1:
        return total
    if layout.zero < 3:
        return total + 2 * ITEM_BYTES * min(held, BUCKET_ITEMS)
    # Two gathered layers, the current and the next, and the gradient of one layer
    # before its reduction.
    absent = shape.experts * shape.expert_parameters * (1 - 1 / layout.ep)
    return total + 3 * ITEM_BYTES * (shape.layer_parameters - absent) / layout.tp


STEP, LOW, HIGH, RATE, MEMORY, FITS = (
    "predicted_step_s",
    "predicted_low_s",
    "predicted_high_s",
    "predicted_tflops_per_gpu",
    "predicted_memory_bytes",
    "predicted_fits",
)
"""Columns that `predict_table` adds. `predicted_low_s` and `predicted_high_s` are the
ends of the 80 % prediction interval; the last column has `yes` or `no`."""


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """Predicted time and memory of a row (training run)."""

    terms: dict[str, float]
    """Predicted seconds of a step by term, such as `compute` (`search.STEP_TERMS`)."""
    low_s: float
    high_s: float
    """Upper end of the interval that is meant to hold 80 % of measured step times
    (`cluster.INTERVAL_SHARE`); `low_s` is the lower end."""
    tflops_per_gpu: float
    """TFLOP/s per device with recomputation, as in the published tables."""
    memory: dict[str, int]
    """Bytes of a device, by what they hold, such as `gradients`. Each entry is that of
    the pipeline stage where it is largest."""
    capacity_bytes: int
    """Bytes of memory of a device."""
    unlisted: tuple[str, ...] = ()
    """A text for each dtype of the row for which the device has no listed peak: which
    peak is used instead (`DeviceType.unlisted_text`)."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: the sum of `terms`."""
        return sum(self.terms.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device: the sum of `memory`.

        With a pipeline this is an upper bound, because each entry of `memory` is that
        of the stage where it is largest.
        """
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the predicted memory fits a device."""
        return self.memory_bytes <= self.capacity_bytes


def predict_row(row: Row, pool: Pool, scales: Scales) -> RowPrediction:
    """Predicts time and memory of one training run of a table.

    Args:
        row: The model shape and its layout.
        pool: At least as many devices as the layout has.
        scales: Factors on predicted seconds for the device type, such as
            `scales_of(name, row.layout.software)`.
    """
    found = step_cost(row.shape, row.layout, pool).terms(scales.vector())
    terms = {name: float(seconds[0]) for name, seconds in found.items()}
    flops = row.shape.flops(row.layout.global_batch, row.layout.recompute)
    rate = flops / sum(terms.values()) / row.layout.gpus
    accuracy = accuracy_of(pool.device, row.layout.software)
    low_s, high_s = accuracy.interval_s(terms_of_accuracy(terms))
    sizes = memory(row.shape, [row.layout], pool)
    return RowPrediction(
        terms=terms,
        low_s=low_s,
        high_s=high_s,
        tflops_per_gpu=rate / 1e12,
        memory={name: round(float(size[0])) for name, size in sizes.items()},
        capacity_bytes=pool.device.memory_bytes,
        unlisted=_unlisted(row.layout, pool.device),
    )


def _unlisted(layout: ParallelLayout, device: DeviceType) -> tuple[str, ...]:
    dtypes = dict.fromkeys((layout.dtype, layout.rest_dtype))
    rates = (device.rate(dtype) for dtype in dtypes)
    return tuple(device.unlisted_text(rate) for rate in rates if not rate.listed)


def predict_table(text: str, cluster: str) -> tuple[Table, tuple[RowPrediction, ...]]:
    """Predicts all rows of a table; returns the extended table and the predictions.

    Args:
        text: Comma-separated, with a header. Needed columns are those of the shape and
            layout, such as `hidden` and `tp`, and `recompute` (`table.REQUIRED`).
        cluster: A name of the catalog, sized by each row's `gpus`; or any cluster that
            `Cluster.parse` reads, which must be large enough for every row.

    Raises:
        ValueError: the table or a row cannot be read or run; or the cluster is unknown,
            too small, or has devices that JAX cannot run on. Nothing is predicted then.
            The error of a bad row names row and column; of many bad rows, it names the
            first, as that of `Table.rows`.
    """
    table = Table.parse(text)
    found = []
    device = pool_of(cluster, 1).device
    if device.platform not in PLATFORMS:
        raise ValueError(
            f"cluster {cluster}: no training step runs on {device.name} "
            f"({device.platform}). Allowed: devices of {', '.join(PLATFORMS)}."
        )

    def check(row: Row) -> None:
        check_dtype(row, device)
        try:
            pool_of(cluster, row.layout.gpus)
        except ValueError as error:
            raise ValueError(f"{row.where}, column gpus: {error}") from None

    for row in table.rows(habits_of(device), check):
        scales = scales_of(device.name, row.layout.software)
        found.append(predict_row(row, pool_of(cluster, row.layout.gpus), scales))
    columns = {
        STEP: [f"{row.step_s:.6g}" for row in found],
        LOW: [f"{row.low_s:.6g}" for row in found],
        HIGH: [f"{row.high_s:.6g}" for row in found],
        RATE: [f"{row.tflops_per_gpu:.5g}" for row in found],
        MEMORY: [row.memory_bytes for row in found],
        FITS: ["yes" if row.fits else "no" for row in found],
    }
    return table.with_columns(columns), tuple(found)


def check_dtype(row: Row, device: DeviceType) -> None:
    """Checks that a device has a peak for the dtype of a row, if it is below 16 bits.

    Other dtypes need no peak: programs compute them in a wider dtype, and so does the
    prediction, which then says so (`RowPrediction.unlisted`).

    Raises:
        ValueError: the device has no peak for the dtype; the message names the row.
    """
    dtype = row.layout.dtype
    if dtype != row.layout.rest_dtype and not device.rate(dtype).listed:
        others = [name for name in DTYPES.values() if name != dtype]
        listed = [n for n in dict.fromkeys(others) if device.rate(n).listed]
        raise ValueError(
            f"{row.where}, column dtype: {dtype}, but {device.name} has no known peak "
            f"for it: nothing says how fast it would be. Allowed on {device.name}: "
            f"{', '.join(listed or others)}. Change dtype, or the cluster."
        )


def habits_of(device: DeviceType) -> Habits:
    """Returns the usual options of training programs on a device type.

    The options fill empty cells of a table. Matmuls are in float16 on devices that have
    a peak for it and none for bfloat16.

    >>> from dtft.planner.cluster import device_type
    >>> habits_of(device_type("v100")).dtype, habits_of(device_type("a100")).dtype
    ('float16', 'bfloat16')
    """
    only_float16 = device.rate("float16").listed and not device.rate("bfloat16").listed
    return Habits(
        fused=device.rate("float8").listed,
        dtype="float16" if only_float16 else "bfloat16",
    )


def pool_of(cluster: str, gpus: int) -> Pool:
    """Makes a pool of at least `gpus` devices; of exactly `gpus` for a catalog name.

    Raises:
        ValueError: the cluster is unknown, has unlike pools, or fewer devices; or the
            devices do not divide into equal TPU pods.

    >>> pool_of("a100", 24).words, pool_of("4x8xH100", 16).words
    ('3x8xa100', '4x8xh100')
    """
    if (name := canonical_name(cluster)) in MACHINES:
        machine = catalog_machine(name)
        if machine.torus_dims or not machine.per_host:
            return Cluster.parse(f"{gpus}x{name}").uniform
        # Full hosts, or a part of one host; else hosts of the largest common divisor.
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
