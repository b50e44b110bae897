"""The planner's count of what kernels move, beside programs of the GPU compiler."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from dtft.planner.aot.hlo import parse
from dtft.planner.ir import CHEAP, moved_bytes, trace
from dtft.planner.ir.op_groups import loop_copies
from tests.support import gpu_compiler, hlo
from tests.support.zoo import gpt_scan, moe
from tests.support.zoo_parts import Model

SMALL: Any = {"time": 256, "width": 256, "layers": 2, "heads": 4, "vocabulary": 1024}
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: gpt_scan(8, **SMALL),
    "gpt, remat": lambda: gpt_scan(8, remat=True, **SMALL),
    "experts": lambda: moe(8, hidden=512, experts=4, **SMALL),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=() if it == "gpt" else pytest.mark.more) for it in MODELS],
)
def test_kernels_move_what_is_counted(name: str) -> None:
    model = MODELS[name]()
    gradients = jax.value_and_grad(model.loss)
    shapes = gpu_compiler.on_one((model.params, model.batch))
    program = parse(jax.jit(gradients).lower(*shapes).compile().as_text())
    graph = trace(gradients, model.params, model.batch)
    counted = sum(moved_bytes(graph).values())
    for operator, passes in loop_copies(graph, CHEAP):
        counted += passes * operator.trips * graph.bytes_of(operator) / 2
    assert counted == pytest.approx(hlo.kernel_bytes(program), rel=0.25)
