"""Bytes that a plan says its program communicates, against the compiled program.

Eleven models on seven meshes of 8 to 64 fake CPU devices: the planner's collectives
per kind and mesh axes beside those of the program that would run the plan, trip counts
of loops included. A pair agrees if the differences of all kinds and axes together are
at most 1 % of the bytes found; every pair that does not is listed with the reason.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import plan_zoo  # noqa: E402
import report  # noqa: E402

from dtft.planner.aot import (  # noqa: E402  # noqa: E402
    Agreement,
    Compiled,
    CompileFailure,
    LoweredStep,
    compare,
    compile_all,
)
from dtft.planner.cluster import Cluster  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402

MESHES: tuple[Mapping[str, int], ...] = (
    {"replica": 8},
    {"fsdp": 16, "zero": 1},
    {"fsdp": 8, "zero": 3},
    {"tensor": 8},
    {"replica": 4, "tensor": 4},
    {"replica": 4, "fsdp": 8, "zero": 3},
    {"fsdp": 16, "tensor": 4, "zero": 3},
)
AGREES = 0.01
WHY: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (
        ("lora",),
        "tensor=4 zero=3",
        "",
        "the user's own step is not rebuilt (no gathers are put into it), and nothing "
        "lies on tensor: for the lookup XLA gathers a quarter of the table on each, "
        "and adds up what they find",
    ),
    (
        ("user_step",),
        "tensor=4",
        "",
        "nothing of this step lies on tensor; by the numbers, XLA divides the scores "
        "and the tables' gradients over it on the way, where the plan has all alike",
    ),
    (
        ("user_step",),
        "zero=3",
        "",
        "the user's own step is not rebuilt (no gathers are put into it), and it has "
        "fewer rows per device than its tables: XLA moves rows and their gradients "
        "where the plan gathers tables and adds up their gradients",
    ),
    (
        ("user_step",),
        "",
        "all_gather",
        "the rows of one tower are gathered for the scores and for their gradient: "
        "XLA keeps the first, the plan counts two",
    ),
)
"""Models, words of the mesh, words of the kind and axes; and why XLA does otherwise."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one mesh."""

    model: str
    mesh: str
    agreements: tuple[Agreement, ...] = ()
    failure: str = ""

    @property
    def predicted(self) -> int:
        """Bytes of a step, by the planner."""
        return sum(one.predicted_bytes for one in self.agreements)

    @property
    def found(self) -> int:
        """Bytes of a step, in the program."""
        return sum(one.found_bytes for one in self.agreements)

    @property
    def difference(self) -> float:
        """Differences per kind and axes, all of them positive, by the bytes found."""
        total = sum(
            abs(one.predicted_bytes - one.found_bytes) for one in self.agreements
        )
        return total / self.found if self.found else float(total > 0)

    @property
    def agrees(self) -> bool:
        """Whether the plan's bytes are those of the program."""
        return not self.failure and self.difference <= AGREES


def rows(names: list[str], target: str) -> Iterator[Row]:
    """Plans and compiles every pair."""
    for name in names:
        model = plan_zoo.model(name)
        asked = plan_zoo.question_of(model)
        plans: list[Plan] = []
        candidates: list[LoweredStep] = []
        for pins in MESHES:
            count = math.prod(size for axis, size in pins.items() if axis != "zero")
            # What `tensor` divides is decided for GPUs: all of these programs are.
            cluster = Cluster.parse(f"{max(1, count // 8)}x8xH100")
            try:
                scatters = target != "cpu"
                plan, _ = plan_zoo.plan_of(asked, pins, cluster, scatters=scatters)
                made = plan_zoo.candidate_of(model, plan, target, _words(pins))
            except ValueError as error:
                yield Row(model=name, mesh=_words(pins), failure=f"no plan: {error}")
                continue
            plans.append(plan)
            candidates.append(made)
        results = compile_all(candidates, deadline_s=900)
        for plan, result in zip(plans, results, strict=True):
            yield _row(name, plan, result)


def _row(name: str, plan: Plan, result: Compiled | CompileFailure) -> Row:
    if isinstance(result, CompileFailure):
        return Row(model=name, mesh=result.name, failure=result.reason)
    return Row(model=name, mesh=result.name, agreements=compare(plan, result))


def _words(pins: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in pins.items())


def _line(row: Row) -> list[Any]:
    return [
        row.model,
        row.mesh,
        f"{row.predicted / 2**20:.2f}",
        f"{row.found / 2**20:.2f}",
        row.failure[:60] or f"{row.difference:.2%}",
        "yes" if row.agrees else "no",
    ]


def _disagreements(row: Row) -> Iterator[str]:
    if row.failure:
        yield f"{row.model}, {row.mesh}: {row.failure[:300]}"
    for one in row.agreements:
        if abs(one.predicted_bytes - one.found_bytes) > AGREES * row.found:
            what = f"{one.kind} over {'+'.join(one.axes)}"
            yield (
                f"{row.model}, {row.mesh}: {what}: {one.predicted_bytes:,} predicted, "
                f"{one.found_bytes:,} found: {_reason(row, what)}"
            )


def _reason(row: Row, what: str) -> str:
    for models, mesh, words, reason in WHY:
        if row.model in models and mesh in row.mesh and words in what:
            return reason
    return "not explained"


def main() -> None:
    """Compiles all pairs, and writes the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", choices=plan_zoo.SIZES, help="this one, no table")
    options.add_argument("--target", default="cpu", help="cpu, or a GPU: no table")
    given = options.parse_args()
    names = [given.model] if given.model else list(plan_zoo.SIZES)
    found = list(rows(names, given.target))
    header = ["model", "mesh", "predicted MiB", "found MiB", "difference", "agrees"]
    listed = [text for row in found if not row.agrees for text in _disagreements(row)]
    if given.model or given.target != "cpu":
        print("\n".join(report.table(header, map(_line, found))))
        print("\n".join(listed))
        return
    agree = sum(row.agrees for row in found)
    report.write(
        "plan_bytes",
        title="Bytes communicated per step: the plan and the compiled program",
        command="python experiments/plan_bytes.py",
        header=header,
        rows=map(_line, found),
        notes=[
            f"{agree} of {len(found)} pairs agree within {AGREES:.0%}.",
            "A difference adds up those of all kinds and axes, so that bytes under "
            "another name count twice. Reasons were read off the program of one mesh "
            "per model; those that begin with `presumably` or `by the numbers` were "
            "not, and on a model's other meshes they are assumed. What differs, and "
            "why:",
            "\n".join(f"* {text}" for text in listed),
        ],
    )


if __name__ == "__main__":
    main()
