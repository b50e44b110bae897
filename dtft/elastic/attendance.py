"""Hosts come and go: what follows for the job, as its leader sees it.

Hears that a host has connected, is registered or was lost; then a formation begins, or
the host is asked what it holds, or told what a slot would hold. Must not know reports,
steps or storage, nor which host gets which slot.
"""

from collections.abc import Collection

from dtft.elastic.config import AgentConfig
from dtft.elastic.journal import Journal
from dtft.elastic.membership import View
from dtft.elastic.records import Records
from dtft.elastic.roster import Roster, lost, registered_anew
from dtft.elastic.rounds import Rounds
from dtft.elastic.served import missing


class Attendance:
    """The hosts that are there. Used by the event loop."""

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        rounds: Rounds,
        roster: Roster,
        journal: Journal,
    ) -> None:
        """Begins nothing yet."""
        self._config, self._records, self._rounds = config, records, rounds
        self._roster, self._journal = roster, journal

    def take_over(self) -> None:
        """Forms a job anew that another host has led until now."""
        hosts, assignment = self._records.view.hosts, self._records.view.assignment
        if assignment is not None:
            gone = [host for host in assignment.slots if host not in hosts]
            names = ", ".join(lost(host, assignment) for host in gone)
            self._rounds.form(names or "the leading host (a spare) was lost")

    def see(self, view: View) -> None:
        """The store's view has changed: it is the one that counts from now on."""
        before = self._records.view.hosts
        for host in sorted((set(before) - set(view.hosts)) & self._roster.connected):
            self.lost(host, "its lease ran out")
        new = registered_anew(before, view.hosts)
        self._records.view = view
        for host in sorted(new & self._roster.connected):
            self._joined(host)

    def connected(self, host: str) -> None:
        """A host has connected; the store may tell of it earlier or later."""
        self._roster.connected.add(host)
        if host in self._records.view.hosts:
            self._joined(host)

    def _joined(self, host: str) -> None:
        """A host is both connected and registered: it may be given a slot."""
        self._journal.event("host_joined", host=host)
        if self._rounds.phase == "gathering":
            self._rounds.ask(host)
        elif self._rounds.phase not in ("idle", "waiting"):
            self._rounds.expect({host})
        elif self._config.seats.begins_on_join:
            self._begin()

    def _begin(self) -> None:
        count = len(self._roster.usable(self._records.view.hosts))
        need = self._config.num_slots
        if self._rounds.phase == "waiting":
            self._rounds.form("a host joined")
        elif count >= need:
            self._rounds.form("start of the job")
        else:
            self._journal.say(f"{count} of {need} hosts are here")

    def tick(self) -> None:
        """Forms the job once every process is there, if it is them that begin it."""
        if self._config.seats.begins_on_join:
            return
        if self._rounds.phase in ("idle", "waiting"):
            hosts = self._roster.usable(self._records.view.hosts)
            if not missing(hosts, self._config.num_slots):
                self._rounds.form("every process has attached")

    def lost(self, host: str, how: str) -> None:
        """A host has died (proved by its closed port, or by its lease)."""
        if not self._roster.lose(host, self._records.view.hosts):
            return
        self._journal.event("host_lost", host=host, how=how)
        rounds = self._rounds
        slots = rounds.assignment.slots if rounds.assignment else ()
        reason = lost(host, rounds.assignment, rounds.previous)
        if rounds.phase == "gathering" and rounds.current is not None:
            rounds.current.reasons.append(reason)
            rounds.gathered()
        elif host in slots or rounds.phase == "assigning":
            rounds.form(reason)
        elif rounds.phase != "idle":
            self._journal.say(f"spare {host} was lost ({how})")

    def shut_out(self, answered: Collection[str]) -> None:
        """Hosts that have not answered in time get no slot any more in this job."""
        for host in sorted(self._roster.connected - set(answered)):
            self._roster.evict(host)
            self.lost(host, "it did not answer in time")
