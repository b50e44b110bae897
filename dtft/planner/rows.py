"""Predicted seconds of a training step of a transformer on a pool of devices, by term.

Prices what `transformer` counts with the costs of a device type and its links, and
puts pipeline, data parallelism and optimizer around it. Every term is base seconds,
from the catalog's figures, times a scalar (`Scales`): fitting the scalars
(`row_fitting`) needs no second counting. Must not know files or measured times.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dtft.planner import compute_cost
from dtft.planner.cluster import Pool
from dtft.planner.collective_cost import Group, collective_s, group_of
from dtft.planner.links import CollectiveKind, LinkKind
from dtft.planner.row_scales import Scales
from dtft.planner.transformer import (
    ITEM_BYTES,
    Layout,
    Shape,
    Work,
    embedding_work,
    head_work,
    layer_work,
)
from dtft.planner.transformer_memory import OPTIMIZER_BYTES, stage_parameters

DTYPE = "bfloat16"
NETWORKS: tuple[LinkKind, ...] = ("InfiniBand", "Ethernet")
STAGE_TERMS = ("matmul", "elementwise", "launch", "tensor", "pipeline")
"""Of a stage and microbatch: matrix products, bytes through memory, kernel starts,
collectives over `tp`, sending to the next stage and back."""
STEP_TERMS = ("data", "optimizer")
"""Of a step: gradients over `dp` (and of the embedding both ends hold), the update."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Base seconds of a step; `terms` makes seconds of them.

    Of one row, or of several at once (`stack`): all arrays then have a dim of rows
    before those named here.
    """

    stages: np.ndarray
    """[kinds, STAGE_TERMS] of one microbatch; stages that do the same are one kind."""
    counts: np.ndarray
    """[kinds] stages of each."""
    gathered: np.ndarray
    """[kinds] of collectives of ZeRO 2 and 3 per microbatch, which computing hides."""
    step: np.ndarray
    """[STEP_TERMS]."""
    stage_scales: np.ndarray
    """[STAGE_TERMS] indices into `Scales.vector`."""
    step_scales: np.ndarray
    """[STEP_TERMS] likewise; the first one is of `gathered` too."""
    num_microbatches: np.ndarray
    virtual_stages: np.ndarray
    overlap_slowdown: np.ndarray
    """How much longer computing takes while a collective is hidden by it."""

    def terms(self, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Seconds by term, given `Scales.vector`.

        `bubble` is waiting, for the first and last microbatch and for slower stages.
        1F1B: (m - 1) max t + sum t; interleaved fill and drain take 1/v (reference
        section 7).
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
        """Seconds of the step; of each row if it is of several."""
        return np.add.reduce(list(self.terms(scales).values()))

    def _exposed(self, seconds: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Seconds per kind that hidden collectives add to computing all the same."""
        wanted = self.gathered * scales[self.step_scales][..., :1]
        hidden = np.minimum(wanted, seconds[..., :3].sum(-1))
        return wanted - hidden + (self.overlap_slowdown[..., None] - 1) * hidden


def stack(costs: Sequence[StepCost]) -> StepCost:
    """Several rows as one, with a dim of rows first: for fits and searches."""
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


def step_cost(shape: Shape, layout: Layout, pool: Pool) -> StepCost:
    """The base seconds of a step.

    Args:
        shape: The model.
        layout: How it is laid out.
        pool: Like devices, at least as many as the layout has.
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
    """A layout on a pool: who communicates with whom."""

    pool: Pool
    layout: Layout
    groups: Mapping[str, Group]
    """Of each axis."""

    @classmethod
    def of(cls, layout: Layout, pool: Pool) -> "_Fabric":
        """`tp` innermost, then `dp`, then `pp`, as Megatron numbers ranks."""
        mesh = {"stage": layout.pp, "replica": layout.dp, "tensor": layout.tp}
        groups = {axis: group_of(pool, mesh, axis) for axis in mesh}
        return cls(pool=pool, layout=layout, groups=groups)

    def seconds(self, kind: CollectiveKind, num_bytes: float, axis: str) -> float:
        """Of one collective along an axis."""
        return collective_s(kind, num_bytes, self.groups[axis])

    def ends_s(self, num_bytes: float) -> float:
        """Of an all-reduce between the first and the last stage."""
        rest = self.layout.dp * self.layout.tp
        if self.layout.pp == 1:
            return 0.0
        mesh = {"ends": 2, "between": self.layout.pp // 2 * rest}
        return collective_s("all_reduce", num_bytes, group_of(self.pool, mesh, "ends"))

    def scale_name(self, axis: str) -> str:
        """The scalar of an axis: does it leave the host?"""
        far = any(link.kind in NETWORKS for link in self.groups[axis].links)
        return "network" if far else "fast_link"


def _work_row(work: Work, fabric: _Fabric) -> tuple[float, float, float, float]:
    device = fabric.pool.device
    products = np.array([(p.m, p.n, p.k, p.batch, p.trips) for p in work.matmuls])
    matmul = 0.0
    if len(products):
        m, n, k, batch, trips = products.T
        seconds = compute_cost.matmul_s(device, m, n, k, batch, dtype=DTYPE)
        matmul = float((seconds * trips).sum())
    tensor = sum(
        c.trips * fabric.seconds(c.kind, c.num_bytes, "tensor")
        for c in work.collectives
    )
    return (
        matmul,
        float(compute_cost.memory_s(device, work.num_bytes)),
        float(compute_cost.launch_s(device, work.kernels)),
        tensor,
    )


def _pipeline_s(shape: Shape, fabric: _Fabric) -> float:
    """A microbatch's activations to the next stage, their gradients back.

    Each device of `tp` sends its part (arXiv 2104.04473, section 4.1); a stage's two
    transfers wait for one another, those of its neighbours run beside them.
    """
    layout = fabric.layout
    if layout.pp == 1:
        return 0.0
    rows = layout.micro_batch * shape.seq_len * shape.hidden
    part = rows * ITEM_BYTES / layout.tp
    return 2 * layout.virtual_stages * fabric.seconds("permute", part, "stage")


def _gathered_s(shape: Shape, fabric: _Fabric) -> float:
    """Parameters gathered and gradients scattered, for a layer and a microbatch.

    ZeRO 3 gathers for the forward and for the backward pass; ZeRO 2 keeps them between.
    """
    layout = fabric.layout
    if layout.zero < 2:
        return 0.0
    size = ITEM_BYTES * shape.layer_parameters / layout.tp
    gathers = layout.zero - 1
    gather = fabric.seconds("all_gather", size, "replica")
    return gathers * gather + fabric.seconds("reduce_scatter", size, "replica")


def _data_s(shape: Shape, fabric: _Fabric) -> float:
    """Gradients over `dp` once a step, and the embedding's between both ends."""
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
    """Adam reads and writes its state; scaling, norm and update read gradients."""
    layout = fabric.layout
    held = max(stage_parameters(shape, layout, s) for s in {0, layout.pp - 1})
    moved = 2 * OPTIMIZER_BYTES + ITEM_BYTES + 14
    part = held / (layout.dp if layout.zero else 1)
    return float(compute_cost.memory_s(fabric.pool.device, moved * part))
