"""Optimizer state in host memory: the same results, and less of it on the device."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from dtft.checkpoint.state import tree
from dtft.parallel.planning.planned_step import make_step
from dtft.parallel.planning.verify import candidate_of
from dtft.planner.aot import gpu_targets
from dtft.planner.aot.check import Compiled, gate
from dtft.planner.aot.compile import compile_all
from dtft.planner.plan import Knobs, Plan
from tests.support.plans import layers_batch, layers_loss, layers_params, plan_of

OPTIMIZER = optax.adam(0.1)


def plans() -> tuple[Plan, Plan]:
    """Without, and with what Adam keeps of matrices on the host."""
    params, batch = layers_params(), layers_batch()
    plan = plan_of(params, batch, OPTIMIZER, {"replica": 2}, Knobs(zero=1))
    host = tuple(path for path, spec in plan.optimizer.items() if len(spec) > 1)
    return plan, replace(plan, knobs=replace(plan.knobs, offload=True), host=host)


def test_training_is_the_same_bit_for_bit() -> None:
    params, batch, found = layers_params(), layers_batch(), []
    for plan in plans():
        step = make_step(layers_loss, OPTIMIZER, plan, devices=jax.devices()[:2])
        state = step.init(params)
        for _ in range(2):
            state, _ = step.step(state, batch)
        found.append(state)
        kinds = {
            path: leaf.sharding.memory_kind
            for path, leaf in tree.to_paths(state["opt_state"]).items()
        }
        away = {path for path, kind in kinds.items() if kind == "pinned_host"}
        assert away == set(plan.host)
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.timeout(180)  # a child imports JAX, on a busy machine too
def test_a_program_for_a_gpu_has_it_in_host_memory() -> None:
    if not gpu_targets.is_gpu_compiler_installed():
        pytest.skip("needs XLA's GPU compiler: `make test` installs it")
    given = {
        "loss": layers_loss,
        "optimizer": OPTIMIZER,
        "params": layers_params(),
        "batch": jax.eval_shape(layers_batch),
    }
    candidates = (candidate_of(plan, given, target="h100") for plan in plans())
    there, away = compile_all(candidates, deadline_s=150.0)
    assert isinstance(there, Compiled) and isinstance(away, Compiled)
    # Arguments are counted wherever they are: `verify.gate` takes these off again.
    assert there.memory.arguments == away.memory.arguments
    assert away.memory.temporaries > there.memory.temporaries  # copies on their way
    plan = replace(plans()[1], host_bytes=9216)
    capacity = away.memory.total - 9216
    assert gate(plan, away, capacity, reserve=0.0).fits
    assert not gate(plan, away, capacity - 1, reserve=0.0).fits
