"""Answers the fetches of `fetch.py`: opens slices, then sends ranges of them.

Sends straight from the memory that `find` gives, one answer at a time, and only what
lies inside. Must not know steps, arenas or who may ask; peers are members of the job,
but what they say is checked as if they were not.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from dtft.checkpoint import wire
from dtft.checkpoint.channel import no_payload
from dtft.checkpoint.nixl import Nixl
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.transport import Channel, ChannelClosed

OPEN_S = 10.0
"""A peer says what it wants within this time."""
IDLE_S = 60.0
"""A connection on which nothing is asked for this long is ended."""
MAX_ANSWER = 256 << 20
"""Largest answer in bytes; chunks must be smaller."""


def serve(
    channel: Channel,
    find: Callable[[dict[str, Any]], Sequence[Parts]],
    nixl: Nixl | None = None,
) -> None:
    """Answers one connection of a peer's `fetch` until the peer ends it.

    Args:
        channel: the connection.
        find: from the peer's request, which is not to be trusted, to the slices' bytes.
        nixl: lends those bytes to a peer that has NIXL too.

    Raises:
        WireError: the peer asks for what it may not.
    """
    request, _ = channel.receive(OPEN_S, no_payload, max_header=wire.MAX_DATA_HEADER)
    try:
        slices = find(request)
    except KeyError as error:
        channel.send({"error": f"not held here: {error}"}, timeout_s=OPEN_S)
        _let_go(channel)
        return
    opened = {"sizes": [parts.nbytes for parts in slices]}
    if nixl is None or request.get("nixl") is not True:
        _answer(channel, slices, opened)
        return
    with nixl.lend(slices) as offer:
        _answer(channel, slices, opened | {"nixl": offer})


def _let_go(channel: Channel) -> None:
    """Reads on until the peer ends the connection.

    It has asked for parts already: ending here with those unread would reset the
    connection, and what it was told could be lost.
    """
    deadline = time.monotonic() + OPEN_S
    with contextlib.suppress(ChannelClosed, TimeoutError):
        while (left := deadline - time.monotonic()) > 0:
            channel.receive(left, no_payload, max_header=wire.MAX_DATA_HEADER)


def _answer(channel: Channel, slices: Sequence[Parts], opened: dict[str, Any]) -> None:
    channel.send(opened, timeout_s=OPEN_S)
    while True:
        try:
            asked, _ = channel.receive(
                IDLE_S, no_payload, max_header=wire.MAX_DATA_HEADER
            )
        except ChannelClosed:
            return
        payload = _cut_out(slices, asked.get("parts"))
        channel.send({}, payload, timeout_s=IDLE_S)


def _cut_out(slices: Sequence[Parts], parts: object) -> list[memoryview]:
    """The bytes that a peer asks for.

    Raises:
        WireError: they are not inside the slices, or too many.
    """
    found: list[memoryview] = []
    size = 0
    for part in parts if isinstance(parts, list) else [None]:
        if (
            not isinstance(part, list)
            or len(part) != 3
            or any(type(number) is not int for number in part)
        ):
            raise wire.WireError("a request's parts are not (slice, start, stop)")
        index, start, stop = part
        inside = 0 <= index < len(slices) and 0 <= start <= stop <= slices[index].nbytes
        size += stop - start
        if not inside or size > MAX_ANSWER:
            raise wire.WireError(f"a request's part {part} is not to be had here")
        found += slices[index].cut(start, stop)
    return found
