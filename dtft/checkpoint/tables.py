"""Formats tables and sizes in bytes as text for people."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Formats a table as lines; each column is as wide as its widest cell.

    A column whose cells are all numbers is aligned to the right.

    >>> for line in table(("step", "size"), [(5, "1 KiB"), (120, "2 KiB")]):
    ...     print(line)
    step  size
       5  1 KiB
     120  2 KiB
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(header))
    ]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(header), *cells]
    ]


def size_text(num_bytes: int) -> str:
    """Formats a number of bytes with a unit, from B to TiB.

    >>> size_text(512), size_text(3 << 20)
    ('512 B', '3.0 MiB')
    """
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
