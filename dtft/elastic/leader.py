"""The leading agent's duties: it forms generations and keeps the ledger.

Runs on the agent's event loop and only while this host holds the leader key. Gathers
reports, lets the pure modules (`roles`, `recovery`, `checkpoint.commit`) decide, writes
the result to the store and sends orders. Holds no state that its successor could not
learn again from the store and the hosts.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dtft.checkpoint.commit import Commit, Divergence
from dtft.checkpoint.slices import Layout
from dtft.elastic.config import AgentConfig
from dtft.elastic.coordinator import Coordinator
from dtft.elastic.journal import Journal, storage_steps
from dtft.elastic.ledger import KEPT_COMMITS, Ledger, Writer, result_json
from dtft.elastic.membership import Membership, View
from dtft.elastic.recovery import Decision, RecoveryReport, decide, transfers_to
from dtft.elastic.roles import Assignment, HostRecord, fill_slots, next_epoch
from dtft.elastic.store import Put

logger = logging.getLogger(__name__)

Phase = Literal["idle", "gathering", "waiting", "assigning", "preparing", "running"]
MAX_FAILURES = 3


@dataclass(kw_only=True)
class Round:
    """One attempt to form: what was heard and decided since it began."""

    ballot: tuple[int, int]
    reasons: list[str]
    detected: float
    """Wall-clock time at which the first failure was noticed."""
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    decision: Decision | None = None
    assignment: Assignment | None = None
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    finished: dict[int, int] = field(default_factory=dict)
    restore_begun: float = 0.0
    restore_s: float = 0.0
    bytes_from_storage: int = 0
    reported: bool = False


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
        self._hosts: set[str] = set()
        self._evicted: set[str] = set()
        self._phase: Phase = "idle"
        self._deadline = 0.0
        self._counter = 0
        self._round: Round | None = None
        self._previous = view.assignment
        self._assignment: Assignment | None = None
        self._ledger: Ledger | None = None
        self._coordinator = Coordinator(config, emit)
        self._failures: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._last_progress = 0
        self._ending = False
        self._store_away = False
        self._dead: set[str] = set()
        self._took_over = time.monotonic()
        if view.assignment is not None:
            gone = [host for host in view.assignment.slots if host not in view.hosts]
            lost = ", ".join(self._name(host) for host in gone)
            self.form(lost or "the leading host (a spare) was lost")

    # -------------------------------------------------------------- membership

    def see(self, view: View) -> None:
        """The store's view has changed."""
        gone = set(self.view.hosts) - set(view.hosts)
        for host in sorted(gone & self._hosts):
            self.lost(host, "its lease ran out")
        self.view = view
        if view.stop:
            self.stop()

    def joined(self, host: str) -> None:
        """A host has connected and may be given a slot."""
        self._hosts.add(host)
        if self._phase in ("gathering", "waiting"):
            self._ask(host) if self._phase == "gathering" else self.form(
                "a host joined"
            )
        elif self._phase == "idle":
            self._begin_when_complete()

    def _begin_when_complete(self) -> None:
        count, need = len(self._hosts), self._config.num_slots
        if count >= need:
            self.form("start of the job")
        else:
            self._journal.say(f"{count} of {need} hosts are here; waiting for the rest")

    def lost(self, host: str, how: str) -> None:
        """A host has died (proved by its closed port, or by its lease)."""
        if host not in self._hosts:
            return
        self._hosts.discard(host)
        self._dead.add(self._incarnation(host))
        self._journal.event("host_lost", host=host, how=how)
        slots = self._assignment.slots if self._assignment else ()
        if self._phase == "gathering" and self._round is not None:
            self._round.reasons.append(self._name(host))
            self._gathered()
        elif host in slots or self._phase == "assigning":
            self.form(self._name(host))
        elif self._phase == "idle":
            return
        else:
            self._journal.say(f"spare {host} was lost ({how})")

    def _name(self, host: str) -> str:
        for source in (self._assignment, self._previous):
            if source is not None and host in source.slots:
                return f"{host} (slot {source.slots.index(host)}) was lost"
        return f"{host} was lost"

    # ----------------------------------------------------------------- forming

    def form(self, reason: str) -> None:
        """Begins a new formation, or one more attempt at it."""
        if self._ending:
            return
        old, now = self._round, time.time()
        self._counter += 1
        ballot = (self.view.leader_revision, self._counter)
        unfinished = old is not None and not old.reported
        reasons = [*old.reasons, reason] if old and unfinished else [reason]
        detected = old.detected if old and unfinished else now
        self._round = Round(ballot=ballot, reasons=reasons, detected=detected)
        if old and unfinished:
            self._round.finished = old.finished
        if self._assignment is not None:
            self._previous, self._assignment = self._assignment, None
        self._journal.event("forming", reason=reason, ballot=ballot)
        self._coordinator.end()
        self._enter("gathering", self._config.timeouts.restore)
        for host in sorted(self._hosts):
            self._ask(host)
        self._gathered()

    def _ask(self, host: str) -> None:
        assert self._round is not None
        self._send(host, "reform", ballot=self._round.ballot)

    def _enter(self, phase: Phase, limit_s: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + limit_s

    def _gathered(self) -> None:
        """Goes on once every live host has answered."""
        round_ = self._round
        if self._phase != "gathering" or round_ is None:
            return
        if not self._expected() <= set(round_.replies):
            return
        if self._ledger is not None and self._ledger.pending is not None:
            return  # a complete step is still to be recorded; `written` calls again
        records = [
            self.view.hosts[host]
            for host in self._hosts - self._evicted
            if host in self.view.hosts
        ]
        previous = self._previous
        slots = (
            list(zip(previous.slots, previous.incarnations, strict=True))
            if previous
            else []
        )
        filled = fill_slots(slots, records, self._config.num_slots)
        present = [record for record in filled if record is not None]
        if len(present) < len(filled):
            self._wait_for_hosts(filled)
        else:
            self._assign(round_, present)

    def _expected(self) -> set[str]:
        """Hosts to hear before deciding: the connected, and soon after a takeover also
        those that are registered and may still be connecting."""
        connecting = set(self.view.hosts) - self._evicted
        connecting -= {h for h in connecting if self._incarnation(h) in self._dead}
        grace = self._took_over + self._config.timeouts.connect
        return self._hosts | (connecting if time.monotonic() < grace else set())

    def _incarnation(self, host: str) -> str:
        record = self.view.hosts.get(host)
        return record.incarnation if record else ""

    def _wait_for_hosts(self, filled: tuple[HostRecord | None, ...]) -> None:
        empty = [str(slot) for slot, record in enumerate(filled) if record is None]
        self._journal.say(
            f"no spare is left for slot {', '.join(empty)}: the job waits for a host. "
            f"Start one more agent with --job {self._config.job} "
            f"--store {self._config.store}"
        )
        self._journal.event("waiting_for_host", slots=empty)
        self._enter("waiting", float("inf"))

    def _assign(self, round_: Round, filled: list[HostRecord]) -> None:
        layout = next(
            (
                Layout.from_json(reply["layout"])
                for reply in round_.replies.values()
                if reply["layout"]
            ),
            None,
        )
        generation, attempt = next_epoch(self._previous, filled)
        hosts = tuple(record.host for record in filled)
        decision = round_.decision = decide(
            commits=self._commits,
            layout=layout,
            holdings={
                host: reply["holdings"] for host, reply in round_.replies.items()
            },
            slots=hosts,
            storage_steps=storage_steps(self._config.storage_directory),
            quarantined=self._quarantined,
        )
        first = self._previous is None
        assignment = round_.assignment = Assignment(
            generation=generation,
            attempt=attempt,
            slots=hosts,
            incarnations=tuple(record.incarnation for record in filled),
            source=decision.source,
            step=decision.step,
            rung=0 if first else decision.rung,
            reason=main_reason(round_.reasons),
        )
        if decision.rung == 3 and not first:
            for reason in decision.passed_over:
                self._journal.say(f"memory cannot restore {reason}")
            self._journal.say(
                f"rung 3: restoring step {decision.step} from "
                + (
                    f"storage, which is written every "
                    f"{self._config.storage_interval} steps"
                    if decision.source == "storage"
                    else "the initial state: storage holds no step yet"
                )
            )
        self._enter("assigning", self._config.timeouts.restore)
        change = Put(
            key=self._membership.key("m/assignment"),
            value=assignment.to_json().encode(),
        )
        view = self.view
        self._writer.write(
            "assignment",
            round_.ballot,
            lambda: self._membership.fenced(view, [change]),
        )

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
        assignment, decision = round_.assignment, round_.decision
        assert assignment is not None and decision is not None
        round_.restore_begun = time.time()
        self._enter("preparing", self._config.timeouts.start)
        records = [self.view.hosts.get(host) for host in assignment.slots]
        if any(record is None for record in records):
            self.form("a host of the new formation was lost")
            return
        addresses = [record.address for record in records if record is not None]
        everyone = {host: record.address for host, record in self.view.hosts.items()}
        located = decision.located
        layout = self._layout_json(round_)
        for slot, host in enumerate(assignment.slots):
            self._send(
                host,
                "prepare",
                ballot=ballot,
                generation=assignment.generation,
                attempt=assignment.attempt,
                slot=slot,
                coordinator=address,
                addresses=addresses,
                source=decision.source,
                step=decision.step,
                layout=layout if located else "",
                digests=dict(located.digests) if located else {},
                items=self._items(round_, decision.step) if located else {},
                transfers=transfers_to(decision.transfers, everyone, host),
            )

    @staticmethod
    def _layout_json(round_: Round) -> str:
        return next((r["layout"] for r in round_.replies.values() if r["layout"]), "")

    @staticmethod
    def _items(round_: Round, step: int) -> dict[str, Any]:
        found = (reply["items"].get(step) for reply in round_.replies.values())
        return next((items for items in found if items), {})

    # ----------------------------------------------------------------- reports

    def hears(self, host: str, message: dict[str, Any]) -> None:
        """A report of some host; those of an older ballot are refused."""
        op = message.pop("op")
        ballot = tuple(message.pop("ballot", ()) or ())
        if op == "fatal":
            self._end("error", message["message"], code=message.get("code", 2))
            return
        if op == "trainer_exit" and self._phase == "gathering":
            self._also_died(host, message["code"])
        if self._round is None or ballot != self._round.ballot:
            return
        try:
            getattr(self, f"_on_{op}")(host, **message)
        except Divergence as error:
            self._end("error", str(error))

    def _on_holdings(self, host: str, **reply: Any) -> None:
        assert self._round is not None
        self._round.replies[host] = reply
        self._gathered()

    def _on_prepare_failed(
        self, host: str, error: str, corrupt: list[str], **_: Any
    ) -> None:
        assert self._round is not None and self._round.assignment is not None
        self._journal.say(f"{host} could not restore: {error}")
        self._count_failure(self._round.assignment.step)
        self._round.replies.setdefault(host, {}).setdefault("corrupt", []).extend(
            corrupt
        )
        self.form(f"restore failed on {host}: {error}")

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
        round_, assignment = self._round, self._assignment
        if assignment is None or round_ is None:
            return
        announced = Layout.from_json(layout)
        if self._ledger is None:
            self._ledger = Ledger(
                self._config,
                announced,
                {
                    "generation": assignment.generation,
                    "attempt": assignment.attempt,
                    "hosts": assignment.slots,
                    "step": assignment.step,
                    "stored": max(
                        storage_steps(self._config.storage_directory), default=0
                    ),
                    "export_addresses": [
                        self._export_address(name) for name in assignment.slots
                    ],
                },
                self._record,
                self._send,
            )
            self._ledger.stopping = self.view.stop
        elif self._ledger.layout.digest != announced.digest:
            self._end("error", f"{host} announced another state layout than its peers")

    def _export_address(self, host: str) -> str:
        assert self._round is not None
        address = self.view.hosts[host].address.rsplit(":", 1)[0]
        outcome = self._round.prepared.get(host, {})
        return f"{address}:{outcome.get('export_port', 0)}"

    def _on_running(
        self, host: str, step: int, bytes_from_storage: int, **_: Any
    ) -> None:
        round_ = self._round
        assert round_ is not None
        round_.running.add(host)
        round_.bytes_from_storage += bytes_from_storage
        if len(round_.running) == self._config.num_slots and not round_.reported:
            self._enter("running", float("inf"))
            self._progress()
            self._report(round_, step)

    def _report(self, round_: Round, step: int) -> None:
        assignment, decision = round_.assignment, round_.decision
        assert assignment is not None and decision is not None
        round_.reported = True
        self._failures.clear()
        if assignment.rung == 0:
            self._journal.event("started", step=assignment.step)
            return
        now = time.time()
        prepared = round_.prepared.values()
        finished = [reply.get("finished", 0) for reply in round_.replies.values()]
        corrupt = [
            text for reply in round_.replies.values() for text in reply["corrupt"]
        ]
        report = RecoveryReport(
            fault=assignment.reason,
            generation=assignment.generation,
            attempt=assignment.attempt,
            rung=assignment.rung,
            source=assignment.source,
            restored_step=assignment.step,
            last_finished_step=max(finished, default=0),
            detect_s=0.0,
            restore_s=round_.restore_s,
            total_s=now - round_.detected,
            bytes_from_own_memory=sum(outcome["own"] for outcome in prepared),
            bytes_from_peers=sum(outcome["peers"] for outcome in prepared),
            bytes_from_storage=round_.bytes_from_storage,
            processes_restarted=self._config.num_slots + 1,
            corrupt_copies=tuple(sorted(set(corrupt))),
        )
        self._journal.recovery(report, round_.detected, now)

    def _on_staged(self, host: str, slot: int, step: int, digests: list[bytes]) -> None:
        self._progress()
        if self._ledger is not None:
            self._ledger.staged(slot, step, digests)

    def _on_held(self, host: str, step: int, source: int, target: int) -> None:
        if self._ledger is not None:
            self._ledger.held(step, source, target)

    def _progress(self) -> None:
        self._deadline = time.monotonic() + (
            self._config.timeouts.stage * max(1, self._config.interval)
            if self._phase == "running"
            else self._config.timeouts.start
        )

    def _also_died(self, host: str, code: int) -> None:
        """A death beside the one that began this round; the report sorts them out."""
        assert self._round is not None and self._previous is not None
        self._round.reasons.append(_death(self._previous.slots, host, code))

    def _on_trainer_exit(self, host: str, code: int) -> None:
        slots = self._assignment.slots if self._assignment else ()
        assignment = self._assignment
        if self._round is not None and assignment and not self._round.reported:
            self._count_failure(assignment.step)
            if self._failures[assignment.step] >= MAX_FAILURES:
                self._end(
                    "error",
                    f"trainers died {MAX_FAILURES} times after restoring step "
                    f"{assignment.step} without finishing a step; see "
                    f"{self._config.run_directory / 'logs'}",
                )
                return
        self.form(_death(slots, host, code))

    def _on_finished(self, host: str, slot: int, step: int, **_: Any) -> None:
        assert self._round is not None
        self._round.finished[slot] = step
        self._conclude()

    def _on_exported(self, host: str, step: int, ok: bool, error: str) -> None:
        if self._ledger is None:
            return
        outcome = self._ledger.export_answer(host, step, ok)
        if outcome is not None:
            self._journal.event("export", step=step, ok=outcome, error=error)
        if outcome is False:
            self._journal.say(f"storage: step {step} was not written ({error})")
        if outcome is not None:
            self._conclude()

    def _conclude(self) -> None:
        """Ends the job once the last step is finished, committed and in storage."""
        round_, ledger = self._round, self._ledger
        if round_ is None or len(round_.finished) < self._config.num_slots:
            return
        if ledger is None:
            return
        last = max(round_.finished.values())
        if ledger.committed < last or ledger.exporting is not None:
            return
        if ledger.exported_step == last or last in storage_steps(
            self._config.storage_directory
        ):
            self._end("stopped" if self.view.stop else "done", step=last)
        elif ledger.export_failures < MAX_FAILURES:
            ledger.export(last)
        else:
            self._end("error", f"step {last} could not be written to storage", last)

    # ------------------------------------------------------------------- store

    def _record(self, commit: Commit) -> None:
        self._commits = [commit, *self._commits][:KEPT_COMMITS]
        change = self._membership.commit_change(tuple(self._commits))
        view = self.view
        self._emit("committing", commit.step)
        self._writer.write(
            "commit", commit, lambda: self._membership.fenced(view, [change])
        )

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
            if self._ledger.pending is None:
                self._gathered()
            self._conclude()

    def delayed(self, label: str, value: Any) -> None:
        """The store does not answer."""
        if not self._store_away:
            self._store_away = True
            self._journal.say(
                f"the store {self._config.store} does not answer; training goes on, the "
                f"{label} waits (last commit: step {self._journal.last_commit})"
            )
        if label == "commit" and self._ledger is not None:
            self._ledger.delayed(value)

    # --------------------------------------------------------------------- end

    def stop(self) -> None:
        """Stops the job at a step boundary that all trainers will agree on."""
        if self._phase in ("idle", "waiting"):
            self._end("stopped")
        elif self._ledger is not None:
            self._ledger.stopping = True

    def _end(
        self, status: str, message: str = "", step: int = 0, code: int = 0
    ) -> None:
        if self._ending:
            return
        self._ending = True
        step = step or (self._ledger.committed if self._ledger else 0)
        text = result_json(status, step, message, code or int(status == "error"))
        change = Put(key=self._membership.key("m/result"), value=text.encode())
        view = self.view
        self._journal.event("end", status=status, step=step, message=message)
        self._writer.write(
            "result", text, lambda: self._membership.fenced(view, [change])
        )

    def tick(self) -> None:
        """Enforces the deadlines; every one names who is late."""
        self._gathered()
        if time.monotonic() < self._deadline or self._phase in ("idle", "waiting"):
            return
        round_ = self._round
        if round_ is None or self._ending:
            return
        if self._phase == "gathering":
            for host in sorted(self._hosts - set(round_.replies)):
                self._evicted.add(host)
                self.lost(host, "it did not answer in time")
        elif self._phase == "preparing":
            slots = self._assignment.slots if self._assignment else ()
            late = sorted(set(slots) - round_.running)
            self.form(f"{', '.join(late)} did not start training in time")
        elif self._phase == "running":
            assert self._ledger is not None
            self.form(f"no step was finished in time: {self._ledger.waiting_for()}")
        elif self._phase == "assigning":
            self.form("the new assignment could not be recorded in time")

    def close(self) -> None:
        """Hands over to whoever leads next."""
        self._writer.close()
        self._coordinator.close()


def _death(slots: Sequence[str], host: str, code: int) -> str:
    slot = slots.index(host) if host in slots else "?"
    how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"trainer of slot {slot} on {host} {how}"


def main_reason(reasons: Sequence[str]) -> str:
    """What really happened, without what followed from it.

    A lost host breaks the collectives of all others, whose trainers then end; a killed
    trainer does the same to its peers.

    >>> main_reason(["trainer of slot 0 on a ended with code 1", "b (slot 1) was lost"])
    'b (slot 1) was lost'
    """
    for mark in ("was lost", "by signal 9", "by signal"):
        causes = [reason for reason in reasons if mark in reason]
        if causes:
            return "; ".join(dict.fromkeys(causes))
    return "; ".join(dict.fromkeys(reasons))
