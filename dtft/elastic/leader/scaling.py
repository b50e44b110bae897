"""Scaling: changes the number of replicas on request and answers the requests.

The requested size is kept in the store, so the next leader continues with it. The
requester repeats the request to the next leader. `Scaling` decides when a running job
is re-formed for another size. `prove` compares the digests of the state on the new mesh
with the digests of the commit, leaf by leaf.
"""

import dataclasses
import queue
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dtft.checkpoint.replication import Located
from dtft.checkpoint.state import Layout, digest_root
from dtft.checkpoint.transport import MAX_REQUEST_HEADER, Channel, no_payload
from dtft.elastic.assignment import ReplicaGroups, WantedSize, size_for
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.export_requests import Answer
from dtft.elastic.leader.failure_budget import Failure
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.recovery import RecoveryReport
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import Round
from dtft.elastic.leader.sizes import JobSizes

Digests = Mapping[str, bytes]
"""Slice key to the digests of the slice's chunks, concatenated."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A comparison of the committed state with the state restored on a new mesh.

    Every host reads its restored slices again and reports their digests. The leader
    compares these digests with those that trainers made for the commit on the old mesh.
    """

    step: int
    committed_root: str
    """The digest over all slices, from the commit record."""
    restored_root: str
    """The digest over the slices that hosts read again on the new mesh. Equals
    `committed_root` if the leaves are divided as before and none of them differs."""
    leaves: int
    """The number of compared leaves."""
    differing: tuple[str, ...]
    """Paths of leaves whose bytes differ from the commit or between hosts; must be
    empty."""


def prove(located: Located, layout: Layout, restored: Iterable[Digests]) -> Proof:
    """Compares every leaf of a restored state with the commit.

    A slice for which the commit has no digest is compared only between hosts. A slice
    that no host has read counts as different.

    Args:
        located: the commit, with the digests of its slices.
        layout: the layout (mesh and leaves of the state) on the new mesh.
        restored: for each host, slice key to the digest of the slice that the host has
            read again after the restore.
    """
    read: dict[str, set[bytes]] = {}
    for found in restored:
        for key, value in found.items():
            read.setdefault(key, set()).add(value)
    wrong: dict[str, None] = {}
    for piece in layout.owners:
        values = read.get(piece.key, set())
        expected = located.digests.get(piece.key, min(values, default=b""))
        if values != {expected}:
            wrong[piece.path] = None
    return Proof(
        step=located.commit.step,
        committed_root=located.commit.root,
        restored_root=digest_root((key, min(values)) for key, values in read.items()),
        leaves=len(layout.leaves),
        differing=tuple(wrong),
    )


ASK_S = 10.0
AGAIN = "this host does not lead any more"


@dataclass(frozen=True, kw_only=True)
class _Request:
    size: WantedSize
    before: int
    """The number of replicas at the time of the request."""
    at: float
    answer: Answer


class Scaling:
    """The users' requests for a number of replicas, and when the job changes its size.

    A request is answered once the job trains with the requested number. Used by the
    event loop.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        rendezvous: Rendezvous,
        sizes: JobSizes,
        loop: Loop,
        journal: Journal,
    ) -> None:
        """Starts with no request."""
        self._config, self._records, self._rendezvous = config, records, rendezvous
        self._sizes, self._journal = sizes, journal
        self._loop = loop
        self._waiting: list[_Request] = []

    def asked(self, replicas: int, answer: Answer) -> None:
        """Handles a request for `replicas` replicas.

        `answer` sends the reply:

        * at once, if the job has this number already; or, with an error, if the job
          does not train now, cannot have this number or has too few hosts for it;
        * once every slot trains with this number; or, with an error, once the job
          trains with another number that it will keep;
        * with an error, at a later request for another number;
        * with an error, if this host stops leading before that: the requester must ask
          the next leader.
        """
        rendezvous, coordinator = self._rendezvous, self._rendezvous.coordinator
        if rendezvous.frozen or coordinator is None or rendezvous.phase != "running":
            text = f"the job does not train now ({rendezvous.phase}); ask again later"
            answer({"error": text, "again": not rendezvous.frozen})
            return
        try:
            size = size_for(replicas, coordinator.layout, self._config.sizes)
        except ValueError as error:
            answer({"error": str(error), "code": 2})
            return
        groups = ReplicaGroups.of(coordinator.layout, self._config.sizes)
        if (short := size.slots - self._available()) > 0:
            answer({"error": self._too_few(size, short)})
            return
        is_new = size.slots != self._sizes.wanted
        self._sizes.asked_for(size)
        if is_new:
            self._records.put("size", size, "size", size.to_json())
        self._overrule(size)
        if size.slots == groups.slots:
            answer({"replicas": replicas, "before": replicas, "hosts": size.slots})
        else:
            now = self._loop.now()
            self._waiting.append(
                _Request(size=size, before=groups.replicas, at=now, answer=answer)
            )

    def _overrule(self, size: WantedSize) -> None:
        """Answers the waiting requests for another number of slots with an error.

        `size` is the newest request, which replaces them.
        """
        for one in [it for it in self._waiting if it.size.slots != size.slots]:
            asked = f"the request for {one.size.replicas} replicas"
            text = f"{asked} was overruled by a later request for {size.replicas}"
            one.answer({"error": text})
            self._waiting.remove(one)

    def _too_few(self, size: WantedSize, short: int) -> str:
        return (
            f"{size.replicas} replicas need {size.slots} hosts, but "
            f"{size.slots - short} are here. Start {short} more (the command of the "
            f"other agents, with --job {self._config.job} --store "
            f"{self._config.store}), then ask again."
        )

    def _available(self) -> int:
        return self._rendezvous.available

    def due(self) -> str:
        """Returns why the job is to be re-formed for another size at this commit.

        Returns "" in these cases:

        * The size stays.
        * Processes still compile ahead for the new size.
        * The job does not train, or is about to end.
        """
        rendezvous, coordinator = self._rendezvous, self._rendezvous.coordinator
        round_ = rendezvous.current
        if coordinator is None or round_ is None or round_.assignment is None:
            return ""
        training = rendezvous.phase == "running" and not (
            rendezvous.frozen or round_.finished
        )
        if not training or coordinator.stopping:
            return ""
        now = len(round_.assignment.slots)
        then = self._sizes.choose(self._available(), coordinator.layout)
        if then == now or not rendezvous.rehearse_size(then):
            return ""
        groups = ReplicaGroups.of(coordinator.layout, self._config.sizes)
        return (
            f"the job {'grows' if then > now else 'shrinks'} from {groups.replicas} "
            f"to {groups.replicas_on(then)} replicas"
        )

    def restored(self, round_: Round) -> bool:
        """Compares the digests of a state restored on a new mesh with the commit's.

        The commit has no digest of a slice whose leaf is now divided in another way;
        such a slice is compared between the hosts that hold it. A state that differs is
        never trained on. `round_` is the attempt to form the job, with the hosts'
        reports.

        Returns:
            False if the states differ; the job is then re-formed. True also if there is
            nothing to compare: no host reported digests of restored slices.
        """
        decision, assignment = round_.decision, round_.assignment
        assert decision is not None and assignment is not None
        told = [one.get("restored", {}) for one in round_.prepared.values()]
        if decision.located is None or decision.layout is None or not any(told):
            return True
        proof = prove(decision.located, decision.layout, told)
        self._journal.event("resized", **dataclasses.asdict(proof))
        if proof.differing:
            self._journal.say(
                "the job is formed anew, because these restored leaves differ from the "
                f"commit: {', '.join(proof.differing)}"
            )
            failure = Failure(kind="restore", step=assignment.step)
            self._rendezvous.failures.add(failure)
            self._rendezvous.form("the restored state was not the committed one")
        return not proof.differing

    def undone(self, message: str) -> bool:
        """Excludes the present number of slots after a failure that would repeat.

        Only a number that differs from that of the newest commit is excluded. The job
        is re-formed with another number. `message` is the failure, for people.

        Returns:
            False if the job has as many slots as the newest commit, or if the number
            was excluded before; the job then cannot go on.
        """
        round_ = self._rendezvous.current
        chosen = round_.assignment if round_ is not None else None
        if chosen is None or not self._sizes.is_new(chosen):
            return False
        if self._sizes.why_not(len(chosen.slots)):
            return False  # given up before; no other size is left
        self._sizes.give_up(len(chosen.slots), message)
        self._rendezvous.form(f"not on {len(chosen.slots)} hosts: {message}")
        return True

    def late(self, why: str) -> None:
        """Re-forms the job because trainers did not start in time.

        The start counts as a failed attempt to train, and too many failed attempts in a
        row end the job. `why` says which hosts were late, for people.
        """
        self._rendezvous.failures.add(Failure(kind="late", error=why))
        self._rendezvous.form(why)

    def trained(self, report: RecoveryReport) -> None:
        """Answers the requests for the number of replicas that the job now has.

        Called when every slot trains again. If the job will keep this number, requests
        for another number get an error. `report` has the cost of the change, which is
        part of the reply.
        """
        assert (
            self._rendezvous.assignment is not None
            and self._rendezvous.coordinator is not None
        )
        now = len(self._rendezvous.assignment.slots)
        then = self._sizes.choose(
            self._available(), self._rendezvous.coordinator.layout
        )
        for one in list(self._waiting):
            size = one.size
            if size.slots == now:
                one.answer(
                    {
                        "replicas": size.replicas,
                        "before": one.before,
                        "hosts": now,
                        "step": report.restored_step,
                        "bytes_from_peers": report.bytes_from_peers,
                        "bytes_from_storage": report.bytes_from_storage,
                        "seconds": self._loop.now() - one.at,
                    }
                )
            elif then == now:
                why = self._sizes.why_not(size.slots) or "a host was lost meanwhile"
                text = f"the job trains on {now} hosts, not on {size.slots}: {why}"
                one.answer({"error": text})
            else:
                continue
            self._waiting.remove(one)

    def close(self) -> None:
        """Replies to all waiting requesters that they must ask the next leader."""
        for one in self._waiting:
            one.answer({"error": AGAIN, "again": True})
        self._waiting.clear()


Wanted = TypeVar("Wanted", int, str)


def serve_change(
    channel: Channel,
    name: str,
    kind: type[Wanted],
    ask: Callable[[Wanted, Answer], None],
) -> None:
    """Serves one request to change the job: replies once the job trains as requested.

    The reply is an error if the request is malformed or refused, if the job will not
    train as requested, if this host stops leading, or if the requester's time limit (at
    most a day) is over.

    Args:
        channel: the connection of the requester.
        name: the name of the request's field with the requested value.
        kind: type of this value: int for a number of replicas, str for a host to drain.
        ask: passes the request to the leader: the value, and the function that the
            leader calls with the reply.
    """
    request = _asked(channel)
    wanted, limit_s = request.get(name), request.get("limit_s")
    if not isinstance(wanted, kind) or isinstance(wanted, bool):
        wanted = None
    if wanted is None or not isinstance(limit_s, int | float):
        text = f"not a request with {name}"
        channel.send({"error": text, "code": 2}, timeout_s=ASK_S)
        return
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    ask(wanted, answers.put)
    try:
        reply = answers.get(timeout=max(0.0, min(float(limit_s), 86400.0)))
    except queue.Empty:
        reply = {"error": f"the job did not change within {limit_s:.0f} s"}
    channel.send(reply, timeout_s=ASK_S)
    _asked(channel)  # the caller confirms that it has the reply


def _asked(channel: Channel) -> dict[str, Any]:
    small = MAX_REQUEST_HEADER
    return channel.receive(ASK_S, no_payload, max_header=small)[0]
