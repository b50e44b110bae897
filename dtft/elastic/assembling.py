"""Brings one slot's slices into memory when they are not those that were committed.

Makes them of regions of committed slices: own ones from this host's former copies, the
others fetched from the peers that the leader named, all in parallel. What is read of an
old slice is whole chunks whose digests are the commit's (`checkpoint.regions`), so
wrong bytes cannot get in; that every owner of a new slice came to the same bytes, the
leader compares afterwards (`proof`). Must not know why, nor what comes after.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtft.checkpoint import digest
from dtft.checkpoint import fetch as fetching
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.overlap import Region
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.ranges import Wanted
from dtft.checkpoint.regions import digests_in, move, span_of
from dtft.checkpoint.slices import Slice
from dtft.checkpoint.transport import Credentials
from dtft.elastic.finding import find_copies
from dtft.elastic.replication import FetchFailed

Order = Mapping[str, Any]


def assemble(
    holder: Holder,
    order: Order,
    host: str,
    credentials: Credentials,
    limit_s: float,
    former: Sequence[Holder],
) -> int:
    """Makes the step of `order` the only one in `holder`; every byte is checked.

    Returns:
        Bytes fetched from peers, with what chunks have beside the regions.

    Raises:
        FetchFailed: a peer has gone, lacks a slice, or somebody's bytes are corrupt.
    """
    step, digests = order["step"], order["digests"]
    holder.keep_only({step})
    holder.begin_stage(step)
    new = {piece: _memory(holder, step, piece) for piece in holder.own_slices}
    chunk = holder.chunk_bytes
    fetched = bring(new, order, host, credentials, limit_s, former, chunk)
    found = [_settled(holder, step, piece, memory) for piece, memory in new.items()]
    for piece, value in zip(holder.own_slices, found, strict=True):
        if value != digests.get(piece.key, value):
            raise FetchFailed(host, f"{piece.key} was not assembled right")
    holder.staged(step, found, order["items"])
    return fetched


def bring(
    new: Mapping[Slice, memoryview],
    order: Order,
    host: str,
    credentials: Credentials,
    limit_s: float,
    holders: Sequence[Holder],
    chunk_bytes: int,
) -> int:
    """Fills new slices with the regions of an order; what is read of old ones is right.

    Args:
        new: the memory of each new slice.
        order: generation, attempt, step, digests of the old slices, and regions.
        host: this host's name.
        credentials: the job's.
        limit_s: deadline of each fetch, in seconds.
        holders: this host's, that may have old slices.
        chunk_bytes: bytes under one digest.

    Returns and raises what `assemble` does.
    """
    own = [it for it in order["regions"] if it["host"] == host]
    peers = [it for it in order["regions"] if it["host"] != host]
    for source in own:
        _take_own(new, order, host, _regions(source), holders, chunk_bytes)

    def fetch(source: Mapping[str, Any]) -> int:
        streams = fetching.streams_each(len(peers))
        return _fetch(new, order, source, credentials, limit_s, chunk_bytes, streams)

    if not peers:
        return 0
    with concurrent.futures.ThreadPoolExecutor(len(peers)) as pool:
        return sum(pool.map(fetch, peers))


def _memory(holder: Holder, step: int, piece: Slice) -> memoryview:
    """One piece of memory for a new slice: its place, unless that is in pieces."""
    parts = holder.staging_parts(step, piece)
    return (
        parts.views[0] if len(parts.views) == 1 else memoryview(bytearray(len(parts)))
    )


def _settled(holder: Holder, step: int, piece: Slice, memory: memoryview) -> bytes:
    """The digests of a new slice that is complete, and in its place now."""
    parts = holder.staging_parts(step, piece)
    if len(parts.views) > 1:
        parts.fill(memory)
    return digest.digests_of_parts(parts.views, holder.chunk_bytes)


def _regions(source: Mapping[str, Any]) -> dict[Slice, list[Region]]:
    """The regions of one source by old slice."""
    found: dict[Slice, list[Region]] = {}
    for entry in source["regions"]:
        region = Region(**{name: _slice(entry[name]) for name in entry})
        found.setdefault(region.old, []).append(region)
    return found


def _slice(entry: Mapping[str, Any]) -> Slice:
    return Slice(
        path=entry["path"],
        start=tuple(entry["start"]),
        stop=tuple(entry["stop"]),
        dtype=entry["dtype"],
    )


def _take_own(
    new: Mapping[Slice, memoryview],
    order: Order,
    host: str,
    regions: Mapping[Slice, Sequence[Region]],
    holders: Sequence[Holder],
    chunk: int,
) -> None:
    step = order["step"]
    for old, parts in regions.items():
        try:
            (found,) = find_copies(holders, step, [old.key])
        except KeyError:
            raise FetchFailed(host, f"it has no copy of {old.key} any more") from None
        view = found.whole()
        span = span_of(parts, chunk)
        expected = digests_in(order["digests"][old.key], span, chunk)
        if digest.verify(view[slice(*span)], expected, chunk):
            corrupt = [f"{host} step {step}: {old.key}"]
            raise FetchFailed(host, f"own copy of {old.key} is corrupt", corrupt)
        for region in parts:
            move(region, view, new[region.new])


def _fetch(
    new: Mapping[Slice, memoryview],
    order: Order,
    source: Mapping[str, Any],
    credentials: Credentials,
    limit_s: float,
    chunk: int,
    streams: int,
) -> int:
    """Fetches the chunks that hold one peer's regions, and moves the regions."""
    step, wanted, spans, moves = order["step"], [], [], []
    for old, parts in _regions(source).items():
        span = span_of(parts, chunk)
        # As large as the old slice, but pages that nobody writes take no memory.
        whole = np.empty(old.nbytes, np.uint8).data
        if len(parts) == 1 and parts[0].whole:
            whole = new[parts[0].new]
        else:
            moves += [(region, whole) for region in parts]
        expected = digests_in(order["digests"][old.key], span, chunk)
        memory = Parts([whole[slice(*span)]])
        wanted.append(Wanted(key=old.key, memory=memory, digests=expected))
        spans.append(span)
    epoch = order["generation"], order["attempt"]
    try:
        fetched = fetching.fetch(
            source["address"],
            credentials,
            {"op": "fetch"},
            {"step": step, "epoch": epoch, "spans": spans},
            wanted,
            chunk_bytes=chunk,
            limit_s=limit_s,
            streams=streams,
        )
    except fetching.FetchError as error:
        peer = source["host"]
        corrupt = [f"{peer} step {step}: {key}" for key in error.corrupt]
        raise FetchFailed(peer, str(error), corrupt) from error
    for region, whole in moves:
        move(region, whole, new[region.new])
    return fetched.nbytes
