"""Draining: hosts leave a live job, on request or because their agents are to end.

A drained host gets no slot any more. If the host has a slot, the job is re-formed at
the next commit: a spare takes the slot, or the job shrinks if it has no spare and may
shrink. Other hosts can still fetch the drained host's copies. Its agent is told to end
once a step is committed without the host; so is the agent of a host that had lost its
slot before. If the job lacks hosts before that, the drained host stays. If the drained
host leads, another host becomes the leader.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtft.elastic.assignment import HostRecord, process_of
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.export_requests import Answer
from dtft.elastic.leader.host_registry import HostRegistry
from dtft.elastic.leader.recovery import RecoveryReport
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import RoundReason, leaving
from dtft.elastic.leader.scaling import AGAIN
from dtft.elastic.leader.sizes import JobSizes


@dataclass(kw_only=True)
class _Departure:
    process: str
    """Identity of the agent process that is to end: PROCESS of its incarnation."""
    slot: int
    """The slot that the host had; -1 for none."""
    at: float
    reply: dict[str, Any]
    """The reply to users who have requested that the host leaves the job."""
    answers: list[Answer] = field(default_factory=list)
    told: bool = False
    """Whether the agent has been told to end."""


class Draining:
    """The hosts that are to leave the job. Used by the leader's event loop."""

    def __init__(
        self,
        config: AgentConfig,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        sizes: JobSizes,
        loop: Loop,
        send: Callable[..., None],
        journal: Journal,
    ) -> None:
        """Starts with no host that is to leave.

        `send(host, op, **fields)` sends an order to a host.
        """
        self._config, self._rendezvous, self._registry = config, rendezvous, registry
        self._sizes, self._loop, self._send = sizes, loop, send
        self._journal = journal
        self._departures: dict[str, _Departure] = {}

    def asked(self, host: str, answer: Answer) -> None:
        """Handles a request that a host leaves the job.

        `answer` sends the reply to the requester:

        * at once, with an error, if the job has no such host, does not train now, or
          cannot train without the host;
        * at once, if the host is connected, has no slot, does not lead, and has no
          copies that the job may need (`_may_end`). Its agent is told to end;
        * otherwise once a step is committed without the host; or, with an error, once
          the host has to stay or this host stops leading.
        """
        rendezvous, there = self._rendezvous, host in self._registry.records
        known = self._departures.get(host)
        if known is not None and (self._is_leaving(host) or not there):
            known.answers.append(answer)
            if known.told:
                self._answer(known)
        elif not there:
            hosts = ", ".join(sorted(self._registry.records))
            answer({"error": f"the job has no host {host}: it has {hosts}", "code": 2})
        elif not self._trains:
            text = f"the job does not train now ({rendezvous.phase}); ask again later"
            answer({"error": text, "again": not rendezvous.frozen})
        elif self._is_needed(host) and not self._can_train(rendezvous.available - 1):
            answer({"error": self._nobody_left_for(host)})
        else:
            self._begin(host).answers.append(answer)
            if self._may_end(host):
                self._end(host)

    def leaves(self, host: str) -> None:
        """Handles a registered host whose agent is to end (`HostRecord.leaving`).

        The host gets no slot any more.

        * While the job trains, the agent is told to end at once if the job can do
          without the host (`_may_end`), or if the job cannot train without it.
          Otherwise the agent is told to end once a step is committed without its host.
          If the host has a slot or leads, the job is re-formed for that at the next
          commit.
        * While the leader decides which host gets which slot, the departure is added to
          the printed reasons for the new formation.
        * While the job waits for hosts, the agent is told to end at once, unless the
          host leads. If the job begins to wait later, the agent stays, as another host
          may still come and fetch its copies; it ends after `timeouts.drain`.
        """
        rendezvous, is_new = self._rendezvous, not self._is_leaving(host)
        if is_new:
            self._begin(host)
        if not self._trains:
            if is_new and rendezvous.is_deciding and rendezvous.current is not None:
                rendezvous.current.reasons.append(self._reason(host))
            if rendezvous.phase == "waiting" and not self._is_needed(host):
                self._end(host)
        elif self._may_end(host):
            self._end(host)
        elif self._is_needed(host) and not self._can_train(rendezvous.available):
            self._refuse(host)

    def connected(self, record: HostRecord) -> None:
        """Handles a host that has connected, or a newer record of a connected host.

        A drained host stays drained if the same agent process connects again, even
        after the host was lost. If its agent was told to end, the agent is told again:
        the first order may have been lost with the link. A host whose agent was started
        anew is not drained any more.
        """
        host, departure = record.host, self._departures.get(record.host)
        if departure is None or departure.process != process_of(record.incarnation):
            return
        self._registry.drain(host)
        if departure.told:
            self._end(host)

    def _begin(self, host: str) -> _Departure:
        assignment = self._rendezvous.assignment or self._rendezvous.previous
        slot = assignment.slot_of.get(host, -1) if assignment is not None else -1
        self._registry.drain(host)
        self._departures[host] = departure = _Departure(
            process=process_of(self._registry.records[host].incarnation),
            slot=slot,
            at=self._loop.now(),
            reply={"host": host, "slot": slot},
        )
        return departure

    @property
    def _trains(self) -> bool:
        return self._rendezvous.phase == "running" and not self._rendezvous.frozen

    def _is_leaving(self, host: str) -> bool:
        """Whether a host is to leave the job.

        False for a host that is not registered, and for a host that was to leave but
        whose agent was started anew.
        """
        known, record = self._departures.get(host), self._registry.records.get(host)
        if known is None or record is None or host not in self._registry.drained:
            return False
        return known.process == process_of(record.incarnation)

    def _is_needed(self, host: str) -> bool:
        """Whether a host has a slot or is this host, which leads."""
        return host in self._rendezvous.slot_of or host == self._config.host

    def _may_end(self, host: str) -> bool:
        """Whether the job can do without a host now.

        False for a host that has a slot or leads, and for a host that has lost its slot
        until a step is committed without it: other hosts may fetch its copies.
        """
        return not self._is_needed(host) and not self._rendezvous.is_source(host)

    def _can_train(self, hosts: int) -> bool:
        """Whether the job can train on `hosts` hosts, one for each slot.

        True if the job's number of slots, or a smaller number to which the job may
        shrink, is at most `hosts`.
        """
        coordinator = self._rendezvous.coordinator
        layout = coordinator.layout if coordinator is not None else None
        return self._sizes.choose(hosts, layout) <= hosts

    def _nobody_left_for(self, host: str) -> str:
        return (
            f"no host is left for the slot of {host}. Start another agent (the command "
            f"of the others, with --job {self._config.job} --store "
            f"{self._config.store}), then ask again."
        )

    def _refuse(self, host: str) -> None:
        """Lets a drained host stay, because the job cannot train without it.

        The requests to drain this host get an error. A host whose agent is to end
        (`HostRecord.leaving`) cannot stay; its agent is told to end at once.
        """
        departure, why = self._departures[host], self._nobody_left_for(host)
        departure.reply = {"error": why}
        if self._registry.records[host].leaving:
            self._journal.say_once(f"end {host}", f"{host} leaves at once: {why}")
            self._end(host)
        else:
            self._registry.keep(host)
            self._answer(self._departures.pop(host))

    def tick(self) -> None:
        """Lets drained hosts stay while the job waits for hosts; called periodically.

        Cancels one drain after the other until the job no longer waits: the host may
        have a slot again, and the requests to drain it get an error. Does not cancel
        the drain of a host that was told to end, or whose agent is to end
        (`HostRecord.leaving`).
        """
        rendezvous, records = self._rendezvous, self._registry.records
        for host, departure in list(self._departures.items()):
            if rendezvous.phase != "waiting" or rendezvous.frozen:
                return
            can_stay = self._is_leaving(host) and not records[host].leaving
            if can_stay and not departure.told:
                self._refuse(host)
                rendezvous.answered()

    def due(self) -> list[RoundReason]:
        """Returns why the job is to be re-formed at this commit; [] if it is not.

        The job is re-formed if drained hosts have a slot or lead; each such host is a
        reason. The result is [] in these cases:

        * The job cannot train without these hosts. They then stay (`_refuse`).
        * The job does not train, or it is being stopped.
        * A trainer has finished its last step.
        """
        coordinator = self._rendezvous.coordinator
        round_ = self._rendezvous.current
        if coordinator is None or coordinator.stopping or not self._trains:
            return []
        if round_ is None or round_.finished:
            return []
        found = self._needed
        if not found:
            return []
        if not self._can_train(self._rendezvous.available):
            for host in found:
                self._refuse(host)
            return []
        return [self._reason(host) for host in found]

    @property
    def _needed(self) -> list[str]:
        """The drained hosts that have a slot or lead, and were not told to end."""
        return [
            host
            for host, departure in self._departures.items()
            if self._is_leaving(host) and self._is_needed(host) and not departure.told
        ]

    @property
    def leads(self) -> bool:
        """Whether the leader's own host is to leave the job."""
        return self._config.host in self._needed

    def _reason(self, host: str) -> RoundReason:
        slot = self._departures[host].slot
        return leaving(host, {host: slot} if slot >= 0 else {})

    def trained(self, report: RecoveryReport) -> None:
        """Completes the replies about drained hosts that had a slot and have none now.

        Called when every slot trains again. Adds the host that has the slot now (None
        if the job shrank, so that it has no such slot), the restored step, the bytes
        that the recovery took from peers and from storage, and the seconds since the
        request to drain the host, or since the report that its agent is to end.
        """
        assignment = self._rendezvous.assignment
        hosts = assignment.slots if assignment is not None else ()
        for host, departure in self._departures.items():
            is_free = not departure.told and not self._is_needed(host)
            if is_free and departure.slot >= 0:
                has_slot = departure.slot < len(hosts)
                departure.reply |= {
                    "successor": hosts[departure.slot] if has_slot else None,
                    "step": report.restored_step,
                    "bytes_from_peers": report.bytes_from_peers,
                    "bytes_from_storage": report.bytes_from_storage,
                    "seconds": self._loop.now() - departure.at,
                }

    def committed(self) -> None:
        """Ends the agents of those drained hosts that neither have a slot nor lead.

        Called after a commit of the hosts with slots. Sends each such agent the order
        to end, and answers the requests to drain its host. If a host's agent was
        started anew meanwhile, the host stays, and the answer is an error.
        """
        for host, departure in list(self._departures.items()):
            if departure.told:
                continue
            if host in self._registry.records and not self._is_leaving(host):
                text = f"{host} was started anew before it had left the job; ask again"
                departure.reply = {"error": text}
                self._answer(self._departures.pop(host))
            elif self._may_end(host):
                self._end(host)

    def _end(self, host: str) -> None:
        """Tells the agent of a drained host to end; answers the requests to drain it.

        If the host is lost, only answers the requests. Does nothing while the host's
        link is cut and the host may reconnect; the next commit tries again.
        """
        round_, departure = self._rendezvous.current, self._departures[host]
        if host in self._registry.away:
            return
        if round_ is not None and host in self._registry.connected:
            self._send(host, "drained", ballot=round_.ballot)
        departure.told = True
        self._answer(departure)

    def _answer(self, departure: _Departure) -> None:
        answers, departure.answers = departure.answers, []
        for answer in answers:
            answer(departure.reply)

    def close(self) -> None:
        """Replies to all waiting requesters that they must ask the next leader."""
        for departure in self._departures.values():
            departure.reply = {"error": AGAIN, "again": True}
            self._answer(departure)
        self._departures.clear()
