"""Every knob of a runnable plan shows in the program compiled for CPU devices."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtft
from dtft.parallel.planning.planned_step import jit_plan, make_step
from dtft.planner.aot.hlo import (
    Groups,
    HloProgram,
    Operation,
    collectives,
    groups_of,
    parse,
)
from dtft.planner.plan import Knobs
from dtft.planner.search.pins import PINS
from dtft.planner.search.space import CAPABILITIES, Capabilities
from tests.support.hlo import aliases
from tests.support.plans import (
    layers_batch,
    layers_loss,
    layers_params,
    plan_of,
    unrolled_loss,
)
from tests.support.zoo import MODELS

UP, UP_8, UP_4 = (4, 8, 32), (4, 8, 4), (4, 8, 8)
"""Shape of the layers' first matrices, and of an eighth and a quarter of them."""


ACROSS: Groups = ((0, 2, 4, 6), (1, 3, 5, 7))
NEIGHBOURS: Groups = ((0, 1, 2, 3), (4, 5, 6, 7))
"""Devices of four replicas where `tensor` lies within them, and without."""
HOST_MEMORY = "S(5)"
"""In XLA's layouts."""


AS_USERS: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": True}
"""Without it, as in all tests, XLA makes loops of some operators."""


@functools.cache
def compiled(
    loss: Callable[..., Any],
    axes: tuple[tuple[str, int], ...],
    knobs: Knobs | None = None,
    adam: bool = False,
    as_users: bool = False,
) -> str:
    """The text of a planned step."""
    optimizer = optax.adam(0.1) if adam else optax.sgd(0.1)
    params, batch, mesh = layers_params(), layers_batch(), dict(axes)
    plan = plan_of(params, batch, optimizer, mesh, knobs)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    step = make_step(loss, optimizer, plan, devices=devices)
    options = AS_USERS if as_users else None
    return step.lower(params, batch).compile(options).as_text() or ""


def operations(text: str) -> list[Operation]:
    """Of all computations, fused ones too."""
    return [op for ops in parse(text).computations.values() for op in ops]


def count(text: str, opcode: str) -> int:
    return sum(op.opcode == opcode for op in operations(text))


def runs(program: HloProgram, opcode: str, computation: str = "") -> int:
    """How often a step runs an operation."""
    found = 0
    for op in program.computations[computation or program.entry]:
        inside = sum(runs(program, opcode, name) for name in op.called)
        found += (op.opcode == opcode) + (op.trips or 1) * inside
    return found


def arguments(program: HloProgram) -> Counter[tuple[int, ...]]:
    """Shapes of what the program is given, on one device."""
    entry = program.computations[program.entry]
    return Counter(op.arrays[0].shape for op in entry if op.opcode == "parameter")


def loops(text: str) -> list[Operation]:
    return [op for op in operations(text) if op.opcode == "while"]


def test_microbatches_are_a_loop_of_so_many_trips() -> None:
    two = (("replica", 2),)
    assert not loops(compiled(unrolled_loss, two, as_users=True))
    (loop,) = loops(compiled(unrolled_loss, two, Knobs(microbatches=4), as_users=True))
    assert loop.trips == 4
    # 16 rows over 2 replicas and 4 parts; each device has the parts of its own rows.
    assert (4, 2, 6) in [array.shape for array in loop.arrays]


def test_remat_computes_operators_again() -> None:
    two = (("replica", 2),)
    none, dots, full = (
        compiled(unrolled_loss, two, Knobs(remat=remat))
        for remat in ("none", "dots", "full")
    )
    assert count(none, "dot") == count(dots, "dot") < count(full, "dot")
    assert count(none, "tanh") < count(dots, "tanh") <= count(full, "tanh")


def test_remat_of_a_scan_runs_its_layers_again() -> None:
    two = (("replica", 2),)
    none, dots, full = (
        parse(compiled(layers_loss, two, Knobs(remat=remat)))
        for remat in ("none", "dots", "full")
    )
    # Two matmuls a layer and the head: forward, and twice as many backward.
    assert runs(none, "dot") == runs(dots, "dot") == 3 * (4 * 2 + 1)
    assert runs(full, "dot") == runs(none, "dot") + 4 * 2
    assert runs(dots, "tanh") > runs(none, "tanh")


def test_zero_1_divides_the_optimizer_state() -> None:
    eight = (("replica", 8),)
    before = parse(compiled(layers_loss, eight, adam=True))
    after = parse(compiled(layers_loss, eight, Knobs(zero=1), adam=True))
    # A parameter and its two moments.
    assert arguments(before)[UP] == 3
    assert arguments(after)[UP] == 1
    assert arguments(after)[UP_8] == 2
    kinds = {
        (found.kind, found.axes)
        for found in collectives(
            compiled(layers_loss, eight, Knobs(zero=1), adam=True), dict(eight)
        )
    }
    assert kinds == {("all_reduce", ("replica",)), ("all_gather", ("replica",))}


def test_zero_2_divides_gradients_where_they_are_made() -> None:
    def backward(zero: Any) -> Counter[tuple[int, ...]]:
        axes, knobs = (("replica", 8),), Knobs(zero=zero)
        text = compiled(layers_loss, axes, knobs, adam=True, as_users=True)
        (loop,) = [loop for loop in loops(text) if "transpose(" in loop.source]
        return Counter(array.shape for array in loop.arrays)

    # The parameters of all layers, and their gradients.
    assert (backward(1)[UP], backward(1)[UP_8]) == (2, 0)
    assert (backward(2)[UP], backward(2)[UP_8]) == (1, 1)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_zero_3_gathers_each_layer_forward_and_backward(remat: Any) -> None:
    four = (("fsdp", 4),)
    text = compiled(layers_loss, four, Knobs(zero=3, remat=remat))
    assert arguments(parse(text))[UP_4] == 1
    assert not arguments(parse(text))[UP]
    gathers = [
        found
        for found in collectives(text, dict(four))
        if found.kind == "all_gather" and found.trips == 4
    ]
    backward = [found for found in gathers if "transpose(" in found.where]
    assert {found.axes for found in gathers} == {("fsdp",)}
    # Two matrices of a layer, whole, in the loop of each pass.
    assert sum(found.num_bytes for found in backward) == 2 * 8 * 32 * 4
    assert sum(found.num_bytes for found in gathers) == 4 * 8 * 32 * 4


def test_replica_reduces_gradients_over_its_groups() -> None:
    axes = (("replica", 4), ("tensor", 2))
    text = compiled(layers_loss, axes)
    found = collectives(text, dict(axes))
    assert (4, 6) in arguments(parse(text))
    assert any(
        one.kind == "all_reduce" and one.axes == ("replica",) and one.trips == 4
        for one in found
    )


def test_tensor_divides_matrices_and_reduces_over_its_groups() -> None:
    axes = (("replica", 4), ("tensor", 2))
    text = compiled(layers_loss, axes)
    found = collectives(text, dict(axes))
    assert arguments(parse(text))[(4, 8, 16)] == 1
    assert any("tensor" in one.axes and one.trips == 4 for one in found)


def test_sequence_divides_tokens_and_reduces_over_its_groups() -> None:
    params, batch, mesh = layers_params(), layers_batch(), {"replica": 2, "sequence": 3}
    optimizer = optax.sgd(0.1)
    plan = plan_of(params, batch, optimizer, mesh)
    divided = (("replica",), ("sequence",))
    plan = replace(plan, batch={path: divided for path in plan.batch})
    step = make_step(layers_loss, optimizer, plan, devices=jax.devices()[:6])
    text = step.lower(params, batch).compile().as_text()
    assert (8, 2) in arguments(parse(text))
    found = collectives(text or "", mesh)
    assert any("sequence" in one.axes for one in found)


def test_expert_divides_experts_and_reduces_over_its_groups() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        y_EBF = jnp.einsum("bd,edf->ebf", batch, params)
        return jnp.mean(jnp.sum(jnp.tanh(y_EBF), axis=0) ** 2)

    params, batch, mesh = jnp.ones((4, 8, 8)), jnp.ones((6, 8)), {"expert": 4}
    plan = plan_of(params, batch, optax.sgd(0.1), mesh)
    plan = replace(plan, state={"": (("expert",), (), ())})
    step = make_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:4])
    text = step.lower(params, batch).compile().as_text()
    assert (1, 8, 8) in arguments(parse(text))
    found = collectives(text or "", mesh)
    assert any(one.kind == "all_reduce" and one.axes == ("expert",) for one in found)


@pytest.mark.parametrize(
    ("order", "groups"),
    [(("replica", "tensor"), ACROSS), (("tensor", "replica"), NEIGHBOURS)],
)
def test_order_decides_which_devices_reduce_gradients(
    order: tuple[str, ...], groups: Groups
) -> None:
    params, batch, optimizer = layers_params(), layers_batch(), optax.sgd(0.1)
    found = dtft.plan(
        loss=layers_loss, optimizer=optimizer, params=params, batch=batch,
        cluster="8xcpu", replica=4, tensor=2, microbatches=1, zero=0, remat="none",
        order=order,
    )  # fmt: skip
    assert tuple(found.mesh) == order
    step = make_step(layers_loss, optimizer, found, devices=jax.devices()[:8])
    text = step.lower(params, batch).compile().as_text() or ""
    reduced = [op for op in operations(text) if op.opcode == "all-reduce"]
    of_replicas = {groups_of(op.attributes, found.mesh) for op in reduced}
    assert groups in of_replicas
    assert len({ACROSS, NEIGHBOURS} & of_replicas) == 1


def test_offload_takes_and_returns_optimizer_state_in_host_memory() -> None:
    params, batch, adam = layers_params(), layers_batch(), optax.adam(0.1)
    plan = plan_of(params, batch, adam, {"replica": 2}, Knobs(zero=1))
    host = tuple(path for path, spec in plan.optimizer.items() if len(spec) > 1)
    away = replace(plan, knobs=replace(plan.knobs, offload=True), host=host)
    found = []
    for one in (plan, away):
        step = make_step(layers_loss, adam, one, devices=jax.devices()[:2])
        text = step.lower(params, batch).compile().as_text() or ""
        (layouts,) = [it for it in text.splitlines() if "entry_computation" in it]
        found.append(layouts.count(HOST_MEMORY))
    # Two moments of four arrays, each given and returned.
    assert found == [0, 2 * 2 * 4]


def opaque(state: Mapping[str, Any], batch: Any) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(layers_loss)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def test_an_opaque_step_gets_shardings_constraints_and_donation() -> None:
    params, batch, mesh = layers_params(), layers_batch(), {"replica": 4, "tensor": 2}
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    plan = plan_of(state, batch, optax.sgd(0.1), mesh, Knobs(zero=1))
    momentum = {
        path: (*spec[:-1], ("replica", *spec[-1]))
        for path, spec in plan.state.items()
        if path == "momentum/layers/up"
    }
    plan = replace(
        plan,
        entry="step",
        optimizer={},
        state={**plan.state, **momentum},
        constraints={first_product(state, batch): (("replica",), ("tensor",), ())},
    )
    expected, value = jax.jit(opaque)(state, batch)
    run = jit_plan(plan, opaque)
    compiled = run.lower(state, batch).compile().as_text() or ""
    shapes = arguments(parse(compiled))
    assert shapes[(4, 8, 16)] == 1
    assert shapes[(4, 8, 4)] == 1
    assert len(aliases(compiled)) == len(jax.tree.leaves(state))
    # What the constraint asks of the first product: positions over tensor.
    assert (4, 3, 32) in {a.shape for op in operations(compiled) for a in op.arrays}
    placed = run.place(state)
    after, found = run(placed, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert float(found) == pytest.approx(float(value), rel=1e-6)
    for one, two in zip(
        jax.tree.leaves(expected), jax.tree.leaves(jax.device_get(after)), strict=True
    ):
        np.testing.assert_allclose(one, two, atol=1e-6)


def first_product(state: Any, batch: Any) -> int:
    from dtft.planner.ir.jaxprs import operators

    program = jax.make_jaxpr(opaque)(state, batch)
    names = [eqn.primitive.name for eqn in operators(program.jaxpr)]
    return names.index("dot_general")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry": "loss"}, "made for make_step"),
        ({"knobs": Knobs(microbatches=2)}, "microbatches=2: entry step on cpu runs"),
        ({"knobs": Knobs(remat="full")}, "remat=full: entry step on cpu runs none"),
        ({"state": {}}, "Not in the plan: momentum/embed"),
        ({"batch": {"tokens": ((), ())}}, "batch is another tree"),
    ],
)
def test_an_opaque_step_that_does_not_fit_is_refused(changes: Any, words: str) -> None:
    params, batch = layers_params(), layers_batch()
    state = {"params": params, "momentum": params}
    plan = plan_of(state, batch, optax.sgd(0.1), {"replica": 8})
    plan = replace(plan, entry="step", optimizer={})
    with pytest.raises(ValueError, match=words):
        jit_plan(replace(plan, **changes), opaque).lower(state, batch)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda state, batch: state, "step returned dict. Allowed: a pair"),
        (lambda state, batch: (state["a"], 0), "'a' from float32"),
        (lambda state, batch: ({"a": state["a"][1:]}, 0), r"float32\[4\] into"),
    ],
)
def test_a_step_must_return_its_state(step: Any, words: str) -> None:
    state, batch = {"a": jnp.ones(4)}, {"x": jnp.ones(8)}
    plan = plan_of(state, batch, optax.sgd(0.1), {"replica": 8})
    plan = replace(plan, entry="step", optimizer={})
    with pytest.raises(ValueError, match=words):
        jit_plan(plan, step).lower(state, batch)


REMAT = (
    test_remat_computes_operators_again,
    test_remat_of_a_scan_runs_its_layers_again,
)
SHOWN: Mapping[str, tuple[Callable[..., None], ...]] = {
    "replica": (test_replica_reduces_gradients_over_its_groups,),
    "fsdp": (test_zero_3_gathers_each_layer_forward_and_backward,),
    "tensor": (test_tensor_divides_matrices_and_reduces_over_its_groups,),
    "sequence": (test_sequence_divides_tokens_and_reduces_over_its_groups,),
    "expert": (test_expert_divides_experts_and_reduces_over_its_groups,),
    "order": (test_order_decides_which_devices_reduce_gradients,),
    "microbatches": (test_microbatches_are_a_loop_of_so_many_trips,),
    "remat=none": REMAT,
    "remat=dots": REMAT,
    "remat=full": REMAT,
    "zero=0": (test_zero_1_divides_the_optimizer_state,),
    "zero=1": (test_zero_1_divides_the_optimizer_state,),
    "zero=2": (test_zero_2_divides_gradients_where_they_are_made,),
    "zero=3": (test_zero_3_gathers_each_layer_forward_and_backward,),
    "offload": (test_offload_takes_and_returns_optimizer_state_in_host_memory,),
    "constraints": (test_an_opaque_step_gets_shardings_constraints_and_donation,),
}
"""What a runnable plan may set to the tests that show it in a compiled program."""
NOT_RUN = {"stage", "virtual_stages", "schedule", "stage_layers"}
"""Knobs of what-if plans. Of a config's own mesh, test_pipelined.py shows them."""


def settings(can: Capabilities) -> Iterator[str]:
    """What an entry can do, as in `SHOWN`."""
    yield "order"  # of any axes
    for field in fields(can):
        value = getattr(can, field.name)
        if field.name == "axes":
            yield from value
        elif isinstance(value, frozenset):
            yield from (f"{field.name}={one}" for one in value)
        elif value:
            yield field.name


def test_these_are_all_the_knobs_there_are() -> None:
    assert {it for can in CAPABILITIES.values() for it in settings(can)} == set(SHOWN)
    knobs = {it.partition("=")[0] for it in SHOWN}
    assert not knobs & NOT_RUN
    assert knobs - {"constraints"} | NOT_RUN == set(PINS)
    assert {field.name for field in fields(Knobs)} <= knobs | NOT_RUN


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_normalization_is_not_divided_because_its_gradients_are(zero: int) -> None:
    """Parameters are gathered, and nothing else of one number per channel."""
    model = MODELS["resnet"](batch=16, size=16, depths=(1, 1), width=16, classes=16)
    adam = model.optimizer
    found = dtft.plan(
        loss=model.loss, optimizer=adam, params=model.params, batch=model.batch,
        cluster="4xcpu", fsdp=4, replica=1, tensor=1, microbatches=1, remat="none",
        zero=zero,
    )  # fmt: skip
    step = make_step(model.loss, adam, found, devices=jax.devices()[:4])
    text = step.lower(model.params, model.batch).compile().as_text() or ""
    gathers = [op for op in operations(text) if op.opcode == "all-gather"]
    listed = [one.trips for one in found.collectives if one.kind == "all_gather"]
    assert len(gathers) == sum(listed)
