"""Sends messages over channels without blocking the sender.

A message that the socket does not take at once is queued. One thread sends the queued
messages of all channels of the process; the thread ends when all queues are empty. A
peer that takes messages too slowly is given up: its channel is closed, so the thread
that receives on the channel gets ChannelClosed. The module is made for event loops: a
peer that stops reading does not block them.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass

from dtft.checkpoint.transport.connection import Channel, ChannelClosed, Header, Unsent

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Longest time in seconds that a message waits to be sent. After that the peer is given
up: its channel is closed."""
MAX_MESSAGES = 10_000
"""Most messages that may be queued for one peer."""
MAX_BYTES = 64 << 20
"""Most bytes of messages that may be queued for one peer; one message has at most
16 MiB."""
_BUSY_S = 0.01  # polling interval while another thread sends on the channel


@dataclass(frozen=True, kw_only=True)
class OutboundLimits:
    """Limits of one peer's queue; if one is exceeded, the connection is closed.

    `deadline_s` is the longest time in seconds that a message waits to be sent. At most
    `max_messages` messages wait, of at most `max_bytes` bytes together.
    """

    deadline_s: float = DEADLINE_S
    max_messages: int = MAX_MESSAGES
    max_bytes: int = MAX_BYTES


class Outbound:
    """Queue of messages to send over one channel; keeps their order. Thread-safe.

    `Channel.send` may still be used on the same channel. Such a call waits for a frame
    that is partly sent, and overtakes the queued messages.
    """

    def __init__(self, channel: Channel, limits: OutboundLimits | None = None) -> None:
        """Takes a channel whose handshake is done; sends nothing yet.

        `limits` of None means the default limits.
        """
        self.channel = channel
        self._limits = limits or OutboundLimits()
        self._state = threading.Condition()
        self._queue: deque[tuple[float, Unsent]] = deque()
        self._bytes = 0
        self._drained = False  # whether the writer sends the queue
        self._ended = False
        self._complaint = ""

    @property
    def waiting(self) -> int:
        """The number of queued messages; 0 after the channel has ended."""
        return 0 if self._ended else len(self._queue)

    def post(self, message: Header) -> bool:
        """Sends a message at once or queues it, without waiting.

        The message is encoded at once; the caller may change it afterwards.

        Returns:
            Whether the message was sent or queued. False if the channel has ended, or
            is closed now because a limit is exceeded or the writer thread cannot be
            started. True does not mean that the peer has received the message.

        Raises:
            ValueError: the message is larger, or has more values, than a header may.
        """
        unsent = Unsent(message)
        with self._state:
            if self._ended:
                return False
            self._queue.append((time.monotonic(), unsent))
            self._bytes += len(unsent.plain)
            if not self._drained:
                self._begin()
            elif (
                len(self._queue) > self._limits.max_messages
                or self._bytes > self._limits.max_bytes
            ):
                self._give_up("more than may wait for one peer")
            alive = not self._ended
        self._say()
        return alive

    def _begin(self) -> None:
        """Sends the only message of the queue, or hands the queue to the writer thread.

        The writer thread (`_Writer`) gets the queue if the socket does not take the
        whole message. If the thread cannot be started, or the connection has ended, the
        channel is closed.
        """
        try:
            event = self.channel.send_some(self._queue[0][1])
            if event is None:
                self._pop()
                return
            with contextlib.ExitStack() as held:
                descriptor = held.enter_context(self.channel.descriptor())
                _WRITER.add(_Backlog(self, descriptor, held.pop_all()), event)
                self._drained = True
        except ChannelClosed:
            self._end()
        except (OSError, RuntimeError) as error:  # no more threads or descriptors
            self._give_up(f"cannot be sent later: {error}")

    def flush(self, timeout_s: float) -> bool:
        """Waits until the queue is empty.

        Returns False if the channel has ended or `timeout_s` seconds have passed.
        """
        with self._state:
            self._state.wait_for(lambda: self._ended or not self._queue, timeout_s)
            return not self._ended and not self._queue

    def close(self) -> None:
        """Closes the channel; queued messages are lost."""
        with self._state:
            self._end()
        self.channel.close()

    def send_queued(self) -> int | None:
        """Sends queued messages while the socket takes bytes.

        Called only by the thread of `_Writer`.

        Returns:
            The event to poll for before the next call: POLLIN or POLLOUT. 0: another
            thread is sending on the channel, so call again soon. None: the queue is
            empty, perhaps because the channel has ended.
        """
        while True:
            self._say()
            with self._state:
                if self._ended:
                    self._drop()
                if not self._queue:
                    self._drained = False
                    return None
                posted, unsent = self._queue[0]
            # Without the lock: otherwise `post` would wait for this send.
            try:
                event = self.channel.send_some(unsent)
            except ChannelClosed:
                with self._state:
                    self._end()
                continue
            with self._state:
                if event is None:
                    self._pop()
                elif time.monotonic() > posted + self._limits.deadline_s:
                    self._give_up(f"not taken within {self._limits.deadline_s:g} s")
                elif not self._ended:
                    return event

    def due_in(self) -> float:
        """Returns the seconds until the deadline of the oldest queued message.

        Negative after the deadline; 0 without messages.
        """
        with self._state:
            if not self._queue:
                return 0.0
            return self._queue[0][0] + self._limits.deadline_s - time.monotonic()

    def _pop(self) -> None:
        _, unsent = self._queue.popleft()
        self._bytes -= len(unsent.plain)
        if not self._queue:
            self._state.notify_all()

    def _give_up(self, why: str) -> None:
        self._complaint = (
            f"peer {self.channel.name}: {len(self._queue)} messages ({self._bytes} "
            f"bytes) wait to be sent, {why}; closing the connection. The peer hangs, "
            "or the network between is cut or slow."
        )
        self._end()

    def _say(self) -> None:
        """Logs, once, why this queue has closed the channel.

        The reason is an exceeded limit, or a writer thread that cannot be started. Logs
        nothing if the channel ended for another reason. Called without the lock,
        because logging may hang.
        """
        complaint, self._complaint = self._complaint, ""
        if complaint:
            logger.warning("%s", complaint)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.channel.close()  # also wakes the writer
        if not self._drained:
            self._drop()
        self._state.notify_all()

    def _drop(self) -> None:
        """Empties the queue of a closed channel.

        The queue holds the channel's sending lock while its first message is partly
        sent; if so, releases this lock. Called only by the thread that may send from
        the queue.
        """
        if self._queue:
            self.channel.give_up(self._queue[0][1])
        self._queue.clear()
        self._bytes = 0


@dataclass(frozen=True, eq=False)
class _Backlog:
    """A queue whose messages the sending thread of this process (`_Writer`) sends."""

    outbound: Outbound
    descriptor: int
    held: contextlib.ExitStack
    """Keeps the descriptor open until the queue is empty."""


class _Writer:
    """One thread that sends the queued messages of all channels of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[_Backlog, int]] = []
        self._wake: int | None = None  # an eventfd while the thread runs

    def add(self, backlog: _Backlog, event: int) -> None:
        """Hands a queue to the thread, which sends it once the socket has `event`.

        `event` is POLLIN or POLLOUT, or 0 to try again soon. Starts the thread if it is
        not running.

        Raises:
            OSError: the process has no more descriptors.
            RuntimeError: no thread can be started.
        """
        with self._lock:
            if self._wake is None:
                wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                thread = threading.Thread(
                    target=self._run, args=(wake,), name="outbound", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    os.close(wake)
                    raise
                self._wake = wake
            self._new.append((backlog, event))
            os.eventfd_write(self._wake, 1)

    def _run(self, wake: int) -> None:
        backlogs: dict[int, _Backlog] = {}
        busy: set[int] = set()
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        while self._take_new(backlogs, busy, poller) or backlogs:
            limit = _BUSY_S if busy else 60.0
            late = min(entry.outbound.due_in() for entry in backlogs.values())
            ready = {at for at, _ in poller.poll(1000 * max(min(late, limit), 0.001))}
            if wake in ready:
                os.eventfd_read(wake)
            for at in list(backlogs):
                if at in ready or at in busy or backlogs[at].outbound.due_in() <= 0:
                    self._advance(backlogs, busy, poller, at)

    def _take_new(
        self, backlogs: dict[int, _Backlog], busy: set[int], poller: select.poll
    ) -> bool:
        """Takes over the queues that were added since the last call.

        If there is no queue at all, closes the eventfd that wakes the thread; the
        thread then ends.

        Args:
            backlogs: the thread's queues by socket descriptor; new ones are added.
            busy: descriptors of channels on which another thread sends; extended.
            poller: the new sockets are registered with it.

        Returns:
            Whether any queue was added.
        """
        with self._lock:
            new, self._new = self._new, []
            if not new and not backlogs and self._wake is not None:
                os.close(self._wake)
                self._wake = None
        for backlog, event in new:
            backlogs[backlog.descriptor] = backlog
            poller.register(backlog.descriptor, event)
            if not event:
                busy.add(backlog.descriptor)
        return bool(new)

    def _advance(
        self,
        backlogs: dict[int, _Backlog],
        busy: set[int],
        poller: select.poll,
        at: int,
    ) -> None:
        backlog = backlogs[at]
        try:
            event = backlog.outbound.send_queued()
        except Exception:  # an error of one channel must not stop the other channels
            logger.exception(
                "peer %s: an error while sending; closing the connection",
                backlog.outbound.channel.name,
            )
            backlog.outbound.close()
            event = backlog.outbound.send_queued()
        busy.discard(at)
        if event is None:
            poller.unregister(at)
            del backlogs[at]
            backlog.held.close()
        else:
            poller.modify(at, event)
            if not event:
                busy.add(at)


_WRITER = _Writer()
