"""The dims that `tensor` divides are those of least cost: against trying all."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.planner.choosing import Chooser, candidates
from dtft.planner.cluster import Cluster
from dtft.planner.cost import Speeds
from dtft.planner.partition import MICRO, Division, work
from dtft.planner.question import Question, of_loss
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
    for scatters, (name, tensor) in itertools.product(
        (True, False), itertools.product(POOLS, (2, 4))
    ):
        pool = Cluster.parse(name).uniform
        mesh = {"replica": pool.num_devices // tensor, "tensor": tensor}
        mesh = {axis: size for axis, size in mesh.items() if size > 1}
        check(question, Speeds(pool=pool, mesh=mesh), data, tensor, scatters)


def check(
    question: Question,
    speeds: Speeds,
    data: dict[int, tuple[str, ...]],
    tensor: int,
    scatters: bool,
) -> None:
    base = Division(axes=data, scatters=scatters, alias=question.alias)
    sizes = {**speeds.mesh, MICRO: 1}
    dims = candidates(question.graph, question.groups, question.alias, tensor)
    dims = [dim for dim in dims if not base.of(dim)]
    assert len(dims) <= MOST

    graph, known = question.graph, {}

    def cost(number: int, chosen: frozenset[int]) -> float:
        group = question.groups[number]
        values = (*group.operator.inputs, *group.operator.outputs)
        here = {base.root(dim) for i in values for dim in graph.values[i].dims}
        key = number, chosen & here
        if key not in known:
            axes = {**data, **dict.fromkeys(key[1], ("tensor",))}
            division = Division(axes=axes, scatters=scatters, alias=question.alias)
            done = work(graph, group.operator, division)
            known[key] = group.times * float(speeds.alone_s(graph, done, sizes))
        return known[key]

    def total(chosen: tuple[int, ...]) -> float:
        dims = frozenset(chosen)
        return sum(cost(number, dims) for number in range(len(question.groups)))

    chooser = Chooser(question.graph, question.groups, base, "tensor")
    found = chooser.choose(
        dims, lambda done: float(speeds.alone_s(question.graph, done, sizes))
    )
    chosen = tuple(dim for dim in dims if found.of(dim))
    best = min(
        total(some)
        for length in range(len(dims) + 1)
        for some in itertools.combinations(dims, length)
    )
    assert total(chosen) == pytest.approx(best, rel=1e-9)
