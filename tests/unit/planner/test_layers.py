"""The layers of a program: how many, what they take, what crosses a cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dtft.planner.ir.layers import LayerStack, find_layers
from dtft.planner.ir.op_groups import region
from dtft.planner.ir.repeats import find_repeats
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import ADAM, array, cross_entropy, ints

SIZES = {"batch": 8, "time": 32, "width": 64, "layers": 6, "heads": 4}


def asked(name: str, **sizes: int) -> Workload:
    model = MODELS[name](**sizes)
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def found(question: Workload) -> LayerStack | None:
    graph = question.graph
    seconds = [operator.flops * operator.trips for operator in graph.operators]
    return find_layers(
        graph,
        find_repeats(graph).repeats,
        seconds.__getitem__,
        parameters=[graph.inputs[path] for path in question.paths("parameter")],
        batch=[graph.inputs[path] for path in question.paths("batch")],
    )


@pytest.mark.parametrize("name", ["gpt", "gpt_scan"])
def test_layers_of_a_transformer_unrolled_and_scanned(name: str) -> None:
    question = asked(name, **SIZES, vocabulary=512)
    layers = found(question)
    assert layers is not None
    assert layers.count == 6
    graph = question.graph
    sizes = [graph.values[v].num_bytes for v in layers.boundary]
    assert sizes == [8 * 32 * 64 * 4]  # the residual stream
    # Logits and their two gradients against six layers, by operations.
    tokens, width = 8 * 32, 64
    head = 3 * 2 * tokens * width * 512
    assert layers.shares["last"] * question_flops(question) == pytest.approx(
        head, rel=0.1
    )
    assert layers.shares["layers"] > 0.6
    assert sum(layers.shares.values()) == pytest.approx(1)


def question_flops(question: Workload) -> float:
    return sum(
        op.flops * op.trips for op in question.graph.operators if "jvp(" in op.name
    )


def test_both_ends_read_a_tied_embedding() -> None:
    question = asked("gpt_scan", **SIZES, vocabulary=512)
    layers = found(question)
    assert layers is not None
    readers = {
        path: layers.readers[question.graph.inputs[path]]
        for path in ("params/embed", "params/layers/up")
    }
    assert readers["params/embed"] == {"first", "last"}
    assert readers["params/layers/up"] == {"layers"}


def test_a_loop_over_time_is_no_layers() -> None:
    assert found(asked("rnn")) is None


BATCH, TIME, WIDTH, HIDDEN, WORDS, LAYERS = 16, 6, 8, 12, 32, 4


def block(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def narrow(p: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)


def scaled(p: Any) -> Any:
    return jax.tree.map(lambda w: w * 0.5, p)


def scanned(x: jax.Array, layers: Any, of_layer: Callable[..., Any]) -> jax.Array:
    return jax.lax.scan(lambda x, p: (of_layer(x, p), None), x, layers)[0]


def in_body(x: jax.Array, layers: Any) -> jax.Array:
    wide = x.astype(jnp.bfloat16)
    return scanned(wide, layers, lambda x, p: block(x, narrow(p)))


def scaled_in_body(x: jax.Array, layers: Any) -> jax.Array:
    return scanned(x, layers, lambda x, p: block(x, scaled(p)))


def before_checkpoint(x: jax.Array, layers: Any) -> jax.Array:
    checkpointed = jax.checkpoint(block)
    return scanned(x, layers, lambda x, p: checkpointed(x, scaled(p)))


def before_the_scan(x: jax.Array, layers: Any) -> jax.Array:
    return scanned(x.astype(jnp.bfloat16), narrow(layers), block)


def stacked_before(x: jax.Array, layers: Any) -> jax.Array:
    each = [jax.tree.map(lambda w, at=at: w[at], layers) for at in range(LAYERS)]
    return scanned(x, jax.tree.map(lambda *w: jnp.stack(w), *each), block)


def in_pairs(x: jax.Array, layers: Any) -> jax.Array:
    pairs = jax.tree.map(lambda w: w.reshape(-1, 2, *w.shape[1:]), scaled(layers))
    return scanned(x, pairs, lambda x, pair: scanned(x, pair, block))


def before_a_loop_of_python(x: jax.Array, layers: Any) -> jax.Array:
    x, layers = x.astype(jnp.bfloat16), narrow(layers)
    for at in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, at=at: w[at], layers))
    return x


def asked_with(layers_of: Callable[[jax.Array, Any], jax.Array]) -> Workload:
    """A residual network of tokens whose layers are run by the function."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = layers_of(params["embed"][batch["tokens"]], params["layers"])
        logits = x @ params["embed"].astype(x.dtype).T
        return cross_entropy(logits.astype(jnp.float32), batch["labels"])

    params = {
        "embed": array(WORDS, WIDTH),
        "layers": {
            "up": array(LAYERS, WIDTH, HIDDEN),
            "down": array(LAYERS, HIDDEN, WIDTH),
        },
    }
    batch = {"tokens": ints(BATCH, TIME), "labels": ints(BATCH, TIME)}
    return of_loss(loss, ADAM, params, batch)


@pytest.mark.parametrize(
    ("layers_of", "count"),
    [
        (in_body, LAYERS), (scaled_in_body, LAYERS), (before_checkpoint, LAYERS),
        (before_the_scan, LAYERS), (stacked_before, LAYERS), (in_pairs, LAYERS // 2),
        (before_a_loop_of_python, LAYERS),
    ],
)  # fmt: skip
def test_layers_have_weights_that_the_program_casts_or_scales(
    layers_of: Callable[[jax.Array, Any], jax.Array], count: int
) -> None:
    question = asked_with(layers_of)
    layers = found(question)
    assert layers is not None and layers.count == count
    graph = question.graph
    (boundary,) = (graph.values[index] for index in layers.boundary)
    assert boundary.shape == (BATCH, TIME, WIDTH)
    readers = {path: layers.readers[graph.inputs[path]] for path in PATHS}
    ends = {"first", "last"}
    assert readers == {path: ends if "embed" in path else {"layers"} for path in PATHS}
    assert set(parts_of_weights(question, layers, "forward")) == {"layers"}


def parts_of_weights(question: Workload, layers: LayerStack, of: str) -> list[str]:
    """The parts of the operators that make weights of a layer, or their gradients."""
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    values = question.graph.values
    return [
        layers.parts[number]
        for number, operator in enumerate(question.graph.operators)
        if region(operator) == of and values[operator.outputs[0]].shape[-2:] in shapes
    ]


def test_gradients_are_cast_with_the_layers() -> None:
    question = asked_with(before_the_scan)
    layers = found(question)
    assert layers is not None
    made = parts_of_weights(question, layers, "backward")
    assert len(made) >= 2 * 2  # two products of the loop, two casts after it
    assert set(made) == {"layers"}


PATHS = ("params/embed", "params/layers/up", "params/layers/down")


def test_a_loop_over_positions_with_weights_of_their_own_is_no_layers() -> None:
    params = {"embed": array(WORDS, WIDTH), "places": array(TIME, WIDTH)}
    batch = {"tokens": ints(BATCH, TIME), "labels": ints(BATCH, TIME)}

    def loss(params: Any, batch: Any) -> jax.Array:
        def step(state: jax.Array, both: Any) -> Any:
            x, place = both
            state = jnp.tanh(state @ params["embed"].T @ params["embed"] + x + place)
            return state, state

        x = jnp.swapaxes(params["embed"][batch["tokens"]], 0, 1)
        places = params["places"][:, None]
        _, made = jax.lax.scan(step, jnp.zeros_like(x[0]), (x, places))
        logits = jnp.swapaxes(made, 0, 1) @ params["embed"].T
        return cross_entropy(logits, batch["labels"])

    assert found(of_loss(loss, ADAM, params, batch)) is None
