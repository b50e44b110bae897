"""What replicas exchange: the sqrt(N) law, identity of replicas, periods, commands."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dtft.optim import (
    average_params,
    max_belief_phases,
    reduce_updates,
    scale_by_max_belief,
    sync_moments,
)
from dtft.optim.per_replica import expand, lift, map_rows, specs, squeeze

AXIS = "replica"


def _vmapped(transform: Any, state: Any) -> Any:
    """The update of all replicas on one device; the state in its global form."""
    axes = map_rows(lambda _: 0, state, lambda _: None)
    return jax.vmap(
        transform.update, axis_name=AXIS, in_axes=(0, axes), out_axes=(0, axes)
    )


def _sharded(transform: Any, replicas: int, **options: Any) -> Any:
    """(gradients [replicas, ...], state) to (update, state), on so many devices."""
    mesh = Mesh(np.asarray(jax.devices()[:replicas]), (AXIS,))
    layout = specs(jax.eval_shape(lambda: transform.init(jnp.zeros(16))), AXIS)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(AXIS), layout, P()),
        out_specs=(P(), layout),
        **options,
    )
    def update(gradients: Any, state: Any, sync: Any) -> Any:
        extra = {} if sync is None else {"sync": sync}
        updates, after = transform.update(gradients[0], squeeze(state), None, **extra)
        return updates, expand(after)

    return lambda gradients, state, sync=None: update(gradients, state, sync)


def _noise(step: Any, replicas: int, size: int = 16) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(7), step)
    return jax.random.normal(key, (replicas, size))


@pytest.mark.usefixtures("fast_programs")
@pytest.mark.parametrize("replicas", [4, 8])
def test_steps_shrink_by_the_root_of_the_number_of_replicas(replicas: int) -> None:
    alone: Any = scale_by_max_belief(b2=0.99)
    synced: Any = sync_moments(max_belief_phases(b2=0.99), AXIS)
    state = alone.init(jnp.zeros(3000)), lift(synced.init(jnp.zeros(3000)), replicas)
    update = _vmapped(synced, state[1])

    def body(state: Any, step: jax.Array) -> Any:
        gradients = _noise(step, replicas, 3000)
        one, first = alone.update(jnp.mean(gradients, axis=0), state[0])
        many, second = update(gradients, state[1])
        return (first, second), (jnp.sum(one**2), jnp.sum(many[0] ** 2))

    (first, second), squares = jax.jit(
        lambda s: jax.lax.scan(body, s, jnp.arange(600))
    )(state)
    mean_nu = jnp.mean(second.inner.nu.rows, axis=0)
    ratio = jnp.sqrt(jnp.sum(mean_nu) / jnp.sum(first.nu))
    np.testing.assert_allclose(ratio, replicas**0.5, rtol=0.01)
    ratio = jnp.sqrt(squares[0][-100:].sum() / squares[1][-100:].sum())
    np.testing.assert_allclose(ratio, replicas**0.5, rtol=0.01)
    # The numerator is linear: the mean of the moments is the moment of the mean.
    mean_mu = jnp.mean(second.inner.mu.rows, axis=0)
    np.testing.assert_allclose(mean_mu, first.mu, atol=1e-6)


def test_mean_square_is_square_of_mean_plus_variance() -> None:
    errors = jax.random.normal(jax.random.key(0), (6, 100)) + 0.3
    left = jnp.mean(errors**2, axis=0)
    right = jnp.mean(errors, axis=0) ** 2 + jnp.var(errors, axis=0)
    np.testing.assert_allclose(left, right, rtol=1e-5)


def test_reduce_updates_is_the_mean_gradient() -> None:
    gradients = _noise(0, 4)
    transform: Any = optax.chain(reduce_updates(AXIS), scale_by_max_belief())
    state = transform.init(jnp.zeros(16))
    update, _ = _sharded(transform, 4)(gradients, state)
    alone: Any = scale_by_max_belief()
    mean = jnp.mean(gradients, axis=0)
    expected, _ = alone.update(mean, alone.init(mean))
    np.testing.assert_allclose(update, expected, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 7])
def test_replicas_are_bit_identical_after_1000_steps(every: int) -> None:
    transform: Any = sync_moments(
        max_belief_phases(),
        AXIS,
        every={"mu": 1, "nu_max": every},
    )
    mesh = Mesh(np.asarray(jax.devices()[:4]), (AXIS,))
    params = jnp.linspace(-1.0, 1.0, 16)
    state = lift(transform.init(params), 4)
    layout = specs(state, AXIS)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), layout), out_specs=(P(), layout))
    def train(params: Any, state: Any) -> Any:
        def body(carry: Any, step: jax.Array) -> Any:
            params, state = carry
            own = _noise(step, 4)[jax.lax.axis_index(AXIS)]
            update, state = transform.update(params + own, state)
            return (params - 1e-3 * update, state), None

        carry = params, squeeze(state)
        (params, state), _ = jax.lax.scan(body, carry, jnp.arange(1000))
        return params, expand(state)

    params, state = train(params, state)
    for array in jax.tree.leaves((params, state.held, state.inner.count)):
        copies = {np.asarray(s.data).tobytes() for s in array.addressable_shards}
        assert len(array.addressable_shards) == 4 and len(copies) == 1
    rows = np.asarray(state.inner.nu_max.rows)
    assert all((rows[0] != rows[other]).any() for other in (1, 2, 3))


@pytest.mark.parametrize("mode", ["operands", "state"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "gather"])
def test_every_algorithm_gives_the_same_update(mode: Any, algorithm: Any) -> None:
    ends = []
    for name in ("native", algorithm):
        transform: Any = sync_moments(
            max_belief_phases(), AXIS, mode=mode, op={"nu_max": "max"}, algorithm=name
        )
        state = lift(transform.init(jnp.zeros(16)), 3)
        update, updates = _sharded(transform, 3), None
        for step in range(3):
            updates, state = update(_noise(step, 3), state)
        ends.append(updates)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_gradient_is_only_exchanged_where_it_is_looked_at(nesterov: bool) -> None:
    transform: Any = sync_moments(max_belief_phases(nesterov=nesterov), AXIS)
    state = lift(transform.init(jnp.zeros(16)), 2)
    update = jax.jit(_sharded(transform, 2))
    text = update.lower(_noise(0, 2), state).compile().as_text()
    results = re.findall(r"= (.*?) all-reduce\(", text or "")
    assert sum(found.count("f32[16]") for found in results) == 2 + nesterov


def test_a_kept_maximum_is_corrected_for_the_update_it_was_taken_at() -> None:
    transform: Any = sync_moments(
        max_belief_phases(),
        AXIS,
        every={"mu": 1, "nu_max": 50},
    )
    state = lift(transform.init(jnp.zeros(16)), 2)
    update = _sharded(transform, 2)
    taken, largest = [], []
    for _ in range(52):
        updates, state = update(jnp.ones((2, 16)), state)
        taken.append(int(state.taken["nu_max"]))
        largest.append(float(jnp.max(jnp.abs(updates))))
    assert taken == [1] * 50 + [51] * 2
    np.testing.assert_allclose(largest[:50], 1.11, rtol=0.01)


def test_a_gradient_that_is_new_since_the_last_exchange_makes_no_giant_step() -> None:
    first = jnp.ones((2, 16)).at[:, 3].set(0.0)
    largest = {}
    for limit in (16.0, None):
        transform: Any = sync_moments(
            max_belief_phases(),
            AXIS,
            every={"mu": 1, "nu_max": 50},
            refresh_above=limit,
        )
        state = lift(transform.init(jnp.zeros(16)), 2)
        update = _sharded(transform, 2)
        _, state = update(first, state)
        updates, state = update(jnp.ones((2, 16)), state)
        largest[limit] = float(jnp.max(jnp.abs(updates))), int(state.taken["nu_max"])
    assert largest[16.0][0] < 2 and largest[16.0][1] == 2
    assert largest[None][0] > 1e4 and largest[None][1] == 1


def test_periods_of_the_state_form() -> None:
    transform: Any = sync_moments(
        max_belief_phases(), AXIS, mode="state", every={"mu": 2, "nu": 3, "nu_max": 1}
    )
    state = lift(transform.init(jnp.zeros(16)), 3)
    update = jax.jit(_vmapped(transform, state))
    for count in range(1, 13):
        _, state = update(_noise(count, 3), state)
        for name, period in (("mu", 2), ("nu", 3)):
            rows = getattr(state.inner, name).rows
            assert bool((rows == rows[0][None]).all()) == (count % period == 0)
    assert state.inner.nu_max.shape == (16,)  # equal on all: no row per replica


def test_state_form_with_every_period_1_keeps_replicas_together() -> None:
    transform: Any = sync_moments(max_belief_phases(), AXIS, mode="state")
    state = transform.init(jnp.zeros(16))
    assert jax.tree.leaves(state)[1].shape == (16,)
    update, updates = _sharded(transform, 4), jnp.zeros(16)
    for step in range(3):
        updates, state = update(_noise(step, 4), state)
    assert len({np.asarray(s.data).tobytes() for s in updates.addressable_shards}) == 1


def test_the_host_commands_an_exchange() -> None:
    phases = max_belief_phases()
    commanded: Any = sync_moments(
        phases, AXIS, every={"mu": 1, "nu_max": 0}, commanded=True
    )
    always: Any = sync_moments(phases, AXIS)
    states = lift(commanded.init(jnp.zeros(16)), 2), lift(always.init(jnp.zeros(16)), 2)
    updates = _sharded(commanded, 2), _sharded(always, 2)
    held = np.zeros(16)
    for step, order in enumerate([0, 0, 1, 0, -1]):
        gradients = _noise(step, 2)
        update, state = updates[0](gradients, states[0], jnp.int32(order))
        expected, other = updates[1](gradients, states[1])
        states = state, other
        exchanged = (np.asarray(state.held["nu_max"]) != held).any()
        assert exchanged == (order != 0 or step == 0)
        if exchanged:
            np.testing.assert_allclose(update, expected, rtol=1e-6)
        held = np.asarray(state.held["nu_max"])


def test_parameters_are_averaged_when_due_or_commanded() -> None:
    params = jnp.arange(6.0).reshape(3, 2)

    def after(count: int, every: int, sync: int | None = None) -> Any:
        order = None if sync is None else jnp.int32(sync)

        def own(p: jax.Array) -> jax.Array:
            return average_params(p, jnp.int32(count), AXIS, every, sync=order)

        return jax.vmap(own, axis_name=AXIS)(params).tolist()

    mean = [[2.0, 3.0]] * 3
    assert after(4, every=4) == after(1, every=1) == after(3, 0, sync=1) == mean
    assert after(3, every=4) == after(3, 0, sync=0) == params.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": {"mu": 1, "nu_max": 0}}, "not a period"),
        ({"every": {"mu": 1, "nu_max": -1}, "commanded": True}, "not a period"),
        ({"every": {"mu": 1, "nu_max": 2.5}}, "not a period"),
        ({"every": {}}, "exchanges nothing"),
        ({"every": "mu"}, "every='mu' does not say .*Write every={'mu': 1, 'nu_max'"),
        ({"op": "max"}, "op='max' does not say .*Write op={'mu': 'max', 'nu_max'"),
        ({"refresh_above": "16"}, "refresh_above='16' is not a number"),
        ({"every": {"mu": 1}}, r"leaves out \['nu_max'\]"),
        ({"op": {"nu": "max"}}, "does not reduce"),
        ({"op": {"nu_max": "sum"}}, "'sum' is unknown"),
        ({"mode": "operand"}, "mode='operand' is unknown"),
        ({"algorithm": "rings"}, "algorithm='rings' is unknown"),
        ({"refresh_above": -1.0}, "above 0"),
        ({"mode": "state", "refresh_above": 3.0}, "no operand is kept"),
        ({"commanded": True}, "no effect"),
    ],
)
def test_options_that_contradict_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sync_moments(max_belief_phases(), AXIS, **options)


def test_wrong_names_and_commands_are_refused() -> None:
    every = {"mu": 1, "nu_max": 1, "nothing": 1}
    with pytest.raises(ValueError, match="nothing"):
        sync_moments(max_belief_phases(), None, every=every).init(jnp.ones(2))
    with pytest.raises(ValueError, match="max_belief_phases"):
        sync_moments(optax.adam(1e-3), None)  # pyright: ignore[reportArgumentType]
    alone: Any = sync_moments(max_belief_phases(), None)
    with pytest.raises(ValueError, match="if and only if commanded"):
        alone.update(jnp.ones(2), squeeze(lift(alone.init(jnp.ones(2)), 1)), sync=1)


def test_one_replica_without_an_axis_is_the_plain_optimizer() -> None:
    alone: Any = sync_moments(max_belief_phases(), None)
    plain: Any = scale_by_max_belief()
    state, reference = alone.init(jnp.zeros(16)), plain.init(jnp.zeros(16))
    for step in range(3):
        update, state = alone.update(_noise(step, 1)[0], state)
        expected, reference = plain.update(_noise(step, 1)[0], reference)
        np.testing.assert_array_equal(update, expected)
