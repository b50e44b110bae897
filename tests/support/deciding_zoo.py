"""Small questions and decisions that several tests look at; each is made once."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dtft.planner.cluster.topology import Cluster
from dtft.planner.search import decision as deciding
from dtft.planner.search.decision import Decision, decide
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS


@cache
def question(vocabulary: int = 256) -> Workload:
    """A transformer of two layers."""
    model = MODELS["gpt"](
        batch=8, time=64, width=128, layers=2, heads=4, vocabulary=vocabulary
    )
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


@cache
def mlp(batch: int = 64, widths: tuple[int, ...] = (64, 256, 16)) -> Workload:
    """Linear layers."""
    model = MODELS["mlp"](batch=batch, widths=widths)
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


@cache
def decision(spec: str = "2x4xH100", vocabulary: int = 256, **pins: Any) -> Decision:
    """The transformer's plan."""
    return decide(question(vocabulary), Cluster.parse(spec), pins)


def with_memory(spec: str, num_bytes: int) -> Cluster:
    """A cluster whose devices have so much memory."""
    pool = Cluster.parse(spec).uniform
    device = replace(pool.device, memory_bytes=num_bytes)
    return Cluster(pools=(replace(pool, device=device),), name=spec)


def count_plans(monkeypatch: pytest.MonkeyPatch) -> Counter[Hashable]:
    """Counts from now on how often each workload is planned: by workload, cluster,
    pins, batch, and the numbers of devices that are searched."""
    counted: Counter[Hashable] = Counter()
    plan = deciding._best_of  # pyright: ignore[reportPrivateUsage]

    def counting(
        question: Workload, cluster: Cluster, pins: dict[str, Any], *rest: Any
    ) -> Decision:
        counted[id(question), repr(cluster), repr(sorted(pins.items())), rest] += 1
        return plan(question, cluster, pins, *rest)

    monkeypatch.setattr(deciding, "_best_of", counting)
    return counted
