"""Schedules of random kills, and what is made of a run's times."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.faults.schedule import parse_fault
from experiments.killed_hosts import FIRST, HEADER, HOSTS, kills, row, seconds


@given(st.integers(0, 1000), st.floats(5.0, 60.0), st.integers(1000, 20_000))
def test_kills_are_in_order_and_not_at_the_ends(
    seed: int, every_s: float, steps: int
) -> None:
    found = [parse_fault(text, HOSTS) for text in kills(seed, every_s, steps, 0.02)]
    at = [fault.step for fault in found]
    assert at == sorted(at) and all(250 <= step <= steps - 250 for step in at)


def test_there_are_as_many_kills_as_the_mean_says() -> None:
    drawn = [len(kills(seed, 30.0, 100_000, 0.02)) for seed in range(50)]
    assert sum(drawn) / 50 == pytest.approx(2000 / 30, rel=0.05)


def test_a_runs_time_counts_from_a_warm_step(tmp_path: Path) -> None:
    events = [
        {"time": 10.0 + step / 10, "event": "commit", "step": step, "by": "a"}
        for step in range(1, 101)
    ]
    (tmp_path / "events.jsonl").write_text(
        "".join(f"{json.dumps(it)}\n" for it in events)
    )
    assert seconds(tmp_path, 100) == pytest.approx((100 - FIRST) / 10)
    with pytest.raises(ValueError, match="no commit of step 20 or 101"):
        seconds(tmp_path, 101)


def test_the_gaps_are_part_of_what_the_time_is_compared_with() -> None:
    one = {"rung": 0, "gap_s": 0.5, "survivors_restarted": 0, "steps_lost": 1}
    found = [one, one | {"gap_s": 1.5}, one | {"rung": 2, "gap_s": 1.0}]
    cells = row("x", 103.0, 100.0, found)
    assert len(cells) == len(HEADER) and cells[1:3] == [3, "0: 2, 2: 1"]
    assert cells[-4:] == ["1.00", "1.50", "103.0", "1.000"]
    assert row("x", 102.0, 100.0, [])[-1] == "1.020"
