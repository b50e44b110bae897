"""The forced end of a local cluster: which export is waited for, and which is made."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from dtft.elastic import local_cluster
from dtft.elastic.host.salvage import NotSalvaged
from dtft.elastic.local_cluster import StopAsked
from dtft.elastic.stop_signals import StopProgress

PROGRESS = StopProgress(
    finished={"a": 21},
    computing=22,
    committed=21,
    recorded=21,
    stored=0,
    exporting=0,
    reforming=False,
    reason="",
    missing=(),
    store_serves=True,
    asked=True,
)


class Cluster:
    """One whose exports are at the given (exporting, stored), look after look."""

    def __init__(self, looks: Sequence[tuple[int, int]], fault: str = "") -> None:
        self.looks, self._fault = list(looks), fault
        self.salvaged = 0

    def progress(self) -> StopProgress:
        looks = self.looks
        exporting, stored = looks.pop(0) if len(looks) > 1 else looks[0]
        return dataclasses.replace(PROGRESS, exporting=exporting, stored=stored)

    def salvage(self, limit_s: float) -> int:
        assert 0 < limit_s <= 5
        if self._fault:
            raise NotSalvaged(self._fault)
        self.salvaged = 21
        return 21

    def wait(self, limit_s: float) -> bool:
        return limit_s < 0


@pytest.mark.parametrize(
    ("looks", "salvaged"),
    [
        ([(0, 0)], 21),
        ([(21, 0), (21, 0), (21, 21)], 0),  # the job's own export is enough
        ([(1, 0), (1, 0), (1, 1), (0, 1)], 21),  # it was of an old step
        ([(21, 0), (0, 0)], 21),  # it has come to nothing
        ([(1, 0), (21, 1), (21, 21)], 0),  # the next one was begun
    ],
)
def test_the_newest_step_is_stored_whatever_the_job_was_writing(
    looks: list[tuple[int, int]], salvaged: int
) -> None:
    cluster: Any = Cluster(looks)
    assert local_cluster._exported(cluster, StopAsked(), 21, 5.0) == ""
    assert cluster.salvaged == salvaged


def test_why_nothing_could_be_stored_is_told() -> None:
    cluster: Any = Cluster([(0, 1)], "no host answered")
    assert local_cluster._exported(cluster, StopAsked(), 21, 5.0) == "no host answered"
    cluster = Cluster([(21, 1)])  # an export that never ends
    assert "no export ended within 0 s" in local_cluster._exported(
        cluster, StopAsked(), 21, 0.3
    )
