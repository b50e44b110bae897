"""Plans of any small MLP can be explained, linted and written to a file."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import dtft

DEVICES = ("cpu", "v100", "a100", "h100", "v5e")


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w, b in params:
        x = jnp.tanh(x @ w + b[None])
    return jnp.mean(x * x)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    widths=st.lists(st.sampled_from([1, 2, 7, 12, 64, 257]), min_size=2, max_size=4),
    rows=st.sampled_from([1, 2, 5, 8, 48]),
    count=st.integers(2, 8),
    device=st.sampled_from(DEVICES),
)
def test_a_plan_is_explained_linted_and_kept(
    widths: list[int], rows: int, count: int, device: str
) -> None:
    sides = zip(widths, widths[1:], strict=False)
    plan = dtft.plan(
        loss=_loss,
        optimizer=optax.adam(1e-3),
        params=[(_array(*each), _array(each[1])) for each in sides],
        batch={"x": _array(rows, widths[0])},
        cluster=f"1x{count}x{device}" if device != "v5e" else f"{count}xv5e",
    )
    assert plan.fits and math.prod(plan.mesh.values()) <= count
    assert plan.explain() and all(map(str, plan.lints()))
    again = dtft.Plan.from_json(plan.to_json())
    assert again == plan and again.explain()
