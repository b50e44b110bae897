"""Pushes the slices of every step to the peers that keep copies.

This is the sending side; the module `replica_server` is the receiving side. The
placement of copies decides which slices go to which peer. A slice counts as a copy only
once the receiver has verified its digests.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from dtft.checkpoint.memory import ReplicaStore
from dtft.checkpoint.replication import Push
from dtft.checkpoint.state import Chunks
from dtft.checkpoint.transport import (
    Channel,
    ChannelClosed,
    Credentials,
    Outgoing,
    PushPace,
    connect,
    send_push,
)

logger = logging.getLogger(__name__)

Epoch = tuple[int, int]


class Pusher:
    """Sends one slot's slices to one peer, step after step, until closed."""

    def __init__(
        self,
        holder: ReplicaStore,
        push: Push,
        address: str,
        credentials: Credentials,
        epoch: Epoch,
        deadline_s: float,
    ) -> None:
        """Starts the thread that sends steps; connects to the peer at the first step.

        Args:
            holder: this host's copies, from which slices are read.
            push: the slot, the peer's slot and the slices to send.
            address: "host:port" of the peer.
            credentials: the job's credentials.
            epoch: (generation, attempt) of the assignment of slots; peers with another
                epoch refuse the push.
            deadline_s: seconds for which a step is tried again until it has arrived.
        """
        self._holder, self._push, self._address = holder, push, address
        self.target = push.target
        self._credentials, self._epoch = credentials, epoch
        self._deadline_s = deadline_s
        self.paced: Callable[[int], None] | None = None
        """Takes a number of sent bytes; sleeps to limit the rate. None: no limit."""
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._closed = threading.Event()
        self._channel: Channel | None = None
        self._sizes = Chunks.of(push.slices, holder.chunk_bytes).sizes
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of all slices that the pusher sends for one step."""
        return sum(piece.nbytes for piece in self._push.slices)

    def offer(self, step: int) -> None:
        """Queues a step for sending; this host's memory must have the step."""
        self._steps.put(step)

    def close(self) -> None:
        """Stops the pusher; a send in progress is cut."""
        self._closed.set()
        self._steps.put(None)
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            deadline = time.monotonic() + self._deadline_s
            while not self._closed.is_set() and not self._try(step, deadline):
                if time.monotonic() > deadline:
                    logger.warning(
                        "step %d was not sent to %s within %.0f s: that peer gets no "
                        "copy of it",
                        *(step, self._address, self._deadline_s),
                    )
                    break
                self._closed.wait(0.05)
        if self._channel is not None:
            self._channel.close()

    def _try(self, step: int, deadline: float) -> bool:
        """Tries to send one step; returns whether the step needs no further try.

        True if the peer has the step or does not need it, if this host's memory has
        dropped the step, or if the step can never be sent, which is logged. False after
        a failed connection or a failed send. `deadline` is the time of `time.monotonic`
        by which the step must have arrived.
        """
        try:
            return self._send(step, deadline)
        except KeyError:
            self._hang_up()
            return True  # the step was dropped after a newer commit
        except ValueError as error:  # its digests and items are too large for a header
            self._hang_up()
            if not self._closed.is_set():
                logger.warning(
                    "step %d cannot be sent to %s, which gets no copy of it: %s",
                    *(step, self._address, error),
                )
            return True
        except (OSError, ChannelClosed, TimeoutError) as error:
            self._hang_up()
            if not self._closed.is_set():
                logger.info(
                    "sending step %d to %s failed, and is tried again: %s",
                    *(step, self._address, error),
                )
            return False

    def _send(self, step: int, deadline: float) -> bool:
        outgoing = Outgoing(
            header={
                "epoch": self._epoch,
                "source": self._push.source,
                "step": step,
                "digests": self._holder.own_digests(step, self._push.slices),
                "items": self._holder.items(step),
            },
            sizes=self._sizes,
            chunks=lambda numbers: self._holder.push_chunks(step, self._push, numbers),
        )
        if self._channel is None:
            self._channel = self._connect(deadline)
            if self._closed.is_set():  # `close` saw no channel yet
                self._channel.close()
        return send_push(self._channel, outgoing, self._connect, deadline).done

    def _connect(self, deadline: float) -> Channel:
        left = min(deadline - time.monotonic(), 5.0)
        channel = connect(self._address, self._credentials, {"op": "push"}, left)
        channel.paced = self.paced
        return channel

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None


def share_pace(pushers: Sequence[Pusher], limit_s: float) -> PushPace:
    """Limits the rate of several pushers together; called before their first step.

    Returns the object that sets the limit. The caller must call its method `staged`
    after each snapshot; before the first call there is no limit. `limit_s` is the
    number of seconds within which a step must arrive at the peers.
    """
    pace = PushPace(sum(pusher.nbytes for pusher in pushers), limit_s)
    for pusher in pushers:
        pusher.paced = pace.bucket.sent
    return pace
