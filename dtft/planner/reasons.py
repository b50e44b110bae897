"""Why one plan takes longer than another: the terms that make the difference, and what.

Every number is one of the two plans', or the difference of two of them. Decides only
which terms are named. Must not know questions, clusters or how plans are found.
"""

from collections.abc import Callable, Mapping

from dtft.planner import comparing, wording
from dtft.planner.mesh_text import lies_on
from dtft.planner.plan import Plan
from dtft.planner.wording import percent, seconds, signed, size

_MOST = 0.8
"""Share of what is added (or saved) that the terms named make up."""
_WHOLE = 0.995
"""Share of the work from which on an axis divides all of it."""
_AGAINST = 0.1
"""Share of the difference from which on a term that goes the other way is named."""


def slower(plan: Plan, other: Plan) -> str:
    """Which terms make the other's step longer or shorter; '' if none does."""
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
    """Which term of memory the other needs more of than this plan; '' if none."""
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
    return f"{name} {signed(seconds(more_s))}" + (f" ({cause})" if cause else "")


def _collectives(plan: Plan, other: Plan) -> str:
    """The kind and axes whose seconds differ most, in the direction of the term."""
    name = "collectives"
    grows = other.prediction.terms[name] > plan.prediction.terms[name]
    ours, theirs = comparing.sent(plan), comparing.sent(other)

    def added(key: comparing.Key) -> tuple[int, float]:
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
    largest = comparing.largest(shown, key)
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
    """The axes that divide work, with the share of it where that is not all."""
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
"""What in two plans makes a term differ, in words."""
