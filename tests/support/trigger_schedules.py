"""What XLA schedules in the compiled programs of the triggers: prints JSON.

Runs as a program of its own because XLA reads XLA_FLAGS once per process.
"""

import json
import re
from typing import Any

import jax
from jax.sharding import AxisType

from dtft.collectives.gradients import Trigger, reduce_in_backward, reduced_gradients
from tests.support import layered

_REDUCE = re.compile(r" = (?!f32\[\] )\S.* all-reduce\(")  # not the value's alone
_BACKWARD_DOT = re.compile(
    r" (dot|fusion|custom-call)\(.*transpose\(jvp\(\)\)[^\"]*/(dot_general|transpose)\""
)
Schedule = dict[str, list[str]]
"""For each computation of a program, in order: `reduce` or `backward dot`."""


def schedule(text: str) -> Schedule:
    """Reads the order of a scheduled module."""
    assert "is_scheduled=true" in text
    found: Schedule = {}
    computation = ""
    for line in text.splitlines():
        if line.endswith("{"):
            computation = "entry" if line.startswith("ENTRY") else line.split()[0]
        elif "fused_computation" in computation:
            continue  # seen from outside as one fusion
        elif _REDUCE.search(line):
            found.setdefault(computation, []).append("reduce")
        elif _BACKWARD_DOT.search(line):
            found.setdefault(computation, []).append("backward dot")
    return found


def compiled(trigger: Trigger, *, stacked: bool) -> str:
    """The program of a trigger on four devices."""
    mesh = jax.make_mesh(
        (4,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:4]
    )
    in_body = stacked and trigger == "layer"

    def stacked_loss(params: Any, batch: Any) -> jax.Array:
        if not in_body:
            return layered.stacked_loss(params, batch)
        return layered.stacked_loss(
            params, batch, lambda layer: reduce_in_backward(layer, "replica")
        )

    function = reduced_gradients(
        stacked_loss if stacked else layered.unrolled_loss,
        mesh,
        "replica",
        trigger=trigger,
        reduced_by_loss=("layers", "scale") if in_body else (),
    )
    params = layered.stacked() if stacked else layered.unrolled()
    return jax.jit(function).lower(params, layered.batch()).compile().as_text() or ""


def schedules() -> dict[str, Schedule]:
    """By trigger and kind of model."""
    return {
        f"{trigger} {'stacked' if stacked else 'unrolled'}": schedule(
            compiled(trigger, stacked=stacked)
        )
        for trigger in ("device", "layer")
        for stacked in (False, True)
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    print(json.dumps(schedules()))
