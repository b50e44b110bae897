"""State that differs per replica: rows, new groups, and what a late maximum does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

from dtft.collectives import all_reduce
from dtft.optim import (
    PerReplica,
    add_groups,
    assign_groups,
    max_belief_phases,
    sync_moments,
)
from dtft.optim.per_replica import expand, lift, map_rows, specs, squeeze


def test_rows_and_back() -> None:
    state = {"own": PerReplica({"a": jnp.arange(3.0)}), "all": jnp.ones(2)}
    lifted = lift(state, 4)
    assert lifted["own"].rows["a"].shape == (4, 3) and lifted["all"].shape == (2,)
    assert specs(state, "r") == {"own": PerReplica({"a": P("r")}), "all": P()}
    row = map_rows(lambda leaf: leaf[:1], lifted)
    jax.tree.map(np.testing.assert_array_equal, squeeze(row), state)
    jax.tree.map(np.testing.assert_array_equal, expand(squeeze(row)), row)


def test_a_new_group_copies_the_row_of_its_source() -> None:
    state = {"own": PerReplica(jnp.arange(6.0).reshape(3, 2)), "all": jnp.ones(2)}
    grown = add_groups(state, [2, 0])
    assert grown["own"].rows.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [0, 1]]
    assert grown["all"] is state["all"]
    shrunk = assign_groups(state, [2, 1])
    assert shrunk["own"].rows.tolist() == [[4, 5], [2, 3]]
    assert add_groups({"all": jnp.ones(2)}, [1])["all"].shape == (2,)
    with_empty = {"none": PerReplica({}), **state}
    assert add_groups(with_empty, [2])["own"].rows.shape == (4, 2)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="but the state has 3"):
            add_groups(state, [wrong])


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(np.float32, (4, 3), elements=st.floats(0, 1e6, width=32)),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.permutations(range(4)),
)
def test_late_or_repeated_contributions_to_a_maximum_do_no_harm(
    now: np.ndarray, repeated: list[int], order: list[int]
) -> None:
    def flushed(rows: np.ndarray) -> np.ndarray:  # as XLA's CPU backend computes
        return np.where(rows < np.finfo(np.float32).tiny, np.float32(0), rows)

    def joined(rows: np.ndarray) -> np.ndarray:
        every = jax.vmap(lambda x: all_reduce(x, "r", op="max"), axis_name="r")
        return np.asarray(every(jnp.asarray(rows))[0])

    now = flushed(now)
    whole = joined(now)
    # Maxima only grow: what a replica sent before is no larger than what it has now.
    stale = flushed(now[repeated] / 2)
    for rows in (
        now[order],
        np.concatenate([now, now[repeated]]),
        np.concatenate([now, stale]),
        np.stack([whole, *now]),
    ):
        np.testing.assert_array_equal(joined(rows), whole)
    assert (joined(now[repeated]) <= whole).all()
    # A subset of survivors still bounds each of its own members.
    assert (joined(now[repeated]) >= now[repeated]).all()


def test_a_mean_is_changed_by_a_repeated_contribution() -> None:
    rows = jnp.asarray([1.0, 3.0, 3.0])
    mean = jax.vmap(lambda x: all_reduce(x, "r", op="mean"), axis_name="r")
    assert mean(rows)[0] != mean(rows[:2])[0]


def test_a_rejoined_worker_continues_the_trajectory() -> None:
    """It takes mu, nu and nu_max from a peer; parameters are equal on all anyway."""
    transform: Any = sync_moments(max_belief_phases(b2=0.99), "r")
    params = jnp.linspace(1.0, 2.0, 200)
    state = lift(transform.init(params), 4)
    axes = map_rows(lambda _: 0, state, lambda _: None)

    @jax.jit
    def step(params: jax.Array, state: Any, number: int) -> Any:
        noise = jax.random.normal(
            jax.random.fold_in(jax.random.key(0), number), (4, 200)
        )
        gradients = jnp.broadcast_to(params, (4, 200)) + noise
        update, state = jax.vmap(
            transform.update, axis_name="r", in_axes=(0, axes), out_axes=(0, axes)
        )(gradients, state)
        return params - 1e-3 * update[0], state, jnp.linalg.norm(update[0])

    for number in range(300):
        params, state, size = step(params, state, number)
    rejoined = assign_groups(state, [0, 0, 2, 3])
    for name in ("mu", "nu", "nu_max"):
        rows = getattr(rejoined.inner, name).rows
        np.testing.assert_array_equal(rows[0], rows[1])
    kept, joined = (float(step(params, s, 300)[2]) for s in (state, rejoined))
    assert abs(joined / kept - 1) < 0.1
    ends = []
    for start in (state, rejoined):
        moved, after = params, start
        for number in range(300, 600):
            moved, after, _ = step(moved, after, number)
        ends.append(float(jnp.linalg.norm(moved)))
    np.testing.assert_allclose(*ends, rtol=0.02)
