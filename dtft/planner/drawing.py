"""Pictures of a plan as inline SVG: bars of memory, the waterfall, divided arrays.

Turns numbers into shapes. Decides no number; must not know how plans are found.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dtft.planner.plan import Spec

COLORS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2",
    "#97bbf5", "#9c6b4e", "#9498a0",
)  # fmt: skip
_BAR, _GAP, _WIDTH, _RIGHT = 18, 6, 420, 190
_FAR = 4
"""Times the longest bar from which on a limit is not drawn."""
_LETTER = 6.6
"""Width of a letter, a little more than the widest of usual fonts at 12 px."""


def stacked(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    limit: float,
    words: Sequence[str],
    limit_words: str,
) -> str:
    """Horizontal bars made of terms, and a line where the limit is.

    Where the limit is far beyond all bars it is only said, so that terms can be seen.

    Args:
        rows: label of each bar, and its terms.
        limit: where the line is, in the unit of the terms.
        words: what stands behind each bar.
        limit_words: what the limit is.
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
        # Words that the line would cross stand behind it.
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
    """Bars of which each begins where the one before ends.

    Args:
        terms: name to value.
        words: what stands behind each bar.
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
    """Where bars begin, so that the longest label has room before them."""
    return 16 + _LETTER * max(map(len, labels), default=0)


def divided(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> str:
    """An array as a box with the cuts of its last two dims, one device's part filled.

    Dims before those are said in words below the box where an axis divides them.

    Args:
        spec: which axes divide which dim.
        shape: its sizes; empty where they are not known.
        mesh: axis to size.
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
    """Width and height of a box, like the array's but never too thin."""
    rows, columns = (max(1, size) for size in shape)
    ratio = min(3.0, max(1 / 3, columns / rows))
    return round(40 * math.sqrt(ratio)), round(40 / math.sqrt(ratio))


def _cut(along: str, at: float, width: int, height: int) -> str:
    if along == "x":
        return f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" class="cut"/>'
    return f'<line x1="0" x2="{width}" y1="{at:.1f}" y2="{at:.1f}" class="cut"/>'


def legend(names: Sequence[str]) -> str:
    """The colors of the terms."""
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
