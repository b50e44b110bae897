"""Malformed input by the million, thrown at a live server with the handlers of agents.

    python -m tests.checkpoint.wire_fuzz --inputs 1000000 --seed 0

Each input is one connection of a hostile or broken client: a stranger's bytes, or a
member's frames, well sealed so that they reach the handlers. Bytes go through a stream
in memory into the same code that serves sockets, because the kernel would take most of
the time; one in `--socket-every` goes over TCP. No input may end in an exception that
the handlers do not expect, nothing that counted as verified may change, and a stranger
must have been told nothing and changed nothing at all.
"""

import argparse
import contextlib
import logging
import random
import resource
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from dtft.checkpoint import seal, wire
from dtft.checkpoint.channel import Channel
from dtft.checkpoint.digest import chunk_digests
from dtft.checkpoint.stream import Stream
from dtft.checkpoint.transport import connect, parse_address
from tests.checkpoint.hosts import CHUNK, EPOCH, JOB, Host, content, divided, hosts

STEP = 7
Say = Callable[["Member"], None]


class MemoryStream(Stream):
    """A connection whose client says what it has to say and hangs up."""

    def __init__(self, said: bytes) -> None:
        """The client's bytes; `answers` may add to them when the server sends."""
        self.said, self.at = bytearray(said), 0
        self.heard = bytearray()
        self.answer: Callable[[], None] = lambda: None

    def send(self, buffers: Sequence[memoryview]) -> int:
        """The server says something."""
        self.heard += b"".join(buffers)
        self.answer()
        return sum(map(len, buffers))

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """The server listens; 0 when the client has hung up."""
        total = 0
        for buffer in buffers:
            part = self.said[self.at : self.at + len(buffer)]
            buffer[: len(part)] = part
            self.at, total = self.at + len(part), total + len(part)
        return total

    def poll(self, event: int, timeout_s: float) -> bool:
        """Memory is always ready."""
        return True

    def end(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to close."""


class Member:
    """A client that knows the secret: it proves that, then says frames."""

    def __init__(self, say: Say) -> None:
        """`say` calls `frame` and `raw` once the handshake is done."""
        greeting, self._nonce = wire.greeting()
        self.stream = MemoryStream(greeting)
        self.stream.answer = self._prove
        self._say, self._key, self._count = say, b"", 0

    def _prove(self) -> None:
        other = wire.read_greeting(self.stream.heard)
        handshake = wire.Handshake(client_nonce=self._nonce, server_nonce=other)
        self.stream.said += wire.proof(JOB, "client", handshake)
        self._key, _ = wire.session_keys(JOB, handshake)
        self.stream.answer = lambda: None
        self._say(self)

    def frame(self, header: Any, payload: bytes = b"", size: int | None = None) -> None:
        """A frame with a good seal around any msgpack, or around any bytes."""
        is_raw = isinstance(header, bytes)
        packed = header if is_raw else msgpack.packb(header, use_bin_type=True)
        assert packed is not None
        size = len(payload) if size is None else size
        self.sealed(struct.pack("<4sB3xIQ", b"DTFT", 2, len(packed), size), packed)
        self.stream.said += payload

    def sealed(self, prefix: bytes, packed: bytes) -> None:
        """Prefix and header as given, with the seals that belong to them."""
        said = self.stream.said
        said += prefix + seal._seal(self._key, self._count, b"p", prefix)
        said += packed + seal._seal(self._key, self._count, b"h", prefix + packed)
        self._count += 1


class Target:
    """The host under fire, with a verified copy and own bytes to protect."""

    def __init__(self, host: Host) -> None:
        """Stages a step and hosts a peer's."""
        self.host = host
        host.stage(STEP)
        header, body = push(host, STEP)

        def say(member: Member) -> None:
            member.frame({"op": "push"})
            member.frame(header)
            for numbers, part in body:
                member.frame({"chunks": numbers}, part)
            member.frame({"end": True})

        self.serve(Member(say).stream)
        assert host.held == [(STEP, 0)], "the good push did not arrive"
        self.good = set(host.holder.holdings()[0][STEP])

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
        # Good bytes under another step's number are a good push of that step.
        assert self.host.wrong(STEP) == []
        assert self.good <= set(self.host.holder.holdings()[0][STEP])
        receiving = self.host.holder._hosting.receiving
        assert not any(one.users for one in receiving.values())
        self.host.holder.keep_only({STEP})
        assert not receiving
        with connect(self.host.address, JOB, {"op": "echo"}, 10) as channel:
            channel.send({"still": "alive"}, [b"x"], timeout_s=10)
            assert channel.receive(10)[0] == {"still": "alive"}


Body = list[tuple[list[int], bytes]]
"""Frames of chunks: their numbers and their bytes."""


def push(host: Host, step: int) -> tuple[dict[str, Any], Body]:
    """A good push of slot 0 to the host: what is said first, and its frames."""
    pieces = host.holder.map.incoming[0].slices
    parts = [content(step, piece.key, piece.nbytes) for piece in pieces]
    digests = [chunk_digests(part, CHUNK) for part in parts]
    header = {"epoch": EPOCH, "source": 0, "step": step, "digests": digests}
    cut = [one[at : at + CHUNK] for one in parts for at in _starts(len(one))]
    numbers = range(len(cut))
    body = [
        (list(numbers[at : at + 20]), b"".join(cut[at : at + 20]))
        for at in range(0, len(cut), 20)
    ]
    return header | {"items": {"step": step}}, body


def _starts(size: int) -> range:
    return range(0, max(size, 1), CHUNK)


# ------------------------------------------------------------------- inputs


def some_value(rng: random.Random, depth: int = 0) -> Any:
    """Any msgpack value, mostly small, sometimes nasty."""
    kinds = "nbifsBlm" if depth < 4 else "nbifsB"
    kind = rng.choice(kinds)
    if kind == "i":
        near = rng.choice((0, 1, -1, STEP, 2**31, 2**63, 2**64 - 1, -(2**63)))
        return max(min(near + rng.randrange(-2, 3), 2**64 - 1), -(2**63))
    if kind in "sB":
        data = rng.randbytes(rng.choice((0, 1, 3, 16, 40, 300)))
        return data if kind == "B" else data.hex()
    if kind == "l":
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == "m":
        count = rng.randrange(4)
        keys = ("op", "step", "epoch", "keys", "parts", "", 3, "digests")
        return {rng.choice(keys): some_value(rng, depth + 1) for _ in range(count)}
    return {"n": None, "b": rng.random() < 0.5, "f": rng.choice((0.5, 1e300))}[kind]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes with something wrong: flips, cuts, repeats, noise."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 50)))
        elif kind == 3:
            out[at:at] = out[: rng.randrange(80)]
        elif at + 4 <= len(out):
            out[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"DTFT"))
    return bytes(out)


def stranger(rng: random.Random, _: Target) -> MemoryStream:
    """Someone without the secret: noise, false proofs, frames all the same."""
    greeting = wire.greeting()[0]
    claim = rng.choice((b"", wire.REFUSAL, rng.randbytes(32), greeting[8:]))
    frames = b"".join(
        wire.encode_header({"op": rng.choice(("push", "fetch", "echo"))}, 9)
        for _ in range(rng.randrange(3))
    )
    said = greeting + claim + frames
    return MemoryStream(mutated(rng, said) if rng.random() < 0.7 else said)


def bad_hello(rng: random.Random, _: Target) -> MemoryStream:
    """A member whose first frame is anything."""
    hello = rng.choice((some_value(rng), {"op": some_value(rng)}, rng.randbytes(20)))
    return Member(lambda m: m.frame(hello, rng.randbytes(rng.randrange(9)))).stream


def bad_push(rng: random.Random, target: Target) -> MemoryStream:
    """Pushes whose headers or bytes are wrong."""
    header, body = push(target.host, rng.choice((STEP, STEP + 1, STEP + 2)))

    def say(member: Member) -> None:
        member.frame({"op": "push"})
        for _ in range(rng.randrange(1, 4)):
            changed = dict(header)
            for key in rng.sample(sorted(header), rng.randrange(3)):
                changed[key] = some_value(rng)
                if rng.random() < 0.2:
                    del changed[key]
            member.frame(changed)
            for numbers, good in rng.sample(body, rng.randrange(len(body) + 1)):
                other = rng.randbytes(len(good))
                data = rng.choice((good, good, good[:-1], b"", other))
                size = rng.choice((None, None, None, len(good), 2**40, 0))
                at = numbers if rng.random() < 0.8 else some_value(rng)
                member.frame({"chunks": at}, data, size)
            if rng.random() < 0.8:
                member.frame({"end": rng.choice((True, True, some_value(rng)))})

    return Member(say).stream


def bad_fetch(rng: random.Random, target: Target) -> MemoryStream:
    """Requests for what is not there, or not to be had."""
    keys = [piece.key for piece in target.host.holder.own_slices]

    def say(member: Member) -> None:
        member.frame({"op": "fetch"})
        opening = {"step": STEP, "epoch": EPOCH, "keys": keys}
        if rng.random() < 0.5:
            opening[rng.choice(("step", "epoch", "keys"))] = some_value(rng)
        member.frame(opening)
        for _ in range(rng.randrange(4)):
            edges = (0, 1, 3, 4, -1, 7, 12_000, 12_001, 2**63)
            parts = [rng.choices(edges, k=3) for _ in range(rng.randrange(4))]
            member.frame({"parts": rng.choice((parts, some_value(rng)))})

    return Member(say).stream


def bad_frames(rng: random.Random, target: Target) -> MemoryStream:
    """A member's good frames, with something wrong in the bytes on the way."""
    header, body = push(target.host, STEP + 1)

    def say(member: Member) -> None:
        start = len(member.stream.said)
        member.frame({"op": rng.choice(("push", "fetch", "echo"))})
        member.frame(header)
        for numbers, part in body:
            member.frame({"chunks": numbers}, part)
        member.frame({"end": True})
        good = bytes(member.stream.said[start:])
        member.stream.said[start:] = mutated(rng, good)

    return Member(say).stream


def bad_msgpack(rng: random.Random, _: Target) -> MemoryStream:
    """Well sealed: nesting, false lengths, sizes over the limits."""
    nested = rng.choice(
        (b"\x91", b"\x81\x01", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff")
    )
    packed = nested * rng.choice((1, 10, 600, 3000))
    sizes = rng.choice(((len(packed), 3), (2**32 - 1, 0), (4, 2**64 - 1), (2**24, 9)))

    def say(member: Member) -> None:
        if rng.random() < 0.5:
            member.frame({"op": rng.choice(("push", "fetch", "echo"))})
        member.sealed(struct.pack("<4sB3xIQ", b"DTFT", 2, *sizes), packed)

    return Member(say).stream


KINDS = (stranger, stranger, stranger, bad_hello, bad_push, bad_fetch, bad_frames) + (
    bad_msgpack,
)


def one(target: Target, rng: random.Random) -> str:
    """Throws one input; returns its kind."""
    kind = rng.choice(KINDS)
    stream, before = kind(rng, target), target.fingerprint()
    target.serve(stream)
    if kind is stranger:
        assert target.fingerprint() == before, "a stranger changed something"
        assert len(stream.heard) <= wire.GREETING_BYTES + wire.PROOF_BYTES
        assert stream.heard[wire.GREETING_BYTES :] in (b"", wire.REFUSAL)
    return kind.__name__


def over_a_socket(target: Target, rng: random.Random) -> None:
    """A stranger's input again, over TCP."""
    said = bytes(stranger(rng, target).said)
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
    assert heard[wire.GREETING_BYTES :] in (b"", wire.REFUSAL)


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
    with hosts(folder, divided(2)) as (_, host), _unexpected() as unexpected:
        target = Target(host)
        for number in range(inputs):
            if time.monotonic() > end:
                break
            rng = random.Random(f"{seed} {number}")
            try:
                kind = one(target, rng)
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
    """Prints what was thrown and how memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--socket-every", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run(1000, -1, Path(folder))
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
    print(f"peak memory grew by {grown / 1024:.1f} MiB over the first 1000 inputs'")
    print(f"the server lives, nothing changed; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
