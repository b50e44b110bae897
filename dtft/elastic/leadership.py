"""The leadership of the job, as far as this host has it: a `Leader` per term, or none.

Begins and ends the leader's work, carries its orders, and answers people who ask a host
that does not lead. Whether this host leads is read from the store by `Agent`; must not
decide it, nor anything about the job.
"""

import logging
from collections.abc import Callable
from typing import Any

from dtft.elastic.config import AgentConfig
from dtft.elastic.demands import Answer
from dtft.elastic.journal import Journal
from dtft.elastic.leader import Leader
from dtft.elastic.membership import Membership, View
from dtft.elastic.peers import Peers
from dtft.elastic.scaling import AGAIN

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
    ) -> None:
        """Does not lead yet."""
        self._leader_class, self._config = leader_class, config
        self._membership, self._peers, self._emit = membership, peers, emit
        self.leader: Leader | None = None

    def take(self, view: View) -> bool:
        """The store says that this host leads; False if it does already, this term."""
        if self.leader is not None:
            if self.leader.view.leader_revision == view.leader_revision:
                return False
            self.give_up()
        logger.info("leading, term %d", view.leader_revision)
        self.leader = self._leader_class(
            self._config,
            self._membership,
            view,
            self._emit,
            self._order,
            Journal(self._config.run_directory, self._config.host),
        )
        for host in [self._config.host, *self._peers.hosts]:
            self.leader.connected(host)
        return True

    def give_up(self) -> None:
        """Another host leads, or nobody."""
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
