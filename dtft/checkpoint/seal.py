"""Seals of one connection: every frame's place in the order, and its header, proved.

Each direction has its own key, made from the job's secret and both nonces of the
handshake, and counts its frames. So a flipped bit, a frame that is missing, repeated,
out of order, reflected or taken from another connection is noticed before its header is
used or a byte of its payload is stored. The payload's size is sealed and its bytes are
not: whoever receives them checks digests. Must not know sockets or time.
"""

import hashlib
import hmac
from typing import Any, NoReturn

from dtft.checkpoint import wire

SEAL_BYTES = 16
"""Size of a seal; one follows the prefix, another the header."""
FRAME_START_BYTES = wire.PREFIX_BYTES + SEAL_BYTES
"""What is read first of every frame: the prefix and its seal."""


class Sealer:
    """The sending side of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        """`key` is one of `wire.session_keys`."""
        self._key, self._count = key, 0

    def frame(self, header: dict[str, Any], payload_bytes: int) -> bytes:
        """All of the next frame that goes before its payload.

        >>> start = Sealer(b"key").frame({"op": "push"}, payload_bytes=5)
        >>> opener = Opener(b"key")
        >>> opener.start(start[:FRAME_START_BYTES])
        (9, 5)
        >>> opener.header(start[FRAME_START_BYTES:])
        {'op': 'push'}

        Raises:
            ValueError: header or payload is over its limit.
        """
        return self.seal(wire.encode_header(header, payload_bytes))

    def seal(self, plain: bytes) -> bytes:
        """As `frame`, from what `wire.encode_header` made."""
        prefix, packed = plain[: wire.PREFIX_BYTES], plain[wire.PREFIX_BYTES :]
        first = _seal(self._key, self._count, b"p", prefix)
        second = _seal(self._key, self._count, b"h", plain)
        return b"".join((prefix, first, packed, second))

    def advance(self) -> None:
        """The frame has been sent; the next one has the next number."""
        self._count += 1


class Opener:
    """The receiving side of one direction; `start`, then `header`, for each frame."""

    def __init__(self, key: bytes) -> None:
        """`key` is one of `wire.session_keys`."""
        self._key, self._count = key, 0
        self._prefix = b""

    def start(self, data: bytes | bytearray) -> tuple[int, int]:
        """Length of the header, without its seal, and of the payload.

        Raises:
            WireError: not the next frame of this connection, or over the limits.
        """
        self._prefix = bytes(data[: wire.PREFIX_BYTES])
        lengths = wire.decode_prefix(self._prefix)
        if not self._sealed(b"p", self._prefix, data[wire.PREFIX_BYTES :]):
            self._refuse("prefix")
        return lengths

    def header(
        self, data: bytes | bytearray, max_header: int = wire.MAX_HEADER
    ) -> dict[str, Any]:
        """The header of the frame that `start` began, from its bytes and their seal.

        Raises:
            WireError: it is not what the peer sent, not msgpack, not a map, or has
                more values than a header of at most `max_header` bytes may.
        """
        packed = data[:-SEAL_BYTES]
        if not self._sealed(b"h", self._prefix + packed, data[-SEAL_BYTES:]):
            self._refuse("header")
        self._count += 1
        return wire.decode_header(packed, max_header)

    def _sealed(self, part: bytes, content: bytes, received: bytes | bytearray) -> bool:
        expected = _seal(self._key, self._count, part, content)
        return hmac.compare_digest(expected, bytes(received))

    def _refuse(self, part: str) -> NoReturn:
        raise wire.WireError(
            f"the {part} of frame {self._count} has a wrong seal: it was changed on "
            "the way, or is not the next frame of this connection"
        )


def _seal(key: bytes, count: int, part: bytes, content: bytes | bytearray) -> bytes:
    seal = hashlib.blake2b(key=key, digest_size=SEAL_BYTES, salt=part)
    seal.update(count.to_bytes(8, "little"))
    seal.update(content)
    return seal.digest()
