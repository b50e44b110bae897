"""Draining: hosts leave a live job on request, and the requests are answered.

A drained host gets no slot any more. If it has one, the job is re-formed at the next
commit, and another host takes the slot. The drained host's copies are a source of that
restore. Its agent is told to end once a step is committed without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.export_requests import Answer
from dtft.elastic.leader.host_registry import HostRegistry
from dtft.elastic.leader.recovery import RecoveryReport
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import RoundReason
from dtft.elastic.leader.scaling import AGAIN
from dtft.elastic.leader.sizes import JobSizes


@dataclass(kw_only=True)
class _Departure:
    slot: int
    at: float
    answers: list[Answer]
    reply: dict[str, Any] = field(default_factory=dict)
    """The answer, once the job trains without the host."""


class Draining:
    """Requests that hosts leave the job. Used by the leader's event loop."""

    def __init__(
        self,
        config: AgentConfig,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        sizes: JobSizes,
        loop: Loop,
        send: Callable[..., None],
    ) -> None:
        """Starts with no request."""
        self._config, self._rendezvous, self._registry = config, rendezvous, registry
        self._sizes, self._loop, self._send = sizes, loop, send
        self._requests: dict[str, _Departure] = {}

    def asked(self, host: str, answer: Answer) -> None:
        """Handles a request that a host leaves the job.

        Answers at once if the request is refused or the host has no slot. Otherwise
        answers once a step is committed without the host. If this host stops leading
        before that, `close` answers.
        """
        rendezvous = self._rendezvous
        if host in self._requests:
            self._requests[host].answers.append(answer)
        elif host not in self._registry.records:
            hosts = ", ".join(sorted(self._registry.records))
            answer({"error": f"the job has no host {host}: it has {hosts}", "code": 2})
        elif rendezvous.frozen or rendezvous.phase != "running":
            text = f"the job does not train now ({rendezvous.phase}); ask again later"
            answer({"error": text, "again": not rendezvous.frozen})
        elif (slot := rendezvous.slot_of.get(host)) is None:
            self._registry.drain(host)
            answer({"host": host, "slot": -1})
            self._end(host)
        elif why := self._why_not(host):
            answer({"error": why})
        else:
            self._registry.drain(host)
            now = self._loop.now()
            self._requests[host] = _Departure(slot=slot, at=now, answers=[answer])

    def _why_not(self, host: str) -> str:
        """Returns why the job could not train without a host; "" if it could."""
        coordinator = self._rendezvous.coordinator
        left = self._rendezvous.available - 1
        layout = coordinator.layout if coordinator is not None else None
        if self._sizes.choose(left, layout) <= left:
            return ""
        return (
            f"no host is left for the slot of {host}. Start another agent (the command "
            f"of the others, with --job {self._config.job} --store "
            f"{self._config.store}), then ask again."
        )

    def due(self) -> RoundReason | None:
        """Returns why the job is to be re-formed at this commit; None if no drained
        host has a slot."""
        coordinator = self._rendezvous.coordinator
        round_ = self._rendezvous.current
        if coordinator is None or coordinator.stopping or self._rendezvous.frozen:
            return None
        if self._rendezvous.phase != "running" or round_ is None or round_.finished:
            return None
        found = [it for it in self._requests if it in self._rendezvous.slot_of]
        if not found:
            return None
        slots = self._rendezvous.slot_of
        text = ", ".join(f"{host} (slot {slots[host]})" for host in found)
        return RoundReason(f"{text} leaves the job", hosts=tuple(found))

    def trained(self, report: RecoveryReport) -> None:
        """Makes the answers of requests whose hosts have no slot any more."""
        for host, request in self._requests.items():
            if host not in self._rendezvous.slot_of and not request.reply:
                request.reply = {
                    "host": host,
                    "slot": request.slot,
                    "step": report.restored_step,
                    "bytes_from_peers": report.bytes_from_peers,
                    "bytes_from_storage": report.bytes_from_storage,
                    "seconds": self._loop.now() - request.at,
                }

    def committed(self) -> None:
        """Ends the agents of drained hosts that have no slot, after a commit of the
        hosts that have slots; gives the answers."""
        ready = [host for host, request in self._requests.items() if request.reply]
        for host in ready:
            request = self._requests.pop(host)
            for answer in request.answers:
                answer(request.reply)
            self._end(host)

    def _end(self, host: str) -> None:
        round_ = self._rendezvous.current
        if round_ is not None and host in self._registry.connected:
            self._send(host, "drained", ballot=round_.ballot)

    def close(self) -> None:
        """Replies to all waiting requesters that they must ask the next leader."""
        for request in self._requests.values():
            for answer in request.answers:
                answer({"error": AGAIN, "again": True})
        self._requests.clear()
