"""The models and plans that `plan_bytes.py` and `plan_memory.py` compile.

The ten models of the tests, small enough that their programs compile in seconds but
with more tokens per device than width, so that moving weights is cheaper than moving
activations. Must not know what is compared.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the models are the tests' own

from dtft.parallel.planning import (  # noqa: E402
    candidate_of as plan_verify_candidate_of,
)
from dtft.planner import workload  # noqa: E402
from dtft.planner.aot import LoweredStep  # noqa: E402
from dtft.planner.cluster import Cluster, Pool  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402
from dtft.planner.search import (  # noqa: E402
    Choices,
    PlanSearch,  # noqa: E402
    as_plan,  # noqa: E402
    enumerate_space,  # noqa: E402
)
from dtft.planner.spmd import ShardingAssignment  # noqa: E402
from dtft.planner.workload import Workload  # noqa: E402
from tests.support.zoo import MODELS  # noqa: E402
from tests.support.zoo_parts import Model  # noqa: E402

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"batch": 4096, "widths": (256, 512, 512, 64)},
    "gpt": {"batch": 64, "time": 128, "width": 256, "layers": 2, "heads": 8,
            "vocabulary": 1024},
    "gpt_scan": {"batch": 64, "time": 128, "width": 256, "layers": 3, "heads": 8,
                 "vocabulary": 1024},
    "llama": {"batch": 64, "time": 128, "width": 256, "layers": 3, "heads": 16,
              "kv_heads": 8, "hidden": 512, "vocabulary": 1024},
    "vit": {"batch": 64, "size": 64, "patch": 8, "width": 256, "layers": 2, "heads": 8,
            "classes": 128},
    "resnet": {"batch": 64, "size": 32, "depths": (1, 1), "width": 64, "classes": 64},
    "moe": {"batch": 64, "time": 64, "width": 128, "layers": 2, "hidden": 256,
            "experts": 8, "chosen": 2, "heads": 8, "vocabulary": 512},
    "lora": {"batch": 64, "time": 64, "width": 256, "layers": 2, "heads": 8, "rank": 16,
             "vocabulary": 512},
    "rnn": {"batch": 256, "time": 16, "width": 128, "vocabulary": 256},
    "unet": {"batch": 64, "size": 16, "width": 64, "multiples": (1, 2), "groups": 32},
    "user_step": {"batch": 4096, "items": 8192, "width": 64, "hidden": 256},
}  # fmt: skip


def model(name: str) -> Model:
    """One of the tests' models, in the size of the studies."""
    return MODELS[name](**SIZES[name])


def question_of(one: Model) -> Workload:
    """What is asked of the planner: the loss, or where there is one the user's step."""
    if one.own_step is not None:
        return workload.of_step(one.own_step, one.own_state, one.batch)
    return workload.of_loss(one.loss, one.optimizer, one.params, one.batch)


class _Laid(PlanSearch):
    """A search that divides along `tensor` what it is told to."""

    def __init__(
        self, asked: Workload, pool: Pool, *, scatters: bool, tensor: Sequence[int]
    ) -> None:
        super().__init__(asked, pool, scatters=scatters)
        self._tensor = tensor

    def _layouts(
        self, of: np.ndarray, found: Sequence[ShardingAssignment], which: np.ndarray
    ) -> list[tuple[ShardingAssignment, np.ndarray]]:
        axes = {
            dim: names
            for one in found[:1]
            for dim, names in one.axes.items()
            if "tensor" not in names
        }
        axes |= dict.fromkeys(self._tensor, ("tensor",))
        return [(replace(one, axes=axes), np.arange(len(of))) for one in found[:1]]


def plan_of(
    asked: Workload,
    pins: Mapping[str, Any],
    cluster: Cluster,
    *,
    scatters: bool,
    tensor: Sequence[int] | None = None,
) -> tuple[Plan, list[int]]:
    """The plan for a given mesh and ZeRO level.

    Args:
        asked: the step.
        pins: sizes of axes, `zero`, and what else is given.
        cluster: whose costs decide what `tensor` divides, where it is not given.
        scatters: whether the compiler that it is compared with has reduce-scatter.
        tensor: dims of the program that `tensor` divides.

    Returns:
        The plan, and the dims that `tensor` divides in it.
    """
    axes = [name for name in pins if name in ("replica", "fsdp", "tensor")]
    choices = Choices(
        num_devices=cluster.uniform.num_devices,
        batch=asked.batch_size,
        divides=dict.fromkeys(axes, ()),
        max_microbatches=pins.get("microbatches", 1),
        zero=(pins.get("zero", 0),),
        remat=(pins.get("remat", "none"),),
    )
    remat = pins.get("remat", "none")
    asked = asked if remat == "none" else asked.rematerialized(remat)
    search = (
        PlanSearch(asked, cluster.uniform, scatters=scatters)
        if tensor is None
        else _Laid(asked, cluster.uniform, scatters=scatters, tensor=tensor)
    )
    priced = search.price(enumerate_space(choices, pins))
    best = int(priced.ranking[0])
    axes = priced.division_of(best).axes
    divided = sorted(dim for dim, names in axes.items() if "tensor" in names)
    return as_plan(search, priced, best, cluster), divided


def candidate_of(one: Model, plan: Plan, target: str, name: str) -> LoweredStep:
    """The program that would run the plan."""
    given = (
        {"loss": one.loss, "optimizer": one.optimizer, "params": one.params}
        if one.own_step is None
        else {"step": one.own_step, "state": one.own_state}
    )
    given = {**given, "batch": one.batch}
    return plan_verify_candidate_of(plan, given, target=target, name=name)
