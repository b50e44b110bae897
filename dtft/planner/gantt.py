"""Pictures of a schedule: a lane for each node, tasks by kind, what comes in below.

As inline SVG for the report, and as a matplotlib figure. Turns numbers into shapes;
must not know how a placement is found.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from dtft.planner.drawing import COLORS, legend
from dtft.planner.placement_result import Placement
from dtft.planner.wording import seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANE, _THIN, _GAP, _WIDTH, _LETTER = 18, 5, 10, 720, 6.6
_SENT = "received"
_LEAST = 0.3
"""Points; what is narrower is drawn together with what follows it."""

Bar = tuple[int, str, float, float, str]
"""Lane, color's name, begin and end in seconds, and what it says."""


def bars(placement: Placement, least_s: float = 0.0) -> list[Bar]:
    """What is drawn; stretches below `least_s` are joined with their neighbours."""
    tasks = (
        (run.node, placement.kinds[run.task], run.start_s, run.end_s,
         f"{placement.tasks[run.task]}, {seconds(run.end_s - run.start_s)}")
        for run in placement.schedule
    )  # fmt: skip
    received = (
        (one.target, _SENT, one.start_s, one.end_s,
         f"{'gradient of ' * one.is_gradient}value {one.value}, "
         f"{size(one.num_bytes)} from {placement.nodes[one.source]}")
        for one in placement.transfers
    )  # fmt: skip
    return [*_joined(tasks, least_s), *_joined(received, least_s)]


def svg(placement: Placement) -> str:
    """The schedule as inline SVG, with its legend."""
    total = placement.makespan_s or 1.0
    begin = 16 + _LETTER * max(map(len, placement.nodes))
    scale = _WIDTH / total
    names = _names(placement)
    parts = []
    for lane, node in enumerate(placement.nodes):
        top = lane * (_LANE + _THIN + _GAP)
        parts.append(
            f'<text x="{begin - 8:.1f}" y="{top + _LANE - 5}" text-anchor="end">'
            f"{escape(node)}</text>"
            f'<rect x="{begin:.1f}" y="{top}" width="{_WIDTH}" height="{_LANE}" '
            'fill="#f4f4f4"/>'
        )
    for lane, name, start, end, words in bars(placement, _LEAST / scale):
        is_sent = name == _SENT
        top = lane * (_LANE + _THIN + _GAP) + (_LANE if is_sent else 0)
        parts.append(
            f'<rect x="{begin + start * scale:.2f}" y="{top}" '
            f'width="{max((end - start) * scale, _LEAST):.2f}" '
            f'height="{_THIN if is_sent else _LANE}" fill="{_color(names, name)}">'
            f"<title>{escape(words)}</title></rect>"
        )
    height = len(placement.nodes) * (_LANE + _THIN + _GAP) + 14
    parts += [
        f'<text x="{begin:.1f}" y="{height - 2}">0</text>',
        f'<text x="{begin + _WIDTH:.1f}" y="{height - 2}" text-anchor="end">'
        f"{escape(seconds(total))}</text>",
    ]
    width = begin + _WIDTH + 8
    return legend(names) + (
        f'<svg width="{width:.0f}" height="{height}" role="img" '
        f'viewBox="0 0 {width:.0f} {height}">{"".join(parts)}</svg>'
    )


def figure(placements: Sequence[tuple[str, Placement]]) -> "Figure":
    """Schedules as a matplotlib figure, one below the other, on the same time axis.

    Args:
        placements: each with its title.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = sum(len(one.nodes) + 1 for _, one in placements)
    made = Figure(figsize=(9, 0.45 * lanes + 0.8), layout="constrained")
    axes = made.subplots(len(placements), 1, squeeze=False, sharex=True)[:, 0]
    names = list(dict.fromkeys(n for _, one in placements for n in _names(one)))
    longest = max(one.makespan_s for _, one in placements) or 1.0
    for ax, (title, one) in zip(axes, placements, strict=True):
        for lane, name, start, end, _ in bars(one, longest / 3000):
            low, high = (0.38, 0.12) if name == _SENT else (-0.35, 0.7)
            span = [(1e3 * start, 1e3 * (end - start))]
            ax.broken_barh(span, (lane + low, high), color=_color(names, name))
        ax.set_yticks(range(len(one.nodes)), one.nodes)
        ax.set_ylim(len(one.nodes) - 0.4, -0.6)
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, 1e3 * longest)
    keys = [Patch(color=_color(names, name), label=name) for name in names]
    made.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False)
    return made


def _names(placement: Placement) -> list[str]:
    return list(dict.fromkeys((*placement.kinds, _SENT)))


def _color(names: Sequence[str], name: str) -> str:
    return COLORS[list(names).index(name) % len(COLORS)]


def _joined(some: Iterable[Bar], least_s: float) -> Iterable[Bar]:
    """Bars by lane; short ones of one color, one right after the other, as one."""
    last: dict[int, Bar] = {}
    for bar in some:
        lane, name, start, end, words = bar
        before = last.get(lane)
        if before is None:
            last[lane] = bar
            continue
        _, its_name, its_start, its_end, its_words = before
        is_short = min(end - start, its_end - its_start) < least_s
        if is_short and name == its_name and start - its_end < least_s:
            many = its_words if its_words.endswith(" more") else f"{its_words} and more"
            last[lane] = lane, name, its_start, max(end, its_end), many
            continue
        yield before
        last[lane] = lane, name, start, end, words
    yield from last.values()
