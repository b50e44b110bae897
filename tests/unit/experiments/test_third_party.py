"""What `experiments/third_party_models.py` makes of runs and of memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import third_party_models as study
import third_party_zoo as zoo

import dtft
from dtft.planner.memory import RESERVE


def test_planned_steps_of_a_loss_are_those_of_plain_jit() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"][:, None]) ** 2)

    model = zoo.Model(
        name="line",
        start=lambda key: {"w": jax.random.normal(key, (8, 4), jnp.float32)},
        batch={
            "x": jax.ShapeDtypeStruct((16, 8), jnp.float32),
            "y": jax.ShapeDtypeStruct((16,), jnp.float32),
        },
        limits={},
        loss=loss,
        optimizer=optax.sgd(0.1),
    )
    start, batches = model.start(jax.random.key(0)), study.made(model)
    plan = dtft.plan(**model.given, cluster="8xcpu", replica=8)
    plain = study.plainly(model, start, batches)
    found = study.planned(model, plan, start, batches)
    run = study.compared("line", "replica=8", "", plain, plain, found)
    assert len(found.losses) == study.STEPS
    assert run.equal
    wrong = replace(found, after=jax.tree.map(lambda a: a * 1.01, found.after))
    assert not study.compared("line", "", "", plain, plain, wrong).equal


def test_errors_are_measured_by_the_updates() -> None:
    def trained(value: float) -> study.Trained:
        return study.Trained(
            losses=[1.0], before={"w": np.zeros(4)}, after={"w": np.full(4, value)}
        )

    run = study.compared("", "", "", trained(1.0), trained(1.01), trained(1.03))
    assert run.plain_params == pytest.approx(0.01)
    assert run.params == pytest.approx(0.03)
    assert run.ratio == pytest.approx(3)
    assert not run.equal


@pytest.mark.parametrize(("share", "misleads"), [(0.1, False), (1.1, True)])
def test_a_plan_misleads_if_it_says_more_than_the_reserve_too_little(
    share: float, misleads: bool
) -> None:
    fit = study.Fit(
        model="", pins="", mesh="", predicted=round(1e9 * (1 - share * RESERVE)),
        assigned=10**9, fits_after=False,
    )  # fmt: skip
    assert fit.misleads == misleads
    assert fit.error == pytest.approx(-share * RESERVE)


def test_an_opaque_step_is_not_asked_for_knobs_of_a_loss() -> None:
    model = zoo.Model(
        name="", start=lambda key: key, batch={}, limits={}, step=lambda s, b: (s, b)
    )
    assert not any("microbatches" in pins for pins in study.meshes(model))
