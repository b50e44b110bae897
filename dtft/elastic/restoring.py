"""Brings one slot's slices of a commit into this host's memory, checked.

The memory is got from the host's `Copies`. Own copies that are right stay; the rest is
fetched from the peers that the leader named, all in parallel, and checked again. Knows
neither why nor what comes after.
"""

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from dtft.checkpoint import digest
from dtft.checkpoint.fetch import streams_each
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.nixl import Nixl
from dtft.checkpoint.slices import Layout, Slice
from dtft.checkpoint.transport import Credentials
from dtft.elastic.assembling import assemble
from dtft.elastic.config import AgentConfig
from dtft.elastic.copies import Copies
from dtft.elastic.replication import FetchFailed, FetchOrder, fetch, fetch_into


def restore_copies(
    copies: Copies,
    order: dict[str, Any],
    config: AgentConfig,
    credentials: Credentials,
    nixl: Nixl | None = None,
) -> dict[str, Any]:
    """Gets memory for the slot of a leader's order and restores into it.

    Returns:
        As `restore_into`; or `fatal`, why there is no such memory.
    """
    layout, step = Layout.from_json(order["layout"]), order["step"]
    try:
        epoch = order["generation"], order["attempt"]
        holder = copies.hold(
            layout, order["slot"], order["domains"], keep=step, epoch=epoch
        )
        return restore_into(
            holder,
            order,
            config.host,
            credentials,
            config.timeouts.restore,
            nixl,
            former=copies.former,
        )
    except OSError as error:
        return {"fatal": str(error)}


def restore_into(
    holder: Holder,
    order: dict[str, Any],
    host: str,
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None = None,
    former: Sequence[Holder] = (),
) -> dict[str, Any]:
    """Carries out the restore part of a leader's order.

    Args:
        holder: of the slot in the order.
        order: generation, attempt, step, digests, items and transfers; regions
            instead of transfers where slices are not those that were committed; read,
            whether own copies are read now or when they are loaded.
        host: this host's name.
        credentials: the job's.
        limit_s: deadline of each fetch, in seconds.
        nixl: reads from peers that have NIXL too.
        former: this host's holders of former formations.

    Returns:
        `own` and `peers` (bytes) and `s` (seconds), in a formation of another size
        also `restored` (slice key to the digest of what is here now, read again); or
        `error`, `host` and `corrupt`.
    """
    begun = time.monotonic()
    try:
        if order.get("regions"):
            args = holder, order, host, credentials, limit_s, former
            return _outcome(holder, order, assemble(*args), begun)
        told = order["step"], order["digests"], order["items"], order["read"]
        missing = holder.begin_restore(*told)
        missing = _adopt(holder, order, missing, former)
        planned = {key for transfer in order["transfers"] for key in transfer["keys"]}
        surprise = [piece.key for piece in missing if piece.key not in planned]
        if surprise:
            text = f"own copy of {surprise[0]} is corrupt"
            raise FetchFailed(host, text, surprise)
        peers = _fetch_all(holder, order, credentials, limit_s, nixl)
    except FetchFailed as error:
        return {"error": str(error), "host": error.host, "corrupt": error.corrupt}
    return _outcome(holder, order, peers, begun)


def _outcome(
    holder: Holder, order: dict[str, Any], peers: int, begun: float
) -> dict[str, Any]:
    own = max(0, sum(piece.nbytes for piece in holder.own_slices) - peers)
    outcome = {"own": own, "peers": peers, "s": time.monotonic() - begun}
    if order.get("resized"):
        outcome["restored"] = _read_again(holder, order["step"])
    return outcome


def _adopt(
    holder: Holder,
    order: dict[str, Any],
    missing: Sequence[Slice],
    former: Sequence[Holder],
) -> list[Slice]:
    """Copies what a former holder of this host has; returns what is still missing."""
    step, left = order["step"], list(missing)
    for old in former:
        here = {key: view for key, view, _ in old.copies(step)}
        for piece in [it for it in left if it.key in here]:
            target, good = holder.own_parts(step, piece), order["digests"][piece.key]
            target.fill(here[piece.key])
            if digest.is_right(target, good, holder.chunk_bytes):
                holder.restored(step, {piece.key: good})
                left.remove(piece)
    return left


def _read_again(holder: Holder, step: int) -> dict[str, bytes]:
    """Slice key to the digest of the bytes that are in memory now."""
    return {
        piece.key: digest.digests_of_parts(
            holder.own_parts(step, piece).views, holder.chunk_bytes
        )
        for piece in holder.own_slices
    }


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
    streams = streams_each(len(transfers))
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
                streams,
            )
            for transfer in transfers
        ]
        return sum(one.result() for one in running)
