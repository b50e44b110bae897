"""The dims that `tensor` divides are those of least cost: against trying all."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.planner.choosing import Chooser, candidates
from dtft.planner.cluster import Cluster, Pool
from dtft.planner.columns import Columns
from dtft.planner.cost import Speeds, computing_s, runs
from dtft.planner.enumeration import enumerate_space
from dtft.planner.partition import MICRO, Division, work
from dtft.planner.pricing import Prices
from dtft.planner.question import Question, of_loss
from dtft.planner.space import Candidate, Choices
from tests.planner.zoo_parts import ADAM

POOLS = ("8xH100", "8xV100", "2x4xA100", "8xv5e", "4xcpu")
MOST = 10
"""Dims with which all choices are tried: 1,024."""


def random_question(seed: int) -> Question:
    """Two to four layers of random shape: dense, with a residual, gated, or heads."""
    random = np.random.default_rng(seed)
    widths = (16, 64, 256, 1024)
    width = int(random.choice(widths))
    layers = [
        (str(random.choice(["dense", "residual", "gated"])), int(random.choice(widths)))
        for _ in range(random.integers(1, 4))
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


@pytest.mark.parametrize("seed", range(26))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    question = random_question(seed)
    data: dict[int, tuple[str, ...]] = {}
    data |= dict.fromkeys(question.batch_dims, ("replica", "fsdp", MICRO))
    random = np.random.default_rng(seed)
    for scatters, name in itertools.product((True, False), POOLS):
        pool = Cluster.parse(name).uniform
        base = Division(axes=data, scatters=scatters, alias=question.alias)
        space = enumerate_space(choices(pool, question.batch_size))
        columns = Columns(pool, space)
        dims = candidates(question.graph, question.groups, question.alias)
        chooser = Chooser(Prices(question, columns), base, "tensor")
        divisions, which = chooser.choose(dims)
        divided = np.flatnonzero(columns.sizes["tensor"] > 1)
        for point in random.choice(divided, 2, replace=False):
            candidate = space[int(columns.first[point])]
            check(question, base, divisions[which[point]], pool, candidate)


def choices(pool: Pool, batch: int) -> Choices:
    return Choices(
        num_devices=pool.num_devices,
        batch=batch,
        divides={"replica": (), "fsdp": (), "tensor": ()},
        levels=tuple(level.size for level in pool.levels),
        max_microbatches=4,
    )


def check(
    question: Question,
    base: Division,
    found: Division,
    pool: Pool,
    candidate: Candidate,
) -> None:
    speeds = Speeds(pool=pool, mesh=candidate.mesh)
    sizes = {**candidate.mesh, MICRO: candidate.knobs.microbatches}
    dims = candidates(question.graph, question.groups, question.alias)
    known_dims, parts = question.graph.dims, candidate.mesh["tensor"]
    dims = [d for d in dims if not base.of(d) and known_dims[d].divisible_by(parts)]
    assert len(dims) <= MOST

    graph, known = question.graph, {}

    def cost(number: int, chosen: frozenset[int]) -> float:
        group = question.groups[number]
        values = (*group.operator.inputs, *group.operator.outputs)
        here = {base.root(dim) for i in values for dim in graph.values[i].dims}
        key = number, chosen & here
        if key not in known:
            axes = {**base.axes, **dict.fromkeys(key[1], ("tensor",))}
            done = work(graph, group.operator, replace(base, axes=axes))
            times = group.times * runs(done, sizes)
            alone = float(computing_s(graph, pool.device, done, sizes))
            alone += sum(speeds.sending_s(sent, sizes) for sent in done.sent)
            known[key] = times * alone
        return known[key]

    def total(chosen: tuple[int, ...]) -> float:
        dims = frozenset(chosen)
        return sum(cost(number, dims) for number in range(len(question.groups)))

    chosen = tuple(dim for dim in dims if found.of(dim))
    best = min(
        total(some)
        for length in range(len(dims) + 1)
        for some in itertools.combinations(dims, length)
    )
    assert total(chosen) == pytest.approx(best, rel=1e-9)
