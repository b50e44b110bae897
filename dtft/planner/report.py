"""The report of a plan: an HTML file with pictures, and tables for a terminal.

The file needs no network and no scripts. Decides only what is shown and how; numbers
are those of `explain`, `why_not`, `pin_prices` and `lints`. Must not search, except
where these do.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from dtft.planner import (
    comparing,
    drawing,
    explain,
    mesh_text,
    page,
    pin_prices,
    wording,
)
from dtft.planner.deciding import Decision
from dtft.planner.lints import Lint, lints
from dtft.planner.plan import Alternative, Plan, Spec
from dtft.planner.priced import MEMORY
from dtft.planner.wording import Section, seconds, size


def html(
    plan: Plan, decision: Decision | None = None, checked: Iterable[Section] = ()
) -> str:
    """The report.

    Args:
        plan: what is reported.
        decision: what it was chosen from; without it (a plan from a file) the terms of
            alternatives, the shapes of arrays and the lints are left out.
        checked: what a compiler made of it.
    """
    title = f"Plan for {plan.cluster}"
    parts = [
        page.section(explain.summary(plan), level=1),
        *(page.section(section) for section in mesh_text.sections(plan)),
        page.block("Step time", _waterfall(plan), page.table(explain.waterfall(plan))),
        page.block("Memory of a device", _bars(plan, decision)),
        page.table(explain.memory(plan)),
        *(page.section(section) for section in checked),
        page.section(explain.bound(plan)),
        page.section(explain.alternatives(plan)),
        _baselines(plan, decision),
        page.section(explain.collectives(plan.collectives)),
        page.block("How each array is divided", _arrays(plan, decision)),
    ]
    if decision is not None:
        found = (*pin_prices.section(decision), lint_section(lints(decision)))
        parts.extend(page.section(section) for section in found)
    return page.page(title, parts)


def show(sections: Iterable[Section], console: Console | None = None) -> None:
    """Prints sections as tables on a terminal."""
    console = console or Console()
    for section in sections:
        if section.rows:
            table = Table(title=section.title, title_justify="left")
            for column in section.columns:
                table.add_column(column, overflow="fold")
            for row in section.rows:
                table.add_row(*(cell.replace("[", r"\[") for cell in row))
            console.print(table)
        else:
            console.print(section.title, style="bold", markup=False)
        for note in section.notes:
            console.print(f"  {note}", markup=False, highlight=False)


def lint_section(found: Sequence[Lint]) -> Section:
    """Lints as a table."""
    return Section(
        title="What a small change would save",
        columns=("kind", "what"),
        rows=tuple((one.kind, one.text) for one in found),
        notes=() if found else ("nothing was found",),
    )


def _waterfall(plan: Plan) -> str:
    terms = plan.prediction.terms
    return drawing.waterfall(terms, [seconds(value) for value in terms.values()])


def _bars(plan: Plan, decision: Decision | None) -> str:
    """Memory of the plan and its alternatives, and the line of what there is."""
    rows: list[tuple[str, Mapping[str, float]]] = [("this plan", plan.memory)]
    for _, one in explain.shown(plan):
        if (one.mesh, one.knobs) != (plan.mesh, plan.knobs):
            rows.append((_label(one), _memory_of(one, decision)))
    words = [size(sum(terms.values())) for _, terms in rows]
    limit = f"the capacity, {size(plan.capacity_bytes)}"
    return drawing.stacked(rows, plan.capacity_bytes, words, limit)


def _label(one: Alternative) -> str:
    knobs = one.knobs
    short = f"{wording.mesh(one.mesh)} mb={knobs.microbatches} {knobs.remat}"
    return f"{one.name + ': ' if one.name else ''}{short} z{knobs.zero}"


def _memory_of(one: Alternative, decision: Decision | None) -> Mapping[str, float]:
    """Its bytes by term, where what it was priced with is at hand."""
    if decision is not None and (known := decision.found.get(one.knobs.remat)):
        space = known.priced.space
        for at in known.priced.ranking.tolist():
            candidate = space[at]
            mesh = {axis: n for axis, n in candidate.mesh.items() if n > 1}
            if mesh == one.mesh and candidate.knobs == one.knobs:
                return {name: float(known.priced.memory[name][at]) for name in MEMORY}
    return {"all terms": float(one.memory_bytes)}


def _baselines(plan: Plan, decision: Decision | None) -> str:
    """For each baseline what it costs more than the plan."""
    rows = []
    for _, one in explain.shown(plan):
        if not one.name:
            continue
        more = one.step_s - plan.prediction.step_s
        over = one.memory_bytes - plan.capacity_bytes
        fits = "it fits" if one.fits else f"{size(over)} too large"
        if (one.mesh, one.knobs) == (plan.mesh, plan.knobs):
            answer = "the plan is this baseline"
        else:
            answer = f"{wording.signed(seconds(more))} per step; {fits}"
        rows.append((one.name, wording.mesh(one.mesh), answer))
    section = Section(
        title="Why not the baselines",
        columns=("baseline", "mesh", ""),
        rows=tuple(rows),
    )
    return page.section(section) if rows else ""


def _arrays(plan: Plan, decision: Decision | None) -> str:
    """A picture per array; alike ones of several layers together."""
    found: dict[tuple[str, Spec, tuple[int, ...]], int] = defaultdict(int)
    shapes = _shapes(decision)
    for tree in ("state", "optimizer", "batch"):
        for path, spec in getattr(plan, tree).items():
            shape = shapes.get((tree, path), ())
            found[f"{tree} {comparing.layered(path)}", spec, shape] += 1
    rows = []
    for (name, spec, shape), times in found.items():
        picture = drawing.divided(spec, shape, plan.mesh)
        cells = (escape(name), str(times), "x".join(map(str, shape)))
        words = escape(comparing.spec_text(spec))
        rows.append("".join(f"<td>{c}</td>" for c in (*cells, picture, words)))
    head = "".join(
        f"<th>{name}</th>" for name in ("array", "times", "shape", "", "axes by dim")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    text = "<p>filled: what one device has of the last two dims</p>"
    return f"{text}<table><tr>{head}</tr>{body}</table>"


def _shapes(decision: Decision | None) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes by tree and path, as plans name them."""
    if decision is None:
        return {}
    question, found = decision.question, {}
    is_loss = question.entry == "loss"
    for path, role in question.roles.items():
        tree = "batch" if role == "batch" else "state"
        tree = "optimizer" if role == "optimizer" and is_loss else tree
        value = question.graph.values[question.graph.inputs[path]]
        found[tree, path.partition("/")[2]] = value.shape
    return found
