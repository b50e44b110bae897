"""How often trainers have failed without getting on, and what follows from it.

Only counts and compares: a step whose restore fails twice is quarantined, unless the
job's size is new, which is to blame then; too many failures in a row end the job. Must
not know hosts, nor how a round goes.
"""

from pathlib import Path

from dtft.elastic.journal import Journal
from dtft.elastic.records import Records
from dtft.elastic.roles import Assignment
from dtft.elastic.sizes import Sizes

START_FAILURES = 3
"""So often may trainers die after one and the same restore."""
FRUITLESS = 10
"""So often in a row may they die without one new commit."""


class Setbacks:
    """What has failed since every slot trained, and since the newest commit.

    Attributes:
        quarantined: steps that are not restored from memory any more.
    """

    def __init__(self, records: Records, sizes: Sizes, journal: Journal) -> None:
        """Nothing has failed."""
        self._records, self._sizes, self._journal = records, sizes, journal
        self.quarantined: set[int] = set()
        self._failures: dict[int, int] = {}
        self._fruitless = 0

    def restore_failed(self, chosen: Assignment) -> int:
        """A restore came to nothing; returns how often without one new step.

        The same restore failing twice: quarantine. In a size that is new the size is
        to blame, not the step.
        """
        step = chosen.step
        if self._sizes.is_new(chosen):
            self._sizes.failed(chosen, f"step {step} could not be trained on there")
            return 0
        self._failures[step] = self._failures.get(step, 0) + 1
        known = any(commit.step == step for commit in self._records.commits)
        if self._failures[step] == 2 and known:
            self.quarantined.add(step)
            self._journal.say(f"step {step} failed twice and is quarantined")
        return self._failures[step]

    def trainer_died(self, chosen: Assignment, had_trained: bool, logs: Path) -> str:
        """A trainer has ended by itself.

        Args:
            chosen: what it was to train from.
            had_trained: every slot has trained since.
            logs: where trainers write, for people.

        Returns:
            Why the job ends; "" if it is worth another try.
        """
        self._fruitless += 1
        starts = 0 if had_trained else self.restore_failed(chosen)
        if starts < START_FAILURES and self._fruitless < FRUITLESS:
            return ""
        what = "finishing a step" if starts >= START_FAILURES else "a commit"
        return (
            f"trainers died {max(starts, self._fruitless)} times after restoring step "
            f"{chosen.step} without {what}; see {logs}"
        )

    def copy_refused(self) -> bool:
        """A copy was of another step than was said; whether the job ends for it."""
        self._fruitless += 1
        return self._fruitless >= FRUITLESS

    def trained(self) -> None:
        """Every slot trains: restores that failed before do not count any more."""
        self._failures.clear()

    def committed(self) -> None:
        """A step is safe: what died before was not in vain."""
        self._fruitless = 0
