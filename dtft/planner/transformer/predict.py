"""Predicts rows of a table of training runs: seconds of a step by term, TFLOP/s and
memory.

Every term is base seconds, from the catalog's figures, times a scalar (`Scales`).
Fitting the scalars therefore computes the base seconds only once.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from dtft.planner.cluster import (
    MACHINES,
    Cluster,
    CollectiveKind,
    DeviceType,
    LinkKind,
    Pool,
    canonical_name,
)
from dtft.planner.cluster import machine as catalog_machine
from dtft.planner.cost import (
    DeviceGroup,
    collective_s,
    group_of,
    launch_s,
    matmul_s,
    memory_s,
)
from dtft.planner.search import PLATFORMS
from dtft.planner.transformer.model import (
    ITEM_BYTES,
    OPTIMIZER_BYTES,
    MicrobatchWork,
    ParallelLayout,
    Shape,
    embedding_work,
    head_work,
    layer_work,
    memory,
    stage_parameters,
)
from dtft.planner.transformer.table import Habits, Row, Table

# Level 2 of calibration for transformers run by Megatron-like programs. The values are
# results of fits (`experiments/public_measurements.py`), which tests repeat.


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors on the catalog's seconds, one per kind of work or link."""

    matmul: float = 1.0
    """Factor on matmuls, beside peak, efficiency and shape factor of the device."""
    memory: float = 1.0
    """Factor on seconds of bytes through device memory."""
    launch: float = 1.0
    """Factor on kernel launches. It is far above 1 in eager programs: the catalog has
    the launch time of the device, and a host that runs Python between layers is
    slower."""
    fast_link: float = 1.0
    """Factor on collectives inside a host."""
    network: float = 1.0
    """Factor on collectives between hosts; other jobs use the network too."""
    next_stage: float = 1.0
    """Factor on sends to the next pipeline stage, inside or between hosts."""

    def vector(self) -> np.ndarray:
        """Returns the scalars as an array, in the order of the fields."""
        return np.array(astuple(self))

    @classmethod
    def of(cls, values: np.ndarray) -> "Scales":
        """Makes the scalars from an array in the order of the fields.

        >>> Scales.of(Scales(launch=3.0).vector()).launch
        3.0
        """
        return cls(**dict(zip(cls.names(), map(float, values), strict=True)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the fields, in the order of `vector`."""
        return tuple(field.name for field in fields(cls))


SPREADS = Scales(
    matmul=0.2, memory=0.1, launch=2.0, fast_link=0.5, network=1.0, next_stage=0.5
)
"""Prior standard deviation of the logarithm of each scalar. Memory streams and matmuls
vary little between systems. Host time between kernels and network load by other jobs
are known only to an order of magnitude."""

BIGSCIENCE = Scales(
    matmul=0.963,
    memory=0.997,
    launch=26.94,
    fast_link=1.442,
    network=4.349,
    next_stage=0.890,
)
"""Fitted to the 21 rows of the BigScience ranking set (Jean Zay, A100 80 GB)."""


LLM_FOUNDRY_H100 = Scales(
    matmul=1.278,
    memory=0.977,
    launch=14.78,
    fast_link=0.856,
    network=1.152,
    next_stage=0.890,
)
"""Fitted to the 70 bfloat16 rows of llm-foundry on H100, with the scalars of A100 as
prior."""


def elsewhere(fitted: Scales) -> Scales:
    """Returns scalars for other clusters and programs on the same device type.

    Keeps the scalars of the device, `matmul` and `memory`. Scalars of links and of
    kernel launches become 1: their fits hold for one fabric and one program.
    """
    return Scales(matmul=fitted.matmul, memory=fitted.memory)


FITTED: Mapping[str, Scales] = {
    "jean-zay": BIGSCIENCE,
    "h100": elsewhere(LLM_FOUNDRY_H100),
    "h200": elsewhere(LLM_FOUNDRY_H100),
}
"""Map from a machine or device type to scalars fitted to published runs; the H200 has
those of the H100."""


def scales_of(*names: str) -> Scales:
    """Returns the scalars of the first name that is in `FITTED`.

    Without such a name, returns `elsewhere` of the scalars fitted on A100.

    Args:
        names: Machine, then device type, in the catalog's spelling.

    >>> scales_of("jean-zay", "a100").network > scales_of("selene", "a100").network
    True
    """
    known = (FITTED[name] for name in names if name in FITTED)
    return next(known, elsewhere(BIGSCIENCE))


# Step time: the work of `model` priced with a device type and its links, with pipeline,
# data parallelism and optimizer added.


NETWORKS: tuple[LinkKind, ...] = ("InfiniBand", "Ethernet")
STAGE_TERMS = ("matmul", "elementwise", "launch", "tensor", "pipeline")
"""Terms of a stage and microbatch: matmuls, bytes through memory, kernel launches,
collectives over `tp`, and sends to the next stage and back."""
STEP_TERMS = ("data", "optimizer")
"""Terms of a step: reduction of gradients over `dp` (and of the embedding between first
and last stage), and the optimizer update."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Base seconds of a step (by the catalog's figures), which `terms` multiplies by
    scalars.

    With several rows (`stack`), all arrays have a leading dim of rows.
    """

    stages: np.ndarray
    """Base seconds of one microbatch, [kinds, STAGE_TERMS]; stages with equal work are
    one kind."""
    counts: np.ndarray
    """The number of stages of each kind, [kinds]."""
    gathered: np.ndarray
    """Base seconds of ZeRO 2 and 3 collectives per microbatch, which computation can
    hide, [kinds]."""
    step: np.ndarray
    """Base seconds of a step, [STEP_TERMS]."""
    stage_scales: np.ndarray
    """Index into `Scales.vector` of the scalar of each term, [STAGE_TERMS]."""
    step_scales: np.ndarray
    """Index into `Scales.vector` of the scalar of each term, [STEP_TERMS]; `gathered`
    uses the first index."""
    num_microbatches: np.ndarray
    virtual_stages: np.ndarray
    overlap_slowdown: np.ndarray
    """Factor on the time of computation that hides a collective."""

    def terms(self, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Computes the seconds of a step by term, given `Scales.vector`.

        The terms of `STAGE_TERMS` are those of an average stage, for all microbatches.
        `bubble` is the wait for pipeline fill and drain and for slower stages. With m
        microbatches and stages that take t seconds per microbatch, a 1F1B step takes
        (m - 1) max t + sum t. With v virtual stages, fill and drain take 1/v of their
        time. `data` also has what the ZeRO 2 and 3 collectives of microbatches add.
        """
        seconds = self.stages * scales[self.stage_scales][..., None, :]
        exposed = self._exposed(seconds, scales)
        stage_s = seconds.sum(-1) + exposed
        longest, microbatches = stage_s.max(-1), self.num_microbatches
        every = (stage_s * self.counts).sum(-1)
        total = microbatches * longest + (every - longest) / self.virtual_stages
        share = (self.counts / self.counts.sum(-1)[..., None])[..., None]
        mean = microbatches[..., None] * (seconds * share).sum(-2)
        step = self.step * scales[self.step_scales]
        found = {name: mean[..., n] for n, name in enumerate(STAGE_TERMS)}
        found |= {name: step[..., n] for n, name in enumerate(STEP_TERMS)}
        hidden_late = microbatches * (exposed * share[..., 0]).sum(-1)
        found["data"] = found["data"] + hidden_late
        found["bubble"] = total - mean.sum(-1) - hidden_late
        return found

    def step_s(self, scales: np.ndarray) -> np.ndarray:
        """Computes the seconds of the step, for each row of stacked costs."""
        return np.add.reduce(list(self.terms(scales).values()))

    def _exposed(self, seconds: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Computes the seconds that ZeRO 2 and 3 collectives add to a microbatch, for
        each kind of stage.

        They are the part that computation does not hide, and the slowdown of the
        computation that hides the rest.
        """
        wanted = self.gathered * scales[self.step_scales][..., :1]
        hidden = np.minimum(wanted, seconds[..., :3].sum(-1))
        return wanted - hidden + (self.overlap_slowdown[..., None] - 1) * hidden


def stack(costs: Sequence[StepCost]) -> StepCost:
    """Stacks the costs of several rows along a leading dim, for fits and searches."""
    kinds = max(len(cost.counts) for cost in costs)

    def padded(cost: StepCost, name: str) -> np.ndarray:
        value = getattr(cost, name)
        if name not in ("stages", "counts", "gathered"):
            return value
        missing = [(0, kinds - len(value))] + [(0, 0)] * (value.ndim - 1)
        return np.pad(value, missing)

    return StepCost(
        **{
            field.name: np.stack([padded(cost, field.name) for cost in costs])
            for field in fields(StepCost)
        }
    )


def step_cost(shape: Shape, layout: ParallelLayout, pool: Pool) -> StepCost:
    """Computes the base seconds of a step.

    Args:
        shape: The shape of the model.
        layout: The parallel layout.
        pool: Equal devices, at least as many as the layout has.
    """
    fabric = _Fabric.of(layout, pool)
    kinds = Counter(
        (layers, stage == 0, stage == layout.pp - 1)
        for stage, layers in enumerate(layout.layers_of(shape))
    )
    # [kinds, parts]: how many layers, embeddings, heads; times [parts, terms].
    parts = np.array(list(kinds), float)
    works = (f(shape, layout) for f in (layer_work, embedding_work, head_work))
    stages = parts @ np.array([_work_row(work, fabric) for work in works])
    sent = np.full((len(parts), 1), _pipeline_s(shape, fabric))
    scale = {name: number for number, name in enumerate(Scales.names())}
    links = {axis: scale[fabric.scale_name(axis)] for axis in fabric.groups}
    compute = [scale[name] for name in ("matmul", "memory", "launch")]
    return StepCost(
        stages=np.hstack([stages, sent]),
        counts=np.array(list(kinds.values())),
        gathered=parts[:, 0] * _gathered_s(shape, fabric),
        step=np.array([_data_s(shape, fabric), _optimizer_s(shape, fabric)]),
        stage_scales=np.array([*compute, links["tensor"], scale["next_stage"]]),
        step_scales=np.array([links["replica"], scale["memory"]]),
        num_microbatches=np.array(layout.num_microbatches),
        virtual_stages=np.array(layout.virtual_stages),
        overlap_slowdown=np.array(pool.device.efficiency.overlap_kappa),
    )


@dataclass(frozen=True, kw_only=True)
class _Fabric:
    """A layout on a pool of devices, with the device group of each mesh axis."""

    pool: Pool
    layout: ParallelLayout
    groups: Mapping[str, DeviceGroup]
    """Map from each axis to its device group."""

    @classmethod
    def of(cls, layout: ParallelLayout, pool: Pool) -> "_Fabric":
        """Places `tp` innermost, then `dp`, then `pp`, in Megatron's rank order."""
        mesh = {"stage": layout.pp, "replica": layout.dp, "tensor": layout.tp}
        groups = {axis: group_of(pool, mesh, axis) for axis in mesh}
        return cls(pool=pool, layout=layout, groups=groups)

    def seconds(self, kind: CollectiveKind, num_bytes: float, axis: str) -> float:
        """Computes the base seconds of one collective along an axis."""
        return collective_s(kind, num_bytes, self.groups[axis])

    def ends_s(self, num_bytes: float) -> float:
        """Computes the base seconds of an all-reduce between the first and the last
        pipeline stage; 0 with one stage."""
        rest = self.layout.dp * self.layout.tp
        if self.layout.pp == 1:
            return 0.0
        mesh = {"ends": 2, "between": self.layout.pp // 2 * rest}
        return collective_s("all_reduce", num_bytes, group_of(self.pool, mesh, "ends"))

    def scale_name(self, axis: str) -> str:
        """Names the scalar of an axis: `network` if the axis has a link of `NETWORKS`,
        else `fast_link`."""
        far = any(link.kind in NETWORKS for link in self.groups[axis].links)
        return "network" if far else "fast_link"


def _work_row(
    work: MicrobatchWork, fabric: _Fabric
) -> tuple[float, float, float, float]:
    device = fabric.pool.device
    matmul = 0.0
    for dtype in sorted({product.dtype for product in work.matmuls}):
        some = (p for p in work.matmuls if p.dtype == dtype)
        products = np.array([(p.m, p.n, p.k, p.batch, p.trips) for p in some])
        m, n, k, batch, trips = products.T
        seconds = matmul_s(device, m, n, k, batch, dtype=dtype)
        matmul += float((seconds * trips).sum())
    tensor = sum(
        c.trips * fabric.seconds(c.kind, c.num_bytes, "tensor")
        for c in work.collectives
    )
    return (
        matmul,
        float(memory_s(device, work.num_bytes)),
        float(launch_s(device, work.kernels)),
        tensor,
    )


def _pipeline_s(shape: Shape, fabric: _Fabric) -> float:
    """Computes the seconds of a stage to send a microbatch's activations and gradients.

    Activations are sent to the next stage, gradients to the stage before.

    Each device of `tp` sends its part (arXiv 2104.04473, section 4.1). The two
    transfers of a stage run one after another, beside the transfers of its neighbors.
    """
    layout = fabric.layout
    if layout.pp == 1:
        return 0.0
    rows = layout.micro_batch * shape.seq_len * shape.hidden
    part = rows * ITEM_BYTES / layout.tp
    return 2 * layout.virtual_stages * fabric.seconds("permute", part, "stage")


def _gathered_s(shape: Shape, fabric: _Fabric) -> float:
    """Computes the seconds of ZeRO collectives for a layer and a microbatch.

    They are gathers of parameters and a reduce-scatter of gradients; 0 below ZeRO 2.

    ZeRO 3 gathers parameters for the forward and for the backward pass. ZeRO 2 gathers
    once and keeps the parameters between both passes.
    """
    layout = fabric.layout
    if layout.zero < 2:
        return 0.0
    size = ITEM_BYTES * shape.layer_parameters / layout.tp
    gathers = layout.zero - 1
    gather = fabric.seconds("all_gather", size, "replica")
    return gathers * gather + fabric.seconds("reduce_scatter", size, "replica")


def _data_s(shape: Shape, fabric: _Fabric) -> float:
    """Computes the seconds per step to reduce gradients, after the last microbatch.

    ZeRO 0 and 1 reduce gradients over `dp`; ZeRO 1 also gathers parameters. With
    several stages, the first and the last also reduce the embedding's gradients.
    """
    layout = fabric.layout
    held = max(stage_parameters(shape, layout, s) for s in {0, layout.pp - 1})
    gradients = layout.sum_bytes * held
    table = layout.sum_bytes * shape.embedding_parameters / layout.tp
    ends = fabric.ends_s(table)
    if layout.zero == 0:
        return ends + fabric.seconds("all_reduce", gradients, "replica")
    if layout.zero == 1:
        gather = fabric.seconds("all_gather", ITEM_BYTES * held, "replica")
        return ends + fabric.seconds("reduce_scatter", gradients, "replica") + gather
    return ends


def _optimizer_s(shape: Shape, fabric: _Fabric) -> float:
    """Computes the seconds of the Adam update from its memory traffic."""
    layout = fabric.layout
    held = max(stage_parameters(shape, layout, s) for s in {0, layout.pp - 1})
    moved = 2 * OPTIMIZER_BYTES + ITEM_BYTES + 14
    part = held / (layout.dp if layout.zero else 1)
    return float(memory_s(fabric.pool.device, moved * part))


STEP, RATE, MEMORY, FITS = (
    "predicted_step_s",
    "predicted_tflops_per_gpu",
    "predicted_memory_bytes",
    "predicted_fits",
)
"""Columns that `predict_table` adds; the last column has `yes` or `no`."""


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """Predicted time and memory of a row."""

    terms: dict[str, float]
    """Seconds by term; see `STAGE_TERMS`, `STEP_TERMS`, and `bubble`."""
    tflops_per_gpu: float
    """TFLOP/s per device with recomputation, as in the published tables."""
    memory: dict[str, int]
    """Bytes by term of a device of the fullest pipeline stage."""
    capacity_bytes: int
    """Bytes of memory of a device."""
    unlisted: tuple[str, ...] = ()
    """For each dtype of the row for which the device has no peak, which peak counts."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: the sum of `terms`."""
        return sum(self.terms.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device of the fullest pipeline stage: the sum of `memory`."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the predicted memory fits a device."""
        return self.memory_bytes <= self.capacity_bytes


def predict_row(row: Row, pool: Pool, scales: Scales) -> RowPrediction:
    """Predicts time and memory of one row.

    Args:
        row: The model shape and its layout.
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
        unlisted=_unlisted(row.layout, pool.device),
    )


def _unlisted(layout: ParallelLayout, device: DeviceType) -> tuple[str, ...]:
    dtypes = dict.fromkeys((layout.dtype, layout.rest_dtype))
    rates = (device.rate(dtype) for dtype in dtypes)
    return tuple(device.unlisted_text(rate) for rate in rates if not rate.listed)


def predict_table(text: str, cluster: str) -> tuple[Table, tuple[RowPrediction, ...]]:
    """Predicts all rows of a table; returns the extended table and the predictions.

    Args:
        text: Comma-separated, with the columns of `table.REQUIRED`.
        cluster: A name of the catalog, sized by each row's `gpus`; or any cluster that
            `Cluster.parse` reads, which must be large enough for every row.

    Raises:
        ValueError: the table or a row cannot be read or run, or the cluster is unknown,
            too small, or of devices that JAX runs nothing on. The error of a row names
            row and column.
    """
    table = Table.parse(text)
    found = []
    device = pool_of(cluster, 1).device
    if device.platform not in PLATFORMS:
        raise ValueError(
            f"cluster {cluster}: no training step runs on {device.name} "
            f"({device.platform}). Allowed: devices of {', '.join(PLATFORMS)}."
        )
    scales = scales_of(canonical_name(cluster), device.name)
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
    """Returns the usual options of programs on a device, for empty cells of a table.

    Matmuls are in float16 on devices that have a peak for it and none for bfloat16.

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
