"""Leads a job whose processes are the user's: forms it when all of them have attached.

As `Leader`, with three differences: slots go by the index of the attached process; a
generation that lost a process waits until the user has restarted all; and the job never
ends by itself. Also answers who wants to know when a step is safe or stored, and who
wants one on other shardings.
"""

from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.slices import Layout
from dtft.elastic.attendance import Attendance
from dtft.elastic.demands import Answer
from dtft.elastic.forming import Ballot
from dtft.elastic.leader import Leader
from dtft.elastic.remapping import NotPlanned, Remapping
from dtft.elastic.reports import SERVED_FIELDS
from dtft.elastic.roles import HostRecord
from dtft.elastic.rounds import Rounds
from dtft.elastic.served import fill_by_process, missing, scale_refusal
from dtft.elastic.spread import known_domains


class ServedRounds(Rounds):
    """Rounds whose slots are filled by the processes that are attached."""

    def _filled(self, usable: list[HostRecord]) -> tuple[HostRecord | None, ...]:
        assert self.current is not None
        replies = self.current.replies  # newer than the store: who has stood down since
        free = [
            record
            for record in usable
            if record.attached_ns
            and replies[record.host]["attached_ns"] == record.attached_ns
        ]
        return fill_by_process(free, self._config.num_slots)

    def _wait_for_hosts(self, empty: list[int]) -> None:
        assert self.current is not None
        total = self._config.num_slots
        absent = ", ".join(map(str, empty))
        self._journal.say(
            f"waiting for process {absent} of {total} to attach; restart all processes "
            "of the job, each beside an agent that is free"
        )
        self._journal.event("waiting_for_process", slots=empty)
        self.enter("waiting", float("inf"))


class ServedAttendance(Attendance):
    """Hosts that are there; who attaches to one decides whether it gets a slot."""

    def _joined(self, host: str) -> None:
        """A host is both connected and registered, which begins nothing."""
        self._journal.event("host_joined", host=host)
        if self._rounds.phase == "gathering":
            self._rounds.ask(host)
        elif self._rounds.phase not in ("idle", "waiting"):
            self._rounds.expect({host})


@dataclass(frozen=True, kw_only=True)
class Flush:
    """A process that waits until a step is safe, or stored."""

    ballot: Ballot
    host: str
    token: int
    step: int
    store: bool


class ServedLeader(Leader):
    """Forms the job of the user's processes; see the module's text."""

    rounds_class = ServedRounds
    attendance_class = ServedAttendance
    reports = SERVED_FIELDS
    _flushes: tuple[Flush, ...] = ()
    _export_asked: bool = False
    """Somebody waits for the newest commit to be in storage."""
    _remapping: tuple[Ballot, Remapping] | None = None
    """Of a formation, by its ballot."""

    def tick(self) -> None:
        """Forms once every process is there, and enforces the deadlines."""
        rounds = self._rounds
        if rounds.phase in ("idle", "waiting"):
            hosts = self._roster.usable(self.view.hosts)
            if not missing(hosts, self._config.num_slots):
                rounds.form("every process has attached")
        elif rounds.phase == "running" and not (
            rounds.ledger is not None and rounds.ledger.is_waiting
        ):
            # Whenever the user saves next; from the first process's save on it counts.
            rounds.enter("running", self._stage_limit())
        super().tick()

    def _fail(self, message: str, code: int = 1) -> None:
        """The processes are told and let go; the agents and the last commit stay."""
        del code
        self._journal.say(message)
        self._rounds.form(message, fatal=True)

    def _on_process_gone(self, host: str) -> None:
        assignment = self._rounds.assignment
        slots = assignment.slots if assignment else ()
        slot = slots.index(host) if host in slots else "?"
        self._rounds.form(f"process {slot} on {host} has gone")

    def _on_finished(self, host: str, slot: int, step: int, **_: Any) -> None:
        """A process has said goodbye; after the last one the job waits for others."""
        round_ = self._rounds.current
        assert round_ is not None
        round_.finished[slot] = step
        if len(round_.finished) == self._config.num_slots:
            self._rounds.form("every process has ended")

    def scaling_wanted(self, replicas: int, answer: Answer) -> None:
        """Who starts the processes decides how many there are."""
        del replicas
        error = scale_refusal(self._config.job)
        answer({"error": error, "code": 2})

    def export_wanted(self, answer: Answer) -> None:
        """The newest commit is written now: nobody knows when the next one comes."""
        rounds, ledger = self._rounds, self._rounds.ledger
        if ledger is None and rounds.phase == "running":
            text = "nothing was saved since the processes have attached; ask again then"
            answer({"error": text})
        elif ledger is not None and ledger.exported >= max(0, ledger.committed):
            answer({"step": ledger.exported})
        else:
            super().export_wanted(answer)
            self._export_asked = ledger is not None
            self._settle()

    # --------------------------------------------------------- other shardings

    def _newest(self) -> Remapping:
        """What is known of the newest commit of this formation."""
        round_ = self._rounds.current
        assert round_ is not None
        if self._remapping is None or self._remapping[0] != round_.ballot:
            decision = round_.decision
            found = (decision.located, decision.layout) if decision else (None, None)
            self._remapping = round_.ballot, Remapping(*found)
        return self._remapping[1]

    def _on_staged(self, host: str, **staged: Any) -> None:
        super()._on_staged(host, **staged)
        if self._rounds.ledger is not None:
            told = {name: staged[name] for name in ("slot", "step", "digests")}
            self._newest().staged(**told)

    def _on_wanted(self, host: str, slot: int, step: int, layout: str) -> None:
        del slot
        assignment, hosts = self._rounds.assignment, self.view.hosts
        if assignment is None:
            return
        domains, _ = known_domains(hosts.values())
        told: dict[str, Any] = {"step": step, "layout": layout}
        try:
            told |= self._newest().order_for(
                host,
                step,
                Layout.from_json(layout),
                slots=assignment.slots,
                addresses={name: record.address for name, record in hosts.items()},
                domains=domains.names,
            )
        except NotPlanned as error:
            told["error"] = str(error)
        self._send(host, "assemble", **told)

    # ------------------------------------------------------------------ flushes

    def _on_flush(
        self, host: str, slot: int, token: int, step: int, store: bool
    ) -> None:
        round_ = self._rounds.current
        assert round_ is not None
        flush = Flush(
            ballot=round_.ballot, host=host, token=token, step=step, store=store
        )
        self._flushes += (flush,)
        self._settle()

    def _settle(self) -> None:
        """Answers every flush that has come true, and orders what one waits for."""
        round_, ledger = self._rounds.current, self._rounds.ledger
        ballot = round_.ballot if round_ else None
        self._flushes = tuple(f for f in self._flushes if f.ballot == ballot)
        for flush in self._flushes if ledger is not None else ():
            assert ledger is not None
            if ledger.committed < flush.step or ledger.exporting is not None:
                continue
            if flush.store and ledger.exported < flush.step:
                ledger.export(ledger.committed)
                continue
            self._answer(flush, "")
        if self._export_asked and ledger is not None and ledger.exporting is None:
            self._export_asked = False
            if ledger.exported < ledger.committed:
                ledger.export(ledger.committed)

    def _answer(self, flush: Flush, error: str) -> None:
        self._flushes = tuple(other for other in self._flushes if other is not flush)
        self._send(flush.host, "flushed", token=flush.token, error=error)

    def written(self, label: str, value: Any, allowed: bool) -> None:
        """A write was answered; a commit is what some wait for."""
        super().written(label, value, allowed)
        if label == "commit" and allowed:
            ledger = self._rounds.ledger
            if ledger is not None and self._rounds.assignment is not None:
                self._newest().committed(value, ledger.placement)
            self._settle()

    def _export_ended(self, host: str, step: int, outcome: bool, error: str) -> None:
        super()._export_ended(host, step, outcome, error)
        if not outcome:
            directory = self._config.storage_directory
            why = error.partition("\n")[0][:300]
            text = (
                f"step {step} did not reach storage in {directory}: {why} ({host}). "
                "Steps stored before are as they were; the next that is due is tried."
            )
            slots = self._rounds.assignment.slots if self._rounds.assignment else ()
            for slot_host in slots:
                self._send(slot_host, "storage_failed", error=text)
            for flush in [flush for flush in self._flushes if flush.store]:
                self._answer(flush, text)
        self._settle()
