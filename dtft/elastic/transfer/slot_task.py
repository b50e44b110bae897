"""The leader's order for one host's slot, and the pushers of the slot's copies.

A pusher sends the slot's slices to one peer. When slots are assigned anew, the host
drops its `SlotTask`: the order, the pushers with their common rate limit, and the count
of the steps that the trainer has written to this host's memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.replication import Window
from dtft.checkpoint.state import Layout
from dtft.checkpoint.transport import Credentials, PushPace
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.replication import Pusher, share_pace


@dataclass(kw_only=True)
class SlotTask:
    """The leader's order that gave this host its slot, and the slot's pushers.

    A pusher sends the slot's slices to one peer that keeps copies of them.
    """

    order: dict[str, Any]
    restored: dict[str, Any] | None = None
    """Outcome of the restore (see `restore_into`) once it has succeeded; None before.
    All zeros if nothing is restored from memory."""
    layout: Layout | None = None
    """The trainer's layout, if it equals that of the commit which is restored from
    memory; else None. The layout is accepted once the restore has succeeded."""
    announced: bool = False
    """Whether the trainer's layout was accepted: this host has memory for it, and has
    reported it to the leader."""
    turn: int = 0
    """Number of steps that the trainer has staged (written to this host's memory) under
    this order. Equal on all hosts, which take turns in copying slices."""
    wanted: tuple[int, int] | None = None
    """(staged, next): the last staged step, and the next step, for which the trainer
    wants buffers once the staged step is released. None if no buffers are wanted."""
    _pushers: list[Pusher] = field(default_factory=list)
    _pace: PushPace | None = None

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt) of the order's assignment of slots."""
        return self.order["generation"], self.order["attempt"]

    @property
    def slot(self) -> int:
        """Slot of this host."""
        return self.order["slot"]

    def start_pushers(
        self, copies: Copies, credentials: Credentials, limit_s: float
    ) -> None:
        """Starts the pushers to peers, unless they run already.

        Args:
            copies: this host's copies.
            credentials: the job's credentials.
            limit_s: seconds within which a step has to arrive at the peers.
        """
        if not self._pushers:
            addresses = self.order["addresses"]
            self._pushers = copies.pushers(addresses, credentials, self.epoch)
            self._pace = share_pace(self._pushers, limit_s)

    def stop_pushers(self) -> None:
        """Closes the pushers; sends in progress are cut."""
        for pusher in self._pushers:
            pusher.close()
        self._pushers = []

    def push(self, step: int, targets: Collection[int] | None = None) -> None:
        """Queues a step for sending to the peers that keep copies.

        Args:
            step: number of the step, which this host's memory has.
            targets: slots of the peers; by default all.
        """
        for pusher in self._pushers:
            if targets is None or pusher.target in targets:
                pusher.offer(step)

    def staged(
        self, step: int, interval: int, window: Mapping[str, Any] | None
    ) -> None:
        """Counts a step that the trainer has staged, and queues it for the peers.

        Staged means that the trainer has written its slices to this host's memory. Also
        adapts the rate limit of the pushers to the time until the next step is staged;
        without measurements the limit stays.

        Args:
            step: the staged step.
            interval: number of steps until the trainer stages the next.
            window: the trainer's measurements since the last staged step, among them
                the seconds per step: fields of `dtft.checkpoint.replication.Window`.
                None if there are none.
        """
        self.turn += 1
        if self._pace is not None and window is not None:
            self._pace.staged(Window(**window).step_s, interval)
        self.push(step)
