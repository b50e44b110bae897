"""Prices pipeline stages from the price of the whole model.

A mesh with an axis `stage` is first priced as if each stage ran all layers. This module
divides the layers evenly among the stages, and keeps the embedding on the first stage
and the head on the last. It then adds the costs of a pipeline: the bubble, sends
between stages, and activations of the microbatches in flight.
"""

from functools import cached_property

import numpy as np

from dtft.planner.cluster import DeviceType
from dtft.planner.cost import SCHEDULES, in_flight, memory_s, pipeline_s, transfers
from dtft.planner.ir import (
    PRODUCTS,
    LayerStack,
    Part,
    find_layers,
    find_repeats,
    moved_bytes,
)
from dtft.planner.search.price_table import Message, Prices
from dtft.planner.search.space import Space
from dtft.planner.spmd import MICRO, CollectiveOp, ShardedSize, ShardingAssignment, flat
from dtft.planner.workload import Workload

Terms = dict[str, np.ndarray]
_SHARED = ("compute", "collectives", "launch")
"""Terms of a step's time (`ranking.TERMS`) that are divided among the stages."""


def layers_of(question: Workload, device: DeviceType) -> LayerStack | None:
    """Finds the repeated layers of a workload; None if it has no repeated layers.

    Args:
        question: the workload.
        device: the device type, whose speeds weigh the layers against the operators
            before and after the layers. Bytes are those of fused kernels, also on CPU.
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

    return find_layers(graph, find_repeats(graph).repeats, seconds)


def handed_on(
    question: Workload, layers: LayerStack, division: ShardingAssignment
) -> tuple[CollectiveOp, ...]:
    """Returns the messages that a stage sends to the next stage for a microbatch.

    Gradients return in messages of the same sizes.
    """
    values = [question.graph.values[index] for index in layers.boundary]
    return tuple(
        CollectiveOp(
            kind="permute",
            axes=("stage",),
            amount=ShardedSize(total=value.num_bytes, axes=flat(division.spec(value))),
        )
        for value in values
    )


class Staged:
    """Time and memory of candidates with pipeline stages."""

    def __init__(self, prices: Prices) -> None:
        """Keeps the prices; the layers are found when they are first needed.

        Args:
            prices: prices of the workload, as if each stage ran the whole model.
        """
        self._prices, self._question = prices, prices.question

    @cached_property
    def _layers(self) -> LayerStack:
        found = layers_of(self._question, self._prices.columns.pool.device)
        assert found is not None  # else the axis is not searched
        return found

    def terms(
        self, division: ShardingAssignment, space: Space, rows: np.ndarray, whole: Terms
    ) -> Terms:
        """Computes the seconds of a step by term, for candidates that share a division.

        Candidates with one stage keep the seconds of `whole`.

        Args:
            division: which axes divide which dims on the devices of a stage.
            space: the candidates.
            rows: indices of the candidates to price.
            whole: seconds by term as if each stage ran all layers.
        """
        names = ("stage", "microbatches", "virtual_stages")
        num, parts, chunks = (space.columns[name][rows] for name in names)
        shares = self._layers.shares
        each = sum(whole[name] for name in _SHARED) / parts
        sent = self._sent_s(division)[self._prices.columns.of[rows]] * chunks
        middle = each * shares["layers"] / num + sent / parts
        first, last = (middle + each * shares[end] for end in ("first", "last"))
        step = pipeline_s(first, middle, last, num, parts, chunks)
        found = {name: whole[name] / num for name in _SHARED}
        found["collectives"] = found["collectives"] + sent
        found["bubble"] = step - sum(found.values())
        found["optimizer"] = whole["optimizer"] * self._held(num)
        piped = num > 1
        return {
            name: np.where(piped, value, whole.get(name, 0.0))
            for name, value in found.items()
        }

    def memory(self, space: Space, rows: np.ndarray, whole: Terms) -> Terms:
        """Computes bytes on a device by term.

        Each term is that of the stage with the most bytes of this term.
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
        held = self._held(num)
        found = {
            "parameters": whole["parameters"] * held,
            "gradients": whole["gradients"] * held,
            "optimizer": whole["optimizer"] * held,
            "activations": whole["activations"] * under_way,
            "batch": whole["batch"],
        }
        return {
            name: np.where(num > 1, value, whole[name]) for name, value in found.items()
        }

    def _sent_s(self, division: ShardingAssignment) -> np.ndarray:
        """Computes the seconds per step of a stage's sends; float [points].

        A point is a mesh and a number of microbatches. The seconds are for one chunk
        (group of layers) per stage.
        """
        messages = [
            Message(sent=one, repeats=((MICRO,),))
            for one in handed_on(self._question, self._layers, division)
        ]
        total = np.zeros(len(self._prices.columns))
        for cases, seconds in self._prices.rates.sending(messages):
            total += transfers(1) * seconds[cases.of]
        return total

    def _held(self, num: np.ndarray) -> np.ndarray:
        """Computes the largest share of parameter bytes on one stage, for each `num`.

        Args:
            num: numbers of stages.
        """
        graph, found = self._question.graph, dict.fromkeys(self._layers.shares, 0)
        for path in self._question.paths("parameter"):
            index = graph.inputs[path]
            parts: frozenset[Part] = self._layers.readers.get(index, frozenset())
            for part in parts:
                found[part] += graph.values[index].num_bytes
        total = sum(
            graph.values[graph.inputs[path]].num_bytes
            for path in self._question.paths("parameter")
        )
        ends = max(found["first"], found["last"])
        return (found["layers"] / num + ends) / max(total, 1)
