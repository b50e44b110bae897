"""The leading agent: handles the reports of hosts and the changes of the store.

Runs on the agent's event loop, only while this host leads (`leadership`). Dispatches
events to its parts: `HostMonitor` tracks hosts, `Rendezvous` forms the job in rounds
(attempts), `CommitCoordinator` commits and exports steps, `StorageExports` tracks
storage, `Scaling` changes the number of replicas, `ReReplicator` renews lost copies,
`Shutdown` ends the job, `Records` writes to the store, and `Requests` serves the user's
own processes. The config's `SeatPolicy` has the differences between agent-started and
user-started trainers. The next leader learns the job's state from the store and from
the hosts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtft.checkpoint.replication import Commit, Divergence, Mislabelled
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.event_loop import Loop
from dtft.elastic.hang_detection import JobProgress, verdict
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.draining import Draining
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.export_requests import Answer, StorageExports
from dtft.elastic.leader.failure_budget import Failure, Kind, RetryDecision
from dtft.elastic.leader.host_registry import NOBODY_S, HostMonitor, HostRegistry
from dtft.elastic.leader.re_replication import ReReplicator
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import Round, RoundReason, death, report_of
from dtft.elastic.leader.scaling import Scaling
from dtft.elastic.leader.served_requests import Requests
from dtft.elastic.leader.shutdown import Shutdown
from dtft.elastic.leader.sizes import JobSizes
from dtft.elastic.leader.storage import is_corrupt
from dtft.elastic.messages import fault_of_report, known_layout, misfit, report_fields
from dtft.elastic.store import Membership, View

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks for stuck trainers."""
CAUSE_S = 0.5
"""Seconds for which a broken collective does not form the job anew, if one host runs
the coordination service for all trainers. Meanwhile the end of the process that broke
it is usually reported."""
FATAL_INPUT = 2
"""Exit code of a job that ends because of its input, such as its config, rather than
because of a failure in training."""
UNHURRIED = ("evaluate", "compile")
"""Trainer phases whose own limits may be above `Timeouts.stage`. A report of such a
phase restarts the deadline for the next snapshot."""


class Leader:
    """Handles the events of the leading agent; see the module's docstring.

    Events are hosts' reports, hosts that join or leave, and changes of the store.
    """

    def __init__(
        self,
        config: AgentConfig,
        membership: Membership,
        view: View,
        commits: Sequence[Commit],
        loop: Loop,
        send: Callable[..., None],
        journal: Journal,
        list_steps: Callable[[Path], Iterable[int]],
        *,
        committing: Callable[[int], None],
        ended: Callable[[str], None],
        resign: Callable[[], None],
    ) -> None:
        """Takes over the job.

        Args:
            config: the settings of this host's agent.
            membership: writes to the store while this host holds the leader key.
            view: the job's records in the store when this host began to lead.
            commits: the commits recorded at that time, newest first.
            loop: the agent's event loop.
            send: `send(host, op, **fields)` sends an order to a connected host.
            journal: prints messages and writes the event log.
            list_steps: lists the steps that a storage directory holds.
            committing: called with the step of a commit that is being written, and with
                0 once the commit is recorded.
            ended: called with the job's result, as JSON, if the store has not recorded
                the result in time.
            resign: lets another host lead, because this host is to leave the job.
        """
        self._config, self._journal, self._loop = config, journal, loop
        self._committing, self._ended, self._send = committing, ended, send
        self._resign = resign
        self._seats = config.seats
        self._records = Records(
            *(membership, view, commits, loop, journal, config.store),
            on_written=self._written,
            on_delayed=self._delayed,
            on_committing=committing,
        )
        old = view.assignment
        former = zip(old.slots, old.incarnations, strict=True) if old else ()
        self._registry = HostRegistry(loop.now(), config.timeouts.connect, dict(former))
        self._storage = storage = StorageExports(
            config, self._records, journal, loop, list_steps
        )
        self._sizes = sizes = JobSizes(config, self._records, journal)
        self._rendezvous = Rendezvous(
            *(config, self._records, self._registry, loop, send, journal),
            *(storage.health, storage.watch, sizes),
        )
        shared = config, self._records, self._rendezvous, self._registry
        self._monitor = HostMonitor(*shared, loop, journal)
        self._scaling = Scaling(*shared[:3], sizes, loop, journal)
        self._draining = Draining(
            *(config, self._rendezvous, self._registry, sizes, loop, send, journal)
        )
        self._shutdown = Shutdown(*shared, loop, journal, storage.watch)
        self._re_replicator = ReReplicator(journal, send, loop.now)
        self._requests = (
            Requests(
                config, self._records, self._rendezvous, self._registry, storage, send
            )
            if self._seats.attached
            else None
        )
        self._newest_failure = RoundReason("")
        self._postponed: tuple[float, Round, RoundReason] | None = None
        """When the job is formed anew because of a broken collective, the round in
        which it broke, and the reason; None if no collective has broken. Void if
        another round has begun."""
        self._looked_at = 0.0
        self._nobody_since: float | None = None
        """Time since which the job cannot begin (`_end_if_nobody_can`); None while the
        job can begin."""
        self._error_code = 1
        """Exit code of the job if it ends because a failure would repeat."""
        self._progress: dict[str, tuple[float, JobProgress]] = {}
        """Host to (arrival time, content) of its trainer's newest progress report."""
        self._rendezvous.give_up = self._give_up
        self._handlers = self._handlers_of_reports()
        self._monitor.take_over()

    @property
    def view(self) -> View:
        """The newest view of the store: the job's records in it at one moment."""
        return self._records.view

    @property
    def num_slots(self) -> int:
        """The number of slots of the current assignment of hosts to slots.

        Without an assignment: the number in the config.
        """
        assignment = self._rendezvous.assignment
        return len(assignment.slots) if assignment else self._config.num_slots

    # -------------------------------------------------------------- membership

    def see(self, view: View) -> None:
        """Handles a new view of the store (the job's records in it at one moment)."""
        self._monitor.see(view)

    def connected(self, record: HostRecord) -> None:
        """Handles a host that has connected, or a newer record of a connected host.

        Also lets the host leave the job if its record says so (`HostRecord.leaving`).
        """
        self._monitor.connected(record)
        self._draining.connected(record)
        if record.leaving:
            self._draining.leaves(record.host)

    def disconnected(self, record: HostRecord, why: str) -> None:
        """Handles the end of a host's link.

        If the link ended because the host was silent, the host is lost at once.
        Otherwise the host may reconnect within one lease.

        Args:
            record: the record of the host.
            why: why the link ended; begins with "silent" if the host was silent.
        """
        self._monitor.disconnected(record, why)

    def lost(self, host: str, how: str) -> None:
        """Handles the loss of a host whose port refuses connections.

        Args:
            host: the lost host.
            how: how the loss was noticed, for people.
        """
        self._monitor.lost(host, how)

    def agent_ended(self, record: HostRecord) -> None:
        """Handles the end of an agent that is not connected to this leader.

        The leader then no longer waits for the report of the copies on the agent's
        host.
        """
        self._monitor.agent_ended(record)

    # ----------------------------------------------------------------- reports

    def _handlers_of_reports(self) -> dict[str, Callable[..., None]]:
        """Maps the op (kind) of a report to its handler.

        A handler takes the host and, as keyword arguments, the report's fields.
        """
        handlers = {
            "holdings": self._on_holdings,
            "reached": self._rendezvous.reached,
            "joined": self._on_joined,
            "rehearsed": self._rendezvous.rehearsed,
            "serving": self._rendezvous.serving,
            "keys": self._rendezvous.keys,
            "prepared": self._on_prepared,
            "prepare_failed": self._on_prepare_failed,
            "layout": self._on_layout,
            "running": self._on_running,
            "staged": self._on_staged,
            "held": self._on_held,
            "finished": self._on_finished,
            "trainer_exit": self._on_trainer_exit,
            "failed": self._on_failed,
            "progress": self._on_progress,
            "exported": self._on_exported,
        }
        if self._requests is not None:
            handlers["process_gone"] = self._on_process_gone
            handlers["flush"] = self._requests.flush
            handlers["wanted"] = self._requests.wanted
        return handlers

    def handle_report(self, host: str, message: dict[str, Any]) -> None:
        """Handles a host's report; logs and drops a malformed report.

        A report names the round in which it was made (an attempt to form the job) by
        its ballot, (leader's term, counter). A report of an earlier round is dropped,
        except these:

        * `fit`, `unfit`, and a `fatal` without a ballot are handled in any round.
        * A trainer's failure is added to the reasons for the new round, while that
          round gathers the hosts' reports of their copies.
        """
        if self._refused(host, fault_of_report(message, self._seats.reports)):
            return
        op = message["op"]
        ballot = tuple(message.get("ballot", ()))
        round_, previous = self._rendezvous.current, self._rendezvous.previous
        if op == "unfit":
            self._monitor.unfit(host, message["why"], message.get("layout", ""))
        elif op == "fit":
            self._monitor.fit(host)
        elif op == "fatal":
            if round_ is None or ballot in ((), round_.ballot):
                self._fail(_with_evidence(message), message.get("code", FATAL_INPUT))
        elif round_ is not None and ballot == round_.ballot:
            slots = _slots_of(round_.assignment)
            coordinator = self._rendezvous.coordinator
            layout = coordinator.layout if coordinator is not None else None
            if self._refused(host, misfit(host, message, slots, layout)):
                return
            try:
                fields = report_fields(message, self._seats.reports)
                self._handlers[op](host, **fields)
            except Divergence as error:
                self._fail(str(error))
            except Mislabelled as error:
                self._refuse_copy(str(error))
            except Exception:  # an error in a handler must not end the leader
                logger.exception(
                    "host %s sent a report (op %s) whose handler stopped with an error",
                    host,
                    op,
                )
        elif self._rendezvous.phase == "gathering":
            assert round_ is not None
            slots = _slots_of(previous)
            if op == "trainer_exit":  # one more cause of the round that has begun
                self._fails("exit", host, code=message["code"])
                round_.reasons.append(death(slots, host, message["code"]))
            elif op == "failed":
                told = report_fields(message, self._seats.reports)
                told.pop("slot")
                self._fails("exception", host, **told)
                round_.reasons.append(self._newest_failure)

    def _fail(self, message: str, code: int = 1) -> None:
        """Ends the job after a failure that would repeat, except in two cases.

        The newest commit is exported first if storage lacks it. The job does not end in
        these cases:

        * The config or other input is to blame (`code` is 2), and the job has another
          number of slots than the newest commit. Then this number is excluded, and the
          job is formed anew with another one.
        * The job is served (the user starts its processes). Then the processes get the
          message and are detached; the agents continue and keep the newest commit.

        Args:
            message: the reason, for people.
            code: exit code of the agents; 2 (`FATAL_INPUT`) if the config or other
                input is to blame.
        """
        if not self._seats.ends_by_itself:
            self._journal.say(message)
            self._rendezvous.form(message, fatal=True)
        elif code == FATAL_INPUT and self._scaling.undone(message):
            return
        elif self._records.last_step > self._storage.watch.newest:
            self._error_code = code
            self._rendezvous.end(RetryDecision(action="end", message=message))
        else:
            self._shutdown.end("error", message, code=code)

    def _give_up(self, decision: RetryDecision) -> None:
        """Ends the job with an error; the decision's message is the error's text."""
        self._shutdown.fail(decision.message, self._error_code)

    def _on_progress(self, host: str, slot: int, **told: Any) -> None:
        """Records a trainer's progress report; restarts a deadline in two cases.

        * All slots train, and this trainer evaluates or compiles: the deadline for the
          next snapshot starts anew, because the trainer takes no snapshot meanwhile.
        * Not all slots train yet, and this trainer evaluates: the deadline for the
          start starts anew. A job that is formed anew after its last step evaluates
          before its trainers report that they train. Each batch of the evaluation has a
          limit of its own.

        `told` has the fields of `JobProgress`, such as the phase and its seconds.
        """
        self._progress[host] = self._loop.now(), JobProgress(**told)
        rendezvous = self._rendezvous
        if told["phase"] in UNHURRIED and rendezvous.phase == "running":
            rendezvous.enter("running", self._stage_limit())
        elif told["phase"] == "evaluate" and rendezvous.phase == "preparing":
            rendezvous.enter("preparing", self._config.timeouts.start)

    def _look_for_stuck(self) -> None:
        """Re-forms the job if a trainer is stuck; looks at most once per second.

        A trainer is stuck if its phase exceeds its limit, by the trainers' progress
        reports (`hang_detection`). Does nothing in a served job (whose processes the
        user starts), or while the trainers neither start nor train.
        """
        rendezvous = self._rendezvous
        now = self._loop.now()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        watched = rendezvous.phase == "running" or rendezvous.phase == "preparing"
        if (
            not watched
            or rendezvous.assignment is None
            or not self._seats.ends_by_itself
        ):
            self._progress.clear()
            return
        found = verdict(self._progress, rendezvous.slot_of, now)
        if found is None:
            return
        self._journal.say(found.text)
        self._progress.clear()
        for host in found.hosts:
            self._fails("stuck", host, error=found.text)
        rendezvous.form(RoundReason(found.text, hosts=found.hosts))

    def _refuse_copy(self, why: str) -> None:
        """Re-forms the job because a copy is wrong; all hosts read their copies again.

        `why` is the reason, for people. It names the copy, which has the bytes of
        another step or is corrupt.
        """
        self._journal.say(why)
        self._rendezvous.failures.add(Failure(kind="copy", error=why))
        self._rendezvous.form(why, read=True)

    def _refused(self, host: str, reason: str | None) -> bool:
        if reason is not None:
            logger.warning("an invalid report of host %s is dropped: %s", host, reason)
        return reason is not None

    def _on_holdings(self, host: str, **reply: Any) -> None:
        assert self._rendezvous.current is not None
        self._registry.answered(host)
        self._rendezvous.current.reply(host, reply)
        self._rendezvous.answered()

    def _on_joined(self, host: str, world: int) -> None:
        self._journal.event("spare_joined", host=host, world=world)
        self._rendezvous.joined(host)

    def _on_prepare_failed(
        self, host: str, error: str, corrupt: list[str], **_
    ) -> None:
        round_ = self._rendezvous.current
        assert round_ is not None and round_.assignment is not None
        self._journal.say(f"{host} could not restore: {error}")
        round_.corrupt.extend(corrupt)
        self._fails("restore", host, error=f"restore failed on {host}: {error}")
        text = f"restore failed on {host}: {error}"
        self._rendezvous.form(RoundReason(text, hosts=(host,)))

    def _on_prepared(self, host: str, **outcome: Any) -> None:
        round_ = self._rendezvous.current
        assert round_ is not None and round_.assignment is not None
        round_.prepared[host] = outcome
        if len(round_.prepared) == len(round_.assignment.slots):
            round_.restore_s = self._loop.wall() - round_.restore_begun
            if self._scaling.restored(round_):
                known = {**self.view.hosts, **self._registry.records}
                now = replace(self.view, hosts=known, assignment=round_.assignment)
                self._re_replicator.begin(round_, now)

    def _on_layout(self, host: str, layout: str) -> None:
        announced = known_layout(layout)
        self._rendezvous.announced(host)
        coordinator, assignment = (
            self._rendezvous.coordinator,
            self._rendezvous.assignment,
        )
        if coordinator is None and assignment is not None:
            self._rendezvous.open_coordinator(announced, assignment)
        elif coordinator and coordinator.layout.digest != announced.digest:
            self._fail(f"{host} announced another state layout than its peers")

    def _on_running(
        self,
        host: str,
        bytes_from_storage: int,
        items: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        round_ = self._rendezvous.current
        assert round_ is not None and round_.assignment is not None
        round_.running.add(host)
        round_.bytes_from_storage += bytes_from_storage
        round_.planned = items or {}
        slots = len(round_.assignment.slots)
        if len(round_.running) < slots or round_.reported:
            return
        self._rendezvous.enter("running", self._stage_limit())
        round_.reported = True
        self._rendezvous.trained()
        self._report_start(round_, round_.assignment)

    def _report_start(self, round_: Round, assignment: SlotAssignment) -> None:
        """Handles the moment at which every slot trains: logs it.

        After a recovery, prints the times and bytes that it took (`RecoveryReport`),
        answers the requests to scale, and adds these values to the later replies about
        drained hosts. At the start of a job, prints a warning if the job cannot shrink
        to `--min-replicas`.
        """
        if assignment.rung is None:
            self._journal.event("started", step=assignment.step)
            if self._rendezvous.coordinator is not None:
                self._sizes.forewarn(self._rendezvous.coordinator.layout)
        else:
            now = self._loop.wall()
            report = report_of(
                round_,
                self._rendezvous.previous,
                now,
                world=self._rendezvous.world,
            )
            self._journal.recovery(report, round_.detected, now)
            if self._rendezvous.coordinator is not None:
                self._scaling.trained(report)
            self._draining.trained(report)

    def _stage_limit(self) -> float:
        coordinator = self._rendezvous.coordinator
        steps = (
            coordinator.intervals.reach if coordinator else self._config.cadence.period
        )
        return self._config.timeouts.stage * steps

    def _on_staged(self, host: str, **staged: Any) -> None:
        if self._rendezvous.phase == "running":
            self._rendezvous.enter("running", self._stage_limit())
        if self._rendezvous.coordinator is not None:
            self._rendezvous.coordinator.staged(**staged)
        if self._requests is not None:
            told = {name: staged[name] for name in ("slot", "step", "digests")}
            self._requests.staged(**told)

    def _on_held(self, host: str, **copy: Any) -> None:
        self._re_replicator.held(self._rendezvous.current, **copy)
        if self._rendezvous.coordinator is not None:
            self._rendezvous.coordinator.held(**copy)

    def _on_trainer_exit(self, host: str, code: int) -> None:
        self._fails("exit", host, code=code, log=self._log_of(host))
        self._rendezvous.form(death(self._rendezvous.slot_of, host, code))

    def _on_failed(
        self, host: str, slot: int, step: int, error: str, **evidence: Any
    ) -> None:
        """Handles the report that an exception ended a host's trainer.

        Args:
            host: the trainer's host.
            slot: the host's slot.
            step: the trainer's step when the exception was raised.
            error: "TypeName: message" of the exception.
            evidence: the trainer's phase, the traceback and the path of the log.
        """
        failure = self._fails("exception", host, step=step, error=error, **evidence)
        reason, round_ = self._newest_failure, self._rendezvous.current
        is_shared = self._config.hot_swap and bool(self._rendezvous.world.server)
        if failure.is_consequence and is_shared:
            # A round that names only this host would declare its process lost, not the
            # one that has ended, and all would have to start anew.
            assert round_ is not None
            if self._postponed is None or self._postponed[1] is not round_:
                self._postponed = self._loop.now() + CAUSE_S, round_, reason
            return
        self._rendezvous.form(reason)

    def _form_postponed(self) -> None:
        """Forms the job anew if a collective broke and no cause was reported in time.

        Does nothing if another round has begun since.
        """
        if self._postponed is None or self._loop.now() < self._postponed[0]:
            return
        _, round_, reason = self._postponed
        self._postponed = None
        if self._rendezvous.current is round_:
            self._rendezvous.form(reason)

    def _log_of(self, host: str) -> str:
        return str(self._config.run_directory / "logs" / f"{host}.trainer.log")

    def _fails(self, kind: Kind, host: str, **told: Any) -> Failure:
        """Records a host's failure, which the caller may give as reason of a new round.

        A round is an attempt to form the job. The recorded failures decide later
        whether the job tries to train again.

        Args:
            kind: the kind of failure, such as "exception" or "exit".
            host: the host.
            told: further fields of `Failure`, such as the step or the exit code.

        Returns:
            The failure.
        """
        rendezvous = self._rendezvous
        assignment = rendezvous.assignment or rendezvous.previous
        slot = _slots_of(assignment).get(host, -1)
        step = told.pop("step", assignment.step if assignment is not None else 0)
        failure = Failure(kind=kind, host=host, slot=slot, step=step, **told)
        rendezvous.failures.add(failure)
        self._newest_failure = RoundReason(failure.text(), hosts=(host,))
        return failure

    def _on_process_gone(self, host: str) -> None:
        slot = self._rendezvous.slot_of.get(host, "?")
        self._rendezvous.form(f"process {slot} on {host} has gone")

    def _on_finished(self, host: str, slot: int, step: int, **_: Any) -> None:
        round_ = self._rendezvous.current
        assert round_ is not None
        round_.finished[slot] = step
        if not self._seats.ends_by_itself:
            if len(round_.finished) == self._config.num_slots:
                self._rendezvous.form("every process has ended")
            return
        if self._rendezvous.phase == "running":
            self._rendezvous.enter("running", self._config.timeouts.export)
        self._shutdown.conclude()

    def _on_exported(
        self, host: str, step: int, ok: bool, error: str, attempt: int | None = None
    ) -> None:
        """Handles a host's answer to the order to export a step.

        If the last step of the job is corrupt in the memory of the exporting host, or
        of a peer that lends it slices, re-forms the job: that host then restores the
        step from another copy. For an earlier step it does not: the next snapshot is a
        new copy.
        """
        coordinator = self._rendezvous.coordinator
        outcome = coordinator and coordinator.export_answer(host, step, ok, attempt)
        if outcome is None:
            return
        self._storage.ended(host, step, outcome, error)
        if is_corrupt(error) and self._shutdown.awaits(step):
            self._refuse_copy(f"{host} cannot export the last step: {error}")
        self._shutdown.exported()
        if self._requests is not None:
            self._requests.exported(host, step, outcome, error)

    def export_wanted(self, answer: Answer) -> None:
        """Handles a request for an export; `answer` sends the reply to the requester.

        A served job (whose processes the user starts) exports its newest commit. A
        launched job (whose agents start the trainers) exports its next commit.
        """
        if self._requests is not None:
            self._requests.export_wanted(answer)
        else:
            self._storage.asked(self._rendezvous, answer)

    def scaling_wanted(self, replicas: int, answer: Answer) -> None:
        """Handles a request for another number of replicas.

        Refuses the request in a served job (whose processes the user starts). `answer`
        sends the reply to the requester.
        """
        if not self._refuses_change(answer):
            self._scaling.asked(replicas, answer)

    def draining_wanted(self, host: str, answer: Answer) -> None:
        """Handles a request that a host leaves the job.

        Refuses the request in a served job (whose processes the user starts). `answer`
        sends the reply to the requester.
        """
        if not self._refuses_change(answer):
            self._draining.asked(host, answer)

    def _refuses_change(self, answer: Answer) -> bool:
        if (refusal := self._seats.change_refusal) is not None:
            answer({"error": refusal(self._config.job), "code": 2})
        return refusal is not None

    # --------------------------------------------------------------- the store

    def _written(self, label: str, value: Any) -> None:
        """Handles a write that the store has recorded.

        Args:
            label: the kind of the write, such as "commit"; all but commits and
                assignments are ignored.
            value: the commit; for an assignment, the ballot, which identifies the
                attempt to form the job.
        """
        if label == "assignment":
            self._rendezvous.assigned(value)
        elif label == "commit" and self._rendezvous.coordinator is not None:
            self._recorded(value, self._rendezvous.coordinator)
            if self._requests is not None:
                self._requests.committed(value)

    def _recorded(self, commit: Commit, coordinator: CommitCoordinator) -> None:
        """Handles a commit that the store has recorded: lets the trainers go on.

        Re-forms the job instead if its size is to change, or if a host with a slot or
        the leader is to leave the job.
        """
        self._rendezvous.committed(commit)
        self._committing(0)
        self._journal.committed(commit.step, commit.root)
        self._re_replicator.committed(self._rendezvous.current, commit.step)
        resize = self._scaling.due()
        if whys := [resize] if resize else self._draining.due():
            coordinator.recorded(commit)
            self._rendezvous.form(*whys)
            if self._draining.leads:
                self._loop.post(self._resign)
            return
        coordinator.written(commit)
        self._draining.committed()
        if line := coordinator.intervals.news():
            self._journal.say(line)
        self._storage.committed(coordinator, commit.step)
        self._rendezvous.gathered()
        self._shutdown.conclude()

    def _delayed(self, label: str, value: Any) -> None:
        """Handles a write that the store has not recorded in time.

        After a delayed commit the trainers go on. A delayed assignment is reported to
        people, and training waits.

        Args:
            label: the kind of the write: "commit" or "assignment".
            value: the commit; for an assignment, the ballot, which identifies the
                attempt to form the job.
        """
        if label == "commit" and self._rendezvous.coordinator is not None:
            self._rendezvous.coordinator.delayed(value)
            self._shutdown.conclude()
        elif label == "assignment":
            self._rendezvous.delayed(value)

    def tick(self) -> None:
        """Checks deadlines and whether the job is over; called periodically.

        The deadlines are those of hosts, of an export, and of the event that the job
        waits for, such as the next snapshot. Begins to stop the job if a stop was
        requested, and ends the job once every slot has finished and storage has the
        last step.
        """
        rendezvous = self._rendezvous
        self._monitor.tick()
        self._form_postponed()
        if self._requests is not None:
            self._await_save()
            self._requests.tick()
        rendezvous.gathered()
        if self.view.stop:
            self._shutdown.stop()
        else:
            self._draining.tick()
        self._end_if_nobody_can()
        self._shutdown.conclude()
        self._shutdown.conclude_for_others()
        self._look_for_stuck()
        rendezvous.look_for_links()
        if rendezvous.coordinator and (
            silent := rendezvous.coordinator.silent_export()
        ):
            self._on_exported(silent[1], silent[0], False, "TimeoutError: no answer")
        if rendezvous.phase == "running" and self._shutdown.is_storing:
            rendezvous.enter("running", self._config.timeouts.export)
        round_ = rendezvous.current
        if rendezvous.frozen:
            self._end_without_store()
        if (
            round_ is None
            or rendezvous.frozen
            or self._loop.now() < rendezvous.deadline
        ):
            return
        if rendezvous.phase == "gathering":
            self._monitor.leave_out(round_.replies)
        elif rendezvous.phase == "storage":
            rendezvous.look_again()
        elif rendezvous.phase == "pausing":
            rendezvous.go_on()
        elif rendezvous.phase == "preparing":
            late = set(rendezvous.assignment.slots if rendezvous.assignment else ())
            names = ", ".join(sorted(late - round_.running))
            self._scaling.late(f"{names} did not start training in time")
        elif rendezvous.phase == "running":
            late = (
                rendezvous.coordinator.waiting_for()
                if rendezvous.coordinator
                else "the layout"
            )
            why = f"no step in time, waiting for {late}"
            rendezvous.failures.add(Failure(kind="stuck", error=why))
            rendezvous.form(why)
        elif rendezvous.phase == "assigning":
            rendezvous.form("the new assignment could not be recorded in time")

    def _end_if_nobody_can(self) -> None:
        """Ends a job that cannot begin, because no registered host can have a slot.

        Waits 2 s first (`NOBODY_S`): other hosts may be connecting, and a leader that
        was suspended learns meanwhile that another host has led. Does not end a job
        with a commit. Does not end the job while the store lists a host that has not
        reported that it can have no slot: this leader may be cut off from that host.
        """
        others = self.view.hosts.keys() - self._registry.unfit.keys()
        known = bool(self._records.commits) or bool(others)
        why = "" if known else self._registry.why_nobody()
        if not why or self._rendezvous.frozen:
            self._nobody_since = None
        elif self._nobody_since is None:
            self._nobody_since = self._loop.now()
        elif self._loop.now() >= self._nobody_since + NOBODY_S:
            self._nobody_since = None
            self._fail(f"no host can have a slot: {why}", FATAL_INPUT)

    def _end_without_store(self) -> None:
        """Ends this agent if the store has not recorded the job's result in time.

        First sends the result to the other hosts.
        """
        result = self._shutdown.result_without_store()
        if result:
            for host in self._registry.connected - {self._config.host}:
                self._send(host, "ended", result=result)
            self._ended(result)

    def _await_save(self) -> None:
        """Restarts the deadline for the next snapshot while no save is in progress.

        Used in a served job: the user's processes decide when to save, so the deadline
        must not pass before they begin a save.
        """
        coordinator = self._rendezvous.coordinator
        if self._rendezvous.phase == "running" and not (
            coordinator and coordinator.is_waiting
        ):
            self._rendezvous.enter("running", self._stage_limit())

    def close(self, flush_s: float = 0.0) -> None:
        """Ends this host's time as leader.

        Replies to waiting requesters that they must ask the next leader. Waits at most
        `flush_s` seconds until the event log is written.
        """
        self._storage.close()
        self._scaling.close()
        self._draining.close()
        self._records.close()
        self._journal.close(flush_s)


def _slots_of(assignment: SlotAssignment | None) -> Mapping[str, int]:
    """Returns the slot of each host in an assignment; {} without an assignment."""
    return assignment.slot_of if assignment is not None else {}


def _with_evidence(message: Mapping[str, Any]) -> str:
    """Returns the text of a `fatal` report, with its traceback and the path of its log.

    A `fatal` report tells of an error that would repeat if the job went on. It may lack
    the traceback and the log.
    """
    told = [message["message"], message.get("traceback", "").rstrip()]
    if message.get("log"):
        told.append(f"log: {message['log']}")
    return "\n".join(text for text in told if text)
