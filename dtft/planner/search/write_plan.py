"""Writes a candidate as a plan: array specs, constraints, collectives, alternatives.

Makes no decisions; the search has selected the candidate.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.planner.cluster import Cluster
from dtft.planner.cost import (
    LEAST_OFFLOADED_BYTES,
    MeshSpeeds,
    group_of,
    lower_bound_s,
    runs,
    transfers,
)
from dtft.planner.ir import CHEAP, PRODUCTS, Graph, Value, region
from dtft.planner.plan import Alternative, AxisUse, Collective, Plan, Prediction
from dtft.planner.search.compute_split import compute_split, model_at_peak_s
from dtft.planner.search.pipeline import handed_on, layers_of
from dtft.planner.search.price_table import bundle_of
from dtft.planner.search.ranking import TERMS, Priced
from dtft.planner.search.roofline import Sent, roofline
from dtft.planner.search.search import PlanSearch
from dtft.planner.search.space import SearchCandidate
from dtft.planner.spmd import (
    MICRO,
    Bundle,
    CollectiveOp,
    ShardingAssignment,
    Sizes,
    StateArray,
    flat,
    gather_bundle,
    parts,
)
from dtft.planner.types import Spec
from dtft.planner.wording import layered
from dtft.planner.workload import gradients


def axes_used(
    search: PlanSearch, candidate: SearchCandidate, division: ShardingAssignment
) -> dict[str, AxisUse]:
    """Returns for each mesh axis above size 1 its fabric levels and its share of work.

    The share is that of the operations of matmuls, convolutions and kernels that the
    axis divides; 1 for the axis `stage`.

    Args:
        search: the search, with the program and the devices.
        candidate: the candidate, with the outermost axis of its mesh first.
        division: which axes divide which dims.
    """
    shares = work_divided(search, division)
    found = {}
    for axis, size in candidate.mesh.items():
        if size > 1:
            group = group_of(search.pool, candidate.mesh, axis)
            kinds = [link.kind for link in group.links]
            found[axis] = AxisUse(
                levels=tuple(zip(group.sizes, kinds, strict=True)),
                # Stages divide the layers; the axis `stage` divides no operator.
                work=1.0 if axis == "stage" else shares.get(axis, 0.0),
            )
    return found


def work_divided(search: PlanSearch, division: ShardingAssignment) -> dict[str, float]:
    """Computes which share of the flops of matmuls and convolutions each axis divides.

    Kernels such as attention count too. An axis that divides nothing is left out. In a
    program without any of these, the shares are of all flops.

    Args:
        search: the search, with the program.
        division: which axes divide which dims.
    """
    works = search.works(division)
    heavy = [pair for pair in works if pair[0].operator.kind in PRODUCTS] or works
    total = sum(group.operator.flops * group.times for group, _ in heavy)
    shares: dict[str, float] = {}
    for group, work in heavy:
        share = group.operator.flops * group.times / total if total else 0.0
        for axis in work.divided_by:
            shares[axis] = shares.get(axis, 0.0) + share
    return {axis: min(1.0, share) for axis, share in shares.items()}


# Collectives with their seconds, which add up to the seconds of the search. Collectives
# that are combined (`collective_combiner`) share their seconds in proportion to bytes.


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """A collective of a candidate, before equal collectives are merged.

    `where` is its description in the plan, such as `gradient of params/w`, `bundle` the
    collectives with which it may be combined; None if it is sent alone.
    """

    sent: CollectiveOp
    times: float
    """The number of times that the collective is sent in a step."""
    where: str
    bundle: Bundle | None = None
    share: float = 1.0
    """The share of `times` that counts for one device: 1 / number of stages for
    collectives within a stage, 1 for sends between stages."""

    @property
    def ahead(self) -> bool:
        """Whether the collective waits for no computation, as a prefetched gather."""
        return self.bundle is not None and self.bundle.ahead


def _collectives(
    search: PlanSearch, candidate: SearchCandidate, division: ShardingAssignment
) -> list[_Listed]:
    """Lists a step's collectives: of operators, gathers of state, and between stages.

    The gathers of state are those of parameters that ZeRO divides. For a pipeline,
    lists the collectives of an average stage and its sends to other stages.

    Args:
        search: the search, with the program and the devices.
        candidate: the mesh and the values of the knobs (other settings).
        division: which axes divide which dims.
    """
    return [
        *_of_operators(search, candidate, division),
        *_of_arrays(search, candidate, division),
        *_between_stages(search, candidate, division),
    ]


def _merged(
    search: PlanSearch, candidate: SearchCandidate, found: Iterable[_Listed]
) -> tuple[Collective, ...]:
    """Merges collectives of equal kind, axes, bytes and description.

    The collective with the most bytes per step is first.
    """
    speeds = MeshSpeeds(pool=search.pool, mesh=candidate.mesh)
    made = _counted(found, speeds, _sizes(candidate))
    return tuple(sorted(made, key=lambda c: -c.num_bytes * c.trips))


def _sizes(candidate: SearchCandidate) -> Sizes:
    return {**candidate.mesh, MICRO: candidate.knobs.microbatches}


def _of_operators(
    search: PlanSearch, candidate: SearchCandidate, division: ShardingAssignment
) -> Iterator[_Listed]:
    graph, platform = search.question.graph, search.pool.device.platform
    known = gradients(search.question)
    trips: Counter[str] = Counter()
    for operator in graph.operators:
        for index in known.keys() & operator.outputs:
            trips[layered(known[index])] += operator.trips
    for group, done in search.works(division):
        outputs = group.operator.outputs  # a callback may have none
        shape = graph.values[outputs[0]].shape if outputs else ()
        where = f"{group.region} {group.operator.primitive} {'x'.join(map(str, shape))}"
        path = layered(known.get(outputs[0], "") if outputs else "")
        others = " and alike" if path and group.times > trips[path] else ""
        for sent in done.sent:
            sums = path and sent.kind in ("all_reduce", "reduce_scatter")
            yield _Listed(
                sent=sent,
                times=group.times * runs(done, _sizes(candidate)),
                where=f"gradient of {path}{others}" if sums else where,
                bundle=bundle_of(platform, group, done, sent, search.question.software),
                share=1 / candidate.mesh.get("stage", 1),
            )


def _of_arrays(
    search: PlanSearch, candidate: SearchCandidate, division: ShardingAssignment
) -> Iterator[_Listed]:
    """Yields the all-gathers of the parameters that ZeRO divides between steps."""
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
    search: PlanSearch, candidate: SearchCandidate, division: ShardingAssignment
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
    found: Iterable[_Listed], speeds: MeshSpeeds, sizes: Sizes
) -> Iterator[Collective]:
    """Merges collectives of the same kind, axes, bytes and description (`where`).

    Adds up how often they are sent in a step, and their seconds per step. Leaves out
    collectives whose axes all have size one.

    Args:
        found: the collectives.
        speeds: the speeds of the links along the mesh's axes.
        sizes: map from an axis to its size; also has the number of microbatches.
    """
    listed = [one for one in found if speeds.axes(one.sent)]
    sums: Counter[Bundle] = Counter()
    for one in listed:
        if one.bundle is not None:
            bundle = one.bundle.on(sizes)
            sums[bundle] += one.times * one.sent.amount.at(sizes)
    totals: dict[tuple[Any, ...], list[float]] = {}
    for one in listed:
        num_bytes = float(one.sent.amount.at(sizes))
        sent_s = float(speeds.sending_s(one.sent, sizes, ahead=one.ahead))
        seconds = one.times * sent_s
        if one.bundle is None:
            seconds += one.times * speeds.sync_skew_s(one.sent)
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


def as_plan(
    search: PlanSearch,
    priced: Priced,
    at: int,
    cluster: Cluster,
    *,
    num_ranked: int = 20,
) -> Plan:
    """Writes the plan of one candidate.

    Args:
        search: the search that priced the candidate.
        priced: the priced candidates.
        at: the index of the candidate in `priced`.
        cluster: the cluster that the plan is for.
        num_ranked: the number of best candidates to list as alternatives, beside the
            baselines (meshes of common rules of thumb).
    """
    question, candidate = search.question, priced.space[at]
    division = priced.division_of(at)
    mesh = {axis: size for axis, size in candidate.mesh.items() if size > 1}
    mesh = mesh or {"replica": 1}
    zero = candidate.knobs.zero
    parameters = search.leaves("parameter", division, candidate.mesh, zero == 3)
    optimizer = search.leaves("optimizer", division, candidate.mesh, zero > 0)
    specs = {leaf.path: real(leaf.rest, mesh) for leaf in (*parameters, *optimizer)}
    batch = search.leaves("batch", division, candidate.mesh, False)
    names = {p: p.partition("/")[2] for p in question.roles}
    prediction = _prediction(priced, at, cluster)
    compute, dearest = compute_split(
        search, candidate, division, prediction.terms["compute"]
    )
    sent = _collectives(search, candidate, division)
    is_loss = question.entry == "loss"
    in_state = [leaf.path for leaf in parameters]
    in_state += [] if is_loss else [leaf.path for leaf in optimizer]
    return Plan(
        entry=question.entry,
        mesh=mesh,
        axes=axes_used(search, candidate, division),
        knobs=candidate.knobs,
        state={names[p]: specs[p] for p in question.roles if p in set(in_state)},
        batch={names[leaf.path]: real(leaf.rest, mesh) for leaf in batch},
        optimizer={names[o.path]: specs[o.path] for o in optimizer} if is_loss else {},
        host=_on_host(optimizer, names, mesh) if candidate.knobs.offload else (),
        host_bytes=round(priced.host[at]),
        constraints=constraints(question.program, question.aligned(division), mesh),
        prediction=prediction,
        memory={name: round(each) for name, each in priced.memory_of(at).items()},
        capacity_bytes=priced.capacity,
        collectives=_merged(search, candidate, sent),
        compute=compute,
        dearest=dearest,
        examples=question.num_examples,
        at_peak_s=model_at_peak_s(search),
        bound_s=lower_bound_s(question, search.pool),
        roofline=roofline(
            search,
            candidate,
            division,
            [
                Sent(op=one.sent, times=one.times * one.share, ahead=one.ahead)
                for one in sent
            ],
            priced.host[at] if candidate.knobs.offload else 0.0,
        ),
        alternatives=_alternatives(priced, num_ranked),
        model_hash=question.fingerprint,
        cluster_hash=cluster.fingerprint,
        cluster=cluster.words,
        predicted_for=cluster.uniform.fabric_words,
    )


def _on_host(
    optimizer: Sequence[StateArray], names: Mapping[str, str], mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the paths of the optimizer leaves that are kept in host memory.

    Leaves below 64 KiB on a device (`LEAST_OFFLOADED_BYTES`) stay on the device.

    Args:
        optimizer: the leaves of the optimizer state.
        names: map from a leaf's path in the traced program to its path in the plan.
        mesh: sizes of the axes.
    """
    return tuple(
        names[leaf.path]
        for leaf in optimizer
        if leaf.value.num_bytes / parts(flat(leaf.rest), mesh) >= LEAST_OFFLOADED_BYTES
    )


def real(spec: Spec, mesh: Container[str]) -> Spec:
    """Returns a spec without the axes that are not in `mesh`.

    A plan's mesh lacks axes of size one, and the microbatches, which count as an axis
    elsewhere (`MICRO`).
    """
    return tuple(tuple(axis for axis in axes if axis in mesh) for axes in spec)


def constraints(
    graph: Graph, division: ShardingAssignment, mesh: Mapping[str, int]
) -> dict[int, Spec]:
    """Returns the specs to which a plan constrains the results of operators.

    Maps the index of an operator in the program to the spec of its first result. Covers
    every operator that a compiler does not fuse into others, if the result is not a
    scalar. Operators inside of a shard_map are left out, because a constraint is not
    allowed there. At ZeRO levels 2 and 3, a gradient from the backward pass of a user's
    step is divided as level 3 divides its parameter (`ShardingAssignment.rest`).
    """
    found = {}
    for number, operator in enumerate(graph.operators):
        value = graph.values[operator.outputs[0]] if operator.outputs else None
        if operator.kind in CHEAP or operator.manual:
            continue
        if value is None or not value.shape:
            continue
        spec = real(division.spec(value), mesh)
        if operator.summed and region(operator) == "backward":
            spec = _divided_further(value, spec, division, mesh)
        found[number] = spec
    return found


def _divided_further(
    value: Value, spec: Spec, division: ShardingAssignment, mesh: Mapping[str, int]
) -> Spec:
    """Adds axes to the spec of a gradient, as ZeRO level 3 divides its parameter.

    The added axes (`ShardingAssignment.rest`) divide the parameter between steps, but
    not in use. Axes that do not divide the size of their dim, or that the mesh lacks,
    are left out.
    """
    extra = dict(division.rest.get(frozenset(map(division.root, value.dims)), {}))
    found = []
    for dim, size, axes in zip(value.dims, value.shape, spec, strict=True):
        more = tuple(a for a in extra.get(division.root(dim), ()) if a in mesh)
        if more and size % parts((*axes, *more), mesh) == 0:
            extra.pop(division.root(dim))  # a square array has the dim twice
            axes = (*axes, *more)
        found.append(axes)
    return tuple(found)


def _prediction(priced: Priced, at: int, cluster: Cluster) -> Prediction:
    terms = {name: float(priced.terms[name][at]) for name in TERMS}
    terms = {n: s for n, s in terms.items() if s or n not in ("bubble", "offload")}
    trust = cluster.uniform.trust
    low_s, high_s = trust.interval_s(terms)
    return Prediction(
        terms=terms,
        low_s=low_s,
        high_s=high_s,
        source=trust.source,
        scales=dict(trust.scales),
    )


def _alternatives(priced: Priced, num_ranked: int) -> tuple[Alternative, ...]:
    """Lists the `num_ranked` best candidates and every baseline, best first.

    A baseline is a mesh of a common rule of thumb. Leaves out candidates with idle
    devices unless the best candidate has idle devices, because candidates with idle
    devices could be listed as faster than the best.
    """
    ranking = priced.ranking
    shown = (priced.space.columns["baseline"] > 0)[ranking]
    shown[:num_ranked] = True
    if not priced.idle[ranking[0]]:
        shown &= ~priced.idle[ranking]
    return tuple(as_alternative(priced, int(at)) for at in ranking[shown])


def as_alternative(priced: Priced, at: int) -> Alternative:
    """Writes the candidate at index `at` of `priced`, as `Plan.alternatives` lists it.

    Returns:
        The candidate's mesh and settings, and its predicted step time and memory.
    """
    candidate = priced.space[at]
    mesh: Mapping[str, int] = {a: n for a, n in candidate.mesh.items() if n > 1}
    return Alternative(
        name=candidate.baseline,
        mesh=mesh or {"replica": 1},
        knobs=candidate.knobs,
        step_s=float(priced.step_s[at]),
        memory_bytes=round(priced.memory_bytes[at]),
        fits=bool(priced.fits[at]),
    )
