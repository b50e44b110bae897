"""The size that a leader gives its job: what is wanted, what failed, what is possible.

Remembers sizes that could not be restored or trained on, so that growing or shrinking
that fails leads back to the size that worked. The choice itself is `size_for`'s.
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
"""So often may formations of another size fail before that size is given up."""


class JobSizes:
    """Which sizes the job may have now. Used by the leader's event loop."""

    def __init__(self, config: AgentConfig, records: Records, journal: Journal) -> None:
        """Nothing has failed yet."""
        self._config, self._records, self._journal = config, records, journal
        self._unfit: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._asked_before = 0

    def formed(self, assignment: SlotAssignment) -> None:
        """The newest assignment says what was asked for, if the store has lost it."""
        self._asked_before = assignment.asked_slots

    @property
    def asked(self) -> int:
        """Slots that somebody has asked for; 0 if nobody has."""
        asked = self._records.view.wanted
        return asked.slots if asked else self._asked_before

    @property
    def wanted(self) -> int:
        """Slots that the job shall have if there are hosts for them."""
        return self.asked or self._config.num_slots

    @property
    def committed(self) -> int:
        """Slots when the newest step was committed; 0 if none was."""
        commits = self._records.commits
        return len(commits[0].holders) if commits else 0

    def choose(self, available: int, layout: Layout | None) -> int:
        """Slots of the next formation; more than `available` means to wait.

        Args:
            available: hosts that can be given a slot.
            layout: of the state, if any live host knows it.
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
        """Says at once if `min_replicas` cannot be kept, not when it is needed."""
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
        """Sizes that need no check: where there is nothing to choose, or that ran."""
        return {groups.slots, self.committed, *self._unfit}

    def is_new(self, assignment: SlotAssignment | None) -> bool:
        """Whether no step was committed yet in the size of a formation."""
        size = len(assignment.slots) if assignment else 0
        return bool(size and self.committed) and size != self.committed

    def failed(self, assignment: SlotAssignment, why: str) -> None:
        """A formation of a new size failed; often enough, and it is given up."""
        size = len(assignment.slots)
        self._failures[size] = self._failures.get(size, 0) + 1
        if self._failures[size] >= FAILURES:
            self.give_up(size, why)

    def give_up(self, slots: int, why: str) -> None:
        """This size is not tried again until somebody asks for it."""
        if slots not in self._unfit:
            self._unfit[slots] = why
            self._journal.say(f"the job cannot train on {slots} hosts: {why}")

    def why_not(self, slots: int) -> str:
        """Why a size was given up; "" if it was not."""
        return self._unfit.get(slots, "")

    def asked_for(self, size: WantedSize) -> None:
        """Somebody asks for a size: it is tried whatever was before."""
        self._unfit.pop(size.slots, None)
        self._failures.pop(size.slots, None)
