"""Brings one slot's slices of a commit into this host's memory, checked.

Own copies that are right stay; the rest is fetched from the peers that the leader
named, all in parallel, and checked again. Knows neither why nor what comes after.
"""

import concurrent.futures
import time
from typing import Any

from dtft.checkpoint.holder import Holder
from dtft.checkpoint.nixl import Nixl
from dtft.checkpoint.transport import Credentials
from dtft.elastic.replication import FetchFailed, FetchOrder, fetch, fetch_into


def restore_into(
    holder: Holder,
    order: dict[str, Any],
    host: str,
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None = None,
) -> dict[str, Any]:
    """Carries out the restore part of a leader's order.

    Args:
        holder: of the slot in the order.
        order: generation, attempt, step, digests, items and transfers.
        host: this host's name.
        credentials: the job's.
        limit_s: deadline of each fetch, in seconds.
        nixl: reads from peers that have NIXL too.

    Returns:
        `own` and `peers` (bytes) and `s` (seconds); or `error`, `host` and `corrupt`.
    """
    begun = time.monotonic()
    try:
        missing = holder.begin_restore(order["step"], order["digests"], order["items"])
        planned = {key for transfer in order["transfers"] for key in transfer["keys"]}
        surprise = [piece.key for piece in missing if piece.key not in planned]
        if surprise:
            text = f"own copy of {surprise[0]} is corrupt"
            raise FetchFailed(host, text, surprise)
        peers = _fetch_all(holder, order, credentials, limit_s, nixl)
    except FetchFailed as error:
        return {"error": str(error), "host": error.host, "corrupt": error.corrupt}
    own = sum(piece.nbytes for piece in holder.own_slices) - peers
    return {"own": own, "peers": peers, "s": time.monotonic() - begun}


def borrow(
    holder: Holder,
    pin: int,
    order: dict[str, Any],
    credentials: Credentials,
    limit_s: float,
) -> None:
    """Completes a pinned step with the slices that this host did not copy.

    Args:
        holder: of this host.
        pin: of the step.
        order: step, epoch, digests and transfers.
        credentials: the job's.
        limit_s: deadline of each fetch, in seconds.

    Raises:
        FetchFailed: a peer has gone, lacks a slice or sent corrupt bytes; no memory is
            free; or the pin has ended meanwhile.
    """
    try:
        memory, guard = holder.complete_pin(pin)
    except (RuntimeError, KeyError) as error:
        raise FetchFailed("this host", str(error)) from error
    by_key = {piece.key: parts for piece, parts in memory.items()}
    try:
        for transfer in order["transfers"]:
            one = FetchOrder(
                step=order["step"],
                epoch=tuple(order["epoch"]),
                transfer=transfer,
                digests=order["digests"],
            )
            fetch_into(by_key, one, credentials, holder.chunk_bytes, limit_s)
        holder.completed(pin, order["digests"])
    except KeyError as error:
        raise FetchFailed("this host", f"the export has ended: {error}") from error
    finally:
        holder.unpin(guard)  # the export may have ended while this was written


def _fetch_all(
    holder: Holder,
    order: dict[str, Any],
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None,
) -> int:
    """Fetches from all peers at once; returns the bytes received."""
    transfers = order["transfers"]
    if not transfers:
        return 0
    with concurrent.futures.ThreadPoolExecutor(len(transfers)) as pool:
        running = [
            pool.submit(
                fetch,
                holder,
                FetchOrder(
                    step=order["step"],
                    epoch=(order["generation"], order["attempt"]),
                    transfer=transfer,
                    digests=order["digests"],
                ),
                credentials,
                limit_s,
                nixl,
            )
            for transfer in transfers
        ]
        return sum(one.result() for one in running)
