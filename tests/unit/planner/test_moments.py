"""What is alive when: order of operators, what is kept, bytes on many meshes."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.planner.cluster import Cluster
from dtft.planner.ir import LONGEST_ROW, trace
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.op_groups import region
from dtft.planner.memory.liveness import InMemory, follow
from dtft.planner.memory.peak import LivenessTrace, PeakModel, Timeline
from dtft.planner.memory.schedule import scheduled
from dtft.planner.search import Choices, PlanSearch, decide, enumerate_space
from dtft.planner.software import EAGER, MEGATRON, XLA
from dtft.planner.spmd.partitioner import MICRO, ShardingAssignment
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import ADAM

SIZES = {
    "mlp": {"batch": 64, "widths": (16, 32, 32, 8)},
    "gpt_scan": {"batch": 8, "time": 16, "width": 32, "layers": 2, "heads": 4,
                 "vocabulary": 64},
    "rnn": {"batch": 8, "time": 4, "width": 16, "vocabulary": 32},
}  # fmt: skip


@cache
def question(name: str) -> Workload:
    model = MODELS[name](**SIZES[name])
    return of_loss(model.loss, ADAM, model.params, model.batch)


def trace_of(asked: Workload) -> LivenessTrace:
    return LivenessTrace(Timeline(graph=asked.graph, gathers=True, alias=asked.alias))


def division(asked: Workload) -> ShardingAssignment:
    axes = dict.fromkeys(asked.batch_dims, ("replica", "fsdp", MICRO))
    return ShardingAssignment(
        axes=axes, alias=asked.alias, scatters=True, first=asked.weights
    )


def sizes(replica=(1,), fsdp=(1,), micro=(1,)) -> dict[str, np.ndarray]:
    columns = {"replica": replica, "fsdp": fsdp, MICRO: micro}
    return {axis: np.array(column) for axis, column in columns.items()}


def made_before_read(graph: Graph) -> bool:
    made = {index: -1 for index in graph.inputs.values()}
    for number, operator in enumerate(graph.operators):
        made.update(dict.fromkeys(operator.outputs, number))
    return all(
        made.get(index, -1) < number
        for number, operator in enumerate(graph.operators)
        for index in operator.inputs
    )


@pytest.mark.parametrize("name", SIZES)
def test_the_order_is_one_in_which_the_program_can_run(name: str) -> None:
    before = question(name).graph
    after = scheduled(before)
    assert made_before_read(after)
    assert Counter(after.operators) == Counter(before.operators)
    for old, new in zip(before.loops, after.loops, strict=True):
        assert Counter(before.operators[slice(*old.operators)]) == Counter(
            after.operators[slice(*new.operators)]
        )


def test_products_that_only_the_update_reads_come_last() -> None:
    graph = scheduled(question("mlp").graph)
    kernels = {(16, 32), (32, 32), (32, 8), (32, 16), (8, 32)}
    backward = [
        graph.values[operator.outputs[0]].shape in kernels
        for operator in graph.operators
        if operator.kind == "matmul" and region(operator) == "backward"
    ]
    assert backward == [False, False, True, True, True]


@pytest.mark.parametrize("name", SIZES)
def test_what_comes_goes(name: str) -> None:
    timeline = Timeline(graph=question(name).graph, gathers=True)
    for one in (timeline, timeline.at_level_3):
        there: set[int] = set()
        for event in one.events:
            if event.kind == "alloc":
                assert event.value not in there
                there.add(event.value)
            elif event.kind == "free":
                there.remove(event.value)
        assert not there


def test_a_rectifier_has_no_memory_of_its_own_but_at_level_3() -> None:
    timeline = Timeline(graph=question("mlp").graph, gathers=True)

    def kept(one: Timeline) -> int:
        """Results of rectifiers in memory."""
        values = one.graph.values
        maxima = {
            operator.outputs[0]
            for operator in one.graph.operators
            if operator.primitive == "max"
            and len(values[operator.outputs[0]].shape) == 2
        }
        return len(maxima & {e.value for e in one.events if e.kind == "alloc"})

    assert kept(timeline) == 0 and kept(timeline.at_level_3) == 2


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("zero", range(4))
def test_many_meshes_at_once_are_each_by_itself(name: str, zero: int) -> None:
    asked = question(name)
    moments = PeakModel(trace_of(asked), division(asked))
    columns = [(1, 2, 4, 1, 2), (1, 1, 2, 4, 2), (1, 2, 1, 2, 1)]
    together = moments.on(sizes(*columns)).peak(zero)
    for at, (replica, fsdp, micro) in enumerate(zip(*columns, strict=True)):
        alone = moments.on(sizes((replica,), (fsdp,), (micro,))).peak(zero)
        assert together.activations[at] == pytest.approx(alone.activations[0])
        assert together.gradients[at] == pytest.approx(alone.gradients[0])


def test_levels_and_microbatches_change_what_they_should() -> None:
    asked = question("gpt_scan")
    moments = PeakModel(trace_of(asked), division(asked))
    total = sum(
        asked.graph.values[i].num_bytes for i in Timeline(graph=asked.graph).gradients
    )
    whole, parts = (moments.on(sizes(fsdp=(4,))).peak(zero) for zero in (0, 2))
    assert parts.gradients[0] < whole.gradients[0] <= total
    many = moments.on(sizes(micro=(8,))).peak(0)
    once = moments.on(sizes()).peak(0)
    assert many.gradients[0] >= total  # a sum of each is there all the time
    assert many.activations[0] < once.activations[0] / 4


def test_sums_over_microbatches_are_divided_as_soon_as_optimizer_state_is() -> None:
    asked = question("gpt_scan")
    parts = PeakModel(trace_of(asked), division(asked)).on(sizes(fsdp=(4,), micro=(4,)))
    total = sum(
        asked.graph.values[i].num_bytes for i in Timeline(graph=asked.graph).gradients
    )
    whole, divided = (parts.peak(zero).gradients[0] for zero in (0, 1))
    assert 0.5 * total < whole - divided <= 0.75 * total


def test_flat_buffers_divide_gradients_of_any_size() -> None:
    """Sizes of the model are powers of two: three devices divide no dim."""
    asked = question("mlp")

    def gradients(fsdp: int, zero: int, flat_state: bool) -> float:
        timeline = Timeline(graph=asked.graph, gathers=True, flat_state=flat_state)
        parts = PeakModel(LivenessTrace(timeline), division(asked))
        return parts.on(sizes(fsdp=(fsdp,), micro=(4,))).peak(zero).gradients[0]

    whole = gradients(3, 0, flat_state=False)
    assert gradients(3, 3, flat_state=False) == whole
    assert whole / 3 <= gradients(3, 3, flat_state=True) < 0.6 * whole
    even = [gradients(4, 3, flat_state) for flat_state in (False, True)]
    assert even[0] == even[1] < 0.6 * whole


def test_the_search_says_whether_buffers_are_flat() -> None:
    pool = Cluster.parse("3xA100").uniform
    space = enumerate_space(
        Choices(num_devices=3, batch=96, divides={"fsdp": ()}, levels=(3,), zero=(0, 3))
    )
    space = space.where(np.flatnonzero(space.columns["zero"] == 3))
    xla, megatron, eager = (
        PlanSearch(replace(question("mlp"), software=one), pool, scatters=True)
        .memory_of(space)["gradients"]
        .tolist()
        for one in (XLA, MEGATRON, EAGER)
    )
    assert len(xla) == 1
    assert megatron == eager and megatron < xla


def test_flat_buffers_are_not_laid_out_anew() -> None:
    """Only XLA keeps a part of a parameter with another dim first, at level 3."""
    asked = question("mlp")
    trees = (Timeline(graph=asked.graph, flat_state=flat) for flat in (False, True))
    turned, flat = (
        PeakModel(LivenessTrace(one), division(asked)).on(sizes(fsdp=(4,))).peak(3)
        for one in trees
    )
    assert turned.gradients == flat.gradients
    last = 4 * 32 * 8  # bytes of the last layer's weights; they are divided by columns
    assert turned.activations - flat.activations == last / 4


@pytest.mark.parametrize("vocabulary", [LONGEST_ROW, 2 * LONGEST_ROW])
def test_the_gradient_of_logits_takes_their_place_if_rows_are_long_or_divided(
    vocabulary: int,
) -> None:
    model = MODELS["gpt_scan"](**{**SIZES["gpt_scan"], "vocabulary": vocabulary})
    asked = of_loss(model.loss, ADAM, model.params, model.batch)
    logits = 4 * 8 * 16 * vocabulary
    words = asked.graph.values[asked.graph.inputs["params/embed"]].dims[0]
    rows = division(asked)
    both = replace(rows, axes={**rows.axes, words: ("tensor",)})
    one, many = (
        PeakModel(trace_of(asked), each).on(sizes() | {"tensor": np.array([1])}).peak(0)
        for each in (rows, both)
    )
    more = one.activations + one.gradients - many.activations - many.gradients
    assert more == pytest.approx(logits if vocabulary <= LONGEST_ROW else 0, rel=0.01)


def test_a_mask_of_positions_is_there_once_for_all_layers() -> None:
    model = MODELS["gpt"](batch=8, time=16, width=32, layers=3, heads=4, vocabulary=64)
    asked = of_loss(model.loss, ADAM, model.params, model.batch)
    timeline = Timeline(graph=asked.graph, gathers=True).at_level_3
    values = timeline.graph.values
    masks = [
        event.value
        for event in timeline.events
        if event.kind == "alloc"
        and values[event.value].dtype == "bool"
        and values[event.value].shape[-2:] == (16, 16)
    ]
    assert len(masks) == 1


def test_what_a_loop_reads_transposed_is_laid_out_anew_before_it() -> None:
    def loss(params, batch):
        def layer(x, w):
            turned = jnp.swapaxes(x @ w, 1, 2)
            return x + jnp.swapaxes(jnp.tanh(turned) ** 2, 1, 2), None

        return jnp.sum(jax.lax.scan(layer, batch["x"], params["w"])[0])

    params = {"w": jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)}
    asked = of_loss(loss, ADAM, params, batch).rematerialized("dots")
    values, events = asked.graph.values, Timeline(graph=asked.graph).events
    copied = [values[event.value].shape for event in events if event.kind == "copied"]
    assert copied == [(3, 4, 16, 8)]


def test_what_two_products_need_gathered_stays_so_between_them() -> None:
    asked = question("mlp")
    along, rows = trace_of(asked), division(asked)
    wide = asked.weight_dims.difference(asked.batch_dims)
    axes = {**rows.axes, **dict.fromkeys(wide, ("tensor",))}
    across = replace(rows, axes=axes)
    gathered = PeakModel(along, across).matrix
    along.rereads.clear()
    more = gathered - PeakModel(along, across).matrix
    hidden = 4 * 64 * 32  # of the second layer, and two cotangents like it
    assert (more >= 0).all() and more.max() == 3 * hidden


def test_operands_that_must_be_gathered_have_memory_then() -> None:
    def loss(params, batch):
        return jnp.sum((batch["x"] @ params["w"]) ** 2)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    asked = of_loss(loss, ADAM, {"w": array(1024, 8)}, {"x": array(4, 1024)})
    columns = asked.graph.values[asked.graph.inputs["params/w"]].dims[1]
    rows = division(asked)
    across = ShardingAssignment(
        axes={**rows.axes, columns: ("replica",)}, scatters=True
    )
    found = PeakModel(trace_of(asked), across).on(sizes((4,))).peak(0)
    # Rows and columns want the same axis: the smaller, the examples, is gathered. The
    # gradient, which is half of that, is all there is otherwise.
    assert found.activations[0] + found.gradients[0] >= 4 * 1024 * 4


def has_buffer(graph: Graph, primitive: str, *, keeps_all: bool = False) -> bool:
    """Whether the result of the only operator of a primitive is in memory."""
    (made,) = [one for one in graph.operators if one.primitive == primitive]
    (value,) = made.outputs
    return InMemory(graph, keeps_all=keeps_all).root(value) == frozenset((value,))


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [("float32", "bfloat16", True), ("bfloat16", "float32", False)],
)
def test_a_cast_to_fewer_bytes_is_kept_for_a_matmul(
    before: str, after: str, kept: bool
) -> None:
    def product(x_BD: jax.Array, w_DF: jax.Array) -> jax.Array:
        return x_BD @ w_DF.astype(after)

    graph = trace(
        product,
        jax.ShapeDtypeStruct((8, 4), after),
        jax.ShapeDtypeStruct((4, 6), before),
    )
    assert has_buffer(graph, "convert_element_type") == kept
    # The policy of ZeRO level 3 casts again.
    assert not has_buffer(graph, "convert_element_type", keeps_all=True)


def test_a_softmax_in_more_bytes_than_its_matmul_reads_is_kept_in_both() -> None:
    def attention(q_TH: jax.Array, k_TH: jax.Array, v_TH: jax.Array) -> jax.Array:
        scores_TT = jnp.einsum(
            "qh,kh->qk", q_TH, k_TH, preferred_element_type=jnp.float32
        )
        return jax.nn.softmax(scores_TT).astype(jnp.bfloat16) @ v_TH

    graph = trace(attention, *[jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)] * 3)
    memory = InMemory(graph, keeps_all=False)
    alone = [
        graph.values[value].dtype
        for value in memory.makers
        if graph.values[value].shape == (8, 8) and memory.root(value) == {value}
    ]
    assert alone == ["float32", "bfloat16"]


def test_a_norm_in_more_bytes_than_its_matmul_reads_is_kept_in_fewer() -> None:
    def product(x_BD: jax.Array, scale_1D: jax.Array, w_DF: jax.Array) -> jax.Array:
        wide_BD = x_BD.astype(jnp.float32)
        size_B1 = jnp.sum(wide_BD * wide_BD, -1, keepdims=True)
        return (wide_BD * size_B1 * scale_1D).astype(jnp.bfloat16) @ w_DF

    shapes = [((8, 4), jnp.bfloat16), ((1, 4), jnp.float32), ((4, 6), jnp.bfloat16)]
    graph = trace(product, *[jax.ShapeDtypeStruct(*it) for it in shapes])
    assert kept_like(graph, (8, 4)) == ["bfloat16"]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_cotangent_has_a_buffer_where_a_rematerialized_part_begins(
    prevent_cse: bool,
) -> None:
    def head(x_BD: jax.Array, w_DV: jax.Array) -> jax.Array:
        return (x_BD @ w_DV).astype(jnp.float32)

    def loss(x_BD: jax.Array, w_DV: jax.Array) -> jax.Array:
        part = jax.checkpoint(head, prevent_cse=prevent_cse)
        return jnp.sum(jnp.exp(part(jnp.tanh(x_BD), w_DV)))

    shapes = [(8, 4), (4, 6)]
    given = [jax.ShapeDtypeStruct(it, jnp.bfloat16) for it in shapes]
    graph = trace(jax.grad(loss, (0, 1)), *given)
    assert ("float32" in kept_like(graph, (8, 6))) == prevent_cse


def kept_like(graph: Graph, shape: tuple[int, ...]) -> list[str]:
    """Types of the computed values of a shape that have buffers, in program order."""
    memory = InMemory(graph, keeps_all=False)
    return [
        graph.values[value].dtype
        for value in memory.makers
        if graph.values[value].shape == shape and memory.root(value) == {value}
    ]


def test_a_copy_that_a_matmul_reads_is_what_was_copied() -> None:
    def product(x_BD: jax.Array, y_BD: jax.Array, w_DF: jax.Array) -> jax.Array:
        return jnp.copy(x_BD * y_BD) @ w_DF

    shapes = [(8, 4), (8, 4), (4, 6)]
    graph = trace(product, *[jax.ShapeDtypeStruct(it, jnp.float32) for it in shapes])
    assert "copy" in [one.primitive for one in graph.operators]
    assert has_buffer(graph, "mul")


@pytest.mark.parametrize(("approximate", "count"), [(True, 1), (False, 3)])
def test_an_exact_gelu_keeps_its_erfc_and_the_operand_of_it(
    approximate: bool, count: int
) -> None:
    graph = trace(
        lambda x_BD: jax.nn.gelu(x_BD, approximate) @ x_BD.T,
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
    )
    memory = InMemory(graph, keeps_all=False)
    alone = [
        value
        for value in memory.makers
        if graph.values[value].shape == (8, 4) and memory.root(value) == {value}
    ]
    assert len(alone) == count


def _delayed(x_TD: jax.Array) -> jax.Array:
    before = jnp.zeros_like(x_TD[0])
    return jax.lax.scan(lambda before, x: (x, before), before, x_TD)[1]


def _delayed_each(x_BTD: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda _, x_TD: (0, _delayed(x_TD)), 0, x_BTD)[1]


def _delayed_then_read(x_BTD: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda _, x_TD: (0, jnp.sin(_delayed(x_TD))), 0, x_BTD)[1]


@pytest.mark.parametrize(
    ("delay", "shape"),
    [(_delayed, (16, 8)), (_delayed_each, (4, 16, 8)), (_delayed_then_read, (4, 9, 8))],
)
def test_a_loop_that_only_moves_arrays_has_buffers(delay, shape) -> None:
    def loss(params, x):
        late = delay(x @ params["w"])
        return jnp.mean((late @ params["v"]) ** 2), late

    side = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    asked = of_loss(loss, ADAM, {"w": side, "v": side}, x)
    loops = [o for o in asked.graph.loops if o.operators[0] == o.operators[1]]
    assert loops
    found = follow(asked.graph)
    at = {(e.kind, e.value): n for n, e in enumerate(found.events) if e.kind != "runs"}
    for loop in loops:
        (read, _), (_, made) = loop.sliced[0], loop.stacked[0]
        assert at["alloc", made] < at["complete", made] < at["free", made]
        freed = [at.get(("free", root), np.inf) for root in found.roots[read]]
        assert at["alloc", made] < max(freed)
    assert decide(asked, Cluster.parse("8xcpu")).plan.memory["activations"]


def test_an_array_is_freed_after_the_loop_that_moves_it_though_another_follows() -> (
    None
):
    def loss(params, x):
        late = _delayed(x @ params["w"])
        layers = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), late, params["v"])
        return jnp.mean(layers[0] ** 2)

    shape = jax.ShapeDtypeStruct
    params = {"w": shape((8, 8), jnp.float32), "v": shape((3, 8, 8), jnp.float32)}
    graph = of_loss(loss, ADAM, params, shape((16, 8), jnp.float32)).graph
    moving, layers = graph.loops[:2]
    assert moving.operators == (layers.operators[0],) * 2
    assert layers.operators[1] - layers.operators[0] > 1
    found = follow(graph)
    ((read, _),) = moving.sliced
    (freed,) = (
        number
        for number, event in enumerate(found.events)
        if event.kind == "free" and event.value in found.roots[read]
    )
    assert any(event.kind == "alloc" for event in found.events[freed:])
