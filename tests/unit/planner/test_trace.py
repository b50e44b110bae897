"""The walk over a program: numbering, loops, branches, rematerialization, dims."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from dtft.checkpoint.state.tree import to_paths
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.tracing import trace


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def names(graph: Graph) -> list[str]:
    return [op.primitive for op in graph.operators]


def work(graph: Graph, **having: Any) -> float:
    """Operations of products that have these attributes."""
    found = [
        op for op in graph.operators
        if op.kind == "matmul" and all(getattr(op, k) == v for k, v in having.items())
    ]  # fmt: skip
    return sum(op.flops * op.trips for op in found)


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, y: (y / 2,))


def test_operators_are_numbered_depth_first_in_the_order_of_the_text() -> None:
    def step(x: jax.Array) -> Any:
        x = jnp.sin(x)
        x = jax.jit(lambda x: jax.jit(jnp.cos)(x) + 1.0)(x)
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)
        x = jax.checkpoint(lambda x: jnp.exp(x))(x)
        x = lax.while_loop(
            lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * c[1]), (0, x)
        )[1]
        x = lax.cond(x[0] > 0, lambda x: -x, lambda x: x - 1.0, x)
        return halved(jax.nn.relu(x))

    found = names(trace(step, array(4)))
    pick = ["gt", "convert_element_type"]
    kept = [name for name in found if name not in ("slice", "squeeze", *pick)]
    assert kept == [
        "sin", "cos", "add", "tanh", "exp",
        "lt", "add", "mul",  # the loop's condition, then its body
        "sub", "neg",  # branches: false, then true
        "max", "div",
    ]  # fmt: skip


def test_a_jitted_function_has_the_same_operators() -> None:
    plain, jitted = trace(block, X, W), trace(jax.jit(block), X, W)
    assert [op.primitive for op in plain.operators] == names(jitted)
    assert {op.name for op in jitted.operators} == {"jit(block)"}
    assert plain.dims == jitted.dims


def test_paths_are_numbers_of_arguments_or_their_names() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"w": [state["w"][0] + batch]}, jnp.sum(batch)

    graph = trace(step, {"w": [array(4)]}, batch=array(4))
    assert graph.inputs == {"0/w/0": 0, "batch": 1}
    assert list(graph.outputs) == ["0/w/0", "1"]
    assert graph.values[graph.outputs["0/w/0"]].dims == graph.values[0].dims


def test_two_leaves_of_one_path_are_refused() -> None:
    with pytest.raises(ValueError, match="two leaves at path '0/a%2Fb'"):
        trace(lambda tree: tree["a/b"], {"a/b": array(2), "a%2Fb": array(2)})


def test_paths_are_those_of_checkpoints() -> None:
    tree = {"mlp/~/linear_0": {"w": array(2)}, "mlp": {"~": [array(2)]}}
    graph = trace(lambda tree: tree, tree=tree)
    assert list(graph.outputs) == list(to_paths(tree))
    assert list(graph.inputs) == [f"tree/{path}" for path in to_paths(tree)]


def test_numbers_of_the_text_are_no_inputs() -> None:
    graph = trace(lambda x: jax.jit(lambda x: x * 2.0)(x), array(4))
    assert [op.inputs for op in graph.operators if op.primitive == "mul"] == [(0,)]


@given(st.integers(1, 6), st.integers(1, 4), st.booleans())
@settings(max_examples=15)
def test_a_scan_computes_what_its_unrolled_form_does(layers, width, remat) -> None:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w) + x, None

    body = jax.checkpoint(layer) if remat else layer

    def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(body, x, w)[0])

    def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
        for number in range(layers):
            x = body(x, w[number])[0]
        return jnp.sum(x)

    args = array(3, width), array(layers, width, width)
    for wrap in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
        graphs = [trace(wrap(form), *args) for form in (scanned, unrolled)]
        assert work(graphs[0]) == work(graphs[1])
        assert work(graphs[0], again=True) == work(graphs[1], again=True)
    assert trace(scanned, *args).flops == trace(unrolled, *args).flops


def test_dims_go_through_a_loop_and_its_leading_dim_is_the_loops() -> None:
    def run(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), c[:, 0]), x, w)

    graph = trace(run, array(3, 8), array(5, 8, 8))
    x, w = (graph.values[graph.inputs[name]] for name in "01")
    last, firsts = (graph.values[graph.outputs[name]] for name in "01")
    assert last.dims == x.dims == (x.dims[0], w.dims[1])
    assert w.dims[1] == w.dims[2]  # the carry comes out as it went in
    assert firsts.dims == (w.dims[0], x.dims[0])
    assert [graph.dims[dim].loop for dim in w.dims] == [True, False, False]
    (loop,) = graph.loops
    assert (loop.length, loop.primitive) == (5, "scan")
    assert loop.sliced[0][0] == graph.inputs["1"]
    assert loop.stacked[0][1] == graph.outputs["1"]
    assert loop.carried[0][0] == graph.inputs["0"]
    assert loop.carried[0][3] == graph.outputs["0"]
    assert graph.values[loop.sliced[0][1]].shape == (8, 8)
    ops = graph.operators[slice(*loop.operators)]
    assert {op.within for op in ops} == {(0,)} and {op.trips for op in ops} == {5}


def test_nested_loops_multiply() -> None:
    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(x), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(inner, x, None, length=3)[0], None

    graph = trace(lambda x: lax.scan(outer, x, None, length=4)[0], array(2))
    (op,) = graph.operators
    assert (op.trips, op.within, graph.flops) == (12, (0, 1), 24)


def test_of_branches_the_costliest_counts_and_all_are_numbered() -> None:
    def cheap(x: jax.Array) -> jax.Array:
        return x + 1.0

    def dear(x: jax.Array) -> jax.Array:
        return x @ x

    def run(i: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(i, [cheap, dear, cheap], x)

    graph = trace(run, array(dtype=jnp.int32), array(8, 8))
    assert graph.flops == 2 * 8**3
    assert [op.trips for op in graph.operators if op.flops] == [0, 1, 0]
    x, out = graph.values[graph.inputs["1"]], graph.values[graph.outputs[""]]
    assert out.dims == x.dims


def block(x: jax.Array, w: Any) -> jax.Array:
    return jnp.tanh(x @ w[0]) @ w[1]


X, W = array(4, 8), (array(8, 32), array(32, 8))
ONE = 2 * 4 * 8 * 32
"""Operations of one of the block's products."""


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, 1),  # the second product is only needed by what comes after
        (jax.checkpoint_policies.dots_saveable, 0),
        (jax.checkpoint_policies.everything_saveable, 0),
    ],
)
def test_what_a_backward_pass_computes_again_is_marked(policy: Any, again: int) -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.checkpoint(block, policy=policy)(x, w)))

    graph = trace(jax.grad(loss), W, X)
    # Forward two, backward two for the weights and one for the hidden layer.
    assert work(graph, again=True) == again * ONE
    assert work(graph, again=False) == 5 * ONE


def test_without_a_gradient_nothing_is_computed_again() -> None:
    graph = trace(lambda x, w: jax.checkpoint(block)(x, w), X, W)
    assert work(graph, again=True) == 0 and work(graph) == 2 * ONE


def test_a_custom_gradient_is_followed_in_both_passes() -> None:
    assert names(trace(halved, array(2))) == ["div"]
    graph = trace(jax.grad(lambda x: jnp.sum(halved(x))), array(2))
    assert names(graph).count("div") == 2


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_random_numbers_have_a_size(kind: str) -> None:
    def dropped(key: jax.Array, x: jax.Array) -> Any:
        key, one = jax.random.split(key)
        return key, jnp.where(jax.random.bernoulli(one, 0.5, x.shape), x, 0.0)

    key = jax.eval_shape(lambda: jax.random.key(0, impl=kind))
    graph = trace(dropped, key, X)
    size = graph.values[graph.inputs["0"]].num_bytes
    assert size == (8 if kind == "threefry2x32" else 16)
    assert all(graph.bytes_of(op) > 0 for op in graph.operators)
    assert not graph.unknown


def mesh(*sizes: int) -> jax.sharding.Mesh:
    axes = ("replica", "tensor")[: len(sizes)]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))


def test_inside_shard_map_collectives_have_a_kind_and_all_devices_work_counts() -> None:
    spec = PartitionSpec

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.psum(jnp.tanh(x @ up) @ down, "tensor")

    mapped = jax.shard_map(
        local,
        mesh=mesh(2, 4),
        in_specs=(spec("replica"), spec(None, "tensor"), spec("tensor")),
        out_specs=spec("replica"),
    )
    graph, whole = trace(mapped, X, *W), trace(block, X, W)
    assert graph.flops == whole.flops
    assert {op.manual for op in graph.operators} == {True}
    assert {op.manual for op in whole.operators} == {False}
    assert [op.primitive for op in graph.operators if op.kind == "collective"] in (
        ["psum"], ["psum_invariant"],
    )  # fmt: skip
    x, out = graph.values[graph.inputs["0"]], graph.values[graph.outputs[""]]
    assert out.shape == (4, 8)
    assert graph.values[graph.inputs["2"]].dims[1] == out.dims[1]
    assert x.dims[0] != out.dims[0]  # divided by hand: not the planner's to decide


@given(st.integers(0, 2**31))
@settings(max_examples=10)
def test_sizes_of_dims_are_those_of_the_values(seed: int) -> None:
    shape = tuple(np.random.default_rng(seed).integers(1, 5, 3).tolist())

    def run(x: jax.Array) -> Any:
        y = x.reshape(shape[0] * shape[1], shape[2])
        return lax.scan(lambda c, row: (c + row, row * c), jnp.zeros(shape[2]), y)

    graph = trace(run, array(*shape))
    held: dict[int, set[int]] = {number: set() for number in range(len(graph.dims))}
    for value in graph.values:
        assert len(value.dims) == len(value.shape)
        for dim, size in zip(value.dims, value.shape, strict=True):
            held[dim].add(size)
    for number, dim in enumerate(graph.dims):
        assert held[number] <= set(dim.sizes)
    assert graph.flops == 2 * math.prod(shape)


def test_every_value_read_is_an_argument_or_written_before_or_of_a_loop() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda c, _: (block(c, w), None))
        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    graph = trace(jax.value_and_grad(loss), W, X)
    known = set(graph.inputs.values())
    known |= {part for loop in graph.loops for _, part in loop.sliced}
    known |= {whole for loop in graph.loops for _, whole in loop.stacked}
    for loop in graph.loops:
        known |= {
            index for _, into, _, after in loop.carried for index in (into, after)
        }
    made = {index for op in graph.operators for index in op.outputs}
    loose = {i for op in graph.operators for i in op.inputs} - made - known
    # What is left are numbers of the text that a loop is begun with.
    assert all(graph.values[index].shape == () for index in loose)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (None, ""), ("default", ""), ("high", "high"), ("tensorfloat32", "high"),
        ("highest", "highest"), ("float32", "highest"),
        (("high", "highest"), "highest"), ("BF16_BF16_F32_X3", "BF16_BF16_F32_X3"),
    ],
)  # fmt: skip
def test_the_precision_of_products_is_kept(given: Any, known: str) -> None:
    like = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(lambda x, y: jnp.dot(x, y, precision=given), like, like)
    assert [op.precision for op in graph.operators] == [known]
    with jax.default_matmul_precision("highest"):
        graph = trace(lambda x, y: jnp.tanh(x @ y), like, like)
    assert [op.precision for op in graph.operators] == ["highest", ""]


def test_of_operands_of_two_dtypes_the_wider_counts() -> None:
    wide, narrow = (jax.ShapeDtypeStruct((8, 8), d) for d in (jnp.bfloat16, jnp.int8))
    for pair in ((wide, narrow), (narrow, wide)):
        graph = trace(
            lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32), *pair
        )
        (product,) = graph.operators
        assert graph.operand_dtype(product) == "bfloat16"
