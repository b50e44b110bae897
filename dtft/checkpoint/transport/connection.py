"""One TCP connection between two hosts: sends and receives frames, plain or under TLS.

Sends from and receives into memory that others own, without copies, and gives every
wait a deadline. Keepalive notices a silent peer; seals notice frames that were changed,
lost, repeated or reordered.
"""

import contextlib
import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.protocol import Tls

# The bytes under a channel: a TCP socket that never blocks, plain or under TLS.
#
# Decides how bytes enter and leave one socket. TLS hides them; who the peer is, is
# proved by the handshake of `server`, which is bound to the server's certificate,
# so a certificate that signs itself is enough.


_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_TLS_BYTES_PER_CALL = 1 << 18  # one call encrypts it all, holding the lock


class WouldBlock(Exception):
    """Nothing can be done until the socket has `event` (POLLIN or POLLOUT)."""

    def __init__(self, event: int) -> None:
        """Keeps what to poll for."""
        super().__init__(event)
        self.event = event


class SocketStream:
    """A plain TCP connection. One thread may send while another receives."""

    binding = b""
    """What the handshake's proofs are bound to; nothing without TLS."""
    keeps_unsent = False
    """Whether a `send` that would block has begun all the same: the next one must be
    given the same bytes."""

    def __init__(self, connection: socket.socket, silence_ms: int) -> None:
        """Takes over a connected socket.

        Args:
            connection: the socket.
            silence_ms: a peer whose kernel acknowledges nothing for so long is gone.
        """
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Sends some of the bytes; returns how many.

        Raises:
            WouldBlock: there is no room now.
            OSError: the connection has ended.
        """
        try:
            return self.socket.sendmsg(buffers[:_BUFFERS_PER_CALL])
        except BlockingIOError:
            raise WouldBlock(select.POLLOUT) from None

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Receives some bytes into the buffers, in order; 0 at the stream's end.

        Raises:
            WouldBlock: there is nothing now.
            OSError: the connection has ended.
        """
        try:
            return self.socket.recvmsg_into(buffers[:_BUFFERS_PER_CALL])[0]
        except BlockingIOError:
            raise WouldBlock(select.POLLIN) from None

    def poll(self, event: int, timeout_s: float) -> bool:
        """Waits until `event`; False if it did not come in time."""
        poller = select.poll()
        poller.register(self.socket, event)
        return bool(poller.poll(max(timeout_s, 0) * 1000))

    def end(self) -> None:
        """Ends the connection both ways; threads that wait in `poll` wake."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which would let another thread read plain bytes.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back; nobody may use the stream any more."""
        self.socket.close()


class TlsStream(SocketStream):
    """A TCP connection under TLS 1.3."""

    keeps_unsent = True

    def __init__(
        self, connection: socket.socket, silence_ms: int, tls: Tls, *, server: bool
    ) -> None:
        """Takes over a connected socket; call `greet` before anything else."""
        super().__init__(connection, silence_ms)
        self._tls, self._server, self._lock = tls, server, threading.Lock()
        self._ended = False

    def greet(self, deadline: float) -> None:
        """TLS's own handshake; sets `binding`. Reads the certificate's files.

        Raises:
            TimeoutError: the monotonic clock has passed `deadline`.
            OSError: the peer speaks no TLS, or has gone; or the files cannot be read.
        """
        # Not when the connection is accepted: a slow disk would keep others out.
        self.socket = self._secure = _context(self._tls, self._server).wrap_socket(
            self.socket, server_side=self._server, do_handshake_on_connect=False
        )
        if self._ended:  # meanwhile, which the new object was not told
            super().end()
        while True:
            try:
                self._secure.do_handshake()
                break
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if not self.poll(_event(error), deadline - time.monotonic()):
                    raise TimeoutError("timed out waiting for TLS to begin") from None
        if self._server:
            assert self._tls.certificate is not None
            text = _first_certificate(self._tls.certificate)
            certificate = ssl.PEM_cert_to_DER_cert(text)
        else:
            certificate = self._secure.getpeercert(binary_form=True) or b""
        self.binding = hashlib.sha256(certificate).digest()

    def end(self) -> None:
        """As `Stream.end`."""
        self._ended = True
        super().end()

    def send(self, buffers: Sequence[memoryview]) -> int:
        """As `Stream.send`."""
        with self._lock:
            try:
                return self._secure.send(buffers[0][:_TLS_BYTES_PER_CALL])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise WouldBlock(_event(error)) from None

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """As `Stream.receive_into`."""
        with self._lock:
            try:
                return self._secure.recv_into(buffers[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise WouldBlock(_event(error)) from None

    def poll(self, event: int, timeout_s: float) -> bool:
        """As `Stream.poll`; bytes that are decrypted already count as POLLIN."""
        if event == select.POLLIN:
            with self._lock:
                if self._secure.pending():
                    return True
        return super().poll(event, timeout_s)


def check_tls(tls: Tls) -> None:
    """Reads a server's certificate and key.

    Raises:
        ValueError: one is missing or unreadable, or they do not belong together.
    """
    try:
        if tls.certificate is None or tls.key is None:
            raise FileNotFoundError("whoever serves needs both")
        _context(tls, server=True)
    except OSError as error:
        raise ValueError(
            f"tls.certificate={tls.certificate}, tls.key={tls.key}: {error}. Allowed: "
            "PEM files that belong together. Make a pair with `openssl req -x509 "
            "-nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1`."
        ) from error


def _context(tls: Tls, server: bool) -> ssl.SSLContext:
    side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        assert tls.certificate is not None
        context.load_cert_chain(tls.certificate, tls.key)
    else:  # the proof of the secret, bound to the certificate, says who it is
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _first_certificate(path: Path) -> str:
    text = path.read_text()
    end = "-----END CERTIFICATE-----"
    return text[text.index("-----BEGIN") : text.index(end)] + end + "\n"


def _event(error: ssl.SSLError) -> int:
    wants_read = isinstance(error, ssl.SSLWantReadError)
    return select.POLLIN if wants_read else select.POLLOUT


Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]
Memory = memoryview | Sequence[memoryview]
Sink = Callable[[Header, int], Memory | None]
"""From header and payload size to the memory for the payload, in one or more parts;
None discards it."""

SILENCE_MS = 10_000
"""A peer whose kernel acknowledges nothing for this long is gone."""
SILENCE_S = 10.0
"""A peer that stops for this long in the middle of a frame is given up."""
_SCRATCH_BYTES = 1 << 20


def no_payload(_: Header, size: int) -> None:
    """A sink for frames that have no payload.

    Raises:
        WireError: it has one.
    """
    if size:
        raise protocol.WireError(
            f"a frame has a payload of {size} bytes where none is due"
        )


class ChannelClosed(ConnectionError):
    """The connection has ended, from either side."""


class Unsent:
    """A frame without payload that has not left this host, or not all of it."""

    def __init__(self, header: Header) -> None:
        """Packs the header, which may change afterwards.

        Raises:
            ValueError: the header is too large.
        """
        self.plain = protocol.encode_header(header, 0)
        self.rest: memoryview | None = None
        """What the socket has not taken; None while the frame has no place in the
        connection's order."""


class Channel:
    """One connection, authenticated. Sending is thread-safe; one thread receives."""

    def __init__(self, stream: SocketStream, address: str) -> None:
        """Takes over a connected stream; `address` is for messages."""
        self.address = address
        self.peer: Header = {}
        """What the client said in its hello; at the client, the server's answer."""
        self.stream = stream
        self.paced: Callable[[int], None] | None = None
        """Called with every number of bytes sent; pauses, to send more slowly."""
        self._sealer: protocol.Sealer | None = None
        self._opener: protocol.Opener | None = None
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._users, self._closed = 0, False

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """Gives the keys of the seals; before that there are no frames."""
        self._sealer, self._opener = (
            protocol.Sealer(send_key),
            protocol.Opener(receive_key),
        )

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, header: Header, payload: Sequence[Buffer] = (), *, timeout_s: float
    ) -> None:
        """Sends one frame; the payload's parts are received as one.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the peer did not take it in time. Unless nothing was sent
                yet, the channel is closed.
            ValueError: header or payload is too large.
        """
        deadline = time.monotonic() + timeout_s
        parts = [memoryview(p).cast("B") for p in payload if memoryview(p).nbytes]
        size = sum(map(len, parts))
        assert self._sealer is not None, "no frames before the handshake"
        with self._use():
            if not self._sending.acquire(timeout=max(timeout_s, 0)):
                raise self._late("another thread's send to end")
            try:
                head = self._sealer.frame(header, size)
                self.write(head, *parts, deadline=deadline)
                self._sealer.advance()
            finally:
                self._sending.release()

    def send_some(self, unsent: Unsent) -> int | None:
        """Sends what the socket takes now, without waiting.

        From its first call until it is done, no other frame can be sent; who gives up
        before calls `give_up`.

        Returns:
            None: the frame is sent. 0: another thread is sending. Otherwise what to
            poll for before the next call: POLLOUT, or POLLIN (TLS).

        Raises:
            ChannelClosed: the connection has ended.
        """
        assert self._sealer is not None, "no frames before the handshake"
        with self._use():
            if unsent.rest is None:
                if not self._sending.acquire(blocking=False):
                    return 0
                unsent.rest = memoryview(self._sealer.seal(unsent.plain))
            try:
                while unsent.rest:
                    unsent.rest = unsent.rest[self.stream.send([unsent.rest]) :]
            except WouldBlock as wait:
                return wait.event
            except OSError as error:
                self.give_up(unsent)
                raise self._ended(error) from error
            self._sealer.advance()
            self._sending.release()
            return None

    def give_up(self, unsent: Unsent) -> None:
        """Closes the channel on account of a frame that cannot be sent."""
        self.close()
        if unsent.rest:
            unsent.rest = None
            self._sending.release()

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """The socket's descriptor, which is nobody else's until the block ends.

        Raises:
            ChannelClosed: the connection has ended.
        """
        with self._use():
            yield self.stream.socket.fileno()

    def receive(
        self,
        timeout_s: float,
        sink: Sink | None = None,
        *,
        begin_s: float | None = None,
        max_header: int = protocol.MAX_HEADER,
    ) -> tuple[Header, memoryview]:
        """Waits for the next frame.

        Args:
            timeout_s: limit for the whole frame.
            sink: asked once per frame, also when the payload is empty, for memory of
                the payload's size. Without it small payloads get new memory.
            begin_s: limit for the frame to begin, if that is less.
            max_header: largest header that is accepted, in bytes; it also bounds of
                how many values a header may be made.

        Returns:
            The header, and the memory with the payload (empty if discarded, or if the
            sink gave it in parts).

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: no whole frame in time. If it had begun, the channel is
                closed.
            WireError: the peer sent no valid frame; the channel is closed.
        """
        now = time.monotonic()
        wait_s = timeout_s if begin_s is None else min(timeout_s, begin_s)
        with self._use():
            self._wait(select.POLLIN, now + wait_s, "a frame")
            try:
                return self._next_frame(now + timeout_s, sink, max_header)
            except BaseException:
                self.close()  # what comes next would not be the start of a frame
                raise

    def _next_frame(
        self, deadline: float, sink: Sink | None, max_header: int
    ) -> tuple[Header, memoryview]:
        assert self._opener is not None, "no frames before the handshake"
        start = self._take(protocol.FRAME_START_BYTES, deadline)
        header_bytes, payload_bytes = self._opener.start(start)
        if header_bytes > max_header:
            raise protocol.WireError(
                f"peer {self.name} sent a header of {header_bytes} bytes where at "
                f"most {max_header} are allowed"
            )
        sealed = self._take(header_bytes + protocol.SEAL_BYTES, deadline)
        header = self._opener.header(sealed, max_header)
        memory = self._memory_for(header, payload_bytes, sink)
        if memory is None:
            self._discard(payload_bytes, deadline)
            return header, memoryview(b"")
        self._fill(memory, deadline)
        return header, memory[0] if len(memory) == 1 else memoryview(b"")

    def close(self) -> None:
        """Ends the connection; threads that wait on it get ChannelClosed."""
        with self._state:
            if self._closed:
                return
            self._closed, idle = True, not self._users
        self.stream.end()
        if idle:
            self.stream.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """The last user closes the descriptor, so no other gets its number early."""
        with self._state:
            if self._closed:
                raise ChannelClosed(f"channel to {self.name} was closed on this host")
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self.stream.close()

    @property
    def name(self) -> str:
        """The peer, for messages: its host name if it told one, and its address."""
        host = self.peer.get("host")
        return f"{host} ({self.address})" if host else self.address

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"peer {self.name}: timed out waiting for {what}")

    def _ended(self, error: OSError | None = None) -> ChannelClosed:
        who = "this host" if self._closed else f"peer {self.name}"
        return ChannelClosed(
            f"channel to {self.name} ended: {error or f'{who} closed the connection'}"
        )

    def _wait(self, event: int, deadline: float, what: str) -> None:
        if not self.stream.poll(event, deadline - time.monotonic()):
            raise self._late(what)

    def write(self, *parts: Buffer, deadline: float) -> None:
        """Sends bytes that are no frame; for the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`.
        """
        buffers = [memoryview(part) for part in parts if len(part)]
        at, begun = 0, False
        try:
            while at < len(buffers):
                try:
                    sent = self.stream.send(buffers[at : at + _BUFFERS_PER_CALL])
                except WouldBlock as wait:
                    begun = begun or self.stream.keeps_unsent
                    self._wait(wait.event, deadline, "room to send")
                    continue
                begun = True
                if self.paced is not None:
                    self.paced(sent)
                while sent and sent >= len(buffers[at]):
                    sent, at = sent - len(buffers[at]), at + 1
                if sent:
                    buffers[at] = buffers[at][sent:]
                if at < len(buffers) and time.monotonic() > deadline:
                    raise self._late("the rest of a frame to be taken")
        except TimeoutError:
            if begun:
                self.close()  # the peer has part of a frame
            raise
        except OSError as error:
            self.close()
            raise self._ended(error) from error

    def read(self, size: int, *, deadline: float) -> bytearray:
        """Receives bytes that are no frame; for the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`.
        """
        return self._take(size, deadline)

    def _take(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        self._fill([memoryview(data)], deadline)
        return data

    def _fill(self, memory: Sequence[memoryview], deadline: float) -> None:
        rest = [part for part in memory if len(part)]
        rest.reverse()  # what comes next is at the end
        while rest:
            try:
                got = self.stream.receive_into(rest[: -_BUFFERS_PER_CALL - 1 : -1])
            except WouldBlock as wait:
                silent = min(deadline, time.monotonic() + SILENCE_S)
                self._wait(wait.event, silent, "the rest of a frame")
                continue
            except OSError as error:
                raise self._ended(error) from error
            if not got:
                raise self._ended()
            while got and got >= len(rest[-1]):
                got -= len(rest.pop())
            if got:
                rest[-1] = rest[-1][got:]
            if rest and time.monotonic() > deadline:
                raise self._late("the rest of a frame")

    def _discard(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._fill([part], deadline)
            size -= len(part)

    def _memory_for(
        self, header: Header, size: int, sink: Sink | None
    ) -> list[memoryview] | None:
        if sink is None:
            if size > protocol.MAX_UNPLACED:
                raise protocol.WireError(
                    f"peer {self.name} sent a payload of {size} bytes where at most "
                    f"{protocol.MAX_UNPLACED} are allowed. Give `receive` a sink."
                )
            return [memoryview(bytearray(size))]
        memory = sink(header, size)
        if memory is None:
            return None
        parts = [memory] if isinstance(memory, memoryview) else list(memory)
        given = sum(part.nbytes for part in parts)
        if given != size:
            raise ValueError(
                f"sink gave {given} bytes for a payload of {size} from {self.name}. "
                "Give memory of just that size, or None to discard it."
            )
        return [part.cast("B") if part.nbytes else memoryview(b"") for part in parts]
