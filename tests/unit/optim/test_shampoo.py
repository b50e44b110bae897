"""Shampoo against a brute-force oracle in numpy, and what its options promise."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from dtft.optim import (
    max_adabelief,
    scale_by_max_belief,
    scale_by_shampoo,
    shampoo,
)
from dtft.optim.kronecker import blocks_of, inverse_root
from dtft.parallel.state_sharding import spec_of


def _gradients(params: Any, step: int, dtype: Any = None) -> Any:
    key = jax.random.fold_in(jax.random.key(1), step)
    return jax.tree.map(
        lambda p: jax.random.normal(key, p.shape, dtype or p.dtype), params
    )


def _params(dtype: str = "float32") -> Any:
    shapes = {"kernel": (3, 3, 2, 5), "w": (5, 3), "b": (3,), "row": (1, 4)}
    params = {k: jnp.ones(shape, dtype) for k, shape in shapes.items()}
    return {**params, "none": None}


def _equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def _root(statistic: np.ndarray, exponent: float, eps: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(statistic)
    values = np.maximum(values, 0)
    return vectors @ np.diag((values + eps * values.max()) ** -exponent) @ vectors.T


def _oracle(
    gradients: list[np.ndarray], block: int, decay: float, every: tuple[int, int]
) -> np.ndarray:
    """The last update of a matrix; slow, in float64, one block at a time."""
    b1, b2, eps, exponent, root_eps = 0.9, 0.999, 1e-16, 0.25, 1e-6
    shape = gradients[0].shape
    moment = np.zeros(shape)
    variance, largest = np.zeros(shape), np.zeros(shape)
    cuts = [np.array_split(np.arange(n), -(-n // block)) for n in shape]
    grid = [np.ix_(rows, columns) for rows in cuts[0] for columns in cuts[1]]
    sides = [[np.zeros((n, n)) for n in moment[at].shape] for at in grid]
    roots: list[Any] = []
    new = 1.0 if decay == 1 else 1 - decay
    direction = moment
    for t, g in enumerate(gradients, 1):
        moment = b1 * moment + (1 - b1) * g
        variance = b2 * variance + (1 - b2) * (g - moment) ** 2 + eps
        largest = np.maximum(largest, variance)
        graft = moment / (1 - b1**t) / (np.sqrt(largest / (1 - b2**t)) + eps)
        if t % every[0] == 0:
            for at, (left, right) in zip(grid, sides, strict=True):
                left[:] = decay * left + new * g[at] @ g[at].T
                right[:] = decay * right + new * g[at].T @ g[at]
        if t % every[1] == 0:
            roots = [[_root(s, exponent, root_eps) for s in pair] for pair in sides]
        direction = graft
        if roots:
            direction = np.zeros(shape)
            for at, (left, right) in zip(grid, roots, strict=True):
                direction[at] = left @ moment[at] @ right
            direction *= np.linalg.norm(graft) / np.linalg.norm(direction)
    return direction


@pytest.mark.parametrize("decay", [0.9, 1.0])
@pytest.mark.parametrize("shape", [(6, 4), (2, 2, 2, 4)])
@pytest.mark.parametrize(("block", "every"), [(8, (1, 1)), (3, (1, 3)), (2, (2, 4))])
def test_updates_equal_the_oracle(
    shape: tuple[int, ...], decay: float, block: int, every: tuple[int, int]
) -> None:
    transform: Any = scale_by_shampoo(
        beta_preconditioner=decay,
        block_size=block,
        statistics_every=every[0],
        precondition_frequency=every[1],
    )
    generator = np.random.default_rng(0)
    state, seen = transform.init(jnp.zeros(shape)), []
    step = jax.jit(transform.update)
    for _ in range(9):
        gradient = generator.normal(size=shape)
        seen.append(gradient.reshape(-1, shape[-1]))
        update, state = step(jnp.asarray(gradient, jnp.float32), state)
        expected = _oracle(seen, block, decay, every).reshape(shape)
        np.testing.assert_allclose(update, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_inverse_root_is_one(exponent: float) -> None:
    factor = np.random.default_rng(1).normal(size=(3, 6, 6))
    statistic = jnp.asarray(factor @ factor.swapaxes(1, 2), jnp.float32)
    root = np.asarray(inverse_root(statistic, exponent, 0.0), np.float64)
    power = np.linalg.matrix_power(root, round(1 / exponent))
    error = power @ np.asarray(statistic) - np.eye(6)
    assert np.abs(error).max() < 2e-2
    np.testing.assert_array_equal(root, root.swapaxes(1, 2))


def test_inverse_root_clips_negative_eigenvalues_and_has_no_scale() -> None:
    statistic = jnp.diag(jnp.array([1.0, 0.5, -1e-3]))[None]
    values = jnp.diagonal(inverse_root(statistic, 0.25, 1e-4)[0])
    np.testing.assert_allclose(values, [1, 2**0.25, 10], rtol=1e-3)
    large, small = (inverse_root(statistic * s, 0.25, 1e-4) for s in (1e30, 1e-30))
    np.testing.assert_allclose(large * 10**7.5, small / 10**7.5, rtol=1e-4)
    _equal(inverse_root(0 * statistic, 0.25, 1e-4)[0], jnp.eye(3))
    assert jnp.isnan(inverse_root(statistic * jnp.nan, 0.25, 1e-4)).all()


def test_inverse_root_uses_float64_where_there_is_one() -> None:
    matrix = np.diag([1.0, 1e-12])
    with jax.enable_x64(True):
        root = inverse_root(jnp.asarray(matrix)[None], 0.25, 0.0)
        np.testing.assert_allclose(np.diagonal(root[0]), [1, 1e3], rtol=1e-6)


def test_eigendecompositions_on_cpu_cannot_wait_for_each_other() -> None:
    """One matrix per call: a batch waits for the thread pool in which it runs."""
    text = jax.jit(inverse_root).lower(jnp.ones((4, 64, 64)), 0.25, 1e-6).as_text()
    calls = [line for line in text.splitlines() if "syevd" in line]
    assert calls and all("<64x64xf32>" in line for line in calls)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple), st.integers(1, 9)
)
def test_cut_and_join_are_inverse(shape: tuple[int, ...], block_size: int) -> None:
    blocks = blocks_of(shape, block_size)
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    if blocks is None:
        assert shape[-1] == 1 or array[..., 0].size == 1
        return
    assert max(blocks.block) <= block_size
    _equal(jax.jit(lambda own: blocks.join(blocks.cut(own), own))(array), array)


def test_a_large_block_size_is_no_block_size() -> None:
    params = {"w": jnp.ones((6, 4))}
    results = []
    for block_size in (6, 100):
        transform: Any = scale_by_shampoo(
            block_size=block_size, precondition_frequency=2
        )
        state, step_of = transform.init(params), jax.jit(transform.update)
        update: Any = None
        for step in range(4):
            update, state = step_of(_gradients(params, step), state)
        results.append((update, state))
    _equal(*results)
    assert results[0][1].statistics["w"].left.shape == (1, 6, 6)


def test_convolution_kernels_are_inputs_by_outputs() -> None:
    kernel = jnp.ones((3, 3, 2, 5))
    flat: Any = kernel.reshape(18, 5)
    transform: Any = scale_by_shampoo(precondition_frequency=2)
    state, flat_state = transform.init(kernel), transform.init(flat)
    assert state.statistics.left.shape == (1, 18, 18)
    assert state.statistics.right.shape == (1, 5, 5)
    step_of = jax.jit(transform.update)
    for step in range(4):
        gradient = _gradients(kernel, step)
        update, state = step_of(gradient, state)
        expected, flat_state = step_of(gradient.reshape(18, 5), flat_state)
        np.testing.assert_allclose(update, expected.reshape(kernel.shape), 1e-4, 1e-5)


def test_magnitude_is_that_of_max_adabelief_and_vectors_are_its_own() -> None:
    params = _params()
    transform: Any = scale_by_shampoo(precondition_frequency=3, block_size=4)
    graft: Any = scale_by_max_belief()
    state, graft_state = transform.init(params), graft.init(params)
    step_of, graft_of = jax.jit(transform.update), jax.jit(graft.update)
    update, expected = params, params
    for step in range(6):
        gradients = _gradients(params, step)
        update, state = step_of(gradients, state)
        expected, graft_state = graft_of(gradients, graft_state)
        for name in ("b", "row") if step >= 2 else ("b", "row", "w", "kernel"):
            np.testing.assert_allclose(update[name], expected[name], 1e-6)
        for name in ("w", "kernel"):
            norms = [float(jnp.linalg.norm(u[name])) for u in (update, expected)]
            np.testing.assert_allclose(*norms, rtol=1e-5)
    assert not np.allclose(update["w"], expected["w"], rtol=0.1)
    assert update["none"] is None


def test_roots_are_renewed_every_k_steps_only() -> None:
    transform: Any = scale_by_shampoo(precondition_frequency=4, statistics_every=2)
    params = {"w": jnp.ones((5, 3))}
    state, roots, statistics = transform.init(params), [], []
    step_of = jax.jit(transform.update)
    for step in range(9):
        _, state = step_of(_gradients(params, step), state)
        roots.append(np.asarray(state.roots["w"].left).tobytes())
        statistics.append(np.asarray(state.statistics["w"].left).tobytes())
    changed = [b != a for a, b in zip(roots, roots[1:], strict=False)]
    assert changed == [False, False, True, False, False, False, True, False]
    moved = [b != a for a, b in zip(statistics, statistics[1:], strict=False)]
    assert moved == [True, False] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_shapes_and_dtypes_never_change(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        params = _params(dtype)
        transform: Any = scale_by_shampoo(precondition_frequency=2, block_size=4)
        abstract = jax.eval_shape(transform.init, params)
        state = transform.init(params)
        traces, update = [], params

        @jax.jit
        def step(gradients: Any, state: Any) -> Any:
            traces.append(1)
            return transform.update(gradients, state)

        for index in range(5):
            update, state = step(_gradients(params, index), state)
        assert len(traces) == 1
        assert jax.tree.map(lambda u: u.dtype, update) == jax.tree.map(
            lambda p: p.dtype, params
        )
        same = jax.tree.map(
            lambda a, s: (a.shape, a.dtype) == (s.shape, s.dtype), abstract, state
        )
        assert all(jax.tree.leaves(same))
        wide = "float64" if dtype == "float64" else "float32"
        assert state.statistics["w"].left.dtype == state.roots["w"].right.dtype == wide
        assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(update))


def test_complex_leaves_get_the_direction_of_max_adabelief() -> None:
    params = jnp.ones((3, 3), jnp.complex64)
    transform: Any = scale_by_shampoo(precondition_frequency=1)
    graft: Any = scale_by_max_belief()
    state = transform.init(params)
    assert state.statistics is None
    update, _ = transform.update(params, state)
    _equal(update, graft.update(params, graft.init(params))[0])


def test_state_is_sharded_where_the_params_rule_says_and_gives_the_same() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",))
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones((16,))}
    transform: Any = scale_by_shampoo(precondition_frequency=2, block_size=8)
    abstract = jax.eval_shape(transform.init, params)
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, spec_of(s.shape, fsdp=4, tensor=1)), abstract
    )
    divided = jax.jit(transform.init, out_shardings=shardings)(params)
    assert divided.statistics["w"].left.sharding.shard_shape((2, 8, 8)) == (2, 2, 8)
    step = jax.jit(transform.update, out_shardings=(None, shardings))
    state, whole_step = transform.init(params), jax.jit(transform.update)
    for index in range(3):
        gradients = _gradients(params, index)
        update, divided = step(gradients, divided)
        expected, state = whole_step(gradients, state)
        np.testing.assert_allclose(update["w"], expected["w"], 1e-4, 1e-5)


def test_wrapped_by_optax() -> None:
    params = {k: v for k, v in _params().items() if k in ("w", "b")}
    static = ("block_size", "exchange", "mu_dtype", "weight_decay")
    wrapped: Any = optax.inject_hyperparams(shampoo, static_args=static)(
        learning_rate=0.1, precondition_frequency=2, beta_preconditioner=0.9
    )
    plain: Any = shampoo(0.1, precondition_frequency=2, beta_preconditioner=0.9)
    masked: Any = optax.masked(plain, {"w": True, "b": False})
    repeated: Any = optax.MultiSteps(plain, 2)
    solvers = (plain, wrapped, masked, repeated)
    with jax.numpy_dtype_promotion("standard"):
        states = [solver.init(params) for solver in solvers]
        results, gradients = [], params
        steps = [jax.jit(solver.update) for solver in solvers]
        for index in range(4):
            gradients = _gradients(params, index // 2)
            results = [
                step(gradients, state, params)
                for step, state in zip(steps, states, strict=True)
            ]
            states = [state for _, state in results]
    updates = [update for update, _ in results]
    np.testing.assert_allclose(updates[1]["w"], updates[0]["w"], 1e-3, 1e-5)
    np.testing.assert_allclose(updates[2]["w"], updates[0]["w"], 1e-6)
    _equal(updates[2]["b"], gradients["b"])
    state, update = plain.init(params), params
    for index in range(2):
        update, state = steps[0](_gradients(params, index), state, params)
    np.testing.assert_allclose(updates[3]["w"], update["w"], 1e-3, 1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size=0 is not positive"),
        ({"precondition_frequency": 0}, "frequency=0 is not positive"),
        (
            {"precondition_frequency": 3, "statistics_every": 2},
            "not a multiple of",
        ),
        ({"b1": 0.0}, "b1=0 makes"),
        ({"block_size": 2.5}, "block_size=2.5 is not a whole number"),
        ({"block_size": None}, "block_size=None is not a size"),
        ({"root_eps": 0.0}, "root_eps=0 is out of range"),
        (
            {"beta_preconditioner": jnp.bfloat16(0.999)},
            "beta_preconditioner has dtype bfloat16",
        ),
    ],
)
def test_wrong_options_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        scale_by_shampoo(**options)


def test_statistics_that_would_never_be_measured_are_refused() -> None:
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    solver = scale_by_shampoo(exchange=lambda tree: None)
    with pytest.raises(ValueError, match="exchange gave a tree of another structure"):
        solver.update(params, solver.init(params))
    solver = scale_by_shampoo()
    local = {"a": params["a"], "b": None}
    with pytest.raises(ValueError, match="local_gradients gave a tree of another"):
        solver.update(params, solver.init(params), local_gradients=local)


_START = np.random.default_rng(3).normal(size=(4, 4))


def _parabola(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x - 1.0))


def _rosenbrock(x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    return jnp.sum(100 * (flat[1:] - flat[:-1] ** 2) ** 2 + (1 - flat[:-1]) ** 2)


def _matrix(x: jax.Array) -> jax.Array:
    """Distance of X to the solution of A X = B."""
    generator = np.random.default_rng(4)
    a, b = (jnp.asarray(generator.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    return jnp.mean(jnp.square(a @ x - b))


def _ill_conditioned(x: jax.Array) -> jax.Array:
    """A quadratic of condition 10^4, turned out of the coordinates' directions."""
    generator = np.random.default_rng(5)
    turns = [np.linalg.qr(generator.normal(size=(4, 4)))[0] for _ in range(2)]
    scale = np.diag(np.logspace(0, -1, 4))
    a, b = (jnp.asarray(scale @ turn, jnp.float32) for turn in turns)
    return jnp.sum(jnp.square(a @ x @ b.T))


def _minimise(solver: Any, loss: Any, rates: tuple[float, ...], steps: int) -> Any:
    """The loss left, as a fraction of the first, for each learning rate."""
    start = jnp.asarray(_START, jnp.float32)

    def run(rate: jax.Array) -> jax.Array:
        optimizer = solver(rate)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (params + updates, state), None

        carry = (start, optimizer.init(start))
        (params, _), _ = jax.lax.scan(step, carry, length=steps)
        return loss(params) / loss(start)

    return np.asarray(jax.jit(jax.vmap(run))(jnp.asarray(rates)))


@pytest.mark.parametrize(
    ("loss", "rate", "steps"),
    [(_parabola, 0.03, 300), (_rosenbrock, 0.01, 1000), (_matrix, 0.01, 1000)],
)
def test_converges(loss: Any, rate: float, steps: int) -> None:
    solver = functools.partial(shampoo, precondition_frequency=5)
    assert _minimise(solver, loss, (rate,), steps)[0] < 1e-2


def test_beats_its_graft_on_an_ill_conditioned_quadratic() -> None:
    rates = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
    solver = functools.partial(shampoo, precondition_frequency=5)
    ours = _minimise(solver, _ill_conditioned, rates, 200)
    graft = _minimise(max_adabelief, _ill_conditioned, rates, 200)
    assert ours.min() < 0.1 * graft.min()
