"""Compares two plans: mesh and settings, seconds and bytes, the terms that differ most.

A term is a part of the seconds of a step (such as compute) or of the bytes on a device
(such as parameters). Nothing is predicted again: every number is read from a plan, or
is the difference or ratio of two such numbers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict

from dtft.planner import wording
from dtft.planner.plan import Collective, Plan
from dtft.planner.report.text import lies_on
from dtft.planner.types import Spec
from dtft.planner.wording import Section, layered, percent, seconds, signed, size

Key = tuple[str, tuple[str, ...]]
"""Kind of collective, and the mesh axes over which it communicates."""

_ARRAYS = ("state", "optimizer", "batch")


def diff(plan: Plan, other: Plan) -> str:
    """Compares two plans as text, with a table for each part of the comparison.

    Differences are the figure of `other` minus the figure of `plan`.
    """
    return wording.text(sections(plan, other))


def sections(plan: Plan, other: Plan) -> tuple[Section, ...]:
    """Compares two plans in tables: settings, shardings, time, memory, collectives."""
    return (
        decisions(plan, other),
        shardings(plan, other),
        terms(plan, other),
        memory(plan, other),
        collectives(plan, other),
    )


def decisions(plan: Plan, other: Plan) -> Section:
    """Tabulates what the plans decide differently: mesh and settings such as `zero`.

    Also has rows for the cluster, the model, and the argument that `dtft.plan` got
    (`step=` or `loss=`). Rows in which the plans agree are left out.
    """
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
    """Tabulates the arrays that the plans divide by different mesh axes.

    Arrays at the same path of several layers share a row if `plan` divides all of them
    by the same axes, and `other` does so too.
    """
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


def spec_text(spec: Spec) -> str:
    """Formats the mesh axes that divide each dim of an array.

    >>> spec_text((("replica", "fsdp"), ()))
    '(replica x fsdp, -)'
    """
    return f"({', '.join(wording.axes(part) for part in spec)})"


def _spec(specs: Mapping[str, Spec], path: str) -> str:
    return spec_text(specs[path]) if path in specs else "not there"


def terms(plan: Plan, other: Plan) -> Section:
    """Tabulates the seconds of a step in both plans, and `other` minus `plan`.

    Each term, such as compute, has a row; the last row has the whole step.
    """
    ours, theirs = (
        {**one.prediction.terms, "step": one.prediction.step_s} for one in (plan, other)
    )
    rows, error = [], _error(plan, other)
    for name in {**plan.prediction.terms, **other.prediction.terms, "step": 0.0}:
        here, there = ours.get(name, 0.0), theirs.get(name, 0.0)
        times = (seconds(value, error) for value in (here, there))
        more = signed(seconds(there - here, error))
        rows.append((name, *times, more, wording.change(there, here, error)))
    columns = ("term", "this", "other", "difference", "")
    return Section(title="Step time", columns=columns, rows=tuple(rows))


def _error(plan: Plan, other: Plan) -> float:
    """Returns the larger relative error of the two plans' predicted step seconds."""
    return max(one.prediction.relative_error for one in (plan, other))


def memory(plan: Plan, other: Plan) -> Section:
    """Tabulates the bytes on the fullest device: both plans, and `other` minus `plan`.

    Each term, such as parameters, has a row; the last rows have the total and the
    capacity.
    """
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
    """Tabulates the bytes of a step's collectives in both plans, and the differences.

    Each pair of a kind of collective and its mesh axes has a row. It has the bytes
    of `plan`, those of `other`, and how many more bytes and seconds `other` needs than
    `plan` (negative if fewer). Seconds include the parts that overlap with computing.
    The row in which `other` needs the most additional seconds is first.

    Args:
        plan: the plan in the column "this".
        other: the plan in the column "other".
        only_changed: whether to leave out rows with equal bytes and seconds.
    """
    ours, theirs, error = sent(plan), sent(other), _error(plan, other)
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
            most = largest_collective(other, key)
            row += (signed(seconds(there - here, error)), most.where if most else "-")
            found.append((here - there, (key[0], wording.axes(key[1]), *row)))
    columns = ("kind", "axes", "this", "other", "difference", "seconds")
    columns += ("largest in other",)
    title = "Collectives that differ" if only_changed else "Collectives of a step"
    rows = tuple(row for _, row in sorted(found))
    return Section(
        title=title, columns=columns, rows=rows, notes=() if rows else ("none",)
    )


def largest_collective(plan: Plan, key: Key) -> Collective | None:
    """Finds the collective with the most bytes in a step, of one kind and mesh axes.

    Returns None if the plan has no collective of this kind over these axes.

    Args:
        plan: the plan.
        key: the kind of collective, and its mesh axes.
    """
    found = [one for one in plan.collectives if (one.kind, one.axes) == key]
    return max(found, key=lambda one: one.num_bytes * one.trips, default=None)


def sent(plan: Plan) -> dict[Key, tuple[int, float]]:
    """Sums the bytes and seconds of a step's collectives, by kind and mesh axes."""
    num_bytes: Counter[Key] = Counter()
    took: dict[Key, float] = defaultdict(float)
    for one in plan.collectives:
        key = one.kind, one.axes
        num_bytes[key] += one.num_bytes * one.trips
        took[key] += one.seconds
    return {key: (num_bytes[key], took[key]) for key in took}


# Why a plan takes longer: the terms that make up most of the difference.


_MOST = 0.8
"""`slower` names terms, the largest first, until they make up this share of the added
(or saved) seconds."""
_WHOLE = 0.995
"""Least share of the work that an axis divides to count as dividing all work."""
_AGAINST = 0.1
"""`slower` also names the term that changes most in the other direction, if its change
exceeds this share of the difference."""


def slower(plan: Plan, other: Plan) -> str:
    """Describes the terms that make the other plan's step longer or shorter.

    A term is a part of a step's seconds, such as compute. If the other step is longer,
    names the terms that grow most, until they make up 80 % (`_MOST`) of the sum of all
    that grow. Also names the term that shrinks most, if it shrinks by more than 10 %
    (`_AGAINST`) of the difference of the two steps. If the other step is shorter,
    growing and shrinking change places. Returns '' if both steps take the same time.
    """
    total = other.prediction.step_s - plan.prediction.step_s
    if not total:
        return ""
    more = _differences(plan.prediction.terms, other.prediction.terms)
    ranked = sorted(more, key=lambda name: -more[name] / total)
    along = [name for name in ranked if more[name] * total > 0]
    named, left = [], sum(more[name] for name in along) * (1 - _MOST)
    while along and abs(sum(more[name] for name in along)) > abs(left):
        named.append(along.pop(0))
    text = "; ".join(_term(name, more[name], plan, other) for name in named)
    last = ranked[-1]
    if more[last] / total < -_AGAINST:
        text += f"; against it {_term(last, more[last], plan, other)}"
    return f"the difference: {text}"


def larger(plan: Plan, other: Plan) -> str:
    """Describes the term of memory that grows most from `plan` to `other`.

    A term is a part of the bytes on a device, such as parameters. Returns '' if no term
    grows.
    """
    more = _differences(plan.memory, other.memory)
    name = max(more, key=lambda name: more[name])
    if more[name] <= 0:
        return ""
    return (
        f"most of it: {name} {signed(size(more[name]))}, {size(other.memory[name])} "
        f"instead of {size(plan.memory[name])}"
    )


def _differences(
    here: Mapping[str, float], there: Mapping[str, float]
) -> dict[str, float]:
    return {n: there.get(n, 0.0) - here.get(n, 0.0) for n in {**here, **there}}


def _term(name: str, more_s: float, plan: Plan, other: Plan) -> str:
    cause = _CAUSES[name](plan, other) if name in _CAUSES else ""
    cost = signed(seconds(more_s, _error(plan, other)))
    return f"{name} {cost}" + (f" ({cause})" if cause else "")


def _collectives(plan: Plan, other: Plan) -> str:
    """Describes why the seconds of collectives differ between two plans.

    Collectives are summed by kind and mesh axes. Names the sum that grows most from
    `plan` to `other`, if collectives take longer in `other` as a whole; else the sum
    that shrinks most. Returns '' if neither plan has collectives.
    """
    name = "collectives"
    grows = other.prediction.terms[name] > plan.prediction.terms[name]
    ours, theirs = sent(plan), sent(other)

    def added(key: Key) -> tuple[int, float]:
        (here, here_s), (there, there_s) = (
            sent.get(key, (0, 0.0)) for sent in (ours, theirs)
        )
        return there - here, there_s - here_s

    keys = {**ours, **theirs}
    if not keys:
        return ""
    key = max(keys, key=lambda one: added(one)[1] * (1 if grows else -1))
    num_bytes, _ = added(key)
    shown = other if grows else plan
    text = f"{key[0]} over {wording.axes(key[1])}"
    here, there = lies_on(plan, key[1]), lies_on(other, key[1])
    if here and there and here != there:
        text += f", {there} instead of {here}"
    elif here or there:
        text += f", {here or there}"
    if num_bytes:
        how = "more" if num_bytes > 0 else "less"
        text += f", sends {size(abs(num_bytes))} {how}"
    largest = largest_collective(shown, key)
    if largest is not None:
        times = f"{largest.trips} times " if largest.trips > 1 else ""
        text += f"; most: {times}{size(largest.num_bytes)}, {largest.where}"
    return text


def _compute(plan: Plan, other: Plan) -> str:
    here, there = plan.knobs, other.knobs
    causes = []
    if _divided(plan) != _divided(other):
        causes.append(f"divided by {_divided(other)} instead of {_divided(plan)}")
    if here.remat != there.remat:
        causes.append(f"remat={there.remat} instead of {here.remat}")
    if here.microbatches != there.microbatches:
        causes.append(f"in {there.microbatches} parts instead of {here.microbatches}")
    return ", ".join(causes)


def _divided(plan: Plan) -> str:
    """Describes the mesh axes that divide the work of a plan; 'nothing' if none does.

    The work is the operations of matmuls, convolutions and kernels. For an axis that
    divides less than 99.5 % (`_WHOLE`) of the work, adds the share that it divides.
    """
    whole = [axis for axis, use in plan.axes.items() if use.work >= _WHOLE]
    found = [" x ".join(f"{axis}={plan.mesh[axis]}" for axis in sorted(whole))]
    found += [
        f"{percent(use.work)} of it by {axis}={plan.mesh[axis]}"
        for axis, use in plan.axes.items()
        if 0 < use.work < _WHOLE
    ]
    return " and ".join(filter(None, found)) or "nothing"


def _launch(plan: Plan, other: Plan) -> str:
    here, there = plan.knobs.microbatches, other.knobs.microbatches
    return f"{there} times through the model instead of {here}" if here != there else ""


def _optimizer(plan: Plan, other: Plan) -> str:
    here, there = plan.memory.get("optimizer", 0), other.memory.get("optimizer", 0)
    if here == there:
        return ""
    return f"{size(there)} of state on each device instead of {size(here)}"


def _offload(plan: Plan, other: Plan) -> str:
    here, there = plan.host_bytes, other.host_bytes
    return f"{size(there)} of host memory for each device instead of {size(here)}"


def _bubble(plan: Plan, other: Plan) -> str:
    stages, parts = other.mesh.get("stage", 1), other.knobs.microbatches
    return f"{stages} stages, {parts} microbatches"


_CAUSES: Mapping[str, Callable[[Plan, Plan], str]] = {
    "compute": _compute,
    "collectives": _collectives,
    "bubble": _bubble,
    "optimizer": _optimizer,
    "offload": _offload,
    "launch": _launch,
}
"""Map from a term to a function of two plans, which describes why the term differs."""
