"""From the best candidate to a plan: specs of every array, constraints, the record.

Decides nothing any more; writes down what the search found. Pure; must not compile or
run anything.
"""

from collections.abc import Container, Mapping, Sequence

from dtft.planner.amounts import parts
from dtft.planner.axis_use import axes_used
from dtft.planner.bound import lower_bound_s
from dtft.planner.cluster import Cluster
from dtft.planner.graph import Graph, Value
from dtft.planner.groups import CHEAP, region
from dtft.planner.listing import collectives
from dtft.planner.offload import LEAST_BYTES
from dtft.planner.partition import Division, flat
from dtft.planner.plan import Alternative, Plan, Prediction, Spec
from dtft.planner.priced import MEMORY, TERMS, Priced
from dtft.planner.search import Search
from dtft.planner.shards import Leaf


def write(
    search: Search, priced: Priced, at: int, cluster: Cluster, *, num_ranked: int = 20
) -> Plan:
    """The plan of one candidate.

    Args:
        search: found it.
        priced: what it costs.
        at: the candidate.
        cluster: what it is for.
        num_ranked: alternatives to list.
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
        prediction=_prediction(priced, at, cluster),
        memory={name: round(priced.memory[name][at]) for name in MEMORY},
        capacity_bytes=priced.capacity,
        collectives=collectives(search, candidate, division),
        bound_s=lower_bound_s(question, search.pool),
        alternatives=_alternatives(priced, num_ranked),
        model_hash=question.fingerprint,
        cluster_hash=cluster.fingerprint,
        cluster=cluster.words,
        predicted_for=cluster.uniform.fabric_words,
    )


def _on_host(
    optimizer: Sequence[Leaf], names: Mapping[str, str], mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Paths of the leaves that are worth a copy (`offload`)."""
    return tuple(
        names[leaf.path]
        for leaf in optimizer
        if leaf.value.num_bytes / parts(flat(leaf.rest), mesh) >= LEAST_BYTES
    )


def real(spec: Spec, mesh: Container[str]) -> Spec:
    """A spec with the axes that a mesh has, so without what divides in time only."""
    return tuple(tuple(axis for axis in axes if axis in mesh) for axes in spec)


def constraints(
    graph: Graph, division: Division, mesh: Mapping[str, int]
) -> dict[int, Spec]:
    """Operators whose result is to be divided as planned: all that a compiler keeps.

    Gradients that a user's own step makes of arrays which `fsdp` divides at rest are
    divided alike at once.
    """
    found = {}
    for number, operator in enumerate(graph.operators):
        value = graph.values[operator.outputs[0]] if operator.outputs else None
        if operator.kind in CHEAP or value is None or not value.shape:
            continue
        spec = real(division.spec(value), mesh)
        if operator.summed and region(operator) == "backward":
            spec = _divided_further(value, spec, division, mesh)
        found[number] = spec
    return found


def _divided_further(
    value: Value, spec: Spec, division: Division, mesh: Mapping[str, int]
) -> Spec:
    """The spec of a gradient that is wanted divided as its array is at rest."""
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
    """The best, and every baseline, in the order of the ranking.

    None with idle devices, unless the best has: they would be listed as faster.
    """
    ranking = priced.ranking
    shown = (priced.space.columns["baseline"] > 0)[ranking]
    shown[:num_ranked] = True
    if not priced.idle[ranking[0]]:
        shown &= ~priced.idle[ranking]
    return tuple(_alternative(priced, int(at)) for at in ranking[shown])


def _alternative(priced: Priced, at: int) -> Alternative:
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
