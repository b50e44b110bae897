"""What hostile or broken clients say, for `wire_fuzz.py`; each input is one connection.

A client is a stream in memory that says its bytes and hangs up. Members prove that they
know the secret and seal their frames well, so that what they say reaches the handlers.
"""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from dtft.checkpoint.state.digests import chunk_digests
from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import SocketStream
from dtft.checkpoint.transport.protocol import Credentials
from tests.support.hosts import CHUNK, EPOCH, JOB, Host, content

STEP = 7
OPS = ("push", "fetch", "control", "inspect", "export", "scale", "echo")
OTHER = Credentials(job="another", secret=b"o" * 32)
"""Of a job of which strangers could learn just as much, or as little."""
Say = Callable[["Member"], None]


class MemoryStream(SocketStream):
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
    """A client that knows a secret: it proves that, then says frames."""

    def __init__(self, say: Say, credentials: Credentials = JOB) -> None:
        """`say` calls `frame` and `raw` once the handshake is done."""
        self._credentials = credentials
        greeting, self._nonce = protocol.greeting()
        self.stream = MemoryStream(greeting)
        self.stream.answer = self._prove
        self._say, self._key, self._count = say, b"", 0

    def _prove(self) -> None:
        other = protocol.read_greeting(self.stream.heard)
        handshake = protocol.Handshake(client_nonce=self._nonce, server_nonce=other)
        self.stream.said += protocol.proof(self._credentials, "client", handshake)
        self._key, _ = protocol.session_keys(self._credentials, handshake)
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
        said += prefix + protocol._seal(self._key, self._count, b"p", prefix)
        said += packed + protocol._seal(self._key, self._count, b"h", prefix + packed)
        self._count += 1


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


def say_push(member: "Member", header: dict[str, Any], body: Body) -> None:
    """All of a push, but for the hello."""
    member.frame(header)
    for numbers, part in body:
        member.frame({"chunks": numbers}, part)
    member.frame({"end": True})


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


def stranger(rng: random.Random, _: Host) -> MemoryStream:
    """Someone without the secret: noise, false proofs, frames all the same."""
    greeting = protocol.greeting()[0]
    claim = rng.choice((b"", protocol.REFUSAL, rng.randbytes(32), greeting[8:]))
    frames = b"".join(
        protocol.encode_header({"op": rng.choice(("push", "fetch", "echo"))}, 9)
        for _ in range(rng.randrange(3))
    )
    said = greeting + claim + frames
    return MemoryStream(mutated(rng, said) if rng.random() < 0.7 else said)


def outsider(rng: random.Random, host: Host) -> MemoryStream:
    """A member of another job, or of one with this name and another secret."""
    secret = rng.choice((OTHER.secret, JOB.secret[:-1], JOB.secret + b"s"))
    job = rng.choice((JOB.job, OTHER.job))
    header, body = push(host, STEP + 1)

    def say(member: Member) -> None:
        member.frame({"op": rng.choice(OPS)})
        say_push(member, header, body)

    return Member(say, Credentials(job=job, secret=secret)).stream


def bad_hello(rng: random.Random, _: Host) -> MemoryStream:
    """A member whose first frame is anything."""
    hello = rng.choice((some_value(rng), {"op": some_value(rng)}, rng.randbytes(20)))
    return Member(lambda m: m.frame(hello, rng.randbytes(rng.randrange(9)))).stream


def bad_push(rng: random.Random, host: Host) -> MemoryStream:
    """Pushes whose headers or bytes are wrong."""
    header, body = push(host, rng.choice((STEP, STEP + 1, STEP + 2)))

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


def bad_fetch(rng: random.Random, host: Host) -> MemoryStream:
    """Requests for what is not there, or not to be had."""
    keys = [piece.key for piece in host.holder.own_slices]

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


def bad_report(rng: random.Random, _: Host) -> MemoryStream:
    """What a host must not say to its leader."""

    def say(member: Member) -> None:
        hello = {"op": "control", "host": "host-0", "incarnation": "a"}
        if rng.random() < 0.3:
            hello[rng.choice(("host", "incarnation"))] = some_value(rng)
        member.frame(hello)
        for _ in range(rng.randrange(1, 4)):
            report = {
                "op": "held",
                "step": STEP,
                "source": 0,
                "target": 1,
                "root": "f" * 32,
            }
            for key in rng.sample(sorted(report), rng.randrange(3)):
                report[key] = some_value(rng)
            data = rng.randbytes(rng.choice((0, 0, 9)))
            member.frame(rng.choice((report, some_value(rng))), data)

    return Member(say).stream


def bad_question(rng: random.Random, _: Host) -> MemoryStream:
    """What people who look at a job would not ask."""

    def say(member: Member) -> None:
        member.frame({"op": rng.choice(("inspect", "export", "scale"))})
        question = {"verify": rng.choice((True, some_value(rng))), "limit_s": 1.0}
        rate = rng.choice((0, some_value(rng)))
        slow = isinstance(rate, int) and 0 < rate < 2**30  # it would wait, rightly
        question["rate"] = 0 if slow else rate
        question["replicas"] = rng.choice((2, some_value(rng)))
        for _ in range(rng.randrange(1, 4)):
            data = rng.randbytes(rng.choice((0, 0, 0, 9)))
            size = rng.choice((None, None, 0, 2**40))
            member.frame(rng.choice((question, some_value(rng))), data, size)

    return Member(say).stream


def bad_frames(rng: random.Random, host: Host) -> MemoryStream:
    """A member's good frames, with something wrong in the bytes on the way."""
    header, body = push(host, STEP + 1)

    def say(member: Member) -> None:
        start = len(member.stream.said)
        member.frame({"op": rng.choice(("push", "fetch", "echo"))})
        say_push(member, header, body)
        good = bytes(member.stream.said[start:])
        member.stream.said[start:] = mutated(rng, good)

    return Member(say).stream


def bad_msgpack(rng: random.Random, _: Host) -> MemoryStream:
    """Well sealed: nesting, false lengths, sizes over the limits."""
    nested = rng.choice(
        (b"\x91", b"\x81\x01", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff")
    )
    packed = nested * rng.choice((1, 10, 600, 3000))
    sizes = rng.choice(((len(packed), 3), (2**32 - 1, 0), (4, 2**64 - 1), (2**24, 9)))

    def say(member: Member) -> None:
        if rng.random() < 0.5:
            member.frame({"op": rng.choice(OPS)})
        member.sealed(struct.pack("<4sB3xIQ", b"DTFT", 2, *sizes), packed)

    return Member(say).stream


def bomb(rng: random.Random, _: Host) -> MemoryStream:
    """Well sealed: few bytes that stand for much, up to the largest header."""
    size = int(2 ** rng.uniform(10, 24))
    unit = rng.choice(
        (b"\x90", b"\x80", b"\x81\xc0\xc0", b"\xa2ab", b"\xdd\x00\x0f\xff\xff")
    )
    number = max(size // len(unit), 1)
    packed = b"\x81\xa1a\xdd" + number.to_bytes(4, "big") + unit * number

    def say(member: Member) -> None:
        member.frame({"op": rng.choice(OPS), "host": "host-0"})
        member.frame(packed[: protocol.MAX_HEADER])

    return Member(say).stream


KINDS = (
    *(stranger, stranger, stranger, stranger, outsider, bad_hello, bad_push),
    *(bad_fetch, bad_report, bad_question, bad_frames, bad_msgpack),
)
