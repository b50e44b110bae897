"""What is read across the order in which its elements lie, and what that costs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dtft.planner.cluster import Cluster
from dtft.planner.deciding import decide
from dtft.planner.graph import Graph
from dtft.planner.plan import Plan
from dtft.planner.question import of_loss
from dtft.planner.strided import strided
from dtft.planner.trace import trace
from tests.planner.zoo import MODELS

X = jax.ShapeDtypeStruct((4, 8), "float32")
EACH_S = 1e-7


def _read(graph: Graph) -> dict[str, float]:
    """Elements by primitive; of alike operators all."""
    found: dict[str, float] = {}
    for number, elements in strided(graph).items():
        name = graph.operators[number].primitive
        found[name] = found.get(name, 0.0) + elements
    return found


def test_each_element_wise_reader_has_all_elements() -> None:
    def twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = x.T
        return jnp.exp(turned), jnp.sin(turned)

    assert _read(trace(twice, X)) == {"exp": 32.0, "sin": 32.0}


def test_a_product_reads_both_orders() -> None:
    assert _read(trace(lambda x: x @ x.T, X)) == {}


def test_a_sum_over_several_dims_copies_its_left_operand() -> None:
    x, by = (jax.ShapeDtypeStruct((2, 4, n), "float32") for n in (8, 16))

    def gradient(x: jax.Array, by: jax.Array) -> jax.Array:
        return jnp.sin(jnp.einsum("abi,abo->io", x, by).T)

    found = _read(trace(gradient, x, by))
    assert found in ({"dot_general": 2.0 * 4 * 8}, {"dot_general": 2.0 * 4 * 16})


def _summed(x: jax.Array, by: jax.Array) -> jax.Array:
    return jnp.einsum("abi,abo->io", x, by)


def test_what_is_computed_in_a_copy_is_read_across_itself() -> None:
    x, by = jnp.ones((2, 4, 8)), jnp.ones((2, 4, 16))
    few = jnp.ones(8)

    def left(values: jax.Array) -> jax.Array:
        return jnp.concatenate([_summed(values, by), _summed(by, values).T], 1)

    one = _read(trace(left, x))["dot_general"]

    def chained(a: jax.Array, b: jax.Array, c: jax.Array, bias: jax.Array) -> jax.Array:
        return left(a * b + 2.0 * c * b + jnp.broadcast_to(bias, a.shape))

    three = _read(trace(chained, x, x, x, few))["dot_general"]
    kept = _read(trace(lambda a, b: left(jnp.exp(a * b)), x, x))["dot_general"]
    size = 2 * 4 * 8
    assert three == one + 2 * size, "each of three arrays, and no bias"
    assert kept == one, "an exponential is computed once"


def test_the_gradient_of_a_kernel_copies_what_came_in() -> None:
    x = jax.ShapeDtypeStruct((4, 8, 8, 3), "float32")
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 16), "float32")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        made = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(made * made)

    convolved = "conv_general_dilated"
    assert _read(trace(loss, kernel, x)).get(convolved) is None
    found = _read(trace(jax.grad(loss), kernel, x))
    assert found[convolved] == 4 * 8 * 8 * 3


def test_rows_that_stay_whole_are_no_matter() -> None:
    many = jax.ShapeDtypeStruct((4, 8, 16), "float32")
    graph = trace(lambda x: jnp.exp(jnp.transpose(x, (1, 0, 2))), many)
    assert _read(graph) == {}


def test_what_leaves_its_loop_is_read_once() -> None:
    def scanned(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, one: (carry, one.T), 0.0, x)[1]

    many = jax.ShapeDtypeStruct((3, 4, 8), "float32")
    assert _read(trace(scanned, many)) == {"transpose": 32.0}


def _planned(each_s: float, pins: dict[str, object]) -> Plan:
    model = MODELS["mlp"](batch=64, widths=(32, 64, 64, 32))
    cluster = Cluster.parse("8xcpu")
    pool = cluster.uniform
    made = replace(pool.device.efficiency, strided_s=each_s)
    pool = replace(pool, device=replace(pool.device, efficiency=made))
    asked = of_loss(model.loss, model.optimizer, model.params, model.batch)
    return decide(asked, replace(cluster, pools=(pool,)), pins).plan


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_pays_for_the_elements_that_its_device_has(zero: int) -> None:
    pins: dict[str, object] = {
        "fsdp" if zero else "replica": 8, "zero": zero, "microbatches": 1,
        "remat": "none",
    }  # fmt: skip
    plain, paid = (_planned(each, pins).prediction.terms for each in (0.0, EACH_S))
    weights = 32 * 64 + 64 * 64 + 64 * 32
    grown = paid["optimizer"] - plain["optimizer"]
    assert grown == pytest.approx(2 * weights / (8 if zero else 1) * EACH_S)
    # Gathered along the last dim, the first weight is copied into order.
    copied = 32 * 64 if zero else 0
    assert paid["compute"] - plain["compute"] == pytest.approx(copied * EACH_S)
    assert paid["collectives"] == plain["collectives"]
