"""Runs a `Leader` on this host while the host holds the job's leader key.

After this host gets the key, it reads the recorded commits from the store, on a thread;
then it leads. If the store does not answer, the host retries, and releases the key
after one lease (a duration, `lease_s` seconds); no host leads meanwhile. A leader whose
key has expired continues, and takes the key again without forming the job anew. The
leader is closed when another host leads or has led, when the store has lost data, or
when this host releases the key.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dtft.checkpoint.replication import Commit
from dtft.elastic.event_loop import Loop
from dtft.elastic.leader.leader import Leader
from dtft.elastic.store import Membership, StoreUnavailable, View

logger = logging.getLogger(__name__)

RETRY_S = 0.2
FLUSH_S = 1.0
"""Largest number of seconds for which an ending agent waits until its leader's event
log is written."""


class Leadership:
    """Makes and closes this host's `Leader`; the host may lead more than once.

    Used by the event loop.

    Attributes:
        leader: the `Leader` on this host; None while this host does not lead.
    """

    def __init__(
        self,
        host: str,
        membership: Membership,
        loop: Loop,
        lease_s: float,
        make_leader: Callable[[View, Sequence[Commit]], Leader],
        *,
        on_begun: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        """Starts without leading.

        Args:
            host: this host's name.
            membership: reads the job's records and commits, and releases the leader
                key.
            loop: the agent's event loop.
            lease_s: duration of a lease in seconds.
            make_leader: makes a leader from the view (the job's records in the store)
                and the commits when this host begins to lead.
            on_begun: called when `leader` has been made.
            on_ended: called when this host no longer leads.
        """
        self._host, self._membership, self._loop = host, membership, loop
        self._lease_s, self._make_leader = lease_s, make_leader
        self._on_begun, self._on_ended = on_begun, on_ended
        self._lane = loop.lane("leadership")
        self._taking = 0
        """Number of the term for which this host has the leader key but does not lead
        yet; 0 if there is no such term."""
        self._let_go_at = 0.0
        self._given_up = 0
        """Number of the last term whose leader key this host released by `let_go`."""
        self._not_before = 0.0
        self.leader: Leader | None = None

    @property
    def may_campaign(self) -> bool:
        """Whether this host may try to get the leader key.

        False for three leases after this host has released the key (`let_go`).
        """
        return self._loop.now() >= self._not_before

    def see(self, view: View) -> None:
        """Handles a new view of the store (the job's records in it at one moment).

        If this host holds the leader key, reads the commits and begins to lead. Stops
        leading if another host has led meanwhile, or if the store has lost its data. If
        this host continues to lead, passes the view to `leader`.
        """
        leads = view.leader == self._host and view.term != self._given_up
        if self.leader is not None:
            same_era = view.era == self.leader.view.era
            if view.last_led not in ("", self._host) or not same_era:
                self.give_up()
        if self.leader is not None:
            self.leader.see(view)
        elif not leads:
            self._taking = 0
        elif self._taking != view.term:
            self._taking = view.term
            self._let_go_at = self._loop.now() + self._lease_s
            self._read(view.term)

    def _read(self, term: int) -> None:
        self._lane.submit(
            self._membership.commits, lambda outcome: self._begin(term, outcome)
        )

    def _begin(self, term: int, outcome: "Future[Sequence[Commit]]") -> None:
        view = self._membership.view
        if term != self._taking or view.term != term or self.leader is not None:
            return
        error = outcome.exception()
        if isinstance(error, StoreUnavailable):
            self._wait(view, error)
            return
        self._taking = 0
        self.leader = self._make_leader(view, outcome.result())
        logger.info("this host leads the job from now on, term %d", term)
        self._on_begun()

    def _wait(self, view: View, error: StoreUnavailable) -> None:
        """Reads the commits again in 0.2 s, after the store did not answer.

        The pause is `RETRY_S`. After one lease without an answer, releases the leader
        key instead.

        Args:
            view: the newest view of the store (the job's records in it).
            error: why the store could not be read.
        """
        if self._loop.now() >= self._let_go_at:
            self.let_go(view, str(error))
            return
        logger.warning(
            "this host has the leader key but could not read the commits, so it does "
            "not lead yet and reads them again: %s",
            error,
        )
        self._loop.call_later(RETRY_S, self._read, view.term)

    def let_go(self, view: View, why: str) -> None:
        """Stops leading and releases the leader key.

        Another host can then lead: this host does not try to get the key for three
        leases.

        Args:
            view: the view of the store (the job's records) in which this host holds the
                key.
            why: the reason, for the log.
        """
        logger.warning("this host releases the leader key, another may lead: %s", why)
        self._taking, self._given_up = 0, view.term
        self._not_before = self._loop.now() + 3 * self._lease_s
        self._membership.let_go(view)
        self.give_up()

    def give_up(self) -> None:
        """Closes `leader`, if this host leads; does not release the leader key."""
        self._taking = 0
        if self.leader is not None:
            logger.warning("this host does not lead the job any more")
            self.leader.close()
            self.leader = None
            self._on_ended()

    def close(self) -> None:
        """Closes `leader`, if this host leads; called when the agent ends.

        Waits at most 1 s (`FLUSH_S`) until the event log is written.
        """
        self._lane.close()
        if self.leader is not None:
            self.leader.close(FLUSH_S)
            self.leader = None
            self._on_ended()
