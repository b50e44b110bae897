"""Hosts in processes of their own, killed with SIGKILL in the middle of a transfer."""

import contextlib
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from dtft.elastic.transfer.replication import Pusher
from tests.support.fault_bench import AGAIN_S, STEP, Bench
from tests.support.fault_proxy import FaultProxy
from tests.support.hosts import EPOCH, JOB, Host, divided, replicated, wait_until

LIFE_S = 120.0
"""A peer that nobody has killed by then ends by itself."""
WITHIN_S = 0.03
"""A transfer without a proxy takes about so long; it is cut within this time."""
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.hosts"])


def _serve(folder: Path, mine: Connection) -> None:
    """A peer that holds everything, until it is killed."""
    host = Host(folder, 1, replicated(3))
    host.stage(STEP)
    mine.send(host.address)
    mine.poll(LIFE_S)


def _push(folder: Path, address: str, step: int, mine: Connection) -> None:
    """A peer that pushes step after step, until it is killed."""
    host = Host(folder, 0, divided(2))
    (push,) = host.holder.outgoing
    pusher = Pusher(host.holder, push, address, JOB, EPOCH, AGAIN_S)
    mine.send(host.address)
    end = time.monotonic() + LIFE_S
    while time.monotonic() < end and not mine.poll(0.002):
        if not pusher._steps.empty():
            continue  # a step that is dropped before it is sent is not sent at all
        host.stage(step)
        pusher.offer(step)
        host.holder.drop_before(step - 2, keep=set())
        step += 1


class Peer:
    """A process of a host; `address` is where it serves."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        """Starts it, and waits until it serves."""
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self._theirs, mine = _forks.Pipe()
        self._process = _forks.Process(
            target=work, args=(self._folder, *arguments, mine), daemon=True
        )
        self._process.start()
        mine.close()
        assert self._theirs.poll(LIFE_S), "a peer did not start"
        self.address: str = self._theirs.recv()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self._process.join(LIFE_S)

    def close(self) -> None:
        """Kills it and removes what it leaves behind."""
        self.kill()
        self._process.close()
        self._theirs.close()
        shutil.rmtree(self._folder)


@contextlib.contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    """Processes that hold everything."""
    made: list[Peer] = []
    try:
        for _ in range(count):
            made.append(Peer(_serve))
        yield made
    finally:
        for one in made:
            one.close()


def kill_all(victims: list[Peer]) -> None:
    """Kills one after the other."""
    for victim in victims:
        victim.kill()


@contextlib.contextmanager
def killing(victims: list[Peer], delay_s: float) -> Iterator[threading.Event]:
    """Kills processes after a time; the event is set once they are dead."""
    dead = threading.Event()

    def kill() -> None:
        kill_all(victims)
        dead.set()

    timer = threading.Timer(delay_s, kill)
    timer.start()
    try:
        yield dead
    finally:
        timer.join(LIFE_S)


def killed_in_fetch(bench: Bench, rng: random.Random) -> tuple[str, str, bool]:
    """One peer or both die while a host fetches from them, half from each."""
    count = rng.choice((1, 2))
    kind = ("kill one", "kill two")[count - 1]
    with peers(count) as victims:
        addresses = [one.address for one in victims] + [bench.peers[1].address]
        if rng.random() < 0.5:  # at a certain byte
            fault = bench.fault("fetch", "die", rng)
            with FaultProxy(addresses[0], fault) as proxy:
                proxy.on_fault = lambda: kill_all(victims)
                outcome = bench.restore([proxy.address, addresses[1]])
                fired = proxy.fired.is_set()
        else:  # at a certain time, nothing between
            with killing(victims, rng.uniform(0, WITHIN_S)) as dead:
                outcome = bench.restore(addresses[:2])
                fired = dead.is_set()
    if "error" not in outcome:
        return kind, "survived", fired
    return kind, bench.fetch_again(), fired


def killed_in_push(bench: Bench, rng: random.Random) -> tuple[str, str, bool]:
    """The sender of a push dies; half a copy must never count."""
    held = bench.receiver.held
    held.clear()
    first = bench.step + 1
    bench.step += 10_000
    sender = Peer(_push, bench.receiver.address, first)
    try:
        wait_until(lambda: bool(held), AGAIN_S)
        end = time.monotonic() + rng.uniform(0, WITHIN_S)
        while time.monotonic() < end:  # makes room, as commits do
            bench.receiver.holder.drop_before(held[-1][0], keep=set())
            time.sleep(0.001)
    finally:
        sender.close()
    wait_until(lambda: not bench.receiver.receiving, AGAIN_S)
    if bench.wrong():
        return "kill sender", "silent", True
    bench.receiver.holder.drop_before(bench.step, keep=set())
    return "kill sender", bench.push_again(), True
