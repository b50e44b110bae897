"""Opens and serves authenticated connections between hosts.

Both sides run the handshake: TLS if the job uses it, then proofs of the job's secret.
No frame is sent or accepted before both proofs are checked. A client without the secret
learns only the server's nonce (and its certificate under TLS).
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import (
    SILENCE_MS,
    Channel,
    ChannelClosed,
    Header,
    SocketStream,
    TlsStream,
    check_tls,
    no_payload,
)
from dtft.checkpoint.transport.dialing import (
    dial,
    format_address,
    parse_address,
    resolve,
    unreachable,
)
from dtft.checkpoint.transport.protocol import Credentials


def open_channel(
    connection: socket.socket, address: str, credentials: Credentials, *, server: bool
) -> Channel:
    """Makes a channel over a connected socket; the handshake must still run.

    The channel uses TLS if `credentials.tls` is set.

    Args:
        connection: the connected socket.
        address: "host:port" of the peer, for errors and logs.
        credentials: the job, its secret and this host's TLS files.
        server: whether this host accepted the connection.
    """
    if credentials.tls is None:
        return Channel(SocketStream(connection, SILENCE_MS), address)
    stream = TlsStream(connection, SILENCE_MS, credentials.tls, server=server)
    return Channel(stream, address)


def _greet_tls(channel: Channel, deadline: float) -> None:
    if isinstance(channel.stream, TlsStream):
        try:
            with channel.descriptor():  # keeps the descriptor if another thread closes
                channel.stream.greet(deadline)
        except OSError as error:
            raise type(error)(
                f"peer {channel.address}: {error}. Check that all hosts of the job "
                "are given a certificate (tls), or none."
            ) from error


def prove_as_client(
    channel: Channel, credentials: Credentials, deadline: float
) -> None:
    """Runs the client's half of the handshake.

    Both sides prove that they know the job's secret. Afterwards frames can be sent and
    received on the channel.

    Raises:
        AuthenticationError: the server does not know the secret, or refused the
            client's proof.
        WireError: the server speaks another protocol or version.
        ChannelClosed: the connection has ended.
        TimeoutError: the monotonic clock has passed `deadline`.
        OSError: the TLS handshake failed.
    """
    _greet_tls(channel, deadline)
    message, own = protocol.greeting()
    channel.write(message, deadline=deadline)
    other = protocol.read_greeting(
        channel.read(protocol.GREETING_BYTES, deadline=deadline)
    )
    handshake = protocol.Handshake(
        client_nonce=own, server_nonce=other, binding=channel.stream.binding
    )
    proof = protocol.proof(credentials, "client", handshake)
    channel.write(proof, deadline=deadline)
    expected = protocol.proof(credentials, "server", handshake)
    answer = channel.read(protocol.PROOF_BYTES, deadline=deadline)
    protocol.check_proof(answer, expected, channel.address)
    to_server, to_client = protocol.session_keys(credentials, handshake)
    channel.protect(to_server, to_client)


def prove_as_server(
    channel: Channel, credentials: Credentials, deadline: float
) -> None:
    """Runs the server's half of the handshake.

    Both sides prove that they know the job's secret. Afterwards frames can be sent and
    received on the channel. Apart from TLS, reads messages of fixed sizes, 72 bytes
    together.

    Raises:
        AuthenticationError: the client does not know the secret; the refusal was sent.
        WireError: the client speaks another protocol or version.
        ChannelClosed: the connection has ended.
        TimeoutError: the monotonic clock has passed `deadline`.
        OSError: the TLS handshake failed.
    """
    _greet_tls(channel, deadline)
    other = protocol.read_greeting(
        channel.read(protocol.GREETING_BYTES, deadline=deadline)
    )
    message, own = protocol.greeting()
    channel.write(message, deadline=deadline)
    handshake = protocol.Handshake(
        client_nonce=other, server_nonce=own, binding=channel.stream.binding
    )
    answer = channel.read(protocol.PROOF_BYTES, deadline=deadline)
    expected = protocol.proof(credentials, "client", handshake)
    try:
        protocol.check_proof(answer, expected, channel.address)
    except protocol.AuthenticationError:
        channel.write(protocol.REFUSAL, deadline=deadline)
        raise
    proof = protocol.proof(credentials, "server", handshake)
    channel.write(proof, deadline=deadline)
    to_server, to_client = protocol.session_keys(credentials, handshake)
    channel.protect(to_client, to_server)


logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Limit in seconds, at the server, for the handshake and the client's first message
(hello) together."""
MAX_STRANGERS = 256
"""Largest number of a server's connections whose handshake is not finished. One more
connection closes the oldest of them, so that clients without the secret cannot block
the job's hosts."""


def connect(
    address: str,
    credentials: Credentials,
    hello: Header,
    timeout_s: float,
    following: Sequence[Header] = (),
) -> Channel:
    """Opens an authenticated channel to a server and sends the first message (hello).

    Args:
        address: "host:port" of a TransportServer.
        credentials: the job and its secret.
        hello: first message; its "op" selects the server's handler.
        timeout_s: limit of connection, handshake and hello together, in seconds.
        following: further messages for the handler, sent without waiting for the
            server's answer to the hello.

    Raises:
        ValueError: `address` is not "host:port", or a message is too large.
        ConnectionRefusedError: no server listens at the address.
        OSError: the host's name is not known, or the host cannot be reached.
        AuthenticationError: the secrets or the job names differ.
        WireError: the peer speaks another protocol or version.
        ChannelClosed: the peer closed the connection, or does not serve the op.
        TimeoutError: the limit was exceeded; the message names the peer.
    """
    deadline = time.monotonic() + timeout_s
    parse_address(address)
    if timeout_s <= 0:
        raise TimeoutError(f"peer {address}: no time is left to connect")
    try:
        connection = dial(address, timeout_s)
    except TimeoutError as error:
        raise TimeoutError(
            f"peer {address}: {timeout_s} s connecting without an answer. Check that "
            "the host is up, that its name is known (DNS) and that no firewall drops "
            "the port."
        ) from error
    except OSError as error:  # errno keeps the subclass, e.g. ConnectionRefusedError
        raise OSError(
            error.errno, f"cannot connect to peer {address}: {error.strerror}"
        ) from error
    channel = open_channel(connection, address, credentials, server=False)
    try:
        prove_as_client(channel, credentials, deadline)
        for header in (hello, *following):
            channel.send(header, timeout_s=deadline - time.monotonic())
        channel.peer, _ = channel.receive(
            deadline - time.monotonic(),
            no_payload,
            max_header=protocol.MAX_REQUEST_HEADER,
        )
        if "refused" in channel.peer:
            raise ChannelClosed(f"peer {address} refused: {channel.peer['refused']}")
    except BaseException:
        channel.close()
        raise
    return channel


class TransportServer:
    """Listens for connections, and runs a handler for each in a separate thread.

    Invalid input of a client closes the client's connection and never ends the server.
    """

    def __init__(
        self,
        bind: str,
        credentials: Credentials,
        handlers: Mapping[str, Callable[[Channel], None]],
        *,
        max_connections: int = 4096,
    ) -> None:
        """Starts to listen.

        Args:
            bind: "host:port" that peers can reach; port 0 chooses a free port.
            credentials: the job and its secret.
            handlers: maps the "op" of a client's first message (hello) to the handler,
                which owns the channel until it returns.
            max_connections: most connections at a time; further connections are closed
                at once.

        Raises:
            ValueError: `bind` is not an address that peers can reach, or the
                certificate or key cannot be loaded.
            OSError: the server cannot listen at the address.
        """
        host, port = parse_address(bind)
        if (why := unreachable(host)) is not None:
            raise ValueError(
                f"bind={bind!r} is not an address that peers could connect to: {why}. "
                "Allowed: one of this host's own, such as 10.0.0.5:0 or [fd00::5]:0. "
                "Change --bind."
            )
        if credentials.tls is not None:
            check_tls(credentials.tls)
        family, own = resolve(host, port, HANDSHAKE_S)[0]
        self._listener = socket.create_server(own, family=family, backlog=1024)
        self._listener.settimeout(1.0)
        self.address = format_address(*self._listener.getsockname()[:2])
        """"host:port" for peers."""
        self._credentials, self._handlers = credentials, dict(handlers)
        self._max_connections = max_connections
        self._threads: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}  # oldest first
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._acceptor = threading.Thread(
            target=self._accept, name=f"transport {self.address}", daemon=True
        )
        self._acceptor.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops listening and closes all connections.

        Waits at most `timeout_s` seconds in all for the handlers to return.
        """
        deadline = time.monotonic() + timeout_s
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        with self._lock:
            threads = dict(self._threads)
        for channel in threads:
            channel.close()
        for thread in (self._acceptor, *threads.values()):
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed.wait(0.1):  # too many open files, perhaps
                    logger.warning(
                        "%s cannot accept a connection and tries again: %s",
                        self.address,
                        error,
                    )
                continue
            try:
                self._admit(connection, format_address(*address[:2]))
            except (OSError, RuntimeError) as error:  # reset already; no more threads
                connection.close()
                logger.warning("dropped connection from %s: %s", address, error)

    def _admit(self, connection: socket.socket, address: str) -> None:
        channel = open_channel(connection, address, self._credentials, server=True)
        thread = threading.Thread(target=self._serve, args=(channel,), daemon=True)
        with self._lock:
            count, oldest = len(self._threads), None
            admitted = not self._closed.is_set() and count < self._max_connections
            if admitted:
                thread.start()
                self._threads[channel] = thread
                self._strangers[channel] = None
                if len(self._strangers) > MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
        if not admitted:
            connection.close()
            logger.warning(
                "refused a connection from %s: this server is closing, or has as many "
                "connections as it may have (%d are open)",
                address,
                count,
            )
        if oldest is not None:
            oldest.close()

    def _serve(self, channel: Channel) -> None:
        try:
            handler = self._welcome(channel)
            if handler is not None:
                handler(channel)
        except protocol.AuthenticationError as error:
            logger.warning("%s", error)
        except (OSError, TimeoutError) as error:
            logger.info("connection from %s ended: %s", channel.address, error)
        except Exception:
            logger.exception(
                "serving the connection from %s failed; closing it", channel.address
            )
        finally:
            channel.close()
            with self._lock:
                self._threads.pop(channel, None)
                self._strangers.pop(channel, None)

    def _welcome(self, channel: Channel) -> Callable[[Channel], None] | None:
        deadline = time.monotonic() + HANDSHAKE_S
        prove_as_server(channel, self._credentials, deadline)
        with self._lock:
            self._strangers.pop(channel, None)
        hello, _ = channel.receive(
            deadline - time.monotonic(),
            no_payload,
            max_header=protocol.MAX_REQUEST_HEADER,
        )
        op = hello.get("op")
        handler = self._handlers.get(op) if isinstance(op, str) else None
        if handler is None:
            allowed = ", ".join(sorted(self._handlers))
            reason = f"op {op!r} is not served here. Allowed: {allowed}."
            channel.send({"refused": reason}, timeout_s=HANDSHAKE_S)
            return None
        channel.peer = hello
        channel.send({}, timeout_s=deadline - time.monotonic())
        return handler
