"""What each pin of a plan costs: the best plan without it, beside the plan.

Searches like `deciding`; must not compile or run anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtft.planner import wording
from dtft.planner.deciding import Decision, best_of
from dtft.planner.explain import knobs_text
from dtft.planner.plan import Plan
from dtft.planner.wording import Section, seconds, size


@dataclass(frozen=True, kw_only=True)
class PinPrice:
    """The best plan without some pins, beside the plan that has them."""

    pins: Mapping[str, Any]
    """What is left out."""
    without: Plan
    cost_s: float
    """Seconds of a step that these pins cost, 0 where the plan is the best without
    them too; infinite where nothing fits without them."""


def pin_prices(decision: Decision) -> tuple[PinPrice, ...]:
    """Of each pin, all others kept, and of all together if there are several."""
    pins = dict(decision.pins)
    ways = [{name: value} for name, value in pins.items()]
    return tuple(_price(decision, out) for out in (*ways, *([pins] * (len(pins) > 1))))


def section(decision: Decision) -> tuple[Section, ...]:
    """The prices as a table; none without pins."""
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
    cost = seconds(price.cost_s) if price.cost_s else "nothing"
    share = wording.change(here_s, there_s) if price.cost_s else ""
    return (pins, cost, share, mesh, seconds(there_s), memory)
