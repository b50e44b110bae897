"""Reads back the numbers that explanations of plans have in their text."""

import re

UNITS = {
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "%": 1e-2, "": 1.0, "B": 1.0, "KiB": 2.0**10,
    "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50,
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)(?: (ms|us|s|%|[KMGTP]iB|B)\b| (%))?")
PRECISION = 1e-3
"""Relative error of four significant digits, with room."""


def value(text: str) -> float:
    """The first number of a text, in seconds, bytes or as a share of one."""
    return values(text)[0]


def values(text: str) -> list[float]:
    """All numbers of a text with their units."""
    return [
        float(found[1]) * UNITS[found[2] or found[3] or ""]
        for found in _NUMBER.finditer(text)
    ]


def change(text: str) -> float:
    """How much more than a reference a text says, as a share of it."""
    return value(text) - 1 if "times" in text else value(text)


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The table below a title: first cell of each row to the others."""
    block = next(part for part in text.split("\n\n") if part.startswith(title))
    lines = [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()[2:]]
    return {first: rest for first, *rest in lines}
