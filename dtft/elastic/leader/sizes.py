"""The number of slots that a leader gives its job.

Remembers sizes that could not be restored or trained on. A failed change of size thus
leads back to the size that worked. `choose_slots` in `assignment` makes the choice.
"""

from dtft.checkpoint.state import Layout
from dtft.elastic.assignment import (
    ReplicaGroups,
    SlotAssignment,
    WantedSize,
    choose_slots,
    size_for,
)
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.records import Records

FAILURES = 2
"""Failed formations of a new size after which that size is given up."""


class JobSizes:
    """The sizes that the job may have now. Used by the leader's event loop."""

    def __init__(self, config: AgentConfig, records: Records, journal: Journal) -> None:
        """Starts with no failed size."""
        self._config, self._records, self._journal = config, records, journal
        self._unfit: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._asked_before = 0

    def formed(self, assignment: SlotAssignment) -> None:
        """Takes the requested size from the newest assignment."""
        self._asked_before = assignment.asked_slots

    @property
    def asked(self) -> int:
        """The number of slots requested by a user; 0 if none was requested."""
        asked = self._records.view.wanted
        return asked.slots if asked else self._asked_before

    @property
    def wanted(self) -> int:
        """The number of slots that the job should have if there are enough hosts."""
        return self.asked or self._config.num_slots

    @property
    def committed(self) -> int:
        """The number of slots of the newest commit; 0 without a commit."""
        commits = self._records.commits
        return len(commits[0].holders) if commits else 0

    def choose(self, available: int, layout: Layout | None) -> int:
        """The slots of the next formation; more than `available` means to wait.

        Args:
            available: the number of hosts that can be given a slot.
            layout: the layout of the state, if any live host knows it.
        """
        limits = self._config.sizes
        groups = ReplicaGroups.of(layout, limits) if layout is not None else None
        while True:
            chosen = choose_slots(
                wanted=self.wanted,
                committed=self.committed,
                available=available,
                groups=groups,
                limits=limits,
                unfit=self._unfit,
            )
            if layout is None or groups is None or chosen in self._known(groups):
                return chosen
            try:
                size_for(groups.replicas_on(chosen), layout, limits)
                return chosen
            except ValueError as error:
                self.give_up(chosen, str(error))

    def forewarn(self, layout: Layout) -> None:
        """Reports at once if `min_replicas` cannot be kept."""
        limits = self._config.sizes
        if limits.min_replicas:
            try:
                size_for(limits.min_replicas, layout, limits)
            except ValueError as error:
                self._journal.say(
                    f"--min-replicas {limits.min_replicas} cannot be kept, a lost host "
                    f"will be waited for: {error}"
                )

    def _known(self, groups: ReplicaGroups) -> set[int]:
        """Sizes that need no check: running, committed or already given up."""
        return {groups.slots, self.committed, *self._unfit}

    def is_new(self, assignment: SlotAssignment | None) -> bool:
        """Whether no step was committed yet in the size of an assignment."""
        size = len(assignment.slots) if assignment else 0
        return bool(size and self.committed) and size != self.committed

    def failed(self, assignment: SlotAssignment, why: str) -> None:
        """Counts a failed formation; after `FAILURES` gives up its size."""
        size = len(assignment.slots)
        self._failures[size] = self._failures.get(size, 0) + 1
        if self._failures[size] >= FAILURES:
            self.give_up(size, why)

    def give_up(self, slots: int, why: str) -> None:
        """Gives up a size until a user requests it again."""
        if slots not in self._unfit:
            self._unfit[slots] = why
            self._journal.say(f"the job cannot train on {slots} hosts: {why}")

    def why_not(self, slots: int) -> str:
        """Why a size was given up; "" if it was not."""
        return self._unfit.get(slots, "")

    def asked_for(self, size: WantedSize) -> None:
        """Makes a requested size eligible again, despite earlier failures."""
        self._unfit.pop(size.slots, None)
        self._failures.pop(size.slots, None)
