"""What an experiment leaves behind: a table, mostly a figure, and how to repeat them.

Writes `experiments/results/NAME.md`, `NAME.png` if there is a figure, and prints the
table. Must not know what was measured.
"""

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")


def write(
    name: str,
    *,
    title: str,
    command: str,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    figure: "Figure | None" = None,
    notes: Sequence[str] = (),
    machine: str = "",
) -> Path:
    """Writes the table and the figure of one experiment and prints the table.

    Args:
        name: File name without ending, as the script's.
        title: The heading: what is compared.
        command: What to type in the repository's root to get this again.
        header: One text per column.
        rows: One sequence per row; a float is shown with four significant digits, so
            format it yourself where the digits matter.
        figure: A matplotlib figure, where there is something to draw.
        notes: What the reader must know to judge the table; one paragraph each.
        machine: The machine in words; by default the CPU of this one.

    Returns:
        The path of the table.

    Raises:
        ValueError: a row has not as many cells as the header.
    """
    lines = table(header, rows)
    print("\n".join(lines), flush=True)
    RESULTS.mkdir(exist_ok=True)
    picture = [f"![{title}]({name}.png)"] if figure else []
    if figure:
        figure.savefig(RESULTS / f"{name}.png", dpi=120, bbox_inches="tight")
    parts = [
        f"# {title}",
        f"    {command}",
        "\n".join(lines),
        *picture,
        *notes,
        f"Machine: {machine or this_machine()}. {versions()}.",
    ]
    path = RESULTS / f"{name}.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a markdown table; columns are padded, so it also reads as text.

    >>> print("\\n".join(table(["what", "loss"], [["adam", 0.123456], ["ours", 2]])))
    | what | loss   |
    |------|--------|
    | adam | 0.1235 |
    | ours | 2      |
    """
    cells = [[str(text) for text in header]]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"rows has one with {len(row)} cells for a header of {len(header)}: "
                f"{list(row)}. Give one cell per column."
            )
        cells.append([_text(value) for value in row])
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def this_machine() -> str:
    """The CPU in words, as the operating system sees it: "2-core x86_64 CPU"."""
    return f"{os.cpu_count()}-core {platform.machine()} CPU"


def versions() -> str:
    """Python and the packages that can change a number."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return ", ".join(
        [f"Python {python}", *(f"{name} {version(name)}" for name in PACKAGES)]
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
