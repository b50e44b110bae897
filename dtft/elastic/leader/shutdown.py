"""Ends a job as done, stopped or failed.

First the last committed step is exported, unless storage has the step. If hosts are
missing and the remaining hosts cannot export the step, the job ends with the newest
step in storage. `Shutdown` reads the state of `rendezvous` (which forms the job) and of
the commit coordinator, and writes the job's result to the store. A lease lasts
`timeouts.lease` seconds.
"""

import dataclasses
import json

from dtft.checkpoint.replication import Spread
from dtft.checkpoint.state import Layout
from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.host_registry import HostRegistry
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.storage import StorageWatch

EXPORT_FAILURES = 3
"""Number of failed exports of the last step after which the job ends with an error."""


RESULT_LEASES = 2
"""Duration, in leases, for which the result of an ended job waits for a store that does
not answer."""
RESULT_LEASES_LOST = 12
"""Duration, in leases, for which the result waits for the store while a host is lost. A
lost host may come back after all other hosts have left; without a result in the store
it would wait for these hosts for ever."""


class Shutdown:
    """Ends one job as done, stopped or failed. Runs on the leader's event loop."""

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        loop: Loop,
        journal: Journal,
        storage: StorageWatch,
    ) -> None:
        """Starts without ending the job."""
        self._config, self._records, self._rendezvous = config, records, rendezvous
        self._registry, self._journal, self._storage = registry, journal, storage
        self._loop, self._rescuing = loop, False
        self._error: tuple[str, int] | None = None
        """Message and exit code of a job that ends with an error."""
        self._finished_at = self._ended_at = 0.0
        self._result = ""

    def stop(self) -> None:
        """Stops the job; all running trainers end after the same step.

        If the job waits for hosts or for storage, or has not begun, it ends once the
        connected hosts have exported the newest commit. It ends at once if they cannot,
        or if storage has this commit. If the job is otherwise being formed, it ends at
        once if storage has the newest commit; if not, it first starts the trainers.
        """
        if self._rendezvous.phase in ("idle", "waiting", "storage"):
            self._stop_with_hosts_missing()
        elif (
            self._rendezvous.phase != "running"
            and self._records.last_step <= self._storage.newest
        ):
            self._end_with_what_is_stored()
        elif self._rendezvous.coordinator is not None:
            self._rendezvous.coordinator.stopping = True

    def fail(self, message: str, code: int = 1) -> None:
        """Ends the job with an error; exports the newest commit first if possible.

        An export is possible if the connected hosts hold all slices of the commit.
        Nothing is exported if storage has the commit already.

        Args:
            message: the error, for people.
            code: exit code of every agent.
        """
        self._error = message, code
        self._stop_with_hosts_missing()

    def _stop_with_hosts_missing(self) -> None:
        """Exports the last commit if the remaining hosts hold it; then ends the job.

        The job ends when the export has ended, also if it failed. It ends at once if
        storage has the step or the hosts cannot export it. A second call does nothing.
        """
        if self._rescuing:
            return
        self._rescuing, rendezvous = True, self._rendezvous
        round_, previous = rendezvous.current, rendezvous.previous
        layout = round_.layout_of(self._records.commits) if round_ else None
        if rendezvous.coordinator is None and previous and layout:
            rendezvous.open_coordinator(layout, self._as_committed(previous, layout))
        last, coordinator = self._records.last_step, rendezvous.coordinator
        alive = self._registry.connected
        replies = round_.replies if round_ is not None else {}
        held = {host: told["holdings"].get(last, {}) for host, told in replies.items()}
        if (
            coordinator is None
            or last <= self._storage.newest
            or not coordinator.export_from(last, alive, held)
        ):
            self._end_with_what_is_stored()

    def _as_committed(self, previous: SlotAssignment, layout: Layout) -> SlotAssignment:
        """Returns an assignment of hosts to slots that fits the newest commit's mesh.

        This is `previous`, the last assignment, if it has as many slots as `layout`,
        which has the commit's mesh. Otherwise the number of slots has changed since the
        commit, and the result has the hosts that the commit names, in slot order.
        """
        if len(previous.slots) == layout.mesh.num_slots:
            return previous
        holders = self._records.commits[0].holders if self._records.commits else ()
        spread = Spread(copies=previous.spread.copies)
        return dataclasses.replace(previous, slots=holders, spread=spread)

    def _end_with_what_is_stored(self) -> None:
        stored = self._storage.newest
        lost = self._records.last_step - stored
        if lost > 0:
            self._journal.say(
                f"the job ends, and its last commit was not exported: the newest step "
                f"in storage is {stored}; the {lost} steps after it are lost"
            )
        if self._error is None:
            self.end("stopped", step=stored)
        else:
            message, code = self._error
            self.end("error", message, step=stored, code=code)

    def exported(self) -> None:
        """Handles the end of an export: ends the job if the job waits for it."""
        if self._rescuing:
            self._end_with_what_is_stored()
        self.conclude()

    def conclude(self) -> None:
        """Ends the job once every slot has finished and storage has the last step.

        If storage lacks that step, orders its export once the step is committed. After
        3 failed exports of the step (`EXPORT_FAILURES`), the job ends with an error.
        """
        last, coordinator = self._last_finished, self._rendezvous.coordinator
        if last is None or self._rendezvous.frozen:
            return
        self._finished_at = self._finished_at or self._loop.now()
        if coordinator is None or coordinator.exporting is not None:
            return
        if coordinator.committed < last and not self._stands_uncommitted(
            coordinator, last
        ):
            return
        if last in self._storage.steps:
            self.end("stopped" if self._records.view.stop else "done", step=last)
        elif coordinator.export_failures(last) < EXPORT_FAILURES:
            if coordinator.may_export:
                coordinator.export(last)
        else:
            self.end("error", f"step {last} could not be written to storage", last)

    @property
    def _last_finished(self) -> int | None:
        """The last step of the trainers; None before every slot has finished."""
        round_ = self._rendezvous.current
        if round_ is None or round_.assignment is None:
            return None
        if len(round_.finished) < len(round_.assignment.slots):
            return None
        return max(round_.finished.values())

    def awaits(self, step: int) -> bool:
        """Whether every slot has finished, and the job ends once storage has `step`.

        False if hosts were missing when the job began to end.
        """
        return not self._rescuing and self._last_finished == step

    @property
    def is_storing(self) -> bool:
        """Whether every slot has finished, and an export runs or must not begin yet.

        No export may begin in the pause after a failed export. The result does not stay
        True for ever: an export has a deadline, and a pause lasts at most 300 s.
        """
        coordinator = self._rendezvous.coordinator
        if coordinator is None or self._last_finished is None:
            return False
        return coordinator.exporting is not None or not coordinator.may_export

    def _stands_uncommitted(self, coordinator: CommitCoordinator, last: int) -> bool:
        """Whether to export the last step although the store has not recorded it.

        True if all copies of step `last` exist, but the store does not answer and has
        not recorded the commit two leases after the trainers finished.
        """
        patience_s = 2 * self._config.timeouts.lease
        return (
            coordinator.pending is not None
            and coordinator.pending.step == last
            and self._records.away
            and self._loop.now() > self._finished_at + patience_s
        )

    def conclude_for_others(self) -> None:
        """Ends a job that waits for hosts if storage has the job's last step.

        If storage has this step, the job has ended before and the store has lost the
        result. A host that was away when the job ended would otherwise wait for the
        other hosts for ever.
        """
        last = self._config.last_step
        if last and self._rendezvous.phase == "waiting" and last in self._storage.steps:
            self.end("done", step=last)

    def result_without_store(self) -> str:
        """Returns an ended job's result if the store has not recorded it in time.

        The result is JSON. Returns "" while any of these holds:

        * At most 2 leases have passed since the job's end (`RESULT_LEASES`); while a
          host is lost, at most 12 leases (`RESULT_LEASES_LOST`).
        * The store answers.
        * A host that would miss the result is not connected: a host with a slot, or one
          whose link has just ended.
        """
        leases = RESULT_LEASES_LOST if self._registry.lost_hosts else RESULT_LEASES
        late = self._loop.now() > self._ended_at + leases * self._config.timeouts.lease
        if not late or not self._records.away:
            return ""
        # A host that is not told would wait for this host: hosts with slots, also
        # between two assignments, and hosts whose links have just ended.
        assignment = self._rendezvous.assignment or self._rendezvous.previous
        slots = set(assignment.slots) if assignment is not None else set()
        missing = slots - self._registry.connected | self._registry.away
        return "" if missing else self._result

    def end(self, status: str, message: str = "", step: int = 0, code: int = 0) -> None:
        """Queues the write of the job's result to the store; later calls do nothing.

        Args:
            status: "done", "stopped" or "error".
            message: the error, for people.
            step: the step with which the job ends; 0 if it is not known.
            code: exit code of every agent; 0 becomes 1 if `status` is "error".
        """
        if self._rendezvous.frozen:
            return
        self._rendezvous.frozen = True
        code = code or int(status == "error")
        text = _result_json(status, step, message, code)
        self._result, self._ended_at = text, self._loop.now()
        self._journal.event("end", **json.loads(text))
        self._records.put("result", text, "result", text)


def _result_json(status: str, step: int, message: str, code: int) -> str:
    """Encodes the job's result as it is written to the store.

    Args:
        status: "done", "stopped" or "error".
        step: the step with which the job ends; 0 if it is not known.
        message: the error, for people.
        code: exit code of every agent.
    """
    return json.dumps(
        {"status": status, "step": step, "message": message, "code": code}
    )
