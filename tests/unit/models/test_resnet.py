"""ResNet: its published size, what it starts as, and which statistics it keeps."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dtft.models.base import ResNetConfig
from dtft.models.resnet import Bottleneck, ResNet

TINY = ResNetConfig(depths=(1,), width=8, num_classes=3)


def _images(count: int) -> jax.Array:
    return jax.random.randint(
        jax.random.key(0), (count, 32, 32, 3), 0, 256, jnp.int32
    ).astype(jnp.uint8)


def test_resnet50_has_its_published_size() -> None:
    model = nnx.eval_shape(lambda: ResNet(ResNetConfig(), nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert len(leaves) == 53 + 2 * 53 + 2 == 161
    assert sum(leaf.size for leaf in leaves) == 25_557_032
    assert len(jax.tree.leaves(nnx.state(model, nnx.BatchStat))) == 2 * 53


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computes_in_the_dtype_of_its_name(
    dtype: Literal["float32", "bfloat16"],
) -> None:
    config = replace(TINY, compute_dtype=dtype)
    model = nnx.eval_shape(lambda: ResNet(config, nnx.Rngs(0)))
    graph, state = nnx.split(model, (nnx.Param, nnx.BatchStat))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    trace = jax.make_jaxpr(lambda s, image: nnx.merge(graph, s)(image))
    found = trace(state, _images(2))
    assert [a.str_short() for a in found.out_avals] == ["float32[2,3]"]
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    lines = [line for line in str(found).splitlines() if "conv_general" in line]
    assert lines and all(f":{short}[" in line for line in lines)


def test_a_block_without_shortcut_starts_as_the_identity() -> None:
    @jax.jit
    def before_and_after() -> tuple[jax.Array, jax.Array]:
        block = Bottleneck(32, 8, 1, dtype=jnp.float32, rngs=nnx.Rngs(0))
        assert block.shortcut is None
        x_BHWC = jnp.abs(jax.random.normal(jax.random.key(1), (2, 8, 8, 32)))
        return x_BHWC, block(x_BHWC)

    np.testing.assert_array_equal(*before_and_after())


def test_evaluation_uses_running_statistics_of_training() -> None:
    model, images = nnx.jit(lambda: ResNet(TINY, nnx.Rngs(0)))(), _images(4)
    before = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    model.eval()
    apply = nnx.jit(lambda model, images: model(images))
    at_first = trained = apply(model, images)
    model.train()
    for _ in range(60):
        trained = apply(model, images)
    after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    model.eval()
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all(not np.array_equal(old, new) for old, new in pairs)
    evaluated = apply(model, images)
    np.testing.assert_allclose(evaluated, trained, rtol=0.02, atol=1e-3)
    assert not np.allclose(at_first, trained)
    # Examples no longer depend on each other.
    alone = apply(model, images[:1])
    np.testing.assert_allclose(alone, evaluated[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"depths": ()}, {"depths": (1, 0)}, {"width": 0}, {"num_classes": 0}]
)
def test_sizes_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"model.{name}="):
        ResNetConfig(**changes)
