"""Answers requests to the leader of a served job, whose processes the user starts.

* A process waits until a step is committed or stored (`Flush`).
* A process requests a step on other shardings (`reshard` plans the transfers).
* A user requests an export of the newest commit. The export does not wait for the next
  commit, because the processes decide when to save again. `BetweenRuns` handles this
  request while no process runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.replication import Commit
from dtft.checkpoint.state import Layout
from dtft.elastic.anti_affinity import known_domains
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.export_plan import NotExportable, plan_idle_export
from dtft.elastic.leader.export_requests import Answer, StorageExports
from dtft.elastic.leader.host_registry import HostRegistry
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import Ballot, Round, causes
from dtft.elastic.leader.reshard import NotPlanned, ReshardPlans

ATTACHED = (
    "the processes have attached again before the step was written; ask again once "
    "they have saved a step, or when they have ended"
)


@dataclass(frozen=True, kw_only=True)
class Flush:
    """A user's process on `host` that waits until `step` is committed.

    If `store` is True, the process waits until the step or a later step is in storage.
    The answer contains the number `token`, by which the process knows which of its
    waits has ended. The `ballot`, (leader's term, counter), identifies the attempt to
    form the job in which the process asked.
    """

    ballot: Ballot
    host: str
    token: int
    step: int
    store: bool


class BetweenRuns:
    """Exports a job's newest commit while none of the user's processes runs.

    Used by the event loop. First the hosts are asked which copies they hold, because
    some hosts may have been lost since they were asked last. `export_plan` decides
    which hosts write.
    """

    def __init__(
        self,
        records: Records,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        storage: StorageExports,
    ) -> None:
        """Starts with no request."""
        self._records, self._rendezvous = records, rendezvous
        self._registry, self._storage = registry, storage
        self._asked = False
        self._ordered: Ballot | None = None
        """The ballot (number) of the round in which the export in progress was ordered;
        None without such an export."""

    def asked(self, answer: Answer) -> None:
        """Handles an export request while no process runs.

        First makes the hosts report their copies anew; the periodic `tick` then orders
        the export. If an export is in progress, its end answers this request, too.
        `answer` sends the reply to the requester.
        """
        round_ = self._rendezvous.current
        self._storage.wanted(self._records.last_step, answer)
        if round_ is None or self._ordered == round_.ballot:
            return  # the export is in progress
        self._asked = True
        if self._rendezvous.phase == "waiting":
            self._rendezvous.form(*causes(round_.reasons))

    def tick(self) -> None:
        """Orders the requested export once hosts have reported their copies.

        Refuses the export if the processes have attached again. If an export was
        interrupted because the job is being formed anew, orders it again.
        """
        round_, phase = self._rendezvous.current, self._rendezvous.phase
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
        step, previous = plan.commit.step, self._rendezvous.previous
        if step in self._storage.watch.steps:
            self._storage.has(step)
            return
        assert previous is not None  # a commit is made under an assignment
        formed = dataclasses.replace(
            previous, slots=plan.hosts, source="memory", step=step
        )
        self._rendezvous.open_coordinator(plan.layout, formed)
        assert self._rendezvous.coordinator is not None
        held = {host: it["holdings"].get(step, {}) for host, it in told.items()}
        if self._rendezvous.coordinator.export_from(step, plan.hosts, held):
            self._ordered = round_.ballot
        else:
            self._storage.refuse(f"some slice of step {step} is not in memory any more")

    def over(self) -> None:
        """Records that an export has ended, so none is in progress any more."""
        self._ordered = None


class Requests:
    """Handles requests to the leader of a job whose processes the user starts.

    Used by the event loop.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        storage: StorageExports,
        send: Callable[..., None],
    ) -> None:
        """Starts with no request. `send(host, op, **fields)` sends an order."""
        self._directory = config.storage_directory
        self._rendezvous, self._registry = rendezvous, registry
        self._storage, self._send = storage, send
        self._between_runs = BetweenRuns(records, rendezvous, registry, storage)
        self._flushes: tuple[Flush, ...] = ()
        self._export_asked = False
        """Whether a requested export of the newest commit is still to be ordered."""
        self._remapping: tuple[Ballot, ReshardPlans] | None = None
        """The ballot (number) of a round, and the reshard plans of its formation."""

    def tick(self) -> None:
        """Orders an export that was requested while no process ran, if it can begin."""
        self._between_runs.tick()

    # --------------------------------------------------------- other shardings

    def _newest(self) -> ReshardPlans:
        """Returns the `ReshardPlans` of the current round.

        A round is one attempt to assign hosts to slots. The object plans how the newest
        commit is restored on other shardings; the first call in a round makes a new
        one.
        """
        round_ = self._rendezvous.current
        assert round_ is not None
        if self._remapping is None or self._remapping[0] != round_.ballot:
            decision = round_.decision
            found = (decision.located, decision.layout) if decision else (None, None)
            self._remapping = round_.ballot, ReshardPlans(*found)
        return self._remapping[1]

    def staged(self, slot: int, step: int, digests: Sequence[bytes]) -> None:
        """Records a slot's snapshot of a step, as the digests of the slot's slices.

        `digests` has one digest for each slice, in the order of the slices in
        `Layout.slices(slot)`. The digests are needed if a process requests the step on
        other shardings.
        """
        if self._rendezvous.coordinator is not None:
            self._newest().staged(slot, step, digests)

    def wanted(self, host: str, slot: int, step: int, layout: str) -> None:
        """Orders a slot's host to assemble a step in the requested layout.

        The order names the parts of slices to read, their hosts and their digests. If
        the step cannot be assembled, for example because it is not the newest commit,
        the order has an error text in place of these. Ignores the request if `host`
        does not have `slot`. `layout` is the requested mesh and leaves of the state, as
        JSON.
        """
        assignment, hosts = self._rendezvous.assignment, self._registry.records
        if assignment is None or assignment.slots[slot] != host:
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

    # --------------------------------------------------- steps safe, or stored

    def flush(self, host: str, slot: int, token: int, step: int, store: bool) -> None:
        """Adds a process that waits for a step; answers it once the step is safe.

        The answer is an error if the process waits for storage and an export fails.

        Args:
            host: the process's host.
            slot: the host's slot.
            token: returned in the answer; tells the process which of its waits has
                ended.
            step: the awaited step, which is safe once it is committed.
            store: whether to wait until `step` or a later step is in storage instead.
        """
        round_ = self._rendezvous.current
        assert round_ is not None
        flush = Flush(
            ballot=round_.ballot, host=host, token=token, step=step, store=store
        )
        self._flushes += (flush,)
        self._settle()

    def export_wanted(self, answer: Answer) -> None:
        """Handles a request to export the newest commit now.

        Answers at once if storage has the commit, or, with an error, if nothing was
        saved since the processes have attached. Otherwise answers when the export has
        ended or is refused. `answer` sends the reply to the requester.
        """
        rendezvous, coordinator = self._rendezvous, self._rendezvous.coordinator
        if rendezvous.phase in ("gathering", "waiting"):
            self._between_runs.asked(answer)
        elif coordinator is None and rendezvous.phase == "running":
            text = "nothing was saved since the processes have attached; ask again then"
            answer({"error": f"{text}, or when the processes have ended"})
        elif coordinator is not None and coordinator.exported >= max(
            0, coordinator.committed
        ):
            answer({"step": coordinator.exported})
        else:
            self._export_asked |= self._storage.asked(rendezvous, answer)
            self._settle()

    def committed(self, commit: Commit) -> None:
        """Handles a recorded commit: answers the processes whose awaited step is safe.

        Processes may request the step of this commit on other shardings from now on.
        While an export is in progress, the answers wait for its end.
        """
        coordinator = self._rendezvous.coordinator
        if coordinator is not None and self._rendezvous.assignment is not None:
            self._newest().committed(commit, coordinator.placement)
        self._settle()

    def exported(self, host: str, step: int, ok: bool, error: str) -> None:
        """Handles the end of an export.

        Answers the processes that wait for its step or an earlier step. After a failed
        export, answers every process that waits for storage with the error. The host of
        every slot also gets the error, whether or not its process waits.

        Args:
            host: the host whose answer ended the export: the one that failed, or the
                last one that succeeded. For an export past its deadline, the names of
                the hosts that have not answered, separated by commas.
            step: the exported step.
            ok: whether the whole step was written.
            error: the error; "" without one.
        """
        self._between_runs.over()
        if not ok:
            why = error.partition("\n")[0][:300]
            text = (
                f"step {step} did not reach storage in {self._directory}: {why} "
                f"({host}). Steps stored before are unchanged; the next step that is "
                "due is tried."
            )
            slots = (
                self._rendezvous.assignment.slots if self._rendezvous.assignment else ()
            )
            for slot_host in slots:
                self._send(slot_host, "storage_failed", error=text)
            for flush in [flush for flush in self._flushes if flush.store]:
                self._answer(flush, text)
        self._settle()

    def _settle(self) -> None:
        """Answers the processes whose awaited step is safe.

        A step is safe once it is committed; for a process that waits for storage, once
        storage has it. Orders an export if a process or a request needs one. While an
        export is in progress, answers no process. Forgets processes that asked before
        the job was formed anew.
        """
        round_, coordinator = self._rendezvous.current, self._rendezvous.coordinator
        ballot = round_.ballot if round_ else None
        self._flushes = tuple(f for f in self._flushes if f.ballot == ballot)
        if coordinator is None:
            return
        for flush in self._flushes:
            if coordinator.committed < flush.step or coordinator.exporting is not None:
                continue
            if flush.store and coordinator.exported < flush.step:
                coordinator.export(coordinator.committed)
                continue
            self._answer(flush, "")
        if self._export_asked and coordinator.exporting is None:
            behind = coordinator.exported < coordinator.committed
            if behind:
                coordinator.export(coordinator.committed)
            self._export_asked = behind and coordinator.exporting is None

    def _answer(self, flush: Flush, error: str) -> None:
        self._flushes = tuple(other for other in self._flushes if other is not flush)
        self._send(flush.host, "flushed", token=flush.token, error=error)
