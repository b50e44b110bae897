"""Predicts time and memory of pipeline stages from those of the whole model.

For a mesh with an axis `stage`, operators and arrays are first priced (their seconds
and bytes predicted) as if each stage ran all layers. This module divides the layers
among the stages, evenly or as given, and keeps the embedding on the first stage and the
head on the last. It then adds the costs of a pipeline: the bubble, sends between
stages, and activations of the microbatches in flight.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dtft.planner.cluster import DeviceType
from dtft.planner.cost import (
    SCHEDULES,
    collective_s,
    group_of,
    in_flight,
    memory_s,
    transfers,
)
from dtft.planner.ir import (
    CHEAP,
    PARTS,
    PRODUCTS,
    LayerStack,
    Part,
    find_layers,
    find_repeats,
    moved_bytes,
)
from dtft.planner.search.memory_table import Resting
from dtft.planner.search.price_table import (
    Message,
    PricedOp,
    Table,
    Total,
    sum_prices,
)
from dtft.planner.search.space import Space
from dtft.planner.search.step_cost import NETWORKS, STAGE_SCALES, StepCost
from dtft.planner.spmd import (
    MICRO,
    ZERO_AXIS,
    Axes,
    Bundle,
    CollectiveOp,
    ShardedSize,
    ShardingAssignment,
    flat,
    parts,
)
from dtft.planner.types import AXES
from dtft.planner.workload import Workload

Terms = dict[str, np.ndarray]


def layers_of(question: Workload, device: DeviceType) -> LayerStack | None:
    """Finds the repeated layers of a workload; None if it has no repeated layers.

    The result also has the shares of three parts in a step's time: the operators before
    the layers, the layers, and the operators after them. The time is computed as if all
    elementwise and similar operators were fused, also on CPU.

    Args:
        question: the workload.
        device: the device type, whose speeds give the time of each operator.
    """
    graph = question.graph
    moved = moved_bytes(graph)

    def seconds(number: int) -> float:
        operator = graph.operators[number]
        if operator.unread:
            return 0.0
        copied = float(memory_s(device, moved.get(number, 0.0)))
        if operator.kind not in PRODUCTS:
            return copied
        peak = device.peak(graph.operand_dtype(operator), operator.precision)
        own = float(memory_s(device, graph.bytes_of(operator))) * operator.trips
        return copied + max(own, operator.flops * operator.trips / peak)

    return find_layers(
        graph,
        find_repeats(graph).repeats,
        seconds,
        parameters=[graph.inputs[path] for path in question.paths("parameter")],
        batch=[graph.inputs[path] for path in question.paths("batch")],
    )


def handed_on(
    question: Workload, layers: LayerStack, division: ShardingAssignment
) -> tuple[CollectiveOp, ...]:
    """Returns the messages that a stage sends to the next stage for a microbatch.

    The messages have the activations at the end of the stage's layers. The backward
    pass sends the gradients of these activations back, in messages of the same sizes.

    Args:
        question: the workload.
        layers: the repeated layers of the workload.
        division: which axes divide which dims on the devices of a stage.
    """
    values = [question.graph.values[index] for index in layers.boundary]
    found = []
    for value in values:
        axes = flat(division.spec(value))
        if question.software.splits_sends and "tensor" not in axes:
            axes = (*axes, "tensor")
        amount = ShardedSize(total=value.num_bytes, axes=axes)
        found.append(CollectiveOp(kind="permute", axes=("stage",), amount=amount))
    return tuple(found)


class Staged:
    """Prices candidates with any number of pipeline stages: seconds and bytes."""

    def __init__(self, resting: Resting) -> None:
        """Computes nothing yet; the layers are found when they are first needed.

        Args:
            resting: computes the seconds of the workload's operators, and the bytes and
                gathers of the arrays that ZeRO divides, as if each stage ran the whole
                model.
        """
        self._resting, self._prices = resting, resting.prices
        self._question, self._columns = self._prices.question, self._prices.columns
        self._software = self._question.software

    @cached_property
    def _layers(self) -> LayerStack:
        found = layers_of(self._question, self._columns.pool.device)
        assert found is not None  # else the axis is not searched
        return found

    # Time.

    def cost(
        self, division: ShardingAssignment, space: Space, rows: np.ndarray
    ) -> StepCost:
        """Computes the base seconds (`StepCost`) of candidates that share a division.

        Base seconds are those by the catalog's figures, before scalars multiply them.

        Args:
            division: which axes divide which dims on the devices of a stage.
            space: the candidates.
            rows: indices of the candidates to price.
        """
        names = ("stage", "microbatches", "virtual_stages", "zero", "fsdp")
        num, micro, chunks, zero, fsdp = (space.columns[name][rows] for name in names)
        points, full = self._columns.of[rows], np.ones(len(rows))
        staged = bool((num > 1).any())
        kinds, counts = _kinds(num, space.stage_layers)
        work, state = self._work(division, points, zero, num)
        stages = kinds @ (work / micro[:, None, None])
        held = np.minimum(kinds @ self._held, 1.0) if staged else kinds.max(-1)
        if self._software.sum_bytes:
            stages[..., 1] += held * self._summing_s(division, points)[:, None]
        if staged:
            sent = self._sent_s(division)[points] * chunks / micro
            stages[..., 5] = np.where(num > 1, sent, 0.0)[:, None] * (counts > 0)
        each = kinds @ state
        largest = each.sum(-1).argmax(-1)
        behind = zero >= self._software.hides_state_from
        bare = np.where(behind[:, None], 0.0, each[np.arange(len(rows)), largest])
        if staged:
            bare = bare + self._ends_s(division, space, rows)
        efficiency = self._columns.pool.device.efficiency
        update = sum_prices(self._prices.priced_ops(division)).optimizer.at(points)
        return StepCost(
            stages=stages,
            counts=counts,
            behind=np.where(behind[:, None, None], each / micro[:, None, None], 0.0),
            state=bare,
            optimizer=update / np.where(zero > 0, fsdp, 1) * held.max(-1),
            dispatch=full * efficiency.dispatch_s,
            num_microbatches=micro,
            virtual_stages=chunks,
            overlap_slowdown=full * efficiency.overlap_kappa,
            overlap_share=full * efficiency.overlap_fraction,
            order=np.tile(np.array(self._question.read_order), (len(rows), 1, 1)),
        )

    def _work(
        self,
        division: ShardingAssignment,
        points: np.ndarray,
        zero: np.ndarray,
        num: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the base seconds of forward and backward, by part of the model.

        Base seconds are those by the catalog's figures, before scalars multiply them.
        They are for all microbatches of a step, on devices that run the whole part. The
        parts (`PARTS`) are the operators before the layers, the layers, and the
        operators after the layers. The update is left out.

        Args:
            division: which axes divide which dims.
            points: index of each candidate's point (mesh and number of microbatches).
            zero: ZeRO level of each candidate.
            num: the number of stages of each candidate.

        Returns:
            Two arrays. First, seconds of matmuls (with convolutions and kernels), of
            other operators and of launches, then of collectives of activations on fast
            links and on networks, and 0 for sends between stages (`STAGE_SCALES`);
            float [candidates, parts, 6]. Second, seconds of collectives of gradients
            and parameters, on fast links and on networks (`LINK_SCALES`); float
            [candidates, parts, 2].
        """
        ways = self._prices.priced_ops(division)
        staged = (num > 1).any()
        of_part = self._parts_of(ways) if staged else _WHOLE * len(ways)
        columns: dict[tuple[int, int], Total] = defaultdict(Total)
        sent: dict[tuple[int, Axes], Total] = defaultdict(Total)
        alone: dict[tuple[int, Axes], Total] = defaultdict(Total)
        together: dict[int, dict[Bundle, Total]] = defaultdict(dict)
        passing: dict[int, dict[Bundle, Total]] = defaultdict(dict)
        for way, shares in zip(ways, of_part, strict=True):
            if way.group.region == "update":
                continue
            operator = way.group.operator
            heavy = operator.kind in PRODUCTS and operator.flops > 0
            for part, share in enumerate(shares):
                if not share:
                    continue
                columns[part, 0 if heavy else 1].add(*_times(share, way.computing))
                columns[part, 2].add(*_times(share, way.starts))
                for done, table, bundled in zip(
                    way.work.sent, way.sending, way.bundles, strict=True
                ):
                    if bundled is None:
                        sent[part, done.axes].add(*_times(share, table))
                        continue
                    bundle, num_bytes = bundled
                    of_batch = MICRO in done.amount.axes
                    into = (passing if of_batch else together)[part]
                    into.setdefault(bundle, Total()).add(*_times(share, num_bytes))
                    if not bundle.is_one:
                        into = sent if of_batch else alone
                        into[part, done.axes].add(*_times(share, table))
        device = self._columns.pool.device
        work = np.zeros((len(points), 3, len(STAGE_SCALES)))
        for (part, column), total in columns.items():
            factor = device.efficiency.launch_s if column == 2 else 1.0
            work[:, part, column] = factor * total.at(points)
        for (part, axes), total in sent.items():
            work[:, part, 3:5] += self._by_link(axes, points, total.at(points))
        for part, bundles in passing.items():
            work[:, part, 3:5] += self._joined(bundles, points)
        work[:, 1, 1] += self._resting.copying_s(division, points, zero)
        state = self._reduced(alone, together, points, zero)
        return work, state + self._gathered(division, points, zero, num)

    def _reduced(
        self,
        alone: Mapping[tuple[int, Axes], Total],
        together: Mapping[int, Mapping[Bundle, Total]],
        points: np.ndarray,
        zero: np.ndarray,
    ) -> np.ndarray:
        """Computes the seconds per step of collectives that reduce gradients.

        Args:
            alone: seconds per step of collectives that are sent one by one, by part of
                the model (position in `PARTS`) and mesh axes.
            together: bundles (combined collectives) of each part of the model, with
                their bytes each time they are sent.
            points: index of each candidate's point (mesh and number of microbatches).
            zero: ZeRO level of each candidate.

        Returns:
            Seconds by part of the model, on fast links and on networks (`LINK_SCALES`);
            float [candidates, parts, 2].
        """
        found = np.zeros((len(points), 3, 2))
        for (part, axes), total in alone.items():
            found[:, part] += self._by_link(axes, points, total.at(points))
        for part, bundles in together.items():
            found[:, part] += self._joined(bundles, points)
        software = self._software
        if software.sum_bytes:
            # An all-reduce is a scatter and a gather: at level 1 of parameters.
            gathered = np.where(zero == 1, ITEM_BYTES, software.sum_bytes)
            wider = 0.5 * (software.sum_bytes + gathered) / ITEM_BYTES
            found = found * np.where(zero < 2, wider, 1.0).reshape(-1, 1, 1)
        return found

    def _gathered(
        self,
        division: ShardingAssignment,
        points: np.ndarray,
        zero: np.ndarray,
        num: np.ndarray,
    ) -> np.ndarray:
        """Computes the seconds per step of all-gathers of parameters that ZeRO divides.

        The seconds are by part of the model (`PARTS`: before the layers, layers, after
        them), on fast links and on networks (`LINK_SCALES`); float [candidates, parts,
        2].

        Args:
            division: which axes divide which dims.
            points: index of each candidate's point (mesh and number of microbatches).
            zero: ZeRO level of each candidate.
            num: the number of stages of each candidate.
        """
        found = np.zeros((len(points), 2))
        for level in np.unique(zero).tolist():
            if level == 1 and self._software.flat_state:
                continue  # a reduction is a scatter and this gather
            at = np.flatnonzero(zero == level)
            alone, together = self._resting.gathers(division, level)
            found[at] = self._by_link((ZERO_AXIS,), points[at], alone.at(points[at]))
            found[at] += self._joined(together, points[at])
        shares = np.tile(_WHOLE[0], (len(points), 1))
        if (num > 1).any():
            shares = np.where((num > 1)[:, None], self._held, shares)
        return shares[..., None] * found[:, None]

    def _joined(
        self, bundles: Mapping[Bundle, Total], points: np.ndarray
    ) -> np.ndarray:
        """Computes the seconds per step of all bundles together, at each point.

        A bundle is a set of combined collectives. The seconds are on fast links and on
        networks (`LINK_SCALES`); float [points, 2].

        Args:
            bundles: for each bundle, the bytes that a device sends each time that the
                bundle is sent.
            points: indices of points (meshes with a number of microbatches).
        """
        found = np.zeros((len(points), 2))
        if not bundles or not len(points):
            return found
        rates = self._prices.rates
        for bundle, total in bundles.items():
            (seconds,) = rates.together_s([({bundle: total}, points)])
            found += self._by_link(bundle.axes, points, seconds)
        (every,) = rates.together_s([(bundles, points)])
        whole = found.sum(-1)
        scale = np.divide(every, whole, out=np.ones_like(every), where=whole > 0)
        return found * scale[:, None]

    def _by_link(
        self, axes: Axes, points: np.ndarray, seconds: np.ndarray
    ) -> np.ndarray:
        """Splits seconds of collectives by kind of link; float [points, 2].

        The columns (`LINK_SCALES`) are fast links, such as NVLink, and networks. At
        points where a collective over `axes` uses a network, its seconds are in the
        second column, else in the first.

        Args:
            axes: the axes of the collectives.
            points: indices of points (meshes with a number of microbatches).
            seconds: seconds of the collectives at each of these points.
        """
        of, groups = self._columns.lies(axes)
        kinds = np.array([link.kind in NETWORKS for link in groups.links], bool)
        far = np.any(groups.sizes[:, kinds] > 1, axis=1)[of[points]]
        return np.stack([np.where(far, 0.0, seconds), np.where(far, seconds, 0.0)], -1)

    def _parts_of(self, ways: Sequence[PricedOp]) -> list[tuple[float, ...]]:
        """Computes the share of each group of operators in each part of the model.

        The parts (`PARTS`) are the operators before the layers, the layers, and the
        operators after them. A share is the number of executions of the group's
        operators in the part, divided by all their executions. For operators that XLA
        fuses, such as elementwise ones, bytes are counted instead of executions.

        Args:
            ways: the groups of operators, with their prices.

        Returns:
            For each group the share of each part, in the order of `PARTS`.
        """
        graph, parts = self._question.graph, self._layers.parts
        found: list[tuple[float, ...]] = []
        for way in ways:
            cheap = way.group.operator.kind in CHEAP
            weights = dict.fromkeys(PARTS, 0.0)
            for number in way.group.members:
                operator = graph.operators[number]
                own = graph.bytes_of(operator) if cheap else 1
                weights[parts.get(number, "layers")] += own * operator.trips
            total = sum(weights.values())
            shares = [weights[part] / total if total else 0.0 for part in PARTS]
            found.append(tuple(shares) if total else _WHOLE[0])
        return found

    def _summing_s(
        self, division: ShardingAssignment, points: np.ndarray
    ) -> np.ndarray:
        """Computes the seconds to add the gradients of a microbatch to their sums.

        The seconds are those of kernels that read the gradients of all parameters, and
        read and write their sums; float [points].

        Args:
            division: which axes divide which dims.
            points: indices of points (meshes with a number of microbatches).
        """
        held = self._resting.num_bytes("parameter", division, False).at(points)
        moved = held / ITEM_BYTES * (ITEM_BYTES + 2 * self._software.sum_bytes)
        return np.asarray(memory_s(self._columns.pool.device, moved))

    def _ends_s(
        self, division: ShardingAssignment, space: Space, rows: np.ndarray
    ) -> np.ndarray:
        """Computes the seconds per step to reduce gradients of shared parameters.

        These are parameters that the first and the last stage both read, such as an
        embedding that is also the head. The seconds are on fast links and on networks
        (`LINK_SCALES`); float [rows, 2].

        Args:
            division: which axes divide which dims on the devices of a stage.
            space: the candidates.
            rows: indices of the candidates to price.
        """
        found = np.zeros((len(rows), 2))
        graph, pool = self._question.graph, self._columns.pool
        shared = [
            graph.values[index]
            for index, parts in self._layers.readers.items()
            if {"first", "last"} <= parts
        ]
        names = ("stage", *(a for a in AXES if a != "stage"))
        for at, row in enumerate(rows.tolist() if shared else ()):
            sizes = {name: int(space.columns[name][row]) for name in names}
            stages = sizes.pop("stage")
            if stages == 1:
                continue
            between = stages // 2 * math.prod(sizes.values())
            group = group_of(pool, {"ends": 2, "between": between}, "ends")
            far = any(link.kind in NETWORKS for link in group.links)
            for value in shared:
                held = value.num_bytes / parts(flat(division.spec(value)), sizes)
                held *= max(self._software.sum_bytes, ITEM_BYTES) / ITEM_BYTES
                found[at, int(far)] += collective_s("all_reduce", held, group)
        return found

    def _sent_s(self, division: ShardingAssignment) -> np.ndarray:
        """Computes the seconds per step that an inner stage sends to its neighbors.

        These are the sends of activations to the next stage, and of gradients to the
        one before. They are for one virtual stage (group of layers) in each stage; a
        caller multiplies them by the number of virtual stages. The result is float
        [points]; a point is a mesh and a number of microbatches.
        """
        messages = [
            Message(sent=one, repeats=((MICRO,),))
            for one in handed_on(self._question, self._layers, division)
        ]
        total = np.zeros(len(self._columns))
        for cases, seconds in self._prices.rates.sending(messages):
            total += transfers(1) * seconds[cases.of]
        return total

    @cached_property
    def _held(self) -> np.ndarray:
        """The share of all parameter bytes that each part of the model reads; [parts].

        The parts (`PARTS`) are the operators before the layers, the layers, and the
        operators after them. A parameter that several parts read counts for each of
        them.
        """
        graph, found = self._question.graph, dict.fromkeys(PARTS, 0)
        total = 0
        for path in self._question.paths("parameter"):
            index = graph.inputs[path]
            total += graph.values[index].num_bytes
            for part in self._layers.readers.get(index, frozenset[Part]()):
                found[part] += graph.values[index].num_bytes
        return np.array([found[part] for part in PARTS]) / max(total, 1)

    # Memory.

    def memory(self, space: Space, rows: np.ndarray, whole: Terms) -> Terms:
        """Computes the bytes on a device by term, for candidates with several stages.

        The bytes of each term are those of the stage with the most bytes of this term.
        Candidates with one stage keep the bytes of `whole`.

        Args:
            space: the candidates.
            rows: indices of the candidates to price.
            whole: bytes by term as if each stage had all layers.
        """
        names = ("stage", "microbatches", "virtual_stages", "schedule")
        columns = [space.columns[name][rows] for name in names]
        under_way = np.array(
            [
                in_flight(SCHEDULES[schedule], num, parts, chunks) / num
                for num, parts, chunks, schedule in zip(
                    *(column.tolist() for column in columns), strict=True
                )
            ]
        )
        num = columns[0]
        kinds, _ = _kinds(num, space.stage_layers)
        held = np.minimum((kinds @ self._held).max(-1), 1.0)
        found = {
            "parameters": whole["parameters"] * held,
            "gradients": whole["gradients"] * held,
            "optimizer": whole["optimizer"] * held,
            "activations": whole["activations"] * under_way,
            "batch": whole["batch"],
            "constants": whole["constants"],
        }
        return {
            name: np.where(num > 1, value, whole[name]) for name, value in found.items()
        }


ITEM_BYTES = 2
"""Bytes of one parameter, and of its gradient, in software with `Software.sum_bytes`
(where sums of gradients may have another dtype)."""
_WHOLE: list[tuple[float, ...]] = [(0.0, 1.0, 0.0)]
"""Shares of `PARTS` of a group of operators, if no candidate has several stages: the
group counts as part of the layers."""


def _times(share: float, table: Table) -> Table:
    cases, values = table
    return cases, share * values


def _kinds(
    num: np.ndarray, stage_layers: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the kinds of pipeline stages; stages of one kind have equal work.

    The work of a stage is its share of each part of the model (`PARTS`): of the
    operators before the layers, of the layers, and of the operators after the layers.

    Args:
        num: the number of stages of each candidate.
        stage_layers: the number of layers of each stage; () for equal stages.

    Returns:
        Shares of the parts, float [candidates, kinds, parts]; and the number of stages
        of each kind, [candidates, kinds].

    In the example, four stages have 3, 2, 2 and 1 of the 8 layers. The two stages with
    2 layers are one kind, and each has a share of 0.25 of the layers.

    >>> kinds, counts = _kinds(np.array([4]), (3, 2, 2, 1))
    >>> kinds[0].tolist()
    [[1.0, 0.375, 0.0], [0.0, 0.25, 0.0], [0.0, 0.125, 1.0]]
    >>> counts.tolist()
    [[1, 2, 1]]
    """
    if stage_layers:
        every, last = sum(stage_layers), len(stage_layers) - 1
        alike = Counter(
            (float(stage == 0), layers / every, float(stage == last))
            for stage, layers in enumerate(stage_layers)
        )
        shape = (len(num), 1, 1)
        return (
            np.tile(np.array(list(alike)), shape),
            np.tile(np.array(list(alike.values())), shape[:2]),
        )
    kinds, counts = np.zeros((len(num), 3, 3)), np.zeros((len(num), 3), int)
    kinds[:, :, 1] = 1 / num[:, None]
    kinds[:, 0, 0] = kinds[:, 2, 2] = 1.0
    alone = num == 1
    kinds[alone, 0] = 1.0
    counts[:, 0], counts[:, 1], counts[:, 2] = 1, np.maximum(num - 2, 0), num > 1
    kinds[counts == 0] = 0.0
    return kinds, counts
