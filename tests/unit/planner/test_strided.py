"""What is read across the order in which its elements lie, and what that costs."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtft.parallel.planning.planned_step import make_step
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.compute import LARGE_BYTES, SMALL_BYTES, strided_s
from dtft.planner.cost.operator import computing_s
from dtft.planner.ir.graph import Graph, Operator
from dtft.planner.ir.op_groups import transposed_reads
from dtft.planner.ir.tracing import trace
from dtft.planner.plan import Plan
from dtft.planner.search.decision import decide
from dtft.planner.spmd.op_signature import instance
from dtft.planner.spmd.partitioner import MICRO, ShardingAssignment, work_of
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS

X = jax.ShapeDtypeStruct((4, 8), "float32")
EACH_S = 1e-7
WIDTHS = (32, 64, 96, 128)
WEIGHTS = tuple(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
ELEMENTS = sum(rows * columns for rows, columns in WEIGHTS)


def _read(
    graph: Graph, of: Callable[[Operator], float] = lambda one: one.strided
) -> dict[str, float]:
    """Elements by primitive; of alike operators all."""
    found: dict[str, float] = defaultdict(float)
    for operator in transposed_reads(graph).values():
        found[operator.primitive] += of(operator)
    return {name: elements for name, elements in found.items() if elements}


def _turned(graph: Graph) -> dict[str, float]:
    return _read(graph, lambda one: one.turned)


def test_each_element_wise_reader_has_all_elements() -> None:
    def twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = x.T
        return jnp.exp(turned), jnp.sin(turned)

    assert _read(trace(twice, X)) == {"exp": 32.0, "sin": 32.0}


def test_a_product_reads_both_orders() -> None:
    assert _read(trace(lambda x: x @ x.T, X)) == {}


def test_a_sum_over_several_dims_copies_its_left_operand() -> None:
    x, by = (jax.ShapeDtypeStruct((2, 4, n), "float32") for n in (8, 16))

    def gradient(x: jax.Array, by: jax.Array) -> jax.Array:
        return jnp.sin(jnp.einsum("abi,abo->io", x, by).T)

    found = _read(trace(gradient, x, by))
    assert found in ({"dot_general": 2.0 * 4 * 8}, {"dot_general": 2.0 * 4 * 16})


def _summed(x: jax.Array, by: jax.Array) -> jax.Array:
    return jnp.einsum("abi,abo->io", x, by)


def test_what_is_computed_in_a_copy_is_read_across_itself() -> None:
    x, by = jnp.ones((2, 4, 8)), jnp.ones((2, 4, 16))
    few = jnp.ones(8)

    def left(values: jax.Array) -> jax.Array:
        return jnp.concatenate([_summed(values, by), _summed(by, values).T], 1)

    one = _read(trace(left, x))["dot_general"]

    def chained(a: jax.Array, b: jax.Array, c: jax.Array, bias: jax.Array) -> jax.Array:
        return left(a * b + 2.0 * c * b + jnp.broadcast_to(bias, a.shape))

    three = _read(trace(chained, x, x, x, few))["dot_general"]
    kept = _read(trace(lambda a, b: left(jnp.exp(a * b)), x, x))["dot_general"]
    size = 2 * 4 * 8
    assert three == one + 2 * size, "each of three arrays, and no bias"
    assert kept == one, "an exponential is computed once"


def test_the_gradient_of_a_kernel_copies_what_came_in() -> None:
    x = jax.ShapeDtypeStruct((4, 8, 8, 3), "float32")
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 16), "float32")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        made = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(made * made)

    convolved = "conv_general_dilated"
    assert _read(trace(loss, kernel, x)).get(convolved) is None
    found = _read(trace(jax.grad(loss), kernel, x))
    assert found[convolved] == 4 * 8 * 8 * 3


def test_rows_that_stay_whole_are_no_matter() -> None:
    many = jax.ShapeDtypeStruct((4, 8, 16), "float32")
    graph = trace(lambda x: jnp.exp(jnp.transpose(x, (1, 0, 2))), many)
    assert _read(graph) == {}


def test_a_transposed_product_is_told_apart_by_what_it_sums_over() -> None:
    by = jax.ShapeDtypeStruct((4, 16), "float32")
    graph = trace(lambda x, by: jnp.sin((by.T @ x).T), X, by)
    [found] = transposed_reads(graph).values()
    product = next(op for op in graph.operators if op.kind == "matmul")
    assert (found.primitive, found.strided, found.turned) == ("sin", 0.0, 8 * 16.0)
    assert found.turned_over == product.summed != ()


@pytest.mark.parametrize(
    ("shape", "order", "folds"),
    [
        ((3, 4, 16), (0, 2, 1), True),  # of each product of a stack
        ((3, 4, 16), (2, 0, 1), False),  # the stack goes elsewhere
    ],
)
def test_stacks_of_products_fold_where_rows_become_columns(
    shape: tuple[int, ...], order: tuple[int, ...], folds: bool
) -> None:
    x, by = (jax.ShapeDtypeStruct((*shape[:2], n), "float32") for n in (8, shape[2]))

    def turned(x: jax.Array, by: jax.Array) -> jax.Array:
        return jnp.sin(jnp.transpose(jnp.swapaxes(by, 1, 2) @ x, order))

    graph, elements = trace(turned, x, by), {"sin": 3 * 8 * 16.0}
    assert _turned(graph) == (elements if folds else {})
    assert _read(graph) == ({} if folds else elements)


def test_a_product_that_others_read_stays_as_it_is() -> None:
    def turned(x: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = by.T @ x
        return jnp.sin(product.T), jnp.exp(product)

    graph = trace(turned, X, jax.ShapeDtypeStruct((4, 16), "float32"))
    assert (_turned(graph), _read(graph)) == ({}, {"sin": 8 * 16.0})


def test_a_narrow_product_is_converted_before_it_is_transposed() -> None:
    x = jax.ShapeDtypeStruct((4, 8), "bfloat16")
    by = jax.ShapeDtypeStruct((4, 16), "bfloat16")
    graph = trace(lambda x, by: jnp.sin((by.T @ x).T), x, by)
    assert (_turned(graph), _read(graph)) == ({}, {"sin": 8 * 16.0})


def _two_layers() -> Workload:
    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params[0]) @ params[1])

    params = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (16, 24))]
    batch = jax.ShapeDtypeStruct((32, 8), "float32")
    return of_loss(loss, optax.adam(1e-3), params, batch)


def test_an_update_reads_gradients_across_that_were_summed_over_examples() -> None:
    question = _two_layers()
    graph = question.graph
    [examples] = {graph.values[graph.inputs["batch"]].dims[0]}
    found = {g.operator.turned_over: g for g in question.groups if g.operator.turned}
    assert set(found) == {(examples,)}
    twice = sum(
        group.times * group.operator.turned
        for group in question.groups
        if group.region == "update"
    )
    assert twice == pytest.approx(2 * (8 * 16 + 16 * 24))


def test_only_an_axis_with_parts_along_what_is_summed_over_counts() -> None:
    question = _two_layers()
    device = Cluster.parse("8xcpu").uniform.device
    device = replace(device, efficiency=replace(device.efficiency, strided_s=EACH_S))
    one = next(g.operator for g in question.groups if g.operator.turned)
    examples, columns = one.turned_over[0], question.graph.values[one.outputs[0]].dims
    axes = {examples: ("replica", MICRO), columns[-1]: ("tensor",)}
    division = ShardingAssignment(axes=axes, alias=question.alias)
    known = instance(question.graph, one, question.root)
    done = work_of(question.graph, one, division)
    assert known.work(known.key(division)) == done
    assert done.turned_by == ("replica",)

    def seconds(**sizes: int) -> float:
        return float(computing_s(question.graph, device, done, sizes))

    across = one.turned * EACH_S
    plain = replace(done, operator=replace(one, turned=0.0))
    for tensor in (1, 4):
        without = computing_s(question.graph, device, plain, {"tensor": tensor})
        assert seconds(tensor=tensor) == pytest.approx(float(without))
        assert seconds(tensor=tensor, **{MICRO: 2}) == seconds(tensor=tensor)
        grown = seconds(tensor=tensor, replica=2) - float(without)
        assert grown == pytest.approx(across / tensor)


def test_what_leaves_its_loop_is_read_once() -> None:
    def scanned(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, one: (carry, one.T), 0.0, x)[1]

    many = jax.ShapeDtypeStruct((3, 4, 8), "float32")
    assert _read(trace(scanned, many)) == {"transpose": 32.0}


def _mlp(widths: tuple[int, ...]) -> Workload:
    model = MODELS["mlp"](batch=64, widths=widths)
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def _planned(
    each_s: float,
    pins: Mapping[str, object],
    widths: tuple[int, ...] = (32, 64, 64, 32),
    large_s: float = 0.0,
) -> Plan:
    cluster = Cluster.parse("8xcpu")
    pool = cluster.uniform
    made = replace(pool.device.efficiency, strided_s=each_s, strided_large_s=large_s)
    pool = replace(pool, device=replace(pool.device, efficiency=made))
    given = {"microbatches": 1, "remat": "none", **pins}
    return decide(_mlp(widths), replace(cluster, pools=(pool,)), given).plan


def test_if_small_arrays_cost_nothing_only_large_ones_cost() -> None:
    device = Cluster.parse("cpu").uniform.device
    made = replace(device.efficiency, strided_s=0.0, strided_large_s=EACH_S)
    device = replace(device, efficiency=made)
    num_bytes = np.array([SMALL_BYTES, 2 * SMALL_BYTES, LARGE_BYTES, 2 * LARGE_BYTES])
    found = strided_s(device, 2, num_bytes)
    assert found.tolist() == [0, 0, 2 * EACH_S, 2 * EACH_S]


@pytest.mark.parametrize("replicas, each_s", [(1, 0.0), (8, 9 * EACH_S)])
def test_a_large_gradient_is_read_line_after_line_anew(
    replicas: int, each_s: float
) -> None:
    pins, widths = {"replica": replicas, "tensor": 8 // replicas}, (1024, 1024)
    plain, paid = (
        _planned(each, pins, widths, 9 * each).prediction.terms
        for each in (0.0, EACH_S)
    )
    grown = paid["optimizer"] - plain["optimizer"]
    assert grown == pytest.approx(2 * 1024 * 1024 * each_s)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_pays_for_the_elements_that_its_device_has(zero: int) -> None:
    pins: dict[str, object] = {"fsdp" if zero else "replica": 8, "zero": zero}
    plain, paid = (_planned(each, pins).prediction.terms for each in (0.0, EACH_S))
    weights = 32 * 64 + 64 * 64 + 64 * 32
    grown = paid["optimizer"] - plain["optimizer"]
    assert grown == pytest.approx(2 * weights / (8 if zero else 1) * EACH_S)
    # Gathered along the last dim, the first weight is copied into order.
    copied = 32 * 64 if zero else 0
    assert paid["compute"] - plain["compute"] == pytest.approx(copied * EACH_S)
    assert paid["collectives"] == plain["collectives"]


def test_an_update_pays_nothing_where_examples_are_not_divided() -> None:
    alone, many = (
        _planned(EACH_S, {axis: 8, "zero": 0}, WIDTHS).prediction.terms["optimizer"]
        for axis in ("tensor", "replica")
    )
    free = _planned(0.0, {"tensor": 8, "zero": 0}, WIDTHS).prediction.terms
    assert alone == free["optimizer"]
    assert alone < many / 8
    mixed = {"tensor": 4, "replica": 2, "zero": 0}
    plain, paid = (
        _planned(each, mixed, WIDTHS).prediction.terms["optimizer"]
        for each in (0.0, EACH_S)
    )
    assert plain < paid


@pytest.mark.parametrize(("axis", "turns"), [("tensor", False), ("replica", True)])
def test_the_compiled_step_transposes_partial_sums_only(axis: str, turns: bool) -> None:
    model = MODELS["mlp"](batch=64, widths=WIDTHS)
    plan = _planned(0.0, {axis: 8, "zero": 0}, WIDTHS)
    step = make_step(model.loss, model.optimizer, plan)
    text = step.lower(model.params, model.batch).compile().as_text()
    shapes = re.findall(r"f32\[(\d+),(\d+)\]\S* transpose\(", text or "")
    parts = [(rows, columns) for rows, columns in WEIGHTS]
    if axis == "tensor":
        parts += [(rows // 8, columns) for rows, columns in WEIGHTS]
        parts += [(rows, columns // 8) for rows, columns in WEIGHTS]
    found = {(int(rows), int(columns)) for rows, columns in shapes} & set(parts)
    assert found == (set(WEIGHTS) if turns else set())
