"""Plan values by simple rules, and small losses, for the tests of what runs plans."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dtft.checkpoint.state import tree
from dtft.planner.plan import Knobs, Plan, Prediction
from dtft.planner.types import Spec

BATCH_AXES = ("replica", "fsdp")


def spec_over(shape: tuple[int, ...], mesh: Mapping[str, int], axes: list[str]) -> Spec:
    """One axis per dim, the last dims first, where it fits evenly."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for axis in axes:
        for dim in reversed(range(len(shape))):
            size = mesh.get(axis, 1)
            # Dim 0 of what has three is the layer.
            free = not spec[dim] and shape[dim] % size == 0 and (len(shape) < 3 or dim)
            if free and size > 1 and len(shape) > 1:
                spec[dim] = (axis,)
                break
    return tuple(spec)


def specs_over(like: Any, mesh: Mapping[str, int], axes: list[str]) -> dict[str, Spec]:
    """`spec_over` of every leaf, by path."""
    return {
        path: spec_over(leaf.shape, mesh, axes)
        for path, leaf in tree.to_paths(like).items()
    }


def plan_of(
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mapping[str, int],
    knobs: Knobs | None = None,
    constraints: Mapping[int, Spec] | None = None,
) -> Plan:
    """A plan for a loss: `tensor` divides matrices, ZeRO as the knobs say."""
    knobs = knobs or Knobs()
    with jax.numpy_dtype_promotion("standard"):
        opt_state = jax.eval_shape(optimizer.init, params)
    own = ["tensor", *(["fsdp"] if knobs.zero == 3 else [])]
    more = ["replica"] if knobs.zero in (1, 2) else []
    rows = tuple(axis for axis in BATCH_AXES if mesh.get(axis, 1) > 1)
    return Plan(
        entry="loss",
        mesh=mesh,
        knobs=knobs,
        state=specs_over(params, mesh, own),
        batch={
            path: (rows, *((),) * (leaf.ndim - 1)) if leaf.ndim else ()
            for path, leaf in tree.to_paths(batch).items()
        },
        optimizer=specs_over(opt_state, mesh, own + more),
        constraints=constraints or {},
        prediction=Prediction(terms={"compute": 1.0}, low_s=1, high_s=1, source="test"),
        memory={},
        capacity_bytes=0,
    )


def layers_params() -> dict[str, Any]:
    """Of `layers_loss`: an embedding, four equal layers, a head."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[-2]), jnp.float32)

    return {
        "embed": normal(16, 8),
        "layers": {"up": normal(4, 8, 32), "down": normal(4, 32, 8)},
        "head": normal(8, 16),
    }


def layers_batch(rows: int = 16) -> dict[str, jax.Array]:
    """Of `layers_loss`: tokens, and which of them count."""
    rng = np.random.default_rng(1)
    return {
        "tokens": jnp.asarray(rng.integers(0, 16, size=(rows, 6)), jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 2, size=(rows, 6)), jnp.float32),
    }


def block(x_BSD: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
    """A residual layer; `up` and `down` are read as `tensor` divides them."""
    return x_BSD + jnp.tanh(jax.nn.gelu(x_BSD @ layer["up"]) @ layer["down"])


def mean_loss(params: Any, x_BSD: jax.Array, batch: Any) -> jax.Array:
    """Mean over the unmasked tokens."""
    logits_BSV = x_BSD @ params["head"]
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(
        logits_BSV, batch["tokens"]
    )
    return jnp.sum(losses_BS * batch["mask"]) / jnp.sum(batch["mask"])


def layers_loss(params: Any, batch: Any) -> jax.Array:
    """Layers in a scan."""
    x_BSD = params["embed"][batch["tokens"]]
    x_BSD, _ = lax.scan(lambda x, p: (block(x, p), None), x_BSD, params["layers"])
    return mean_loss(params, x_BSD, batch)


def unrolled_loss(params: Any, batch: Any) -> jax.Array:
    """The same layers, one after another in the program's text."""
    x_BSD = params["embed"][batch["tokens"]]
    for index in range(4):
        x_BSD = block(x_BSD, jax.tree.map(lambda p, i=index: p[i], params["layers"]))
    return mean_loss(params, x_BSD, batch)


def num_tokens(batch: Any) -> jax.Array:
    """What `mean_loss` divides by."""
    return jnp.sum(batch["mask"])
