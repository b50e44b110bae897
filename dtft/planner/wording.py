"""Formats numbers, units, meshes and tables as text for reports of a plan.

The caller selects the numbers that are shown.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MANY = 10
"""Ratio to a reference from which `change` writes "times" instead of percent."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report: a title, a table, and notes below the table."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


_DIGITS = 4
"""Largest number of significant digits of a formatted number."""


def rounded(value: float, error: float = 0.0) -> float:
    """Rounds a number to as many significant digits as its error allows.

    The value of the last digit is the largest power of ten that does not exceed the
    absolute error. The result has at least one and at most four digits (`_DIGITS`).

    Args:
        value: the number.
        error: relative error of the number; 0 if it is exact.

    In the example, the absolute errors are 0, 24.7 and 6.2, so the last digits are
    tenths, tens and ones.

    >>> rounded(123.456), rounded(123.456, 0.2), rounded(123.456, 0.05)
    (123.5, 120.0, 123.0)
    """
    size = abs(value)
    digits = _DIGITS
    if error > 0 and 0 < size < math.inf:
        size = math.log10(size)
        places = math.floor(size) - math.floor(size + math.log10(error))
        digits = min(digits, max(1, places + 1))
    return float(f"{value:.{digits}g}")


def number(value: float, error: float = 0.0) -> str:
    """Rounds a number to the digits that its error allows; formats it without exponent.

    `error` is the relative error of the number; 0 if it is exact, which gives four
    digits (`rounded`). The text has at most twelve decimals.

    >>> number(12345.6), number(0.123456), number(8), number(12345.6, 0.1)
    ('12350', '0.1235', '8', '12000')
    """
    text = f"{rounded(value, error):.12f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def seconds(value: float, error: float = 0.0) -> str:
    """Formats a time in s, ms or us, rounded to the digits that its error allows.

    `value` is in seconds. `error` is the relative error of the time; 0 if it is exact,
    which gives four digits (`rounded`). A time below half a nanosecond is `0 s`.

    >>> seconds(0.01978), seconds(-2.5e-7), seconds(0), seconds(1e-12)
    ('19.78 ms', '-0.25 us', '0 s', '0 s')
    >>> seconds(0.01978, 0.25), seconds(0.99, 0.25)
    ('20 ms', '1 s')
    """
    value = rounded(value, error)
    size = abs(value)
    if size < 5e-10:
        return "0 s"
    if size >= 1:
        return f"{number(value)} s"
    unit, scale = ("ms", 1e3) if size >= 1e-3 else ("us", 1e6)
    return f"{number(value * scale)} {unit}"


def size(num_bytes: float) -> str:
    """Formats a number of bytes in the largest binary unit that does not exceed it.

    >>> size(1536), size(80 * 2**30), size(-3)
    ('1.5 KiB', '80 GiB', '-3 B')
    """
    value, unit = float(num_bytes), _BINARY[0]
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{number(value)} {unit}"


def signed(text: str) -> str:
    """Adds the sign `+` to a formatted number that is positive.

    >>> signed("3 ms"), signed("-3 ms"), signed("0 s")
    ('+3 ms', '-3 ms', '0 s')
    """
    return text if text.startswith(("-", "0 ")) else f"+{text}"


def percent(fraction: float, error: float = 0.0) -> str:
    """Formats a fraction as percent, rounded to the digits that its error allows.

    `error` is the relative error of the fraction; 0 if it is exact, which gives four
    digits (`rounded`). A nonzero fraction below 0.01 % is `<0.01 %`.

    >>> percent(0.12345), percent(0.0), percent(2e-7), percent(-2e-7)
    ('12.35 %', '0 %', '<0.01 %', '-<0.01 %')
    >>> percent(0.12345, 0.1)
    '12 %'
    """
    if 0 < abs(fraction) < 1e-4:
        return "-<0.01 %" if fraction < 0 else "<0.01 %"
    return f"{number(100 * fraction, error)} %"


def share(value: float, total: float, error: float = 0.0) -> str:
    """Formats a part of a total in percent; '' for total 0.

    Args:
        value: the part.
        total: the total.
        error: relative error of the part. The rest of the total is taken as exact, so
            the error of the share is smaller, and 0 if the part is the total.

    >>> share(5.0, 6.0), share(5.0, 6.0, 0.25), share(6.0, 6.0, 0.25), share(1.0, 0.0)
    ('83.33 %', '83 %', '100 %', '')
    """
    if not total:
        return ""
    return percent(value / total, error * max(0.0, 1 - abs(value / total)))


def change(value: float, reference: float, error: float = 0.0) -> str:
    """Formats the change from a reference to a value; '' for reference 0.

    The text has the difference in percent. If the value is 10 times the reference or
    more, the text has the ratio of both instead. The number in the text is
    rounded to the digits that its relative error, `error`, allows (`rounded`).

    >>> change(3.0, 2.0), change(1.0, 2.0), change(30.0, 2.0), change(1.0, 0.0)
    ('+50 %', '-50 %', '15 times', '')
    """
    if not reference:
        return ""
    if value / reference >= _MANY:
        return f"{number(value / reference, error)} times"
    more = value / reference - 1
    return signed(percent(more if abs(more) > 1e-9 else 0.0, error))


def layered(path: str) -> str:
    """Replaces each part of a path that is a number, such as a layer's number, by `*`.

    A `%2F`, which stands for a "/" in a key, becomes "/".

    >>> layered("blocks/11/up/kernel"), layered("params/mlp%2Flinear_0/w")
    ('blocks/*/up/kernel', 'params/mlp/linear_0/w')
    """
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path).replace("%2F", "/")


def axes(names: Iterable[str]) -> str:
    """Formats the names of mesh axes; `-` if there are none.

    >>> axes(("replica", "fsdp")), axes(())
    ('replica x fsdp', '-')
    """
    return " x ".join(names) or "-"


def mesh(sizes: Mapping[str, int]) -> str:
    """Formats the axes and sizes of a mesh in their order; `one device` without axes.

    >>> mesh({"fsdp": 4, "tensor": 2})
    'fsdp=4 x tensor=2'
    """
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"


def text(sections: Iterable[Section]) -> str:
    """Formats sections as plain text with aligned columns.

    A blank line separates two sections.
    """
    return "\n\n".join("\n".join(_lines(section)) for section in sections)


def _lines(section: Section) -> list[str]:
    lines = [section.title]
    if section.rows:
        lines += table(section.columns, section.rows)
    return lines + [f"  {note}" for note in section.notes]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table as lines: headings, then rows.

    Lines are indented by two spaces, and columns are two spaces apart.

    >>> table(("axis", "size"), [("tensor", "8")])
    ['  axis    size', '  tensor  8']
    """
    every = [columns, *rows]
    widths = [max(len(row[at]) for row in every) for at in range(len(columns))]
    made = []
    for row in every:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        made.append(f"  {'  '.join(cells)}".rstrip())
    return made
