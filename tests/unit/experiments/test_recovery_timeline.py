"""What the recovery study reads from a run's events and metrics."""

import pytest

from experiments.recovery_timeline import Timeline, drawn, row, timeline

EVENTS = [
    {"time": 10.0, "event": "host_joined", "host": "a"},
    {"time": 10.1, "event": "host_joined", "host": "b"},
    {"time": 10.2, "event": "assignment", "slots": ["a"]},
    {"time": 12.0, "event": "commit", "step": 1},
    {"time": 12.5, "event": "commit", "step": 2},
    {"time": 12.6, "event": "host_lost", "host": "a"},
    {"time": 12.7, "event": "assignment", "slots": ["b"]},
    {"time": 14.5, "event": "commit", "step": 3},
]
EVENTS = [{"by": "b", **event} for event in EVENTS]
METRICS = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]


def found() -> Timeline:
    return timeline(EVENTS, METRICS)


def test_hosts_and_steps_over_time() -> None:
    run = found()
    assert [(step, round(at, 3)) for at, step in run.commits] == [
        (1, 0.0),
        (2, 0.5),
        (3, 2.5),
    ]
    assert [(it[1], it[2]) for it in run.hosts] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (0, 1),
        (1, 0),
    ]
    assert [round(seconds, 3) for _, seconds in run.gaps_s] == [0.5, 2.0]


def test_a_leader_that_is_lost_is_missing_once_another_leads() -> None:
    lost = [it for it in EVENTS if it["event"] != "host_lost"]
    led = [{**it, "by": "a" if it["time"] < 12.6 else "b"} for it in lost]
    counts = [it[1:] for it in timeline(led, METRICS).hosts]
    assert counts == [it[1:] for it in found().hosts]


def test_the_table_tells_the_longest_wait_between_commits() -> None:
    assert row("run", found())[1:] == [3, "2.5", "2000", "2.00", "0.333333"]


def test_the_figure_has_a_panel_each_for_loss_steps_and_hosts() -> None:
    figure = drawn({"one": found(), "other": found()})
    assert [len(panel.lines) for panel in figure.axes] == [2, 2, 4]


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="commit"):
        timeline(EVENTS[:3], METRICS)
