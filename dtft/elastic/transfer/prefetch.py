"""Prefetches, on a spare host, the slices of a slot that training steps do not change.

Frozen weights, and experts that get no rows, are the same in every snapshot. A spare
repeatedly asks the host of one slot for the digests of the slot's slices. It fetches
each slice whose digests are the same as at an earlier snapshot. When the spare takes a
slot, its restore uses the prefetched slices whose digests are the commit's, and
fetches only the other slices from peers. A slice that every step changes is never
prefetched.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtft._priority import lower_priority
from dtft.checkpoint.state import Layout, Parts, WantedSlice
from dtft.checkpoint.transport import (
    Credentials,
    FetchError,
    WireError,
    connect,
    fetch_slices,
    no_payload,
)
from dtft.elastic.transfer.replica_server import NEWEST
from dtft.elastic.transfer.replication import Epoch

logger = logging.getLogger(__name__)

ASK_S = 2.0
"""Seconds until a slot's host is asked for digests, and until it is asked again after
slices were fetched."""
LONGEST_S = 60.0
"""Longest time in seconds between two requests. The time doubles after each request
that leads to no fetch."""
ANSWER_S = 10.0
"""Limit in seconds of a request for digests."""
BATCH_BYTES = 256 << 20
"""Bytes that are fetched at a time, or one slice if it is larger."""
MOST_MEMORY = 0.5
"""Largest share of this machine's available memory that a fetch may take."""


@dataclass(frozen=True)
class _Held:
    digests: bytes
    memory: np.ndarray


class PrefetchedSlices:
    """Slices that were fetched and verified ahead of a restore. Thread-safe."""

    def __init__(self) -> None:
        """Starts without slices."""
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._slot = 0

    def find(self, key: str, digests: bytes) -> memoryview | None:
        """Returns the bytes of a slice that was prefetched with these digests, or None.

        `key` names the slice. The bytes were verified when they were fetched, but are
        not verified here: the caller must do so, as memory may have changed since.
        """
        with self._lock:
            held = self._held.get(key)
        return held.memory.data if held and held.digests == digests else None

    def digests(self) -> dict[str, bytes]:
        """Maps the key of each slice to the digests of its chunks, joined."""
        with self._lock:
            return {key: held.digests for key, held in self._held.items()}

    def put(self, slot: int, key: str, digests: bytes, memory: np.ndarray) -> None:
        """Adds a slice, or replaces the slice with this key.

        Args:
            slot: the slot that owns the slice.
            key: names the slice.
            digests: digests of the slice's chunks.
            memory: the slice's bytes.
        """
        with self._lock:
            self._slot = slot
            self._held[key] = _Held(digests, memory)

    def drop(self, keys: Collection[str]) -> None:
        """Frees the memory of the slices with these keys; ignores unknown keys."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)

    def clear(self) -> None:
        """Frees the memory of all slices."""
        with self._lock:
            self._held.clear()

    def report(self) -> dict[int, int]:
        """Returns how many bytes were prefetched: {slot: bytes}; {} without slices.

        All prefetched slices belong to one slot.
        """
        with self._lock:
            nbytes = sum(held.memory.nbytes for held in self._held.values())
            return {self._slot: nbytes} if nbytes else {}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The slot whose slices are prefetched, and the address of its host."""

    layout: str
    """Layout as JSON."""
    slot: int
    address: str
    epoch: Epoch


class Prefetcher:
    """Prefetches, on its own thread, those slices of a slot that no step changes."""

    def __init__(
        self,
        slices: PrefetchedSlices,
        credentials: Credentials,
        chunk_bytes: int,
        limit_s: float,
    ) -> None:
        """Starts no thread yet.

        Args:
            slices: receives the fetched slices.
            credentials: the job's credentials.
            chunk_bytes: bytes of a chunk, which has one digest.
            limit_s: limit of each fetch, in seconds.
        """
        self._slices, self._credentials = slices, credentials
        self._chunk_bytes, self._limit_s = chunk_bytes, limit_s
        self._source: _Source | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        """Held while slices are put or dropped, so that no slice is put or dropped
        after `stop`."""

    def start(self, layout: str, slot: int, address: str, epoch: Epoch) -> None:
        """Begins to prefetch a slot's slices; first stops an earlier prefetch.

        Does nothing if the prefetch in progress has the same arguments.

        Args:
            layout: the job's layout as JSON.
            slot: the slot whose slices are fetched.
            address: "host:port" of the slot's host.
            epoch: (generation, attempt) of the assignment that gave the host the slot.
        """
        source = _Source(layout=layout, slot=slot, address=address, epoch=epoch)
        if source == self._source:
            return
        self.stop()
        self._source, self._stop = source, threading.Event()
        args = source, self._stop
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def stop(self) -> None:
        """Stops the prefetch without waiting for the network; keeps fetched slices.

        Afterwards the thread neither adds nor drops slices.
        """
        self._source = None
        with self._lock:
            self._stop.set()

    def _run(self, source: _Source, stop: threading.Event) -> None:
        lower_priority()
        sizes = {
            piece.key: piece.nbytes
            for piece in Layout.from_json(source.layout).slices(source.slot)
        }
        with self._lock:
            if stop.is_set():
                return
            self._slices.drop(self._slices.digests().keys() - sizes.keys())
        newest, before = -1, self._slices.digests()
        pause_s = ASK_S
        while not stop.wait(pause_s):
            pause_s = min(2 * pause_s, LONGEST_S)
            try:
                step, now = _ask(source, self._credentials)
                if step <= newest:  # no snapshot since, so nothing is known to stay
                    continue
                same = {key: it for key, it in now.items() if before.get(key) == it}
                with self._lock:
                    if stop.is_set():
                        return
                    self._slices.drop(now.keys() - same.keys())
                # Owners of a slice take turns in copying it: an answer may lack it.
                newest, before = step, before | now
                if self._fetch(source, same, sizes, stop):
                    pause_s = ASK_S
            except (OSError, TimeoutError, FetchError, MemoryError) as error:
                # The host may be gone, or a slice has changed: the leader, or the next
                # answer, says how to go on.
                logger.debug("slices of slot %d not prefetched: %s", source.slot, error)

    def _fetch(
        self,
        source: _Source,
        same: Mapping[str, bytes],
        sizes: Mapping[str, int],
        stop: threading.Event,
    ) -> bool:
        """Fetches those unchanged slices of a slot that were not fetched yet.

        Args:
            source: the slot and its host.
            same: maps the key of each unchanged slice to its digests, which are those
                of an earlier snapshot, too.
            sizes: maps the key of each slice of the slot to its number of bytes.
            stop: ends the fetch once it is set.

        Returns:
            True if slices were missing and all of them were fetched. False if none was
            missing, or if `stop` was set meanwhile.

        Raises:
            FetchError: the host has gone, or a slice has changed meanwhile.
            MemoryError: the slices need more than half of the available memory.
        """
        held = self._slices.digests()
        left = [key for key in same if held.get(key) != same[key] and sizes.get(key)]
        nbytes, available = sum(sizes[key] for key in left), available_bytes()
        if nbytes > MOST_MEMORY * available:
            raise MemoryError(f"{nbytes} bytes; {available} bytes are available")
        for batch in _batches(left, sizes):
            memory = {key: np.empty(sizes[key], np.uint8) for key in batch}
            fetch_slices(
                source.address,
                self._credentials,
                {"op": "fetch"},
                {"step": NEWEST, "epoch": source.epoch},
                [
                    WantedSlice(key=key, memory=Parts([rows.data]), digests=same[key])
                    for key, rows in memory.items()
                ],
                chunk_bytes=self._chunk_bytes,
                limit_s=self._limit_s,
                streams=1,  # the host is training
            )
            with self._lock:
                if stop.is_set():
                    return False
                for key, rows in memory.items():
                    self._slices.put(source.slot, key, same[key], rows)
        if left:
            text = "prefetched %d bytes of slot %d, which training does not change"
            logger.info(text, nbytes, source.slot)
        return bool(left)


def available_bytes() -> int:
    """Returns how many bytes of memory processes can get without swapping.

    The number is MemAvailable in /proc/meminfo; 0 if the kernel does not tell it.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _batches(keys: Collection[str], sizes: Mapping[str, int]) -> list[list[str]]:
    batches, room = list[list[str]](), 0
    for key in keys:
        if not batches or sizes[key] > room:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(key)
        room -= sizes[key]
    return batches


def _ask(source: _Source, credentials: Credentials) -> tuple[int, dict[str, bytes]]:
    """Asks a slot's host for the digests of the slot's own slices.

    Returns:
        The newest step that the host has, and slice key to digests.

    Raises:
        OSError: the host cannot be reached, has no copies of the slot, or sent a
            malformed answer; or the connection has ended.
        TimeoutError: no answer came in time.
    """
    deadline = time.monotonic() + ANSWER_S
    asked = {"epoch": source.epoch}
    with connect(
        source.address, credentials, {"op": "digests"}, ANSWER_S, [asked]
    ) as channel:
        answer, _ = channel.receive(deadline - time.monotonic(), no_payload)
    return _read(answer)


def _read(answer: Mapping[str, Any]) -> tuple[int, dict[str, bytes]]:
    step, digests = answer.get("step"), answer.get("digests")
    if type(step) is not int or not isinstance(digests, dict):
        raise WireError(f"no digests were sent: {answer.get('error', answer)!s:.200}")
    for key, value in digests.items():
        if not isinstance(key, str) or not isinstance(value, bytes):
            raise WireError(f"digests of {key!r:.100} are not bytes")
    return step, digests
