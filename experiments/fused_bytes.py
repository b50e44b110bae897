"""Bytes that kernels of a compiled step move, against what the planner counts.

    python experiments/fused_bytes.py             compares the kept counts; no compiler
    python experiments/fused_bytes.py --compile   counts anew with XLA's GPU compiler

Each program is a loss and its gradients on one H100 (none is there: packages of the
extra `aot`). Counted are kernels other than products: element-wise work, reductions,
gathers, scatters, copies. The rules of `dtft.planner.ir.fusion` were read from the
programs of the set `made`; those of the set `other` were compiled afterwards. Compiling
all of them takes some ten minutes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import gpu_steps  # noqa: E402
import numpy as np  # noqa: E402
import plan_zoo  # noqa: E402, F401  (finds the models of the tests)
import report  # noqa: E402
from fused_blocks import blocks  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from dtft.planner.aot.gpu_targets import fake_gpus, gpu_target  # noqa: E402
from dtft.planner.aot.hlo import parse  # noqa: E402
from dtft.planner.ir import CHEAP, moved_bytes, trace  # noqa: E402
from dtft.planner.ir.op_groups import loop_copies  # noqa: E402
from tests.support.hlo import kernel_bytes  # noqa: E402
from tests.support.zoo import MODELS  # noqa: E402

TITLE = "Bytes that kernels move, counted by the planner and in compiled programs"
KEPT = report.RESULTS / "fused_bytes.json"
OF_ZOO: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 4, "layers": 2},
    "gpt_scan": {"batch": 4, "layers": 4},
    "llama": {"batch": 2, "time": 1024, "layers": 4, "vocabulary": 32000},
    "moe": {"layers": 2},
    "lora": {},
    "unet": {},
    "resnet": {},
    "mlp": {"batch": 8192},
}
MADE = ("resnet", "mlp")
"""Models whose programs were looked at when rules were made, beside the blocks."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A loss, and the shapes of its arguments."""

    name: str
    made: bool
    """Whether rules were read from this program."""
    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any

    def gradients(self) -> Callable[[Any, Any], Any]:
        """The function that is traced and compiled."""

        def loss(params: Any, batch: Any) -> jax.Array:
            value = self.loss(params, batch)
            return value[0] if isinstance(value, tuple) else value

        # A block hands the gradient of its activations on.
        is_block = isinstance(self.batch, jax.ShapeDtypeStruct)
        return jax.value_and_grad(loss, (0, 1) if is_block else 0)


def programs() -> list[Program]:
    """All programs of the study."""
    found = [
        Program(name=name, made=True, loss=one.loss, params=one.params, batch=one.batch)
        for name, one in blocks().items()
    ]
    for name, sizes in OF_ZOO.items():
        forms: dict[str, dict[str, Any]] = {name: sizes}
        if name in ("llama", "gpt_scan"):
            forms = {name: {**sizes, "remat": False}}
            forms[f"{name}, remat"] = {**sizes, "remat": True}
        if name == "llama":
            forms[f"{name}, unrolled"] = {**sizes, "remat": False, "unrolled": True}
        for form, kept in forms.items():
            model = MODELS[name](**kept)
            parts = {"params": model.params, "batch": model.batch}
            made = name in MADE
            found.append(Program(name=form, made=made, loss=model.loss, **parts))
    for case in gpu_steps.CASES:
        if not case.fused:
            small = replace(case, layers=2)
            params, batch = gpu_steps.arrays(small)
            loss = gpu_steps.loss_of(small, cudnn=False)
            name, parts = f"step {case.name}", {"params": params, "batch": batch}
            found.append(Program(name=name, made=False, loss=loss, **parts))
    return found


def counted(program: Program) -> float:
    """Bytes by the planner's rules."""
    graph = trace(program.gradients(), program.params, program.batch)
    copies = (
        passes * operator.trips * graph.bytes_of(operator) / 2
        for operator, passes in loop_copies(graph, CHEAP)
    )
    return sum(moved_bytes(graph).values()) + sum(copies)


def compiled(program: Program) -> int:
    """Bytes in the compiled program."""
    (device,) = fake_gpus(gpu_target("h100"), 1, per_host=1)
    where = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
        (program.params, program.batch),
    )
    text = jax.jit(program.gradients()).lower(*shapes).compile().as_text()
    return kernel_bytes(parse(text))


def main() -> None:
    """Compares, and writes the table and the figure."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    kept: dict[str, int] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    rows = []
    for program in programs():
        if given.compile or program.name not in kept:
            kept[program.name] = compiled(program)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        rows.append((program, counted(program), kept[program.name]))
    errors = {
        made: [abs(c / k - 1) for p, c, k in rows if p.made == made]
        for made in (True, False)
    }
    sets = {False: "compiled afterwards", True: "rules were read from"}
    words = [
        f"Programs {name}: {len(errors[made])}, median error "
        f"{median(errors[made]):.1%}, 90 % within "
        f"{np.quantile(errors[made], 0.9):.1%}, worst {max(errors[made]):.1%}."
        for made, name in sets.items()
    ]
    figure = Figure(figsize=(5, 5))
    axes = figure.subplots()
    for made, color in ((True, "tab:gray"), (False, "tab:blue")):
        some = [(k / 1e9, c / 1e9) for p, c, k in rows if p.made == made]
        axes.scatter(*zip(*some, strict=True), color=color, s=16)
    ends = [0.2, 200]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="GB, compiled", ylabel="GB, counted")
    axes.legend([sets[True], sets[False]])
    report.write(
        "fused_bytes",
        title=TITLE,
        command="python experiments/fused_bytes.py",
        header=["program", "set", "GB compiled", "GB counted", "error"],
        rows=[
            [
                program.name,
                "made" if program.made else "other",
                f"{known / 1e9:.2f}",
                f"{count / 1e9:.2f}",
                f"{count / known - 1:+.1%}",
            ]
            for program, count, known in rows
        ],
        figure=figure,
        notes=[
            *words,
            "The tests' ViT is left out: XLA's GPU compiler refused it here "
            '("Couldn\'t find output tile sizes").',
        ],
    )


if __name__ == "__main__":
    main()
