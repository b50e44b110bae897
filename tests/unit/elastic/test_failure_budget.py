"""What follows when trainers fail again and again, whoever leads meanwhile."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.elastic.leader.failure_budget import (
    FRUITLESS,
    KEPT,
    LONGEST_PAUSE_S,
    Attempt,
    Failure,
    FailureBudget,
    RetryDecision,
    cause,
    is_broken_collective,
    judge,
)

GLOO = (
    "JaxRuntimeError: UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/"
    "tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33682"
)
RESET = (
    "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/"
    "tcp/pair.cc:538] Read error [127.0.0.1]:21923: Connection reset by peer"
)
NAME = "NameError: name 'momentun' is not defined"
TRAINED = Attempt(step=19, is_commit=True, has_trained=True)
STARTING = Attempt(step=19, is_commit=True)


def error(text: str = NAME, step: int = 20, host: str = "b", **more: Any) -> Failure:
    about = {"slot": 1, "phase": "step", **more}
    return Failure(kind="exception", error=text, step=step, host=host, **about)


def ended(code: int, step: int = 20, host: str = "b", **more: Any) -> Failure:
    return Failure(kind="exit", code=code, step=step, host=host, slot=1, **more)


def lost(host: str = "b") -> Failure:
    return Failure(kind="lost", host=host, error=f"{host} (slot 1) was lost")


class Job:
    """A leader's account of one job; written and read again between any two events."""

    def __init__(self) -> None:
        self.budget, self.now = FailureBudget(), 0.0

    def fails(self, *failures: Failure, attempt: Attempt = TRAINED) -> RetryDecision:
        self._takes_over()
        self.budget, decision = judge(self.budget, failures, attempt, self.now)
        self.now = max(self.now, decision.not_before)
        return decision

    def commits(self, *steps: int) -> None:
        for step in steps:
            self._takes_over()
            self.budget = self.budget.committed(step)

    def _takes_over(self) -> None:
        read = FailureBudget.from_json(self.budget.to_json())
        assert read == self.budget
        self.budget = read


@pytest.fixture
def job() -> Job:
    return Job()


# --------------------------------------------------------------------- the cause


@pytest.mark.parametrize(
    "failures, found",
    [
        ([error(GLOO, host="a"), error(host="b"), error(RESET, host="c")], 1),
        ([error(GLOO, host="a"), ended(-9), error(RESET, host="c")], 1),
        ([error(GLOO, host="a"), lost()], 1),
        ([error(GLOO, host="a"), ended(-11)], 1),
        ([error(GLOO, host="a"), ended(3)], 1),
        ([ended(-6, host="a"), lost()], 1),
        ([error(GLOO, host="a"), ended(-6, host="c")], 1),
        ([error(host="a"), error("KeyError: 'x'", host="b")], 0),
        ([error(host="a"), lost()], 1),
        ([ended(-9), lost("c")], 1),
        ([error(GLOO), Failure(kind="stuck", host="c")], 1),
        ([error(GLOO, host="a"), error(RESET, host="c")], 0),
    ],
)
def test_the_cause_is_not_what_followed_from_it(
    failures: list[Failure], found: int
) -> None:
    assert cause(failures) is failures[found]
    assert cause([]) is None


@pytest.mark.parametrize(
    "text, is_broken",
    [
        (GLOO, True),
        (RESET, True),
        (
            "XlaRuntimeError: UNAVAILABLE: Failed to send RPC to coordination service",
            True,
        ),
        ("JaxRuntimeError: DEADLINE_EXCEEDED: Barrier timed out", True),
        ("AgentGone: this host's agent has ended", True),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory", False),
        ("JaxRuntimeError: INTERNAL: CpuCallback error: NameError", False),
        ("ConnectionResetError: Connection reset by peer", False),  # of the user's data
        (NAME, False),
    ],
)
def test_broken_collectives_are_known_by_type_and_text(
    text: str, is_broken: bool
) -> None:
    assert is_broken_collective(text) == is_broken


# ------------------------------------------------- an exception that comes again


def test_an_exception_at_the_same_step_ends_the_job_with_its_evidence(job: Job) -> None:
    job.commits(*range(1, 20))
    assert job.fails(error(), error(GLOO, host="a")).action == "retry"
    known = error(traceback="Traceback ...\n  in loss\nNameError", log="/r/logs/b.log")
    decision = job.fails(error(GLOO, host="a"), known)
    assert decision.action == "end"
    assert decision.message.splitlines()[0].startswith(
        "trainer of slot 1 on b failed at step 20: NameError: name 'momentun' is not "
        "defined. It came 2 times (allowed: fewer than 2) without a commit beyond step"
    )
    assert "in loss" in decision.message
    assert decision.message.endswith("log of b: /r/logs/b.log")


def test_it_is_the_same_on_another_host_and_after_a_restore_from_storage(
    job: Job,
) -> None:
    job.commits(*range(1, 20))
    assert job.fails(error(host="b")).action == "retry"
    job.commits(*range(11, 20))  # made again from storage's step 10
    assert job.budget.fruitless == 1
    again = Attempt(step=10, has_trained=True)
    assert job.fails(error(host="c"), attempt=again).action == "end"


def test_the_same_message_a_step_later_is_the_same_exception(job: Job) -> None:
    job.commits(19)
    assert job.fails(error("OSError: [Errno 5] shard 7 at 0x7f01")).action == "retry"
    later = error("OSError: [Errno 5] shard 8 at 0x7fab", step=21)
    assert job.fails(later).action == "end"


def test_another_exception_at_the_step_is_tried_again(job: Job) -> None:
    job.commits(19)
    assert job.fails(error()).action == "retry"
    assert job.fails(error("KeyError: 'x'")).action == "retry"
    assert job.fails(error("KeyError: 'x'")).action == "end"


def test_a_commit_beyond_the_step_forgets_the_exception(job: Job) -> None:
    for step in range(20, 300, 20):
        assert job.fails(error(step=step)).action == "retry"
        job.commits(step, step + 1)
        assert not job.budget.recurring


def test_a_commit_of_the_very_step_does_not(job: Job) -> None:
    """An evaluation after the last step fails again though the step is safe."""
    assert job.fails(error(step=20, phase="evaluate")).action == "retry"
    job.commits(20)
    assert job.fails(error(step=20, phase="evaluate")).action == "end"


def test_a_segmentation_fault_at_the_same_step_counts_too(job: Job) -> None:
    assert job.fails(ended(-11)).action == "retry"
    decision = job.fails(ended(-11, log="x.log"))
    assert decision.action == "end"
    assert "was killed by signal 11 at step 20" in decision.message


def test_how_often_is_a_setting() -> None:
    budget, actions = FailureBudget(), []
    for _ in range(5):
        budget, decision = judge(budget, [error()], TRAINED, 0.0, allowed=5)
        actions.append(decision.action)
    assert actions == ["retry"] * 4 + ["end"]


@pytest.mark.parametrize(
    "failure",
    [
        lost(),
        ended(-9),
        ended(-15),
        ended(-6),
        error(GLOO),
        Failure(kind="late", host="b"),
        Failure(kind="stuck", host="b"),
        Failure(kind="copy", host="b"),
    ],
)
def test_what_is_no_exception_ends_the_job_only_when_fruitless(
    job: Job, failure: Failure
) -> None:
    job.commits(19)
    decisions = [job.fails(failure) for _ in range(FRUITLESS)]
    assert [it.action for it in decisions] == ["retry"] * (FRUITLESS - 1) + ["end"]
    assert [it.pause_s for it in decisions[:7]] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert "10 times in a row without a new commit" in decisions[-1].message
    assert "the highest is step 19" in decisions[-1].message
    assert not job.budget.recurring and not job.budget.quarantined


def test_a_new_commit_begins_the_count_and_the_pauses_anew(job: Job) -> None:
    for step in range(1, 50):
        assert [job.fails(lost()).pause_s for _ in range(2)] == [0.0, 1.0]
        job.commits(step)


# --------------------------------------------------------- restores that fail


def restore_failed() -> Failure:
    return Failure(kind="restore", host="b", error="copy of slice 3 is corrupt")


@pytest.mark.parametrize(
    "failure",
    [
        restore_failed(),
        error("CorruptCopy: chunk 3", step=19, phase="restore"),
        error("KeyError: 'momentum'", step=19, phase="restore"),
        ended(-11, step=19),
    ],
)
def test_a_commit_whose_restore_fails_twice_is_quarantined(
    job: Job, failure: Failure
) -> None:
    job.commits(19)
    assert job.fails(failure, attempt=STARTING).action == "retry"
    decision = job.fails(failure, attempt=STARTING)
    assert decision.action == "quarantine" and "step 19" in decision.message
    assert job.budget.quarantined == {19}
    older = Attempt(step=18, is_commit=True)
    assert job.fails(lost(), attempt=older).action == "retry"


def test_an_exception_that_comes_with_another_commit_too_ends_the_job(job: Job) -> None:
    failure = error("KeyError: 'momentum'", step=19, phase="restore")
    actions = [job.fails(failure, attempt=STARTING).action for _ in range(2)]
    older = dataclasses.replace(failure, step=18)
    actions.append(job.fails(older, attempt=Attempt(step=18, is_commit=True)).action)
    assert actions == ["retry", "quarantine", "end"]


@pytest.mark.parametrize(
    "failure, attempt",
    [
        (restore_failed(), Attempt(step=0)),  # not of a commit
        (restore_failed(), Attempt(step=19, is_commit=True, is_new_size=True)),
        (lost(), STARTING),
        (ended(-9), STARTING),
        (error(GLOO, phase="restore"), STARTING),
        (Failure(kind="late", host="b"), STARTING),
    ],
)
def test_what_the_commit_is_not_to_blame_for(
    job: Job, failure: Failure, attempt: Attempt
) -> None:
    for _ in range(4):
        assert job.fails(failure, attempt=attempt).action == "retry"
    assert not job.budget.quarantined


def test_an_exception_of_the_program_does_not_cost_the_commit(job: Job) -> None:
    assert job.fails(error(), attempt=STARTING).action == "retry"
    assert job.fails(error(), attempt=STARTING).action == "end"
    assert not job.budget.quarantined


def test_a_new_size_may_fail_more_often(job: Job) -> None:
    grown = dataclasses.replace(TRAINED, is_new_size=True)
    assert all(job.fails(error(), attempt=grown).action == "retry" for _ in range(5))


def test_restores_count_from_the_last_time_that_all_trained(job: Job) -> None:
    job.fails(restore_failed(), attempt=STARTING)
    job.budget = job.budget.trained()
    assert job.fails(restore_failed(), attempt=STARTING).action == "retry"


# --------------------------------------------------------------- for the store


def test_what_cannot_be_read_is_an_empty_budget() -> None:
    for text in ("", "[]", "{}", '{"highest": "x"}', '{"highest": 1, "fruitless": 2}'):
        assert FailureBudget.from_json(text) == FailureBudget()


def test_the_record_stays_small(job: Job) -> None:
    budget = FailureBudget()
    for step in range(1000):
        text = f"Error{step}: " + "x" * 10_000
        failure = error(text, step=step, traceback="y" * 10_000)
        budget, decision = judge(budget, [failure], TRAINED, 0.0)
        assert len(decision.message) < 10_000
    assert len(budget.recurring) == KEPT and len(budget.to_json()) < 4096


EXCEPTIONS = st.builds(
    error, st.sampled_from([NAME, GLOO, "KeyError: 'x'"]), st.integers(1, 6)
)
OTHERS = st.sampled_from([lost(), ended(-9), ended(-6), ended(3)])
ROUNDS = st.lists(
    st.tuples(
        st.lists(EXCEPTIONS | OTHERS, max_size=4),
        st.builds(Attempt, step=st.integers(0, 6), has_trained=st.booleans()),
        st.lists(st.integers(0, 8), max_size=2),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(rounds=ROUNDS)
def test_no_job_fails_for_ever_and_a_new_leader_counts_on(rounds: Any) -> None:
    job, fruitless, seen = Job(), 0, {}
    for failures, attempt, commits in rounds:
        decision = job.fails(*failures, attempt=attempt)
        fruitless += bool(failures)
        assert decision.pause_s <= LONGEST_PAUSE_S
        found = decision.cause
        if found is not None and found.kind == "exception" and found.error != GLOO:
            key = (found.step, found.type_name)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] >= 2:
                assert decision.action == "end"
        if fruitless >= FRUITLESS:
            assert decision.action == "end"
        if decision.action == "end":
            return
        for step in commits:
            if step > job.budget.highest:
                fruitless = 0
                seen = {key: n for key, n in seen.items() if key[0] >= step}
            job.commits(step)
