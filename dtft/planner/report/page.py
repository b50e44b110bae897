"""Pages of a report: sections as HTML, in one style, without network or scripts."""

from collections.abc import Iterable
from html import escape

from dtft.planner.wording import Section

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em;
  padding: 0 1em; color: #222; }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .2em .8em .2em 0;
  text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
svg { display: block; max-width: 100% } svg text { font-size: 12px; fill: #333 }
.limit { stroke: #c00; stroke-dasharray: 4 3 } .whole { fill: #eee; stroke: #888 }
.part { fill: #4269d0 } .cut { stroke: #888 }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
.key { margin-right: 1.2em }
@media print { h2 { break-after: avoid } }
"""


def page_html(title: str, parts: Iterable[str]) -> str:
    """Renders a whole HTML page, with its style inline.

    Args:
        title: title of the page, as plain text.
        parts: HTML of the body.
    """
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def section_html(one: Section, level: int = 2) -> str:
    """Renders a section of a report, with its title as the heading, as HTML.

    Args:
        one: the section.
        level: the level of the heading; 2 for h2.
    """
    return f"<h{level}>{escape(one.title)}</h{level}>{table_html(one)}"


def block_html(title: str, *parts: str) -> str:
    """Joins a heading (plain text) and parts that already are HTML."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def table_html(section: Section) -> str:
    """Renders the rows and notes of a report's section as HTML, without the title."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in section.notes)
    if not section.rows:
        return notes
    head = "".join(f"<th>{escape(name)}</th>" for name in section.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in section.rows
    )
    return f"<table><tr>{head}</tr>{body}</table>{notes}"
