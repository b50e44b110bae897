"""Frames survive, malformed ones are WireErrors, and only the secret opens the door."""

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.protocol import (
    AuthenticationError,
    Credentials,
    WireError,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=10,
)
headers = st.dictionaries(st.text(), values, max_size=4)
nonces = st.binary(min_size=32, max_size=32)
JOB = Credentials(job="job", secret=b"secret")


@given(headers, st.integers(0, protocol.MAX_PAYLOAD))
def test_round_trip(header: dict, payload_bytes: int) -> None:
    frame = protocol.encode_header(header, payload_bytes)
    lengths = protocol.decode_prefix(frame[: protocol.PREFIX_BYTES])
    assert lengths == (len(frame) - protocol.PREFIX_BYTES, payload_bytes)
    assert protocol.decode_header(frame[protocol.PREFIX_BYTES :]) == header


@given(headers, st.dictionaries(st.text(), st.lists(values, max_size=4), max_size=3))
def test_lists_that_were_packed_before_are_packed_alike(header: dict, lists: dict):
    packed = {name: protocol.Packed(values) for name, values in lists.items()}
    assert protocol.pack(header | packed) == protocol.pack(header | lists)


@given(st.binary(max_size=40) | st.binary(min_size=20, max_size=20))
@settings(max_examples=300, deadline=None)
def test_garbage_prefixes(data: bytes) -> None:
    with pytest.raises(WireError):
        protocol.decode_prefix(data)
    with pytest.raises(WireError):
        protocol.read_greeting(data)


@given(st.binary(max_size=60) | values.map(msgpack.packb))
@settings(max_examples=300, deadline=None)
def test_garbage_headers_are_dicts_or_wire_errors(data: bytes) -> None:
    try:
        assert isinstance(protocol.decode_header(data), dict)
    except WireError:
        pass


@given(headers, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_frames_never_raise_anything_else(
    header: dict, choose: st.DataObject
) -> None:
    frame = bytearray(protocol.encode_header(header, 3))
    at = choose.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= choose.draw(st.integers(1, 255))
    try:
        protocol.decode_prefix(frame[: protocol.PREFIX_BYTES])
        protocol.decode_header(frame[protocol.PREFIX_BYTES :])
    except WireError:
        pass


@pytest.mark.parametrize("header", [b"\x93" * 100_000, b"\x81\x90\x01", b"\xdf\xff"])
def test_hostile_msgpack(header: bytes) -> None:
    with pytest.raises(WireError, match="not msgpack|nests them"):
        protocol.decode_header(header)


def test_limits_hold_on_both_sides() -> None:
    with pytest.raises(ValueError, match="Send it in several frames"):
        protocol.encode_header({"x": bytes(protocol.MAX_HEADER)}, 0)
    with pytest.raises(ValueError, match="Send it in several frames"):
        protocol.encode_header({}, protocol.MAX_PAYLOAD + 1)
    for lengths in [(protocol.MAX_HEADER + 1, 0), (0, protocol.MAX_PAYLOAD + 1)]:
        prefix = struct.pack("<4sB3xIQ", protocol.MAGIC, protocol.VERSION, *lengths)
        with pytest.raises(WireError, match="allowed are"):
            protocol.decode_prefix(prefix)


def test_other_versions_are_told_to_upgrade() -> None:
    prefix = struct.pack("<4sB3xIQ", protocol.MAGIC, 9, 0, 0)
    with pytest.raises(WireError, match="version 9 .* Install the same dtft"):
        protocol.decode_prefix(prefix)


@given(nonces, nonces)
def test_proofs_are_bound_to_role_job_secret_nonces_and_certificate(
    a: bytes, b: bytes
) -> None:
    said = protocol.Handshake(client_nonce=a, server_nonce=b)
    bound = protocol.Handshake(client_nonce=a, server_nonce=b, binding=b"c" * 32)
    swapped = protocol.Handshake(client_nonce=b, server_nonce=a)
    proofs = {
        protocol.proof(JOB, "client", said),
        protocol.proof(JOB, "server", said),
        *protocol.session_keys(JOB, said),
        protocol.proof(JOB, "client", bound),
        protocol.proof(Credentials(job="joc", secret=b"secret"), "client", said),
        protocol.proof(Credentials(job="job", secret=b"Secret"), "client", said),
        *({protocol.proof(JOB, "client", swapped)} if a != b else {b""}),
    }
    assert len(proofs) == 8
    protocol.check_proof(
        protocol.proof(JOB, "client", said), protocol.proof(JOB, "client", said), ""
    )


def test_wrong_proofs_name_the_peer_and_what_to_check() -> None:
    said = protocol.Handshake(client_nonce=bytes(32), server_nonce=bytes(32))
    expected = protocol.proof(JOB, "client", said)
    for received, reason in [(b"x" * 32, "wrong proof"), (protocol.REFUSAL, "refused")]:
        with pytest.raises(
            AuthenticationError, match=f"10.0.0.5:1 .*{reason}"
        ) as error:
            protocol.check_proof(received, expected, "10.0.0.5:1")
        assert "secret file of this host differs from the job's" in str(error.value)


def test_secrets_stay_out_of_logs_and_are_not_empty() -> None:
    assert "hidden" not in repr(Credentials(job="job", secret=b"hidden"))
    with pytest.raises(ValueError, match="is empty"):
        Credentials(job="job", secret=b"")
    assert protocol.greeting()[1] != protocol.greeting()[1]
