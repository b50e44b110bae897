"""A plan is taken only if what the compiler made of it fits."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtft
from dtft.parallel.planning.verify import (
    Verified,
    first_fitting,
    leaner,
    verified,
    verify_sections,
)
from dtft.planner import wording
from dtft.planner.aot.check import Compiled, CompileFailure, Memory, gate
from dtft.planner.aot.gpu_targets import is_gpu_compiler_installed
from dtft.planner.cluster.topology import Cluster
from dtft.planner.plan import Collective
from dtft.planner.search.decision import Decision, decide, next_best
from dtft.planner.workload import of_loss
from tests.support import reading
from tests.support.deciding_zoo import question, with_memory

PARAMS = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((32, 64), jnp.float32)
OPTIMIZER = optax.adam(1e-3)


def _loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(batch @ params["w"]))


def _step(
    params: dict[str, jax.Array], batch: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    value, gradients = jax.value_and_grad(_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


SIZE = re.compile(r"[\d.]+ [KMG]iB")
ASKED = {"loss": _loss, "optimizer": OPTIMIZER, "params": PARAMS, "batch": BATCH}


@pytest.fixture(scope="module")
def decision() -> Decision:
    question = of_loss(_loss, OPTIMIZER, PARAMS, BATCH)
    return decide(question, Cluster.parse("8xcpu"), {"tensor": 1})


def _made(decision: Decision, temporaries: int, target: str = "h100") -> Verified:
    memory = Memory(arguments=100, outputs=50, temporaries=temporaries, aliased=50)
    compiled = Compiled(
        name="0", target=target, collectives=(), memory=memory, seconds=1.0
    )
    verdict = gate(decision.plan, compiled, decision.plan.capacity_bytes)
    return Verified(decision=decision, compiled=compiled, verdict=verdict)


def test_the_next_best_are_ranked_and_the_first_is_the_plan(decision: Decision) -> None:
    found = next_best(decision, 4)
    assert found[0].plan == decision.plan
    times = [one.plan.prediction.step_s for one in found]
    assert times == sorted(times) and len(times) == 4
    for one in found:
        sizes = {a: n for a, n in one.candidate.mesh.items() if n > 1}
        assert (sizes or {"replica": 1}) == one.plan.mesh


def test_the_first_that_fits_as_compiled_is_taken(decision: Decision) -> None:
    too_large = decision.plan.capacity_bytes
    large, small = (_made(decision, size) for size in (too_large, 1000))
    assert not large.verdict.fits
    assert first_fitting((large, small)) is small
    with pytest.raises(ValueError, match="does not fit on 8xcpu: of the 1 plans"):
        first_fitting((large,))


def test_what_was_not_compiled_is_not_taken(decision: Decision) -> None:
    failure = CompileFailure(name="0", reason="too late")
    verdict = gate(decision.plan, failure, decision.plan.capacity_bytes)
    late = Verified(decision=decision, compiled=failure, verdict=verdict)
    with pytest.raises(ValueError, match="could be verified.*too late"):
        first_fitting((late,))
    assert "too late" in wording.text(verify_sections((late,)))
    with pytest.raises(ValueError, match="can run none of the best plans"):
        first_fitting(())


def test_predicted_and_compiled_bytes_stand_side_by_side(decision: Decision) -> None:
    sent = Collective(
        kind="all_reduce", axes=("replica",), num_bytes=4096, trips=2, where=""
    )
    planned = replace(decision, plan=replace(decision.plan, collectives=(sent,)))
    memory, collectives = verify_sections((_made(planned, 1000),))
    assert reading.value(memory.rows[0][4]) == pytest.approx(1100, rel=1e-3)
    kind, _, predicted, found, difference, _ = collectives.rows[0]
    assert (kind, difference) == ("all_reduce", "not there")
    assert reading.value(predicted) == 8192 and reading.value(found) == 0


def _tight() -> tuple[Decision, Verified]:
    """A plan that just fits as predicted, and needs half as much again compiled."""
    found = decide(question(), Cluster.parse("8xH100")).plan
    state = found.memory_bytes - found.memory["reserve"]
    tight = decide(question(), with_memory("8xH100", round(state / 0.9)))
    predicted = tight.plan.memory_bytes - tight.plan.memory["reserve"]
    one = _made(tight, round(1.5 * predicted) - 100)
    assert not one.verdict.fits
    return tight, one


def test_where_none_fits_leaner_plans_are_looked_for() -> None:
    tight, one = _tight()
    has = tight.plan.capacity_bytes
    found = leaner(tight, [one], 3)
    assert 1 <= len(found) <= 3
    for other in found:
        plan = other.plan
        assert plan.capacity_bytes == has
        assert plan.fits
        assert plan.cluster == tight.plan.cluster
        predicted = plan.memory_bytes - plan.memory["reserve"]
        assert 1.5 * predicted <= 0.96 * has
    times = [other.plan.prediction.step_s for other in found]
    assert times == sorted(times) and times[0] >= tight.plan.prediction.step_s


def test_another_plan_that_is_taken_and_none_are_said_in_words() -> None:
    tight, one = _tight()
    other = leaner(tight, [one], 1)[0]
    needs = other.plan.memory_bytes - other.plan.memory["reserve"]
    small = replace(_made(other, needs - 100), held_back=0.5)
    (memory, _) = verify_sections((one, small))
    assert "1 faster plan did not fit as compiled" in memory.notes[0]
    assert "needed up to 50 % more than predicted" in memory.notes[1]
    with pytest.raises(ValueError, match=r"does not fit on 8xH100") as caught:
        first_fitting((one,))
    has, needed = tight.plan.capacity_bytes, one.verdict.needed_bytes
    numbers = [reading.value(text) for text in SIZE.findall(str(caught.value))]
    wanted = (needed, needed - has, has, needed)
    assert numbers == [pytest.approx(n, rel=reading.PRECISION) for n in wanted]
    assert re.search(r"about \d+ devices of this type instead of 8", str(caught.value))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"num": 0}, r"num=0 plans .* Allowed: 1 or more"),
        ({"deadline_s": 0.0}, r"deadline_s=0.0 leaves no time .* Allowed: above 0"),
        ({"deadline_s": -1.0}, r"deadline_s=-1.0 leaves no time"),
    ],
)
def test_no_plan_or_no_time_is_refused(
    decision: Decision, numbers: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        verified(decision, ASKED, **numbers)


@pytest.mark.timeout(180)  # a child imports JAX, on a busy machine too
def test_plans_are_compiled_for_devices_that_do_not_exist(decision: Decision) -> None:
    (one,) = verified(decision, ASKED, num=1, deadline_s=150.0)
    assert isinstance(one.compiled, Compiled), one.compiled
    assert one.compiled.target == "cpu" and one.verdict.fits
    assert first_fitting((one,)).decision.plan == decision.plan


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cluster", ["2xcpu", "2xh100"])
def test_what_a_loss_closes_over_is_counted_as_it_is_compiled(cluster: str) -> None:
    if cluster == "2xh100" and not is_gpu_compiler_installed():
        pytest.skip("XLA's GPU compiler is not installed (extra aot)")
    table = np.random.default_rng(0).standard_normal((64, 2**14)).astype(np.float32)

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(batch @ params["w"] @ table))

    asked = {**ASKED, "loss": loss}
    decision = decide(of_loss(**asked), Cluster.parse(cluster))
    assert decision.plan.memory["constants"] == table.nbytes
    (one,) = verified(decision, asked, num=1, deadline_s=150.0)
    assert isinstance(one.compiled, Compiled), one.compiled
    # For a GPU, XLA keeps a second, transposed one for the backward pass.
    copies = 2 if cluster == "2xh100" else 1
    found = one.compiled.memory.constants
    assert copies * table.nbytes <= found <= 1.01 * copies * table.nbytes
    assert one.needed_bytes is not None and one.needed_bytes > table.nbytes


@pytest.mark.timeout(180)
@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_arrays_are_verified_as_their_shapes_are(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.parallel.planning.verify.SECONDS_EACH", 75.0)
    batch, params = make((32, 64), "float32"), {"w": make((64, 64), "float32")}
    loss = {"loss": _loss, "optimizer": OPTIMIZER, "params": params}
    for asked in (loss, {"step": _step, "state": params}):
        found = dtft.plan(**asked, batch=batch, cluster="4xcpu", replica=4, verify=1)
        assert found.mesh == {"replica": 4}
