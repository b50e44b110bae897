"""`dtft bench transport`: throughput of fetching slices, compared with raw sockets.

Fetches and raw transfers alternate, so that noise of the machine affects both equally.
Both move the same bytes from another process into preallocated memory, over at most
`streams` connections at a time. The fetch checks the digests of all chunks and can
encrypt; the raw sockets only receive. The benchmark succeeds whatever the throughput.
"""

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from dtft.checkpoint.state import (
    MAX_CHUNK_BYTES,
    Parts,
    WantedSlice,
    chunk_digests,
)
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.dialing import parse_address
from dtft.checkpoint.transport.fetch import STREAMS, fetch_slices, serve_fetches
from dtft.checkpoint.transport.protocol import Credentials, Tls
from dtft.checkpoint.transport.rdma import Nixl
from dtft.checkpoint.transport.server import TransportServer

LIMIT_S = 120.0
"""Deadline of each fetch, and timeout of each raw socket operation, in seconds."""
LIFE_S = 3600.0
"""Longest lifetime of the peer process, in seconds; it ends earlier with its parent."""
_JOB = "bench"


@dataclass(frozen=True, kw_only=True)
class TransportBench:
    """Parameters of `dtft bench transport`."""

    mib: int = 256
    """Total size of the slices of one fetch, in MiB."""
    num_slices: int = 16
    """Number of equal slices that the bytes are divided into."""
    chunk_mib: int = 4
    """Size of a chunk in MiB; each chunk has one digest."""
    streams: int = STREAMS
    """Most connections of one fetch, and the number of raw sockets."""
    rounds: int = 7
    """Number of rounds; each has one fetch and one raw transfer."""
    tls: Tls | None = None
    """Certificate and key for an encrypted fetch; the raw sockets stay plain."""
    nixl: bool = False
    """Whether the fetch uses NIXL, which must be installed; the raw sockets use TCP."""

    def __post_init__(self) -> None:
        for name in ("mib", "num_slices", "chunk_mib", "streams", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not positive. Allowed: 1 or "
                    f"more. Set --{name} to that."
                )
        if self.chunk_mib << 20 > MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk_mib={self.chunk_mib} is more than a fetch can send. Allowed: 1 "
                f"to {MAX_CHUNK_BYTES >> 20}. Set --chunk_mib to that."
            )

    @property
    def slice_bytes(self) -> int:
        """Size of one slice in bytes."""
        return max((self.mib << 20) // self.num_slices, 1)


def bench_transport(config: TransportBench) -> dict[str, Any]:
    """Runs the benchmark and returns its figures.

    The figures are those of `summarize`, and "streams", "tls" and "nixl" of the config.
    Prints a line for each round (one fetch and one raw transfer), then the figures as
    JSON.
    """
    memory = np.zeros((config.num_slices, config.slice_bytes), np.uint8)
    secret = os.urandom(32)
    seconds: dict[str, list[float]] = {"fetch": [], "raw": []}
    nixl = Nixl() if config.nixl else None
    with _peer(config, secret) as (address, raw_address, digests):
        wanted = [
            WantedSlice(key=str(i), memory=Parts([row.data]), digests=digests[i])
            for i, row in enumerate(memory)
        ]
        for number in range(config.rounds):
            memory[:] = 0
            seconds["fetch"].append(_fetch(config, secret, address, wanted, nixl))
            memory[:] = 0
            seconds["raw"].append(_raw(config, raw_address, wanted))
            rates = {name: memory.nbytes / s[-1] / 1e9 for name, s in seconds.items()}
            print(
                f"round {number + 1}: fetch {rates['fetch']:.2f} GB/s, "
                f"raw sockets {rates['raw']:.2f} GB/s"
            )
    figures = summarize(seconds, memory.nbytes)
    figures |= {"streams": config.streams, "tls": config.tls is not None}
    figures |= {"nixl": config.nixl}
    print(json.dumps(figures, indent=1))
    return figures


def summarize(seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """Computes throughputs from the median times, and ratios of fetch to raw times.

    Throughputs are in GB (10^9 bytes) per second, from the median time.
    "ratios" has one value per round, the fetch's seconds divided by those of the raw
    transfer; "ratio" is their median. "bytes" is `nbytes`, and "cores" the number of
    this machine's processors.

    Args:
        seconds: seconds of every round, for "fetch" and for "raw" (plain sockets).
        nbytes: bytes of one transfer.

    >>> figures = summarize({"fetch": [2.0, 3.0], "raw": [1.0, 2.0]}, 3_000_000_000)
    >>> figures["fetch_gb_per_s"], figures["raw_gb_per_s"], figures["ratio"]
    (1.2, 2.0, 1.75)
    """
    fetched, raw = seconds["fetch"], seconds["raw"]
    ratios = [a / b for a, b in zip(fetched, raw, strict=True)]
    return {
        "bytes": nbytes,
        "fetch_gb_per_s": nbytes / median(fetched) / 1e9,
        "raw_gb_per_s": nbytes / median(raw) / 1e9,
        "ratio": median(ratios),
        "ratios": ratios,
        "cores": os.cpu_count(),
    }


# ------------------------------------------------------------- receiving side


def _fetch(
    config: TransportBench,
    secret: bytes,
    address: str,
    wanted: Sequence[WantedSlice],
    nixl: Nixl | None,
) -> float:
    begun = time.monotonic()
    fetch_slices(
        address,
        Credentials(job=_JOB, secret=secret, tls=config.tls),
        {"op": "fetch"},
        {},
        wanted,
        chunk_bytes=config.chunk_mib << 20,
        limit_s=LIMIT_S,
        streams=config.streams,
        nixl=nixl,
    )
    return time.monotonic() - begun


def _raw(config: TransportBench, address: str, wanted: Sequence[WantedSlice]) -> float:
    """Receives all slices over `config.streams` plain sockets; returns the seconds.

    `address` is the peer's address for plain sockets. The slices in `wanted` are
    assigned to the sockets in turn.

    Raises:
        OSError: a socket failed.
    """
    failed: list[OSError] = []

    def receive(share: Sequence[WantedSlice]) -> None:
        try:
            _receive_raw(address, share)
        except OSError as error:
            failed.append(error)

    begun = time.monotonic()
    threads = [
        threading.Thread(target=receive, args=(wanted[i :: config.streams],))
        for i in range(config.streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.monotonic() - begun


def _receive_raw(address: str, share: Sequence[WantedSlice]) -> None:
    with socket.create_connection(parse_address(address), LIMIT_S) as connection:
        indices = ",".join(one.key for one in share)
        connection.sendall(indices.encode() + b"\n")
        for one in share:
            memory, at = one.memory.whole(), 0
            while at < len(memory):
                received = connection.recv_into(memory[at:])
                if not received:
                    raise ConnectionError("the raw sender has gone")
                at += received


# --------------------------------------------------------------- peer process


@contextmanager
def _peer(
    config: TransportBench, secret: bytes
) -> Iterator[tuple[str, str, list[bytes]]]:
    """Runs a peer process that serves the slices while the context lasts.

    Yields:
        The address for fetches, the address for plain sockets, and the chunk digests of
        each slice.

    Raises:
        TimeoutError: the process was not ready in time.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(config, secret, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            raise TimeoutError(f"the peer process was not ready in {LIMIT_S} s")
        yield here.recv()
    finally:
        here.close()  # the peer process ends when its pipe is closed
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join(10)


def _serve(config: TransportBench, secret: bytes, pipe: Connection) -> None:
    random = np.random.default_rng(0)
    shape = (config.num_slices, config.slice_bytes)
    data = random.integers(0, 256, shape, np.uint8)
    views = [row.data.cast("B") for row in data]
    slices = [Parts([view]) for view in views]
    credentials = Credentials(job=_JOB, secret=secret, tls=config.tls)

    nixl = Nixl() if config.nixl else None

    def answer(channel: Channel) -> None:
        serve_fetches(
            channel, lambda asked: [slices[int(k)] for k in asked["keys"]], nixl
        )

    server = TransportServer("127.0.0.1:0", credentials, {"fetch": answer})
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threading.Thread(target=_send_raw, args=(listener, views), daemon=True).start()
    digests = [chunk_digests(view, config.chunk_mib << 20) for view in views]
    raw_address = f"127.0.0.1:{listener.getsockname()[1]}"
    pipe.send((server.address, raw_address, digests))
    pipe.poll(LIFE_S)  # until the other end is closed or its process dies
    server.close()


def _send_raw(listener: socket.socket, views: Sequence[memoryview]) -> None:
    def send(connection: socket.socket) -> None:
        with connection:
            asked = connection.makefile("rb").readline().decode().strip()
            for index in asked.split(",") if asked else ():
                connection.sendall(views[int(index)])

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=send, args=(connection,), daemon=True).start()
