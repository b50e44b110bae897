"""Kernels that XLA does not make: cuDNN's attention, Pallas, and registered ones."""

import re
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import dtft
from dtft._jax_internals import cudnn_assumed, is_cudnn_installed
from dtft.planner import register_kernel
from dtft.planner.cluster import device_type
from dtft.planner.cost.compute import at_peak_s
from dtft.planner.ir import flops
from dtft.planner.ir.flops import ATTENTION, count
from dtft.planner.ir.graph import Graph, Operator, Value
from dtft.planner.ir.tracing import trace

without_cudnn = pytest.mark.skipif(
    is_cudnn_installed(), reason="this machine has cuDNN, so JAX refuses nothing"
)
BATCH, QUERIES, KEYS, HEADS, DEPTH = 4, 256, 384, 8, 64


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


QUERY = array(BATCH, QUERIES, HEADS, DEPTH)
KEY = array(BATCH, KEYS, HEADS, DEPTH)


def attend(q: Any, k: Any, v: Any, bias: Any = None, **keywords: Any) -> jax.Array:
    made = jax.nn.dot_product_attention(
        q, k, v, bias, implementation="cudnn", **keywords
    )
    return made.astype(jnp.float32).sum()


def gradients(num: int, **keywords: Any) -> Any:
    return jax.grad(partial(attend, **keywords), tuple(range(num)))


def kernels(graph: Graph) -> list[Operator]:
    return [operator for operator in graph.operators if operator.kind == "kernel"]


def dims(graph: Graph, index: int) -> tuple[int, ...]:
    return graph.values[index].dims


def test_forward_and_backward_take_two_and_five_products() -> None:
    graph = trace(gradients(3), QUERY, KEY, KEY)
    forward, backward = kernels(graph)
    assert (forward.primitive, backward.primitive) == ATTENTION
    product = 2 * BATCH * HEADS * QUERIES * KEYS * DEPTH
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert not graph.unknown


def test_scores_that_a_mask_hides_are_not_computed() -> None:
    whole = 2 * 2 * BATCH * HEADS * DEPTH

    def found(**keywords: Any) -> float:
        return kernels(trace(partial(attend, **keywords), QUERY, QUERY, QUERY))[0].flops

    assert found() == whole * QUERIES**2
    assert found(is_causal=True) == whole * QUERIES * (QUERIES + 1) / 2
    near = found(is_causal=True, local_window_size=(31, 0))
    assert near == whole * QUERIES * 32


def test_examples_and_heads_may_be_divided_and_nothing_else() -> None:
    graph = trace(gradients(3), QUERY, KEY, KEY)
    for operator in kernels(graph):
        query, key = (dims(graph, index) for index in operator.inputs[:2])
        assert query[0] == key[0] and query[2] == key[2]
        assert {query[1], query[3], key[1], key[3]} <= set(operator.whole)
        assert not {query[0], query[2]} & set(operator.whole)
        for index in operator.outputs:
            assert {query[0], query[2]} <= set(dims(graph, index))
    forward, backward = kernels(graph)
    output, sums = (dims(graph, index) for index in forward.outputs)
    assert sums == (output[0], output[2], output[1])
    assert [dims(graph, i) for i in backward.outputs] == [
        dims(graph, i) for i in backward.inputs[:3]
    ]


def test_groups_of_heads_are_divided_whole() -> None:
    few = array(BATCH, QUERIES, 2, DEPTH)
    graph = trace(gradients(3), QUERY, few, few)
    heads = dims(graph, kernels(graph)[0].inputs[0])[2]
    assert graph.dims[heads].sizes == (2, HEADS)
    assert kernels(graph)[0].flops == 4 * BATCH * HEADS * QUERIES**2 * DEPTH


def test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_to() -> None:
    bias = array(1, HEADS, QUERIES, QUERIES)
    graph = trace(gradients(4), QUERY, QUERY, QUERY, bias)
    forward, backward = kernels(graph)
    query, found = (dims(graph, backward.inputs[i]) for i in (0, 3))
    assert found[1] == query[2] and found[0] != query[0]
    assert backward.summed == (query[0],) and forward.summed == ()
    assert dims(graph, backward.outputs[3]) == found


def test_heads_may_come_before_positions() -> None:
    class Mask(Enum):
        NO_MASK = 0

    params = {"layout": 1, "mask_type": Mask.NO_MASK, "sliding_window_length": None}
    query, key = array(BATCH, HEADS, QUERIES, 64), array(BATCH, HEADS, KEYS, 64)
    value = array(BATCH, HEADS, KEYS, 32)
    rows = 2 * BATCH * HEADS * QUERIES * KEYS
    counted = [count(name, (query, key, value), (), params) for name in ATTENTION]
    assert counted == [("kernel", rows * 96), ("kernel", rows * (3 * 64 + 2 * 32))]


@without_cudnn
def test_jax_is_as_before_after_tracing() -> None:
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attend(*(np.zeros(one.shape, one.dtype) for one in (QUERY, KEY, KEY)))
    trace(attend, QUERY, KEY, KEY)
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: 1 / 0, QUERY)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attend(*(np.zeros(one.shape, one.dtype) for one in (QUERY, KEY, KEY)))


@without_cudnn
def test_a_thread_that_ends_first_leaves_the_others_tracing() -> None:
    with cudnn_assumed():
        with cudnn_assumed():
            assert not is_cudnn_installed()
        jax.make_jaxpr(attend)(QUERY, KEY, KEY)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attend(*(np.zeros(one.shape, one.dtype) for one in (QUERY, KEY, KEY)))


def model(implementation: Literal["cudnn", "xla"]) -> tuple[Any, Any, Any]:
    """The loss of an attention block of width 1024, its parameters and batch."""
    width, length = 1024, 1024

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", x, params[name]) for name in ("q", "k", "v")
        )
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code needs it
            made = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
        made = jnp.einsum("bthk,hkd->btd", made, params["out"])
        return (made.astype(jnp.float32) ** 2).mean()

    params = {name: array(width, 8, 128) for name in ("q", "k", "v")}
    params["out"] = array(8, 128, width)
    return loss, params, {"x": array(16, length, width)}


def planned(implementation: Literal["cudnn", "xla"], **pins: Any) -> dtft.Plan:
    loss, params, batch = model(implementation)
    return dtft.plan(
        loss=loss, optimizer=optax.sgd(0.1), params=params, batch=batch, **pins
    )


@pytest.mark.parametrize("mesh", [{"replica": 8}, {"replica": 2, "tensor": 4}])
def test_a_plan_divides_the_kernel_as_it_divides_xlas_attention(mesh: Any) -> None:
    pins: dict[str, Any] = {"cluster": "1x8xh100", "microbatches": 1, "zero": 0, **mesh}
    pins["remat"] = "none"
    fused, plain = planned("cudnn", **pins), planned("xla", **pins)
    assert (fused.state, fused.batch) == (plain.state, plain.batch)

    def sent(plan: dtft.Plan) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for one in plan.collectives:
            found[one.kind, one.axes, one.num_bytes] += one.trips
        return found

    assert sent(fused) == sent(plain)
    assert fused.prediction.step_s < plain.prediction.step_s
    assert fused.memory["activations"] < plain.memory["activations"] / 2
    assert any(lint.kind == "attention" for lint in plain.lints())
    assert not any(lint.kind == "attention" for lint in fused.lints())


def test_explain_counts_the_kernel_as_attention() -> None:
    text = planned("cudnn", cluster="1xh100").explain()
    assert re.search(r"attention +\d", text) and f"{ATTENTION[1]} 16x1024" in text


def test_the_lower_bound_has_the_kernels_operations() -> None:
    loss, params, batch = model("cudnn")
    graph = trace(loss, params, batch)
    pool = dtft.planner.Cluster.parse("1xh100").uniform
    assert at_peak_s(graph, pool, kernels(graph)) == pytest.approx(
        kernels(graph)[0].flops / pool.device.peak("bfloat16")
    )


@without_cudnn
def test_attention_of_cudnn_is_verified_where_cudnn_is() -> None:
    with pytest.raises(ValueError, match=r"verify=2 .* this machine has no cuDNN"):
        planned("cudnn", cluster="1xh100", verify=2)


def test_remat_dots_keeps_the_result_of_attention() -> None:
    def flops_of(remat: str) -> float:
        plan = planned("cudnn", cluster="1xh100", remat=remat, microbatches=1)
        return plan.prediction.terms["compute"]

    assert flops_of("none") <= flops_of("dots") <= flops_of("full")


# ------------------------------------------------------------- other custom kernels


@pytest.fixture
def registry() -> Iterator[None]:
    before, slow = dict(flops._KERNELS), set(flops.MMA_SYNC)
    yield
    flops._KERNELS.clear()
    flops._KERNELS.update(before)
    flops.MMA_SYNC.clear()
    flops.MMA_SYNC.update(slow)


def doubled(cost: pl.CostEstimate | None) -> Any:
    def kernel(read: Any, write: Any) -> None:
        write[...] = read[...] * 2

    def call(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel, out_shape=array(8, 128), cost_estimate=cost, name="doubling"
        )(x)

    return call


def test_a_pallas_kernel_says_itself_what_it_computes() -> None:
    cost = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=11)
    (found,) = trace(doubled(cost), array(8, 128)).operators
    assert (found.primitive, found.kind, found.flops) == ("doubling", "kernel", 7)


def test_a_registered_rule_prices_a_kernel(registry: None) -> None:
    silent = trace(doubled(None), array(8, 128))
    assert silent.unknown == {"doubling": 2 * 8 * 128 * 2}
    register_kernel("doubling", lambda read, made, params: 3 * made[0].shape[0])
    known = trace(doubled(None), array(8, 128))
    assert known.operators[0].flops == 24 and not known.unknown
    estimated = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=11)
    assert trace(doubled(estimated), array(8, 128)).operators[0].flops == 24


def test_a_kernel_of_mma_sync_is_slower_since_hopper(registry: None) -> None:
    """By `Efficiency.mma_sync`, and only if it is registered so."""

    def loss(params: Any, batch: Any) -> jax.Array:
        read = doubled(None)(batch["x"])
        return (params["w"] * read).astype(jnp.float32).sum()

    def seconds(cluster: str, mma_sync: bool) -> float:
        register_kernel("doubling", lambda *_: 1e15, mma_sync=mma_sync)
        plan = dtft.plan(
            loss=loss,
            optimizer=optax.sgd(0.1),
            params={"w": array(8, 128)},
            batch={"x": array(8, 128)},
            cluster=cluster,
        )
        return plan.prediction.terms["compute"]

    slower = seconds("1xh100", True) / seconds("1xh100", False)
    assert slower == pytest.approx(
        1 / device_type("h100").efficiency.mma_sync, rel=0.01
    )
    assert seconds("1xa100", True) == seconds("1xa100", False)


def test_the_target_of_an_ffi_call_is_its_name(registry: None) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("someones_target", array(8, 128))(x)

    assert trace(call, array(8, 128)).operators[0].primitive == "someones_target"
    register_kernel("someones_target", lambda read, made, params: 5)
    assert trace(call, array(8, 128)).operators[0].flops == 5


def test_a_rule_of_the_planner_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="name='tanh' has a rule in the planner"):
        register_kernel("tanh", lambda read, made, params: 0)


def test_lints_name_what_has_no_rule() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        read = doubled(None)(batch["x"])
        return (params["w"] * read).astype(jnp.float32).sum()

    plan = dtft.plan(
        loss=loss,
        optimizer=optax.sgd(0.1),
        params={"w": array(8, 128)},
        batch={"x": array(8, 128)},
        cluster="1xh100",
    )
    (lint,) = (one for one in plan.lints() if one.kind == "unpriced")
    assert "doubling has no rule" in lint.text and "4 KiB" in lint.text
    assert "register_kernel('doubling', flops)" in lint.text


def kernel_lints(plan: dtft.Plan) -> list[str]:
    return [one.text for one in plan.lints() if one.kind == "unsupported"]


@pytest.mark.parametrize("cluster", ["1xv100", "1xt4", "1xcpu", "1xtpu-v5e"])
def test_lints_name_attention_of_cudnn_where_it_does_not_run(cluster: str) -> None:
    (text,) = kernel_lints(planned("cudnn", cluster=cluster, remat="none"))
    assert f"does not run on {cluster[2:]}" in text
    assert "compute capability 8.0" in text and "implementation='xla'" in text
    assert not kernel_lints(planned("xla", cluster=cluster, remat="none"))


@pytest.mark.parametrize("cluster", ["1xa100", "1xh100", "1xb200"])
def test_attention_of_cudnn_runs_since_ampere(cluster: str) -> None:
    assert not kernel_lints(planned("cudnn", cluster=cluster, remat="none"))


@pytest.mark.parametrize(
    ("rule", "runs", "fails"),
    [
        ({"platforms": ("tpu",)}, "1xtpu-v4", "1xh100"),
        ({"platforms": ("cuda", "tpu")}, "1xv100", "1xcpu"),
        ({"needs_dtype": "float8_e4m3fn"}, "1xh100", "1xa100"),
    ],
)
def test_a_registered_kernel_says_on_which_devices_it_runs(
    registry: None, rule: dict[str, Any], runs: str, fails: str
) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        read = doubled(None)(batch["x"])
        return (params["w"] * read).astype(jnp.float32).sum()

    def texts(cluster: str) -> list[str]:
        matrix = array(8, 128)
        return kernel_lints(
            dtft.plan(
                loss=loss,
                optimizer=optax.sgd(0.1),
                params={"w": matrix},
                batch={"x": matrix},
                cluster=cluster,
            )
        )

    register_kernel("doubling", lambda *_: 1.0, **rule)
    assert not texts(runs)
    (text,) = texts(fails)
    assert f"the kernel doubling does not run on {fails[2:]}" in text
    register_kernel("doubling", lambda *_: 1.0)
    assert not texts(fails)


def test_a_platform_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpu' is no platform. Allowed: cpu, cuda"):
        register_kernel("anything", lambda *_: 1.0, platforms=("gpu",))


def test_lints_name_loops_of_unknown_length() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        def going(x: jax.Array) -> jax.Array:
            return x.sum() < 10

        after = jax.lax.while_loop(going, lambda x: x * 2, batch["x"])
        return (params["w"] * after).sum()

    plan = dtft.plan(
        loss=loss,
        optimizer=optax.sgd(0.1),
        params={"w": array(8, 128, dtype=jnp.float32)},
        batch={"x": array(8, 128, dtype=jnp.float32)},
        cluster="1xh100",
    )
    (lint,) = (one for one in plan.lints() if one.kind == "unpriced")
    assert "priced as one iteration" in lint.text


def test_values_of_no_kernel_are_unchanged() -> None:
    graph = trace(attend, QUERY, KEY, KEY)
    assert graph.values[graph.inputs["0"]] == Value(
        shape=QUERY.shape, dtype="bfloat16", dims=dims(graph, graph.inputs["0"])
    )


def test_letters_say_which_dims_of_a_kernel_are_divided_alike() -> None:
    """A kernel that brings tokens [b, t, d] to places [e, b, p, d] of experts."""
    register_kernel("tokens_to_places", lambda *_: 0, dims="btd->ebpd")
    made = jax.ShapeDtypeStruct((4, 2, 6, 8), jnp.bfloat16)
    graph = trace(jax.ffi.ffi_call("tokens_to_places", made), array(2, 12, 8))
    (moved,) = kernels(graph)
    given, placed = dims(graph, moved.inputs[0]), dims(graph, moved.outputs[0])
    assert (placed[1], placed[3]) == (given[0], given[2])
    assert not {placed[0], placed[2]} & set(given)
    assert moved.whole == (given[1],)


@pytest.mark.parametrize(
    ("dims", "whole", "said"),
    [
        ("btd", "", "dims='btd'"),
        ("", "t", "dims='', whole='t'"),
        ("btd->btd", "s", "whole='s'"),
    ],
)
def test_letters_that_say_nothing_are_refused(dims: str, whole: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} of kernel 'odd_letters'|{said}"):
        register_kernel("odd_letters", lambda *_: 0, dims=dims, whole=whole)


def test_letters_of_other_ranks_are_refused_with_the_shapes() -> None:
    register_kernel("of_three_dims", lambda *_: 0, dims="btd->btd")
    made = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"dims='btd->btd'.*\(4, 8\), \(4, 8\)"):
        trace(jax.ffi.ffi_call("of_three_dims", made), array(4, 8))
