"""The layers of a program: how many, what they take, what crosses a cut."""

import pytest

from dtft.planner.ir.repeats import LayerStack, find_layers, find_repeats
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS

SIZES = {"batch": 8, "time": 32, "width": 64, "layers": 6, "heads": 4}


def asked(name: str, **sizes: int) -> Workload:
    model = MODELS[name](**sizes)
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def found(question: Workload) -> LayerStack | None:
    graph = question.graph
    seconds = [operator.flops * operator.trips for operator in graph.operators]
    return find_layers(graph, find_repeats(graph).repeats, seconds.__getitem__)


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
