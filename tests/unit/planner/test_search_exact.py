"""The search against trying everything: candidates, orders, layouts, each by itself.

520 small problems, every second one also with the space pruned by memory. What tries
everything shares no array code with the search: it goes through sizes of axes, all
orders on the fabric, knobs and sets of dims one by one.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.planner.cluster.hardware import CollectiveKind
from dtft.planner.cluster.topology import Cluster, Pool
from dtft.planner.cost.collectives import collective_s
from dtft.planner.cost.compute import added_s, launch_s
from dtft.planner.cost.mesh_topology import group_of
from dtft.planner.cost.operator import MeshSpeeds, computing_s, runs
from dtft.planner.ir.fusion import CHEAP
from dtft.planner.memory.peak import RESERVE, LivenessTrace, PeakModel, Timeline
from dtft.planner.search.enumerate import enumerate_space
from dtft.planner.search.meshes import divisors
from dtft.planner.search.ranking import IDLE, Priced
from dtft.planner.search.search import PlanSearch, memory_floor
from dtft.planner.search.space import Choices
from dtft.planner.search.tensor_sharding import candidates
from dtft.planner.spmd.partitioner import (
    MICRO,
    OperatorWork,
    ShardingAssignment,
    work_of,
)
from dtft.planner.spmd.zero import further_division
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo_parts import ADAM

POOLS = ("4xH100", "2x2xV100", "2x2xA100", "4xv5e", "4xcpu")
AXES = ("replica", "fsdp", "tensor")
MOST = 10
"""Dims with which all choices are tried: 1,024."""
MICROBATCHES = 2
CLOSE = 1e-9
Rest = Mapping[frozenset[int], Mapping[int, tuple[str, ...]]]
NOTHING: Rest = {}
Joint = tuple[CollectiveKind, tuple[str, ...], float, bool]
"""Kind, axes, how often, and whether in the update: what is sent together."""
MOST_BYTES = 30 * 2**20
"""Of what GPU and TPU send together."""


def random_question(seed: int) -> Workload:
    """One or two layers of random shape: dense, with a residual, or gated."""
    random = np.random.default_rng(seed)
    widths = (16, 64, 256, 1024)
    width = int(random.choice(widths))
    layers = [
        (str(random.choice(["dense", "residual", "gated"])), int(random.choice(widths)))
        for _ in range(random.integers(1, 3))
    ]
    params = {
        str(n): {
            "up": jax.ShapeDtypeStruct((width, inner), jnp.float32),
            "gate": jax.ShapeDtypeStruct((width, inner), jnp.float32),
            "down": jax.ShapeDtypeStruct((inner, width), jnp.float32),
        }
        for n, (_, inner) in enumerate(layers)
    }
    rows = int(random.choice([8, 64, 4096]))
    batch = {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}

    def loss(params, batch):
        x = batch["x"]
        for n, (kind, _) in enumerate(layers):
            p = params[str(n)]
            y = x @ p["up"]
            if kind == "gated":
                y = y * jax.nn.sigmoid(x @ p["gate"])
            y = jnp.tanh(y) @ p["down"]
            x = x + y if kind == "residual" else y
        return jnp.mean(jnp.square(x))

    return of_loss(loss, ADAM, params, batch)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One candidate with one of its best layouts."""

    mesh: Mapping[str, int]
    zero: int
    microbatches: int
    seconds: float
    num_bytes: float
    idle: bool
    """Whether an axis divides no product."""

    @property
    def worth_s(self) -> float:
        return self.seconds * (IDLE if self.idle else 1.0)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Seconds that some operators take, and how many are started."""

    computing: float
    sending: float
    """If each collective is by itself."""
    starts: float
    alone: float
    """Of `sending`: what nothing is sent together with."""
    waited: float
    """Of `alone`: what carries activations, for which the next operator waits."""
    together: Mapping[Joint, float]
    """Bytes of the rest."""
    passing: Mapping[Joint, float]
    """Of `together`: what carries activations."""


class Everything:
    """All candidates of a question on a pool, priced one by one."""

    def __init__(self, question: Workload, pool: Pool, scatters: bool) -> None:
        self.question, self.pool, self.graph = question, pool, question.graph
        self.search = PlanSearch(question, pool, scatters=scatters)
        self.timeline = Timeline(graph=question.graph, gathers=True)
        data = dict.fromkeys(question.batch_dims, ("replica", "fsdp", MICRO))
        self.base = ShardingAssignment(
            axes=data,
            scatters=scatters,
            alias=question.alias,
            first=question.weights,
        )
        self.dims = candidates(question)
        self._known: dict[object, Taken] = {}
        self._works: dict[object, OperatorWork] = {}
        self._moments: dict[object, PeakModel] = {}
        self._divides: dict[object, tuple[str, ...]] = {}

    @cached_property
    def points(self) -> list[Point]:
        return [
            point
            for mesh, parts in itertools.product(self.meshes(), (1, MICROBATCHES))
            if self.question.batch_size % (slots(mesh) * parts) == 0
            for chosen in self.best(mesh, parts)
            for zero in ((1, 2, 3) if mesh.get("fsdp", 1) > 1 else (0,))
            for point in [self.point(mesh, parts, zero, chosen)]
        ]

    @cached_property
    def _here(self) -> list[set[int]]:
        """The dims that each group of operators has, or reads sums over."""
        return [
            {
                self.base.root(dim)
                for index in (*group.operator.inputs, *group.operator.outputs)
                for dim in self.graph.values[index].dims
            }
            | set(map(self.base.root, group.operator.turned_over))
            for group in self.question.groups
        ]

    def meshes(self) -> Iterator[dict[str, int]]:
        """Every mesh in every order."""
        num = self.pool.num_devices
        for sizes in itertools.product(divisors(num), repeat=3):
            mesh = {a: n for a, n in zip(AXES, sizes, strict=True) if n > 1}
            if math.prod(sizes) == num:
                for order in itertools.permutations(mesh):
                    yield {axis: mesh[axis] for axis in order}

    def with_dims(self, chosen: frozenset[int]) -> ShardingAssignment:
        axes = {**self.base.axes, **dict.fromkeys(chosen, ("tensor",))}
        return replace(self.base, axes=axes)

    def best(self, mesh: Mapping[str, int], parts: int) -> list[frozenset[int]]:
        """The sets of dims of least cost: several where they cost the same.

        If all of them leave `tensor` idle, also the cheapest that do not.
        """
        tensor = mesh.get("tensor", 1)
        known = self.graph.dims
        dims = [d for d in self.dims if tensor > 1 and known[d].divisible_by(tensor)]
        assert len(dims) <= MOST
        totals = {
            frozenset(some): self.alone(frozenset(some), mesh, parts)
            for length in range(len(dims) + 1)
            for some in itertools.combinations(dims, length)
        }
        found = cheapest(totals)
        if tensor > 1 and not any(map(self.divides, found)):
            found += cheapest({k: v for k, v in totals.items() if self.divides(k)})
        return found

    def divides(self, chosen: frozenset[int]) -> bool:
        """Whether `tensor` divides a matmul; after `alone`."""
        groups = enumerate(self._here)
        return any("tensor" in self._divides[n, chosen & here] for n, here in groups)

    def alone(
        self, chosen: frozenset[int], mesh: Mapping[str, int], parts: int
    ) -> float:
        """Seconds of all operators, one after another, collectives between them."""
        every = range(len(self.question.groups))
        taken = [self.group(number, chosen, mesh, parts) for number in every]
        return sum(one.computing + one.sending for one in taken)

    def group(
        self,
        number: int,
        chosen: frozenset[int],
        mesh: Mapping[str, int],
        parts: int,
        rest: Rest = NOTHING,
    ) -> Taken:
        """What some operators take."""
        group, graph = self.question.groups[number], self.graph
        way = number, chosen & self._here[number], repr(rest)
        key = *way, tuple(mesh.items()), parts
        if key in self._known:
            return self._known[key]
        if way not in self._works:
            division = replace(self.with_dims(way[1]), rest=rest)
            self._works[way] = work_of(graph, group.operator, division)
        done, sizes = self._works[way], {**mesh, MICRO: parts}
        times = group.times * runs(done, sizes)
        speeds = MeshSpeeds(pool=self.pool, mesh=mesh)
        computing = computing_s(
            graph,
            self.pool.device,
            done,
            sizes,
            cold=group.uncached,
            moved=group.moved,
        )
        sending = alone = waited = 0.0
        together: dict[Joint, float] = defaultdict(float)
        passing: dict[Joint, float] = defaultdict(float)
        for sent in done.sent:
            seconds = times * float(speeds.sending_s(sent, sizes))
            sending += seconds
            if group.last and self.joins(sent.kind):
                own = sent.kind, real(sent.axes, mesh), runs(done, sizes)
                more = group.times * sent.amount.at(sizes)
                together[*own, group.region == "update"] += more
                if MICRO in sent.amount.axes:
                    passing[*own, group.region == "update"] += more
            else:
                alone += seconds
                waited += seconds if MICRO in sent.amount.axes else 0.0
        starts = 0.0 if group.operator.kind in CHEAP else times
        heavy = group.operator.kind == "matmul"
        self._divides[way[:2]] = done.divided_by if heavy else ()
        self._known[key] = Taken(
            computing=float(times * computing),
            sending=sending,
            starts=float(starts),
            alone=alone,
            waited=waited,
            together=together,
            passing=passing,
        )
        return self._known[key]

    def joins(self, kind: str) -> bool:
        """Whether the backend sends alike collectives together."""
        on_cpu = self.pool.device.platform == "cpu"
        return not on_cpu and kind in ("all_reduce", "all_gather", "reduce_scatter")

    def together_s(
        self, together: Mapping[Joint, float], mesh: Mapping[str, int]
    ) -> float:
        """Seconds of what is sent together: of programs without loops."""
        seconds = 0.0
        for (kind, axes, times, _), num_bytes in together.items():
            if not axes:
                continue
            num = math.ceil(num_bytes / MOST_BYTES)
            group = group_of(self.pool, mesh, axes)
            seconds += times * num * collective_s(kind, num_bytes / num, group)
        return seconds

    def point(
        self, mesh: Mapping[str, int], parts: int, zero: int, chosen: frozenset[int]
    ) -> Point:
        question, search, device = self.question, self.search, self.pool.device
        division, fsdp = self.with_dims(chosen), mesh.get("fsdp", 1)
        rest = NOTHING
        if zero >= 2:
            parameters = search.leaves("parameter", division, mesh, True)
            rest = further_division(parameters, division, question.loop_dims)
        compute = sending = waited = update = starts = 0.0
        together: dict[Joint, float] = defaultdict(float)
        passing: dict[Joint, float] = defaultdict(float)
        idle = {axis for axis, size in mesh.items() if size > 1}
        for number, group in enumerate(question.groups):
            found = self.group(number, chosen, mesh, parts, rest)
            idle.difference_update(self._divides[number, chosen & self._here[number]])
            updates = group.region == "update"
            update += found.computing / (fsdp if zero else 1) if updates else 0.0
            compute += 0.0 if updates else found.computing
            sending, starts = sending + found.alone, starts + found.starts
            waited += found.waited
            for joint, more in found.together.items():
                together[joint] += more
            for joint, more in found.passing.items():
                passing[joint] += more
        speeds, sizes = MeshSpeeds(pool=self.pool, mesh=mesh), {**mesh, MICRO: parts}
        for one in search.moved(division, mesh, zero):
            times = one.how.messages * (parts if one.how.per_microbatch else 1)
            if self.joins("all_gather"):
                axes = real(one.sent.axes, mesh)
                together["all_gather", axes, times, True] += one.sent.amount.at(sizes)
            else:
                sending += times * speeds.sending_s(one.sent, sizes)
        sending += self.together_s(together, mesh)
        waited += self.together_s(passing, mesh)
        seconds = compute + update + float(launch_s(device, starts))
        order, behind = self.question.read_order, max(sending - waited, 0.0)
        added = added_s(device.efficiency, behind, compute, order)
        seconds += waited + float(added)
        num_bytes = self.num_bytes(division, mesh, zero, sizes)
        return Point(
            mesh=mesh, zero=zero, microbatches=parts,
            seconds=seconds, num_bytes=num_bytes, idle=bool(idle),
        )  # fmt: skip

    def num_bytes(
        self,
        division: ShardingAssignment,
        mesh: Mapping[str, int],
        zero: int,
        sizes: Mapping[str, int],
    ) -> float:
        """Without the reserve."""
        leaves = self.search.leaves
        arrays = [
            *leaves("parameter", division, mesh, zero == 3),
            *leaves("optimizer", division, mesh, zero > 0),
            *leaves("batch", division, mesh, False),
        ]
        there = 0.0
        for leaf in arrays:
            axes = [axis for part in leaf.rest for axis in part]
            there += leaf.value.num_bytes / math.prod(mesh.get(a, 1) for a in axes)
        timeline = self.timeline.at_level_3 if zero == 3 else self.timeline
        key = timeline, frozenset(division.axes.items())
        if key not in self._moments:
            self._moments[key] = PeakModel(LivenessTrace(timeline), division)
        one = {axis: np.array([sizes.get(axis, 1)]) for axis in (*AXES, MICRO)}
        highest = self._moments[key].on(one).peak(zero)
        return there + float(highest.activations[0]) + float(highest.gradients[0])


def cheapest(totals: Mapping[frozenset[int], float]) -> list[frozenset[int]]:
    least = min(totals.values(), default=0.0)
    return [some for some, cost in totals.items() if cost <= least * (1 + CLOSE)]


def real(axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.get(axis, 1) > 1)


def slots(mesh: Mapping[str, int]) -> int:
    return mesh.get("replica", 1) * mesh.get("fsdp", 1)


def with_memory(pool: Pool, num_bytes: float) -> Pool:
    device = replace(pool.device, memory_bytes=math.ceil(num_bytes / (1 - RESERVE)))
    return replace(pool, device=device)


def searched(everything: Everything, pool: Pool, *, pruned: bool) -> Priced:
    question = everything.question
    choices = Choices(
        num_devices=pool.num_devices,
        batch=question.batch_size,
        divides=dict.fromkeys(AXES, ()),
        levels=tuple(level.size for level in pool.levels),
        max_microbatches=MICROBATCHES,
        zero=(0, 1, 2, 3),
        memory=memory_floor(question, pool) if pruned else None,
    )
    search = PlanSearch(question, pool, scatters=everything.base.scatters)
    return search.price(enumerate_space(choices))


MORE = [pytest.param(seed, marks=pytest.mark.more) for seed in range(12, 26)]


@pytest.mark.parametrize("seed", [*range(12), *MORE])
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    """On two pools, with memory for one to all of the candidates."""
    question = random_question(seed)
    random = np.random.default_rng(seed)
    for number, name in enumerate(random.choice(POOLS, 2, replace=False)):
        pool = Cluster.parse(str(name)).uniform
        everything = Everything(question, pool, scatters=(seed + number) % 2 > 0)
        sizes = sorted({point.num_bytes for point in everything.points})
        for place, share in enumerate(np.linspace(0.0, 1.0, 10)):
            room = sizes[round(share * (len(sizes) - 1))] * (1 + CLOSE)
            small = with_memory(pool, room)
            check(everything, searched(everything, small, pruned=False), room)
            if place % 2 == number:  # one pool the least room, the other all of it
                check(everything, searched(everything, small, pruned=True), room)


def check(everything: Everything, priced: Priced, room: float) -> None:
    """The search's best is the best, or one of those that cost the same.

    Layouts of a candidate may cost the same and differ in what overlaps and in bytes:
    the search may take any of them. So the best candidate by its luckiest layout is not
    beaten, and by its unluckiest it is reached; mostly these are the same number.
    """
    alike: dict[object, list[Point]] = defaultdict(list)
    for point in everything.points:
        key = tuple(point.mesh.items()), point.zero, point.microbatches
        alike[*key, point.idle].append(point)
    fitting = [point for point in everything.points if point.num_bytes <= room]
    at = int(priced.ranking[0])
    unlucky = surely(alike, room)
    assert priced.fits[at] or unlucky == math.inf
    if priced.fits[at]:
        lucky = min(point.worth_s for point in fitting)
        assert lucky * (1 - CLOSE) <= priced.worth_s[at] <= unlucky * (1 + CLOSE)
        candidate = priced.space[at]
        key = tuple(candidate.mesh.items()), candidate.knobs.zero
        key = *key, candidate.knobs.microbatches, bool(priced.idle[at])
        seconds = [point.seconds for point in alike[key]]
        assert np.isclose(priced.step_s[at], seconds, rtol=CLOSE).any()


def surely(alike: Mapping[object, list[Point]], room: float) -> float:
    """Worth of the best candidate by its unluckiest layout; infinite without one.

    Args:
        alike: layouts of each candidate.
        room: bytes that there are.
    """
    return min(
        max(point.worth_s for point in points)
        if all(point.num_bytes <= room for point in points)
        else math.inf
        for points in alike.values()
    )
