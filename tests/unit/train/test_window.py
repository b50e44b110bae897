"""What the loop's moments say of steps and snapshots, where the truth is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.snapshot_interval import Experience, Window
from dtft.train.worker import WindowClock


def simulated(
    step_s: float, work_s: float, save_s: float, slower: float, interval: int
) -> list[Window]:
    """The training loop against devices that take `step_s` for a step.

    Host work of `work_s` for each step overlaps with the devices, except right after a
    boundary; a step that runs while the copies are pushed takes `slower` times as long.
    """
    clock, now, free_at = WindowClock(), 0.0, 0.0
    finished, windows = {0: 0.0}, []
    pushed_until = 0.0
    for step in range(1, 6 * interval + 1):
        begin = max(now, free_at)
        inside = begin < pushed_until
        free_at = begin + step_s * (slower if inside else 1.0)
        finished[step] = free_at
        clock.dispatched(step, now)
        now = max(now, finished[step - 1]) + work_s
        if step % interval == 0:
            now = max(now, free_at)
            window = clock.finished(step, now, released_at=pushed_until, stall_s=save_s)
            windows += [window] if window else []
            now += save_s
            pushed_until = now + 1.5 * step_s
    return windows


@settings(deadline=None, max_examples=30)
@given(
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.floats(1.0, 1.4),
    st.integers(8, 64),
)
def test_costs_are_found(
    step_s: float, work: float, save: float, slower: float, interval: int
) -> None:
    save_s = save * step_s
    windows = simulated(step_s, work * step_s, save_s, slower, interval)
    assert all(w.affected_steps + w.quiet_steps == interval for w in windows)
    seen = Experience()
    for window in windows:
        seen = seen.and_window(window)
    assert seen.costs is not None
    assert seen.costs.step_s == pytest.approx(step_s)
    # The save, and two steps that begin while copies are pushed.
    true = save_s + 2 * (slower - 1) * step_s
    assert seen.costs.snapshot_s == pytest.approx(true, abs=1e-6 * step_s)


def test_without_quiet_steps_everything_is_affected() -> None:
    windows = simulated(1.0, 0.1, 0.25, 1.0, interval=1)
    assert {w.quiet_steps for w in windows} == {0}
    assert [w.affected_s for w in windows] == pytest.approx([1.25] * len(windows))
