"""Lints find what costs, and say how much."""

import math
import re
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft.planner import wording
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.compute import matmul_s
from dtft.planner.report.lints import (
    attention,
    batches,
    find_lints,
    precision,
    products,
    replicated,
    undivided,
)
from dtft.planner.search.decision import Decision, best_of
from dtft.planner.workload import of_loss
from tests.support import reading
from tests.support.deciding_zoo import decision, mlp, question
from tests.support.zoo import llama


def _kinds(found: tuple[object, ...]) -> list[str]:
    return [str(one).split(":")[0] for one in found]


def test_a_vocabulary_that_no_axis_divides() -> None:
    found = undivided(question(257), 2)
    assert any(text.startswith("257, whose next multiple is 258") for text in found)
    assert not any("256" in text.split(" ")[0] for text in undivided(question(), 2))


def test_a_fused_projection_names_its_leading_part() -> None:
    assert any(
        text.startswith("384, whose leading part is 3")
        for text in undivided(question(), 2)
    )


def test_the_price_of_a_size_that_is_not_aligned() -> None:
    odd = best_of(question(257), Cluster.parse("h100"))
    (found,) = (one for one in products(odd) if one.kind == "alignment")
    assert found.text.startswith(
        "257 on a device, no multiple of 4 (16 bytes of float32) as 260 is: "
    )
    device = odd.cluster.uniform.device
    lost = 0.0  # logits, and their gradient by what they are made of
    for place in (1, 2):
        odd_s, even_s = (
            float(
                matmul_s(
                    device,
                    512,
                    n if place == 1 else 128,
                    n if place == 2 else 128,
                    1,
                    "float32",
                )
            )
            for n in (257, 260)
        )
        lost += odd_s - even_s
    assert found.cost_s == pytest.approx(lost, rel=1e-6)
    shown = wording.seconds(found.cost_s, odd.plan.prediction.relative_error)
    assert found.text.split(": ")[1].startswith(f"{shown} of a step (")
    assert not [one for one in products(decision("h100")) if one.kind == "alignment"]


def test_a_large_array_that_is_whole_beside_an_axis_for_it() -> None:
    model = mlp(widths=(1021, 1031, 16))
    found = best_of(model, Cluster.parse("8xH100"), {"fsdp": 8, "zero": 3})
    (whole, *_) = (one for one in replicated(found) if "params/" in one.text)
    assert whole.num_bytes == 1021 * 1031 * 4
    assert "1021x1031" in whole.text and "no dim is divisible" in whole.text
    shown = reading.value(whole.text.rsplit(": ", 1)[1])
    assert shown == pytest.approx(whole.num_bytes, rel=reading.PRECISION)


def test_a_prime_batch_of_devices_that_repeat_work_has_a_price() -> None:
    model = mlp(batch=31, widths=(63, 127, 7))
    found = best_of(model, Cluster.parse("8xH100"), {"sequence": 1})
    assert found.idle
    (text,) = (one.text for one in find_lints(found) if "do not divide" in one.text)
    assert "8 devices do not divide the batch of 31: they repeat work of each" in text
    assert "Nearest that they divide: 24 takes " in text and ", 32 takes " in text


def test_devices_that_a_batch_leaves_idle_have_a_price() -> None:
    model, spec = mlp(batch=4099, widths=(4096, 16_384, 4096)), "5x1xH100"
    found = best_of(model, Cluster.parse(spec), {"tensor": 1, "sequence": 1})
    (text,) = (one.text for one in find_lints(found) if one.kind == "batch")
    assert "5 devices do not divide the batch of 4099: 1 of 5 devices are used" in text
    near = batches(found)
    assert [one.batch for one in near] == [4095, 4100]
    assert [math.prod(one.plan.mesh.values()) for one in near] == [5, 5]
    shown = re.findall(r"takes ([\d.]+ \w+)", text)
    errors = [one.plan.prediction.relative_error for one in near]
    times = [one.step_s for one in near]
    assert shown == list(map(wording.seconds, times, errors))


def test_an_axis_that_divides_nothing() -> None:
    found = best_of(mlp(batch=7), Cluster.parse("5x1xH100"), {"tensor": 5})
    (one,) = (one for one in find_lints(found) if one.kind == "repeated")
    assert "tensor=5 divides no array" in one.text


def test_a_model_without_faults_has_no_lints_of_these_kinds() -> None:
    model = mlp(batch=65_536, widths=(2048, 8192, 2048))
    found = best_of(model, Cluster.parse("8xH100"), {"replica": 8})
    assert not {"batch", "repeated", "replicated", "alignment"} & set(
        _kinds(find_lints(found))
    )


@pytest.mark.parametrize("remat", [False, True])
def test_scores_that_are_written_to_memory(remat: bool) -> None:
    model = llama(
        8, time=512, width=256, layers=2, heads=8, kv_heads=4, hidden=512,
        vocabulary=1024, remat=remat,
    )  # fmt: skip
    asked = of_loss(model.loss, optax.sgd(1e-3), model.params, model.batch)
    decided = best_of(asked, Cluster.parse("h100"), {"remat": "none"})
    (found,) = attention(decided)
    assert found.text.startswith("scores of 2x4x8x512x512 in all are read and written")
    compute_s = decided.plan.prediction.terms["compute"]
    # Forward: read, written. Backward: two read, one written. Again: as forward.
    least = 2 * 2 * 4 * 8 * 512**2 * 2 * (7 if remat else 5)
    device = decided.cluster.uniform.device
    assert least / device.memory_bandwidth < found.cost_s < compute_s
    assert found in find_lints(decided)
    assert attention(best_of(asked, Cluster.parse("cpu"))) == ()


def _product(dtype: str, precision: str | None = None) -> Decision:
    """One layer on one device, in a dtype."""
    weight = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    rows = jax.ShapeDtypeStruct((1024, 256), jnp.float32)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        made = jnp.dot(
            batch.astype(dtype),
            params.astype(dtype),
            precision=precision,
            preferred_element_type=dtype,
        )
        return jnp.mean(made.astype(jnp.float32))

    asked = of_loss(loss, optax.sgd(1e-3), weight, rows)
    return best_of(asked, Cluster.parse("v100"))


def test_a_dtype_without_a_peak_is_said() -> None:
    (found,) = precision(_product("bfloat16"))
    assert found.text == (
        "bfloat16 has no known peak on v100: priced as float32, 15.7 TFLOP/s. float16 "
        "has 125. It is in 100 % of the operations of matmuls, convolutions and custom "
        "kernels"
    )
    assert found in find_lints(_product("bfloat16"))
    assert precision(_product("float16")) == precision(_product("float32")) == ()


def test_precision_of_a_product_is_priced() -> None:
    """On a device where float32 has a narrower and a full form."""
    usual, full = (_product("float32", how).question for how in (None, "highest"))
    h100 = Cluster.parse("h100")
    times = [best_of(asked, h100).plan.at_peak_s for asked in (usual, full)]
    assert times[1] / times[0] == pytest.approx(494.7 / 66.9)


def test_a_perceptron_has_no_scores() -> None:
    assert attention(best_of(mlp(), Cluster.parse("h100"))) == ()


def test_fused_attention_saves_what_a_plan_without_scores_saves() -> None:
    """Memory without scores allows another mesh; the finding has its seconds."""

    def model(implementation: Literal["cudnn"] | None):
        def loss(params, batch):
            q, k, v = jnp.moveaxis(
                jnp.einsum("btd,dcnh->btcnh", batch, params["qkv"]), 2, 0
            )
            mixed = jax.nn.dot_product_attention(q, k, v, implementation=implementation)
            return jnp.mean(jnp.einsum("btnh,nhd->btd", mixed, params["out"]) ** 2)

        params = {
            "qkv": jax.ShapeDtypeStruct((1024, 3, 8, 128), jnp.bfloat16),
            "out": jax.ShapeDtypeStruct((8, 128, 1024), jnp.bfloat16),
        }
        batch = jax.ShapeDtypeStruct((16, 4096, 1024), jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"):
            asked = of_loss(loss, optax.sgd(1e-3), params, batch)
            return best_of(asked, Cluster.parse("2xh100"))

    plain, fused = model(None), model("cudnn")
    (found,) = attention(plain)
    saved_s = plain.plan.prediction.step_s - fused.plan.prediction.step_s
    assert found.cost_s == pytest.approx(saved_s, rel=0.25)
    assert found.num_bytes == pytest.approx(
        plain.plan.memory_bytes - fused.plan.memory_bytes, rel=0.25
    )
    error = plain.plan.prediction.relative_error
    assert f"takes about {wording.seconds(found.cost_s, error)} less" in found.text


def test_no_batch_is_offered_with_a_plan_whose_devices_repeat_work() -> None:
    """Of a small step, all devices doing the same is predicted to be the fastest."""
    found = best_of(mlp(batch=8), Cluster.parse("5x1xh100"))
    assert found.idle
    near = batches(found)
    assert [one.batch for one in near] == [5, 10]
    assert all(one.plan.mesh.get("tensor", 1) == 1 for one in near)
    assert best_of(found.question, found.cluster, batch=10).plan.mesh == {"tensor": 5}
