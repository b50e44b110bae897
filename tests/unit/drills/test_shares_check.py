"""How a drill judges a run with uneven shares."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtft.drills.compare import attempts, shares_lines
from dtft.parallel.load_balancing.balance_log import BALANCE_FILE


def _begin(step: int, *shares: int, unknown: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"event": "begin", "step": step, "shares": shares, "unknown": unknown}


def _round(step: int, *shares: int) -> dict[str, Any]:
    return {"event": "round", "step": step, "next": shares}


@pytest.mark.parametrize(
    ("records", "replayed", "found"),
    [
        ([_begin(0, 2, 2), _round(4, 3, 1)], [True], [3, 1]),
        ([_begin(0, 2, 2), _round(4, 3, 1), _begin(5, 2, 2)], [True, False], [2, 2]),
        ([_begin(0, 2, 2), _begin(3, 2, 1, 1)], [True, True], [2, 1, 1]),
        # What was found after the restored step is lost with that step.
        ([_begin(0, 2, 2), _round(4, 3, 1), _begin(3, 2, 2)], [True, True], [2, 2]),
        (
            [_begin(0, 2, 2), _round(4, 3, 1), _begin(3, 2, 2), _round(4, 1, 3)]
            + [_begin(4, 1, 3, unknown=("new",))],
            [True, True, True],
            [1, 3],
        ),
    ],
)
def test_shares_go_on_as_they_were_at_the_restored_step(
    tmp_path: Path, records: list[dict[str, Any]], replayed: list[bool], found: Any
) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / BALANCE_FILE).write_text(text + '{"event": "rou')  # torn by a kill
    shares = attempts(tmp_path)
    assert [it["replayed"] for it in shares] == replayed
    assert shares[-1]["found"] == found
    said = shares_lines({"shares": shares})
    assert [("NOT" in line) for line in said] == [not it for it in replayed[1:]]


def test_equal_shares_need_no_judgement(tmp_path: Path) -> None:
    assert attempts(tmp_path) == [] and shares_lines({"shares": []}) == []
