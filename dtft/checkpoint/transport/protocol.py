"""What travels between hosts, as values: frames, their seals, and the handshake.

The handshake proves who knows the job's secret and makes the keys of the seals. A seal
proves a frame's header and its place in the order. A peer's msgpack is counted before
it is decoded, because five bytes can announce four billion elements. Encryption is
TLS's.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgpack

# Decodes msgpack that a peer sent, without taking much more memory than it has bytes.
#
# One byte can stand for an empty list, which takes eighty, and five can announce four
# billion elements, for which msgpack would reserve memory at once. So the elements are
# counted before any is made.


BYTES_PER_ITEM = 16
"""A header may have so many bytes, and one more value for each of these. A digest has
more, so a header full of them reaches the limit of bytes first."""
MAX_DEPTH = 64
"""Deepest nesting of lists and maps."""
_SMALL = 2048
"""So few bytes are decoded uncounted: msgpack's own depth bounds what they take."""


def max_items(max_bytes: int) -> int:
    """How many values may be packed where `max_bytes` bytes are allowed.

    >>> max_items(1 << 20)
    65536
    """
    return max(max_bytes // BYTES_PER_ITEM, _SMALL)


def unpack(data: bytes | bytearray, limit: int) -> Any:
    """The value that `data` packs, if it is made of at most `limit` values.

    >>> unpack(msgpack.packb({"step": 7}), limit=3)
    {'step': 7}

    Raises:
        ValueError: too many values, too deeply nested, or not msgpack.
    """
    if len(data) > _SMALL:
        count(data, limit)
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # hostile input: msgpack has no common base class
        raise ValueError(f"not msgpack: {error!r}") from error


def count(data: bytes | bytearray, limit: int) -> int:
    """How many values a packed one is made of, keys, lists and maps included.

    Announced elements count before they are looked at, so little work is done for
    what is refused.

    >>> count(msgpack.packb([1, "two", {"three": None}]), limit=9)
    6

    Raises:
        ValueError: more than `limit`, deeper than `MAX_DEPTH`, or cut short.
    """
    at, found, end = 0, 1, len(data)
    open_ = [1]  # values still to come, in every list or map that is begun
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        if at >= end:
            raise ValueError("not msgpack: it is cut short")
        kind, size, is_many = _KINDS[data[at]]
        at += 1
        if kind:  # a length follows in so many bytes
            size += int.from_bytes(data[at : at + kind], "big") * (is_many or 1)
            at += kind
        if not is_many:
            at += size
            continue
        found += size
        if found > limit or len(open_) > MAX_DEPTH:
            raise ValueError(
                f"it packs more than {limit} values, or nests them more than "
                f"{MAX_DEPTH} deep"
            )
        open_.append(size)
    return found


def _kind(code: int) -> tuple[int, int, int]:
    """Of a first byte: bytes of the length after it, fixed size, values per element.

    The last is 0 for what is no list or map; then the size is in bytes.
    """
    if 0x80 <= code <= 0x8F:
        return 0, 2 * (code & 15), 2
    if 0x90 <= code <= 0x9F:
        return 0, code & 15, 1
    if 0xA0 <= code <= 0xBF:
        return 0, code & 31, 0
    several = {0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2)}
    if code in several:
        return several[code]
    if 0xC4 <= code <= 0xC9:  # bytes; extensions, which have a type
        return 1 << (code - 0xC4) % 3, int(code > 0xC6), 0
    if 0xD9 <= code <= 0xDB:  # text
        return 1 << code - 0xD9, 0, 0
    fixed = {0xCA: 4, 0xCB: 8}
    fixed |= {0xCC + i: 1 << i for i in range(4)}
    fixed |= {0xD0 + i: 1 << i for i in range(4)}
    fixed |= {0xD4 + i: 1 + (1 << i) for i in range(5)}
    return 0, fixed.get(code, 0), 0


_KINDS = tuple(_kind(code) for code in range(256))


# What travels between hosts: frames, and the handshake before the first of them.
#
# Turns headers into bytes and back, and decides whether a peer knows the job's secret.
# The handshake proves who connects and makes the keys that a `Sealer` protects headers
# with; it hides nothing, which is TLS's work. Pure values.


MAGIC = b"DTFT"
VERSION = 2
MAX_HEADER = 16 << 20
"""Largest header, packed, in bytes."""
MAX_DATA_HEADER = 4 << 20
"""Largest header of a connection that moves slices."""
MAX_REQUEST_HEADER = 64 << 10
"""Largest header of a hello, and of a question with few fields."""
MAX_PAYLOAD = 1 << 40
"""Largest payload in bytes; it is only ever received into memory given by a sink."""
MAX_UNPLACED = 64 << 20
"""Largest payload in bytes that is received without a sink."""

_PREFIX = struct.Struct("<4sB3xIQ")
PREFIX_BYTES = _PREFIX.size
"""Size of what precedes every header: magic, version, header and payload length."""

NONCE_BYTES = 32
"""Size of each side's nonce, at the end of its greeting."""
_GREETING = struct.Struct(f"<4sB3x{NONCE_BYTES}s")
GREETING_BYTES = _GREETING.size
"""Size of each side's first handshake message: magic, version and nonce."""
PROOF_BYTES = 32
"""Size of each side's second handshake message: an HMAC-SHA256."""
REFUSAL = bytes(PROOF_BYTES)
"""What a server answers instead of its proof when the client's is wrong."""


class WireError(ConnectionError):
    """A peer sent what is not a frame of this version, or one over the limits."""


class AuthenticationError(ConnectionError):
    """A peer does not have the job's secret; names the peer and what to check."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """A host's certificate and private key, as PEM files.

    The certificate may be self-signed. A process that only connects to hosts needs
    neither file.
    """

    certificate: Path | None = None
    """What the host shows to peers that connect."""
    key: Path | None = None
    """The certificate's private key."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What the hosts of one job share, and nobody else; and how they hide it."""

    job: str
    """Name of the job."""
    secret: bytes = field(repr=False)
    """Contents of the secret file."""
    tls: Tls | None = None
    """This host's certificate; without it nothing is encrypted. All hosts or none."""

    def __post_init__(self) -> None:
        if not self.secret:
            raise ValueError(
                f"secret of job {self.job!r} is empty. Allowed: 1 or more bytes, "
                "best 32 random ones. Give --secret-file a file that has them."
            )


class Packed(list[Any]):
    """A list that is in many headers and does not change: it is packed once."""

    def __init__(self, values: Iterable[Any]) -> None:
        """Packs the values now."""
        super().__init__(values)
        self.data: bytes = msgpack.packb(list(self)) or b""


def pack(header: Mapping[str, Any]) -> bytes:
    """A header without its prefix.

    >>> pack({"hosts": Packed("ab")}) == pack({"hosts": ["a", "b"]})
    True
    """
    if not any(type(value) is Packed for value in header.values()):
        return msgpack.packb(header) or b""
    parts = [msgpack.Packer().pack_map_header(len(header))]
    for name, value in header.items():
        data = value.data if type(value) is Packed else msgpack.packb(value)
        parts += [msgpack.packb(name), data]
    return b"".join(parts)


def encode_header(header: dict[str, Any], payload_bytes: int) -> bytes:
    """Prefix and header of a frame whose payload has `payload_bytes` bytes.

    >>> frame = encode_header({"op": "push"}, payload_bytes=5)
    >>> decode_prefix(frame[:PREFIX_BYTES])
    (9, 5)
    >>> decode_header(frame[PREFIX_BYTES:])
    {'op': 'push'}

    Raises:
        ValueError: header or payload is over its limit, or the header has too many
            values.
    """
    packed = pack(header)
    if len(packed) > max_items(MAX_HEADER):  # at least one byte each
        count(packed, max_items(MAX_HEADER))
    if len(packed) > MAX_HEADER or payload_bytes > MAX_PAYLOAD:
        raise ValueError(
            f"header has {len(packed)} bytes and payload {payload_bytes}. Allowed: "
            f"{MAX_HEADER} and {MAX_PAYLOAD}. Send it in several frames."
        )
    prefix = _PREFIX.pack(MAGIC, VERSION, len(packed), payload_bytes)
    return prefix + packed


def decode_prefix(data: bytes | bytearray) -> tuple[int, int]:
    """Length of the header and of the payload, both within the limits.

    Raises:
        WireError: not a frame of this version, or over the limits.
    """
    if len(data) != PREFIX_BYTES:
        raise WireError(f"a frame's prefix has {PREFIX_BYTES} bytes, not {len(data)}")
    magic, version, header_bytes, payload_bytes = _PREFIX.unpack(data)
    _check_version(magic, version)
    if header_bytes > MAX_HEADER or payload_bytes > MAX_PAYLOAD:
        raise WireError(
            f"frame with a header of {header_bytes} bytes and a payload of "
            f"{payload_bytes}; allowed are {MAX_HEADER} and {MAX_PAYLOAD}"
        )
    return header_bytes, payload_bytes


def decode_header(
    data: bytes | bytearray, max_header: int = MAX_HEADER
) -> dict[str, Any]:
    """The header from its packed form.

    Args:
        data: the packed form.
        max_header: how large it might have been; `unpack` allows values by that.

    Raises:
        WireError: not msgpack, not a map, or made of too many values.
    """
    try:
        header = unpack(data, max_items(max_header))
    except ValueError as error:
        raise WireError(f"a frame's header: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"a frame's header is {type(header).__name__}, not a map")
    return header


def greeting() -> tuple[bytes, bytes]:
    """A first handshake message and the new nonce in it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return _GREETING.pack(MAGIC, VERSION, nonce), nonce


def read_greeting(data: bytes | bytearray) -> bytes:
    """The nonce of the other side's first message.

    Raises:
        WireError: not a greeting of this version.
    """
    if len(data) != GREETING_BYTES:
        raise WireError(f"a greeting has {GREETING_BYTES} bytes, not {len(data)}")
    magic, version, nonce = _GREETING.unpack(data)
    _check_version(magic, version)
    return nonce


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """What both sides know after the greetings."""

    client_nonce: bytes
    server_nonce: bytes
    binding: bytes = b""
    """Hash of the server's certificate under TLS: another one's proofs differ."""


def proof(
    credentials: Credentials, role: Literal["client", "server"], handshake: Handshake
) -> bytes:
    """What only a holder of the secret can say, in this role, in this handshake."""
    return _derive(credentials, role, handshake)


def session_keys(credentials: Credentials, handshake: Handshake) -> tuple[bytes, bytes]:
    """The keys of the frames from client to server, and from server to client."""
    return (
        _derive(credentials, "frames to server", handshake),
        _derive(credentials, "frames to client", handshake),
    )


def _derive(credentials: Credentials, use: str, handshake: Handshake) -> bytes:
    job = credentials.job.encode()
    bound = b"|".join((b"dtft handshake 2", use.encode(), b"%d" % len(job), job))
    # The nonces have fixed sizes, and so has a binding that is not empty.
    message = bound + handshake.client_nonce + handshake.server_nonce
    return hmac.digest(credentials.secret, message + handshake.binding, "sha256")


def check_proof(received: bytes | bytearray, expected: bytes, peer: str) -> None:
    """Compares proofs in constant time.

    Raises:
        AuthenticationError: they differ; names the peer.
    """
    if hmac.compare_digest(bytes(received), expected):
        return
    reason = (
        "refused this host's proof" if received == REFUSAL else "gave a wrong proof"
    )
    raise AuthenticationError(
        f"peer {peer} {reason} of the job's secret: the secret file of this host "
        "differs from the job's, or the job name does. Check --secret-file (or "
        "DTFT_SECRET_FILE) and --job on both hosts."
    )


def _check_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise WireError(f"not a dtft peer: data starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(
            f"peer speaks version {version} of the protocol, this host {VERSION}. "
            "Install the same dtft on all hosts."
        )


# Seals of one connection: every frame's place in the order, and its header, proved.
#
# Each direction has its own key, made from the job's secret and both nonces of the
# handshake, and counts its frames. So a flipped bit, a frame that is missing, repeated,
# out of order, reflected or taken from another connection is noticed before its header
# is used or a byte of its payload is stored. The payload's size is sealed and its bytes
# are not: whoever receives them checks digests.


SEAL_BYTES = 16
"""Size of a seal; one follows the prefix, another the header."""
FRAME_START_BYTES = PREFIX_BYTES + SEAL_BYTES
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
        return self.seal(encode_header(header, payload_bytes))

    def seal(self, plain: bytes) -> bytes:
        """As `frame`, from what `wire.encode_header` made."""
        prefix, packed = plain[:PREFIX_BYTES], plain[PREFIX_BYTES:]
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
        self._prefix = bytes(data[:PREFIX_BYTES])
        lengths = decode_prefix(self._prefix)
        if not self._sealed(b"p", self._prefix, data[PREFIX_BYTES:]):
            self._refuse("prefix")
        return lengths

    def header(
        self, data: bytes | bytearray, max_header: int = MAX_HEADER
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
        return decode_header(packed, max_header)

    def _sealed(self, part: bytes, content: bytes, received: bytes | bytearray) -> bool:
        expected = _seal(self._key, self._count, part, content)
        return hmac.compare_digest(expected, bytes(received))

    def _refuse(self, part: str) -> NoReturn:
        raise WireError(
            f"the {part} of frame {self._count} has a wrong seal: it was changed on "
            "the way, or is not the next frame of this connection"
        )


def _seal(key: bytes, count: int, part: bytes, content: bytes | bytearray) -> bytes:
    seal = hashlib.blake2b(key=key, digest_size=SEAL_BYTES, salt=part)
    seal.update(count.to_bytes(8, "little"))
    seal.update(content)
    return seal.digest()
