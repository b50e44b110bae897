"""Memory that a plan says a device needs, against what XLA's GPU compiler assigns.

Random transformers and perceptrons on random meshes of 8 to 64 H100 (none is there:
packages of the extra `aot`), with random ZeRO levels, microbatches and
rematerialization. An error is (predicted - assigned) / assigned, without the reserve.
A plan that says less than the reserve below what is assigned could be called fitting
on some device although it is not: those are counted, and what the gate of
`dtft.planner.verify` leaves of them.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import plan_zoo  # noqa: E402
import report  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from dtft.planner import gpu_targets  # noqa: E402
from dtft.planner.cluster import Cluster  # noqa: E402
from dtft.planner.compiling import Candidate, compile_all  # noqa: E402
from dtft.planner.memory import RESERVE  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402
from dtft.planner.verify import Compiled, gate  # noqa: E402

TARGET = "h100"
CAPACITY = gpu_targets.target(TARGET).memory_bytes
TRANSFORMERS = ("gpt_scan", "llama", "gpt")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration."""

    family: str
    words: str
    knobs: Mapping[str, Any]
    predicted: int
    """Bytes without the reserve."""
    assigned: int
    fits_before: bool
    """Whether the plan alone says that it fits an H100."""
    fits_after: bool
    """Whether it passes the gate."""

    @property
    def error(self) -> float:
        """Relative; negative if the plan says too little."""
        return self.predicted / self.assigned - 1

    @property
    def could_mislead(self) -> bool:
        """Whether there is a device on which it would seem to fit and does not."""
        return self.predicted < (1 - RESERVE) * self.assigned

    @property
    def fits(self) -> bool:
        """Whether an H100 has room for what was assigned."""
        return self.assigned <= CAPACITY


def configuration(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A family, its sizes, and pins of mesh and knobs."""
    family = draw.choice((*TRANSFORMERS, "mlp"))
    tensor = draw.choice((1, 1, 2, 4, 8))
    data = draw.choice((8, 16, 32, 64)) // tensor
    fsdp = draw.choice([n for n in (1, 2, 4, 8, 16, 32, 64) if data % n == 0])
    zero = draw.choice((1, 2, 3)) if fsdp > 1 else 0
    microbatches = draw.choice((1, 1, 2, 4))
    remat = draw.choice(("none", "dots", "full")) if family != "mlp" else "none"
    batch = data * microbatches * draw.choice((1, 2, 4, 8))
    batch = max(2, batch)  # a batch of one example has no dim to divide
    sizes: dict[str, Any]
    if family == "mlp":
        widths = tuple(draw.choice((1024, 2048, 4096, 8192)) for _ in range(4))
        sizes = {"batch": batch * draw.choice((256, 1024, 4096)), "widths": widths}
    else:
        heads = draw.choice((8, 16, 32))
        sizes = {
            "batch": batch,
            "time": draw.choice((256, 512, 1024, 2048)),
            "width": heads * draw.choice((64, 128)),
            "layers": draw.choice((1, 2, 3) if family == "gpt" else (4, 8, 16, 32)),
            "heads": heads,
            "vocabulary": draw.choice((4096, 16384, 32768)),
        }
        if family == "llama":
            sizes |= {"kv_heads": 8, "hidden": 4 * sizes["width"]}
    axes = {"replica": data // fsdp, "fsdp": fsdp, "tensor": tensor}
    pins: dict[str, Any] = {axis: size for axis, size in axes.items() if size > 1}
    pins |= {"zero": zero, "microbatches": microbatches, "remat": remat}
    return family, sizes, pins


def drawn(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any], Plan, Any]]:
    """Configurations that can be planned: family, pins, plan and candidate."""
    draw = random.Random(seed)
    while count:
        family, sizes, pins = configuration(draw)
        devices = 1
        for axis in ("replica", "fsdp", "tensor"):
            devices *= pins.get(axis, 1)
        words = " ".join(f"{name}={value}" for name, value in {**sizes, **pins}.items())
        cluster = Cluster.parse(f"{devices // 8}x8xH100")
        model = plan_zoo.MODELS[family](**sizes)
        asked = plan_zoo.question_of(model)
        plan = plan_zoo.plan_of(asked, pins, cluster, scatters=True)
        yield family, pins, plan, plan_zoo.candidate_of(model, plan, TARGET, words)
        count -= 1


def rows(count: int, seed: int) -> Iterator[Row | str]:
    """Plans, compiles and compares; a text for what could not be compiled."""
    found: list[tuple[str, dict[str, Any], Plan]] = []

    def candidates() -> Iterator[Candidate]:
        for family, pins, plan, made in drawn(count, seed):
            found.append((family, pins, plan))
            yield made

    results = compile_all(candidates(), deadline_s=60.0 * count)
    for (family, pins, plan), result in zip(found, results, strict=True):
        if isinstance(result, Compiled):
            yield _row(family, pins, plan, result)
        else:
            yield f"{family} {result.name}: {result.reason[:200]}"


def _row(family: str, pins: Mapping[str, Any], plan: Plan, result: Compiled) -> Row:
    return Row(
        family=family,
        words=result.name,
        knobs=pins,
        predicted=plan.memory_bytes - plan.memory["reserve"],
        assigned=result.memory.total,
        fits_before=plan.memory_bytes <= CAPACITY,
        fits_after=gate(plan, result, CAPACITY, reserve=RESERVE).fits,
    )


def _summary(name: str, part: list[Row]) -> list[Any]:
    errors = sorted(abs(row.error) for row in part)
    return [
        name,
        len(part),
        f"{statistics.median(errors):.1%}",
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}",
        f"{min(row.error for row in part):+.1%}",
        f"{max(row.error for row in part):+.1%}",
        sum(row.could_mislead for row in part),
        sum(row.fits_before and not row.fits for row in part),
        sum(row.fits_after and not row.fits for row in part),
    ]


def _parts(found: list[Row]) -> Iterator[list[Any]]:
    yield _summary("all", found)
    for family in sorted({row.family for row in found}):
        yield _summary(family, [row for row in found if row.family == family])
    for knob in ("remat", "zero", "microbatches"):
        for value in sorted({row.knobs[knob] for row in found}, key=str):
            part = [row for row in found if row.knobs[knob] == value]
            yield _summary(f"{knob}={value}", part)
    for tensor in (True, False):
        part = [row for row in found if ("tensor" in row.knobs) == tensor]
        if part:
            yield _summary("with tensor" if tensor else "without tensor", part)


def _figure(found: list[Row]) -> Figure:
    figure = Figure(figsize=(5, 5))
    axes = figure.subplots()
    for family in sorted({row.family for row in found}):
        part = [row for row in found if row.family == family]
        axes.loglog(
            [row.assigned / GIB for row in part],
            [row.predicted / GIB for row in part],
            ".",
            label=family,
        )
    ends = [min(row.assigned for row in found) / GIB, max(r.assigned for r in found)]
    ends[1] /= GIB
    axes.plot(ends, ends, "k-", linewidth=0.5)
    axes.set_xlabel("assigned by XLA's GPU compiler, GiB per device")
    axes.set_ylabel("predicted by the plan, GiB per device")
    axes.legend()
    return figure


def main() -> None:
    """Compiles all configurations, and writes the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quick", action="store_true", help="8 of them, no table")
    given = options.parse_args()
    made = list(rows(8 if given.quick else given.count, given.seed))
    found = [row for row in made if isinstance(row, Row)]
    failed = [row for row in made if isinstance(row, str)]
    worst = sorted(found, key=lambda row: -abs(row.error))
    listed = [
        f"* {row.error:+.1%} ({row.predicted / GIB:.2f} for {row.assigned / GIB:.2f} "
        f"GiB): {row.family} {row.words}"
        for row in worst[: 100 if given.quick else 15]
    ]
    header = ["configurations", "number", "median error", "90 %", "lowest", "highest"]
    header += ["could mislead", "false fits on an H100", "after the gate"]
    if given.quick:
        print("\n".join([*report.table(header, _parts(found)), *listed, *failed]))
        return
    report.write(
        "plan_memory",
        title="Memory per device: the plan and XLA's GPU compiler",
        command="python experiments/plan_memory.py",
        header=header,
        rows=_parts(found),
        figure=_figure(found),
        notes=[
            f"{len(found)} configurations; {len(failed)} could not be compiled. "
            "Errors are of the plan's bytes without the reserve. `could mislead`: what "
            f"the plan says is more than {RESERVE:.0%} too little, so that on a device "
            "of some size it would seem to fit and does not. `false fits`: on an H100.",
            "The largest errors:",
            "\n".join(listed),
            *failed,
        ],
    )


if __name__ == "__main__":
    main()
