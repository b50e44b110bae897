"""The three triggers give the same gradients; what XLA makes of them; what they refuse.

Shape suffixes: B rows, D features, L layers.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from dtft.collectives.all_reduce import Algorithm
from dtft.collectives.gradients import (
    HostCommanded,
    Trigger,
    reduce_in_backward,
    reduced_gradients,
)
from tests.collectives import models

ROOT = Path(__file__).parents[2]
ALGORITHMS = get_args(Algorithm)
TRIGGERS = get_args(Trigger)


def make_mesh(**axes: int) -> Mesh:
    sizes = tuple(axes.values())
    return jax.make_mesh(
        sizes,
        tuple(axes),
        (AxisType.Auto,) * len(axes),
        devices=jax.devices()[: int(np.prod(sizes))],
    )


def assert_close(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def same_bits(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_every_trigger_and_algorithm_gives_the_gradient_of_the_global_mean(
    trigger: Trigger, algorithm: Algorithm
) -> None:
    params, batch = models.unrolled(), models.batch()
    expected = jax.jit(jax.value_and_grad(models.unrolled_loss))(params, batch)
    function = reduced_gradients(
        models.unrolled_loss,
        make_mesh(replica=4),
        "replica",
        trigger=trigger,
        algorithm=algorithm,
    )
    actual = function(params, batch)
    assert_close(actual, expected)
    for leaf in jax.tree.leaves(actual):
        assert leaf.sharding.is_fully_replicated
        rows = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(rows) == 1 and len(leaf.addressable_shards) == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_triggers_agree_bit_for_bit_on_cpu(algorithm: Algorithm) -> None:
    params, batch, mesh = models.unrolled(), models.batch(), make_mesh(replica=4)
    results = [
        reduced_gradients(
            models.unrolled_loss, mesh, "replica", trigger=trigger, algorithm=algorithm
        )(params, batch)
        for trigger in TRIGGERS
    ]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_aux_is_averaged(trigger: Trigger) -> None:
    def loss(params: Any, batch: Any) -> Any:
        value = models.unrolled_loss(params, batch)
        return value, {"twice": 2 * value, "first": jnp.mean(batch["x"][:, 0])}

    params, batch = models.unrolled(), models.batch()
    expected = jax.value_and_grad(loss, has_aux=True)(params, batch)
    function = reduced_gradients(
        loss, make_mesh(replica=4), "replica", trigger=trigger, has_aux=True
    )
    assert_close(function(params, batch), expected)


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_other_axes_of_the_mesh_are_left_to_the_partitioner(trigger: Trigger) -> None:
    mesh = make_mesh(replica=2, fsdp=2)
    params, batch = models.unrolled(), models.batch()
    expected = jax.value_and_grad(models.unrolled_loss)(params, batch)
    by_column = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    placed = {
        name: {"w": jax.device_put(layer["w"], by_column), "b": layer["b"]}
        for name, layer in params.items()
    }
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
    function = reduced_gradients(models.unrolled_loss, mesh, "replica", trigger=trigger)
    assert_close(function(placed, jax.device_put(batch, rows)), expected)


def test_inside_a_jitted_step() -> None:
    params, batch, mesh = models.unrolled(), models.batch(), make_mesh(replica=4)
    for trigger in ("device", "layer"):
        function = reduced_gradients(
            models.unrolled_loss, mesh, "replica", trigger=trigger
        )

        @jax.jit
        def step(params: Any, batch: Any, function: Any = function) -> Any:
            gradients = function(params, batch)[1]
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

        gradients = jax.grad(models.unrolled_loss)(params, batch)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        assert_close(step(params, batch), expected)


def test_rows_of_the_host_trigger_are_the_local_gradients() -> None:
    params, batch = models.unrolled(), models.batch()
    function = HostCommanded(models.unrolled_loss, make_mesh(replica=4), "replica")
    rows = function.local_gradients(params, batch)
    for row in range(4):
        share = jax.tree.map(lambda leaf, row=row: leaf[4 * row : 4 * row + 4], batch)
        expected = jax.value_and_grad(models.unrolled_loss)(params, share)
        assert_close(jax.tree.map(lambda leaf, row=row: leaf[row], rows), expected)
    for leaf in jax.tree.leaves(rows):
        assert leaf.sharding.spec[0] == "replica"


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_reduce_in_the_body_of_a_scan(check_vma: bool, remat: bool, op: Any) -> None:
    params, batch = models.stacked(), models.batch()

    def local(params: Any, batch: Any) -> Any:
        return models.stacked_loss(
            params, batch, lambda p: reduce_in_backward(p, "replica", op=op), remat
        )

    gradients = jax.jit(
        jax.shard_map(
            jax.grad(local),
            mesh=make_mesh(replica=4),
            in_specs=(PartitionSpec(), PartitionSpec("replica")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )(params, batch)
    expected = jax.grad(models.stacked_loss)(params, batch)
    factor = 4.0 if op == "sum" else 1.0
    assert_close(gradients, jax.tree.map(lambda g: factor * g, expected))


def test_layers_that_the_loss_reduces_itself() -> None:
    params, batch, mesh = models.stacked(), models.batch(), make_mesh(replica=4)

    def loss(params: Any, batch: Any) -> Any:
        return models.stacked_loss(
            params, batch, lambda p: reduce_in_backward(p, "replica")
        )

    function = reduced_gradients(
        loss, mesh, "replica", trigger="layer", reduced_by_loss=("layers",)
    )
    expected = jax.value_and_grad(models.stacked_loss)(params, batch)
    assert_close(function(params, batch), expected)


def test_without_an_axis_nothing_is_reduced() -> None:
    params = models.stacked()
    assert reduce_in_backward(params, None) is params


def test_refusals_say_what_to_change() -> None:
    mesh, loss = make_mesh(replica=4), models.unrolled_loss
    with pytest.raises(ValueError, match="trigger='hots' .*host, device, layer"):
        reduced_gradients(loss, mesh, "replica", trigger="hots")  # pyright: ignore
    with pytest.raises(ValueError, match="axis_name='data' .*Allowed: 'replica'"):
        reduced_gradients(loss, mesh, "data")
    with pytest.raises(ValueError, match="has no effect with trigger='device'"):
        reduced_gradients(loss, mesh, "replica", reduced_by_loss=("a",))
    function = reduced_gradients(
        loss, mesh, "replica", trigger="layer", reduced_by_loss=("a",)
    )
    with pytest.raises(ValueError, match="reduced_by_loss=.*Allowed: 'layer0'"):
        function(models.unrolled(), models.batch())


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_rows_must_be_divisible(trigger: Trigger) -> None:
    function = reduced_gradients(
        models.unrolled_loss, make_mesh(replica=4), "replica", trigger=trigger
    )
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \(6, 8\).*size 4"):
        function(models.unrolled(), models.batch(rows=6))
    with pytest.raises(ValueError, match=r"batch\['y'\] has shape \(\)"):
        function(models.unrolled(), {**models.batch(), "y": jnp.float32(0)})


def test_the_host_trigger_refuses_to_be_traced() -> None:
    function = reduced_gradients(
        models.unrolled_loss, make_mesh(replica=4), "replica", trigger="host"
    )
    with pytest.raises(ValueError, match="trigger='host' was called inside jax.jit"):
        jax.jit(function)(models.unrolled(), models.batch())
