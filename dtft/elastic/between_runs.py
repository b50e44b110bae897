"""Has the newest commit of a served job written to storage while no process runs.

Asks the hosts first what they hold: some may have gone since. Which of them write is
`idle_export`'s decision; must not know how bytes get to storage.
"""

import dataclasses

from dtft.elastic.demands import Answer
from dtft.elastic.forming import Ballot, Round, main_reason
from dtft.elastic.host_registry import HostRegistry
from dtft.elastic.idle_export import NotExportable, plan_idle_export
from dtft.elastic.records import Records
from dtft.elastic.rounds import Rounds
from dtft.elastic.storage_desk import StorageDesk

ATTACHED = (
    "the processes have attached again before it was written; ask again once they "
    "have saved a step, or when they have ended"
)


class BetweenRuns:
    """Exports of one leader's job between two formations. Used by the event loop."""

    def __init__(
        self,
        records: Records,
        rounds: Rounds,
        registry: HostRegistry,
        storage: StorageDesk,
    ) -> None:
        """Nobody waits."""
        self._records, self._rounds = records, rounds
        self._registry, self._storage = registry, storage
        self._asked = False
        self._ordered: Ballot | None = None
        """Of the round after which an export was ordered that is not over."""

    def asked(self, answer: Answer) -> None:
        """Somebody wants the newest commit in storage, and no process runs."""
        round_ = self._rounds.current
        self._storage.wanted(self._records.last_step, answer)
        if round_ is None or self._ordered == round_.ballot:
            return  # it is being written
        self._asked = True
        if self._rounds.phase == "waiting":
            self._rounds.form(main_reason(round_.reasons))

    def tick(self) -> None:
        """Orders the export once the hosts have answered."""
        round_, phase = self._rounds.current, self._rounds.phase
        if round_ is None or phase == "gathering":
            return
        cut_off = self._ordered not in (None, round_.ballot)
        if not (self._asked or cut_off):
            return
        self._asked, self._ordered = False, None
        if phase == "waiting":
            self._order(round_)
        else:
            self._storage.refuse(ATTACHED)

    def _order(self, round_: Round) -> None:
        there = self._registry.connected
        told = {host: it for host, it in round_.replies.items() if host in there}
        complete = {host: it.get("complete", {}) for host, it in told.items()}
        try:
            plan = plan_idle_export(self._records.commits, round_.layouts, complete)
        except NotExportable as error:
            self._storage.refuse(str(error))
            return
        step, previous = plan.commit.step, self._rounds.previous
        if step in self._storage.watch.steps:
            self._storage.has(step)
            return
        assert previous is not None  # or nothing would have been committed
        formed = dataclasses.replace(
            previous, slots=plan.hosts, source="memory", step=step
        )
        self._rounds.open_ledger(plan.layout, formed)
        assert self._rounds.ledger is not None
        held = {host: it["holdings"].get(step, {}) for host, it in told.items()}
        if self._rounds.ledger.export_from(step, plan.hosts, held):
            self._ordered = round_.ballot
        else:
            self._storage.refuse(f"some slice of step {step} is not in memory any more")

    def over(self) -> None:
        """An export has ended, well or not."""
        self._ordered = None
