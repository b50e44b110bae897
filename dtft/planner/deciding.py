"""The decision: from a question and a cluster to the plan, and what it was chosen from.

Decides which knobs are searched (what the entry point and backend can run), whether
rematerialized programs are worth a look, and what to say when nothing fits. Must not
compile or run anything.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtft.planner import decided
from dtft.planner.capabilities import (
    CAPABILITIES,
    Backend,
    Capabilities,
    unsupported,
)
from dtft.planner.cluster import Cluster, Pool
from dtft.planner.columns import Columns
from dtft.planner.enumeration import enumerate_space
from dtft.planner.meshes import AXES
from dtft.planner.plan import Plan, Remat
from dtft.planner.question import Question
from dtft.planner.search import Priced, Search, memory_floor
from dtft.planner.space import REMATS, Candidate, Choices, Space

BACKENDS: Mapping[str, Backend] = {
    "cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu",
}  # fmt: skip
"""Platforms of device types, as capabilities name them."""
MAX_MICROBATCHES = 64
GIB = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class Priority:
    """One program (by remat) with its priced candidates."""

    search: Search
    priced: Priced


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """A plan, and everything it was chosen from."""

    plan: Plan
    question: Question
    cluster: Cluster
    pins: Mapping[str, Any]
    what_if: bool
    """Whether knobs were looked at that cannot be run here."""
    found: Mapping[Remat, Priority]
    """For each remat that was looked at its candidates."""
    at: int
    """Position of the plan among those of its remat."""

    @property
    def candidate(self) -> Candidate:
        """What the plan was written from."""
        return self.found[self.plan.knobs.remat].priced.space[self.at]


def decide(
    question: Question,
    cluster: Cluster,
    pins: Mapping[str, Any] | None = None,
    *,
    what_if: bool = False,
) -> Decision:
    """The best plan.

    Args:
        question: the step.
        cluster: of like devices.
        pins: knobs that are given, such as `{"tensor": 8}`.
        what_if: looks at all knobs that can be priced, also those that this entry point
            or backend cannot run; such a plan is not `runnable`.

    Raises:
        ValueError: pins that cannot be met; or nothing fits: says by how much, and what
            would make it fit.
    """
    decision = best_of(question, cluster, pins, what_if=what_if)
    if not decision.plan.fits:
        raise ValueError(_unfit(decision.found, cluster.uniform))
    return decision


def best_of(
    question: Question,
    cluster: Cluster,
    pins: Mapping[str, Any] | None = None,
    *,
    what_if: bool = False,
) -> Decision:
    """As `decide`, but where nothing fits: what lacks least.

    Raises:
        ValueError: pins that cannot be met.
    """
    pins = dict(pins or {})
    pool = cluster.uniform
    backend = _backend(pool)
    can = _everything(question) if what_if else CAPABILITIES[question.entry, backend]
    order = _order(can, pins)
    choices = replace(_choices(question, pool, can), remat=order[:1])
    with_room = replace(choices, memory=memory_floor(question, pool))
    found = _found(question, pool, enumerate_space(with_room, pins), order)
    if not any(one.priced.fits.any() for one in found.values()):
        # What lacks least may be among those that have no room even for their state.
        found = _found(question, pool, _all(choices, pins), order)
    best = min(found.values(), key=_first)
    at = int(best.priced.ranking[0])
    return Decision(
        plan=_written(best, at, cluster),
        question=question,
        cluster=cluster,
        pins=pins,
        what_if=what_if,
        found=found,
        at=at,
    )


def next_best(decision: Decision, num: int) -> tuple[Decision, ...]:
    """The plan and those after it that fit, fastest first, each as what was decided."""
    ranked = sorted(
        (float(one.priced.step_s[at]), place, number)
        for number, one in enumerate(decision.found.values())
        for place, at in enumerate(one.priced.ranking[:num].tolist())
        if one.priced.fits[at]
    )
    made = []
    for _, place, number in ranked[:num]:
        one = list(decision.found.values())[number]
        at = int(one.priced.ranking[place])
        plan = _written(one, at, decision.cluster)
        made.append(replace(decision, plan=plan, at=at))
    return tuple(made)


def _written(one: Priority, at: int, cluster: Cluster) -> Plan:
    plan = decided.write(one.search, one.priced, at, cluster)
    backend = _backend(cluster.uniform)
    if unsupported(plan.entry, backend, plan.mesh, plan.knobs):
        return replace(plan, runnable=False)
    return plan


def _everything(question: Question) -> Capabilities:
    """All knobs that can be priced for a question."""
    remats = REMATS if question.again is not None else REMATS[:1]
    return Capabilities(
        axes=frozenset(AXES),
        microbatches=True,
        remat=frozenset(remats),
        zero=frozenset({0, 1, 2, 3}),
    )


def _backend(pool: Pool) -> Backend:
    platform = pool.device.platform
    if platform not in BACKENDS:
        raise ValueError(
            f"cluster: JAX runs no programs on {pool.device.name} ({platform}). "
            f"Allowed: devices of {', '.join(BACKENDS)}; others take part by placement."
        )
    return BACKENDS[platform]


def _choices(question: Question, pool: Pool, can: Capabilities) -> Choices:
    divides: dict[str, tuple[int, ...]] = {"replica": (), "fsdp": (), "tensor": ()}
    if "sequence" in can.axes and question.sequence_dims:
        sizes = (question.graph.dims[d].sizes[0] for d in question.sequence_dims)
        divides["sequence"] = tuple(sizes)
    batch = max(1, question.batch_size)
    return Choices(
        num_devices=pool.num_devices,
        batch=batch,
        divides={axis: sizes for axis, sizes in divides.items() if axis in can.axes},
        levels=tuple(level.size for level in pool.levels),
        max_microbatches=min(batch, MAX_MICROBATCHES) if can.microbatches else 1,
        zero=tuple(sorted(can.zero)),
    )


def _order(can: Capabilities, pins: Mapping[str, Any]) -> tuple[Remat, ...]:
    """Remat policies in the order in which they save more memory and cost more time."""
    if pins.get("remat") in can.remat:
        return (pins["remat"],)
    return tuple(remat for remat in REMATS if remat in can.remat)


def _worth(found: Any) -> bool:
    """Whether computing again could help: only where something faster does not fit."""
    best = min(found, key=_first)
    fastest = float(best.priced.step_s.min())
    return _first(best) > (0, fastest)


def _first(one: Priority) -> tuple[int, float]:
    """The best candidate: whether it does not fit, then seconds (or bytes)."""
    at = int(one.priced.ranking[0])
    if one.priced.fits[at]:
        return 0, float(one.priced.step_s[at])
    return 1, float(one.priced.memory_bytes[at])


def _all(choices: Choices, pins: Mapping[str, Any]) -> Space:
    space = enumerate_space(choices, pins)
    if not len(space):
        reasons = "; ".join(str(reason) for reason in space.reasons)
        raise ValueError(f"there is no candidate for this cluster: {reasons}.")
    return space


def _found(
    question: Question, pool: Pool, space: Space, order: tuple[Remat, ...]
) -> dict[Remat, Priority]:
    """Candidates priced, for as many remats in turn as may be the best."""
    if not len(space):
        return {}
    # With the batch that was asked for, if any candidate divides it.
    exact = space.columns["batch"] == space.columns["batch"].min()
    space = space.where(np.flatnonzero(exact))
    columns = Columns(pool, space)
    found: dict[Remat, Priority] = {}
    for remat in order:
        if not found or _worth(found.values()):
            asked = question if remat == "none" else question.rematerialized(remat)
            search = Search(asked, pool, scatters=_backend(pool) != "cpu")
            priced = search.price(space.with_remat(remat), columns)
            found[remat] = Priority(search=search, priced=priced)
    return found


def _unfit(found: Mapping[Remat, Priority], pool: Pool) -> str:
    """Says by how much the leanest candidate does not fit, and what would help."""
    remat, leanest = min(found.items(), key=lambda item: _first(item[1]))
    at = int(leanest.priced.ranking[0])
    terms = {name: values[at] for name, values in leanest.priced.memory.items()}
    needed, has = float(leanest.priced.memory_bytes[at]), leanest.priced.capacity
    mesh = {a: n for a, n in leanest.priced.space[at].mesh.items() if n > 1}
    shown = ", ".join(
        f"{name} {value / GIB:.2f}" for name, value in terms.items() if value
    )
    reserve = terms["reserve"]
    devices = math.ceil(pool.num_devices * (needed - reserve) / (has - reserve))
    return (
        f"the model does not fit on {pool.words}: the leanest plan (mesh={mesh}, "
        f"remat={remat}) needs {needed / GIB:.2f} GiB per device ({shown}), "
        f"{(needed - has) / GIB:.2f} GiB more than the {has / GIB:.2f} GiB there are. "
        f"What would help: about {devices} devices of this type instead of "
        f"{pool.num_devices}, a smaller batch if activations are the largest term, or "
        "an optimizer with less state."
    )
