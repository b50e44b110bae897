"""The dims of a loss's program are found in the program of the step."""

import jax
import jax.numpy as jnp
import pytest

from dtft.planner.spmd.partitioner import ShardingAssignment
from dtft.planner.workload import of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import ADAM, array, ints

SMALL = ("mlp", "gpt_scan", "moe", "rnn")


@pytest.mark.parametrize("name", SMALL)
def test_every_dim_of_an_operator_is_found_and_is_as_large(name: str) -> None:
    model = MODELS[name]()
    asked = of_loss(model.loss, ADAM, model.params, model.batch)
    program, graph, same = asked.program, asked.graph, asked._same_dims
    for operator in program.operators:
        if operator.kind in ("matmul", "convolution", "gather"):
            for index in operator.outputs:
                for dim in program.values[index].dims:
                    sizes = set(program.dims[dim].sizes)
                    assert sizes <= set(graph.dims[same[dim]].sizes)


def test_what_no_argument_has_is_divided_in_the_loss_as_in_the_step() -> None:
    params = {"embed": array(32, 8), "up": array(8, 16)}
    batch = {"x": ints(4, 9)}

    def loss(params, batch):  # positions: one less than the batch has
        return jnp.mean(jax.nn.relu(params["embed"][batch["x"][:, :-1]] @ params["up"]))

    asked = of_loss(loss, ADAM, params, batch)
    (made,) = [op for op in asked.graph.operators if op.primitive == "dot_general"][:1]
    positions = asked.graph.values[made.outputs[0]].dims[1]
    division = asked.aligned(ShardingAssignment(axes={positions: ("sequence",)}))
    (twin,) = [op for op in asked.program.operators if op.primitive == "dot_general"]
    spec = division.spec(asked.program.values[twin.outputs[0]])
    assert spec == ((), ("sequence",), ())
