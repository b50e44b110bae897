"""T10 and the guard: a corrupt gradient never reaches the moments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.optim import max_adabelief, skip_outlier_gradients
from dtft.optim.guard import is_outlier

BAD = [1e6, float("inf"), float("nan")]
STEPS, SPIKE = 3000, 100


def _descend(solver: Any, bad: jax.Array) -> tuple[jax.Array, Any]:
    """x [STEPS, 4] and the last state of a noisy quadratic, one gradient corrupt."""
    noise = 0.1 * jax.random.normal(jax.random.key(0), (STEPS, 4))

    def step(carry: tuple[jax.Array, Any], t: jax.Array) -> tuple[Any, jax.Array]:
        x, state = carry
        gradient = x + noise[t]
        corrupt = gradient.at[0].set(bad)
        gradient = jnp.where(t == SPIKE, corrupt, gradient)
        updates, state = solver.update(gradient, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), x  # pyright: ignore[reportReturnType]

    start = jnp.ones(4)
    (_, state), xs = jax.lax.scan(step, (start, solver.init(start)), jnp.arange(STEPS))
    return xs, state


_plain = jax.jit(lambda bad: _descend(max_adabelief(1e-3), bad))
_guarded = jax.jit(
    lambda bad: _descend(skip_outlier_gradients(max_adabelief(1e-3)), bad)
)


@pytest.mark.parametrize("bad", BAD)
def test_one_corrupt_gradient(bad: float) -> None:
    clean, _ = _plain(jnp.asarray(0.0))
    broken, _ = _plain(jnp.asarray(bad))
    moved = abs(float(broken[-1, 0] - broken[SPIKE + 50, 0]))
    assert moved < 1e-3 or not np.isfinite(moved)  # frozen for good, or NaN
    assert abs(float(clean[-1, 0])) < 0.1
    guarded, state = _guarded(jnp.asarray(bad))
    assert (state.outliers, state.nonfinite) == ((1, 0) if bad == 1e6 else (0, 1))
    np.testing.assert_array_equal(guarded[SPIKE], guarded[SPIKE - 1])
    loss, reference = (float((x[-500:] ** 2).mean()) for x in (guarded, clean))
    assert loss == pytest.approx(reference, rel=0.05)


def test_rejection_changes_nothing_inside() -> None:
    solver: Any = skip_outlier_gradients(max_adabelief(0.1, weight_decay=0.1), warmup=2)
    params = {"w": jnp.ones((2, 3)), "b": jnp.full(3, 2.0, jnp.bfloat16), "none": None}
    state = solver.init(params)
    update: Any = jax.jit(solver.update)
    with jax.numpy_dtype_promotion("standard"):  # stock decay needs it
        for _ in range(3):
            updates, state = update(params, state, params)
        for bad in BAD:
            bad_gradients = {**params, "b": params["b"].at[1].set(bad)}
            updates, after = update(bad_gradients, state, params)
            jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
            jax.tree.map(
                np.testing.assert_array_equal, after.inner_state, state.inner_state
            )
            np.testing.assert_array_equal(after.norms, state.norms)
    assert update._cache_size() == 1


def test_without_rejection_nothing_differs() -> None:
    solver, plain = (
        skip_outlier_gradients(max_adabelief(0.1)),
        skip_outlier_gradients(max_adabelief(0.1), None),
    )
    gradients = jax.random.normal(jax.random.key(0), (20, 5, 3))

    def run(solver: Any) -> Any:
        def step(state: Any, gradient: jax.Array) -> Any:
            return solver.update(gradient, state, gradient)[::-1]

        return jax.jit(lambda g: jax.lax.scan(step, solver.init(g[0]), g))(gradients)

    (first, ours), (second, theirs) = run(solver), run(plain)
    # Within rounding: the two programs are fused differently.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5),
        (first.inner_state, ours),
        (second.inner_state, theirs),
    )
    assert second.norms.max() == -1  # the guard that is off remembers nothing


def _accepted(norms: list[float], **options: Any) -> list[bool]:
    solver: Any = skip_outlier_gradients(optax.sgd(1.0), **options)
    state, update, accepted = solver.init(jnp.zeros(1)), jax.jit(solver.update), []
    for norm in norms:
        updates, state = update(jnp.full(1, norm, jnp.float32), state)
        accepted.append(bool(updates[0] != 0))
    return accepted


def test_a_new_scale_is_believed_after_some_rejections() -> None:
    usual, large = [1.0] * 4, [1e3] * 5
    options = {"warmup": 4, "max_consecutive": 3}
    assert _accepted(usual + large, **options) == [True] * 4 + [False] * 3 + [True] * 2
    # From then on it is the scale by which outliers are judged.
    assert _accepted(usual + large + [1e6], **options)[-1] is False


def test_outliers_that_are_not_in_a_row_are_never_believed() -> None:
    norms = [1.0] * 4 + [1e3, 1.0] * 6
    accepted = _accepted(norms, warmup=4, max_consecutive=3)
    assert accepted == [True] * 4 + [False, True] * 6


_SUSPICIOUS: Any = skip_outlier_gradients(
    max_adabelief(0.1), warmup=1, max_consecutive=1
)
_suspicious_update = jax.jit(_SUSPICIOUS.update)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.sampled_from([1.0, 2.0, 1e6, 1e30, float("nan"), float("inf"), -3.0]),
        min_size=1,
        max_size=30,
    )
)
def test_nothing_that_is_not_finite_is_let_through(values: list[float]) -> None:
    params = np.zeros(1, np.float32)
    state = _SUSPICIOUS.init(jnp.zeros(1))
    for value in values:
        gradient = np.full(1, value, np.float32)
        updates, state = _suspicious_update(gradient, state, params)
        assert np.isfinite(updates).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_finite_gradient_whose_square_is_not_is_rejected() -> None:
    assert _accepted([1e30] * 5, warmup=1, max_consecutive=1) == [False] * 5


def test_zero_gradients_do_not_block_what_follows() -> None:
    assert _accepted([0.0] * 8 + [5.0], warmup=4)[-1]
    assert not is_outlier(jnp.asarray(5.0), jnp.zeros(4), 10.0, warmup=1)


def test_decision_is_that_of_the_global_gradient() -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    divided = NamedSharding(mesh, PartitionSpec("fsdp"))
    solver: Any = skip_outlier_gradients(max_adabelief(0.1), warmup=1)
    params = jax.device_put(jnp.ones(16), divided)
    state = solver.init(params)
    _, state = jax.jit(solver.update)(params, state, params)
    spike = jax.device_put(jnp.ones(16).at[3].set(1e6), divided)
    updates, state = jax.jit(solver.update)(spike, state, params)
    assert state.outliers == 1 and not updates.any()
    assert state.inner_state[0].nu_max.sharding.is_equivalent_to(divided, 1)


@pytest.mark.parametrize(("bad", "counts"), [(1e6, (1, 0)), (float("nan"), (0, 1))])
def test_local_gradients_are_judged_together(
    bad: float, counts: tuple[int, int]
) -> None:
    """Each device has a gradient of its own; one is corrupt, and all reject."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("replica",))
    solver: Any = skip_outlier_gradients(
        max_adabelief(0.1), warmup=1, axis_name="replica"
    )
    everywhere, divided = PartitionSpec(), PartitionSpec("replica")

    def two_steps(first: jax.Array, second: jax.Array) -> Any:
        state = solver.init(first)
        _, state = solver.update(first, state, first)
        updates, state = solver.update(second, state, first)
        return updates, state.outliers, state.nonfinite

    run = jax.shard_map(
        two_steps,
        mesh=mesh,
        in_specs=(divided, divided),
        out_specs=(divided, everywhere, everywhere),
    )
    first = jnp.arange(1.0, 9.0)
    updates, *found = jax.jit(run)(first, first.at[5].set(bad))
    assert not updates.any() and tuple(found) == counts


def test_donated_state_costs_one_copy_per_moment_at_most() -> None:
    """On CPU, where there is no fusion with several outputs; without it it is one."""
    solver: Any = skip_outlier_gradients(max_adabelief(0.1))
    params = jnp.ones(1 << 16)

    def step(state: Any, gradient: jax.Array, params: jax.Array) -> Any:
        updates, state = solver.update(gradient, state, params)
        return state, optax.apply_updates(params, updates)

    compiled = (
        jax.jit(step, donate_argnums=(0, 2))
        .lower(solver.init(params), params, params)
        .compile()
    )
    text = compiled.as_text()
    assert text is not None
    copies = [x for x in text.splitlines() if "copy(" in x and "65536" in x]
    assert len(copies) <= 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm_ratio": 1.0}, "max_norm_ratio=1.0"),
        ({"warmup": 65}, "warmup=65 does not fit history=64"),
        ({"max_consecutive": -1}, "max_consecutive=-1"),
        ({"max_consecutive": 2.5}, "max_consecutive=2.5 is not a whole number"),
        ({"history": 64.0}, "history=64.0 is not a whole number"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        skip_outlier_gradients(optax.sgd(1.0), **options)


def test_rejection_keeps_numbers_of_the_inner_state_that_are_no_jax_arrays() -> None:
    def init(params: Any) -> dict[str, Any]:
        del params
        return {"n": 0, "a": np.zeros(())}

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> Any:
        del params
        return updates, {"n": state["n"] + 1, "a": state["a"] + 1}

    inner = optax.GradientTransformation(init, update)  # pyright: ignore
    solver: Any = skip_outlier_gradients(inner)
    with jax.numpy_dtype_promotion("standard"):
        _, state = solver.update(jnp.ones(1), solver.init(jnp.zeros(1)))
        _, state = solver.update(jnp.full(1, jnp.nan), state)
    assert jax.tree.map(float, state.inner_state) == {"n": 1.0, "a": 1.0}


def test_an_axis_that_is_not_bound_is_named() -> None:
    solver = skip_outlier_gradients(optax.sgd(1.0), axis_name="q")
    state = solver.init(jnp.zeros(1))
    with pytest.raises(ValueError, match="axis_name='q' is not bound here"):
        jax.jit(solver.update)(jnp.ones(1), state)


@pytest.mark.parametrize("jitted", [True, False])
def test_gradients_of_integers_pass_through(jitted: bool) -> None:
    masked = optax.masked(max_adabelief(0.1), {"w": True, "n": False})
    solver: Any = skip_outlier_gradients(masked, warmup=1)
    params = {"w": jnp.array([1.0, 2.0]), "n": jnp.int32(3)}

    def step(state: Any, scale: Any) -> Any:
        def loss(q: Any) -> jax.Array:
            return jnp.sum(q["w"] ** 2) * scale

        gradients = jax.grad(loss, allow_int=True)(params)
        updates, state = solver.update(gradients, state, params)
        assert updates["n"] is gradients["n"]
        return updates["w"], state

    step = jax.jit(step) if jitted else step
    state = solver.init(params)
    first, state = step(state, 1.0)
    np.testing.assert_allclose(first, -0.111, rtol=1e-2)
    spike, state = step(state, 1e6)
    np.testing.assert_array_equal(spike, 0)
    assert state.outliers == 1
    np.testing.assert_allclose(state.norms[-1], np.sqrt(20), rtol=1e-6)
