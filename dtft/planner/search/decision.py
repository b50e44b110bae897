"""Selects the plan for a workload and a cluster, and keeps the priced candidates.

To price a candidate is to predict its seconds per step and its bytes on a device.
Candidates with rematerialization or offload are priced only where these may help. If
no plan fits in memory, the error suggests changes after which a plan fits.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dtft.planner import wording
from dtft.planner.cluster import MACHINES, Cluster, Level, Pool, parse_pool
from dtft.planner.gc_pause import gc_paused
from dtft.planner.plan import Alternative, Plan
from dtft.planner.search import write_plan
from dtft.planner.search.enumerate import (
    backend,
    check_num_devices,
    check_offload,
    choices_of,
    enumerate_space,
    remats,
    worthwhile,
)
from dtft.planner.search.price_table import Columns, Rates
from dtft.planner.search.ranking import Priced
from dtft.planner.search.search import PlanSearch, memory_floor
from dtft.planner.search.space import (
    CAPABILITIES,
    Choices,
    SearchCandidate,
    Space,
    everything,
    unsupported,
)
from dtft.planner.types import Remat
from dtft.planner.wording import seconds, size
from dtft.planner.workload import Workload

# If no plan fits, the error gives the missing bytes and the changes that make a plan
# fit. Each remedy is planned, so that its figures are exact.


MOST = 64
"""Largest factor on the number of devices that `remedies` tries to make a plan fit."""
Best = Callable[[Cluster, Mapping[str, Any], bool], Plan]
"""A function that returns the best plan, or the leanest plan if no plan fits.

The leanest plan needs the fewest bytes on a device. The arguments are the cluster, the
pins, and whether to search also knobs that cannot be run.
"""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, in words, after which a plan fits in memory; and the best such plan."""

    change: str
    plan: Plan

    def __str__(self) -> str:
        found = self.plan.prediction
        return (
            f"{self.change}: {seconds(found.step_s, found.relative_error)} per step, "
            f"{size(self.plan.memory_bytes)} on each device "
            f"({wording.mesh(self.plan.mesh)})"
        )


def unfit_text(
    leanest: Plan, cluster: Cluster, pins: Mapping[str, Any], best: Best
) -> str:
    """Returns the text of the error for a model that does not fit on a cluster.

    The text has the missing bytes, and the changes after which a plan fits
    (`remedies`).

    Args:
        leanest: the plan that needs the fewest bytes on a device, but does not fit.
        cluster: the cluster that was searched.
        pins: settings that the user has fixed, by name.
        best: function that plans again with another cluster, other pins or more knobs,
            and returns the best plan, or the leanest if none fits.
    """
    over = leanest.memory_bytes - leanest.capacity_bytes
    shown = ", ".join(f"{n} {size(each)}" for n, each in leanest.memory.items() if each)
    lacks = (
        f"{size(over)} more than the {size(leanest.capacity_bytes)} there are"
        if over > 0
        else f"and {size(leanest.host_bytes)} of host memory, which there is not"
    )
    found = [str(one) for one in remedies(cluster, pins, best)]
    help_text = "; ".join(found) or (
        f"nothing that was tried, {_tried_devices(cluster.uniform)}: take a smaller "
        "batch, or an optimizer with less state"
    )
    return (
        f"the model does not fit on {cluster.words}: the leanest plan "
        f"({wording.mesh(leanest.mesh)}, remat={leanest.knobs.remat}, "
        f"zero={leanest.knobs.zero}) needs {size(leanest.memory_bytes)} on each device "
        f"({shown}), {lacks}. What would make it fit: {help_text}."
    )


def remedies(cluster: Cluster, pins: Mapping[str, Any], best: Best) -> Iterator[Remedy]:
    """Yields changes after which a plan fits, each with the best plan after the change.

    The changes are: leaving out one pin (a setting that the user has fixed); searching
    also settings that cannot be run here; taking more devices, without the pins that
    are numbers or flags (such as `tensor`), but with the others (such as `remat`). Of
    the larger numbers of devices, only the smallest with a plan that fits is yielded.

    Args:
        cluster: the cluster on which no plan fits.
        pins: the pins, by name.
        best: function that plans again with another cluster, other pins or more
            settings.
    """
    for name in pins:
        rest = {other: value for other, value in pins.items() if other != name}
        plan = _tried(best, cluster, rest, False)
        if plan is not None:
            knob = plan.mesh.get(name, getattr(plan.knobs, name, 1))
            yield Remedy(change=f"{name}={knob} instead of {pins[name]}", plan=plan)
    plan = _tried(best, cluster, pins, True)
    if plan is not None:
        knobs = f"remat={plan.knobs.remat}, zero={plan.knobs.zero}"
        knobs += ", offload" * plan.knobs.offload
        change = f"knobs that this entry point or backend does not run ({knobs})"
        yield Remedy(change=change, plan=plan)
    free = {name: value for name, value in pins.items() if not isinstance(value, int)}
    for more in _larger(cluster.uniform):
        plan = _tried(best, Cluster(pools=(more,)), free, False)
        if plan is not None:
            change = f"{more.num_devices} devices instead of {cluster.num_devices}"
            yield Remedy(change=change, plan=plan)
            return


def _tried(
    best: Best, cluster: Cluster, pins: Mapping[str, Any], what_if: bool
) -> Plan | None:
    """Returns the best plan for a cluster and pins; None if there is none that fits.

    Also returns None if the pins cannot be met.

    Args:
        best: function that returns the best plan, or the leanest plan if none fits.
        cluster: the cluster to plan for.
        pins: settings that the user has fixed, by name.
        what_if: whether to search also settings that cannot be run.
    """
    try:
        plan = best(cluster, pins, what_if)
    except ValueError:
        return None
    return plan if plan.fits else None


def _larger(pool: Pool) -> Iterator[Pool]:
    """Yields pools with 2, 4, 8, ... and 64 (`MOST`) times as many devices as a pool.

    The outermost level of the fabric then joins more groups. A pool of one device has
    no level: it gets the levels of the catalog's machines with this device. Yields
    nothing for one device without a machine in the catalog.
    """
    factor = 1
    while (factor := 2 * factor) <= MOST:
        if pool.levels:
            *inner, outer = pool.levels
            level = Level(size=outer.size * factor, link=outer.link, name=outer.name)
            yield replace(pool, levels=(*inner, level))
        elif pool.device.name in MACHINES:
            joined = parse_pool(f"{factor}x{pool.device.name}")
            yield replace(pool, levels=joined.levels)


def _tried_devices(pool: Pool) -> str:
    """Describes for an error how many more devices were tried, or why none were.

    More devices are tried if no plan fits in the memory of the pool's devices.
    """
    if any(_larger(pool)):
        return f"up to {MOST} times as many devices"
    return "more devices not among it, as no link joins them in the cluster's file"


Fewer = Literal["never", "if faster", "always"]
"""When meshes of fewer devices than all are searched.

* `never`: no smaller mesh is searched, as for devices that belong to several processes.
* `if faster`: smaller meshes are searched only if the best plan fits, but some of its
  devices repeat the work of others. The best plan of this second search is selected if
  it is faster than the first plan and none of its devices repeats work.
* `always`: smaller meshes are searched too, for pins that no mesh of all devices meets.

With `if faster` and `always`, meshes of fewer devices are also searched if no mesh of
all devices divides the batch (details: `MeshRules.fewer`).
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class RematVariant:
    """The candidates with one remat policy, with their predicted time and memory.

    `priced` has the candidates, `search` is the object that made the predictions.
    """

    search: PlanSearch
    priced: Priced


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """The selected plan, with all candidates it was selected from."""

    plan: Plan
    question: Workload
    cluster: Cluster
    pins: Mapping[str, Any]
    what_if: bool
    """Whether settings that cannot be run (with `step=` or `loss=` as given, or on this
    backend) were searched too."""
    found: Mapping[Remat, RematVariant]
    """The candidates of each remat policy that was priced."""
    at: int
    """Index of the plan's candidate in `found[plan.knobs.remat].priced`."""

    @property
    def idle(self) -> bool:
        """Whether the plan has devices that repeat the work of other devices."""
        return bool(self.found[self.plan.knobs.remat].priced.idle[self.at])

    @property
    def candidate(self) -> SearchCandidate:
        """The candidate that the plan was written from."""
        return self.found[self.plan.knobs.remat].priced.space[self.at]


def decide(
    question: Workload,
    cluster: Cluster,
    pins: Mapping[str, Any] | None = None,
    *,
    what_if: bool = False,
    whole: bool = False,
) -> Decision:
    """Selects the best plan for a workload on a cluster.

    Args:
        question: the workload of a step.
        cluster: a cluster of equal devices.
        pins: axis sizes and other settings that the user has fixed, by name, such as
            `tensor`.
        what_if: searches all settings that can be priced, including those that cannot
            be run with the given `step=` or `loss=`, or on this backend. A plan with
            such settings is not `runnable`.
        whole: searches only meshes of all devices, as for devices that belong to
            several processes.

    Raises:
        ValueError: the devices are not equal, JAX does not run on them, there are more
            than 2**20 (`MOST_DEVICES`), the pins cannot be met, there is no candidate,
            or no plan fits. In the last case the error gives the missing bytes and the
            changes after which a plan fits.
    """
    fewer: Fewer = "never" if whole else "if faster"
    decision = best_of(question, cluster, pins, what_if=what_if, fewer=fewer)
    if not decision.plan.fits:

        def best(cluster: Cluster, pins: Mapping[str, Any], anything: bool) -> Plan:
            looks = what_if or anything
            return best_of(question, cluster, pins, what_if=looks, fewer=fewer).plan

        text = unfit_text(decision.plan, cluster, decision.pins, best)
        if question.entry == "loss" and (why := question.why_one_microbatch):
            text += f" Microbatches were not tried, as {why}."
        raise ValueError(text)
    return decision


@gc_paused()
def best_of(
    question: Workload,
    cluster: Cluster,
    pins: Mapping[str, Any] | None = None,
    *,
    what_if: bool = False,
    batch: int | None = None,
    fewer: Fewer = "if faster",
) -> Decision:
    """Selects the best plan as `decide` does; if no plan fits, the leanest plan.

    The leanest plan needs the fewest bytes on a device. A plan with devices that repeat
    the work of others is the leanest only if there are no other plans.

    Args:
        question: the workload of a step.
        cluster: a cluster of equal devices.
        pins: axis sizes and other settings that the user has fixed.
        what_if: searches settings that cannot be run too; see `decide`.
        batch: the number of samples that the data axes of a mesh must divide; None:
            that of the workload. Time and memory are predicted for the workload's own
            batch in either case.
        fewer: when meshes of fewer devices than all are searched: "never",
            "if faster" (if devices of the best plan repeat the work of others) or
            "always". `Fewer` has the details.

    Raises:
        ValueError: the devices are not equal, JAX does not run on them, there are more
            than 2**20 (`MOST_DEVICES`), the pins cannot be met, or there is no
            candidate.
    """
    pins, pool = dict(pins or {}), cluster.uniform
    check_num_devices(pool)
    rows = batch or max(1, question.batch_size)

    def best_with(numbers: tuple[int, ...] | None) -> Decision:
        return _best_of(question, cluster, pins, what_if, rows, numbers)

    if fewer == "never":
        return best_with(None)
    best = best_with(()) if fewer == "if faster" else None
    if best is not None and not (best.idle and best.plan.fits):
        return best
    numbers = worthwhile(question, pins, pool.num_devices, rows)
    if best is not None and not numbers:
        return best
    other = best_with(numbers)
    if best is None:
        return other
    faster = other.plan.prediction.step_s < best.plan.prediction.step_s
    return other if faster and not other.idle else best


def _best_of(
    question: Workload,
    cluster: Cluster,
    pins: dict[str, Any],
    what_if: bool,
    batch: int,
    fewer: tuple[int, ...] | None,
) -> Decision:
    """Selects the best plan, or the leanest plan if none fits, in one search.

    Args:
        question: the workload of a step.
        cluster: a cluster of equal devices.
        pins: axis sizes and other settings that the user has fixed.
        what_if: searches settings that cannot be run too; see `decide`.
        batch: the batch that meshes must divide.
        fewer: numbers of devices below all, whose meshes are searched too. Even if it
            is (), meshes of fewer devices are searched if no mesh of all devices
            divides the batch (`MeshRules.fewer`). With None, only meshes of all devices
            are searched.
    """
    pool = cluster.uniform
    runs_on = backend(pool)
    can = (
        everything(question.again is not None)
        if what_if
        else CAPABILITIES[question.entry, runs_on]
    )
    order = remats(can, pins)
    choices = replace(choices_of(question, pool, can, batch, pins), fewer=fewer)
    check_offload(pins, can, pool)
    found = _found(question, pool, replace(choices, remat=order[:1]), pins, order)
    if can.offload and pool.host_link is not None and _worth(found.values()):
        found = _with_offload(found)
    best = min(found.values(), key=_first)
    at = int(best.priced.ranking[0])
    return Decision(
        plan=_written(found, best, at, cluster),
        question=question,
        cluster=cluster,
        pins=pins,
        what_if=what_if,
        found=found,
        at=at,
    )


def _with_offload(found: Mapping[Remat, RematVariant]) -> dict[Remat, RematVariant]:
    """Adds copies of candidates that keep their optimizer state in host memory.

    A candidate is copied only if its copy may be the best plan: it does not fit, but
    fits without its optimizer state, none of its devices repeats the work of others,
    and its step is shorter than that of the best candidate that fits. `found` has the
    candidates of each remat policy; the result has these and the copies.
    """
    unfit, _, least = min(map(_first, found.values()))
    best_s = math.inf if unfit else least
    return {
        remat: replace(one, priced=one.search.with_offload(one.priced, best_s))
        for remat, one in found.items()
    }


def next_best(decision: Decision, num: int) -> tuple[Decision, ...]:
    """Returns up to `num` decisions: one for each of the best plans that fit.

    Each decision is a copy of the given one with another plan; the best plan is first.
    """
    ranked = sorted(
        (*_order_of(one, at), place, number)
        for number, one in enumerate(decision.found.values())
        for place, at in enumerate(one.priced.ranking[:num].tolist())
        if one.priced.fits[at]
    )
    made = []
    for *_, place, number in ranked[:num]:
        one = list(decision.found.values())[number]
        at = int(one.priced.ranking[place])
        plan = _written(decision.found, one, at, decision.cluster)
        made.append(replace(decision, plan=plan, at=at))
    return tuple(made)


def without_idle(decision: Decision) -> Decision | None:
    """Returns a decision for the fastest plan in which no device repeats work.

    Only candidates of the given decision that fit in memory count. Returns None if all
    of these repeat work on some devices.
    """
    least_s, chosen = math.inf, None
    for one in decision.found.values():
        busy = one.priced.fits & ~one.priced.idle
        seconds_of = np.where(busy, one.priced.step_s, math.inf)
        at = int(seconds_of.argmin())
        if seconds_of[at] < least_s:
            least_s, chosen = seconds_of[at], (one, at)
    if chosen is None:
        return None
    plan = _written(decision.found, *chosen, decision.cluster)
    return replace(decision, plan=plan, at=chosen[1])


def _written(
    found: Mapping[Remat, RematVariant], one: RematVariant, at: int, cluster: Cluster
) -> Plan:
    """Writes the plan of a candidate.

    Marks the plan as not `runnable` if its mesh or knobs cannot be run: with the
    argument that `dtft.plan` got (`step=` or `loss=`), on the cluster's backend.

    Args:
        found: the candidates of all priced remat policies, for `Plan.left_out`.
        one: the candidates of the plan's remat policy.
        at: the index of the candidate in `one.priced`.
        cluster: the cluster that the plan is for.
    """
    plan = write_plan.as_plan(one.search, one.priced, at, cluster)
    plan = replace(plan, left_out=_left_out(found, plan))
    runs_on = backend(cluster.uniform)
    if unsupported(plan.entry, runs_on, plan.mesh, plan.knobs):
        return replace(plan, runnable=False)
    return plan


def _left_out(
    found: Mapping[Remat, RematVariant], plan: Plan
) -> tuple[Alternative, ...]:
    """Returns the fastest candidate with idle devices that is faster than the plan.

    The ranking multiplies the seconds of a candidate with idle devices (devices that
    repeat the work of others) by 4 (`IDLE`), so that it may rank behind a slower plan.
    Only candidates that fit in memory count. Returns () if none of them is faster, or
    if the plan does not fit.

    Args:
        found: the candidates of each priced remat policy.
        plan: the plan.
    """
    fastest: Alternative | None = None
    least_s = plan.prediction.step_s if plan.fits else 0.0
    for priced in (one.priced for one in found.values()):
        seconds_of = np.where(priced.fits & priced.idle, priced.step_s, math.inf)
        at = int(seconds_of.argmin())
        if seconds_of[at] < least_s:
            least_s, fastest = seconds_of[at], write_plan.as_alternative(priced, at)
    return () if fastest is None else (fastest,)


def _worth(found: Any) -> bool:
    """Returns whether a plan may become better if remat or offload saves memory.

    Returns True if no candidate fits. Also returns True if a candidate with the remat
    policy of the best candidate does not fit, but would rank before it by its seconds
    (`Priced.worth_s`).

    Args:
        found: the candidates of each remat policy that was priced so far.
    """
    best = min(found, key=_first)
    priced = best.priced
    return _first(best) > (False, False, float(priced.worth_s.min()))


_FEW_OPERATORS = 512
"""Programs of at most this many operators are priced under every remat policy, so that
a plan with a pinned policy is never predicted faster. In larger programs that would
take most of the time of planning."""


def _prices_all(question: Workload, pool: Pool) -> bool:
    """Returns whether remat is priced even if it can save only time, and not memory.

    This is so for programs of at most 512 operators (`_FEW_OPERATORS`), and for scanned
    layers on accelerators. A scan copies what its body saves for the backward pass into
    arrays of all layers, and copies it out again. Computing it again may take less time
    than these copies: on one H200, steps of two transformers with scanned layers took
    7 % and 27 % less time with remat (`experiments/gpu_plans.py`). CPU devices are left
    out, because such copies were not measured there.
    """
    operators = question.graph.operators
    scans = any(operator.trips > 1 for operator in operators)
    return len(operators) <= _FEW_OPERATORS or (scans and backend(pool) != "cpu")


def _first(one: RematVariant) -> tuple[bool, bool, float]:
    """Returns the sort key of the best candidate with a remat policy.

    The key is that of `_order_of`: better candidates have smaller keys, also if they
    have different remat policies.
    """
    return _order_of(one, int(one.priced.ranking[0]))


def _order_of(one: RematVariant, at: int) -> tuple[bool, bool, float]:
    """Returns the sort key of a candidate; the best candidate has the smallest key.

    Candidates that fit in memory are first, ordered by the seconds of a step; for a
    candidate with idle devices (devices that repeat the work of others), the seconds
    are multiplied by 4 (`IDLE`). Candidates that do not fit follow, ordered by bytes on
    a device. Of these, candidates with idle devices are last.

    Args:
        one: the candidates with the remat policy of this candidate.
        at: the index of the candidate in `one.priced`.
    """
    priced = one.priced
    if priced.fits[at]:
        return False, False, float(priced.worth_s[at])
    return True, bool(priced.idle[at]), float(priced.memory_bytes[at])


def _enumerated(choices: Choices, pins: Mapping[str, Any]) -> Space:
    """Enumerates candidates, including those with several virtual stages.

    Leaves out meshes of fewer than all devices if `choices.fewer` is None. If the axis
    `stage` is searched, combines the candidates with every possible number of virtual
    stages (groups of layers of one pipeline stage), or with the pinned number.

    Raises:
        ValueError: the pins cannot be met even with unlimited memory. If it is the
            pinned number of virtual stages, the message has those that can be met.
    """
    space = enumerate_space(choices, pins)
    if choices.fewer is None:
        space = space.where(space.columns["devices_used"] == choices.num_devices)
    if not (num_layers := choices.divides.get("stage")):
        return space
    pinned = pins.get("virtual_stages")
    found = space.with_chunks(num_layers[0], pinned)
    # Below a memory floor, nothing found is no error: `_found` looks without the floor.
    is_final = choices.memory is None and len(space) > 0
    if is_final and pinned is not None and not len(found):
        known = space.with_chunks(num_layers[0], None).columns["virtual_stages"]
        raise ValueError(
            f"virtual_stages={pinned} cannot be met: the number of stages times "
            f"virtual_stages must divide the {num_layers[0]} layers, and the number of "
            "stages the microbatches. Allowed, with the other pins as they are: "
            f"{', '.join(map(str, np.unique(known)))}."
        )
    return found


def _all(choices: Choices, pins: Mapping[str, Any]) -> Space:
    space = _enumerated(choices, pins)
    if not len(space):
        reasons = "; ".join(str(reason) for reason in space.reasons)
        raise ValueError(f"there is no candidate for this cluster: {reasons}.")
    return space


def _found(
    question: Workload,
    pool: Pool,
    choices: Choices,
    pins: Mapping[str, Any],
    order: tuple[Remat, ...],
) -> dict[Remat, RematVariant]:
    """Prices the candidates; returns them by remat policy.

    First prices the baselines (meshes of common rules of thumb), and the candidates
    whose state has room in a device's memory (`memory_floor`). If none of these fits,
    prices all candidates. Raises ValueError if the pins cannot be met or there is no
    candidate at all.

    Args:
        question: the workload of a step.
        pool: the devices.
        choices: the values that axes and settings may have.
        pins: axis sizes and other settings that the user has fixed.
        order: the remat policies to price, in this order.
    """
    floor = memory_floor(question, pool)
    if pins.get("offload"):
        floor = replace(floor, optimizer=0)
    space = _enumerated(replace(choices, memory=floor), pins)
    found = _priced(question, pool, space, order)
    if not any(one.priced.fits.any() for one in found.values()):
        # The leanest candidate may have no room even for its state.
        found = _priced(question, pool, _all(choices, pins), order)
    return found


def _priced(
    question: Workload, pool: Pool, space: Space, order: tuple[Remat, ...]
) -> dict[Remat, RematVariant]:
    """Prices candidates under the first policy of `order`, and others if worthwhile.

    Another policy is priced only if saving memory may give a better plan than those
    priced so far, or if remat may also save time (`_prices_all`). Only the candidates
    with the smallest batch are priced: the requested batch, or if no mesh divides it,
    the batch that is rounded up least. Returns {} if `space` is empty.
    """
    if not len(space):
        return {}
    # Keep the requested batch if any candidate divides it.
    exact = space.columns["batch"] == space.columns["batch"].min()
    space = space.where(np.flatnonzero(exact))
    rates = Rates(Columns(pool, space))
    found: dict[Remat, RematVariant] = {}
    every = _prices_all(question, pool)
    for remat in order:
        if not found or every or _worth(found.values()):
            asked = question if remat == "none" else question.rematerialized(remat)
            search = PlanSearch(asked, pool, scatters=backend(pool) != "cpu")
            priced = search.price(space.with_remat(remat), rates)
            found[remat] = RematVariant(search=search, priced=priced)
    return found
