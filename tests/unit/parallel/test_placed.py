"""Placed steps against undivided ones."""

import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtft.parallel.mpmd.api import PlacedStep, make_placed_step
from dtft.parallel.mpmd.executor import Hub, Node, Span
from dtft.parallel.mpmd.partition import cut, devices_of, nodes_of_scopes
from dtft.parallel.mpmd.schedule import Key
from dtft.parallel.planning.inputs import check_like
from dtft.placement.api import place
from dtft.planner.ir.jaxprs import operators, traced
from dtft.planner.ir.tracing import trace

ROWS, WIDTH, NODES = 8, 4, 3


def layered(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A shared matrix, tokens, a rule of derivation, a loop, something remembered."""
    x = params["table"][batch["token"]] + batch["x"]
    for matrix in params["layers"]:
        x = jax.nn.relu(x @ matrix)

    def turn(carried: jax.Array, matrix: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carried @ matrix), None

    x, _ = jax.lax.scan(turn, x, params["stacked"])
    x = jax.checkpoint(lambda x, w: jnp.sin(x @ w) * 2)(x, params["layers"][0])
    counts = jnp.argmax(x, axis=1)
    x = x @ params["table"][:WIDTH] * (1.0 + counts[:, None].astype(x.dtype))
    error = x - batch["y"]
    return jnp.mean(error * error), {"mean": jnp.mean(x)}


def dtype() -> Any:
    return jnp.result_type(float)  # float64 under `with_float64`


def some_params() -> Any:
    rng = np.random.default_rng(0)

    def matrices(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype())

    return {
        "table": matrices(6, WIDTH),
        "layers": [matrices(WIDTH, WIDTH) for _ in range(2)],
        "stacked": matrices(2, WIDTH, WIDTH),
        "unused": np.ones(2, dtype()),
    }


def some_batch() -> Any:
    rng = np.random.default_rng(0)
    return {
        "token": np.array([3, 0, 5, 4, 1, 2, 0, 4], np.int32),
        "x": rng.normal(size=(ROWS, WIDTH)).astype(dtype()),
        "y": rng.normal(size=(ROWS, WIDTH)).astype(dtype()),
    }


def num_operators(loss: Any, params: Any, batch: Any) -> int:
    program, _ = traced(loss, params, batch)
    return sum(1 for _ in operators(program.jaxpr))


def placed(
    nodes: Any,
    loss: Any = layered,
    optimizer: Any = None,
    batch: Any = None,
    **options: Any,
) -> PlacedStep:
    optimizer = optimizer or optax.sgd(0.1)
    return make_placed_step(
        loss,
        optimizer,
        some_params(),
        batch or some_batch(),
        nodes=nodes,
        devices=jax.devices()[:NODES],
        **options,
    )


def scattered(seed: int = 0) -> list[int]:
    """Some operators in a row here, some there: few programs have to be compiled."""
    count = num_operators(layered, some_params(), some_batch())
    drawn = np.random.default_rng(seed).integers(0, NODES, count)
    return np.repeat(drawn, 6)[:count].tolist()


def in_a_row(loss: Any = layered) -> list[int]:
    count = num_operators(loss, some_params(), some_batch())
    return [index * NODES // count for index in range(count)]


def assert_close(found: Any, wanted: Any) -> None:
    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.dtype != np.float32  # its rounding would hide small errors
        assert np.linalg.norm(a - b) <= 1e-13 * np.linalg.norm(b) + 1e-15

    jax.tree.map(check, found, wanted)


@pytest.mark.usefixtures("with_float64")
@pytest.mark.parametrize(
    ("nodes", "microbatches"),
    [(scattered(), 4), (in_a_row(), 1)],
    ids=["any", "row"],
)
def test_gradients_are_those_of_the_undivided_step(
    nodes: list[int], microbatches: int
) -> None:
    step = placed(nodes, microbatches=microbatches)
    params, batch = some_params(), some_batch()
    found, gradients = step.gradients(step.init(params), batch)
    wanted = jax.jit(jax.value_and_grad(layered, has_aux=True))(params, batch)
    assert_close((found, gradients), wanted)


@pytest.mark.usefixtures("with_float64")
def test_parameters_stay_on_their_nodes_and_are_updated_like_undivided_ones() -> None:
    """After a step of one placement another one takes over, with what is remembered."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9))
    params, batch = some_params(), some_batch()
    steps = [
        placed(nodes, rows, optimizer=optimizer, microbatches=2)
        for nodes in (UNEVEN, [2 - node for node in UNEVEN])
    ]
    state = steps[0].init(params)
    opt_state = optimizer.init(params)

    @jax.jit
    def undivided(params: Any, opt_state: Any) -> Any:
        gradients = jax.grad(rows)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

    for step in steps:
        state = step.moved(state)
        where = jax.tree.map(lambda leaf: leaf.devices(), state)
        state, _ = step.step(state, batch)
        assert jax.tree.map(lambda leaf: leaf.devices(), state) == where
        nodes = jax.tree.leaves(where["params"]["layers"], is_leaf=_is_set)
        assert nodes[0] == {jax.devices()[step.cut.segments[0].node]}
        params, opt_state = undivided(params, opt_state)
    assert_close(state, {"params": params, "opt_state": opt_state})


def _is_set(value: Any) -> bool:
    return isinstance(value, set)


@pytest.mark.usefixtures("with_float64")
def test_weights_count_in_gradients_and_in_what_is_returned() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        known = (batch["token"] > 2).astype(dtype())
        error = (batch["x"] @ params["layers"][0]).sum(axis=1)
        return jnp.sum(known * error) / jnp.sum(known)

    nodes = in_a_row(loss)
    step = placed(
        nodes, loss, microbatches=2, weight=lambda part: np.sum(part["token"] > 2)
    )
    params, batch = some_params(), some_batch()
    found = step.gradients(step.init(params), batch)
    assert_close(found, jax.value_and_grad(loss)(params, batch))


def masked(params: Any, batch: Any) -> jax.Array:
    error = jnp.sin(batch["x"] @ params["w"]).sum(axis=1)
    return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])


def placed_masked(mask: Any, weight: Any, dtype: Any) -> tuple[Any, Any]:
    """Loss and gradients of `masked` in two microbatches, and in one undivided step."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(WIDTH, WIDTH)).astype(dtype)}
    batch = {
        "x": rng.normal(size=(ROWS, WIDTH)).astype(dtype),
        "mask": np.asarray(mask, dtype),
    }
    count = num_operators(masked, params, batch)
    step = make_placed_step(
        *(masked, optax.sgd(0.1), params, batch),
        nodes=[index * NODES // count for index in range(count)],
        devices=jax.devices()[:NODES],
        microbatches=2,
        weight=weight,
    )
    found = step.gradients(step.init(params), batch)
    return found, jax.value_and_grad(masked)(params, batch)


@pytest.mark.usefixtures("with_float64")
@pytest.mark.parametrize("empty", [0, 1])
def test_a_microbatch_whose_rows_are_all_masked_does_not_count(empty: int) -> None:
    mask = np.ones((2, ROWS // 2))
    mask[empty] = 0.0
    found, wanted = placed_masked(
        mask.ravel(), lambda part: np.sum(part["mask"]), np.float64
    )
    assert_close(found, wanted)


def test_large_weights_keep_float16_gradients_finite() -> None:
    found, wanted = placed_masked(np.ones(ROWS), lambda part: 40_000, np.float16)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01),
        *(found, wanted),
    )


def rows(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for index in range(6):
        x = jnp.tanh(x @ params["layers"][index % 2])
    return jnp.mean(x)


UNEVEN = [0, 0] * 3 + [1, 1] * 2 + [2, 2] + [2, 2]
"""Three layers, two and one with the mean."""


def test_a_row_of_uneven_stages_sends_one_value_and_one_cotangent_per_microbatch() -> (
    None
):
    step = placed(UNEVEN, rows, microbatches=4)
    assert [segment.node for segment in step.cut.segments] == [0, 1, 2]
    sent = {(t.source, t.destination, t.kind): t for t in step.transfers}
    for one, next_one in ((0, 1), (1, 2)):
        assert sent[one, next_one, "value"].count == 4
        assert sent[one, next_one, "value"].num_bytes == ROWS * WIDTH * 4
        assert sent[next_one, one, "cotangent"].count == 4
    matrices = {t.destination: t.count for t in step.transfers if t.kind == "param"}
    assert matrices == {1: 2, 2: 1}, "of two matrices node 2 uses one"


def test_a_row_of_stages_runs_one_forward_one_backward() -> None:
    step = placed(UNEVEN, rows, microbatches=8)
    pipeline = {
        node: "".join(
            f"{task.call.phase[0]}{task.microbatch}"
            for task in tasks
            if task.microbatch is not None and task.microbatch < 5
        )
        for node, tasks in step.order.by_node.items()
    }
    assert pipeline == {
        0: "f0f1f2b0f3b1f4b2b3b4",
        1: "f0f1b0f2b1f3b2f4b3b4",
        2: "f0b0f1b1f2b2f3b3f4b4",
    }


def test_any_order_can_run_and_bounds_what_is_in_flight() -> None:
    step = placed(scattered(4), microbatches=4)
    made: set[Key] = set()
    flying: Counter[int] = Counter()
    segments = step.cut.segments
    for task in sorted(step.order.start_s, key=lambda t: step.order.start_s[t]):
        parts = {key for key in task.reads if key.kind in PASSED}
        assert parts <= made | {key for key in parts if _is_batch(step, key)}
        made.update(task.writes)
        flying[task.call.segment] += 1 if task.call.phase == "forward" else -1
        nodes = {segment.node for segment in segments[task.call.segment :]}
        if (task.call.segment, "backward") in _phases(step):
            assert 0 <= flying[task.call.segment] <= len(nodes)
    assert len(step.order.start_s) == 4 * len(_phases(step))


PASSED = ("value", "residual", "cotangent", "partial")


def _is_batch(step: PlacedStep, key: Key) -> bool:
    return key.kind == "value" and key.number in step.cut.arguments


def _phases(step: PlacedStep) -> set[tuple[int, str]]:
    return {(task.call.segment, task.call.phase) for task in step.order.start_s}


def test_each_node_does_its_tasks_in_the_order_of_the_schedule() -> None:
    step = placed(scattered(), microbatches=4)
    _, _, timeline = step.measured(step.init(some_params()), some_batch())
    for node, tasks in step.order.by_node.items():
        wanted = tuple((task.call.name, task.microbatch) for task in tasks)
        assert timeline.order[node] == wanted
    assert set(timeline.busy_s) == set(timeline.wait_s) == set(range(NODES))


def test_nothing_is_left_on_a_node_but_what_is_wanted() -> None:
    step = placed(scattered(), microbatches=4)
    stores = step._feed.stores(step.init(some_params()), some_batch(), range(NODES))
    step._work(step.order, stores, [], measure=False)
    kinds = {key.kind for store in stores.values() for key in store}
    assert kinds <= {"param", "state", "constant", "result"}


def test_equal_calls_are_compiled_once() -> None:
    step = placed(in_a_row(), microbatches=4)
    state = step.init(some_params())
    for _ in range(3):
        state, _ = step.step(state, some_batch())
    programs: list[Any] = []
    for node in step._nodes.values():
        programs += node._compiled.values()
    assert {program._cache_size() for program in programs} == {1}


@pytest.mark.usefixtures("with_float64")
def test_nodes_in_processes_of_their_own_do_the_same() -> None:
    step = placed(UNEVEN, rows, microbatches=2)
    state, batch = step.init(some_params()), some_batch()
    hub, found = Hub(step.devices), dict[int, Any]()

    def work(node: int) -> list[Span]:
        mine = jax.tree.map(jnp.copy, state)
        found[node], spans = step.run_node(node, mine, batch, hub.exchange(node))
        return spans

    spans = hub.all(work, time.monotonic() + 50)
    wanted, _ = step.step(state, batch)
    assert_close(found[0]["params"]["layers"], wanted["params"]["layers"])
    assert {span.node for span in spans} == set(range(NODES))


def test_a_node_that_shares_its_senders_device_keeps_what_the_sender_frees() -> None:
    device = jax.devices()[0]
    hub = Hub({0: device, 1: device})
    sent = jax.device_put(jnp.arange(4.0), device)
    hub.exchange(0).send(Key("value"), sent, 1)
    sent.delete()  # as a program that donates it does
    got = hub.exchange(1).receive(Key("value"), time.monotonic() + 5)
    np.testing.assert_array_equal(got, np.arange(4, dtype=np.float32))


class _Silent:
    def send(self, key: Key, array: Any, node: int) -> None:
        pass

    def receive(self, key: Key, deadline: float) -> Any:
        raise TimeoutError


def test_a_wait_that_ends_says_what_it_waited_for() -> None:
    step = placed(UNEVEN, rows)
    with pytest.raises(TimeoutError, match="node 1 waited for .*forward 1"):
        node = Node(jax.devices()[1])
        node.run(step.order.by_node[1], {}, _Silent(), time.monotonic())


def test_a_failing_node_ends_the_step_with_its_error() -> None:
    step = placed(UNEVEN, rows)
    stores = step._stores(step.init(some_params()), some_batch(), range(NODES))
    wrong = dict.fromkeys(stores[0], jnp.ones((3, 3, 3)))
    with pytest.raises(TypeError):
        step._work(step.order, {**stores, 0: wrong}, (), measure=False)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes has 2 entries"):
        placed([0, 1], rows)
    with pytest.raises(ValueError, match="node 5"):
        placed([5] * len(UNEVEN), rows)
    with pytest.raises(ValueError, match="'token' has 8 rows"):
        placed(UNEVEN, rows, microbatches=3)
    with pytest.raises(ValueError, match="microbatches=0"):
        placed(UNEVEN, rows, microbatches=0)
    shapes = jax.eval_shape(some_params)
    with pytest.raises(ValueError, match="has no values. Allowed: arrays"):
        placed(UNEVEN, rows).init(shapes)
    fewer = {**some_batch(), "table": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match="'table' has 4 rows and 'token' has 8"):
        placed(UNEVEN, rows, batch=fewer, microbatches=2)
    with pytest.raises(ValueError, match="seconds has 1 entries"):
        placed(UNEVEN, rows, seconds=[1.0])

    def constant(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"])

    with pytest.raises(ValueError, match="does not depend"):
        placed([0, 0], constant)

    with pytest.raises(ValueError, match="loss returns complex64"):
        placed(
            [0, 1], lambda params, batch: jnp.sum(params["unused"]).astype("complex64")
        )

    def counting(params: Any, batch: Any) -> Any:
        return jnp.sum(params["unused"]), jnp.sum(batch["token"])

    with pytest.raises(ValueError, match="with 2 microbatches"):
        placed([0, 0], counting, microbatches=2)
    assert placed([0, 1], counting).transfers == ()


def test_another_batch_than_planned_is_refused_before_anything_runs() -> None:
    step = placed(UNEVEN, rows, microbatches=2)
    state, batch = step.init(some_params()), some_batch()
    others = {
        r"batch 'x' is float32\[6, 4\], planned was float32\[8, 4\].*rows too": {
            **batch,
            "x": batch["x"][:6],
        },
        r"batch 'x' is int32.*planned was float32": {
            **batch,
            "x": batch["x"].astype(np.int32),
        },
        r"batch 'y' is nothing, planned": {"x": batch["x"], "token": batch["token"]},
        r"batch 'more' is float32\[\], planned was nothing": {**batch, "more": 1.0},
    }
    calls = (step.step, step.measured, step.gradients)
    for words, other in others.items():
        for call in calls:
            with pytest.raises(ValueError, match=words):
                call(state, other)
        with pytest.raises(ValueError, match=words):
            step.run_node(0, state, other, _Silent())
    step._stores(state, {**batch, "token": batch["token"].astype(np.int64)}, range(3))


def test_keys_of_random_numbers_are_compared_too() -> None:
    check_like("batch", {"key": jax.random.key(0)}, {"key": jax.random.key(1)})
    with pytest.raises(ValueError, match=r"'key' is uint32\[2\], planned was key<fry>"):
        check_like("batch", {"key": np.ones(2, "u4")}, {"key": jax.random.key(1)})


def test_other_parameters_than_planned_are_refused() -> None:
    step = placed(UNEVEN, rows)
    params = some_params()
    wrong = {**params, "unused": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"params 'unused' is float32\[3\], planned"):
        step.init(wrong)
    good = step.init(params)
    with pytest.raises(ValueError, match=r"'params/unused' is float32\[3\], planned"):
        step.moved({**good, "params": wrong})


def test_another_state_than_planned_is_refused_before_anything_runs() -> None:
    step, batch = placed(UNEVEN, rows), some_batch()
    state = step.init(some_params())
    given = jax.tree.map(jnp.asarray, some_params())
    shapes = jax.eval_shape(lambda tree: tree, state)
    others = {
        "state is a NoneType. Allowed: what init, moved or a step returned": None,
        r"state is a dict of \[.*'table'.*init\(params\) makes one": given,
        r"'opt_state/0/count' is int32\[\], planned was nothing": {
            **state,
            "opt_state": optax.adam(0.1).init(given),
        },
        r"ShapeDtypeStruct\(.*which has no values. Allowed: arrays": shapes,
    }
    for words, other in others.items():
        for call in (step.step, step.measured, step.gradients):
            with pytest.raises(ValueError, match=words):
                call(other, batch)
        with pytest.raises(ValueError, match=words):
            step.run_node(0, other, batch, _Silent())
        with pytest.raises(ValueError, match=words):
            step.moved(other)
    with pytest.raises(ValueError, match="batch 'token' is ShapeDtypeStruct.*Shapes"):
        step.step(state, jax.eval_shape(lambda tree: tree, batch))


def test_a_state_of_another_placement_or_a_donated_one_is_refused() -> None:
    step, turned = (
        placed(nodes, rows, optax.adam(0.1))
        for nodes in (UNEVEN, [2 - node for node in UNEVEN])
    )
    state, batch = turned.init(some_params()), some_batch()
    words = r"is on cpu:2, planned was cpu:0, the device of node 0.*moved"
    with pytest.raises(ValueError, match=words):
        step.step(state, batch)
    state = step.moved(state)
    nodes = jax.tree.map(lambda leaf: next(iter(leaf.devices())).id, state)
    assert nodes == step.homes
    step.step(state, batch)
    for call in (lambda: step.step(state, batch), lambda: step.moved(state)):
        with pytest.raises(ValueError, match="was given to a step already.*returned"):
            call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 2.0}, "microbatches=2.0 is no whole number of 1 or more"),
        ({"microbatches": True}, "microbatches=True is no whole number"),
        ({"seconds": [-1.0] * 14}, r"seconds=\[-1.0.*finite number of 0 or more"),
        ({"seconds": np.full(14, np.nan)}, r"seconds=\[nan.*leave seconds out"),
        ({"seconds": 3.0}, "seconds=3.0. Allowed: a finite number"),
        ({"nodes": None}, "nodes=None is neither a placement nor numbers"),
        ({"nodes": [0.5] * 14}, "neither a placement nor numbers"),
        ({"devices": None}, "devices=None is neither a sequence nor a mapping"),
        ({"devices": jax.devices()[0]}, "devices=.* is neither a sequence"),
        ({"devices": ["cpu"] * 3}, r"devices\[0\]='cpu' is no device of JAX"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is no optax transformation"),
        ({"weight": 2.0}, "weight=2.0 cannot be called"),
        ({"weight": lambda part: part["x"]}, r"returns \(8, 4\). Allowed: a scalar"),
        ({"loss": 1}, "loss=1 cannot be called"),
        ({"batch": {"x": "text"}}, "batch 'x' is 'text', a str"),
        ({"params": {}}, "params={} has no arrays"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    options: dict[str, Any], words: str
) -> None:
    given = {
        "loss": rows,
        "optimizer": optax.sgd(0.1),
        "params": some_params(),
        "batch": some_batch(),
        "nodes": UNEVEN,
        "devices": jax.devices()[:NODES],
    }
    with pytest.raises(ValueError, match=words):
        make_placed_step(**{**given, **options})


def test_parts_that_all_count_nothing_have_no_mean() -> None:
    step = placed(UNEVEN, rows, microbatches=2, weight=lambda part: 0.0)
    with pytest.raises(ValueError, match=r"is \[0.0, 0.0\] for the microbatches"):
        step.step(step.init(some_params()), some_batch())


def test_seconds_may_be_an_array() -> None:
    step = placed(UNEVEN, rows, seconds=np.ones(len(UNEVEN)))
    assert set(step.order.start_s.values()) > {0.0}


def test_devices_of_a_placement_may_be_given_by_platform_and_first_part_of_type() -> (
    None
):
    graph = trace(rows, some_params(), some_batch())
    placement = place(graph, "h100+fpga-u280", affinity={"activation": "fpga"})
    gpu, fpga = jax.devices()[:2]
    assert devices_of(placement, {"gpu": gpu, "fpga": fpga}) == {0: gpu, 1: fpga}
    assert devices_of(placement, {"cuda": fpga, 0: gpu, "other": fpga})[0] == gpu
    with pytest.raises(ValueError, match="type or platform .fpga-u280, fpga, other"):
        devices_of(placement, {"h100": gpu})
    with pytest.raises(ValueError, match="devices has 'asic', but .*Allowed: h100:0"):
        devices_of(placement, {"gpu": gpu, "fpga": fpga, "asic": gpu})
    with pytest.raises(ValueError, match="microbatches=4, .*is a placement for 1"):
        placed(placement, rows, microbatches=4)


def test_a_step_and_its_tasks_are_shown_in_a_line() -> None:
    step = placed(UNEVEN, rows)
    assert len(repr(step)) < 300
    assert "node=0, phase='begin'" in repr(step.order.by_node[0][0])
    assert len(repr(step.order.by_node[0])) < 1000


def test_scopes_that_the_program_lacks_are_refused() -> None:
    def loss(x: jax.Array) -> jax.Array:
        with jax.named_scope("low"):
            return jnp.sum(x * 2)

    graph = trace(loss, jax.ShapeDtypeStruct((2,), "float32"))
    with pytest.raises(ValueError, match="scope 'high', .*Allowed: low"):
        nodes_of_scopes(graph, {"low": 0, "high": 1})


def test_what_nothing_needs_is_not_computed() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        jnp.sin(batch["x"])
        return jnp.sum(params["unused"] * 2)

    program, _ = traced(loss, some_params(), some_batch())
    divided = cut(program, [0, 1, 2])
    assert [segment.node for segment in divided.segments] == [1, 2]


def test_what_is_needed_late_joins_the_segment_that_needs_it() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        wanted = jnp.cos(batch["y"])
        return jnp.sum(jnp.sin(batch["x"] * 2) * wanted)

    program, _ = traced(loss, some_params(), some_batch())
    divided = cut(program, [1, 0, 0, 1, 1])
    assert [list(s.operators) for s in divided.segments] == [[1, 2], [0, 3, 4]]
