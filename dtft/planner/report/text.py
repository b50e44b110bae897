"""Explains a plan: seconds and bytes by term, mesh, collectives, and alternatives.

A term is a part of the seconds of a step (such as compute) or of the bytes on a device
(such as parameters). Every number comes from the plan, so a plan from a file can be
explained too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dtft.planner import wording
from dtft.planner.cluster import INTERVAL_SHARE
from dtft.planner.plan import (
    Alternative,
    Collective,
    ComputeKind,
    Knobs,
    Plan,
    Prediction,
)
from dtft.planner.search import IDLE
from dtft.planner.types import Spec
from dtft.planner.wording import Section, percent, seconds, share, size

# A text for each term, kind of memory and knob, which reports print beside the word.


TERMS: Mapping[str, str] = {
    "compute": "matmuls and all else of the model, forward and backward, on one device",
    "collectives": "what computing beside them does not hide",
    "bubble": "stages that wait for the first or the last microbatches",
    "optimizer": "the update: gradients, parameters and its state, read and written",
    "offload": "optimizer state, copied from host memory and back",
    "launch": "starting the operators one by one: the same for the smallest arrays",
    "step": "",
}
"""Meaning of each term of a step's seconds."""

COMPUTE: Mapping[ComputeKind, str] = {
    "products": "matmuls and convolutions, without those of attention",
    "attention": "matmuls of queries, keys and values, and the softmax between",
    "element-wise": "what is computed element by element, or moved",
    "other": "reductions, gathers, scatters, sorts",
}
"""Meaning of each kind of work."""

RESOURCES: Mapping[str, str] = {
    "compute": "matmuls, convolutions and custom kernels, also those computed again",
    "memory bandwidth": "what kernels read from device memory and write to it",
}
"""Meaning of the resources of a roofline that are no links."""

MEMORY: Mapping[str, str] = {
    "parameters": "at rest",
    "gradients": "at the moment that needs most",
    "optimizer": "its state, at rest",
    "activations": "the same moment: kept for the backward pass, gathered, worked on",
    "batch": "the arrays that are fed",
    "constants": "arrays that the program closes over, whole on every device",
    "reserve": "kept free for what is not predicted",
    "needed": "",
    "capacity": "",
}
"""Meaning of each term of a device's memory."""

ZERO: Mapping[int, str] = {
    0: "each device has its parameters, gradients and optimizer state whole; only "
    "other axes than fsdp divide them",
    1: "optimizer state is divided along fsdp",
    2: "optimizer state and gradients are divided along fsdp; parameters are not",
    3: "parameters, gradients and optimizer state are divided along fsdp; parameters "
    "are gathered where they are used",
}
"""Meaning of each level of ZeRO."""

REMAT: Mapping[str, str] = {
    "none": "the backward pass computes nothing again",
    "dots": "the backward pass computes again all but the results of matmuls",
    "full": "the backward pass computes again all but the inputs of blocks",
}
"""Meaning of each rematerialization policy."""


def knobs_in_words(knobs: Knobs) -> tuple[str, ...]:
    """Describes the ZeRO level, the remat policy and the microbatches of a plan.

    Returns one text for each. A remat policy "none" and a single microbatch are left
    out.

    >>> knobs_in_words(Knobs(zero=1))
    ('zero=1: optimizer state is divided along fsdp',)
    """
    found = [f"zero={knobs.zero}: {ZERO[knobs.zero]}"]
    if knobs.remat != "none":
        found.append(f"remat={knobs.remat}: {REMAT[knobs.remat]}")
    if knobs.microbatches > 1:
        found.append(
            f"microbatches={knobs.microbatches}: the batch goes through in so many "
            "parts, one after another, and their gradients are added up"
        )
    return tuple(found)


_LITTLE = 0.5
"""Share of the work below which an axis is reported to divide little work."""


def mesh_sections(plan: Plan) -> tuple[Section, ...]:
    """Tabulates the mesh axes: the links of each, and what it divides.

    A row has the axis, its size, the links along it, the share of the work that it
    divides, and the number of arrays that it divides. Returns () if the plan has no
    `axes`.
    """
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
    """Describes the dims that the axis `sequence` divides; () without this axis."""
    if "sequence" not in plan.axes:
        return ()
    return (
        "sequence divides the second dim of the batch's arrays: positions, or where "
        "examples are vectors their features",
    )


def lies_on(plan: Plan, axes: Sequence[str]) -> str:
    """Describes the fabric levels of mesh axes, such as `8 by NVLink x 4 by Ethernet`.

    Each level has the number of devices (or groups of the level before) that the axis
    joins on the level, and the kind of link. Collectives along the axes communicate
    over these levels. Axes that are not in `Plan.axes` are left out. Returns '' if all
    are left out.
    """
    found = [
        f"{wording.number(number)} by {kind}"
        for axis in axes
        if axis in plan.axes
        for number, kind in plan.axes[axis].levels
    ]
    return " x ".join(found)


def _arrays_divided(plan: Plan, axis: str) -> str:
    """Counts the arrays that an axis divides, as text such as `3 of 8 of optimizer`.

    Parameters (or the whole state), optimizer state and batch are counted separately.
    Returns `none` if the axis divides no array.
    """
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
    """Finds the mesh axes that divide less than half (`_LITTLE`) of the work.

    Returns pairs of an axis and a text on the work that its devices repeat.
    """
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


NUM_COLLECTIVES = 12
"""Number of collectives that have a row each in a table: those with the most bytes."""
NUM_ALTERNATIVES = 10
"""Number of alternatives that have a row each in a table: the first of the ranking. The
first alternative of each baseline (rule of thumb, such as fsdp) has a row too."""
_WIDTH = 24
"""Total length, in characters, of the bars in the table of a step's seconds."""


def explain(plan: Plan) -> str:
    """Explains a plan in text and tables."""
    return wording.text(plan_sections(plan))


def plan_sections(plan: Plan) -> tuple[Section, ...]:
    """Makes the sections of an explanation, most important first."""
    return (
        summary(plan),
        *mesh_sections(plan),
        waterfall(plan),
        *compute(plan),
        memory(plan),
        collectives(plan),
        bound(plan),
        alternatives(plan),
    )


def knobs_text(knobs: Knobs) -> str:
    """Lists the values of a plan's knobs (settings other than the mesh), in one line.

    Knobs other than microbatches, remat and zero are left out if they are at their
    default.

    >>> knobs_text(Knobs(microbatches=4, zero=1))
    'microbatches=4, remat=none, zero=1'
    """
    usual = Knobs(microbatches=knobs.microbatches, remat=knobs.remat, zero=knobs.zero)
    text = f"microbatches={knobs.microbatches}, remat={knobs.remat}, zero={knobs.zero}"
    for name, value in asdict(knobs).items():
        if value != getattr(usual, name):
            text += f", {name}={value}"
    return text


def name_of(alternative: Alternative) -> str:
    """Returns the rule of thumb that an alternative follows (`fsdp`); `-` for none."""
    return alternative.name or "-"


def summary(plan: Plan) -> Section:
    """Describes mesh, settings, step time and memory of a plan.

    Also names the source of the figures from which time and memory were predicted, such
    as a calibration.
    """
    found = plan.prediction
    left = plan.capacity_bytes - plan.memory_bytes
    fits = f"{size(left)} are left" if plan.fits else f"{size(-left)} too much"
    notes = [
        step_text(found),
        f"constants: {found.source}",
        f"{size(plan.memory_bytes)} of {size(plan.capacity_bytes)} on each device: "
        f"{fits}",
        *_rates(plan),
        *knobs_in_words(plan.knobs),
    ]
    if plan.host:
        notes.append(
            f"optimizer state ({len(plan.host)} arrays) rests in host memory, "
            f"{size(plan.host_bytes)} for each device, and comes for each update"
        )
    if not plan.runnable:
        notes.append("a what-if plan: it cannot be run here")
    title = f"Plan for {plan.cluster}: {wording.mesh(plan.mesh)}; "
    return Section(title=title + knobs_text(plan.knobs), notes=tuple(notes))


def step_text(prediction: Prediction) -> str:
    """Formats the predicted seconds of a step with their interval."""
    step = seconds(prediction.step_s, prediction.relative_error)
    low, high = (_end(s, prediction) for s in (prediction.low_s, prediction.high_s))
    return f"{step} per step ({INTERVAL_SHARE * 100:.0f} % interval: {low} to {high})"


def _end(end_s: float, prediction: Prediction) -> str:
    """Formats the lower or upper end of a prediction's interval, in seconds.

    The end is rounded to the same place as the predicted seconds of the step.
    """
    error_s = prediction.relative_error * prediction.step_s
    return seconds(end_s, error_s / end_s if end_s else 0.0)


def _rates(plan: Plan) -> tuple[str, ...]:
    """Describes examples per second and MFU (model flops utilization) in one text.

    Leaves out the MFU if the seconds of the model at peak speed are not known. Returns
    () if the number of examples is not known.
    """
    step_s, error = plan.prediction.step_s, plan.prediction.relative_error
    if not plan.examples or not step_s:
        return ()
    text = f"{wording.number(plan.examples / step_s, error)} examples per second"
    if plan.at_peak_s:
        text += (
            f"; MFU {percent(plan.mfu, error)} (matmuls, convolutions and custom "
            "kernels at the peak, without what is computed again)"
        )
    return (text,)


def waterfall(plan: Plan) -> Section:
    """Tabulates a step's seconds by term, with a bar for each term.

    Each bar begins where the bar above it ends.
    """
    total, error = plan.prediction.step_s, plan.prediction.relative_error
    rows, start = [], 0.0
    for name, value in plan.prediction.terms.items():
        rows.append(
            (
                name,
                seconds(value, error),
                share(value, total, error),
                _bar(start, value, total),
                TERMS.get(name, ""),
            )
        )
        start += value
    rows.append(("step", seconds(total, error), share(total, total), "", ""))
    return Section(
        title="Step time",
        columns=("term", "seconds", "share", "", "what"),
        rows=tuple(rows),
    )


def compute(plan: Plan) -> tuple[Section, ...]:
    """Tabulates the compute seconds of each kind of work and of the slowest operators.

    Returns () for a plan without seconds by kind of work, such as a plan from an older
    file.
    """
    if not plan.compute:
        return ()
    total = plan.prediction.terms.get("compute", 0.0)
    error = plan.prediction.relative_error

    def row(name: str, value: float, what: str) -> tuple[str, ...]:
        return name, seconds(value, error), share(value, total, error), what

    rows = [row(kind, value, COMPUTE[kind]) for kind, value in plan.compute.items()]
    rows += [
        row(f"{place}.", one.seconds, one.where)
        for place, one in enumerate(plan.dearest, start=1)
    ]
    return (
        Section(
            title="Compute by kind of work, and its dearest operators",
            columns=("", "seconds", "share", "what"),
            rows=tuple(rows),
        ),
    )


def _bar(start: float, value: float, total: float) -> str:
    if not total:
        return ""
    first, last = (round(_WIDTH * at / total) for at in (start, start + value))
    return " " * first + "#" * (last - first)


def memory(plan: Plan) -> Section:
    """Tabulates the bytes of the fullest device, and their shares of the capacity.

    Each term, such as parameters, has a row, followed by the total and the capacity.
    """
    has = plan.capacity_bytes
    terms = {**plan.memory, "needed": plan.memory_bytes, "capacity": has}
    rows = [
        (name, size(value), share(value, has), MEMORY.get(name, ""))
        for name, value in terms.items()
    ]
    return Section(
        title="Memory of a device",
        columns=("term", "bytes", "of capacity", "what"),
        rows=tuple(rows),
    )


def collectives(plan: Plan, num_listed: int = NUM_COLLECTIVES) -> Section:
    """Tabulates the collectives of a step, most bytes first, with their total.

    Collectives that differ only in the number of their layer share one row. After the
    first `num_listed` rows, one row sums up all other collectives.
    """
    ranked, error = layers_together(plan.collectives), plan.prediction.relative_error
    rows = [_collective(one, error) for one in ranked[:num_listed]]
    rest = ranked[num_listed:]
    if rest:
        rows.append((f"{len(rest)} more", "", "", "", *_totals(rest, error), ""))
    rows.append(("all", "", "", "", *_totals(ranked, error), ""))
    columns = ("kind", "axes", "bytes", "times", "per step", "seconds", "where")
    return Section(
        title="Collectives, largest first (before overlap)",
        columns=columns,
        rows=tuple(rows) if ranked else (),
        notes=(_JOINED,) if ranked else ("none: nothing is sent",),
    )


def layers_together(found: Iterable[Collective]) -> list[Collective]:
    """Merges the collectives that differ only in the number of a layer in their path.

    Adds up the executions per step (`trips`) and the seconds of the merged collectives.
    Returns the merged collectives in descending order of their bytes per step.
    """
    merged: dict[tuple[Any, ...], Collective] = {}
    for one in found:
        where = wording.layered(one.where)
        key = one.kind, one.axes, one.num_bytes, where
        known = merged.get(key)
        merged[key] = (
            replace(one, where=where)
            if known is None
            else replace(
                known,
                trips=known.trips + one.trips,
                seconds=known.seconds + one.seconds,
            )
        )
    return sorted(merged.values(), key=lambda one: -one.num_bytes * one.trips)


_JOINED = (
    "alike ones that nothing waits for (sums of gradients, arrays gathered behind an "
    "update) are sent as one, except on CPU: they share its seconds by their bytes"
)


def _collective(one: Collective, error: float) -> tuple[str, ...]:
    return (
        one.kind,
        wording.axes(one.axes),
        size(one.num_bytes),
        str(one.trips),
        *_totals([one], error),
        one.where,
    )


def _totals(found: Iterable[Collective], error: float) -> tuple[str, str]:
    known = list(found)
    num_bytes = sum(one.num_bytes * one.trips for one in known)
    return size(num_bytes), seconds(sum(one.seconds for one in known), error)


def bound(plan: Plan) -> Section:
    """Compares the predicted seconds of a step with lower bounds.

    A row has the seconds that one resource would be busy at its peak; the longest is
    first, and is the roofline: no step of this plan takes less. A note has the lower
    bound of all plans for this step and cluster, if it is known.
    """
    step_s, error = plan.prediction.step_s, plan.prediction.relative_error
    ranked = sorted(plan.roofline.items(), key=lambda item: -item[1])
    links = "what this plan sends through these links"
    rows = [
        (name, seconds(busy), share(busy, step_s, error), RESOURCES.get(name, links))
        for name, busy in ranked
    ]
    notes = []
    if plan.roofline_s:
        notes.append(
            f"roofline: this plan takes {seconds(plan.roofline_s)} or more, bound by "
            f"{plan.bound_by}; the predicted step is "
            f"{wording.number(step_s / plan.roofline_s, error)} times as long. On the "
            "roofline all resources work at their peak and at once, without latency "
            "and launches"
        )
    if plan.bound_s:
        notes.append(
            f"no plan of this step on {plan.cluster} takes less than "
            f"{seconds(plan.bound_s)}; this one takes "
            f"{seconds(step_s - plan.bound_s, error)} more: "
            f"{wording.number(step_s / plan.bound_s, error)} times as long. The bound "
            "has no communication and no launch in it, which are most of a small step"
        )
    return Section(
        title="Roofline and lower bound",
        columns=("resource", "busy at its peak", "of the step", "with"),
        rows=tuple(rows),
        notes=tuple(notes or ["none is known"]),
    )


def alternatives(plan: Plan) -> Section:
    """Tabulates the best alternatives of the plan and every baseline, by rank.

    There are up to 10 rows for the best alternatives (`NUM_ALTERNATIVES`), and a row
    for each baseline (a mesh of a common rule of thumb) that is not among them.
    """
    rows = [_alternative(plan, place, one) for place, one in shown(plan)]
    columns = ("", "mesh", "knobs", "baseline", "step", "against plan", "memory", "")
    return Section(
        title="Alternatives",
        columns=columns,
        rows=tuple(rows),
        notes=(*((tied_text(plan),) if rows else ("none",)), *_left_out(plan)),
    )


def _left_out(plan: Plan) -> tuple[str, ...]:
    """Describes the mesh that is faster than the plan's, but not chosen.

    Some devices of this mesh repeat the work of others. Returns () without such a mesh.
    """
    return tuple(
        f"left out: {wording.mesh(one.mesh)}, {knobs_text(one.knobs)}, at "
        f"{seconds(one.step_s, plan.prediction.relative_error)} per step: some of its "
        "devices repeat the work of others, so it is taken only if it is "
        f"{IDLE:g} times as fast as meshes that use all of theirs; pin "
        f"{', '.join(f'{axis}={size}' for axis, size in one.mesh.items())} to get it"
        for one in plan.left_out
    )


def shown(plan: Plan) -> list[tuple[int, Alternative]]:
    """Selects the alternatives that a table lists, each with its rank from 1.

    These are the first 10 alternatives (`NUM_ALTERNATIVES`), and the best alternative
    of each baseline (a mesh of a common rule of thumb, such as data parallelism).
    """
    named = {""}
    found = []
    for place, one in enumerate(plan.alternatives, start=1):
        if place <= NUM_ALTERNATIVES or one.name not in named:
            found.append((place, one))
        named.add(one.name)
    return found


def _alternative(plan: Plan, place: int, one: Alternative) -> tuple[str, ...]:
    over = one.memory_bytes - plan.capacity_bytes
    error = plan.prediction.relative_error
    return (
        str(place),
        wording.mesh(one.mesh),
        knobs_text(one.knobs),
        name_of(one),
        seconds(one.step_s, error),
        wording.change(one.step_s, plan.prediction.step_s, error),
        size(one.memory_bytes),
        "" if one.fits else f"{size(over)} too much",
    )


def tied(plan: Plan) -> tuple[Alternative, ...]:
    """Selects the alternatives whose step may be as short as the plan's.

    The selected alternatives fit, and their step takes no longer than the upper end of
    the plan's prediction interval. The plan itself is left out.
    """
    return tuple(
        one
        for one in plan.alternatives
        if one.fits
        and one.step_s <= plan.prediction.high_s
        and (one.mesh, one.knobs) != (plan.mesh, plan.knobs)
    )


def tied_text(plan: Plan) -> str:
    """Writes a note on how many alternatives may be as fast as the plan.

    They fit in memory, and take no longer than the upper end of the plan's prediction
    interval.
    """
    return (
        f"{len(tied(plan))} of {len(plan.alternatives)} alternatives (the best, and "
        f"the baselines) are tied with the plan, "
        f"within the interval of its prediction (up to "
        f"{_end(plan.prediction.high_s, plan.prediction)}): only a measurement can "
        "order them"
    )
