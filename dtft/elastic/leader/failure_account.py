"""The leader's count of trainer failures, over all attempts and all leaders of the job.

Gathers the failures of one attempt to train until all hosts have reported their copies
for the next attempt, because the cause may be reported after its consequences. Then
`failure_budget` decides whether to retry. The counts (the failure budget) are kept in
the store, so the next leader continues them.
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
    """Collects the failures of one attempt to train, and decides whether to retry.

    Used by the event loop.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        sizes: JobSizes,
        loop: Loop,
        journal: Journal,
    ) -> None:
        """Reads the failure counts that earlier leaders left in the store."""
        self._config, self._records, self._sizes = config, records, sizes
        self._loop, self._journal = loop, journal
        stored = FailureBudget.from_json(records.view.budget)
        self._budget = stored.committed(records.last_step)
        self._failures: list[Failure] = []
        self._attempt: Attempt | None = None

    @property
    def quarantined(self) -> Collection[int]:
        """The steps whose commits are no longer restored from memory.

        Restores of these commits have failed too often.
        """
        return self._budget.quarantined

    def begin(self, assignment: SlotAssignment) -> None:
        """Begins to collect failures of a new attempt, and drops those of earlier ones.

        The attempt trains with `assignment` (a host for each slot).
        """
        self._failures = []
        commits = {commit.step for commit in self._records.commits}
        self._attempt = Attempt(
            step=assignment.step,
            is_commit=assignment.source == "memory" and assignment.step in commits,
            is_new_size=self._sizes.is_new(assignment),
        )

    @property
    def may_be_a_cut(self) -> bool:
        """Whether a network cut between two hosts may explain the attempt's failures.

        True if a cut would explain their root cause, such as a timeout or a broken
        collective. False without failures.
        """
        found = cause(self._failures)
        return found is not None and found.may_be_a_cut

    def add(self, failure: Failure) -> None:
        """Adds a failure of the current attempt."""
        self._failures.append(failure)

    def trained(self) -> None:
        """Records that every slot trains, and clears the counts of failed restores.

        Also drops the losses of hosts: only a host that has sent its slices already can
        have been lost without another attempt.
        """
        self._failures = [it for it in self._failures if it.kind != "lost"]
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
        """Records that a step is committed.

        If the step is above all steps committed before, the count of failed attempts in
        a row becomes 0, and the counts of exceptions and exits of trainers at lower
        steps are dropped.
        """
        self._budget = self._budget.committed(step)

    def judge(self, assignment: SlotAssignment | None) -> RetryDecision:
        """Decides from the failures of the ended attempt whether and when to retry.

        Without a failure the next attempt may begin at once. Otherwise counts the
        attempt, and writes the counts to the store. If the attempt had another number
        of slots than the newest commit, also counts the failure for this number: after
        two failures the job does not take this number any more.

        Args:
            assignment: the host of each slot in the attempt; None if unknown.
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
            why = f"training from step {attempt.step} failed"
            self._sizes.failed(assignment, why)
        if decision.message and decision.action != "end":
            self._journal.say(decision.message)
        return decision
