"""The collectives of a candidate one by one, with the seconds that each accounts for.

Their seconds add up to what the search counted for sending: collectives that go
together (`combining`) share the seconds of that by their bytes. Must not know how
candidates are found.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dtft.planner.amounts import Sent, Sizes
from dtft.planner.combining import Bundle
from dtft.planner.cost import Speeds, runs
from dtft.planner.partition import MICRO, Division
from dtft.planner.plan import Collective
from dtft.planner.pricing import bundle_of
from dtft.planner.search import Search
from dtft.planner.shards import gather_bundle
from dtft.planner.space import Candidate
from dtft.planner.staged import handed_on, layers_of
from dtft.planner.stages import transfers


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """A collective of a candidate."""

    sent: Sent
    times: float
    """In a step."""
    where: str
    bundle: Bundle | None = None
    share: float = 1.0
    """Of its times that a device takes part in: one stage's."""


def collectives(
    search: Search, candidate: Candidate, division: Division
) -> tuple[Collective, ...]:
    """Every collective of a step, largest first; alike ones of one place together.

    Of a pipeline those of a stage, on the average, and what it hands on.
    """
    found = [
        *_of_operators(search, candidate, division),
        *_of_arrays(search, candidate, division),
        *_between_stages(search, candidate, division),
    ]
    speeds = Speeds(pool=search.pool, mesh=candidate.mesh)
    made = _counted(found, speeds, _sizes(candidate))
    return tuple(sorted(made, key=lambda c: -c.num_bytes * c.trips))


def _sizes(candidate: Candidate) -> Sizes:
    return {**candidate.mesh, MICRO: candidate.knobs.microbatches}


def _of_operators(
    search: Search, candidate: Candidate, division: Division
) -> Iterator[_Listed]:
    graph, platform = search.question.graph, search.pool.device.platform
    for group, done in search.works(division):
        outputs = group.operator.outputs  # a callback may have none
        shape = graph.values[outputs[0]].shape if outputs else ()
        where = f"{group.region} {group.operator.primitive} "
        for sent in done.sent:
            yield _Listed(
                sent=sent,
                times=group.times * runs(done, _sizes(candidate)),
                where=where + "x".join(map(str, shape)),
                bundle=bundle_of(platform, group, done, sent),
                share=1 / candidate.mesh.get("stage", 1),
            )


def _of_arrays(
    search: Search, candidate: Candidate, division: Division
) -> Iterator[_Listed]:
    """Of what is divided at rest."""
    for one in search.moved(division, candidate.mesh, candidate.knobs.zero):
        repeats = candidate.knobs.microbatches if one.how.per_microbatch else 1
        yield _Listed(
            sent=one.sent,
            times=one.how.messages * repeats,
            where=one.where,
            bundle=gather_bundle(search.pool.device.platform, one.sent, one.how),
            share=1 / candidate.mesh.get("stage", 1),
        )


def _between_stages(
    search: Search, candidate: Candidate, division: Division
) -> Iterator[_Listed]:
    if candidate.mesh.get("stage", 1) == 1:  # looking for layers takes its time
        return
    layers = layers_of(search.question, search.pool.device)
    if layers is None:
        return
    knobs = candidate.knobs
    times = transfers(knobs.virtual_stages) * knobs.microbatches
    for sent in handed_on(search.question, layers, division):
        yield _Listed(sent=sent, times=times, where="between stages")


def _counted(
    found: Iterable[_Listed], speeds: Speeds, sizes: Sizes
) -> Iterator[Collective]:
    """Alike ones as one, with the seconds of all."""
    listed = [one for one in found if speeds.axes(one.sent)]
    sums: Counter[Bundle] = Counter()
    for one in listed:
        if one.bundle is not None:
            bundle = one.bundle.on(sizes)
            sums[bundle] += one.times * one.sent.amount.at(sizes)
    totals: dict[tuple[Any, ...], list[float]] = {}
    for one in listed:
        num_bytes = float(one.sent.amount.at(sizes))
        ahead = one.bundle is not None and one.bundle.ahead
        seconds = one.times * float(speeds.sending_s(one.sent, sizes, ahead=ahead))
        if one.bundle is None:
            seconds += one.times * speeds.meeting_s(one.sent)
        else:
            bundle = one.bundle.on(sizes)
            all_bytes = sums[bundle]
            together = speeds.together_s(bundle, all_bytes, sizes)
            together *= one.times * num_bytes / all_bytes
            seconds = together + (0.0 if bundle.is_one else seconds)
        key = one.sent.kind, speeds.axes(one.sent), round(num_bytes), one.where
        known = totals.setdefault(key, [0.0, 0.0])
        known[0] += one.times * one.share
        known[1] += seconds * one.share
    for (kind, axes, num_bytes, where), (trips, seconds) in totals.items():
        yield Collective(
            kind=kind,
            axes=axes,
            num_bytes=num_bytes,
            trips=round(trips),
            where=where,
            seconds=seconds,
        )
