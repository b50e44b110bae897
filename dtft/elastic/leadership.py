"""The leadership of the job, as far as this host has it: a `Leader` per term, or none.

A term begins with what the store has recorded. A host that has the leader key and
cannot read that asks again and again, and lets go of the key after the time of a lease:
nobody leads meanwhile. Begins and ends the leader's work, carries its orders, and
answers people who ask a host that does not lead. Whether this host leads is read from
the store by `Agent`; must not decide it, nor anything about the job.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from dtft.elastic.config import AgentConfig
from dtft.elastic.demands import Answer
from dtft.elastic.journal import Journal
from dtft.elastic.leader import Leader
from dtft.elastic.membership import Membership, View
from dtft.elastic.peers import Peers
from dtft.elastic.scaling import AGAIN
from dtft.elastic.store import StoreUnavailable

logger = logging.getLogger(__name__)


class Leadership:
    """Used by the event loop.

    Attributes:
        leader: of the present term; None while another host leads, or nobody.
    """

    def __init__(
        self,
        leader_class: type[Leader],
        config: AgentConfig,
        membership: Membership,
        peers: Peers,
        emit: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does not lead yet."""
        self._leader_class, self._config = leader_class, config
        self._membership, self._peers, self._emit = membership, peers, emit
        self._clock = clock
        self._let_go_at: float | None = None
        """Set while this host has the key and does not lead yet."""
        self._given_up = 0
        """The last term that this host has let go of."""
        self.leader: Leader | None = None

    @property
    def pending(self) -> bool:
        """This host has the leader key, but could not begin to lead so far."""
        return self._let_go_at is not None

    def take(self, view: View) -> bool:
        """The store says that this host leads: begins, or tries to.

        Returns:
            Whether a term has begun; False if it did before, or cannot yet.
        """
        if self.leader is not None:
            if self.leader.view.leader_revision == view.leader_revision:
                return False
            self.give_up()
        if view.leader_revision == self._given_up:
            return False
        try:
            self.leader = self._leader_class(
                self._config,
                self._membership,
                view,
                self._emit,
                self._order,
                Journal(self._config.run_directory, self._config.host),
            )
        except StoreUnavailable as error:
            self._wait(view, error)
            return False
        self._let_go_at = None
        logger.info("leading, term %d", view.leader_revision)
        for host in [self._config.host, *self._peers.hosts]:
            self.leader.connected(host)
        return True

    def _wait(self, view: View, error: StoreUnavailable) -> None:
        """Cannot lead yet; lets go of the key when that has lasted too long."""
        if self._let_go_at is None:
            self._let_go_at = self._clock() + self._config.timeouts.lease
            logger.warning("cannot lead yet, trying again: %s", error)
        elif self._clock() >= self._let_go_at:
            logger.warning("letting go of the leader key: %s", error)
            self._let_go_at, self._given_up = None, view.leader_revision
            self._membership.let_go()

    def give_up(self) -> None:
        """Another host leads, or nobody."""
        self._let_go_at = None
        if self.leader is not None:
            logger.warning("no longer leading")
            self.close()

    def _order(self, host: str, op: str, **fields: Any) -> None:
        """Sends an order to a host, which may be this one."""
        if host == self._config.host:
            self._emit("own_order", {"op": op, **fields})
        else:
            self._peers.send(host, {"op": op, **fields})

    def export_wanted(self, answer: Answer) -> None:
        """Somebody wants the newest commit in storage."""
        if self.leader is None:
            text = f"{self._config.host} does not lead the job"
            answer({"error": text, "moved": True})
        else:
            self.leader.export_wanted(answer)

    def scaling_wanted(self, replicas: int, answer: Answer) -> None:
        """Somebody wants another number of replicas."""
        if self.leader is None:
            answer({"error": AGAIN, "again": True})
        else:
            self.leader.scaling_wanted(replicas, answer)

    def close(self) -> None:
        """Ends the leader's work, if there is any."""
        if self.leader is not None:
            self.leader.close()
            self.leader = None
