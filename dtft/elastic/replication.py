"""Moves slices between the memories of hosts: pushes of every step, fetches to restore.

Owns the peer connections of one host. What is pushed where comes from the placement,
what is fetched from whom from the leader's plan; this module must not decide either.
Bytes count only once their digests have been checked by the receiver.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint import digest
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.placement import Push
from dtft.checkpoint.transport import Channel, ChannelClosed, Credentials, connect

logger = logging.getLogger(__name__)

Epoch = tuple[int, int]


class Pusher:
    """Sends one slot's slices to one peer, step after step, until closed."""

    def __init__(
        self,
        holder: Holder,
        push: Push,
        address: str,
        credentials: Credentials,
        epoch: Epoch,
        deadline_s: float,
    ) -> None:
        """Starts the thread; the connection is made with the first step."""
        self._holder, self._push, self._address = holder, push, address
        self._credentials, self._epoch = credentials, epoch
        self._deadline_s = deadline_s
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._closed = threading.Event()
        self._channel: Channel | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def offer(self, step: int) -> None:
        """Queues a staged step."""
        self._steps.put(step)

    def close(self) -> None:
        """Stops; a send under way is cut."""
        self._closed.set()
        self._steps.put(None)
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            deadline = time.monotonic() + self._deadline_s
            while not self._closed.is_set() and not self._try(step):
                if time.monotonic() > deadline:
                    logger.warning("step %d did not reach %s", step, self._address)
                    break
                self._closed.wait(0.05)
        if self._channel is not None:
            self._channel.close()

    def _try(self, step: int) -> bool:
        """Sends one step; False asks for another try."""
        try:
            views = self._holder.own_views(step, self._push)
            digests = self._holder.own_digests(step, self._push.slices)
            items = self._holder.items(step)
        except KeyError:
            return True  # the step was dropped: a newer commit made it needless
        try:
            if self._channel is None:
                self._channel = connect(
                    self._address, self._credentials, {"op": "push"}, 5.0
                )
            header = {
                "epoch": self._epoch,
                "source": self._push.source,
                "step": step,
                "digests": digests,
                "items": items,
            }
            self._channel.send(header, views, timeout_s=self._deadline_s)
            reply, _ = self._channel.receive(timeout_s=self._deadline_s)
            return bool(reply["done"])
        except (OSError, ChannelClosed, TimeoutError) as error:
            if self._channel is not None:
                self._channel.close()
            self._channel = None
            if not self._closed.is_set():
                logger.info("push of step %d to %s: %s", step, self._address, error)
            return False


@dataclass(frozen=True, kw_only=True)
class Inbox:
    """What the serving side needs to know of its host, asked at every message."""

    epoch: Callable[[], Epoch]
    holder: Callable[[], Holder | None]
    held: Callable[[int, int], None]
    """Called with (step, source slot) when a push was verified."""


def serve_pushes(channel: Channel, inbox: Inbox) -> None:
    """Receives pushes on one connection until it closes."""
    while True:
        holder: Holder | None = None

        def sink(header: dict[str, Any], size: int) -> memoryview | None:
            nonlocal holder
            holder = _accepting(header, size, inbox)
            if holder is None:
                return None
            return holder.hosted_view(header["step"], header["source"])

        try:
            header, _ = channel.receive(timeout_s=86400, sink=sink)
        except (ChannelClosed, TimeoutError):
            return
        done = tuple(header["epoch"]) < inbox.epoch()  # stale: not to be repeated
        if holder is not None:
            done = holder.received(
                header["step"], header["source"], header["digests"], header["items"]
            )
            if done:
                inbox.held(header["step"], header["source"])
        channel.send({"done": done}, timeout_s=10.0)


def _accepting(header: Mapping[str, Any], size: int, inbox: Inbox) -> Holder | None:
    """The holder that takes this push, or None to refuse it."""
    holder = inbox.holder()
    if holder is None or tuple(header["epoch"]) != inbox.epoch():
        return None
    push = holder.incoming.get(header["source"])
    if push is None or size != sum(piece.nbytes for piece in push.slices):
        return None
    return holder


def serve_fetch(channel: Channel, inbox: Inbox) -> None:
    """Answers one peer's request for slices of a step."""
    request, _ = channel.receive(timeout_s=10.0)
    holder = inbox.holder()
    try:
        if holder is None:
            raise KeyError("this host holds nothing")
        views = holder.find(request["step"], request["keys"])
    except KeyError as error:
        channel.send({"error": f"not held here: {error}"}, timeout_s=10.0)
        return
    for key, view in zip(request["keys"], views, strict=True):
        channel.send({"key": key}, [view], timeout_s=60.0)
    channel.receive(timeout_s=60.0)  # the receiver has everything


class FetchFailed(Exception):
    """Slices could not be had from a peer; says which, from whom and why."""

    def __init__(self, host: str, reason: str, corrupt: Sequence[str] = ()) -> None:
        """Keeps what the leader needs to plan anew."""
        super().__init__(f"from {host}: {reason}")
        self.host, self.corrupt = host, tuple(corrupt)


def fetch(
    holder: Holder,
    step: int,
    transfer: Mapping[str, Any],
    digests: Mapping[str, bytes],
    credentials: Credentials,
    deadline_s: float,
) -> int:
    """Fetches own slices from one peer straight into the arena and checks them.

    Returns:
        Bytes received.

    Raises:
        FetchFailed: the peer has gone, lacks a slice, or sent corrupt bytes.
    """
    pieces = {piece.key: piece for piece in holder.own_slices}
    host, keys = transfer["host"], list(transfer["keys"])
    received, corrupt = 0, []
    try:
        channel = connect(transfer["address"], credentials, {"op": "fetch"}, 5.0)
        try:
            channel.send({"step": step, "keys": keys}, timeout_s=deadline_s)
            for key in keys:
                view = holder.own_slice_view(step, pieces[key])
                header, payload = channel.receive(
                    timeout_s=deadline_s,
                    sink=lambda _, size, v=view: v if size == len(v) else None,
                )
                if "error" in header:
                    raise FetchFailed(host, header["error"])
                received += len(payload)
                if digest.verify(view, digests[key], holder.chunk_bytes):
                    corrupt.append(f"{host} step {step}: {key}")
            channel.send({"done": True}, timeout_s=10.0)
        finally:
            channel.close()
    except (OSError, ChannelClosed, TimeoutError) as error:
        raise FetchFailed(host, str(error)) from error
    if corrupt:
        raise FetchFailed(host, f"{len(corrupt)} corrupt slices", corrupt)
    return received
