"""How early parameters are read, and what computation can hide of their collectives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtft
from dtft.planner.cluster import Efficiency
from dtft.planner.cost import added_s
from dtft.planner.ir import ReadPoint, find_read_order, trace
from dtft.planner.workload import of_loss

SIDE = 8
Loss = Callable[[Any, Any], jax.Array]


def matrix(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*shape, SIDE, SIDE), jnp.float32)


def points(loss: Loss, params: Any) -> tuple[ReadPoint, ...]:
    graph = trace(jax.value_and_grad(loss), params, matrix())
    numbers = [n for path, n in graph.inputs.items() if path.startswith("0/")]
    return find_read_order(graph, numbers)


def test_equal_layers_are_read_one_after_another() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        for name in "abcd":
            x = x @ p[name]
        return x.sum()

    found = points(loss, dict.fromkeys("abcd", matrix()))
    assert found == ((0.0, 0.25), (0.75, 1.0))


def test_a_scan_reads_what_unrolled_layers_read() -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x @ w.astype(jnp.bfloat16).astype(jnp.float32), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, p["layers"])[0].sum()

    found = points(loss, {"layers": matrix(4)})
    assert np.allclose(found, ((0.0, 0.25), (0.75, 1.0)))


def test_a_cast_of_all_parameters_reads_none_of_them() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        x = x.astype(jnp.bfloat16)
        return (x @ cast["a"] @ cast["b"].T).astype(jnp.float32).sum()

    assert points(loss, dict.fromkeys("ab", matrix())) == ((0.0, 0.5), (0.5, 1.0))


LAYERS = dict.fromkeys("abcd", matrix())
IN_TURN = ((0.0, 0.25), (0.75, 1.0))


def chain(p: Any, x: jax.Array) -> jax.Array:
    for name in "abcd":
        x = jnp.tanh(x @ p[name])
    return (x * x).sum()


def squares(p: Any) -> Any:
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(p))


def scan_of_squares(p: Any) -> Any:
    stack = jnp.stack(list(p.values()))
    add = lambda total, w: (total + (w * w).sum(), w.sum())  # noqa: E731
    return jax.lax.scan(add, 0.0, stack)[0]


def normalised(p: Any) -> Any:
    return jax.tree.map(lambda w: w * jax.lax.rsqrt(jnp.sum(w * w) + 1e-6), p)


def cast_by_scan(p: Any) -> Any:
    stack = jnp.stack([p[name] for name in "abcd"])
    cast = jax.lax.scan(lambda _, w: (None, jnp.tanh(w)), None, stack)[1]
    return dict(zip("abcd", cast, strict=True))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda p: jax.tree.map(lambda w: w * 0.5, p),
        lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), p),
        lambda p: jax.tree.map(lambda w: w.T.reshape(-1).reshape(w.shape), p),
        lambda p: jax.tree.map(lambda w: w + jnp.eye(SIDE), p),
        normalised,
        lambda p: {name: (w + p["a"]) @ w for name, w in p.items()},
    ],
    ids=["scaled", "cast", "transposed", "with iota", "normalised", "multiplied"],
)
def test_what_is_computed_from_parameters_alone_waits_for_its_reader(
    prepare: Callable[[Any], Any],
) -> None:
    found = points(lambda p, x: chain(prepare(p), x), LAYERS)
    assert np.allclose(found, IN_TURN)


@pytest.mark.parametrize("penalty", [squares, scan_of_squares])
def test_a_penalty_on_all_parameters_reads_none_of_them_early(penalty: Any) -> None:
    assert points(lambda p, x: penalty(p) + chain(p, x), LAYERS) == IN_TURN
    assert points(lambda p, x: chain(p, x) + penalty(p), LAYERS) == IN_TURN


def test_a_term_with_activations_reads_its_parameters() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (x * p["d"]).sum() + chain(p, x)

    assert points(loss, LAYERS) == ((0.0, 0.5), (0.5, 1.0))


def test_a_scan_that_computes_from_parameters_alone_reads_none_of_them() -> None:
    found = points(lambda p, x: chain(cast_by_scan(p), x), LAYERS)
    assert found == ((0.0, 1.0),)  # a stack is one array: whole where it is first read


def test_a_recurrence_from_zeros_reads_its_weights() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(row @ p["a"] + h @ p["b"]), None

        last, _ = jax.lax.scan(cell, jnp.zeros((SIDE, SIDE)), jnp.stack([x] * 5))
        return (last @ p["c"]).sum()

    found = points(loss, dict.fromkeys("abc", matrix()))
    assert np.allclose(found, ((0.0, 2 / 3), (10 / 11, 1.0)))


def ordered(loss: Loss, optimizer: optax.GradientTransformation) -> Any:
    return of_loss(loss, optimizer, LAYERS, matrix()).read_order


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.adafactor(0.1),
    ],
    ids=["sgd", "clipped", "adafactor"],
)
def test_frozen_parameters_do_not_count(optimizer: Any) -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return chain(p | {"a": jax.lax.stop_gradient(p["a"])}, x)

    assert np.allclose(ordered(loss, optimizer), ((0.25, 1 / 3), (0.75, 1.0)))


def test_parameters_that_the_optimizer_freezes_do_not_count() -> None:
    labels = {"a": "frozen", "b": "trained", "c": "trained", "d": "trained"}
    ways: dict[Any, Any] = {"frozen": optax.set_to_zero(), "trained": optax.adam(0.1)}
    found = ordered(chain, optax.multi_transform(ways, labels))
    assert np.allclose(found, ((0.25, 1 / 3), (0.75, 1.0)))


def test_adapters_of_frozen_matrices_are_read_with_them() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def merge(base: Any, adapter: Any) -> Any:
            return jax.lax.stop_gradient(base) + adapter["up"] @ adapter["down"]

        return chain({k: merge(w, p["adapters"][k]) for k, w in p["base"].items()}, x)

    shapes = {"up": (SIDE, 2), "down": (2, SIDE)}
    adapter = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    params = {"base": LAYERS, "adapters": dict.fromkeys("abcd", adapter)}
    found = of_loss(loss, optax.sgd(0.1), params, matrix()).read_order
    assert np.allclose(found, IN_TURN)


def test_gradients_that_an_optimizer_flattens_all_count() -> None:
    assert ordered(chain, optax.flatten(optax.adam(0.1))) == IN_TURN


def test_a_shared_parameter_counts_where_it_is_read_first() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (x @ p["a"] @ p["b"] @ p["a"].T).sum()

    found = points(loss, dict.fromkeys("ab", matrix()))
    assert np.allclose(found, ((0.0, 0.5), (1 / 3, 1.0)))


def test_a_large_last_parameter_is_a_corner() -> None:
    """The line from the first to the last point lies above those between them."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        x = x @ p["a"] @ p["b"]
        return jnp.einsum("bi,nij->", x, p["c"])

    found = points(loss, {"a": matrix(), "b": matrix(), "c": matrix(30)})
    assert [c for _, c in found] == pytest.approx([1 / 32, 1.0])


def test_a_program_without_products_has_one_point() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (x * p["a"]).sum()

    assert points(loss, {"a": matrix()}) == ((1.0, 1.0),)


@given(
    sizes=st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9)), min_size=1),
    slower=st.floats(1.0, 1.5),
    share=st.floats(0.0, 1.0),
)
def test_the_formula_is_a_queue(
    sizes: list[tuple[float, float]], slower: float, share: float
) -> None:
    """Each layer's gradients are sent, one after another, once they are there."""
    sent, computed = (np.array(column) for column in zip(*sizes, strict=True))
    ready = share * np.cumsum(computed[::-1])  # the backward pass: the last layer first
    free = 0.0
    for at, seconds in zip(ready, sent[::-1], strict=True):
        free = max(free, at) + seconds
    total, every = sent.sum(), computed.sum()
    bare = max(0.0, free - share * every) if total else 0.0
    before = np.concatenate([[0.0], np.cumsum(computed)[:-1]]) / every
    read = np.cumsum(sent) / max(total, 1e-9)
    efficiency = Efficiency(overlap_kappa=slower, overlap_fraction=share)
    found = added_s(efficiency, total, every, tuple(zip(before, read, strict=True)))
    assert found == pytest.approx(bare + (slower - 1) * (total - bare), abs=1e-6)


def _loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for up, down in params:
        x = jnp.tanh(x @ up) @ down
    return (x * x).mean()


def _terms(**pins: Any) -> tuple[float, float]:
    """Seconds of collectives as priced, and of all of them by themselves."""
    width = 4096
    layer = (
        jax.ShapeDtypeStruct((width, 4 * width), jnp.float32),
        jax.ShapeDtypeStruct((4 * width, width), jnp.float32),
    )
    plan = dtft.plan(
        loss=_loss,
        optimizer=optax.sgd(0.1),
        params=[layer] * 4,
        batch={"x": jax.ShapeDtypeStruct((65536, width), jnp.float32)},
        cluster="8xh100",
        microbatches=1,
        remat="none",
        **pins,
    )
    return plan.prediction.terms["collectives"], sum(
        one.seconds for one in plan.collectives
    )


def test_collectives_of_activations_wait() -> None:
    priced, alone = _terms(tensor=8)
    assert priced == pytest.approx(alone, rel=0.02)


def test_gradients_hide_behind_the_backward_pass() -> None:
    """All but those of the first matrix: an eighth, as there are eight."""
    priced, alone = _terms(replica=8)
    kappa = 1.1
    assert priced == pytest.approx(alone * (1 / 8 + (kappa - 1) * 7 / 8), rel=0.02)


def test_a_workload_knows_its_order() -> None:
    sides = [(matrix(), matrix())] * 2
    asked = of_loss(_loss, optax.sgd(0.1), sides, {"x": matrix()})
    assert asked.read_order == ((0.0, 0.25), (0.75, 1.0))


@pytest.mark.parametrize("zero", [1, 3])
def test_layers_that_a_scan_never_runs_are_planned(zero: int) -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(body, x, p["layers"])[0] @ p["head"]).sum()

    params = {"layers": matrix(0), "head": matrix()}
    assert points(loss, params) == ((0.0, 1.0),)
    plan = dtft.plan(
        loss=loss, optimizer=optax.adam(1e-3), params=params, batch=matrix(),
        cluster="8xH100", fsdp=8, zero=zero,
    )  # fmt: skip
    assert plan.prediction.step_s > 0
