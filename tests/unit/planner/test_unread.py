"""Operators that nothing reads cost nothing, as XLA removes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from dtft.planner.cluster import Cluster
from dtft.planner.ir import group_operators
from dtft.planner.ir.tracing import trace
from dtft.planner.search import decide
from dtft.planner.workload import of_loss
from tests.support.zoo import gpt, gpt_scan, llama
from tests.support.zoo_parts import Model

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def unread(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [op.primitive for op in trace(fn, *args).operators if op.unread]


def test_what_no_result_needs_is_unread() -> None:
    def loss(x: jax.Array) -> jax.Array:
        _ = jnp.sin(x) + 1.0
        return jnp.cos(x)

    assert unread(loss, X) == ["sin", "add"]
    graph = trace(loss, X)
    assert graph.flops == X.size
    (group,) = group_operators(graph, {})
    assert group.operator.primitive == "cos"


def test_a_carry_that_only_feeds_itself_is_unread() -> None:
    def body(carry: Any, w: jax.Array) -> Any:
        x, other = carry
        return (jnp.tanh(x * w), jnp.exp(other)), jnp.sin(x)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(body, (x, x), w)[0][0]

    stacked = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    assert unread(run, X, stacked) == ["exp", "sin"]


def test_a_carry_that_another_one_reads_a_turn_later_is_read() -> None:
    def body(carry: Any, _: None) -> Any:
        x, y, z = carry
        return (jnp.sin(x), jnp.tanh(x), y), None

    def run(x: jax.Array) -> jax.Array:
        return lax.scan(body, (x, x, x), None, length=3)[0][2]

    assert unread(run, X) == []


def test_conditions_are_read() -> None:
    def run(x: jax.Array) -> jax.Array:
        x = lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + 1, x)
        return lax.cond(jnp.max(x) > 0, lambda x: -x, lambda x: x, x)

    assert unread(run, X) == []


def test_side_effects_are_read() -> None:
    def run(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, jnp.sin(x))
        return jnp.cos(x)

    assert unread(run, X) == []


def test_what_enters_or_leaves_a_shard_map_is_read() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("a",))
    spec = jax.sharding.PartitionSpec("a")

    def run(x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)
        return jnp.cos(mapped(jnp.sin(x)))

    assert unread(run, X) == []


SMALL: Any = {"time": 64, "width": 64, "heads": 4, "vocabulary": 256}
FORMS: dict[str, Callable[[int], Model]] = {
    "gpt, scanned": lambda batch: gpt_scan(batch, layers=3, **SMALL),
    "gpt, scanned, rematted": lambda n: gpt_scan(n, layers=3, remat=True, **SMALL),
    "gpt, unrolled": lambda batch: gpt(batch, layers=3, **SMALL),
    **{
        f"llama, {form}, {'rematted' if remat else 'plain'}": partial(
            llama, remat=remat, unrolled=form == "unrolled", layers=3, kv_heads=2,
            hidden=128, **SMALL
        )
        for form in ("scanned", "unrolled") for remat in (True, False)
    },
}  # fmt: skip


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_compute_of_a_device_stays_with_its_examples(form: str, remat: str) -> None:
    seconds = []
    for devices in (8, 256):
        model = FORMS[form](devices)
        asked = of_loss(model.loss, optax.adam(1e-3), model.params, model.batch)
        pins: Any = {"replica": devices, "microbatches": 1, "remat": remat}
        cluster = Cluster.parse(f"{devices // 8}x8xH100")
        seconds.append(decide(asked, cluster, pins).plan.prediction.terms["compute"])
    assert np.allclose(seconds, seconds[0], rtol=0.005)
