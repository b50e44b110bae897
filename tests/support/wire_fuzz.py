"""Malformed input by the million, thrown at a live server with the handlers of agents.

    python -m tests.support.wire_fuzz --inputs 1000000 --seed 0

Each input is one connection of a hostile or broken client: a stranger's bytes, or a
member's frames, well sealed so that they reach the handlers. Bytes go through a stream
in memory into the same code that serves sockets, because the kernel would take most of
the time; one in `--socket-every` goes over TCP. No input may end in an exception that
the handlers do not expect, nothing that counted as verified may change, nothing outside
an arena or in the trainer's part of it may be written, memory is bounded, and a
stranger must have changed nothing and been told nothing but what any job's server says.
"""

import argparse
import contextlib
import logging
import random
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dtft.checkpoint.memory import replica_store
from dtft.checkpoint.memory.arena import OWN_BUFFERS, Arena
from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.dialing import parse_address
from dtft.checkpoint.transport.server import connect
from tests.support.fuzz_inputs import (
    KINDS,
    OTHER,
    STEP,
    Member,
    MemoryStream,
    bomb,
    outsider,
    push,
    say_push,
    stranger,
)
from tests.support.hosts import JOB, Host, divided, hosts

GUARD = 4096
CANARY = b"\xc5" * GUARD
MAX_GROWTH = 192 << 20
"""Most memory in bytes that inputs may take, a client's own in it: both sides are in
this process, and the largest header has 16 MiB."""
BOMB_EVERY = 500


class GuardedArena(Arena):
    """An arena between two guards, to which nothing is ever written."""

    @classmethod
    def create(cls, path: Path | str, size: int) -> "GuardedArena":
        """As `Arena.create`."""
        arena = super().create(path, size + 2 * GUARD)
        assert isinstance(arena, GuardedArena) and arena._memory is not None
        arena._memory[:GUARD] = arena._memory[-GUARD:] = CANARY
        arena.size = size
        return arena

    def view(self, offset: int, nbytes: int) -> memoryview:
        """As `Arena.view`."""
        super().view(offset, nbytes)  # which checks the arguments
        assert self._memory is not None
        start = GUARD + offset
        return memoryview(self._memory)[start : start + nbytes]

    def intact(self) -> bool:
        """Whether both guards are."""
        memory = self._memory
        assert memory is not None
        return memory[:GUARD] == CANARY == memory[-GUARD:]


@contextlib.contextmanager
def guarded_arenas() -> Iterator[None]:
    """Holders that begin meanwhile have guarded arenas."""
    usual, replica_store.Arena = replica_store.Arena, GuardedArena
    try:
        yield
    finally:
        replica_store.Arena = usual


class Target:
    """The host under fire, with a verified copy and own bytes to protect."""

    def __init__(self, host: Host) -> None:
        """Stages a step and hosts a peer's."""
        self.host = host
        host.stage(STEP)
        header, body = push(host, STEP)

        def say(member: Member) -> None:
            member.frame({"op": "push"})
            say_push(member, header, body)

        self.serve(Member(say).stream)
        assert host.held == [(STEP, 0)], "the good push did not arrive"
        self.good = set(host.holder.holdings()[0][STEP])
        self.own = self._own()

    def _own(self) -> bytes:
        """All memory that only this host's trainer writes to."""
        holder = self.host.holder
        return bytes(holder.arena.view(0, OWN_BUFFERS * holder.map.own.nbytes))

    def serve(self, stream: MemoryStream) -> None:
        """What the server's thread does with a connection."""
        self.host.server._serve(Channel(stream, "client"))

    def fingerprint(self) -> tuple:
        """Cheap: which versions there are, and what of them counts as verified."""
        holder = self.host.holder
        own, hosting = holder._own.copies, holder._hosting
        return (
            sorted(own),
            sorted((step, sorted(of)) for step, of in hosting.copies.items()),
            sum(one.users for one in hosting.receiving.values()),
        )

    def check(self) -> None:
        """Everything verified is right, and none of it went."""
        # Of another step's number no digest tells here; the leader's do, see `roots`.
        wrong = self.host.wrong(STEP)
        assert not wrong, wrong
        assert self.good <= set(self.host.holder.holdings()[0][STEP])
        assert not self.host.receiving
        assert self._own() == self.own, "a peer wrote where the trainer does"
        arena = self.host.holder.arena
        assert not isinstance(arena, GuardedArena) or arena.intact()
        self.host.holder.keep_only({STEP})
        assert not self.host.holder._hosting.receiving
        with connect(self.host.address, JOB, {"op": "echo"}, 10) as channel:
            channel.send({"still": "alive"}, [b"x"], timeout_s=10)
            assert channel.receive(10)[0] == {"still": "alive"}


def one(target: Target, other: Host, rng: random.Random) -> str:
    """Throws one input; returns its kind.

    What a stranger says is also said to `other`, a host of another job.
    """
    kind = bomb if rng.random() < 1 / BOMB_EVERY else rng.choice(KINDS)
    stream, before = kind(rng, target.host), target.fingerprint()
    said = bytes(stream.said)
    target.serve(stream)
    if kind in (stranger, outsider):
        assert target.fingerprint() == before, "a stranger changed something"
        assert not target.host.events, "a stranger was heard"
        assert len(stream.heard) <= protocol.GREETING_BYTES + protocol.PROOF_BYTES
        assert stream.heard[protocol.GREETING_BYTES :] in (b"", protocol.REFUSAL)
    if kind is stranger:
        elsewhere = MemoryStream(said)
        other.server._serve(Channel(elsewhere, "client"))
        assert _known(stream.heard) == _known(elsewhere.heard), "it told of the job"
    target.host.events.clear()
    return kind.__name__


def _known(heard: bytearray) -> bytes:
    """What a server said, without its nonce, which is new each time."""
    nonce = slice(
        protocol.GREETING_BYTES - protocol.NONCE_BYTES, protocol.GREETING_BYTES
    )
    known = bytearray(heard)
    del known[nonce]
    return bytes(known)


def over_a_socket(target: Target, rng: random.Random) -> None:
    """A stranger's input again, over TCP."""
    said = bytes(stranger(rng, target.host).said)
    heard = b""
    with socket.create_connection(parse_address(target.host.address), 10) as client:
        try:
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(4096):
                heard += part
        except TimeoutError:
            raise
        except OSError:
            pass  # the server may hang up at any point
    assert heard[protocol.GREETING_BYTES :] in (b"", protocol.REFUSAL)


def _text(record: logging.LogRecord) -> str:
    return logging.Formatter().format(record)


@contextlib.contextmanager
def _unexpected() -> Iterator[list[logging.LogRecord]]:
    """What the server logs as a handler's failure; everything else is kept quiet."""
    logger, records = logging.getLogger("dtft"), list[logging.LogRecord]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(record)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def run(
    inputs: int,
    seed: int,
    folder: Path,
    socket_every: int = 1000,
    limit_s: float = float("inf"),
) -> dict[str, int]:
    """Throws inputs at one host until `limit_s`; returns how many of each kind.

    Raises:
        AssertionError: an input did what it must not.
    """
    counts: dict[str, int] = {}
    end = time.monotonic() + limit_s
    (folder / "other").mkdir()
    with (
        guarded_arenas(),
        hosts(folder, divided(2)) as (_, host),
        hosts(folder / "other", divided(2), OTHER) as (other, _),
        _unexpected() as unexpected,
    ):
        target = Target(host)
        for number in range(inputs):
            if time.monotonic() > end:
                break
            rng = random.Random(f"{seed} {number}")
            try:
                kind = one(target, other, rng)
                assert not unexpected, _text(unexpected[0])
                if number % socket_every == 0:
                    over_a_socket(target, rng)
                if number % 1000 == 0:
                    target.check()
            except BaseException as error:
                error.add_note(f"seed {seed}, input {number}")
                raise
            counts[kind] = counts.get(kind, 0) + 1
        target.check()
    return counts


def main() -> None:
    """Prints what was thrown and how memory grew; ends with 1 if it grew too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--socket-every", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run(100, -1, Path(folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        counts = run(
            options.inputs,
            options.seed,
            Path(folder),
            options.socket_every,
            options.seconds,
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{sum(counts.values())} inputs, seed {options.seed}: {counts}")
    print(f"peak memory grew by {grown / 1024:.1f} MiB over the first 100 inputs'")
    print(f"allowed are {MAX_GROWTH >> 20} MiB; {_resident() >> 20} MiB are in use now")
    print(f"the server lives, nothing changed; {time.monotonic() - begun:.0f} s")
    raise SystemExit(grown * 1024 > MAX_GROWTH)


def _resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
