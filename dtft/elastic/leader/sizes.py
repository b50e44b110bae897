"""Chooses how many slots the job has when it is formed next.

Excludes a number of slots with which the job could not be restored or trained, until a
user requests that number again. Instead of an excluded number, the job takes a smaller
number that is allowed, or the number of the newest commit (`choose_slots` in
`assignment`).
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
"""Number of failed attempts to train with one number of slots, other than that of the
newest commit, after which this number is excluded."""


class JobSizes:
    """Chooses the job's number of slots, and keeps the excluded numbers.

    A number is excluded if the job could not be restored or trained with this number.
    Used by the leader's event loop.
    """

    def __init__(self, config: AgentConfig, records: Records, journal: Journal) -> None:
        """Starts without an excluded number of slots."""
        self._config, self._records, self._journal = config, records, journal
        self._unfit: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._asked_before = 0
        self._asked_here = 0
        """The number of slots that a user has requested from this leader; 0 without a
        request. The store may not have recorded the request yet."""

    def formed(self, assignment: SlotAssignment) -> None:
        """Remembers the number of slots that a user has requested, from an assignment.

        Every assignment of hosts to slots contains the requested number (0 for none).
        It is used if the store has lost the user's request.
        """
        self._asked_before = assignment.asked_slots

    @property
    def asked(self) -> int:
        """The number of slots requested by a user; 0 if none was requested."""
        recorded = self._records.view.wanted
        return self._asked_here or (recorded.slots if recorded else self._asked_before)

    @property
    def wanted(self) -> int:
        """The requested number of slots, else the number at the start of the job."""
        return self.asked or self._config.num_slots

    @property
    def committed(self) -> int:
        """The number of slots of the newest commit; 0 without a commit."""
        commits = self._records.commits
        return len(commits[0].holders) if commits else 0

    def choose(self, available: int, layout: Layout | None) -> int:
        """Chooses the number of slots for the next assignment of hosts to slots.

        Prefers the number that a user has requested (else that at the job's start),
        then the smaller allowed numbers, then that of the newest commit (`choose_slots`
        in `assignment`). If the result is above `available`, the job waits for hosts.
        With a `layout`, excludes numbers of slots for which the state or the batch
        cannot be divided among so many replicas.

        Args:
            available: the number of hosts that can be given a slot.
            layout: the layout of the state (mesh and leaves), if any live host knows
                it.
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
        """Prints a warning if the job cannot shrink to `--min-replicas` replicas.

        Does nothing if this limit is 0. `layout` is the layout of the state (mesh and
        leaves).
        """
        limits = self._config.sizes
        if limits.min_replicas:
            try:
                size_for(limits.min_replicas, layout, limits)
            except ValueError as error:
                self._journal.say(
                    f"--min-replicas {limits.min_replicas}: the job cannot train on "
                    "so few replicas. If it loses hosts, it goes on with the next "
                    f"larger possible number of replicas, or waits for a host: {error}"
                )

    def _known(self, groups: ReplicaGroups) -> set[int]:
        """Returns the numbers of slots that `choose` takes without a check.

        The check is whether the state and the batch can be divided among so many
        replicas. Not checked are the number with which the state is laid out now
        (`groups`), the number of the newest commit, and the excluded numbers.
        """
        return {groups.slots, self.committed, *self._unfit}

    def is_new(self, assignment: SlotAssignment | None) -> bool:
        """Whether an assignment has another number of slots than the newest commit.

        False without a commit or an assignment.
        """
        size = len(assignment.slots) if assignment else 0
        return bool(size and self.committed) and size != self.committed

    def failed(self, assignment: SlotAssignment, why: str) -> None:
        """Counts a failed attempt to train with the number of slots of `assignment`.

        After 2 failures (`FAILURES`), excludes this number of slots. `why` is the
        reason, for people.
        """
        size = len(assignment.slots)
        self._failures[size] = self._failures.get(size, 0) + 1
        if self._failures[size] >= FAILURES:
            self.give_up(size, why)

    def give_up(self, slots: int, why: str) -> None:
        """Excludes a number of slots until a user requests it again, and prints `why`.

        Does nothing if the number is excluded already.
        """
        if slots not in self._unfit:
            self._unfit[slots] = why
            self._journal.say(f"the job cannot train on {slots} hosts: {why}")

    def why_not(self, slots: int) -> str:
        """Returns why a number of slots is excluded; "" if it is not."""
        return self._unfit.get(slots, "")

    def asked_for(self, size: WantedSize) -> None:
        """Remembers a user's request for a number of slots, and allows it again."""
        self._asked_here = size.slots
        self._unfit.pop(size.slots, None)
        self._failures.pop(size.slots, None)
