"""Plans a workload again with other pins, to tell what settings and pins cost.

Pins are settings that the user has fixed. A `Decision` is a selected plan, with its
workload, cluster, pins and all candidates.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtft.planner import wording
from dtft.planner.plan import Plan
from dtft.planner.report import compare
from dtft.planner.report.lints import batch, repeated, undivided_text
from dtft.planner.report.text import knobs_text
from dtft.planner.search import IDLE, Decision, Fewer, best_of, check_pins
from dtft.planner.types import AXES
from dtft.planner.wording import Section, seconds, size


@dataclass(frozen=True, kw_only=True)
class PinPrice:
    """The best plan without some pins, and the seconds of a step that the pins cost.

    Pins are settings that the user has fixed, such as `tensor=8`.
    """

    pins: Mapping[str, Any]
    """Pins that `without` leaves out."""
    without: Plan
    cost_s: float
    """Seconds of a step that the pins cost; 0 if `without` is not faster, infinite if
    no plan fits without the pins."""


def pin_prices(decision: Decision) -> tuple[PinPrice, ...]:
    """Computes how many seconds of a step each pin (a setting fixed by the user) costs.

    The entry of a pin compares the decision's plan with the best plan without this pin,
    but with all other pins. If there are several pins, the last entry is for all pins
    together.
    """
    pins = dict(decision.pins)
    ways = [{name: value} for name, value in pins.items()]
    return tuple(_price(decision, out) for out in (*ways, *([pins] * (len(pins) > 1))))


def pin_section(decision: Decision) -> tuple[Section, ...]:
    """Tabulates the seconds of a step that each pin costs, and the plan without it.

    A pin is a setting that the user has fixed. Each pin has a row; with several pins,
    one more row is for all pins together. Returns a single section; () without pins.
    """
    prices = pin_prices(decision)
    if not prices:
        return ()
    return (
        Section(
            title="What the pins cost",
            columns=("pin", "costs", "of a step", "without it", "step", "memory"),
            rows=tuple(_row(decision.plan, one) for one in prices),
        ),
    )


def _price(decision: Decision, out: Mapping[str, Any]) -> PinPrice:
    kept = {name: it for name, it in decision.pins.items() if name not in out}
    without = best_of(
        decision.question, decision.cluster, kept, what_if=decision.what_if
    ).plan
    more_s = decision.plan.prediction.step_s - without.prediction.step_s
    cost_s = max(0.0, more_s) if without.fits else float("inf")
    return PinPrice(pins=dict(out), without=without, cost_s=cost_s)


def _row(plan: Plan, price: PinPrice) -> tuple[str, ...]:
    other, here_s = price.without, plan.prediction.step_s
    pins = ", ".join(f"{name}={value}" for name, value in price.pins.items())
    mesh = f"{wording.mesh(other.mesh)}, {knobs_text(other.knobs)}"
    memory = size(other.memory_bytes)
    if not other.fits:
        return (pins, "nothing", "", f"{mesh}: does not fit", "", memory)
    there_s = other.prediction.step_s
    error = plan.prediction.relative_error
    cost = seconds(price.cost_s, error) if price.cost_s else "nothing"
    more = wording.change(here_s, there_s, error) if price.cost_s else ""
    return (pins, cost, more, mesh, seconds(there_s, error), memory)


# `why_not` answers "why not tensor=8?" with the best plan that has this knob and the
# difference to the chosen plan in bytes and seconds, or with the reason why no plan can
# have the knob.


def why_not(decision: Decision, **pins: Any) -> str:
    """Explains what other settings would cost, or why no plan can have them.

    The text compares the decision's plan with the best plan that has these settings:
    seconds by term, and collectives. If that plan does not fit, it compares bytes by
    term.

    Args:
        decision: the decision to compare with.
        pins: the settings, such as `tensor=8` or `zero=3`. The settings that were fixed
            for the decision stay fixed, unless `pins` has another value for them.

    Raises:
        ValueError: `pins` is empty. An unknown setting raises no error: the text lists
            the known ones.
    """
    if not pins:
        raise ValueError(
            "why_not() asks about nothing. Name knobs, such as why_not(tensor=8) or "
            "why_not(microbatches=4, remat='dots')."
        )
    return wording.text(sections(decision, pins))


def sections(decision: Decision, pins: Mapping[str, Any]) -> tuple[Section, ...]:
    """Makes the sections of the text of `why_not`.

    If the settings are not possible, or the decision's plan has them already, a single
    section says so. Otherwise the sections compare the decision's plan with the best
    plan that has the settings: its bytes if it does not fit, else its seconds and
    collectives.

    Args:
        decision: the decision to compare with.
        pins: the settings, by name.
    """
    asked = ", ".join(f"{name}={value}" for name, value in pins.items())
    plan = decision.plan
    try:
        check_pins(pins)
    except ValueError as error:
        return (_impossible(asked, error),)
    if all(_has(plan, name, value) for name, value in pins.items()):
        text = f"the plan has it: {wording.mesh(plan.mesh)}"
        return (Section(title=f"{asked}: {text}"),)
    try:
        found = _found(decision, pins)
    except ValueError as error:
        return (_impossible(asked, error),)
    other, notes = found.plan, _notes(found, pins)
    if not other.fits:
        notes = [text for text in (compare.larger(plan, other), *notes) if text]
        return (_too_large(asked, other, notes), compare.memory(plan, other))
    slower = _slower(asked, plan, other, notes, idle=found.idle)
    return (slower, *_details(plan, other))


def _found(decision: Decision, pins: Mapping[str, Any]) -> Decision:
    """Finds the best plan with other pins (settings that are fixed).

    The pins replace the decision's pins of the same names. If no plan fits, the result
    is the one that needs the least memory.

    First searches as for any plan. If no mesh has the pins, searches again, also among
    meshes of fewer devices than there are.

    Raises:
        ValueError: no mesh has the pins; or only meshes of fewer devices have them, and
            in the best of these meshes some devices repeat the work of others.
    """

    def best(fewer: Fewer) -> Decision:
        return best_of(
            decision.question,
            decision.cluster,
            {**decision.pins, **pins},
            what_if=decision.what_if,
            fewer=fewer,
        )

    try:
        return best("if faster")
    except ValueError as error:
        try:
            found = best("always")
        except ValueError:
            raise error from None
        if found.idle:  # devices that repeat work are no answer
            raise
        return found


def _impossible(asked: str, error: ValueError) -> Section:
    return Section(title=f"{asked} is not possible: {error}")


def _has(plan: Plan, name: str, value: Any) -> bool:
    if name == "order":
        return tuple(value) == tuple(axis for axis in plan.mesh if axis in value)
    knobs: Mapping[str, Any] = {**dict.fromkeys(AXES, 1), **plan.mesh}
    knobs = {**knobs, **asdict(plan.knobs)}
    if name == "stage_layers":
        return tuple(value) == plan.knobs.stage_layers
    return knobs.get(name) == value


def _notes(found: Decision, pins: Mapping[str, Any]) -> list[str]:
    """Lists notes on a plan that was made with other settings.

    The notes are on the batch, on devices that repeat the work of others, and on dims
    that `tensor` cannot divide (if it is fixed above 1).

    Args:
        found: the decision with the plan.
        pins: the settings that were asked for, by name.
    """
    notes = [one.text for one in (*batch(found), *repeated(found.plan))]
    if found.idle:
        notes.append(
            "an axis of it divides no product: its devices repeat the work of others, "
            "as idle as if they were not there, and plans that use them all come first "
            f"if they take less than {IDLE:g} times as long"
        )
    if pins.get("tensor", 1) > 1:
        notes.append(undivided_text(found.question, pins["tensor"]))
    return [note for note in notes if note]


def _too_large(asked: str, other: Plan, notes: list[str]) -> Section:
    needed, has = other.memory_bytes, other.capacity_bytes
    title = (
        f"{asked} does not fit: the leanest plan with it ({_shown(other)}) needs "
        f"{size(needed)} on each device, {size(needed - has)} more than the "
        f"{size(has)} there are"
    )
    return Section(title=title, notes=tuple(notes))


def _slower(
    asked: str, plan: Plan, other: Plan, notes: list[str], *, idle: bool
) -> Section:
    here, there = plan.prediction.step_s, other.prediction.step_s
    error = plan.prediction.relative_error
    much = seconds(abs(there - here), error)
    much += f" ({wording.change(there, here, error)})"
    how = "slower" if there > here else "faster" if there < here else "as fast"
    title = (
        f"{asked} is possible and {how}: the best plan with it ({_shown(other)}) takes "
        f"{seconds(there, error)} per step instead of {seconds(here, error)}"
    )
    title += f", {much}" if there != here else ""
    more = other.memory_bytes - plan.memory_bytes
    because = compare.slower(plan, other)
    notes = [
        *([because] if because else []),
        f"it needs {size(other.memory_bytes)} on each device instead of "
        f"{size(plan.memory_bytes)}, {wording.signed(size(more))}",
        *notes,
    ]
    if here < there <= plan.prediction.high_s:
        notes.append(
            f"this is within the interval of the prediction (up to "
            f"{seconds(plan.prediction.high_s, error)}): only a measurement can order "
            "the two"
        )
    if there <= here and not idle:
        notes.append(
            "the plan was found with other pins, or needs fewer bytes for the same time"
        )
    if not other.runnable:
        notes.append("it cannot be run here")
    return Section(title=title, notes=tuple(notes))


def _shown(plan: Plan) -> str:
    return f"{wording.mesh(plan.mesh)}, {knobs_text(plan.knobs)}"


def _details(plan: Plan, other: Plan) -> tuple[Section, ...]:
    return (
        compare.terms(plan, other),
        compare.collectives(plan, other, only_changed=True),
    )
