"""What this machine can do: memory copies and raw TCP, with the same load beside them.

The floor that `memory_tier_vs_orbax.py` compares with. Every flow, copy and load is a
process of its own, all of them start together, and memory is in place before. Must not
know states or tiers.
"""

import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtft.checkpoint.memory import DEFAULT_DIRECTORY, AlignedAllocator, Arena
from dtft.checkpoint.state import copy_and_digest

CHUNK_BYTES = 4 << 20
ROUNDS = 5
LIMIT_S = 120.0


def memcpy_bytes_per_s(num_bytes: int, processes: int, directory: Path) -> float:
    """Bytes per second of each process, when all copy into shared memory at once.

    The median of the rounds, each as slow as its slowest process.
    """
    times = _together([(_copy, (str(directory), num_bytes))] * processes)
    slowest = [max(each) for each in zip(*times, strict=True)]
    return num_bytes / statistics.median(slowest)


def tcp_bytes_per_s(
    flows: Sequence[int], loads: Sequence[int] = (), directory: Path = DEFAULT_DIRECTORY
) -> float:
    """Bytes per second into one process from several, over loopback.

    The median of the rounds.

    Args:
        flows: bytes that each sending process sends on its own connection.
        loads: bytes that each of further processes reads meanwhile from shared memory
            into new memory, and digests, as a host does that restores what it has.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in flows]
    addresses = [one.getsockname() for one in listeners]
    try:
        times = _together(
            [
                (_receive, (listeners, list(flows))),
                *((_send, (a, n)) for a, n in zip(addresses, flows, strict=True)),
                *((_load, (str(directory), n)) for n in loads),
            ]
        )
    finally:
        for one in listeners:
            one.close()
    return sum(flows) / statistics.median(times[0])


def _together(tasks: Sequence[tuple[Callable[..., Any], tuple]]) -> list[list[float]]:
    """Runs every task in a process; per task its seconds in each round.

    Raises:
        RuntimeError: one of them did not answer in time, or ended without.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(tasks))
    pipes = [context.Pipe(duplex=False) for _ in tasks]
    processes = [
        context.Process(target=task, args=(*args, barrier, pipe[1]), daemon=True)
        for (task, args), pipe in zip(tasks, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for number, pipe in enumerate(pipes):
            pipe[1].close()
            if not pipe[0].poll(LIMIT_S):
                raise RuntimeError(f"process {number} gave no times in {LIMIT_S} s")
        return [pipe[0].recv() for pipe in pipes]
    except EOFError as error:
        raise RuntimeError("a process ended without giving its times") from error
    finally:
        for process in processes:
            process.kill()
            process.join()


def _timed(work: Callable[[], None], barrier: Any, answer: Any) -> None:
    """One round to warm up, then the timed ones, each begun by all at once."""
    times = []
    for _ in range(1 + ROUNDS):
        barrier.wait(LIMIT_S)
        begun = time.monotonic()
        work()
        times.append(time.monotonic() - begun)
    answer.send(times[1:])


def _copy(directory: str, num_bytes: int, barrier: Any, answer: Any) -> None:
    source = np.frombuffer(_random(num_bytes), np.uint8)
    arena = Arena.create(Path(directory) / f"copy-{os.getpid()}", num_bytes)
    target = np.frombuffer(arena.view(0, num_bytes), np.uint8)
    arena.unlink()  # the view keeps the memory, and nothing stays if this is killed
    _timed(lambda: np.copyto(target, source), barrier, answer)


def _load(directory: str, num_bytes: int, barrier: Any, answer: Any) -> None:
    arena = Arena.create(Path(directory) / f"load-{os.getpid()}", num_bytes)
    source = arena.view(0, num_bytes)
    source[:] = _random(num_bytes)
    arena.unlink()

    def work() -> None:
        target = AlignedAllocator(num_bytes).take(num_bytes)
        copy_and_digest(source, target.data, CHUNK_BYTES)

    _timed(work, barrier, answer)


def _send(address: tuple, num_bytes: int, barrier: Any, answer: Any) -> None:
    data = memoryview(_random(num_bytes))
    with socket.create_connection(address, LIMIT_S) as connection:
        connection.settimeout(LIMIT_S)
        _timed(lambda: connection.sendall(data), barrier, answer)


def _receive(
    listeners: list[socket.socket], sizes: list[int], barrier: Any, answer: Any
) -> None:
    memory = [memoryview(bytearray(size)) for size in sizes]
    connections = [listener.accept()[0] for listener in listeners]

    def work() -> None:
        threads = [
            threading.Thread(target=_fill, args=pair)
            for pair in zip(connections, memory, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _timed(work, barrier, answer)


def _fill(connection: socket.socket, memory: memoryview) -> None:
    connection.settimeout(LIMIT_S)
    at = 0
    while at < len(memory):
        at += connection.recv_into(memory[at:])


def _random(num_bytes: int) -> bytes:
    block = os.urandom(1 << 20)
    return (block * (num_bytes // len(block) + 1))[:num_bytes]
