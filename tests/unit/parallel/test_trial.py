"""Trials: the best few plans run here, the fastest measured is taken."""

import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtft
from dtft.cli.dispatch import main
from dtft.config.loading import parse_experiment
from dtft.parallel.planning import asked_of, first_batch, trial
from dtft.parallel.planning.trial import Runner, in_turns, trial_section, try_plans
from dtft.planner.plan import Plan
from dtft.planner.search import Decision, next_best

WIDTH = 16
PARAMS = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)


def _loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(batch @ params["w"] - batch))


def _step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


LOSS = {"loss": _loss, "optimizer": optax.sgd(0.1), "params": PARAMS, "batch": BATCH}
STEP = {"step": _step, "state": PARAMS, "batch": BATCH}


def test_the_fastest_measured_is_the_first() -> None:
    plan = dtft.plan(**LOSS, microbatches=1)
    assert plan.decision is not None
    tried = try_plans(plan.decision, LOSS, 2)
    assert len(tried) == 2 and tried[0].step_s <= tried[1].step_s
    assert {one.plan.to_json() for one in tried} >= {plan.to_json()}
    shown = trial_section(tried)
    assert len(shown.rows) == 2 and shown.rows[0][0].startswith(
        next(iter(tried[0].plan.mesh))
    )


@pytest.mark.parametrize(("spare", "most"), [(0, 1), (10**6, 3)])
def test_plans_that_do_not_fit_together_run_one_after_another(
    spare: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = dtft.plan(**LOSS).decision
    assert decision is not None
    runners: list[weakref.ref[Runner]] = []
    held: list[int] = []

    class Fake(Runner):
        """Records how many runners there are at each step, and runs none."""

        def __init__(self, plan: Plan, given: Any) -> None:
            del given
            self.plan = plan
            runners.append(weakref.ref(self))

        def start(self) -> None:
            pass

        def step_s(self, num: int) -> float:
            held.append(sum(runner() is not None for runner in runners))
            return float(num)

    def almost_full(decision: Decision, num: int) -> list[Decision]:
        found = next_best(decision, num)
        capacity = max(one.plan.memory_bytes for one in found) + spare
        return [
            replace(one, plan=replace(one.plan, capacity_bytes=capacity))
            for one in found
        ]

    monkeypatch.setattr(trial, "Runner", Fake)
    monkeypatch.setattr(trial, "next_best", almost_full)
    tried = try_plans(decision, LOSS, 3)
    assert len(tried) == 3 and max(held) == most
    (note,) = trial_section(tried).notes
    assert ("one after another" in note) is (most == 1)


@pytest.mark.parametrize("given", [LOSS, STEP], ids=["loss", "step"])
def test_a_plan_of_either_entry_is_run_from_shapes(given: dict[str, Any]) -> None:
    plan = dtft.plan(**given, trial=1, replica=8)
    assert plan.mesh == {"replica": 8}
    runner = Runner(plan, given)
    (times,) = in_turns([runner], rounds=3, turn_s=0.0)
    assert len(times) == 3 and min(times) > 0


def _noisy(state: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(batch["keys"])
    after, value = _step({"w": state["w"]}, batch["x"] + noise)
    return {**after, "key": jax.random.split(state["key"], 1)[0]}, value


def test_a_plan_with_prng_keys_is_run_from_arrays_and_from_shapes() -> None:
    keys = {
        "key": jax.random.key(1, impl="rbg"),
        "keys": jax.random.split(jax.random.key(0), 32),
    }
    shapes = jax.eval_shape(lambda: keys)
    for one in (keys, shapes):
        given: dict[str, Any] = {
            "step": _noisy,
            "state": {**PARAMS, "key": one["key"]},
            "batch": {"x": BATCH, "keys": one["keys"]},
        }
        runner = Runner(dtft.plan(**given, replica=8), given)
        ((seconds,),) = in_turns([runner], rounds=1, turn_s=0.0)
        assert seconds > 0


def test_the_arrays_of_a_state_stay_usable() -> None:
    state = {"w": jnp.ones((WIDTH, WIDTH)), "key": jax.random.key(0)}
    batch = {"x": BATCH, "keys": jax.random.split(jax.random.key(1), 32)}
    dtft.plan(step=_noisy, state=state, batch=batch, trial=2)
    jax.block_until_ready(state)  # raises for deleted arrays


def test_the_trial_of_a_config_reads_its_data() -> None:
    """Equal indices would take longer on a GPU than those that a run has."""
    experiment = parse_experiment("chars_transformer", [])
    shapes, rows = asked_of(experiment).batch, first_batch(experiment)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), rows) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    tokens = rows["tokens"]
    assert len(np.unique(tokens)) > 20 and (tokens[0] != tokens[1]).any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"trial": -1}, "trial=-1. Allowed: how many of the best plans"),
        ({"trial": 1, "cluster": "16xcpu"}, "16 devices"),
        ({"trial": 1, "cluster": "4xh100"}, r"devices here \(cpu\).*for h100 \(cuda"),
        ({"trial": 1, "verify": 1}, "trial=1 and verify=1"),
    ],
)
def test_a_trial_that_cannot_be(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dtft.plan(**LOSS, **words)


def test_the_command_refuses_two_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits_cnn", "--trial", "2", "--verify"]) == 2
    assert "--trial 2 and --verify 4" in capsys.readouterr().err
