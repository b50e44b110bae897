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

from dtft.checkpoint import fetch as fetching
from dtft.checkpoint import wire
from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.nixl import Nixl
from dtft.checkpoint.pace import Pace
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.placement import Push
from dtft.checkpoint.pushing import Outgoing, receive_chunks, send_push
from dtft.checkpoint.ranges import Wanted
from dtft.checkpoint.serving import no_payload, serve
from dtft.checkpoint.transport import Channel, ChannelClosed, Credentials, connect
from dtft.elastic.finding import cut_out, find_copies

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
        self.target = push.target
        self._credentials, self._epoch = credentials, epoch
        self._deadline_s = deadline_s
        self.paced: Callable[[int], None] | None = None
        """Is told all bytes sent and pauses, to have them sent more slowly."""
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._closed = threading.Event()
        self._channel: Channel | None = None
        self._sizes = Chunks.of(push.slices, holder.chunk_bytes).sizes
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of one push, if all of it is sent."""
        return sum(piece.nbytes for piece in self._push.slices)

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
            while not self._closed.is_set() and not self._try(step, deadline):
                if time.monotonic() > deadline:
                    logger.warning("step %d did not reach %s", step, self._address)
                    break
                self._closed.wait(0.05)
        if self._channel is not None:
            self._channel.close()

    def _try(self, step: int, deadline: float) -> bool:
        """Sends one step; False asks for another try."""
        try:
            return self._send(step, deadline)
        except KeyError:
            self._hang_up()
            return True  # the step was dropped: a newer commit made it needless
        except (OSError, ChannelClosed, TimeoutError) as error:
            self._hang_up()
            if not self._closed.is_set():
                logger.info("push of step %d to %s: %s", step, self._address, error)
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


def share_pace(pushers: Sequence[Pusher], limit_s: float) -> Pace:
    """Has pushers that have not begun yet keep to one pace; their deadline is given."""
    pace = Pace(sum(pusher.nbytes for pusher in pushers), limit_s)
    for pusher in pushers:
        pusher.paced = pace.bucket.sent
    return pace


@dataclass(frozen=True, kw_only=True)
class Inbox:
    """What the serving side needs to know of its host, asked at every message."""

    epoch: Callable[[], Epoch]
    holder: Callable[[], Holder | None]
    held: Callable[[int, int], None]
    """Called with (step, source slot) when a push was verified, once for each."""
    nixl: Nixl | None = None
    """Lends memory to peers that fetch with NIXL."""
    former: Callable[[], Sequence[Holder]] = tuple
    """Holders of former formations that peers may still need."""


def serve_pushes(channel: Channel, inbox: Inbox) -> None:
    """Receives pushes on one connection until it closes.

    Raises:
        WireError: the peer sent what is not a push.
    """
    while True:
        try:
            done = _receive_push(channel, inbox)
        except (ChannelClosed, TimeoutError):
            return
        channel.send({"done": done}, timeout_s=10.0)


@dataclass(frozen=True, kw_only=True)
class _Announced:
    """The header of a push; its fields have the right types and nothing else."""

    epoch: Epoch
    source: int
    step: int
    digests: list[bytes]
    items: dict[str, Any]

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "_Announced":
        """From a peer's header.

        Raises:
            WireError: a field is missing or not what it should be.
        """
        digests, items = header.get("digests"), header.get("items")
        step, source = header.get("step"), header.get("source")
        if (
            type(step) is not int
            or step < 0
            or type(source) is not int
            or not isinstance(digests, list)
            or any(not isinstance(one, bytes) for one in digests)
            or not isinstance(items, dict)
        ):
            raise wire.WireError(
                f"a push's header is wrong: {sorted(map(str, header))}"
            )
        return cls(
            epoch=_epoch(header.get("epoch")),
            source=source,
            step=step,
            digests=digests,
            items=items,
        )


def _epoch(value: object) -> Epoch:
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or any(type(number) is not int for number in pair):
        raise wire.WireError("a peer's epoch is not (generation, attempt)")
    return pair[0], pair[1]


def _receive_push(channel: Channel, inbox: Inbox) -> bool:
    """Receives one push; whether the peer is done with it, well or for ever."""
    header, _ = channel.receive(86400, no_payload, max_header=wire.MAX_DATA_HEADER)
    push = _Announced.read(header)
    holder = inbox.holder()
    if holder is None or push.epoch != inbox.epoch():
        return push.epoch < inbox.epoch()  # stale: not to be repeated
    step, source = push.step, push.source
    if holder.has_received(step, source, push.digests):
        return True
    receiving = holder.begin_receive(step, source, push.digests)
    if receiving is None:
        return False
    try:
        if not receiving.complete:
            receive_chunks(channel, receiving)
        current = push.epoch == inbox.epoch()
        new = current and holder.received(step, source, receiving, push.items)
    finally:
        holder.end_receive(step, source, receiving)
    if new:
        inbox.held(step, source)
    return new or holder.has_received(step, source, push.digests)


def serve_fetch(channel: Channel, inbox: Inbox) -> None:
    """Answers one connection of a peer that fetches slices of a step.

    Raises:
        WireError: the peer asks for what it may not.
    """

    def find(request: Mapping[str, Any]) -> Sequence[Parts]:
        step, keys = request.get("step"), request.get("keys")
        if type(step) is not int or not isinstance(keys, list):
            raise wire.WireError("a fetch without a step or keys")
        if any(not isinstance(key, str) for key in keys):
            raise wire.WireError("a fetch whose keys are not text")
        if _epoch(request.get("epoch")) < inbox.epoch():
            raise KeyError("the order to fetch it is older than this host's")
        views = find_copies((inbox.holder(), *inbox.former()), step, keys)
        return cut_out(views, request["spans"]) if "spans" in request else views

    serve(channel, find, inbox.nixl)


class FetchFailed(Exception):
    """Slices could not be had from a peer; says which, from whom and why."""

    def __init__(self, host: str, reason: str, corrupt: Sequence[str] = ()) -> None:
        """Keeps what the leader needs to plan anew."""
        super().__init__(f"from {host}: {reason}")
        self.host, self.corrupt = host, tuple(corrupt)


@dataclass(frozen=True, kw_only=True)
class FetchOrder:
    """One fetch, as the leader ordered it."""

    step: int
    epoch: Epoch
    """Of the order; peers that obey a newer one refuse."""
    transfer: Mapping[str, Any]
    """Host and address of the peer, and the keys of the slices."""
    digests: Mapping[str, bytes]
    """Digests by key, from the commit."""


def fetch(
    holder: Holder,
    order: FetchOrder,
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None = None,
) -> int:
    """Fetches own slices from one peer straight into the arena and checks them.

    Returns:
        Bytes of the slices that are there now.

    Raises:
        FetchFailed: the peer has gone, lacks a slice, or sent corrupt bytes.
    """
    pieces = {piece.key: piece for piece in holder.own_slices}
    keys = order.transfer["keys"]
    memory = {key: holder.own_parts(order.step, pieces[key]) for key in keys}
    fetched = fetch_into(memory, order, credentials, holder.chunk_bytes, limit_s, nixl)
    holder.restored(order.step, {key: order.digests[key] for key in keys})
    return fetched


def fetch_into(
    memory: Mapping[str, Parts],
    order: FetchOrder,
    credentials: Credentials,
    chunk_bytes: int,
    limit_s: float,
    nixl: Nixl | None = None,
) -> int:
    """Fetches slices from one peer into memory, by key, and checks them.

    Returns:
        Bytes of the slices that are there now.

    Raises:
        FetchFailed: the peer has gone, lacks a slice, or sent corrupt bytes.
    """
    host = order.transfer["host"]
    wanted = [
        Wanted(key=key, memory=memory[key], digests=order.digests[key])
        for key in order.transfer["keys"]
    ]
    try:
        fetched = fetching.fetch(
            order.transfer["address"],
            credentials,
            {"op": "fetch"},
            {"step": order.step, "epoch": order.epoch},
            wanted,
            chunk_bytes=chunk_bytes,
            limit_s=limit_s,
            nixl=nixl,
        )
    except fetching.FetchError as error:
        corrupt = [f"{host} step {order.step}: {key}" for key in error.corrupt]
        raise FetchFailed(host, str(error), corrupt) from error
    if fetched.cuts:
        logger.info("fetch from %s went on after %d cuts", host, fetched.cuts)
    return fetched.nbytes
