"""A residual network over three CPU devices that play GPU, FPGA and ASIC."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dtft.models.base import ResNetConfig
from dtft.parallel.mpmd.api import PlacedStep, make_placed_step
from dtft.placement.api import place
from dtft.placement.result import Placement
from dtft.planner.cluster.topology import Cluster
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.jaxprs import traced, uncut
from dtft.planner.ir.tracing import trace

GPU, FPGA, ASIC = "h100", "fpga-u280", "asic-activation"
Sent = Counter[tuple[int, int, str]]


def network() -> tuple[Any, Any, Any]:
    config = ResNetConfig(depths=(1,), width=4, num_classes=10)
    model = config.build(nnx.Rngs(0))
    graph, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)
    statistics = nnx.to_pure_dict(statistics)
    rng = np.random.default_rng(0)

    def loss(params: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, statistics)
        model.train()
        losses, metrics = config.loss(model, batch)
        after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        means = {name: jnp.mean(value) for name, value in metrics.items()}
        return jnp.mean(losses), (means, after)

    batch = {
        "image": rng.integers(0, 255, (8, 16, 16, 3)).astype(np.uint8),
        "label": rng.integers(0, 10, 8).astype(np.int32),
    }
    return loss, nnx.to_pure_dict(params), batch


@pytest.mark.more
@pytest.mark.timeout(180)  # about 50 programs are compiled
def test_dense_convolution_and_activation_run_where_they_belong() -> None:
    loss, params, batch = network()
    graph = trace(loss, params, batch)
    placement = place(
        graph,
        Cluster.parse(f"1x{GPU} + 1x{FPGA} + 1x{ASIC}"),
        affinity={"dense": GPU, "conv": FPGA, "activation": ASIC},
        together=list(uncut(traced(loss, params, batch)[0].jaxpr)),
        backward=True,
    )
    step = make_placed_step(
        loss,
        optax.sgd(0.1),
        params,
        batch,
        nodes=placement,
        devices=dict(zip((GPU, FPGA, ASIC), jax.devices(), strict=False)),
    )
    _kinds_are_where_they_belong(graph, placement)
    found = step.gradients(step.init(params), batch)
    wanted = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    jax.tree.map(_assert_close, found, wanted)
    assert _measured(step) == _predicted(graph, placement)
    _runs_as_scheduled(step, placement, params, batch)


def _kinds_are_where_they_belong(graph: Graph, placement: Placement) -> None:
    home = {"matmul": 0, "convolution": 1, "elementwise": 2}
    for op, node in zip(graph.operators, placement.of_operator, strict=True):
        assert node == home.get(op.kind, node)


def _assert_close(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def _measured(step: PlacedStep) -> Sent:
    kinds = ("value", "cotangent")
    return Counter(
        {
            (t.source, t.destination, t.kind): t.count
            for t in step.transfers
            if t.kind in kinds
        }
    )


def _predicted(graph: Graph, placement: Placement) -> Sent:
    """What tasks hand over."""
    made = {value for op in graph.operators for value in op.outputs}
    return Counter(
        (t.source, t.target, "cotangent" if t.is_gradient else "value")
        for t in placement.transfers
        if t.value in made
    )


def _runs_as_scheduled(
    step: PlacedStep, placement: Placement, params: Any, batch: Any
) -> None:
    _, _, timeline = step.measured(step.init(params), batch)
    for node, tasks in step.order.by_node.items():
        wanted = tuple((task.call.name, task.microbatch) for task in tasks)
        assert timeline.order[node] == wanted
    starts = step.predicted(placement)
    assert len(starts) == len(step.order.start_s)
    for node, order in timeline.order.items():
        mine = [t for t in starts if t.call.node == node and t.call.phase == "forward"]
        names = [task.call.name for task in sorted(mine, key=lambda t: starts[t])]
        assert [name for name, _ in order if name in names] == names
