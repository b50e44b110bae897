"""Brings a recovered job's copies back to their number, and tells people when.

The leader's part that orders what `mending.py` decides: one mending at a time, which
ends with its formation. Must not know how a formation comes about.
"""

import time
from collections.abc import Callable

from dtft.checkpoint.replication import Located
from dtft.checkpoint.state import Layout
from dtft.elastic.forming import Round
from dtft.elastic.journal import Journal
from dtft.elastic.mending import Mending, mending_of
from dtft.elastic.spread import Surroundings
from dtft.elastic.view import View


class Mender:
    """Whether the job is healthy since its last loss. Used by the event loop."""

    def __init__(
        self,
        journal: Journal,
        send: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is missing yet. `send(host, op, **fields)` reaches any host."""
        self._journal, self._send, self._clock = journal, send, clock
        self._round: Round | None = None
        self._mending: Mending | None = None
        self._layout: Layout | None = None
        self._view = View()

    def begin(self, round_: Round, view: View) -> None:
        """Every slot has its own slices: has the copies that are missing pushed."""
        self._round, self._mending, self._view = round_, None, view
        assignment, decision = round_.assignment, round_.decision
        assert assignment is not None and decision is not None
        located = decision.located
        if assignment.rung == 0 or located is None:
            return
        assert decision.layout is not None
        self._layout = decision.layout
        placement = assignment.spread.place(self._layout)
        self._mending = mending = mending_of(
            assignment.step,
            placement,
            assignment.slots,
            located.holders,
            Surroundings.of(view).names,
            self._clock(),
            _restored(round_, located),
        )
        if mending.pushes:
            self._journal.say(mending.degraded_line(placement.effective_copies))
        for slot, host in enumerate(assignment.slots):
            if targets := mending.targets(slot):
                fields = {"step": mending.step, "targets": targets}
                self._send(host, "replicate", ballot=round_.ballot, **fields)
        self._conclude(0)

    def held(
        self, round_: Round | None, step: int, source: int, target: int, root: str
    ) -> None:
        """A push has arrived and was verified; raises Mislabelled."""
        if self._mending is not None and round_ is self._round:
            self._mending.held(step, source, target, root)
            self._conclude(0)

    def committed(self, round_: Round | None, step: int) -> None:
        """A newer step is committed: it has all its copies."""
        if self._mending is not None and round_ is self._round:
            self._conclude(step)

    def _conclude(self, committed: int) -> None:
        mending, now = self._mending, self._clock()
        assert mending is not None and self._round is not None
        assignment = self._round.assignment
        if assignment is None or not (mending.whole or committed):
            return
        self._mending = None
        wanted, effective, problem = Surroundings.of(self._view).copies(self._layout)
        if mending.pushes and not problem:
            self._journal.say(mending.healthy_line(effective, committed, now))
        self._journal.event(
            "replicated",
            generation=assignment.generation,
            attempt=assignment.attempt,
            step=committed or mending.step,
            copies=effective,
            copies_asked=wanted,
            healthy=not problem,
            num_bytes=0 if committed else mending.nbytes,
            seconds=now - mending.begun,
        )


def _restored(round_: Round, located: Located) -> dict[str, bytes]:
    """The digest of each slice that was restored, as hosts read it or the commit says.

    Only hosts of a formation of another size say so: their slices are new.
    """
    told = (outcome.get("restored", {}) for outcome in round_.prepared.values())
    return {**located.digests, **{key: it for one in told for key, it in one.items()}}
