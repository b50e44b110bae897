"""Along which dims products are divided, as XLA does it; weights alike."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

from dtft.planner.ir.graph import Operator
from dtft.planner.ir.op_groups import region
from dtft.planner.spmd.partitioner import ShardingAssignment, work_of
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo_parts import ADAM

WIDTH, HIDDEN, WORDS = 8, 32, 16


@cache
def question() -> Workload:
    """Two layers that hand on a width, and a head."""

    def loss(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.sum(jax.nn.log_softmax(x @ params["head"]))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)}
    params = {"layers": [layer, layer], "head": array(WIDTH, WORDS)}
    return of_loss(loss, ADAM, params, {"x": array(64, WIDTH)})


def everywhere() -> ShardingAssignment:
    """`tensor` on every dim of weights; the batch on `replica`."""
    asked = question()
    axes = dict.fromkeys(asked.weight_dims, ("tensor",))
    axes |= dict.fromkeys(asked.batch_dims, ("replica",))
    return ShardingAssignment(
        axes=axes, alias=asked.alias, first=asked.weights, scatters=True
    )


def sent(operator: Operator) -> list[tuple[str, int]]:
    """Kinds and last dims of what is sent over `tensor`."""
    asked = question()
    done = work_of(asked.graph, operator, everywhere())
    return [
        (one.kind, round(one.amount.total / 64 / 4))
        for one in done.sent
        if one.axes == ("tensor",)
    ]


def products(where: str) -> list[Operator]:
    operators = question().graph.operators
    return [o for o in operators if o.kind == "matmul" and region(o) == where]


def test_a_gradient_is_divided_as_its_weights_are() -> None:
    asked, division = question(), everywhere()
    weights = {
        frozenset(map(division.root, asked.graph.values[index].dims))
        for path, index in asked.graph.inputs.items()
        if path.startswith("params")
    }
    for value in asked.graph.values:
        roots = [division.root(dim) for dim in value.dims]
        if frozenset(roots) in weights:
            (divided,) = (
                size
                for size, axes in zip(value.shape, division.spec(value), strict=True)
                if axes
            )
            assert divided in (HIDDEN, WORDS)


def test_what_layers_hand_on_is_gathered_for_the_first_and_scattered_by_the_second():
    up, down, *_ = products("forward")
    assert sent(up) == [("all_gather", WIDTH)]
    assert sent(down) == [("reduce_scatter", WIDTH)]


@pytest.mark.parametrize("number", range(6))
def test_no_weights_are_moved_and_nothing_wide_is_gathered(number: int) -> None:
    one = [o for o in products("backward") if o.outputs][number]
    assert {kind for kind, _ in sent(one)} <= {"all_gather", "reduce_scatter"}
    assert all(size <= WIDTH for _, size in sent(one))
