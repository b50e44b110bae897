"""The start of every connection: TLS if the job has it, then proofs of the secret.

Runs the steps of `wire.py`'s handshake over a channel. Each side proves itself before
it believes or tells anything; a stranger learns one nonce. Must not know what the
connection is for.
"""

import socket

from dtft.checkpoint import wire
from dtft.checkpoint.channel import SILENCE_MS, Channel
from dtft.checkpoint.stream import Stream, TlsStream
from dtft.checkpoint.wire import Credentials


def open_channel(
    connection: socket.socket, address: str, credentials: Credentials, *, server: bool
) -> Channel:
    """A channel over a connected socket, which must still prove itself."""
    if credentials.tls is None:
        return Channel(Stream(connection, SILENCE_MS), address)
    stream = TlsStream(connection, SILENCE_MS, credentials.tls, server=server)
    return Channel(stream, address)


def _greet_tls(channel: Channel, deadline: float) -> None:
    if isinstance(channel.stream, TlsStream):
        try:
            with channel.descriptor():  # or a close from outside frees its number
                channel.stream.greet(deadline)
        except OSError as error:
            raise type(error)(
                f"peer {channel.address}: {error}. Check that all hosts of the job "
                "are given a certificate (tls), or none."
            ) from error


def prove_as_client(
    channel: Channel, credentials: Credentials, deadline: float
) -> None:
    """The client's half of the handshake, which gives the channel its keys.

    Raises:
        AuthenticationError: the server does not know the secret, or refuses ours.
        WireError: the server speaks something else.
        TimeoutError: the monotonic clock has passed `deadline`.
    """
    _greet_tls(channel, deadline)
    message, own = wire.greeting()
    channel.write(message, deadline=deadline)
    other = wire.read_greeting(channel.read(wire.GREETING_BYTES, deadline=deadline))
    handshake = wire.Handshake(
        client_nonce=own, server_nonce=other, binding=channel.stream.binding
    )
    proof = wire.proof(credentials, "client", handshake)
    channel.write(proof, deadline=deadline)
    expected = wire.proof(credentials, "server", handshake)
    answer = channel.read(wire.PROOF_BYTES, deadline=deadline)
    wire.check_proof(answer, expected, channel.address)
    to_server, to_client = wire.session_keys(credentials, handshake)
    channel.protect(to_server, to_client)


def prove_as_server(
    channel: Channel, credentials: Credentials, deadline: float
) -> None:
    """The server's half of the handshake: reads 72 bytes at most, of fixed sizes.

    Raises:
        AuthenticationError: the client does not know the secret; it has been told.
        WireError: the client speaks something else.
    """
    _greet_tls(channel, deadline)
    other = wire.read_greeting(channel.read(wire.GREETING_BYTES, deadline=deadline))
    message, own = wire.greeting()
    channel.write(message, deadline=deadline)
    handshake = wire.Handshake(
        client_nonce=other, server_nonce=own, binding=channel.stream.binding
    )
    answer = channel.read(wire.PROOF_BYTES, deadline=deadline)
    expected = wire.proof(credentials, "client", handshake)
    try:
        wire.check_proof(answer, expected, channel.address)
    except wire.AuthenticationError:
        channel.write(wire.REFUSAL, deadline=deadline)
        raise
    proof = wire.proof(credentials, "server", handshake)
    channel.write(proof, deadline=deadline)
    to_server, to_client = wire.session_keys(credentials, handshake)
    channel.protect(to_client, to_server)
