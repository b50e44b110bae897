"""Memory that a plan says a device needs, against what XLA's GPU compiler assigns.

Random models, meshes and knobs (`plan_memory_cases.py`) for H100 (none is there:
packages of the extra `aot`). An error is (predicted - assigned) / assigned, without the
reserve. A plan that says less than the reserve below what is assigned would be called
fitting on a device of some size although it is not: those are `could mislead`. For
`false fits` every configuration has a device of 0.5 to 1.5 times what is assigned; what
the gate of `dtft.planner.aot.check` leaves of them is beside it.

Compiling takes a quarter of an hour and more, so what was found is kept in
`results/plan_memory_programs.json` with the plan it is of, what `tensor` divides among
it: `--compile SECONDS` adds to it, and a changed model is compared again without
compiling, whatever costs least by then. Every second configuration was left aside while
the model was mended; the reserve is judged by those.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import plan_zoo  # noqa: E402
import report  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from plan_memory_cases import Case, cases  # noqa: E402

from dtft.planner.aot import (  # noqa: E402
    Compiled,
    Memory,
    compile_all,  # noqa: E402
    gate,
    gpu_target,  # noqa: E402
)
from dtft.planner.cluster import Cluster  # noqa: E402
from dtft.planner.memory import RESERVE  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402

TARGET = "h100"
COUNT, SEED = 200, 0
PINNED = ("microbatches", "remat", "zero")
"""Knobs that configurations have; others stay at what changes no program."""
KEPT = report.RESULTS / "plan_memory_programs.json"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration."""

    case: Case
    predicted: int
    """Bytes without the reserve."""
    assigned: int
    capacity: int
    """Bytes of the device that it is meant for."""
    fits_after: bool
    """Whether it passes the gate."""

    @property
    def error(self) -> float:
        """Relative; negative if the plan says too little."""
        return self.predicted / self.assigned - 1

    @property
    def fits(self) -> bool:
        """Whether its device has room for what was assigned."""
        return self.assigned <= self.capacity

    def fits_before(self, reserve: float = RESERVE) -> bool:
        """Whether the plan alone says that it fits its device."""
        return self.predicted + reserve * self.capacity <= self.capacity

    def could_mislead(self, reserve: float = RESERVE) -> bool:
        """Whether there is a device on which it would seem to fit and does not."""
        return self.predicted < (1 - reserve) * self.assigned


def planned(
    case: Case, tensor: Sequence[int] | None = None
) -> tuple[Any, Plan, list[int]]:
    """The model of a configuration, its plan, and the dims that `tensor` divides.

    Args:
        case: the configuration.
        tensor: these dims, of a program that there is; None: those of least cost.
    """
    model = plan_zoo.MODELS[case.family](**case.sizes)
    cluster = Cluster.parse(f"{case.num_devices // 8}x8xH100")
    asked = plan_zoo.question_of(model)
    plan, divided = plan_zoo.plan_of(
        asked, case.pins, cluster, scatters=True, tensor=tensor
    )
    return model, plan, divided


def layout(plan: Plan) -> str:
    """Twelve digits of all that the program depends on."""
    known = json.loads(plan.to_json())
    known["knobs"] = {knob: known["knobs"][knob] for knob in PINNED}
    names = ("mesh", "knobs", "state", "batch", "optimizer", "constraints")
    text = json.dumps({name: known[name] for name in names}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compile_more(kept: dict[str, Any], seconds: float) -> None:
    """Compiles what is not known yet, until the time is over."""
    end = time.monotonic() + seconds
    for case in cases(COUNT, SEED):
        if time.monotonic() > end:
            return
        known = kept.get(str(case.number))
        if known and known["layout"] == layout(planned(case, known["tensor"])[1]):
            continue
        model, plan, tensor = planned(case)
        candidate = plan_zoo.candidate_of(model, plan, TARGET, case.words)
        (result,) = compile_all([candidate], deadline_s=300)
        found: dict[str, Any] = {"layout": layout(plan), "tensor": tensor}
        if isinstance(result, Compiled):
            memory = result.memory
            found["memory"] = {
                "arguments": memory.arguments,
                "outputs": memory.outputs,
                "temporaries": memory.temporaries,
                "aliased": memory.aliased,
            }
        else:
            found["failure"] = result.reason[:200]
        kept[str(case.number)] = found
        KEPT.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def rows(kept: Mapping[str, Any]) -> Iterator[Row | str]:
    """Plans and compares; a text for what cannot be compared."""
    for case in cases(COUNT, SEED):
        known = kept.get(str(case.number))
        if known is None:
            continue
        if "failure" in known:
            yield f"not compiled: {case.words}: {known['failure']}"
            continue
        _, plan, _ = planned(case, known["tensor"])
        if layout(plan) != known["layout"]:
            yield f"compiled for another plan than today's: {case.words}"
        else:
            yield _row(case, plan, Memory(**known["memory"]))


def _row(case: Case, plan: Plan, memory: Memory) -> Row:
    predicted = plan.memory_bytes - plan.memory["reserve"]
    capacity = int(case.capacity_ratio * memory.total)
    compiled = Compiled(
        name=case.words, target=TARGET, collectives=(), memory=memory, seconds=0.0
    )
    return Row(
        case=case,
        predicted=predicted,
        assigned=memory.total,
        capacity=capacity,
        fits_after=gate(plan, compiled, capacity, reserve=RESERVE).fits,
    )


def _summary(name: str, part: Sequence[Row]) -> list[Any]:
    errors = sorted(abs(row.error) for row in part)
    return [
        name,
        len(part),
        f"{statistics.median(errors):.1%}",
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}",
        f"{min(row.error for row in part):+.1%}",
        f"{max(row.error for row in part):+.1%}",
        *_verdicts(part, RESERVE),
        sum(row.fits_after and not row.fits for row in part),
    ]


def _verdicts(part: Sequence[Row], reserve: float) -> list[int]:
    """Plans that could mislead, that do so on their device, that are refused there."""
    return [
        sum(row.could_mislead(reserve) for row in part),
        sum(row.fits_before(reserve) and not row.fits for row in part),
        sum(row.fits and not row.fits_before(reserve) for row in part),
    ]


def _reserves(found: Sequence[Row]) -> list[str]:
    """What other reserves would do; of all, and of those that were left aside."""
    left = [row for row in found if row.case.held_out]
    header = ["reserve", "could mislead", "false fits", "refused"]
    rows = [
        [
            f"{reserve:.0%}",
            *(
                f"{every} ({aside})"
                for every, aside in zip(
                    _verdicts(found, reserve), _verdicts(left, reserve), strict=True
                )
            ),
        ]
        for reserve in (0.0, 0.04, 0.08, 0.12, 0.16, 0.20)
    ]
    return report.table(header, rows)


def _parts(found: Sequence[Row]) -> Iterator[list[Any]]:
    parts: dict[str, list[Row]] = {"all": list(found)}
    for row in found:
        pins = row.case.pins
        names = ["left aside" if row.case.held_out else "looked at", row.case.family]
        names += [f"{knob}={pins[knob]}" for knob in ("remat", "zero", "microbatches")]
        names.append("with tensor" if "tensor" in pins else "without tensor")
        for name in names:
            parts.setdefault(name, []).append(row)
    order = ["all", "looked at", "left aside"]
    order += sorted(name for name in parts if name not in order)
    return (_summary(name, parts[name]) for name in order if name in parts)


def _figure(found: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(5, 5))
    axes = figure.subplots()
    for family in sorted({row.case.family for row in found}):
        part = [row for row in found if row.case.family == family]
        axes.loglog(
            [row.assigned / GIB for row in part],
            [row.predicted / GIB for row in part],
            ".",
            label=family,
        )
    ends = [f(row.assigned for row in found) / GIB for f in (min, max)]
    axes.plot(ends, ends, "k-", linewidth=0.5)
    axes.set_xlabel("assigned by XLA's GPU compiler, GiB per device")
    axes.set_ylabel("predicted by the plan, GiB per device")
    axes.legend()
    return figure


def main() -> None:
    """Compares all that is compiled, and writes the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--compile", type=float, default=0.0, metavar="SECONDS")
    given = options.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.compile:
        compile_more(kept, given.compile)
    made = list(rows(kept))
    found = [row for row in made if isinstance(row, Row)]
    if not found:
        options.error(
            f"of {len(kept)} kept programs none is of a plan of today's planner. "
            "Compile some with --compile SECONDS."
        )
    write(found, [row for row in made if isinstance(row, str)])


def write(found: Sequence[Row], failed: Sequence[str]) -> None:
    """The table and the figure; `failed`: why others have no figure."""
    worst = sorted(found, key=lambda row: -abs(row.error))[:15]
    listed = [
        f"* {row.error:+.1%} ({row.predicted / GIB:.2f} for {row.assigned / GIB:.2f} "
        f"GiB): {row.case.words}"
        for row in worst
    ]
    header = ["configurations", "number", "median error", "90 %", "lowest", "highest"]
    header += ["could mislead", "false fits", "refused", "after the gate"]
    limit = 0.8 * gpu_target(TARGET).memory_bytes / GIB
    report.write(
        "plan_memory",
        title="Memory per device: the plan and XLA's GPU compiler",
        command="python experiments/plan_memory.py --compile 3600",
        header=header,
        rows=_parts(found),
        figure=_figure(found),
        notes=[
            f"{len(found)} of {COUNT} drawn configurations. Errors are of the plan's "
            f"bytes without the reserve of {RESERVE:.0%}. `looked at`: the rules were "
            "made with these; `left aside`: with none of these. `could mislead`: the "
            "plan says more than the reserve too little, so that on a device of some "
            "size it would seem to fit and does not. `false fits`: on a device of 0.5 "
            "to 1.5 times what is assigned, drawn for each; `refused`: said not to fit "
            "there though it does; `after the gate`: what verification leaves of the "
            "false fits. With other reserves (in brackets: left aside):",
            "\n".join(_reserves(found)),
            f"Above {limit:.0f} GiB (80 % of an H100) XLA computes parts again on its "
            "own, so a plan says more there than is assigned.",
            "The largest errors:",
            "\n".join(listed),
            "Without a figure:" if failed else "",
            "\n".join(f"* {text}" for text in failed),
        ],
    )


if __name__ == "__main__":
    main()
