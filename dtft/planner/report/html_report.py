"""The report of a plan: HTML with pictures as inline SVG, and tables for a terminal.

The HTML needs no network and no scripts. A `Decision` is a selected plan, with its
workload, cluster and all candidates.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from dtft.planner import wording
from dtft.planner.plan import Alternative, Plan
from dtft.planner.report import compare, page, text
from dtft.planner.report.lints import Lint
from dtft.planner.search import Decision
from dtft.planner.types import Spec
from dtft.planner.wording import Section, seconds, size

# Inline SVG: memory bars, waterfall, divided arrays.


COLORS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2",
    "#97bbf5", "#9c6b4e", "#9498a0",
)  # fmt: skip
_BAR, _GAP, _WIDTH, _RIGHT = 18, 6, 420, 190
_FAR = 4
"""A limit above this many times the longest bar is not drawn."""
_LETTER = 6.6
"""Width of a letter in px, a little more than in the widest usual font at 12 px."""


def stacked(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    limit: float,
    words: Sequence[str],
    limit_words: str,
) -> str:
    """Draws stacked horizontal bars, and a line at the limit.

    If the limit is more than 4 times (`_FAR`) as long as the longest bar, it is only
    mentioned in text, so that the bars stay large.

    Args:
        rows: for each bar its label, and a map from the name of each term (a piece of
            the bar) to the term's length, such as its bytes.
        limit: position of the line, in the unit of the lengths.
        words: text after each bar.
        limit_words: meaning of the limit, for the note below the bars.
    """
    names = list(dict.fromkeys(name for _, terms in rows for name in terms))
    longest = max([sum(terms.values()) for _, terms in rows], default=0.0) or 1.0
    is_near = limit <= _FAR * longest
    most = max(limit, longest) if is_near else longest
    begin, parts = _margin(label for label, _ in rows), []
    line = begin + _WIDTH * limit / most
    for row, (label, terms) in enumerate(rows):
        top, left = row * (_BAR + _GAP), begin
        parts.append(_text(begin - 8, top, label, anchor="end"))
        for name, value in terms.items():
            width = _WIDTH * value / most
            title = f"{label}: {name}"
            parts.append(_rect(left, top, width, _color(names, name), title))
            left += width
        # Text that the line would cross is placed after the line.
        is_crossed = left <= line < left + 12 + _LETTER * len(words[row])
        parts.append(_text((line if is_crossed else left) + 6, top, words[row]))
    height = len(rows) * (_BAR + _GAP)
    if is_near:
        parts.append(
            f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height}" '
            'class="limit"/>'
        )
    how = "dashed" if is_near else f"{limit / longest:.0f} times the longest bar"
    note = f"<p>{escape(limit_words)}: {how}</p>"
    return legend(names) + _svg(begin + _WIDTH + _RIGHT, height, parts) + note


def waterfall(terms: Mapping[str, float], words: Sequence[str]) -> str:
    """Draws a waterfall: each bar begins where the bar above it ends.

    Args:
        terms: map from the name of a bar to its length.
        words: text after each bar.
    """
    total, start, parts = sum(terms.values()) or 1.0, 0.0, []
    names, begin = list(terms), _margin(terms)
    for row, (name, value) in enumerate(terms.items()):
        top = row * (_BAR + _GAP)
        left, width = begin + _WIDTH * start / total, _WIDTH * value / total
        parts.append(_text(begin - 8, top, name, anchor="end"))
        parts.append(_rect(left, top, width, _color(names, name), name))
        parts.append(_text(left + width + 6, top, words[row]))
        start += value
    return _svg(begin + _WIDTH + _RIGHT, len(terms) * (_BAR + _GAP), parts)


def _margin(labels: Iterable[str]) -> float:
    """Computes the left end of the bars in px, with room for the longest label."""
    return 16 + _LETTER * max(map(len, labels), default=0)


def divided(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Draws an array as a box with cuts along its last two dims.

    The part of one device is filled. More than 16 parts of a dim are drawn without
    cuts. Other divided dims are listed as text after the box.

    Args:
        spec: mesh axes that divide each dim.
        shape: sizes of the dims; empty if unknown.
        mesh: map from an axis to its size.
    """
    cuts = [math.prod(mesh.get(axis, 1) for axis in axes) for axes in spec]
    rows, columns = ([1, 1] + cuts)[-2:]
    width, height = _sides(([1, 1, *shape])[-2:] if shape else (1, 1))
    parts = [f'<rect width="{width}" height="{height}" class="whole"/>']
    parts.append(
        f'<rect width="{max(1.0, width / columns):.1f}" '
        f'height="{max(1.0, height / rows):.1f}" class="part"/>'
    )
    for count, along in ((columns, "x"), (rows, "y")):
        step = (width if along == "x" else height) / count
        shown = range(1, count) if count <= 16 else ()
        parts += [_cut(along, step * at, width, height) for at in shown]
    outer = [f"dim {at} in {count}" for at, count in enumerate(cuts[:-2]) if count > 1]
    words = f"<span>{escape(', '.join(outer))}</span>" if outer else ""
    return _svg(width + 1, height + 1, parts) + words


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Computes the width and height of a box in px, in the ratio of two dims.

    The longer side is at most 3 times the shorter.
    """
    rows, columns = (max(1, size) for size in shape)
    ratio = min(3.0, max(1 / 3, columns / rows))
    return round(40 * math.sqrt(ratio)), round(40 / math.sqrt(ratio))


def _cut(along: str, at: float, width: int, height: int) -> str:
    if along == "x":
        return f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" class="cut"/>'
    return f'<line x1="0" x2="{width}" y1="{at:.1f}" y2="{at:.1f}" class="cut"/>'


def legend(names: Sequence[str]) -> str:
    """Renders a legend as HTML: the color and the name of each term.

    Args:
        names: the terms, in the order of their colors.
    """
    keys = (
        f'<span class="key"><i style="background:{_color(names, name)}"></i>'
        f"{escape(name)}</span>"
        for name in names
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def _color(names: Sequence[str], name: str) -> str:
    return COLORS[list(names).index(name) % len(COLORS)]


def _rect(left: float, top: float, width: float, color: str, title: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{max(width, 0.0):.1f}" height="{_BAR}" '
        f'fill="{color}"><title>{escape(title)}</title></rect>'
    )


def _text(left: float, top: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{left:.1f}" y="{top + _BAR - 5}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def report_html(
    plan: Plan,
    decision: Decision | None = None,
    checked: Iterable[Section] = (),
    planned_again: Iterable[Section] = (),
) -> str:
    """Renders the report of a plan as an HTML page; runs no search.

    Args:
        plan: the plan to report.
        decision: the decision that selected the plan; None for a plan from a file. The
            report then lacks the shapes of arrays, and shows only the total bytes of
            each alternative instead of bytes by term.
        checked: sections after the memory, such as the compiler's check of the plan.
        planned_again: sections at the end, for which the caller planned again: the
            costs of pins (settings that the user has fixed) and the lints.
    """
    title = f"Plan for {plan.cluster}"
    parts = [
        page.section_html(text.summary(plan), level=1),
        *(page.section_html(section) for section in text.mesh_sections(plan)),
        page.block_html(
            "Step time", _waterfall(plan), page.table_html(text.waterfall(plan))
        ),
        *(page.section_html(section) for section in text.compute(plan)),
        page.block_html("Memory of a device", _bars(plan, decision)),
        page.table_html(text.memory(plan)),
        *(page.section_html(section) for section in checked),
        page.section_html(text.bound(plan)),
        page.section_html(text.alternatives(plan)),
        _baselines(plan, decision),
        page.section_html(text.collectives(plan)),
        page.block_html("How each array is divided", _arrays(plan, decision)),
        *(page.section_html(section) for section in planned_again),
    ]
    return page.page_html(title, parts)


def report_text(sections: Iterable[Section], console: Console | None = None) -> None:
    """Prints sections on a terminal, each as a table with its notes below.

    Of a section without rows, prints the title and the notes as lines.
    """
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
    """Tabulates findings on a model or batch (`find_lints`), one per row."""
    return Section(
        title="What a small change would save",
        columns=("kind", "what"),
        rows=tuple((one.kind, one.text) for one in found),
        notes=() if found else ("nothing was found",),
    )


def _waterfall(plan: Plan) -> str:
    terms, error = plan.prediction.terms, plan.prediction.relative_error
    return waterfall(terms, [seconds(value, error) for value in terms.values()])


def _bars(plan: Plan, decision: Decision | None) -> str:
    """Draws the memory of the plan and its alternatives as bars, with the capacity."""
    rows: list[tuple[str, Mapping[str, float]]] = [("this plan", plan.memory)]
    for _, one in text.shown(plan):
        if (one.mesh, one.knobs) != (plan.mesh, plan.knobs):
            rows.append((_label(one), _memory_of(one, decision)))
    words = [size(sum(terms.values())) for _, terms in rows]
    limit = f"the capacity, {size(plan.capacity_bytes)}"
    return stacked(rows, plan.capacity_bytes, words, limit)


def _label(one: Alternative) -> str:
    knobs = one.knobs
    short = f"{wording.mesh(one.mesh)} mb={knobs.microbatches} {knobs.remat}"
    return f"{one.name + ': ' if one.name else ''}{short} z{knobs.zero}"


def _memory_of(one: Alternative, decision: Decision | None) -> Mapping[str, float]:
    """Returns the bytes of an alternative plan by term, such as parameters.

    The bytes come from the decision's search. Without a decision, or if the search
    lacks the alternative, returns only the sum of all terms.
    """
    if decision is not None and (known := decision.found.get(one.knobs.remat)):
        space = known.priced.space
        for at in known.priced.ranking.tolist():
            candidate = space[at]
            mesh = {axis: n for axis, n in candidate.mesh.items() if n > 1}
            if mesh == one.mesh and candidate.knobs == one.knobs:
                return known.priced.memory_of(at)
    return {"all terms": float(one.memory_bytes)}


def _baselines(plan: Plan, decision: Decision | None) -> str:
    """Tabulates how many seconds longer each baseline's step takes than the plan's.

    A baseline is a mesh of a common rule of thumb, such as data parallelism. Returns
    the table as HTML, '' if the plan lists no baseline.
    """
    rows = []
    for _, one in text.shown(plan):
        if not one.name:
            continue
        more = one.step_s - plan.prediction.step_s
        over = one.memory_bytes - plan.capacity_bytes
        fits = "it fits" if one.fits else f"{size(over)} too large"
        if (one.mesh, one.knobs) == (plan.mesh, plan.knobs):
            answer = "the plan is this baseline"
        else:
            cost = seconds(more, plan.prediction.relative_error)
            answer = f"{wording.signed(cost)} per step; {fits}"
        rows.append((one.name, wording.mesh(one.mesh), answer))
    section = Section(
        title="Why not the baselines",
        columns=("baseline", "mesh", ""),
        rows=tuple(rows),
    )
    return page.section_html(section) if rows else ""


def _arrays(plan: Plan, decision: Decision | None) -> str:
    """Renders a table of the plan's arrays as HTML, with a picture of each division.

    Arrays of several layers share a row if they have equal shapes and specs. Shapes
    come from the decision; without one they are left out.
    """
    found: dict[tuple[str, Spec, tuple[int, ...]], int] = defaultdict(int)
    shapes = _shapes(decision)
    for tree in ("state", "optimizer", "batch"):
        for path, spec in getattr(plan, tree).items():
            shape = shapes.get((tree, path), ())
            found[f"{tree} {wording.layered(path)}", spec, shape] += 1
    rows = []
    for (name, spec, shape), times in found.items():
        picture = divided(spec, shape, plan.mesh)
        cells = (escape(name), str(times), "x".join(map(str, shape)))
        words = escape(compare.spec_text(spec))
        rows.append("".join(f"<td>{c}</td>" for c in (*cells, picture, words)))
    head = "".join(
        f"<th>{name}</th>" for name in ("array", "times", "shape", "", "axes by dim")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    text = "<p>filled: what one device has of the last two dims</p>"
    return f"{text}<table><tr>{head}</tr>{body}</table>"


def _shapes(decision: Decision | None) -> dict[tuple[str, str], tuple[int, ...]]:
    """Maps each array of the plan to its shape; {} without a decision.

    An array is given by its tree (`state`, `optimizer` or `batch`) and its path.
    """
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
