"""A mesh in words: where each axis lies, what it divides, and if that is little.

Every number comes from the plan. Must not know clusters or how a plan is found.
"""

from collections.abc import Mapping, Sequence

from dtft.planner import wording
from dtft.planner.plan import Plan, Spec
from dtft.planner.wording import Section, percent

_LITTLE = 0.5
"""Share of the work below which an axis divides little of it."""


def sections(plan: Plan) -> tuple[Section, ...]:
    """Where each axis lies and what it divides; nothing if one device does it all."""
    if not plan.axes:
        return ()
    rows = [
        (
            axis,
            str(plan.mesh[axis]),
            lies_on(plan, (axis,)),
            percent(use.work),
            _arrays_divided(plan, axis),
        )
        for axis, use in plan.axes.items()
    ]
    columns = ("axis", "size", "joins", "of the work", "arrays it divides")
    return (
        Section(
            title="Mesh on the fabric, outermost axis first",
            columns=columns,
            rows=tuple(rows),
            notes=(*_sequence(plan), *(text for _, text in little(plan))),
        ),
    )


def _sequence(plan: Plan) -> tuple[str, ...]:
    """What an axis of this name divides: not all models have positions."""
    if "sequence" not in plan.axes:
        return ()
    return (
        "sequence divides the second dim of the batch's arrays: positions, or where "
        "examples are vectors their features",
    )


def lies_on(plan: Plan, axes: Sequence[str]) -> str:
    """The levels of the fabric that axes go along, such as `8 by NVLink`.

    '' for axes of which that is not known.
    """
    found = [
        f"{wording.number(number)} by {kind}"
        for axis in axes
        if axis in plan.axes
        for number, kind in plan.axes[axis].levels
    ]
    return " x ".join(found)


def _arrays_divided(plan: Plan, axis: str) -> str:
    """How many arrays of each tree it divides."""
    trees: Mapping[str, Mapping[str, Spec]] = {
        "parameters" if plan.entry == "loss" else "state": plan.state,
        "optimizer": plan.optimizer,
        "batch": plan.batch,
    }
    counts = {
        name: sum(any(axis in part for part in spec) for spec in specs.values())
        for name, specs in trees.items()
    }
    found = [f"{n} of {len(trees[name])} of {name}" for name, n in counts.items() if n]
    return ", ".join(found) or "none"


def little(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Axes that divide little of the work, and what that means."""
    return tuple(
        (
            axis,
            f"{axis}={plan.mesh[axis]} divides "
            f"{percent(use.work) if use.work else 'none'} of the work; the rest each "
            f"of its {plan.mesh[axis]} devices does as one alone would. "
            "Fewer devices may be as fast: sensitivity() has the price of half as many",
        )
        for axis, use in plan.axes.items()
        if use.work < _LITTLE
    )
