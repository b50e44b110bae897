"""What travels between hosts: frames, and the handshake before the first of them.

Turns headers into bytes and back, and decides whether a peer knows the job's secret.
The handshake proves who connects and makes the keys that `seal.py` protects headers
with; it hides nothing, which is TLS's work. Pure values: must not know sockets or time.
"""

import hmac
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgpack

from dtft.checkpoint import bounded

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
    """A host's certificate and key (PEM files); it may be signed by itself.

    Who only connects to hosts needs neither.
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
    if len(packed) > bounded.max_items(MAX_HEADER):  # at least one byte each
        bounded.count(packed, bounded.max_items(MAX_HEADER))
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
        max_header: how large it might have been; `bounded.py` allows values by that.

    Raises:
        WireError: not msgpack, not a map, or made of too many values.
    """
    try:
        header = bounded.unpack(data, bounded.max_items(max_header))
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
