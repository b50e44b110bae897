"""Carries out a restore plan on one host: the one executor of all restores.

Fills the memory of a slot's slices as the leader has ordered. Correct copies that the
host has already are used. The other slices are fetched from the peers in parallel. If
the state is divided among the slots as in the commit, whole slices are fetched, by
their keys. Otherwise pieces of committed slices (regions) are fetched, from which the
host assembles its slices.

Wrong bytes are not restored: the host fetches whole chunks of committed slices, and
compares their digests with the commit's. Copies that were in the slot's memory before
may be left to the trainer to verify, if the order says so. A commit has no digest of an
assembled slice, so the leader checks that all owners of such a slice report the same
digest.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.checkpoint.memory import ReplicaStore, Restoring
from dtft.checkpoint.state import (
    Layout,
    Parts,
    Region,
    Slice,
    WantedSlice,
    copying_threads,
    digests_in,
    digests_of_parts,
    is_digest_right,
    move_regions,
    span_of,
    verify_digests,
)
from dtft.checkpoint.transport import (
    STREAMS,
    Credentials,
    FetchError,
    Nixl,
    fetch_slices,
    streams_each,
)
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer.copies import Copies
from dtft.elastic.transfer.prefetch import PrefetchedSlices
from dtft.elastic.transfer.replica_server import find_copies
from dtft.elastic.transfer.replication import Epoch

logger = logging.getLogger(__name__)


class FetchFailed(Exception):
    """Slices could not be fetched from a peer, or be taken from this host's copies.

    The message names the host and the reason.
    """

    def __init__(
        self,
        host: str,
        reason: str,
        corrupt: Sequence[str] = (),
        unreleased: bool = False,
    ) -> None:
        """Stores the host and the corrupt copies, for the report to the leader.

        Args:
            host: the host that could not supply a slice.
            reason: the reason, for the message.
            corrupt: the corrupt copies, each as "HOST step STEP: SLICE KEY".
            unreleased: whether NIXL may still write to the slices' memory later.
        """
        super().__init__(f"from {host}: {reason}")
        self.host, self.corrupt = host, tuple(corrupt)
        self.unreleased = unreleased


@dataclass(frozen=True, kw_only=True)
class FetchOrder:
    """One fetch from one host, as the leader has ordered it."""

    step: int
    epoch: Epoch
    """(generation, attempt) of the order; peers that obey a newer order refuse the
    fetch."""
    transfer: Mapping[str, Any]
    """Fields `host` and `address` of the peer; `keys` of whole slices, or `regions`, or
    both."""
    digests: Mapping[str, bytes]
    """Maps the key of each committed slice to the digests of its chunks."""

    def regions(self, memory: Mapping[str, Parts]) -> dict[Slice, list[Region]]:
        """Maps each committed slice to the regions that are copied out of it.

        A region is a piece of a committed slice that becomes a piece of a new slice, a
        slice under the current layout. `memory` maps the keys of new slices to the
        memory to fill; regions of other new slices are left out.
        """
        found: dict[Slice, list[Region]] = {}
        for entry in self.transfer.get("regions", ()):
            region = Region(**{name: _slice(entry[name]) for name in entry})
            if region.new.key in memory:
                found.setdefault(region.old, []).append(region)
        return found


def _slice(entry: Mapping[str, Any]) -> Slice:
    return Slice(
        path=entry["path"],
        start=tuple(entry["start"]),
        stop=tuple(entry["stop"]),
        dtype=entry["dtype"],
    )


# ------------------------------------------------------------- a slot's own slices


def restore_copies(
    copies: Copies,
    order: dict[str, Any],
    config: AgentConfig,
    credentials: Credentials,
    nixl: Nixl | None = None,
) -> dict[str, Any]:
    """Allocates memory for the slot in a leader's order and restores its slices.

    Args:
        copies: this host's copies, among them the memory of the slot.
        order: the leader's order: what `restore_into` needs, and the slot, layout and
            failure domains for which memory is allocated.
        config: settings of this host's agent.
        credentials: the job's credentials.
        nixl: reads from peers that have NIXL too; None: without NIXL.

    Returns:
        The result of `restore_into`: bytes, seconds and digests, or an `error`. If the
        arena could not be allocated, or the host lost this slot before that, only
        `fatal`: the reason in words.
    """
    layout, step = Layout.from_json(order["layout"]), order["step"]
    try:
        epoch = order["generation"], order["attempt"]
        holder = copies.hold(
            *(layout, order["slot"], order["domains"]),
            keep=step,
            epoch=epoch,
            may_free=order.get("may_free", False),
        )
        return restore_into(
            holder,
            order,
            config.host,
            credentials,
            config.timeouts.restore,
            nixl,
            former=copies.former,
            prefetched=copies.prefetched,
            given_up=lambda: copies.is_over(epoch),
        )
    except OSError as error:
        return {"fatal": str(error)}


def restore_into(
    holder: ReplicaStore,
    order: dict[str, Any],
    host: str,
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None = None,
    former: Sequence[ReplicaStore] = (),
    prefetched: PrefetchedSlices | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Restores the slices of a slot as a leader's order says.

    A newer order may drop or replace the step in `holder` during this restore. The
    restore then still writes to the memory that it has taken. No other step is given
    this memory before the restore has ended.

    Args:
        holder: this host's copies for the slot in the order; its memory is filled.
        order: the leader's order: `generation` and `attempt` (its number), `step`,
            `digests` (key of each committed slice to its digests), `items` (JSON values
            of the checkpoint), `transfers` (whole slices to fetch) and `regions`
            (pieces of slices to copy or fetch). `read` says whether this host's copies
            are read and verified now; otherwise the trainer verifies them when it loads
            them.
        host: this host's name.
        credentials: the job's credentials.
        limit_s: deadline of each fetch, in seconds.
        nixl: reads from peers that have NIXL too; None: without NIXL.
        former: this host's copies for former assignments of slots.
        prefetched: slices that this host has fetched ahead.
        given_up: returns whether a newer order has come; the fetches then end early.

    Returns:
        `peers` (bytes fetched from peers), `own` (the other bytes of the slot's slices)
        and `s` (seconds). If `order["resized"]` is True (the layout is not the
        commit's), also `restored`: slice key to digests, computed from memory after the
        restore. After a failure only `error`, `host` (the host that could not supply a
        slice) and `corrupt` (a text for each corrupt copy).
    """
    begun = time.monotonic()
    told = order["step"], order["digests"], order["items"], order["read"]
    try:
        restoring = holder.begin_restore(*told)
    except RuntimeError as error:  # no free buffer
        return {"error": str(error), "host": host, "corrupt": ()}
    with restoring:
        try:
            peers = _restore(
                *(restoring, order, host, credentials, limit_s),
                *(nixl, former, prefetched, given_up),
            )
        except FetchFailed as error:
            if error.unreleased:
                restoring.keep_memory()
            return {"error": str(error), "host": error.host, "corrupt": error.corrupt}
        own = max(0, sum(piece.nbytes for piece in holder.own_slices) - peers)
        outcome = {"own": own, "peers": peers, "s": time.monotonic() - begun}
        if order.get("resized"):
            outcome["restored"] = {
                piece.key: _digests_here(restoring, piece)
                for piece in holder.own_slices
            }
    return outcome


def _restore(
    restoring: Restoring,
    order: dict[str, Any],
    host: str,
    credentials: Credentials,
    limit_s: float,
    nixl: Nixl | None,
    former: Sequence[ReplicaStore],
    prefetched: PrefetchedSlices | None,
    given_up: Callable[[], bool],
) -> int:
    """Fills and verifies the missing slices of a restore that has begun.

    `restoring` is this restore; it has the memory of the missing slices. The other
    arguments are those of `restore_into`. Returns the number of bytes fetched from
    peers.

    Raises:
        FetchFailed: a fetch failed, a copy on this host is corrupt, or a slice was
            assembled with other digests than the commit's.
    """
    digests = order["digests"]
    missing = _adopt(restoring, order, former, prefetched)
    planned = _planned(order, host)
    surprise = [piece.key for piece in missing if piece.key not in planned]
    if surprise:
        corrupt = [f"{host} step {order['step']}: {key}" for key in surprise]
        raise FetchFailed(host, f"own copy of {surprise[0]} is corrupt", corrupt)
    left = {piece.key: piece for piece in missing}

    def fetched(keys: Sequence[str]) -> None:
        restoring.restored({key: digests[key] for key in keys})
        for key in keys:
            left.pop(key)

    peers = bring(
        {piece: restoring.parts(piece) for piece in missing},
        order,
        credentials,
        limit_s,
        restoring.chunk_bytes,
        host=host,
        holders=former,
        nixl=nixl,
        fetched=fetched,
        given_up=given_up,
    )
    assembled = {key: _digests_here(restoring, piece) for key, piece in left.items()}
    for key, value in assembled.items():
        if value != digests.get(key, value):
            raise FetchFailed(host, f"{key} was not assembled right")
    restoring.restored(assembled)
    return peers


def _planned(order: Mapping[str, Any], host: str) -> set[str]:
    """Returns the keys of the slices that an order fetches or assembles on `host`.

    `host` is the name of this host. A slice that the order takes unchanged from this
    host's copy is left out.
    """
    planned = {key for transfer in order["transfers"] for key in transfer["keys"]}
    for source in order.get("regions", ()):
        for entry in source["regions"]:
            old, new = _slice(entry["old"]), _slice(entry["new"])
            if source["host"] != host or old != new:  # else an own copy is expected
                planned.add(new.key)
    return planned


def _adopt(
    restoring: Restoring,
    order: dict[str, Any],
    former: Sequence[ReplicaStore],
    prefetched: PrefetchedSlices | None,
) -> list[Slice]:
    """Fills missing slices from copies that this host already has.

    These are its copies for former assignments of slots (`former`) and prefetched
    slices.

    A slice counts as filled only if the digests of the copied bytes are the commit's.

    Returns:
        The slices that are still missing.
    """
    step, missing = order["step"], restoring.missing
    here = [{key: it for key, it, _ in old.copies(step)} for old in former]
    sources: dict[Slice, list[Parts]] = {}
    for piece in missing:
        good = order["digests"].get(piece.key)
        if good is None:
            continue  # not a slice of the commit
        found = [one[piece.key] for one in here if piece.key in one]
        ahead = prefetched.find(piece.key, good) if prefetched is not None else None
        found += [Parts([ahead])] if ahead is not None else []
        if found:
            sources[piece] = found

    def adopt(piece: Slice) -> bool:
        good, target = order["digests"][piece.key], restoring.parts(piece)
        for source in sources[piece]:
            target.fill(source)
            if is_digest_right(target, good, restoring.chunk_bytes):
                restoring.restored({piece.key: good})
                return True
        return False

    threads = copying_threads(sum(piece.nbytes for piece in sources))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        adopted = dict(zip(sources, pool.map(adopt, sources), strict=True))
    return [piece for piece in missing if not adopted.get(piece)]


def _digests_here(restoring: Restoring, piece: Slice) -> bytes:
    """Computes the digests of a slice's chunks from the bytes in this host's memory."""
    return digests_of_parts(restoring.parts(piece).views, restoring.chunk_bytes)


# ------------------------------------------------------------------------- exports


def borrow(
    holder: ReplicaStore,
    pin: int,
    order: dict[str, Any],
    credentials: Credentials,
    limit_s: float,
) -> None:
    """Fetches and verifies those slices of an exported step that this host lacks.

    The fetched slices are put into this host's memory, from where the exporter writes
    them to storage.

    Args:
        holder: this host's copies.
        pin: number of the pin (a reservation that `ReplicaStore.pin` makes), which
            keeps the step's buffers in memory until the export has ended.
        order: the leader's order: `step`, `epoch` ((generation, attempt) of the
            assignment of slots), `digests` (slice key to digests) and `transfers`
            (for each peer, its address and the keys of the slices to fetch).
        credentials: the job's credentials.
        limit_s: deadline of each fetch, in seconds.

    Raises:
        FetchFailed: a peer has gone, lacks a slice or sent corrupt bytes; no memory is
            free; or the pin has ended meanwhile.
    """
    try:
        memory, guard = holder.complete_pin(pin)
    except (RuntimeError, KeyError) as error:
        raise FetchFailed("this host", str(error)) from error
    try:
        bring(memory, order, credentials, limit_s, holder.chunk_bytes)
        holder.completed(pin, order["digests"])
    except KeyError as error:
        raise FetchFailed("this host", f"the export has ended: {error}") from error
    finally:
        holder.unpin(guard)  # `guard` kept the memory even if the export has ended


# -------------------------------------------------------------------- any memory


def bring(
    new: Mapping[Slice, Parts],
    order: Mapping[str, Any],
    credentials: Credentials,
    limit_s: float,
    chunk_bytes: int,
    *,
    host: str = "",
    holders: Sequence[ReplicaStore] = (),
    nixl: Nixl | None = None,
    fetched: Callable[[Sequence[str]], None] = lambda keys: None,
    given_up: Callable[[], bool] = lambda: False,
) -> int:
    """Fills the memory of slices as an order says; verifies all bytes that are read.

    Args:
        new: maps each slice to its memory; other slices of the order are not filled.
        order: `step`; `digests` (key of each committed slice to its digests);
            `transfers` (whole slices to fetch) and `regions` (pieces of committed
            slices to copy or fetch), for each host; and the number of the order, as
            `epoch` or as `generation` and `attempt`, which peers get with each request.
        credentials: the job's credentials.
        limit_s: deadline of each fetch, in seconds.
        chunk_bytes: bytes of a chunk, which has one digest.
        host: this host's name.
        holders: this host's copies, which may include committed slices.
        nixl: reads from peers that have NIXL too; None: without NIXL.
        fetched: called, by one thread at a time, with the keys of the whole slices that
            one peer has sent.
        given_up: returns whether the bytes are no longer needed; the fetches then end
            early.

    Returns:
        Number of bytes fetched from peers. Whole chunks are fetched, so bytes outside
        of the regions count, too.

    Raises:
        FetchFailed: a peer has gone or has not answered in time, or a peer or this host
            lacks a slice or has corrupt bytes of it.
    """
    memory = {piece.key: parts for piece, parts in new.items()}
    sources = [
        FetchOrder(
            step=order["step"],
            epoch=tuple(order.get("epoch") or (order["generation"], order["attempt"])),
            transfer=transfer,
            digests=order["digests"],
        )
        for transfer in (*order.get("transfers", ()), *order.get("regions", ()))
    ]
    peers = [it for it in sources if it.transfer["host"] != host and _asks(it, memory)]
    flat = _flat(sources, memory)
    for source in sources:
        if source.transfer["host"] == host:
            _take_own(flat, source, holders, chunk_bytes)
    nbytes = 0
    if peers:
        streams = streams_each(len(peers))
        rest = credentials, chunk_bytes, limit_s, nixl, streams, given_up
        failed: FetchFailed | None = None
        with concurrent.futures.ThreadPoolExecutor(len(peers)) as pool:
            running = {pool.submit(fetch_into, flat, it, *rest): it for it in peers}
            for one in concurrent.futures.as_completed(running):
                try:
                    nbytes += one.result()
                except FetchFailed as error:
                    if failed is None or error.unreleased:
                        failed = error
                else:
                    fetched(_whole(running[one], memory))
        if failed is not None:
            raise failed
    for key, parts in flat.items():
        if parts is not memory[key]:
            memory[key].fill(parts)
    return nbytes


def _whole(order: FetchOrder, memory: Mapping[str, Parts]) -> list[str]:
    """Returns the keys of those slices in `memory` that an order fetches whole.

    A slice is fetched whole if its key is in the order. A committed slice is also
    fetched whole if the order has one region of it only, and this region is all of the
    committed slice and all of a slice in `memory`.
    """
    keys = [key for key in order.transfer.get("keys", ()) if key in memory]
    return keys + [old.key for old, them in order.regions(memory).items() if _one(them)]


def _one(regions: Sequence[Region]) -> bool:
    return len(regions) == 1 and regions[0].whole


def _asks(order: FetchOrder, memory: Mapping[str, Parts]) -> bool:
    """Whether an order fetches anything into `memory`: a whole slice or a region."""
    return bool(_whole(order, memory) or order.regions(memory))


def _flat(
    orders: Sequence[FetchOrder], memory: Mapping[str, Parts]
) -> dict[str, Parts]:
    """Returns a map like `memory`, with contiguous memory for assembled slices.

    `memory` maps the key of each slice to its memory. For a slice that is assembled
    from regions, and whose memory consists of several buffers, the returned map has one
    new buffer. The caller copies this buffer to the slice's memory at the end.
    """
    flat = dict(memory)
    for order in orders:
        for regions in order.regions(memory).values():
            for key in {it.new.key for it in regions if not _one(regions)}:
                if len(flat[key].views) > 1:
                    flat[key] = Parts([memoryview(bytearray(len(flat[key])))])
    return flat


def _take_own(
    memory: Mapping[str, Parts],
    order: FetchOrder,
    holders: Sequence[ReplicaStore],
    chunk: int,
) -> None:
    """Copies an order's regions out of this host's own copies, after verifying them.

    Args:
        memory: key of each new slice to the memory to fill.
        order: the regions, and the committed slices to which they belong.
        holders: this host's copies.
        chunk: bytes of a chunk, which has one digest.

    Raises:
        FetchFailed: a copy is missing or corrupt.
    """
    step, host = order.step, order.transfer["host"]
    for old, regions in order.regions(memory).items():
        try:
            (found,) = find_copies(holders, step, [old.key])
        except KeyError:
            raise FetchFailed(host, f"it has no copy of {old.key} any more") from None
        view, span = found.whole(), span_of(regions, chunk)
        expected = digests_in(order.digests[old.key], span, chunk)
        if verify_digests(view[slice(*span)], expected, chunk):
            corrupt = [f"{host} step {step}: {old.key}"]
            raise FetchFailed(host, f"own copy of {old.key} is corrupt", corrupt)
        if _one(regions):
            memory[old.key].fill(found)
            continue
        for region in regions:
            move_regions(region, view, memory[region.new.key].views[0])


def fetch_into(
    memory: Mapping[str, Parts],
    order: FetchOrder,
    credentials: Credentials,
    chunk_bytes: int,
    limit_s: float,
    nixl: Nixl | None = None,
    streams: int = STREAMS,
    given_up: Callable[[], bool] = lambda: False,
) -> int:
    """Fetches an order's slices and regions from one peer; verifies the bytes.

    Args:
        memory: key of each slice to the memory to fill, which is contiguous for a slice
            made of regions. Other slices of the order are not fetched.
        order: the slices and regions, and the peer.
        credentials: the job's credentials.
        chunk_bytes: bytes of a chunk, which has one digest.
        limit_s: deadline in seconds.
        nixl: reads whole slices from peers that have NIXL too.
        streams: largest number of connections at a time.
        given_up: returns whether the bytes are no longer needed; the fetch then ends
            early.

    Returns:
        Number of bytes fetched and verified. Whole chunks are fetched, so bytes outside
        of the regions count, too.

    Raises:
        FetchFailed: the peer has gone, lacks a slice or sent corrupt bytes, or
            `limit_s` has passed.
    """
    wanted = [
        WantedSlice(key=key, memory=memory[key], digests=order.digests[key])
        for key in _whole(order, memory)
    ]
    spans = [(0, one.memory.nbytes) for one in wanted]
    moves: list[tuple[Region, memoryview]] = []
    for old, regions in order.regions(memory).items():
        if _one(regions):
            continue
        span = span_of(regions, chunk_bytes)
        # As large as the old slice, but pages that are never written take no memory.
        whole = np.empty(old.nbytes, np.uint8).data
        moves += [(region, whole) for region in regions]
        digests = digests_in(order.digests[old.key], span, chunk_bytes)
        view = Parts([whole[slice(*span)]])
        wanted.append(WantedSlice(key=old.key, memory=view, digests=digests))
        spans.append(span)
    asked = {"step": order.step, "epoch": order.epoch}
    fetched = _fetch(
        order,
        wanted,
        asked | {"spans": spans} if moves else asked,
        credentials,
        chunk_bytes=chunk_bytes,
        limit_s=limit_s,
        streams=streams,
        nixl=None if moves else nixl,
        given_up=given_up,
    )
    for region, whole in moves:
        move_regions(region, whole, memory[region.new.key].views[0])
    return fetched


def _fetch(
    order: FetchOrder,
    wanted: Sequence[WantedSlice],
    asked: dict[str, Any],
    credentials: Credentials,
    **limits: Any,
) -> int:
    host = order.transfer["host"]
    try:
        fetched = fetch_slices(
            *(order.transfer["address"], credentials, {"op": "fetch"}, asked, wanted),
            **limits,
        )
    except FetchError as error:
        corrupt = [f"{host} step {order.step}: {key}" for key in error.corrupt]
        raise FetchFailed(host, str(error), corrupt, error.unreleased) from error
    if fetched.cuts:
        logger.info(
            "the fetch from %s succeeded after %d failed connections",
            host,
            fetched.cuts,
        )
    return fetched.nbytes
