"""A planned step computes what the undivided one computes, whatever its knobs are."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtft.checkpoint.state import tree
from dtft.optim.max_adabelief import max_adabelief
from dtft.parallel.grad_accumulation import accumulated
from dtft.parallel.planning.planned_step import PlannedStep, make_step
from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Knobs
from dtft.planner.search.decision import decide
from dtft.planner.workload import of_loss
from tests.support.plans import (
    layers_batch,
    layers_loss,
    layers_params,
    num_tokens,
    plan_of,
    unrolled_loss,
)

ADAMW = optax.adamw(1e-2)
BELIEF = max_adabelief(1e-2)
THREE = {"replica": 2, "fsdp": 2, "tensor": 2}


def step_of(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mapping[str, int],
    knobs: Knobs,
) -> PlannedStep:
    plan = plan_of(layers_params(), layers_batch(), optimizer, mesh, knobs)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return make_step(loss, optimizer, plan, weight=num_tokens, devices=devices)


def run(step: PlannedStep, num_steps: int = 2) -> tuple[Any, list[float]]:
    state, losses = step.init(layers_params()), []
    for _ in range(num_steps):
        state, loss = step.step(state, layers_batch())
        losses.append(float(loss))
    return jax.device_get(state), losses


@functools.cache
def plain(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, num_steps: int
) -> tuple[Any, list[float]]:
    """The update as one writes it, on one device."""
    params, losses = layers_params(), []
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)

        @jax.jit
        def update(params: Any, opt_state: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        for _ in range(num_steps):
            params, opt_state, value = update(params, opt_state, layers_batch())
            losses.append(float(value))
    return {"params": params, "opt_state": opt_state}, losses


@pytest.mark.parametrize(
    ("loss", "optimizer", "mesh", "knobs"),
    [
        (layers_loss, BELIEF, {"replica": 4}, Knobs(zero=2, microbatches=2)),
        (layers_loss, ADAMW, THREE, Knobs(zero=3, remat="full", microbatches=2)),
        (unrolled_loss, BELIEF, {"fsdp": 4}, Knobs(zero=3, remat="dots")),
        (layers_loss, ADAMW, {"replica": 4}, Knobs(zero=1)),
    ],
)
def test_it_computes_what_the_undivided_step_computes(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mapping[str, int],
    knobs: Knobs,
) -> None:
    expected, before = plain(loss, optimizer, 2)
    found, after = run(step_of(loss, optimizer, mesh, knobs))
    np.testing.assert_allclose(before, after, rtol=1e-6)
    leaves = tree.to_paths(found)
    for path, leaf in tree.to_paths(expected).items():
        # Moments are small, and Adam divides small numbers by small numbers.
        np.testing.assert_allclose(
            leaf, leaves[path], rtol=2e-4, atol=2e-6, err_msg=path
        )


def test_gradients_of_a_divided_loss_are_those_of_the_whole() -> None:
    # With plain descent of rate 1 the parameters are their gradients.
    expected, _ = plain(layers_loss, optax.sgd(1.0), 1)
    step = step_of(layers_loss, optax.sgd(1.0), THREE, Knobs(zero=3, microbatches=2))
    found, _ = run(step, 1)
    for path, leaf in tree.to_paths(expected).items():
        np.testing.assert_allclose(leaf, tree.to_paths(found)[path], atol=3e-7)


@pytest.mark.parametrize("number", [3, 0.5, True])
@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_a_weight_may_be_a_python_number(number: float, promotion: str) -> None:
    def loss(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.mean(batch @ params), jnp.mean(batch)

    params, batch = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
    divided = accumulated(
        loss,
        2,
        lambda part: number,
        pin=lambda gradients: gradients,
        divide=lambda batch: batch.reshape(2, 2, 3),
    )
    with jax.numpy_dtype_promotion(promotion):
        found = jax.jit(divided)(params, batch)
    expected = jax.value_and_grad(loss, has_aux=True)(params, batch)
    jax.tree.map(np.testing.assert_allclose, found, expected)


def masked(params: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    error = jnp.sin(batch["x"] @ params).sum(axis=1)
    mean = jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
    return mean, {"mean": mean}


def in_two(weight: Any, mask: Any, dtype: Any) -> tuple[Any, Any]:
    """Results and gradients of `masked` in two parts, and in one."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(4, 4)), dtype)
    batch = {
        "x": jnp.asarray(rng.normal(size=(8, 4)), dtype),
        "mask": jnp.asarray(mask, dtype),
    }
    divided = accumulated(
        *(masked, 2, weight),
        pin=lambda gradients: gradients,
        divide=lambda batch: jax.tree.map(
            lambda leaf: leaf.reshape(2, 4, *leaf.shape[1:]), batch
        ),
    )
    found = jax.jit(divided)(params, batch)
    return found, jax.value_and_grad(masked, has_aux=True)(params, batch)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_part_whose_rows_are_all_masked_does_not_count(empty: int) -> None:
    mask = np.ones((2, 4))
    mask[empty] = 0.0
    found, expected = in_two(lambda part: part["mask"].sum(), mask.ravel(), jnp.float32)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )


def test_parts_that_are_all_masked_are_nan_as_the_whole_is() -> None:
    found, _ = in_two(lambda part: part["mask"].sum(), np.zeros(8), jnp.float32)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(found))


def test_large_weights_keep_sums_of_float16_finite() -> None:
    found, expected = in_two(lambda part: 40_000, np.ones(8), jnp.float16)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01),
        *(found, expected),
    )


def test_on_one_device_without_knobs_it_is_the_same_bits() -> None:
    expected, before = plain(layers_loss, BELIEF, 2)
    found, after = run(step_of(layers_loss, BELIEF, {"replica": 1}, Knobs()))
    assert before == after
    for path, leaf in tree.to_paths(expected).items():
        assert np.array_equal(leaf, tree.to_paths(found)[path]), path


def test_parameters_stay_usable_and_the_state_is_donated() -> None:
    params = layers_params()
    step = step_of(layers_loss, optax.sgd(0.1), {"replica": 4}, Knobs(microbatches=2))
    state = step.init(params)
    after, _ = step.step(state, layers_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, after)))


def test_a_restored_state_is_placed_and_goes_on() -> None:
    step = step_of(layers_loss, ADAMW, {"replica": 4}, Knobs(zero=1))
    state, _ = step(step.init(layers_params()), layers_batch())
    restored = jax.device_get(state)
    expected, loss = step.step(state, layers_batch())
    again = step_of(layers_loss, ADAMW, {"replica": 4}, Knobs(zero=1))
    placed = again.place(restored)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    assert shardings == step.state_shardings(layers_params())
    found, again_loss = again(restored, layers_batch())
    assert float(loss) == float(again_loss)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_keys_with_a_slash_are_planned_and_run() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["in/put"] @ params["mlp/~/linear_0"]["w"]) ** 2)

    params = {"mlp/~/linear_0": {"w": jnp.ones((8, 8))}}
    batch = {"in/put": jnp.arange(64.0).reshape(8, 8) / 64}
    asked = of_loss(loss=loss, optimizer=ADAMW, params=params, batch=batch)
    plan = decide(asked, Cluster.parse("2xcpu"), {"fsdp": 2, "zero": 3}).plan
    step = make_step(loss, ADAMW, plan, devices=jax.devices()[:2])
    _, value = step.step(step.init(params), batch)
    assert float(value) == pytest.approx(float(loss(params, batch)), rel=1e-6)


def test_a_loss_with_a_shard_map_is_planned_and_runs() -> None:
    spec = jax.sharding.PartitionSpec
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("all",), kinds, devices=jax.devices()[:2])

    def local(x: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.tanh(x) @ down, "all")

    by_hand = jax.shard_map(
        local, mesh=mesh, in_specs=(spec(None, "all"), spec("all")), out_specs=spec()
    )

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(by_hand(batch @ params["up"], params["down"]) ** 2)

    params = {"up": jnp.ones((4, 8)) / 7, "down": jnp.ones((8, 4)) / 9}
    batch = jnp.arange(32.0).reshape(8, 4) / 32
    asked = of_loss(loss=loss, optimizer=ADAMW, params=params, batch=batch)
    plan = decide(asked, Cluster.parse("2xcpu"), {"tensor": 2}).plan
    step = make_step(loss, ADAMW, plan, devices=jax.devices()[:2])
    state, value = step.step(step.init(params), batch)
    expected, gradients = jax.value_and_grad(loss)(params, batch)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    moments = tree.to_paths(jax.device_get(state["opt_state"]))
    for path, gradient in gradients.items():
        np.testing.assert_allclose(moments[f"0/mu/{path}"], gradient / 10, rtol=1e-5)


def test_it_returns_what_the_loss_returns() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params) ** 2), {"mean": jnp.mean(batch["x"])}

    params, batch = jnp.ones((4, 2)), {"x": jnp.arange(32.0).reshape(8, 4)}
    knobs = Knobs(microbatches=2)
    plan = plan_of(params, batch, optax.sgd(0.1), {"replica": 4}, knobs)
    step = make_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:4])
    state, (value, aux) = step.step(step.init(params), batch)
    expected, aux_expected = loss(params, batch)
    assert float(value) == pytest.approx(float(expected))
    assert float(aux["mean"]) == pytest.approx(float(aux_expected["mean"]))
    assert state["params"].shape == (4, 2)


def test_arrays_without_rows_belong_to_every_part() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        noise = jax.random.normal(batch["key"], (4,))
        return jnp.mean((batch["x"] + noise[None]) @ params) * batch["scale"]

    params = jnp.ones((4, 2))
    batch = {
        "x": jnp.ones((8, 4)),
        "key": jax.random.key(3),
        "scale": jnp.float32(2.0),
    }
    plan = plan_of(params, batch, optax.sgd(0.1), {"replica": 2}, Knobs(microbatches=4))
    step = make_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:2])
    _, value = step.step(step.init(params), batch)
    assert float(value) == pytest.approx(float(loss(params, batch)), rel=1e-6)


def test_shardings_are_trees_like_the_arrays() -> None:
    step = step_of(layers_loss, ADAMW, {"replica": 4, "tensor": 2}, Knobs(zero=2))
    shardings = step.state_shardings(layers_params())
    state = step.init(layers_params())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    moments = tree.to_paths(state["opt_state"])["0/mu/layers/up"]
    assert moments.sharding.shard_shape((4, 8, 32)) == (4, 2, 16)
    assert state["params"]["layers"]["up"].sharding.shard_shape((4, 8, 32)) == (
        *(4, 8, 16),
    )
    batch = jax.device_put(layers_batch(), step.batch_shardings(layers_batch()))
    assert batch["tokens"].sharding.shard_shape((16, 6)) == (4, 6)


def changed(**parts: Any) -> Any:
    plan = plan_of(layers_params(), layers_batch(), ADAMW, {"replica": 8}, Knobs())
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return type(plan)(**{**values, **parts})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"entry": "step"}, r"made for plan.jit\(step\)"),
        ({"mesh": {"replica": 16}}, "8 of them, but the plan's mesh replica=16 has 16"),
        ({"mesh": {"stage": 8}}, "mesh.stage=8: entry loss on cpu runs expert, fsdp"),
        ({"knobs": Knobs(remat="some")}, "remat=some"),  # pyright: ignore
    ],
)
def test_a_plan_that_cannot_run_is_refused(parts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_step(layers_loss, ADAMW, changed(**parts))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"state": {"embed": ((), ())}}, "params is another tree than the plan"),
        ({"batch": {"tokens": ((),)}}, "Not in the plan: mask"),
        (
            {"batch": {"tokens": ((),), "mask": ((), ())}},
            r"batch 'tokens' has the shape \(16, 6\)",
        ),
        (
            {"batch": {"tokens": ((), ("replica",)), "mask": ((), ())}},
            "dim 1 is not divisible by 8",
        ),
        ({"knobs": Knobs(microbatches=4)}, "not divisible by 32"),
        ({"optimizer": {}}, "optimizer is another tree"),
    ],
)
def test_what_does_not_fit_the_plan_is_named(parts: Any, words: str) -> None:
    step = make_step(layers_loss, ADAMW, changed(**parts))
    with pytest.raises(ValueError, match=words):
        step.lower(layers_params(), layers_batch())


def test_a_table_in_the_batch_is_not_cut_into_parts() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params) * jnp.mean(batch["table"])

    params = jnp.ones((4, 2))
    batch = {"x": jnp.ones((8, 4)), "table": jnp.arange(4.0)}
    plan = plan_of(params, batch, optax.sgd(0.1), {"replica": 1}, Knobs(microbatches=2))
    step = make_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="'table' has 4 rows and 'x' has 8"):
        step.lower(params, batch)
    asked = of_loss(loss=loss, optimizer=optax.sgd(0.1), params=params, batch=batch)
    with pytest.raises(ValueError, match="microbatches=2.*at most 1 are possible"):
        decide(asked, Cluster.parse("1xcpu"), {"microbatches": 2})
    assert decide(asked, Cluster.parse("2xcpu")).plan.knobs.microbatches == 1


def test_an_array_with_other_rows_is_on_every_device() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params) * jnp.mean(batch["bias"])

    params = jnp.ones((4, 2))
    batch = {"x": jnp.arange(256.0).reshape(64, 4) / 256, "bias": jnp.arange(10.0)}
    asked = of_loss(loss=loss, optimizer=optax.sgd(0.1), params=params, batch=batch)
    plan = decide(asked, Cluster.parse("8xcpu"), {"replica": 8}).plan
    assert plan.batch == {"bias": ((),), "x": (("replica",), ())}
    step = make_step(loss, optax.sgd(0.1), plan)
    _, value = step.step(step.init(params), batch)
    assert float(value) == pytest.approx(float(loss(params, batch)), rel=1e-6)


def test_a_batch_with_a_single_row_beside_others_has_no_microbatches() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] + batch["shift"]) @ params)

    params, batch = jnp.ones((4, 2)), {"x": jnp.ones((8, 4)), "shift": jnp.ones((1, 4))}
    asked = of_loss(loss=loss, optimizer=optax.sgd(0.1), params=params, batch=batch)
    with pytest.raises(ValueError, match="microbatches=2.*at most 1 are possible"):
        decide(asked, Cluster.parse("1xcpu"), {"microbatches": 2})


def test_counts_beside_the_loss_cannot_be_averaged() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch @ params), {"rows": jnp.int32(batch.shape[0])}

    params, batch = jnp.ones((4, 2)), jnp.ones((8, 4))
    plan = plan_of(params, batch, optax.sgd(0.1), {"replica": 1}, Knobs(microbatches=2))
    step = make_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="'aux/rows' of dtype int32"):
        step.lower(params, batch)


def test_rows_of_the_batch_have_no_mean_over_its_parts() -> None:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        each = (batch["x"] @ params) ** 2
        return each.mean(), {"each": each, "mean": each.mean(keepdims=True)}

    params, batch = jnp.ones(3), {"x": jnp.ones((4, 3))}
    parts = jax.tree.map(lambda x: x.reshape(2, 2, 3), batch)
    run = accumulated(loss, 2, None, pin=lambda g: g, divide=lambda _: parts)
    with pytest.raises(
        ValueError, match=r"'each' of shape \(4,\) .* \(2,\) for a part"
    ):
        run(params, batch)
