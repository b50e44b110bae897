"""The table, the figure and the verdicts of `memory_tier_vs_orbax.py`.

Works on the rows of its JSON; must not know how they were measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

RESTORE_RATIO = 1 / 8
TRANSFER_RATIO = 1.5
STALL_RATIO = 1 / 5
MEMCPY_RATIO = 1.3
MEMORY_RATIO = 0.1

_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("stall [ms]", "stall_s", 1e3, ".1f"),
    ("save [s]", "save_s", 1, ".3f"),
    ("step on / off", "step_inflation", 1, ".2f"),
    ("restore [s]", "restore_s", 1, ".3f"),
    ("transfer [s]", "transfer_s", 1, ".3f"),
    ("moved [MiB]", "bytes_moved", 2**-20, ".1f"),
    ("anonymous, peak [MiB]", "peak_rss_anon_bytes", 2**-20, ".0f"),
    ("growth [MiB]", "rss_anon_growth_bytes", 2**-20, ".1f"),
    ("arena or files [MiB]", "arena_bytes", 2**-20, ".0f"),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One thing that must hold for one row."""

    row: str
    """Layout and size."""
    what: str
    """The figure and its limit in words."""
    value: float | None
    """What was measured, in units of the limit's base; None if nothing was."""
    limit: float
    """Largest value that is allowed."""

    @property
    def met(self) -> bool:
        """Whether it holds; what could not be measured does not."""
        return self.value is not None and self.value <= self.limit

    def line(self) -> str:
        """One line for people."""
        seen = "not measured" if self.value is None else f"{self.value:.3f}"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6} {self.row}: {self.what} <= {self.limit:.3f}: {seen}"


def targets(rows: Sequence[Row]) -> list[Target]:
    """What must hold, row by row.

    Where Orbax could not restore, ours must; there is nothing to divide by.
    """
    return [target for row in rows for target in _of(row)]


def _of(row: Row) -> list[Target]:
    ours, orbax = row["ours"], row["orbax_p2p"]
    name = f"{row['layout']} {row['mib']} MiB"
    pairs = [
        ("transfer_s / raw TCP", "transfer_s", ours.get("raw_tcp_s"), TRANSFER_RATIO),
        ("stall_s / Orbax's", "stall_s", orbax["stall_s"], STALL_RATIO),
        ("stall_s / memcpy", "stall_s", ours.get("memcpy_s"), MEMCPY_RATIO),
        (
            "anonymous growth / state per host",
            "rss_anon_growth_bytes",
            ours.get("local_bytes"),
            MEMORY_RATIO,
        ),
    ]
    if orbax["restore_s"] is not None:
        base = orbax["restore_s"]
        pairs.insert(0, ("restore_s / Orbax's", "restore_s", base, RESTORE_RATIO))
    found = [
        Target(row=name, what=what, value=_ratio(ours.get(key), base), limit=limit)
        for what, key, base, limit in pairs
    ]
    if orbax["restore_s"] is None:
        failed = float(ours["restore_s"] is None)
        what = "restores though Orbax does not (0, else 1)"
        found.insert(0, Target(row=name, what=what, value=failed, limit=0.0))
    return found


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def header() -> list[str]:
    """The columns of the table."""
    return ["layout", "MiB", "tier", *(title for title, *_ in _COLUMNS), "error"]


def table_rows(rows: Sequence[Row]) -> list[list[object]]:
    """Two lines of the table for each row: ours and Orbax's."""
    lines: list[list[object]] = []
    for row in rows:
        for side, name in (("ours", "dtft"), ("orbax_p2p", "Orbax p2p")):
            found = row[side]
            cells = [_cell(found.get(key), by, how) for _, key, by, how in _COLUMNS]
            error = str(found.get("error") or "")[:60].replace("|", "/")
            lines.append([row["layout"], row["mib"], name, *cells, error])
    return lines


def _cell(value: float | None, scale: float, how: str) -> str:
    return "-" if value is None else format(value * scale, how)


def explain(rows: Sequence[Row], rounds: int, step_s: float) -> list[str]:
    """What the reader must know to judge the table."""
    notes = [
        "Four hosts on loopback, one device each, dtft with copies=2. Both tiers are "
        f"driven by the same trainers and take turns; medians over {rounds} rounds, "
        "each figure that of the slowest host. Every step changes every byte. MiB is "
        "the logical global size; a third each are parameters and two moments.",
        "stall: the save call. save: until the step is complete (dtft: committed in "
        f"etcd). step on / off: wall time of steps of about {step_s:g} s saved at "
        "each step, over that without the tier. restore: one host's memory was lost; "
        "from the call in new trainers (constructor and restore) until all hosts have "
        "the arrays, compared bit for bit with what was saved. transfer: from the "
        "order to fetch until the lost host's bytes are verified in its arena. moved: "
        "bytes that the lost host got from its peers (Orbax: its files).",
        "anonymous: trainer and agent of one host, peak; growth: over the peak without "
        "the tier. Arenas, and Orbax's files, lie in shared memory and are listed "
        "apart. fsdp is a mesh of replica=2, fsdp=2, because Orbax restores from a "
        "data-parallel copy only.",
        "Trainers of both tiers touch and free twice their state before they restore: "
        "this machine is a virtual one, whose host takes free memory back. dtft "
        "reserves its arenas once; saves are timed from when they are mapped.",
        "Trainers of both tiers have the GLIBC_TUNABLES with which dtft's agents start "
        "trainers: copies of 2 MiB or more go past the caches.",
    ]
    for row in rows:
        ours = row["ours"]
        if ours.get("raw_tcp_s"):
            notes.append(
                f"{row['layout']} {row['mib']} MiB: memory copies take "
                f"{ours['memcpy_s'] * 1e3:.1f} ms, raw TCP of the moved bytes "
                f"{ours['raw_tcp_s'] * 1e3:.1f} ms (all hosts copy at once; three "
                "other processes load a copy each beside raw TCP, as in a restore)."
            )
    return [*notes, *(target.line() for target in targets(rows))]


def figure(rows: Sequence[Row]) -> "Figure":
    """Stall, save and restore of both sides, for each row."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12, 4))
    axes = drawing.subplots(1, 3)
    names = [f"{row['layout']}\n{row['mib']}" for row in rows]
    for ax, key in zip(axes, ("stall_s", "save_s", "restore_s"), strict=True):
        for shift, side in ((-0.2, "ours"), (0.2, "orbax_p2p")):
            values = [row[side].get(key) or 0.0 for row in rows]
            places = [number + shift for number in range(len(rows))]
            ax.bar(places, values, width=0.4, label=side)
        ax.set_xticks(range(len(rows)), names, fontsize=7)
        ax.set(title=key, ylabel="s", yscale="log")
        ax.legend()
    drawing.tight_layout()
    return drawing
