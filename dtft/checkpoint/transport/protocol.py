"""The wire protocol, without I/O: frames, their seals, and the handshake.

A frame is one message: a prefix (version and lengths), a header (a dict in msgpack) and
a payload (bytes). The handshake proves that both sides know the job's secret and
derives the keys of the seals. A seal is a keyed hash, which authenticates a frame's
header and its position in the order of frames. The values in a large header are counted
before the header is decoded (`unpack`), because five bytes of msgpack can announce four
billion elements. The protocol does not encrypt; TLS does.
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

BYTES_PER_ITEM = 16
"""A header with a limit of n bytes may have n / `BYTES_PER_ITEM` values, and always
`_SMALL` values (see `max_items`). A packed digest has more than `BYTES_PER_ITEM` bytes,
so a header full of digests reaches its limit of bytes first."""
MAX_DEPTH = 64
"""Deepest nesting of lists and maps that `count` accepts."""
_SMALL = 2048
"""`unpack` counts no values in data of at most this many bytes, because msgpack's own
limits bound the memory that so few bytes can take. Also the least result of
`max_items`."""


def max_items(max_bytes: int) -> int:
    """Computes how many values a header of at most `max_bytes` bytes may have.

    The bytes are those of the header in msgpack. Keys and the elements of lists count
    as values. The result is one value per 16 bytes, but at least `_SMALL` (2048)
    values.

    >>> max_items(1 << 20)
    65536
    """
    return max(max_bytes // BYTES_PER_ITEM, _SMALL)


def unpack(data: bytes | bytearray, limit: int) -> Any:
    """Decodes msgpack; refuses data with more than `limit` values.

    The values are counted before any of them is decoded, which bounds the memory: an
    empty list has one packed byte and takes 80 bytes, and msgpack reserves memory for
    all announced elements at once. The limit has no effect on data of at most `_SMALL`
    (2048) bytes, whose values are not counted.

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
    """Counts the values in msgpack data: the outermost value and all keys and elements.

    The elements that a list or map announces are counted before they are read, so input
    that exceeds the limit is refused early. The example has six values: the list, its
    three elements, and the key and the value in the map.

    >>> count(msgpack.packb([1, "two", {"three": None}]), limit=9)
    6

    Raises:
        ValueError: the data has more than `limit` values, is nested deeper than
            `MAX_DEPTH` (64), or ends before its last value begins.
    """
    at, found, end = 0, 1, len(data)
    open_ = [1]  # values still to be read of each open list or map
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        if at >= end:
            raise ValueError("not msgpack: it is cut short")
        kind, size, is_many = _KINDS[data[at]]
        at += 1
        if kind:  # the length follows in `kind` bytes
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
    """Describes the msgpack values whose first byte is `code`.

    Returns three numbers:

    * The size in bytes of the length field that follows `code`; 0 if there is none.
    * The length that `code` itself gives, in addition to the length field: the number
      of keys and elements of a list or map, or the number of bytes of any other value.
    * What one unit of the length field counts: 1 value for a list, 2 for a map (key and
      element), 0 for any other value, whose length is in bytes.
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


MAGIC = b"DTFT"
VERSION = 2
MAX_HEADER = 16 << 20
"""Largest packed header of any frame, in bytes."""
MAX_DATA_HEADER = 4 << 20
"""Largest packed header on a connection that moves slices, in bytes. Only the first
header of a push or a fetch, and the answer to it, may be larger (`MAX_HEADER`), because
they list all slices."""
MAX_REQUEST_HEADER = 64 << 10
"""Largest packed header, in bytes, of a hello (a connection's first message) or of a
request with few fields."""
MAX_PAYLOAD = 1 << 40
"""Largest payload in bytes. A payload above `MAX_UNPLACED` is received only into memory
from a `connection.Sink`."""
MAX_UNPLACED = 64 << 20
"""Largest payload in bytes that is received without a `connection.Sink`."""

_PREFIX = struct.Struct("<4sB3xIQ")
PREFIX_BYTES = _PREFIX.size
"""Size in bytes of a frame's prefix: magic, version, lengths of header and payload."""

NONCE_BYTES = 32
"""Size in bytes of each side's nonce, at the end of its greeting."""
_GREETING = struct.Struct(f"<4sB3x{NONCE_BYTES}s")
GREETING_BYTES = _GREETING.size
"""Size in bytes of each side's first handshake message: magic, version and nonce."""
PROOF_BYTES = 32
"""Size in bytes of each side's second handshake message: an HMAC-SHA256."""
REFUSAL = bytes(PROOF_BYTES)
"""The server's answer in place of its proof when the client's proof is wrong."""


class WireError(ConnectionError):
    """A peer sent bytes that violate the protocol of this version or its limits."""


class AuthenticationError(ConnectionError):
    """A peer's proof of the secret is wrong, or the peer has refused this host's proof.

    The message names what to check.
    """


@dataclass(frozen=True, kw_only=True)
class Tls:
    """A host's certificate and private key, as PEM files.

    The certificate may be self-signed. A process that only connects to hosts needs
    neither file.
    """

    certificate: Path | None = None
    """The certificate that the host presents to peers that connect."""
    key: Path | None = None
    """The certificate's private key."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Name and secret of the job, the same on all hosts, and this host's TLS files."""

    job: str
    """Name of the job."""
    secret: bytes = field(repr=False)
    """Contents of the secret file."""
    tls: Tls | None = None
    """This host's certificate and key; None sends unencrypted. All hosts of a job must
    use TLS, or none."""

    def __post_init__(self) -> None:
        if not self.secret:
            raise ValueError(
                f"secret of job {self.job!r} is empty. Allowed: 1 or more bytes, "
                "best 32 random ones. Give --secret-file a file that has them."
            )


class Packed(list[Any]):
    """A list that is converted to msgpack once, when made, and used in many headers."""

    def __init__(self, values: Iterable[Any]) -> None:
        """Converts the values to msgpack; headers lack later changes of the list."""
        super().__init__(values)
        self.data: bytes = msgpack.packb(list(self)) or b""


def pack(header: Mapping[str, Any]) -> bytes:
    """Converts the header of a frame (a message) to msgpack, without the prefix.

    The value of a key may be a `Packed` list, which is in msgpack already. The result
    is the same as for a plain list.

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
    """Encodes the start of a frame: its prefix and its header, without seals.

    The prefix has the version and the lengths of header and payload. In the example,
    the header has 9 bytes in msgpack.

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
    if len(packed) > max_items(MAX_HEADER):  # each value has at least one byte
        count(packed, max_items(MAX_HEADER))
    if len(packed) > MAX_HEADER or payload_bytes > MAX_PAYLOAD:
        raise ValueError(
            f"header has {len(packed)} bytes and payload {payload_bytes}. Allowed: "
            f"{MAX_HEADER} and {MAX_PAYLOAD}. Send it in several frames."
        )
    prefix = _PREFIX.pack(MAGIC, VERSION, len(packed), payload_bytes)
    return prefix + packed


def decode_prefix(data: bytes | bytearray) -> tuple[int, int]:
    """Decodes the prefix of a frame (a message) and checks its version and limits.

    Returns:
        The lengths in bytes of the header and of the payload.

    Raises:
        WireError: the prefix is not of a frame of this version, or a length exceeds its
            limit.
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
    """Decodes the header of a frame (a message) from msgpack.

    Args:
        data: the header in msgpack.
        max_header: limit of its size in bytes, from which `max_items` derives the limit
            of values.

    Raises:
        WireError: the data is not msgpack, not a map, has too many values, or is nested
            too deeply.
    """
    try:
        header = unpack(data, max_items(max_header))
    except ValueError as error:
        raise WireError(f"a frame's header: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"a frame's header is {type(header).__name__}, not a map")
    return header


def greeting() -> tuple[bytes, bytes]:
    """Makes a first handshake message with a new nonce; returns message and nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return _GREETING.pack(MAGIC, VERSION, nonce), nonce


def read_greeting(data: bytes | bytearray) -> bytes:
    """Reads the nonce of the other side's first handshake message.

    Raises:
        WireError: the data is not a greeting of this version.
    """
    if len(data) != GREETING_BYTES:
        raise WireError(f"a greeting has {GREETING_BYTES} bytes, not {len(data)}")
    magic, version, nonce = _GREETING.unpack(data)
    _check_version(magic, version)
    return nonce


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """The values that both sides know after their first messages of the handshake.

    These are a nonce of each side, and under TLS a hash of the server's certificate.
    """

    client_nonce: bytes
    server_nonce: bytes
    binding: bytes = b""
    """SHA-256 of the server's certificate; empty without TLS. Part of both proofs."""


def proof(
    credentials: Credentials, role: Literal["client", "server"], handshake: Handshake
) -> bytes:
    """Computes the proof that the client or the server knows the job's secret.

    The proof is an HMAC, keyed with the secret, of the job's name, `role` and the
    values of `handshake`.
    """
    return _derive(credentials, role, handshake)


def session_keys(credentials: Credentials, handshake: Handshake) -> tuple[bytes, bytes]:
    """Derives the two keys that authenticate the frames (messages) of one connection.

    Returns:
        The key for frames to the server, and the key for frames to the client.
    """
    return (
        _derive(credentials, "frames to server", handshake),
        _derive(credentials, "frames to client", handshake),
    )


def _derive(credentials: Credentials, use: str, handshake: Handshake) -> bytes:
    job = credentials.job.encode()
    bound = b"|".join((b"dtft handshake 2", use.encode(), b"%d" % len(job), job))
    # The nonces have fixed sizes, and so does a binding that is not empty.
    message = bound + handshake.client_nonce + handshake.server_nonce
    return hmac.digest(credentials.secret, message + handshake.binding, "sha256")


def check_proof(received: bytes | bytearray, expected: bytes, peer: str) -> None:
    """Compares a received proof with the expected one, in constant time.

    `peer` is the peer's address, for the error's text.

    Raises:
        AuthenticationError: the proofs differ, or the peer sent zero bytes (`REFUSAL`)
            in place of a proof, because it has found this host's proof wrong.
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


SEAL_BYTES = 16
"""Size of a seal in bytes; one seal follows the prefix, another the header."""
FRAME_START_BYTES = PREFIX_BYTES + SEAL_BYTES
"""Size in bytes of the part of a frame that is read first: the prefix and its seal."""


class Sealer:
    """Authenticates the frames (messages) of one direction of one connection.

    A seal is a keyed hash. Each direction has its own key, derived from the job's
    secret and both nonces of the handshake, and numbers its frames. The seals cover
    header, payload size and frame number. So the `Opener` detects frames that were
    changed, lost, repeated, reordered, sent back to their sender or taken from another
    connection, before the header is used or a byte of the payload is stored. The
    payload's bytes are not sealed; its receiver checks digests.
    """

    def __init__(self, key: bytes) -> None:
        """Takes the key of this direction, one of the two from `session_keys`."""
        self._key, self._count = key, 0

    def frame(self, header: dict[str, Any], payload_bytes: int) -> bytes:
        """Encodes the next frame up to its payload: prefix, header and their seals.

        In the example, `Opener.start` returns the lengths in bytes of the header and of
        the payload.

        >>> start = Sealer(b"key").frame({"op": "push"}, payload_bytes=5)
        >>> opener = Opener(b"key")
        >>> opener.start(start[:FRAME_START_BYTES])
        (9, 5)
        >>> opener.header(start[FRAME_START_BYTES:])
        {'op': 'push'}

        Raises:
            ValueError: header or payload is over its limit, or the header has too many
                values.
        """
        return self.seal(encode_header(header, payload_bytes))

    def seal(self, plain: bytes) -> bytes:
        """Adds the seals of the next frame to `plain`, a result of `encode_header`."""
        prefix, packed = plain[:PREFIX_BYTES], plain[PREFIX_BYTES:]
        first = _seal(self._key, self._count, b"p", prefix)
        second = _seal(self._key, self._count, b"h", plain)
        return b"".join((prefix, first, packed, second))

    def advance(self) -> None:
        """Advances the frame number; called after a frame was sent."""
        self._count += 1


class Opener:
    """Verifies the frames (messages) of a `Sealer`.

    Call `start`, then `header`, for each frame.
    """

    def __init__(self, key: bytes) -> None:
        """Takes the key with which the peer seals its frames (`session_keys`)."""
        self._key, self._count = key, 0
        self._prefix = b""

    def start(self, data: bytes | bytearray) -> tuple[int, int]:
        """Verifies a frame's prefix.

        Returns:
            The lengths in bytes of the header, without its seal, and of the payload.

        Raises:
            WireError: the data is not the start of the next frame of this connection,
                or a length exceeds its limit.
        """
        self._prefix = bytes(data[:PREFIX_BYTES])
        lengths = decode_prefix(self._prefix)
        if not self._sealed(b"p", self._prefix, data[PREFIX_BYTES:]):
            self._refuse("prefix")
        return lengths

    def header(
        self, data: bytes | bytearray, max_header: int = MAX_HEADER
    ) -> dict[str, Any]:
        """Verifies and decodes the header of the frame that `start` began.

        Args:
            data: the packed header and its seal.
            max_header: limit of the packed size in bytes, from which `max_items`
                derives the limit of values.

        Raises:
            WireError: the seal is wrong; or the header is not msgpack, not a map, has
                too many values, or is nested too deeply.
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
