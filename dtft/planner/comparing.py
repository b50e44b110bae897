"""Two plans side by side: what differs, and by how many seconds and bytes.

Every number is one of the two plans', or the difference of two of them. Decides
nothing; must not know questions, clusters or how plans are found.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict

from dtft.planner import wording
from dtft.planner.plan import Collective, Plan, Spec
from dtft.planner.wording import Section, seconds, signed, size

Key = tuple[str, tuple[str, ...]]
"""Kind of collective, and the axes it goes over."""

_ARRAYS = ("state", "optimizer", "batch")


def diff(plan: Plan, other: Plan) -> str:
    """What another plan does otherwise, and what that costs or saves.

    Differences are the other's figure less this plan's.
    """
    return wording.text(sections(plan, other))


def sections(plan: Plan, other: Plan) -> tuple[Section, ...]:
    """The parts of a comparison."""
    return (
        decisions(plan, other),
        shardings(plan, other),
        terms(plan, other),
        memory(plan, other),
        collectives(plan, other),
    )


def decisions(plan: Plan, other: Plan) -> Section:
    """Mesh, knobs, and what the plans were made for."""
    ours, theirs = _decided(plan), _decided(other)
    rows = tuple(
        (name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]
    )
    notes = () if rows else ("mesh and knobs are the same",)
    return Section(
        title="Decisions that differ",
        columns=("what", "this", "other"),
        rows=rows,
        notes=notes,
    )


def _decided(plan: Plan) -> dict[str, str]:
    found = {"mesh": wording.mesh(plan.mesh)}
    found |= {name: str(value) for name, value in asdict(plan.knobs).items()}
    found |= {"entry": plan.entry, "cluster": plan.cluster}
    found |= {"model": plan.model_hash, "cluster's figures": plan.cluster_hash}
    return found


def shardings(plan: Plan, other: Plan) -> Section:
    """Arrays that are divided otherwise; alike ones of several layers together."""
    found: Counter[tuple[str, str, str]] = Counter()
    for tree in _ARRAYS:
        ours, theirs = getattr(plan, tree), getattr(other, tree)
        for path in {**ours, **theirs}:
            here, there = (_spec(specs, path) for specs in (ours, theirs))
            if here != there:
                found[f"{tree} {layered(path)}", here, there] += 1
    rows = tuple(
        (path, str(times), here, there) for (path, here, there), times in found.items()
    )
    return Section(
        title="Arrays divided otherwise",
        columns=("array", "times", "this", "other"),
        rows=rows,
        notes=() if rows else ("none",),
    )


def layered(path: str) -> str:
    """A path without the numbers of layers.

    >>> layered("blocks/11/up/kernel")
    'blocks/*/up/kernel'
    """
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


def spec_text(spec: Spec) -> str:
    """How an array is divided, dim by dim.

    >>> spec_text((("replica", "fsdp"), ()))
    '(replica x fsdp, -)'
    """
    return f"({', '.join(wording.axes(part) for part in spec)})"


def _spec(specs: Mapping[str, Spec], path: str) -> str:
    return spec_text(specs[path]) if path in specs else "not there"


def terms(plan: Plan, other: Plan) -> Section:
    """Seconds of a step by term."""
    ours, theirs = (
        {**one.prediction.terms, "step": one.prediction.step_s} for one in (plan, other)
    )
    rows = []
    for name in {**plan.prediction.terms, **other.prediction.terms, "step": 0.0}:
        here, there = ours.get(name, 0.0), theirs.get(name, 0.0)
        more = signed(seconds(there - here))
        rows.append(
            (name, seconds(here), seconds(there), more, wording.change(there, here))
        )
    columns = ("term", "this", "other", "difference", "")
    return Section(title="Step time", columns=columns, rows=tuple(rows))


def memory(plan: Plan, other: Plan) -> Section:
    """Bytes of a device by term."""
    ours, theirs = (
        {**one.memory, "needed": one.memory_bytes, "capacity": one.capacity_bytes}
        for one in (plan, other)
    )
    rows = []
    for name in {**plan.memory, **other.memory, "needed": 0, "capacity": 0}:
        here, there = ours.get(name, 0), theirs.get(name, 0)
        rows.append((name, size(here), size(there), signed(size(there - here))))
    columns = ("term", "this", "other", "difference")
    return Section(title="Memory of a device", columns=columns, rows=tuple(rows))


def collectives(plan: Plan, other: Plan, *, only_changed: bool = False) -> Section:
    """Bytes and seconds of what is sent in a step, by kind and axes.

    Seconds are those before overlap.

    Args:
        plan: this one.
        other: the other.
        only_changed: leaves out what takes the same bytes and seconds in both.
    """
    ours, theirs = sent(plan), sent(other)
    found = []
    for key in {**ours, **theirs}:
        (num_bytes, here), (other_bytes, there) = (
            known.get(key, (0, 0.0)) for known in (ours, theirs)
        )
        same = num_bytes == other_bytes and abs(there - here) < 1e-9
        if not (only_changed and same):
            row = (
                size(num_bytes),
                size(other_bytes),
                signed(size(other_bytes - num_bytes)),
            )
            most = largest(other, key)
            row += (signed(seconds(there - here)), most.where if most else "-")
            found.append((here - there, (key[0], wording.axes(key[1]), *row)))
    columns = ("kind", "axes", "this", "other", "difference", "seconds")
    columns += ("largest in other",)
    title = "Collectives that differ" if only_changed else "Collectives of a step"
    rows = tuple(row for _, row in sorted(found))
    return Section(
        title=title, columns=columns, rows=rows, notes=() if rows else ("none",)
    )


def largest(plan: Plan, key: Key) -> Collective | None:
    """Of one kind and axes what sends most bytes in a step."""
    found = [one for one in plan.collectives if (one.kind, one.axes) == key]
    return max(found, key=lambda one: one.num_bytes * one.trips, default=None)


def sent(plan: Plan) -> dict[Key, tuple[int, float]]:
    """Bytes and seconds of a step by kind and axes."""
    num_bytes: Counter[Key] = Counter()
    took: dict[Key, float] = defaultdict(float)
    for one in plan.collectives:
        key = one.kind, one.axes
        num_bytes[key] += one.num_bytes * one.trips
        took[key] += one.seconds
    return {key: (num_bytes[key], took[key]) for key in took}
