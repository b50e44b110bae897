"""Serves this host's copies: receives slices from peers, and answers fetches.

The module `replication` is the sending side. A push (a peer's slices of one step) is
refused if its epoch, (generation, attempt), is not this host's. It counts as a copy
here only once every digest was verified. A fetch is answered from the copies for the
newest assignment of slots, or for a former one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.memory import ReplicaStore
from dtft.checkpoint.state import Parts
from dtft.checkpoint.transport import (
    MAX_DATA_HEADER,
    Channel,
    ChannelClosed,
    Nixl,
    WireError,
    no_payload,
    receive_chunks,
    serve_fetches,
)
from dtft.elastic.transfer.replication import Epoch

NEWEST = -1
"""Value of a fetch's step that asks for the newest copy of each slice, of any step."""
ASKED_S = 10.0
"""Limit in seconds for a peer's request for digests to arrive, and again for the answer
to be sent."""


def cut_out(slices: Sequence[Parts], spans: object) -> list[Parts]:
    """Cuts the requested byte span, (start, stop), out of each slice.

    Raises:
        WireError: `spans`, from a peer's request, is not a list with one (start, stop)
            inside each slice.
    """
    found = list(spans) if isinstance(spans, list | tuple) else []
    if len(found) != len(slices):
        raise WireError("a fetch does not have one span for each key")
    parts = []
    for one, span in zip(slices, found, strict=True):
        pair = list(span) if isinstance(span, list | tuple) else []
        if len(pair) != 2 or any(type(number) is not int for number in pair):
            raise WireError("a fetch's span is not (start, stop)")
        if not 0 <= pair[0] <= pair[1] <= one.nbytes:
            raise WireError(f"a fetch's span {pair} is not inside its slice")
        parts.append(Parts(one.cut(*pair)))
    return parts


def find_copies(
    holders: Sequence[ReplicaStore | None], step: int, keys: Sequence[str]
) -> list[Parts]:
    """Returns the memory of the slices with these keys, each from a holder with a copy.

    Args:
        holders: objects with the copies for one layout and slot each; None is skipped.
            If several have a slice, the last of them is used.
        step: the step of the copies; -1 (`NEWEST`): the newest copy of each slice that
            the used holder has.
        keys: the keys of the slices.

    Raises:
        KeyError: no holder has a copy of a slice at this step.
    """
    here: dict[str, Parts] = {}
    for holder in holders:
        if holder is not None:
            for one in holder.steps() if step == NEWEST else (step,):
                here |= holder.here(one)
    return [here[key] for key in keys]


@dataclass(frozen=True, kw_only=True)
class Inbox:
    """Functions through which the threads that answer peers read this host's state.

    `epoch` returns the (generation, attempt) of this host's assignment. `holder`
    returns the copies for the newest assignment of slots, or None if there are none
    yet, and `former` those for earlier assignments. The threads call these functions
    anew for every push and fetch, because the results change.
    """

    epoch: Callable[[], Epoch]
    holder: Callable[[], ReplicaStore | None]
    held: Callable[[int, int, str], None]
    """Called once for each verified push, with (step, slot of the peer, one digest over
    all its slices)."""
    nixl: Nixl | None = None
    """Lends memory to peers that fetch with NIXL."""
    former: Callable[[], Sequence[ReplicaStore]] = tuple
    """Holders of copies for former assignments of slots, which peers may still need."""


def serve_pushes(channel: Channel, inbox: Inbox) -> None:
    """Receives pushes (a peer's slices, step by step) on a connection until it closes.

    Raises:
        WireError: the peer sent a message that is not a push.
    """
    while True:
        try:
            done = _receive_push(channel, inbox)
        except (ChannelClosed, TimeoutError):
            return
        channel.send({"done": done}, timeout_s=10.0)


@dataclass(frozen=True, kw_only=True)
class _Announced:
    """The validated header of a push, which is a peer's slices of one step.

    `epoch` is the (generation, attempt) of the peer's assignment of slots, and `source`
    the peer's slot. `digests` has the digests of each slice's chunks, joined, and
    `items` the values of the checkpoint that are not arrays.
    """

    epoch: Epoch
    source: int
    step: int
    digests: list[bytes]
    items: dict[str, Any]

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "_Announced":
        """Reads and checks a peer's header.

        Raises:
            WireError: a field is missing or has a wrong type.
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
            raise WireError(f"a push's header is wrong: {sorted(map(str, header))}")
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
        raise WireError("a peer's epoch is not (generation, attempt)")
    return pair[0], pair[1]


def _receive_push(channel: Channel, inbox: Inbox) -> bool:
    """Receives one push: the slices of one step that a peer sends.

    Returns:
        True if the peer need not repeat the push: this host holds the pushed copy, or
        the push is of an older assignment of slots (epoch) than this host's. Else
        False.
    """
    header, _ = channel.receive(86400, no_payload)
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
        inbox.held(step, source, receiving.root)
    return new or holder.has_received(step, source, push.digests)


def serve_fetch(channel: Channel, inbox: Inbox) -> None:
    """Serves a peer's fetch of slices until the peer closes the connection.

    Raises:
        WireError: the peer's request is invalid.
    """

    def find(request: Mapping[str, Any]) -> Sequence[Parts]:
        step, keys = request.get("step"), request.get("keys")
        if type(step) is not int or not isinstance(keys, list):
            raise WireError("a fetch without a step or keys")
        if any(not isinstance(key, str) for key in keys):
            raise WireError("a fetch whose keys are not text")
        if _epoch(request.get("epoch")) < inbox.epoch():
            raise KeyError("the order to fetch it is older than this host's")
        views = find_copies((inbox.holder(), *inbox.former()), step, keys)
        return cut_out(views, request["spans"]) if "spans" in request else views

    serve_fetches(channel, find, inbox.nixl)


def serve_digests(channel: Channel, inbox: Inbox) -> None:
    """Sends the digests of the slices of this host's slot to a spare that prefetches.

    The answer has the newest step with a copy on this host (-1 if there is none), and
    for each slice the digests of its newest copy. Slices without a copy are left out.
    Sends an error instead if this host has no memory for a slot, or if the request's
    epoch, (generation, attempt), is not this host's.

    Raises:
        WireError: the peer's request is invalid.
    """
    request, _ = channel.receive(ASKED_S, no_payload, max_header=MAX_DATA_HEADER)
    holder = inbox.holder()
    answer: dict[str, Any] = {"error": "this host has no copies of the slot"}
    if holder is not None and _epoch(request.get("epoch")) == inbox.epoch():
        own = {piece.key for piece in holder.own_slices}
        steps = holder.steps()
        digests = {
            key: known
            for step in steps
            for key, _, known in holder.copies(step)
            if key in own
        }
        answer = {"step": max(steps, default=-1), "digests": digests}
    channel.send(answer, timeout_s=ASKED_S)
