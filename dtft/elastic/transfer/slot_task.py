"""The order that one host obeys, and what sends its copies on while it does.

Pushers, the pace they keep and the host's turn in copying belong to one formation and
end with it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.replication import Window
from dtft.checkpoint.transport import Credentials, PushPace
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.replication import Pusher, share_pace


@dataclass(kw_only=True)
class SlotTask:
    """One slot in one epoch, as the leader ordered it."""

    order: dict[str, Any]
    restored: dict[str, Any] | None = None
    """What the restore from memory came to; None while it runs."""
    announced: bool = False
    """The trainer has told the layout."""
    turn: int = 0
    """Steps staged; equal on all hosts, which take turns in copying."""
    _pushers: list[Pusher] = field(default_factory=list)
    _pace: PushPace | None = None

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt) of the order."""
        return self.order["generation"], self.order["attempt"]

    @property
    def slot(self) -> int:
        """Of this host."""
        return self.order["slot"]

    def start_pushers(
        self, copies: Copies, credentials: Credentials, limit_s: float
    ) -> None:
        """Has what is offered from now on sent to peers; nothing if it is already.

        Args:
            copies: of this host.
            credentials: the job's.
            limit_s: in which a step has to arrive.
        """
        if not self._pushers:
            addresses = self.order["addresses"]
            self._pushers = copies.pushers(addresses, credentials, self.epoch)
            self._pace = share_pace(self._pushers, limit_s)

    def stop_pushers(self) -> None:
        """Cuts what is being sent."""
        for pusher in self._pushers:
            pusher.close()
        self._pushers = []

    def push(self, step: int, targets: Collection[int] | None = None) -> None:
        """Sends a step that is held here to peers that keep copies.

        Args:
            step: of the commit.
            targets: their slots; all of them by default.
        """
        for pusher in self._pushers:
            if targets is None or pusher.target in targets:
                pusher.offer(step)

    def staged(
        self, step: int, interval: int, window: Mapping[str, Any] | None
    ) -> None:
        """The trainer has staged a step, which goes to the peers.

        Args:
            step: that it has staged.
            interval: steps until it stages the next.
            window: what it measured since the step before; the fields of
                `snapshot_interval.Window`.
        """
        self.turn += 1
        if self._pace is not None and window is not None:
            self._pace.staged(Window(**window).step_s, interval)
        self.push(step)
