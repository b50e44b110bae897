"""Dims of experts are found from products, whatever the model is called."""

import jax
import jax.numpy as jnp
import pytest

from dtft.planner.workload import Workload, arrays_of_experts, of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import ADAM, array, ints

SMALL = {
    "moe": {"batch": 8, "time": 16, "width": 16, "layers": 2, "hidden": 32, "heads": 2},
    "gpt": {"batch": 8, "time": 16, "width": 16, "layers": 2, "heads": 2},
    "llama": {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64},
    "rnn": {},
    "vit": {"size": 32, "width": 32, "layers": 2, "heads": 2, "classes": 10},
    "lora": {"width": 64, "layers": 2, "heads": 4},
}


def found(question: Workload) -> dict[frozenset[int], int]:
    graph = question.graph
    parameters = [graph.inputs[path] for path in question.paths("parameter")]
    alias = question.alias
    return dict(arrays_of_experts(graph, parameters, lambda dim: alias.get(dim, dim)))


def asked(name: str, **sizes: int) -> Workload:
    model = MODELS[name](**SMALL[name], **sizes)
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def test_the_experts_of_equal_layers_are_one_dim_of_two_arrays() -> None:
    question = asked("moe", vocabulary=64, experts=4)
    graph, alias = question.graph, question.alias
    weights = graph.values[graph.inputs["params/layers/1/up"]]
    arrays = found(question)
    assert set(arrays.values()) == {alias[weights.dims[0]]}
    # What the experts are given (width) and what is inside of them (hidden).
    assert len(arrays) == 2
    batch = question.batch_dims[0]
    assert all(batch in dims for dims in arrays)


@pytest.mark.parametrize("name", ["gpt", "llama", "rnn", "vit", "lora"])
def test_models_without_experts_have_none(name: str) -> None:
    assert not found(asked(name))


def test_square_weights_between_residual_sums_are_no_experts() -> None:
    params = {"embed": array(32, 8), "w": array(4, 8, 8)}
    batch = {"tokens": ints(16, 6)}

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        for w in params["w"]:  # both dims of w are the width of x
            x = x + jnp.tanh(x @ w)
        x, _ = jax.lax.scan(
            lambda x, w: (x + jnp.tanh(x @ (w * 0.5)), None), x, params["w"]
        )
        alike = jnp.einsum("lij,lkj->lik", params["w"], params["w"])
        return jnp.mean(x) + jnp.mean(jnp.square(alike))

    assert not found(of_loss(loss, ADAM, params, batch))


def test_an_ensemble_is_divided_by_member() -> None:
    params = {"w": array(6, 8, 4)}
    batch = {"x": array(16, 8)}

    def loss(params, batch):
        each = jax.vmap(lambda w: jnp.tanh(batch["x"] @ w))(params["w"])
        return jnp.mean(jnp.square(each))

    question = of_loss(loss, ADAM, params, batch)
    # The input has no dim of members: only a product of what each member made has it.
    assert not found(question)

    def deeper(params, batch):
        def member(w, v):
            return jnp.tanh(jnp.tanh(batch["x"] @ w) @ v)

        return jnp.mean(jnp.square(jax.vmap(member)(params["w"], params["v"])))

    question = of_loss(deeper, ADAM, {**params, "v": array(6, 4, 2)}, batch)
    graph = question.graph
    (member,) = set(found(question).values())
    assert member == graph.values[graph.inputs["params/w"]].dims[0]
