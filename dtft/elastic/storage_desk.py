"""What the leader knows and says of storage: how exports ended, and who waits for one.

Keeps `StorageWatch` (which steps are there) and `StorageHealth` (whether it is well) in
step with the outcomes, and tells people, the store and whoever asked for an export.
Must not know how a step is written, nor when one is due.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from dtft.elastic.config import AgentConfig
from dtft.elastic.demands import Answer, Demands
from dtft.elastic.event_loop import Loop
from dtft.elastic.journal import Journal
from dtft.elastic.ledger import Ledger
from dtft.elastic.records import Records
from dtft.elastic.rounds import Rounds
from dtft.elastic.storage_health import StorageHealth
from dtft.elastic.storage_watch import StorageWatch


class StorageDesk:
    """One job's storage in the eyes of its leader. Used by the event loop.

    Attributes:
        watch: which steps storage has.
        health: when an export may be tried again.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        journal: Journal,
        loop: Loop,
        list_steps: Callable[[Path], Iterable[int]],
    ) -> None:
        """Takes storage to be well; nobody waits."""
        self._records, self._journal, self._loop = records, journal, loop
        directory = config.storage_directory
        self.watch = StorageWatch(directory, loop, list_steps=list_steps)
        self.health = StorageHealth(config.storage_directory)
        self._demands = Demands()

    def asked(self, rounds: Rounds, answer: Answer) -> None:
        """Somebody wants the newest commit in storage: the next one is written."""
        ledger = rounds.ledger
        if ledger is None or rounds.phase != "running" or rounds.frozen:
            text = f"the job does not train now ({rounds.phase}); ask again later"
            answer({"error": text})
        else:
            self._demands.add(ledger.committed, answer)

    def committed(self, ledger: Ledger, step: int) -> None:
        """A step is safe in memory: it is written to storage if somebody waits."""
        if self._demands:
            ledger.export(step)
        if (due := ledger.overdue) is not None:
            self._say(self.health.overdue(due, self._loop.now()))

    def ended(self, host: str, step: int, ok: bool, error: str) -> None:
        """A step is in storage, or could not be written.

        Args:
            host: that answered last, or was the first to fail.
            step: of the export.
            ok: whether all of it is there.
            error: what went wrong.
        """
        self._journal.event("export", step=step, ok=ok, error=error)
        if ok:
            self.watch.wrote(step)
            self._records.put("stored", step, "stored", str(step))
            self._say(self.health.succeeded(step))
        else:
            self._say(self.health.failed(step, host, error, self._loop.now()))
        self._demands.outcome(step, ok, error)

    def _say(self, line: str | None) -> None:
        if line:
            self._journal.say(line)

    def wanted(self, committed: int, answer: Answer) -> None:
        """Somebody waits for step `committed` or a later one, which is seen to."""
        self._demands.add(committed, answer)

    def has(self, step: int) -> None:
        """A step is there already: who waits for it is told so."""
        self._demands.outcome(step, True, "")

    def refuse(self, reason: str) -> None:
        """Tells all who wait why nothing will come."""
        self._demands.refuse(reason)

    def close(self) -> None:
        """Tells all who still wait that nothing will come."""
        self._demands.close()
