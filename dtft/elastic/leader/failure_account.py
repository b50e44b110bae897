"""The leader's account of what failed, over all rounds and earlier leaders.

Gathers the failures of one attempt until its hosts have answered, because the cause may
be heard of after its consequences, and has `failure_budget` judge them. The budget is
kept in the store.
"""

from collections.abc import Collection

from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.failure_budget import (
    Attempt,
    Failure,
    FailureBudget,
    RetryDecision,
    cause,
    judge,
)
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.sizes import JobSizes


class FailureAccount:
    """What has failed, and what follows. Used by the event loop."""

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        sizes: JobSizes,
        loop: Loop,
        journal: Journal,
    ) -> None:
        """Goes on with what the store says."""
        self._config, self._records, self._sizes = config, records, sizes
        self._loop, self._journal = loop, journal
        stored = FailureBudget.from_json(records.view.budget)
        self._budget = stored.committed(records.last_step)
        self._failures: list[Failure] = []
        self._attempt: Attempt | None = None

    @property
    def quarantined(self) -> Collection[int]:
        """Commits that are not restored from memory any more."""
        return self._budget.quarantined

    def begin(self, assignment: SlotAssignment) -> None:
        """Trainers are about to start."""
        self._failures = []
        commits = {commit.step for commit in self._records.commits}
        self._attempt = Attempt(
            step=assignment.step,
            is_commit=assignment.source == "memory" and assignment.step in commits,
            is_new_size=self._sizes.is_new(assignment),
        )

    @property
    def may_be_a_cut(self) -> bool:
        """Whether hosts that do not reach each other would explain what has failed."""
        found = cause(self._failures)
        return found is not None and found.may_be_a_cut

    def add(self, failure: Failure) -> None:
        """Something has failed in the attempt under way."""
        self._failures.append(failure)

    def trained(self) -> None:
        """Every slot trains."""
        if self._attempt is not None:
            old = self._attempt
            self._attempt = Attempt(
                step=old.step,
                is_commit=old.is_commit,
                has_trained=True,
                is_new_size=old.is_new_size,
            )
        self._budget = self._budget.trained()

    def committed(self, step: int) -> None:
        """A step is safe."""
        self._budget = self._budget.committed(step)

    def judge(self, assignment: SlotAssignment | None) -> RetryDecision:
        """Says what follows from the failures of the attempt that has ended.

        Args:
            assignment: of the attempt.
        """
        now = self._loop.now()
        if not self._failures:
            return RetryDecision(action="retry", not_before=now)
        # A new leader did not begin the attempt that has failed.
        attempt = self._attempt or Attempt(step=self._records.last_step)
        before = self._budget
        self._budget, decision = judge(
            before, self._failures, attempt, now, allowed=self._config.failure_budget
        )
        self._failures = []
        if self._budget != before:
            self._records.put("budget", None, "budget", self._budget.to_json())
        if attempt.is_new_size and assignment is not None:
            why = f"step {attempt.step} could not be trained on there"
            self._sizes.failed(assignment, why)
        if decision.message and decision.action != "end":
            self._journal.say(decision.message)
        return decision
