"""How a drill judges uneven shares: a recovery goes on with those of its commit.

Shares follow measured times, so two runs have other ones and end alike up to rounding
only: their losses are compared (`resize_check.compare_losses`). Here what each attempt
began with is compared with what the one before had in force at the restored step. Reads
what the runs wrote; must not change or run anything.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.train.balance_log import FILE

Record = dict[str, Any]


def attempts(directory: Path) -> list[Record]:
    """Every start of trainers in a balanced run; none where shares are equal.

    `replayed`: it began with the shares in force at the step that it restored.
    `found`: the shares in force at its end.
    """
    path = directory / FILE
    lines = path.read_text().splitlines() if path.exists() else []
    return judged([json.loads(line) for line in lines if line.endswith("}")])


def judged(records: Sequence[Record]) -> list[Record]:
    """The attempts of a run, from the records of its `balance.jsonl`.

    >>> begin = {"event": "begin", "step": 0, "shares": [2, 2], "unknown": []}
    >>> moved = {"event": "round", "step": 4, "next": [3, 1]}
    >>> again = begin | {"step": 5, "shares": [3, 1]}
    >>> [it["replayed"] for it in judged([begin, moved, again])]
    [True, True]
    """
    found: list[Record] = []
    in_force: list[tuple[int, list[int]]] = []
    for record in records:
        if record["event"] == "round":
            in_force.append((record["step"], record["next"]))
            found[-1]["found"] = record["next"]
            continue
        step, shares = record["step"], record["shares"]
        # What a lost attempt found after the restored step counts no more.
        in_force = [(at, it) for at, it in in_force if at <= step]
        before = in_force[-1][1] if in_force else shares
        # Another number of replicas has other shares; no commit could have them.
        replayed = before == shares or len(before) != len(shares)
        entry = {"step": step, "shares": shares, "replayed": replayed}
        found.append(entry | {"unknown": record["unknown"], "found": shares})
        in_force.append((step, shares))
    return found


def lines(record: Record) -> list[str]:
    """What a drill's record says of shares, for people."""
    said = []
    for it in record.get("shares", [])[1:]:
        how = "replayed" if it["replayed"] else "NOT those of the commit"
        new = f" ({', '.join(it['unknown'])} new)" if it["unknown"] else ""
        said.append(
            f"dtft: step {it['step']}: shares {_row(it['shares'])} {how}{new}, then "
            f"{_row(it['found'])}"
        )
    return said


def _row(shares: Sequence[int]) -> str:
    return " ".join(map(str, shares))
