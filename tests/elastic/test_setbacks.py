"""What follows when trainers fail again and again: quarantine, another try, the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.elastic.roles import Assignment
from dtft.elastic.setbacks import FRUITLESS, START_FAILURES, Setbacks
from tests.elastic.test_leader import Desk
from tests.elastic.test_recovery import commit_of, layout

LOGS = Path("run/logs")


def restoring(step: int, *slots: str) -> Assignment:
    """A formation that restores a step."""
    return Assignment(
        generation=1,
        attempt=1,
        slots=slots or ("a", "b"),
        incarnations=slots or ("a", "b"),
        source="memory",
        step=step,
        rung=1,
        reason="test",
    )


@pytest.fixture
def setbacks(tmp_path: Path) -> Iterator[Setbacks]:
    """Of a job of two slots that has committed step 7."""
    desk = Desk(tmp_path)
    desk.leader._records.commits = [commit_of(layout(2, 1), 7)]
    yield desk.leader._rounds.setbacks
    desk.close()


def test_a_step_that_fails_twice_is_quarantined(setbacks: Setbacks) -> None:
    assert setbacks.restore_failed(restoring(7)) == 1 and not setbacks.quarantined
    assert setbacks.restore_failed(restoring(7)) == 2
    assert setbacks.quarantined == {7}


def test_a_step_that_was_never_committed_is_not_quarantined(setbacks: Setbacks) -> None:
    for _ in range(3):
        setbacks.restore_failed(restoring(0))
    assert not setbacks.quarantined


def test_a_new_size_is_to_blame_and_not_the_step(setbacks: Setbacks) -> None:
    for _ in range(3):
        assert setbacks.restore_failed(restoring(7, "a", "b", "c")) == 0
    assert not setbacks.quarantined


def test_failures_count_from_the_last_time_that_all_trained(setbacks: Setbacks) -> None:
    setbacks.restore_failed(restoring(7))
    setbacks.trained()
    assert setbacks.restore_failed(restoring(7)) == 1 and not setbacks.quarantined


def test_trainers_that_never_start_end_the_job(setbacks: Setbacks) -> None:
    tries = [
        setbacks.trainer_died(restoring(7), False, LOGS) for _ in range(START_FAILURES)
    ]
    assert not any(tries[:-1])
    assert tries[-1] == (
        "trainers died 3 times after restoring step 7 without finishing a step; "
        "see run/logs"
    )


def test_trainers_that_start_but_never_commit_end_the_job(setbacks: Setbacks) -> None:
    def died() -> str:
        return setbacks.trainer_died(restoring(7), True, LOGS)

    assert not any(died() for _ in range(FRUITLESS - 1))
    setbacks.committed()
    assert not any(died() for _ in range(FRUITLESS - 1))
    assert died() == (
        "trainers died 10 times after restoring step 7 without a commit; see run/logs"
    )


def test_copies_of_another_step_end_the_job_unless_it_gets_on(
    setbacks: Setbacks,
) -> None:
    for _ in range(FRUITLESS - 1):
        assert not setbacks.copy_refused()
    setbacks.committed()
    for _ in range(FRUITLESS - 1):
        assert not setbacks.copy_refused()
    assert setbacks.copy_refused()
