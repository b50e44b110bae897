"""Max-AdaBelief's state through storage: nothing is lost, nothing may be missing."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.checkpoint.state.tree import from_paths, to_paths
from dtft.checkpoint.storage.directory import StorageTier
from dtft.optim import max_adabelief, skip_outlier_gradients

SOLVER: Any = skip_outlier_gradients(max_adabelief(1e-2))


def _trained() -> tuple[Any, Any]:
    """The next gradient and the state after 40 steps whose gradients grow smaller."""
    params = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3)}

    def step(state: Any, scale: jax.Array) -> Any:
        gradient = jax.tree.map(lambda p: p * scale, params)
        return SOLVER.update(gradient, state, params)[1], None

    scales = 1 / jnp.arange(1.0, 41.0)
    run = jax.jit(lambda: jax.lax.scan(step, SOLVER.init(params), scales)[0])
    return jax.tree.map(lambda p: p / 41, params), run()


def _abstract(leaves: dict[str, Any]) -> dict[str, Any]:
    return {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for path, x in leaves.items()
    }


def test_the_step_after_a_restore_is_the_step_without(tmp_path: Path) -> None:
    gradient, state = _trained()
    leaves = to_paths(state)
    tier = StorageTier(tmp_path)
    tier.save(40, leaves, {})
    tier.wait_until_finished()
    restored = from_paths(state, tier.restore(40, _abstract(leaves))[0])
    tier.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert type(restored) is type(state)
    assert type(restored.inner_state[0]) is type(state.inner_state[0])
    update = jax.jit(SOLVER.update)
    (before, _), (after, _) = (update(gradient, s, gradient) for s in (state, restored))
    np.testing.assert_array_equal(before["w"], after["w"])
    # What the maximum is for: without it this step would be another.
    belief = state.inner_state[0]._replace(nu_max=state.inner_state[0].nu)
    lost = state._replace(inner_state=(belief, *state.inner_state[1:]))
    larger, _ = update(gradient, lost, gradient)
    assert jnp.abs(larger["w"]).max() > 1.001 * jnp.abs(before["w"]).max()


def test_a_state_without_the_maximum_is_refused(tmp_path: Path) -> None:
    leaves = to_paths(_trained()[1])
    without = {path: leaf for path, leaf in leaves.items() if "nu_max" not in path}
    assert len(without) == len(leaves) - 1
    tier = StorageTier(tmp_path)
    tier.save(40, without, {})
    tier.wait_until_finished()
    found = r"inner_state/0/nu_max/w: expected float32\[4, 3\], found nothing"
    with pytest.raises(ValueError, match=found):
        tier.restore(40, _abstract(leaves))
    tier.close()
    with pytest.raises(ValueError, match="Expected but not found: .*nu_max/w"):
        from_paths(_trained()[1], without)
