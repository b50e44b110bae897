"""From what the hosts measured to the rows of `memory_tier_vs_orbax.py`. Pure.

A step, a save and a restore are as slow as the slowest host. Must not know processes.
"""

import statistics
from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]
FIGURES = (
    "stall_s",
    "step_inflation",
    "save_s",
    "restore_s",
    "transfer_s",
    "bytes_moved",
    "peak_rss_anon_bytes",
)
"""What each side of a row always has; None where it could not be measured."""


def saving_figures(saved: Sequence[Figures]) -> Figures:
    """Stall, completion and inflation; a step is as slow as its slowest host."""

    def slowest(name: str) -> list[float]:
        return [max(each) for each in zip(*(one[name] for one in saved), strict=True)]

    off, on = statistics.median(slowest("off_s")), statistics.median(slowest("on_s"))
    return {
        "stall_s": statistics.median(slowest("stall_s")[1:]),
        "save_s": statistics.median(slowest("save_s")[1:]),
        "step_inflation": on / off,
        "step_s_off": off,
        "step_s_on": on,
    }


def restoring_figures(restored: Sequence[Figures], saved: Sequence[Figures]) -> Figures:
    """Seconds from the call to arrays ready on every host.

    Raises:
        RuntimeError: a host has no state, or not bit for bit the one that was saved.
    """
    errors = [one["error"] for one in restored if "error" in one]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(restored)} hosts: {errors[0]}")
    for number, (new, old) in enumerate(zip(restored, saved, strict=True)):
        if new["step"] != old["step"]:
            raise RuntimeError(f"host {number} got step {new['step']}")
        if new["digests"] != old["digests"]:
            raise RuntimeError(f"host {number} got wrong bytes")
    begun = min(one["window"][0] for one in restored)
    ended = max(one["window"][1] for one in restored)
    return {
        "restore_s": ended - begun,
        "constructor_s": max(one["constructor_s"] for one in restored),
    }


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """The median of each number over the rounds; the first error, if there is one.

    >>> median_figures([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}])
    {'a': 2.0, 'b': None}
    """
    keys = dict.fromkeys(key for found in rounds for key in found)
    medians: Figures = {}
    for key in keys:
        values = [found[key] for found in rounds if found.get(key) is not None]
        if not values or isinstance(values[0], str):
            medians[key] = values[0] if values else None
        else:
            medians[key] = statistics.median(values)
    return medians


def summary(rows: Sequence[Figures]) -> Figures:
    """The JSON object."""

    def median_of(key: str) -> float | None:
        values = [row["ours"][key] for row in rows if row["ours"].get(key)]
        return statistics.median(values) if values else None

    return {
        "raw_tcp_bytes_per_s": median_of("raw_tcp_bytes_per_s"),
        "memcpy_bytes_per_s": median_of("memcpy_bytes_per_s"),
        "rows": list(rows),
    }
