"""A process's talk with its agent: what it says, hears and waits for, until one ends.

Every wait has a limit and ends at once when the agent has gone. Must not know what the
messages mean, which is `manager.py`'s and `attached_memory.py`'s to say.
"""

import threading
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.link import Link, LinkClosed, Outbox

LAST_WORDS_S = 1.0
"""Once the link is closed, the agent's reason for it is waited for so long."""


class AgentGone(RuntimeError):
    """The agent of this process has ended, or has let go of it; says why."""


class Dialogue:
    """One link to an agent. `condition` guards what messages change."""

    def __init__(self, link: Link, deadline_s: float) -> None:
        """Says nothing yet and does not listen; limits every wait to `deadline_s`."""
        self.condition = threading.Condition()
        self.gone = False
        """Whether the agent has ended, or has let go of this process."""
        self.farewell = "this host's agent has ended"
        """Why, if it is gone or should go without a word."""
        self._link, self.deadline_s = link, deadline_s
        self._outbox = Outbox(link)

    def start(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Listens from now on; `take` gets each message while `condition` is held."""
        threading.Thread(target=self._hear, args=(take,), daemon=True).start()

    def _hear(self, take: Callable[[dict[str, Any]], None]) -> None:
        try:
            while True:
                message = self._link.receive()
                with self.condition:
                    take(message)
                    self.condition.notify_all()
        except LinkClosed:
            with self.condition:
                self.gone = True
                self.condition.notify_all()

    def check(self) -> None:
        """Raises AgentGone if the agent has let go of this process, or has ended."""
        with self.condition:
            if self.gone:
                raise AgentGone(self.farewell)

    def wait(
        self, ready: Callable[[], bool], what: str, limit_s: float | None = None
    ) -> None:
        """Waits until messages have made something true.

        Args:
            ready: whether it is; called while `condition` is held.
            what: is waited for, for the error.
            limit_s: by default the dialogue's.

        Raises:
            TimeoutError: it did not become true in time.
            AgentGone: the agent has ended.
        """
        limit_s = limit_s or self.deadline_s
        with self.condition:
            self.condition.wait_for(lambda: self.gone or ready(), timeout=limit_s)
            if self.gone:
                raise AgentGone(self.farewell)
            if not ready():
                raise TimeoutError(
                    f"{limit_s:.0f} s waiting for {what}; limit: timeouts.start"
                )

    def send(self, op: str, **fields: Any) -> None:
        """Sends a message now.

        Raises:
            AgentGone: the agent has ended.
        """
        try:
            self._link.send(op, **fields)
        except LinkClosed as error:
            with self.condition:  # the last words may still be on their way here
                self.condition.wait_for(lambda: self.gone, timeout=LAST_WORDS_S)
            raise AgentGone(self.farewell) from error

    def queue(self, op: str, **fields: Any) -> None:
        """Sends a message soon, in order with others that are queued; never fails."""
        self._outbox.send(op, **fields)

    def close(self) -> None:
        """Ends the queue once everything in it is sent; the link stays open."""
        self._outbox.close()
