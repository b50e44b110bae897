"""The leading agent's duties: it forms generations and keeps the ledger.

Runs on the agent's event loop and only while this host holds the leader key. Gathers
reports, lets the pure modules (`forming`, `roles`, `recovery`) decide, writes the
result to the store and sends orders. Holds no state that its successor could not learn
again from the store and the hosts.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Literal

from dtft.checkpoint.commit import Commit, Divergence
from dtft.checkpoint.slices import Layout
from dtft.elastic.config import AgentConfig
from dtft.elastic.coordinator import Coordinator
from dtft.elastic.forming import Round, assign, death, next_round, orders, report_of
from dtft.elastic.journal import Journal, storage_steps
from dtft.elastic.ledger import KEPT_COMMITS, Ledger, Writer, result_json
from dtft.elastic.membership import Membership, View
from dtft.elastic.roles import Assignment, HostRecord, fill_slots
from dtft.elastic.roster import Roster, lost, registered_anew
from dtft.elastic.store import Put

Phase = Literal["idle", "gathering", "waiting", "assigning", "preparing", "running"]
MAX_FAILURES = 3


class Leader:
    """Forms and re-forms the job; see the module's text."""

    def __init__(
        self,
        config: AgentConfig,
        membership: Membership,
        view: View,
        emit: Callable[..., None],
        send: Callable[..., None],
        journal: Journal,
    ) -> None:
        """Takes over. `send(host, op, **fields)` reaches any connected host."""
        self._config, self._membership, self.view = config, membership, view
        self._emit, self._send, self._journal = emit, send, journal
        self._writer = Writer(emit)
        self._commits = list(membership.commits())
        self._roster = Roster(time.monotonic(), config.timeouts.connect)
        self._coordinator = Coordinator(config, emit)
        self._phase: Phase = "idle"
        self._deadline = 0.0
        self._counter = 0
        self._round: Round | None = None
        self._previous = view.assignment
        self._assignment: Assignment | None = None
        self._ledger: Ledger | None = None
        self._failures: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._store_away = self._ending = self._rescuing = False
        if view.assignment is not None:
            gone = [host for host in view.assignment.slots if host not in view.hosts]
            names = ", ".join(lost(host, view.assignment) for host in gone)
            self._form(names or "the leading host (a spare) was lost")

    # -------------------------------------------------------------- membership

    def see(self, view: View) -> None:
        """The store's view has changed."""
        gone = set(self.view.hosts) - set(view.hosts)
        for host in sorted(gone & self._roster.connected):
            self.lost(host, "its lease ran out")
        new = registered_anew(self.view.hosts, view.hosts)
        self.view = view
        for host in sorted(new & self._roster.connected):
            self._joined(host)
        if view.stop:
            self._stop()

    def connected(self, host: str) -> None:
        """A host has connected; the store may tell of it earlier or later."""
        self._roster.connected.add(host)
        if host in self.view.hosts:
            self._joined(host)

    def _joined(self, host: str) -> None:
        """A host is both connected and registered: it may be given a slot."""
        self._journal.event("host_joined", host=host)
        if self._phase == "gathering":
            self._ask(host)
        elif self._phase == "waiting":
            self._form("a host joined")
        elif self._phase == "idle":
            count = len(self._roster.usable(self.view.hosts))
            need = self._config.num_slots
            if count >= need:
                self._form("start of the job")
            else:
                self._journal.say(f"{count} of {need} hosts are here")

    def lost(self, host: str, how: str) -> None:
        """A host has died (proved by its closed port, or by its lease)."""
        if not self._roster.lose(host, self.view.hosts):
            return
        self._journal.event("host_lost", host=host, how=how)
        slots = self._assignment.slots if self._assignment else ()
        reason = lost(host, self._assignment, self._previous)
        if self._phase == "gathering" and self._round is not None:
            self._round.reasons.append(reason)
            self._gathered()
        elif host in slots or self._phase == "assigning":
            self._form(reason)
        elif self._phase != "idle":
            self._journal.say(f"spare {host} was lost ({how})")

    # ----------------------------------------------------------------- forming

    def _form(self, reason: str) -> None:
        """Begins a new formation, or one more attempt at it."""
        if self._ending:
            return
        self._counter += 1
        ballot = (self.view.leader_revision, self._counter)
        self._round = next_round(self._round, ballot, reason, time.time())
        if self._assignment is not None:
            self._previous, self._assignment = self._assignment, None
        self._journal.event("forming", reason=reason, ballot=ballot)
        self._coordinator.end()
        self._enter("gathering", self._config.timeouts.restore)
        for host in sorted(self._roster.connected):
            self._ask(host)

    def _ask(self, host: str) -> None:
        assert self._round is not None
        self._send(host, "reform", ballot=self._round.ballot)

    def _enter(self, phase: Phase, limit_s: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + limit_s

    def _gathered(self) -> None:
        """Goes on once every live host has answered."""
        round_, hosts = self._round, self.view.hosts
        if self._phase != "gathering" or round_ is None:
            return
        if not self._roster.expected(hosts, time.monotonic()) <= set(round_.replies):
            return
        if self._ledger is not None and self._ledger.pending is not None:
            return  # a complete step is still to be recorded; `written` calls again
        old = self._previous
        slots = zip(old.slots, old.incarnations, strict=True) if old else ()
        usable = self._roster.usable(hosts)
        filled = fill_slots(list(slots), usable, self._config.num_slots)
        present = [record for record in filled if record is not None]
        if len(present) < len(filled):
            self._wait_for_hosts([s for s, host in enumerate(filled) if host is None])
        else:
            self._assign(round_, present)

    def _wait_for_hosts(self, empty: list[int]) -> None:
        self._journal.say(
            f"no spare is left for slot {', '.join(map(str, empty))}: the job waits "
            f"for a host. Start one more: the command of the other agents, with --job "
            f"{self._config.job} --store {self._config.store}"
        )
        self._journal.event("waiting_for_host", slots=empty)
        self._enter("waiting", float("inf"))

    def _assign(self, round_: Round, filled: list[HostRecord]) -> None:
        round_.assignment, round_.decision = assign(
            round_,
            filled,
            previous=self._previous,
            commits=self._commits,
            storage_steps=storage_steps(self._config.storage_directory),
            quarantined=self._quarantined,
        )
        if round_.assignment.rung == 3:
            self._explain_storage(round_.decision.passed_over, round_.assignment)
        self._enter("assigning", self._config.timeouts.restore)
        self._put(
            "assignment", round_.ballot, "assignment", round_.assignment.to_json()
        )

    def _explain_storage(self, reasons: tuple[str, ...], chosen: Assignment) -> None:
        for reason in reasons:
            self._journal.say(f"memory cannot restore {reason}")
        interval = self._config.storage_interval
        source = (
            f"storage, which is written every {interval} steps"
            if chosen.source == "storage"
            else "the initial state: no step was committed or stored yet"
        )
        self._journal.say(f"rung 3: restoring step {chosen.step} from {source}")

    def _assigned(self) -> None:
        round_ = self._round
        assert round_ is not None and round_.assignment is not None
        self._assignment, self._ledger = round_.assignment, None
        self._journal.event("assignment", **json.loads(round_.assignment.to_json()))
        self._coordinator.start(self._config.num_slots, round_.ballot)

    def coordinator_ready(self, ballot: tuple[int, int], address: str) -> None:
        """The coordination service of a formation serves: slots can be given out."""
        round_ = self._round
        if round_ is None or round_.ballot != ballot or self._phase != "assigning":
            return
        round_.restore_begun = time.time()
        self._enter("preparing", self._config.timeouts.start)
        try:
            prepared = orders(round_, self.view.hosts, address)
        except KeyError as error:
            self._form(lost(str(error.args[0]), self._assignment))
            return
        for host, order in prepared.items():
            self._send(host, "prepare", **order)

    # ----------------------------------------------------------------- reports

    def hears(self, host: str, message: dict[str, Any]) -> None:
        """A report of some host; those of an older ballot are refused."""
        op = message.pop("op")
        ballot = tuple(message.pop("ballot", ()))
        if op == "fatal":
            self._end("error", message["message"], code=message.get("code", 2))
        elif self._round is not None and ballot == self._round.ballot:
            try:
                getattr(self, f"_on_{op}")(host, **message)
            except Divergence as error:
                self._end("error", str(error))
        elif op == "trainer_exit" and self._phase == "gathering":
            assert self._round is not None and self._previous is not None
            slots = self._previous.slots  # it died beside what began this round
            self._round.reasons.append(death(slots, host, message["code"]))

    def _on_holdings(self, host: str, **reply: Any) -> None:
        assert self._round is not None
        self._round.reply(host, reply)
        self._gathered()

    def _on_prepare_failed(
        self, host: str, error: str, corrupt: list[str], **_
    ) -> None:
        assert self._round is not None and self._round.assignment is not None
        self._journal.say(f"{host} could not restore: {error}")
        self._round.corrupt.extend(corrupt)
        self._count_failure(self._round.assignment.step)
        self._form(f"restore failed on {host}: {error}")

    def _count_failure(self, step: int) -> None:
        """The same restore failing twice without one new step: quarantine."""
        self._failures[step] = self._failures.get(step, 0) + 1
        if self._failures[step] == 2 and any(c.step == step for c in self._commits):
            self._quarantined.add(step)
            self._journal.say(f"step {step} failed twice and is quarantined")

    def _on_prepared(self, host: str, **outcome: Any) -> None:
        round_ = self._round
        assert round_ is not None
        round_.prepared[host] = outcome
        if len(round_.prepared) == self._config.num_slots:
            round_.restore_s = time.time() - round_.restore_begun

    def _on_layout(self, host: str, layout: str) -> None:
        announced = Layout.from_json(layout)
        if self._ledger is None and self._assignment is not None:
            self._ledger = self._open_ledger(announced, self._assignment)
        elif self._ledger and self._ledger.layout.digest != announced.digest:
            self._end("error", f"{host} announced another state layout than its peers")

    def _open_ledger(self, layout: Layout, assignment: Assignment) -> Ledger:
        round_ = self._round
        assert round_ is not None
        stored = storage_steps(self._config.storage_directory)
        ports = {h: p["export_port"] for h, p in round_.prepared.items()}
        hosts = self.view.hosts
        ledger = Ledger(
            self._config,
            layout,
            assignment,
            stored=max(stored, default=0),
            export_addresses={
                host: f"{hosts[host].address.rsplit(':', 1)[0]}:{ports.get(host, 0)}"
                for host in assignment.slots
                if host in hosts
            },
            record=self._record,
            send=self._send,
        )
        ledger.stopping = self.view.stop
        return ledger

    def _on_running(self, host: str, bytes_from_storage: int, **_: Any) -> None:
        round_ = self._round
        assert round_ is not None and round_.assignment is not None
        round_.running.add(host)
        round_.bytes_from_storage += bytes_from_storage
        if len(round_.running) < self._config.num_slots or round_.reported:
            return
        self._enter("running", self._stage_limit())
        round_.reported = True
        self._failures.clear()
        if round_.assignment.rung == 0:
            self._journal.event("started", step=round_.assignment.step)
        else:
            now = time.time()
            self._journal.recovery(report_of(round_, now), round_.detected, now)

    def _stage_limit(self) -> float:
        return self._config.timeouts.stage * self._config.interval

    def _on_staged(self, host: str, slot: int, step: int, digests: list[bytes]) -> None:
        if self._phase == "running":
            self._enter("running", self._stage_limit())
        if self._ledger is not None:
            self._ledger.staged(slot, step, digests)

    def _on_held(self, host: str, step: int, source: int, target: int) -> None:
        if self._ledger is not None:
            self._ledger.held(step, source, target)

    def _on_trainer_exit(self, host: str, code: int) -> None:
        assignment, round_ = self._assignment, self._round
        if assignment is not None and round_ is not None and not round_.reported:
            self._count_failure(assignment.step)
            if self._failures[assignment.step] >= MAX_FAILURES:
                logs = self._config.run_directory / "logs"
                self._end(
                    "error",
                    f"trainers died {MAX_FAILURES} times after restoring step "
                    f"{assignment.step} without finishing a step; see {logs}",
                )
                return
        self._form(death(assignment.slots if assignment else (), host, code))

    def _on_finished(self, host: str, slot: int, step: int, **_: Any) -> None:
        assert self._round is not None
        self._round.finished[slot] = step
        if self._phase == "running":
            self._enter("running", self._config.timeouts.export)
        self._conclude()

    def _on_exported(self, host: str, step: int, ok: bool, error: str) -> None:
        outcome = self._ledger and self._ledger.export_answer(host, step, ok)
        if outcome is None:
            return
        self._journal.event("export", step=step, ok=outcome, error=error)
        if not outcome:
            self._journal.say(f"storage: step {step} was not written ({error})")
        if self._rescuing:
            self._end_with_what_is_stored()
        self._conclude()

    # --------------------------------------------------------------- the store

    def _put(self, label: str, value: Any, name: str, text: str) -> None:
        change = Put(key=self._membership.key(f"m/{name}"), value=text.encode())
        self._write(label, value, change)

    def _write(self, label: str, value: Any, change: Put) -> None:
        view = self.view
        self._writer.write(
            label, value, lambda: self._membership.fenced(view, [change])
        )

    def _record(self, commit: Commit) -> None:
        self._commits = [commit, *self._commits][:KEPT_COMMITS]
        self._emit("committing", commit.step)
        change = self._membership.commit_change(tuple(self._commits))
        self._write("commit", commit, change)

    def written(self, label: str, value: Any, allowed: bool) -> None:
        """A write was answered."""
        if not allowed:
            self._emit("deposed")
            return
        if self._store_away:
            self._store_away = False
            self._journal.say(f"the store answers again; {label} recorded")
        if label == "assignment" and self._round and value == self._round.ballot:
            self._assigned()
        elif label == "commit" and self._ledger is not None:
            self._emit("committing", 0)
            self._journal.committed(value.step)
            self._ledger.written(value)
            self._gathered()
            self._conclude()

    def delayed(self, label: str, value: Any) -> None:
        """The store does not answer."""
        if not self._store_away:
            self._store_away = True
            self._journal.say(
                f"the store {self._config.store} does not answer; training goes on, "
                f"the {label} waits (last commit: step {self._journal.last_commit})"
            )
        if label == "commit" and self._ledger is not None:
            self._ledger.delayed(value)

    # --------------------------------------------------------------------- end

    def _stop(self) -> None:
        """Stops the job at a step boundary that all trainers will agree on."""
        if self._phase in ("idle", "waiting"):
            self._stop_with_hosts_missing()
        elif self._ledger is not None:
            self._ledger.stopping = True

    def _stop_with_hosts_missing(self) -> None:
        """Exports the last commit if the hosts that are left have it, and ends."""
        if self._rescuing:
            return
        self._rescuing, round_ = True, self._round
        if self._ledger is None and self._previous and round_ and round_.layout_json:
            layout = Layout.from_json(round_.layout_json)
            self._ledger = self._open_ledger(layout, self._previous)
        stored = max(storage_steps(self._config.storage_directory), default=0)
        last = max((commit.step for commit in self._commits), default=0)
        alive, ledger = self._roster.connected, self._ledger
        if ledger is None or last <= stored or not ledger.export_from(last, alive):
            self._end_with_what_is_stored()

    def _end_with_what_is_stored(self) -> None:
        stored = max(storage_steps(self._config.storage_directory), default=0)
        lost = max((commit.step for commit in self._commits), default=0) - stored
        if lost > 0:
            self._journal.say(
                f"stopped while hosts are missing: storage has step {stored}; the "
                f"{lost} steps committed after it end with the memory of the hosts"
            )
        self._end("stopped", step=stored)

    def _conclude(self) -> None:
        """Ends the job once the last step is finished, committed and in storage."""
        round_, ledger = self._round, self._ledger
        if round_ is None or len(round_.finished) < self._config.num_slots:
            return
        last = max(round_.finished.values())
        if ledger is None or ledger.committed < last or ledger.exporting is not None:
            return
        if last in storage_steps(self._config.storage_directory):
            self._end("stopped" if self.view.stop else "done", step=last)
        elif ledger.export_failures < MAX_FAILURES:
            ledger.export(last)
        else:
            self._end("error", f"step {last} could not be written to storage", last)

    def _end(
        self, status: str, message: str = "", step: int = 0, code: int = 0
    ) -> None:
        if self._ending:
            return
        self._ending = True
        code = code or int(status == "error")
        text = result_json(status, step, message, code)
        self._journal.event("end", **json.loads(text))
        self._put("result", text, "result", text)

    def tick(self) -> None:
        """Enforces the deadlines; every one names who is late."""
        self._gathered()
        round_ = self._round
        if round_ is None or self._ending or time.monotonic() < self._deadline:
            return
        if self._phase == "gathering":
            for host in sorted(self._roster.connected - set(round_.replies)):
                self._roster.evict(host)
                self.lost(host, "it did not answer in time")
        elif self._phase == "preparing":
            late = set(self._assignment.slots if self._assignment else ())
            names = ", ".join(sorted(late - round_.running))
            self._form(f"{names} did not start training in time")
        elif self._phase == "running":
            assert self._ledger is not None
            self._form(f"no step in time, waiting for {self._ledger.waiting_for()}")
        elif self._phase == "assigning":
            self._form("the new assignment could not be recorded in time")

    def close(self) -> None:
        """Hands over to whoever leads next."""
        self._writer.close()
        self._coordinator.close()
