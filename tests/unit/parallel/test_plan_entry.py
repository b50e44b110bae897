"""`dtft.plan`: one call for a step or a loss, and what it says when it cannot."""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import dtft
from dtft.elastic.processes import free_port
from dtft.parallel.planning.api import RunnablePlan
from dtft.parallel.planning.inputs import check_result
from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Plan
from experiments.worlds import run_world

WIDTH, HIDDEN = 64, 256
PARAMS = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
OPTIMIZER = optax.adam(1e-3)


def _loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(batch @ params["up"])
    return jnp.mean(jnp.square(hidden @ params["down"] - batch))


def _step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def _batch(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def _planned(
    cluster: Cluster | str | None, rows: int = 64, **pins: Any
) -> RunnablePlan:
    return dtft.plan(
        loss=_loss,
        optimizer=OPTIMIZER,
        params=PARAMS,
        batch=_batch(rows),
        cluster=cluster,
        **pins,
    )


def _with_memory(spec: str, num_bytes: int) -> Cluster:
    pool = Cluster.parse(spec).uniform
    device = dataclasses.replace(pool.device, memory_bytes=num_bytes)
    return Cluster(pools=(dataclasses.replace(pool, device=device),), name=spec)


def test_importing_dtft_does_not_load_what_plans() -> None:
    code = "import dtft, sys; print('plan' in dir(dtft), 'jax' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True", "False"]


def test_a_step_is_planned_for_the_devices_that_jax_has_and_runs() -> None:
    plan = dtft.plan(step=_step, state=PARAMS, batch=_batch(16))
    assert plan.entry == "step" and "cpu" in plan.cluster
    random = np.random.default_rng(0)
    up, down, batch = (
        random.standard_normal(shape, np.float32)
        for shape in (PARAMS["up"].shape, PARAMS["down"].shape, (16, WIDTH))
    )
    expected = np.mean(np.square(np.maximum(batch @ up, 0) @ down - batch))
    state = {"up": jnp.asarray(up), "down": jnp.asarray(down)}
    _, value = plan.jit(_step)(state, jnp.asarray(batch))
    assert float(value) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_process_of_a_job_has_a_part_in_its_plan() -> None:
    """Three processes, of which two would be faster; of a cluster of five, four are."""
    world = run_world(
        "tests.support.plan_in_world",
        [[]] * 3,
        address=f"127.0.0.1:{free_port()}",
        deadline_s=110,
    )
    assert world == [[3, 4]] * 3


def test_a_loss_is_planned_with_its_optimizer() -> None:
    plan = _planned("8xH100")
    assert plan.entry == "loss" and plan.state.keys() == PARAMS.keys()
    assert any(path.endswith("mu/up") for path in plan.optimizer)
    assert _planned(Cluster.parse("8xH100")) == plan


def test_what_it_says_of_itself_needs_no_other_call() -> None:
    plan = _planned("2x4xH100", replica=8)
    assert plan.explain().startswith("Plan for 2x4xh100: replica=8")
    assert "tensor=8 is possible" in plan.why_not(replica=1, tensor=8)
    assert "twice the peak" in plan.sensitivity()
    assert "Decisions that differ" in plan.diff(_planned("2x4xH100"))
    assert plan.html().startswith("<!DOCTYPE html>")
    assert all(str(one) for one in plan.lints())


def test_a_plan_from_a_file_has_what_needs_no_question() -> None:
    plan = _planned("8xH100")
    again = RunnablePlan.from_json(plan.to_json())
    assert again == plan and again.decision is None
    assert Plan.from_json(plan.to_json()).mesh == plan.mesh
    assert plan.explain().startswith(again.explain())
    assert plan.explain().partition(again.explain())[2].strip().startswith("What a")
    for name, call in (
        ("why_not", lambda: again.why_not(tensor=2)),
        ("sensitivity", again.sensitivity),
        ("lints", again.lints),
    ):
        with pytest.raises(
            ValueError, match=rf"{name}\(\).*Make it again with dtft.plan"
        ):
            call()


def test_arguments_of_neither_entry_are_named() -> None:
    with pytest.raises(ValueError, match=r"plan\(step=, batch=\) is neither.*Allowed"):
        dtft.plan(step=_step, batch=_batch(8), cluster="h100")
    with pytest.raises(ValueError, match="stat= is neither an argument nor a knob"):
        dtft.plan(step=_step, stat=PARAMS, batch=_batch(8), cluster="h100")


def test_a_cluster_that_is_none_says_what_is() -> None:
    with pytest.raises(ValueError, match="cluster=8. Allowed: text such as"):
        _planned(8)  # pyright: ignore[reportArgumentType]


def test_an_unknown_device_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"(?i)'?h1000'?.*a100.*h100.*v5e"):
        _planned("8xH1000")


def test_a_model_that_cannot_fit_says_by_how_much_and_what_would_help() -> None:
    whole = sum(4 * array.size for array in jax.tree.leaves(PARAMS))
    capacity = 3 * whole // 8  # parameters, two moments and gradients on 8 devices
    with pytest.raises(ValueError, match="does not fit") as caught:
        _planned(_with_memory("8xH100", capacity))
    text = str(caught.value)
    needed, more, there = (
        float(re.search(pattern, text)[1])  # pyright: ignore[reportOptionalSubscript]
        for pattern in (
            r"needs ([\d.]+)",
            r"\), ([\d.]+) \S+ more",
            r"than the ([\d.]+)",
        )  # fmt: skip
    )
    assert needed - there == pytest.approx(more, abs=0.02)
    assert re.search(r"16 devices instead of 8: [\d.]+ \w+ per step", text)
    assert all(term in text for term in ("parameters", "optimizer", "activations"))


@pytest.mark.parametrize("cluster", ["h100", "rtx4090", "1xcpu", "v5e"])
def test_one_device_that_is_too_small_is_told_how_many_fit(cluster: str) -> None:
    whole = sum(4 * array.size for array in jax.tree.leaves(PARAMS))
    small = _with_memory(cluster, 3 * whole // 2)
    with pytest.raises(ValueError, match="does not fit") as caught:
        _planned(small)
    found = re.search(r"make it fit: (\d+) devices instead of 1: ", str(caught.value))
    assert found is not None, caught.value
    fits = _with_memory(f"{found[1]}x{cluster}", 3 * whole // 2)
    assert _planned(fits).fits


def test_what_prints_is_planned_and_prints_when_it_runs() -> None:
    seen: list[float] = []

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        io_callback(lambda x: seen.append(float(x)), None, batch.sum())
        jax.debug.callback(lambda x: seen.append(float(x[0, 0])), batch)
        return _loss(params, batch)

    def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    batch = jnp.ones((64, WIDTH))
    params = {name: jnp.ones(like.shape) for name, like in PARAMS.items()}
    whole = dtft.plan(step=step, state=params, batch=batch)
    parts = dtft.plan(loss=loss, optimizer=OPTIMIZER, params=params, batch=batch)
    assert "step" in whole.explain() and parts.lints() is not None
    built = dtft.train.make_step(loss, OPTIMIZER, parts)
    for run in (
        lambda: whole.jit(step)(params, batch),
        lambda: built.step(built.init(params), batch),
    ):
        seen.clear()
        jax.block_until_ready(run())
        jax.effects_barrier()
        assert set(seen) == {float(batch.sum()), 1.0}


def test_one_device_that_nothing_joins_is_not_said_to_fit_nowhere() -> None:
    (pool,) = Cluster.parse("h100").pools
    device = dataclasses.replace(pool.device, name="own", memory_bytes=2**17)
    own = dataclasses.replace(pool, device=device)
    with pytest.raises(ValueError, match="does not fit") as caught:
        _planned(Cluster(pools=(own,)))
    assert "more devices not among it, as no link joins them" in str(caught.value)


def test_five_devices_and_a_batch_of_eight_use_what_works_and_say_its_price() -> None:
    plan = _planned("5x1xH100", rows=8)
    assert plan.fits
    texts = [str(one) for one in plan.lints() if one.kind in ("batch", "repeated")]
    assert texts, plan.mesh
    assert any("4 of 5 devices" in text or "tensor=5" in text for text in texts)
    assert any(re.search(r"10 takes [\d.]+ \w+ per step", text) for text in texts)


def test_a_prime_batch_has_a_plan() -> None:
    plan = _planned("8xH100", rows=13)
    assert plan.fits and plan.prediction.step_s >= plan.bound_s
    text = plan.why_not(replica=8, tensor=1)
    (padding,) = re.findall(r"give it 16 rows, 3 of them padding.*", text)
    assert "23.08 %" in padding


def test_a_batch_that_is_rounded_up_says_the_price() -> None:
    plan = _planned("8xH100", rows=13, replica=8)
    one = next(one for one in plan.lints() if one.kind == "batch")
    assert one.cost_s == pytest.approx(plan.prediction.step_s * 3 / 13)
    shown = wording.seconds(one.cost_s, plan.prediction.relative_error)
    assert f"take up to {shown} of a step" in one.text


def _mean(params: Any, batch: Any) -> Any:
    return jnp.mean(batch @ params["up"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": "mse"}, r"loss='mse' cannot be called"),
        ({"loss": lambda p, b: b @ p["up"]}, r"loss returned float32\[8, 256\]"),
        (
            {"loss": lambda p, b: _mean(p, b).astype("complex64")},
            r"loss returned complex64\[\]",
        ),
        ({"loss": lambda p, b: None}, "loss returned NoneType. Allowed: a floating"),
        ({"loss": lambda p, b: (_mean(p, b), 1, 2)}, "loss returned 3 values"),
        ({"optimizer": optax.adam}, r"such as optax.adamw\(1e-3\), called"),
        ({"params": {}}, "params={} has no arrays"),
        (
            {"params": {**PARAMS, "n": jax.ShapeDtypeStruct((), jnp.int32)}},
            "params 'n' is int32, which has no gradient",
        ),
        (
            {"params": {**PARAMS, "key": jax.random.key(0)}},
            "params 'key' is key<fry>, which has no gradient",
        ),
        ({"batch": {"x": "hello"}}, "batch 'x' is 'hello', a str"),
        ({"batch": _batch(0)}, r"batch has the shape \(0, 64\): no rows"),
        ({"batch": None}, "batch= missing"),
        ({"state": PARAMS}, "state= too much"),
        ({"tp": 2}, "Did you mean 'tensor'"),
        ({"tensor": True}, "tensor=True is pinned"),
        ({"verify": True}, "verify=True. Allowed: how many"),
        ({"calibration": 3}, "calibration=3. Allowed: the path"),
        ({"tensor": 8, "fsdp": 8}, "Together fsdp=8 x tensor=8 are 64 devices"),
        ({"microbatches": 5}, "5 does not divide the batch of 8"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said(
    changed: dict[str, Any], said: str
) -> None:
    asked = {
        "loss": _mean,
        "optimizer": OPTIMIZER,
        "params": PARAMS,
        "batch": _batch(8),
        "cluster": "8xh100",
    }
    with pytest.raises(ValueError, match=said):
        dtft.plan(**{**asked, **changed})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda s, b: s, "step returned dict. Allowed: a pair"),
        (lambda s, b: ({}, 0), "step turned state 'down' from .* into nothing"),
    ],
)
def test_a_step_that_returns_no_state_is_refused(step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        dtft.plan(step=step, state=PARAMS, batch=_batch(8), cluster="8xh100")
    assert "dtft.plan traced step(state, batch)" in caught.value.__notes__[-1]


def test_a_state_of_64_bits_is_what_jax_makes_of_it() -> None:
    after = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    check_result((after, 0), {"w": np.ones(2)})
    with pytest.raises(ValueError, match=r"'w' from int32\[2\] into float32\[2\]"):
        check_result((after, 0), {"w": np.ones(2, int)})


def test_what_is_no_plan_is_refused() -> None:
    plan = _planned("8xH100")
    for call in (
        lambda: plan.diff("x"),  # pyright: ignore[reportArgumentType]
        lambda: dtft.train.make_step(
            _loss,
            OPTIMIZER,
            "auto",  # pyright: ignore[reportArgumentType]
        ),
        lambda: dtft.train.jit_plan(None, _step),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ValueError, match=r"is no plan.*dtft\.Plan\.from_json"):
            call()


def test_a_state_that_is_none_of_the_steps_is_refused() -> None:
    plan = _planned(None, rows=8)
    step = dtft.train.make_step(_loss, OPTIMIZER, plan)
    with pytest.raises(ValueError, match="state is a dict of up, down. Allowed: what"):
        step.step(PARAMS, _batch(8))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"tensor": 2}}, "Sizes of axes are given by name, such as tensor=8"),
        ({"what_if": "yes"}, "what_if='yes'. Allowed: True, False"),
    ],
)
def test_arguments_of_another_form(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        _planned("8xH100", **given)


def test_an_accumulating_optimizer_is_given_as_a_transformation() -> None:
    several: Any = optax.MultiSteps(OPTIMIZER, 4)
    asked: dict[str, Any] = {"loss": _loss, "params": PARAMS, "batch": _batch(64)}
    with pytest.raises(ValueError, match=r"Give its \.gradient_transformation\(\)"):
        dtft.plan(**asked, optimizer=several, cluster="8xH100")
    made = several.gradient_transformation()
    assert dtft.plan(**asked, optimizer=made, cluster="8xH100").runnable


def test_an_optimizer_that_evaluates_the_loss_is_planned_as_a_step() -> None:
    with pytest.raises(TypeError) as raised:
        dtft.plan(
            loss=_loss, optimizer=optax.lbfgs(), params=PARAMS, batch=_batch(64),
            cluster="8xH100",
        )  # fmt: skip
    assert "optax.lbfgs, is planned by step=" in "".join(raised.value.__notes__)
