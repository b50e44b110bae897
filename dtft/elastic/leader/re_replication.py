"""Re-replication: restores the number of copies after a recovery.

After a restore from memory, the slices that a lost host kept for others have too few
copies. `re_replication_of` computes which slot pushes (sends) which slices again. A
slot gets only the slices that the copy placement gives it, because its host has
allocated memory for no others. `ReReplication` collects the reports of received pushes.
`ReReplicator` orders the pushes; it forgets them when the job is formed anew.
"""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dtft.checkpoint.replication import CopyPlacement, Located, Push, check_copy
from dtft.checkpoint.state import Layout
from dtft.checkpoint.tables import size_text
from dtft.elastic.anti_affinity import Surroundings
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.rendezvous_plan import Round
from dtft.elastic.store import View

Holders = Mapping[str, Collection[str]]
"""Slice key to the hosts that hold a verified copy."""


@dataclass(kw_only=True)
class ReReplication:
    """The pushes that make a restored step's missing copies, and which have arrived.

    A push is the slices that one slot sends to another. A push has arrived when its
    target holds the slices verified.
    """

    step: int
    pushes: tuple[Push, ...]
    """The pushes to send again."""
    copies: int
    """Number of failure domains with a copy before the pushes, of the slice for which
    this number is smallest."""
    begun: float
    """Time of the restore in seconds, on any clock."""
    digests: Mapping[str, bytes] = field(default_factory=dict)
    """Slice key to the digest with which the slice was restored."""
    _held: set[tuple[int, int]] = field(default_factory=set)

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[int, int], Push]:
        """Maps (source slot, target slot) to the push; a pair has at most one push."""
        return {(push.source, push.target): push for push in self.pushes}

    @property
    def nbytes(self) -> int:
        """The number of bytes of all these pushes."""
        return sum(piece.nbytes for push in self.pushes for piece in push.slices)

    @property
    def whole(self) -> bool:
        """Whether all pushes have arrived, so no copy is missing."""
        return self._by_pair.keys() <= self._held

    def held(self, step: int, source: int, target: int, root: str) -> None:
        """Records that slot `target` holds a verified copy of slot `source`'s slices.

        Does nothing if `step` is not the restored step.

        Raises:
            Mislabelled: `root`, one digest over all slices of the copy, is not that of
                the restored slices.
        """
        if step != self.step:
            return
        if (push := self._by_pair.get((source, target))) is not None:
            check_copy(push, step, self.digests, root)
        self._held.add((source, target))

    def targets(self, source: int) -> list[int]:
        """Returns the slots to which a slot sends its slices again."""
        return [push.target for push in self.pushes if push.source == source]

    def degraded_line(self, wanted: int) -> str:
        """Formats the message for people while copies are missing.

        `wanted` is the number of copies that every slice should have.
        """
        targets = {push.target for push in self.pushes}
        return (
            f"degraded: slices of step {self.step} have {self.copies} of {wanted} "
            f"copies; {size_text(self.nbytes)} are pushed again to {len(targets)} "
            f"host{'s' * (len(targets) != 1)}"
        )

    def healthy_line(self, wanted: int, committed: int, now: float) -> str:
        """Formats the message for people when all copies exist.

        Args:
            wanted: the number of copies that every slice should have.
            committed: the step, later than the restored step, with whose commit the
                re-replication has ended; 0 if all pushes have arrived instead.
            now: the time in seconds, on the clock of the restore's time.
        """
        copies = f"{wanted} cop{'ies' if wanted != 1 else 'y'}"
        seconds = f"{now - self.begun:.2f} s"
        if committed:
            return (
                f"healthy again: step {committed} was committed with {copies} of every "
                f"slice, {seconds} after the restore"
            )
        return (
            f"healthy again: every slice has {copies}, {size_text(self.nbytes)} "
            f"re-replicated in {seconds}"
        )


def re_replication_of(
    step: int,
    placement: CopyPlacement,
    slots: Sequence[str],
    holders: Holders,
    domains: Mapping[str, str],
    now: float,
    digests: Mapping[str, bytes],
) -> ReReplication:
    """Computes which pushes make the missing copies of a restored step.

    A push is the slices that one slot sends to another. The placement has the pushes
    that a snapshot needs. Such a push is made again, with all its slices, if its target
    lacks one of them. Assumes that every slot has its own slices again.

    Args:
        step: the restored step.
        placement: which slots keep copies of which slices.
        slots: the host of each slot.
        holders: slice key to the hosts with a verified copy before the restore.
        domains: host to its failure domain; a host that is missing here is its own
            domain.
        now: the time in seconds.
        digests: slice key to the digest with which the slice was restored, where known.
    """
    found = {
        piece.key: {*holders.get(piece.key, ()), *(slots[slot] for slot in owners)}
        for piece, owners in placement.layout.owners.items()
    }
    alive = set(slots)
    # A host without a domain is its own domain, with a name that no domain can have.
    reached = [
        len({domains.get(host, f"\0{host}") for host in hosts & alive})
        for hosts in found.values()
    ]
    pushes = tuple(
        push
        for push in placement.pushes
        if any(slots[push.target] not in found[piece.key] for piece in push.slices)
    )
    return ReReplication(
        step=step,
        pushes=pushes,
        copies=min(reached, default=placement.effective_copies),
        begun=now,
        digests=digests,
    )


class ReReplicator:
    """Orders hosts to replace the copies that were lost with their hosts.

    Used by the event loop.
    """

    def __init__(
        self,
        journal: Journal,
        send: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with no missing copy. `send(host, op, **fields)` sends an order."""
        self._journal, self._send, self._clock = journal, send, clock
        self._round: Round | None = None
        self._repair: ReReplication | None = None
        self._layout: Layout | None = None
        self._view = View()

    def begin(self, round_: Round, view: View) -> None:
        """Orders hosts to push the missing copies.

        Called when every slot has its own slices again. Orders nothing when the job
        starts, or if the state was not restored from memory.

        Args:
            round_: the attempt to form the job, with its assignment and what was
                restored.
            view: the job's records in the store, from which the failure domains are
                taken.
        """
        self._round, self._repair, self._view = round_, None, view
        assignment, decision = round_.assignment, round_.decision
        assert assignment is not None and decision is not None
        located = decision.located
        if assignment.rung is None or located is None:
            return
        assert decision.layout is not None
        self._layout = decision.layout
        placement = assignment.spread.place(self._layout)
        self._repair = repair = re_replication_of(
            assignment.step,
            placement,
            assignment.slots,
            located.holders,
            Surroundings.of(view).names,
            self._clock(),
            _restored(round_, located),
        )
        if repair.pushes:
            self._journal.say(repair.degraded_line(placement.effective_copies))
        for slot, host in enumerate(assignment.slots):
            if targets := repair.targets(slot):
                fields = {"step": repair.step, "targets": targets}
                self._send(host, "replicate", ballot=round_.ballot, **fields)
        self._conclude(0)

    def held(
        self, round_: Round | None, step: int, source: int, target: int, root: str
    ) -> None:
        """Records that slot `target` holds a verified copy of slot `source`'s slices.

        The last missing copy ends the re-replication. Does nothing in these cases:

        * No re-replication is under way, or `step` is not the restored step.
        * The job has been formed anew since the re-replication began: `round_` is
          another attempt to form the job.

        Raises:
            Mislabelled: `root`, one digest over all slices of the copy, is not that of
                the restored slices.
        """
        if self._repair is not None and round_ is self._round:
            self._repair.held(step, source, target, root)
            self._conclude(0)

    def committed(self, round_: Round | None, step: int) -> None:
        """Ends the re-replication, because `step` was committed with all its copies.

        Does nothing if no re-replication is under way. Also does nothing if the job has
        been formed anew since the re-replication began: `round_` is then another
        attempt to form the job.
        """
        if self._repair is not None and round_ is self._round:
            self._conclude(step)

    def _conclude(self, committed: int) -> None:
        repair, now = self._repair, self._clock()
        assert repair is not None and self._round is not None
        assignment = self._round.assignment
        if assignment is None or not (repair.whole or committed):
            return
        self._repair = None
        wanted, effective, problem = Surroundings.of(self._view).copies(self._layout)
        if repair.pushes and not problem:
            self._journal.say(repair.healthy_line(effective, committed, now))
        self._journal.event(
            "replicated",
            generation=assignment.generation,
            attempt=assignment.attempt,
            step=committed or repair.step,
            copies=effective,
            copies_asked=wanted,
            healthy=not problem,
            num_bytes=0 if committed else repair.nbytes,
            seconds=now - repair.begun,
        )


def _restored(round_: Round, located: Located) -> dict[str, bytes]:
    """Maps the key of each slice of the restored state to the slice's digest.

    Takes the digest that a host has computed after the restore; without one, the digest
    in the commit. Hosts compute digests only after a change of the number of slots.

    Args:
        round_: the attempt to form the job, with the hosts' reports of the restore.
        located: the restored commit, with its digests.
    """
    told = (outcome.get("restored", {}) for outcome in round_.prepared.values())
    return {**located.digests, **{key: it for one in told for key, it in one.items()}}
