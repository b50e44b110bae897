"""One TCP connection between two hosts: sends and receives frames, plain or under TLS.

A frame is one message: a header (a dict) and a payload (bytes). Payloads are sent from
and received into the caller's memory without copies. Every wait has a deadline. TCP
keepalive detects a silent peer. Seals (keyed hashes) detect frames that were changed,
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

_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_TLS_BYTES_PER_CALL = 1 << 18  # one call encrypts all its bytes, holding the lock


class WouldBlock(Exception):
    """A socket call would block; retry it after `event` (POLLIN or POLLOUT)."""

    def __init__(self, event: int) -> None:
        """Stores the event to poll for."""
        super().__init__(event)
        self.event = event


class SocketStream:
    """A plain TCP connection on a nonblocking socket.

    One thread may send while another receives.
    """

    binding = b""
    """SHA-256 of the server's certificate, part of the proofs in the handshake; empty
    without TLS."""
    keeps_unsent = False
    """Whether a `send` that raised WouldBlock must be repeated with the same bytes."""

    def __init__(self, connection: socket.socket, silence_ms: int) -> None:
        """Takes over a connected socket.

        Args:
            connection: the socket.
            silence_ms: longest time in milliseconds without an acknowledgement of sent
                bytes (TCP_USER_TIMEOUT); the kernel then ends the connection.
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
        """Sends as many bytes of the buffers as the socket takes; returns their number.

        Raises:
            WouldBlock: the socket's send buffer is full.
            OSError: the connection has ended.
        """
        try:
            return self.socket.sendmsg(buffers[:_BUFFERS_PER_CALL])
        except BlockingIOError:
            raise WouldBlock(select.POLLOUT) from None

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Receives bytes into the buffers, in order; returns the number of bytes.

        Returns 0 if the peer has ended the stream.

        Raises:
            WouldBlock: no bytes have arrived.
            OSError: the connection has ended.
        """
        try:
            return self.socket.recvmsg_into(buffers[:_BUFFERS_PER_CALL])[0]
        except BlockingIOError:
            raise WouldBlock(select.POLLIN) from None

    def poll(self, event: int, timeout_s: float) -> bool:
        """Waits for `event` (POLLIN or POLLOUT) or an error of the socket.

        Returns False if neither has occurred after `timeout_s` seconds.
        """
        poller = select.poll()
        poller.register(self.socket, event)
        return bool(poller.poll(max(timeout_s, 0) * 1000))

    def end(self) -> None:
        """Shuts the connection down in both directions; wakes threads in `poll`."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would let another thread read the raw bytes.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket's descriptor; no thread may use the stream afterwards."""
        self.socket.close()


class TlsStream(SocketStream):
    """A TCP connection under TLS 1.3.

    TLS only encrypts. The handshake in the module `server` proves that the peer knows
    the job's secret. The proofs depend on the server's certificate, so a self-signed
    certificate suffices.
    """

    keeps_unsent = True

    def __init__(
        self, connection: socket.socket, silence_ms: int, tls: Tls, *, server: bool
    ) -> None:
        """Takes over a connected socket; `greet` must be called before any transfer.

        Args:
            connection: the socket.
            silence_ms: longest time in milliseconds without an acknowledgement of sent
                bytes (TCP_USER_TIMEOUT); the kernel then ends the connection.
            tls: this host's certificate and key. A server needs both, a client neither.
            server: whether this host accepted the connection.
        """
        super().__init__(connection, silence_ms)
        self._tls, self._server, self._lock = tls, server, threading.Lock()
        self._ended = False

    def greet(self, deadline: float) -> None:
        """Runs the TLS handshake; reads the certificate's files.

        Sets `binding` to the hash of the server's certificate.

        Raises:
            TimeoutError: the monotonic clock has passed `deadline`.
            OSError: the peer does not speak TLS, the connection has ended, or the files
                cannot be read.
        """
        # The files are read here and not in `__init__`, which the accepting thread
        # calls: a slow disk would delay other connections.
        self.socket = self._secure = _context(self._tls, self._server).wrap_socket(
            self.socket, server_side=self._server, do_handshake_on_connect=False
        )
        if self._ended:  # `end` was called on the socket that has been replaced
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
        """Shuts the connection down in both directions; wakes threads in `poll`.

        May also be called while `greet` runs.
        """
        self._ended = True
        super().end()

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Sends as many bytes of the first buffer as TLS takes; returns their number.

        Does not send the other buffers. Raises the errors of `SocketStream.send`.
        """
        with self._lock:
            try:
                return self._secure.send(buffers[0][:_TLS_BYTES_PER_CALL])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise WouldBlock(_event(error)) from None

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Receives bytes into the first buffer only; returns the number of bytes.

        Returns 0 if the peer has ended the stream. Raises the errors of
        `SocketStream.receive_into`.
        """
        with self._lock:
            try:
                return self._secure.recv_into(buffers[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise WouldBlock(_event(error)) from None

    def poll(self, event: int, timeout_s: float) -> bool:
        """Waits for `event` (POLLIN or POLLOUT) or an error of the socket.

        Bytes that are already decrypted count as POLLIN. Returns False if nothing has
        occurred after `timeout_s` seconds.
        """
        if event == select.POLLIN:
            with self._lock:
                if self._secure.pending():
                    return True
        return super().poll(event, timeout_s)


def check_tls(tls: Tls) -> None:
    """Checks that a server's certificate and key can be loaded.

    Raises:
        ValueError: a file is missing or unreadable, or the key does not belong to the
            certificate.
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
    else:  # the proof of the secret, bound to the certificate, identifies the server
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
"""Function from a frame's header and payload size in bytes to memory for the payload,
in one or more pieces. If it returns None, the payload is discarded."""

SILENCE_MS = 10_000
"""A connection ends if the peer's kernel acknowledges no sent bytes for this many
milliseconds."""
SILENCE_S = 10.0
"""A channel is closed if no byte arrives for this many seconds in the middle of a
frame."""
_SCRATCH_BYTES = 1 << 20


def no_payload(_: Header, size: int) -> None:
    """Refuses a frame that has a payload; for the argument `sink` of `Channel.receive`.

    `size` is the payload's size in bytes.

    Raises:
        WireError: the frame has a payload.
    """
    if size:
        raise protocol.WireError(
            f"a frame has a payload of {size} bytes where none is due"
        )


class ChannelClosed(ConnectionError):
    """The connection has ended: this host or the peer closed it, or it broke."""


class Unsent:
    """A message without payload that is partly sent, or not sent yet.

    `Channel.send_some` sends it in several calls.
    """

    def __init__(self, header: Header) -> None:
        """Encodes the header; the caller may change the header afterwards.

        Raises:
            ValueError: the header is too large or has too many values.
        """
        self.plain = protocol.encode_header(header, 0)
        self.rest: memoryview | None = None
        """Sealed bytes that are still to be sent. None until `send_some` has sealed the
        frame, and after `give_up`."""


class Channel:
    """One authenticated connection that sends and receives frames.

    A frame is one message: a header (a dict) and a payload (bytes, perhaps none).
    Sending is thread-safe. Only one thread may receive.
    """

    def __init__(self, stream: SocketStream, address: str) -> None:
        """Takes over a connected stream; errors and logs name the peer by `address`."""
        self.address = address
        self.peer: Header = {}
        """At the server, the client's first message (hello); at the client, the
        server's answer. Empty until that message has arrived."""
        self.stream = stream
        self.paced: Callable[[int], None] | None = None
        """Function that limits the rate by sleeping; None sets no limit. After each
        write to the socket, `write` calls the function with the number of bytes
        sent."""
        self._sealer: protocol.Sealer | None = None
        self._opener: protocol.Opener | None = None
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._users, self._closed = 0, False

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """Sets the keys that authenticate sent frames and verify received frames.

        Must be called before the first frame.
        """
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
        """Sends one frame; the buffers of `payload` are concatenated.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the frame was not sent within `timeout_s` seconds. If some of
                its bytes were sent, or under TLS may have been sent, the channel is
                closed.
            ValueError: header or payload is too large, or the header has too many
                values.
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
                self._write([head, *parts], deadline)
                self._sealer.advance()
            finally:
                self._sending.release()

    def send_some(self, unsent: Unsent) -> int | None:
        """Sends as many bytes of a frame as the socket takes now, without waiting.

        The call that sends the first bytes takes the sending lock and keeps it until
        the frame is sent: no other frame can be sent meanwhile. A caller that abandons
        the frame must call `give_up`.

        Returns:
            None: the frame is sent. 0: another thread is sending. Otherwise the event
            to poll for before the next call: POLLOUT, or POLLIN (TLS).

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
        """Closes the channel because a frame cannot be sent, or cannot be sent whole.

        Releases the sending lock if `send_some` keeps it for this frame.
        """
        self.close()
        if unsent.rest:
            unsent.rest = None
            self._sending.release()

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields the socket's descriptor, which stays open until the block ends.

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
        """Waits for the next frame and receives it.

        Args:
            timeout_s: limit for the whole frame, in seconds.
            sink: called once with the header and the payload's size in bytes, also for
                an empty payload. Returns memory of this size (a memoryview, or a
                sequence of several), or None to discard the payload. Without a sink, a
                payload of at most `MAX_UNPLACED` bytes (64 MiB) gets new memory.
            begin_s: limit until the frame's first byte arrives, in seconds. None, or a
                limit above `timeout_s`, has no effect.
            max_header: largest header that is accepted, in bytes; also limits the
                number of values in the header.

        Returns:
            The header, and the memory with the payload. The memory is empty if the
            payload was discarded, or if the sink returned a sequence that does not have
            exactly one memoryview.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: no whole frame arrived in time, or no byte of a begun frame
                for `SILENCE_S` (10) seconds. If some of its bytes arrived, the channel
                is closed.
            WireError: the peer sent an invalid frame, or without a sink a payload above
                `MAX_UNPLACED`; the channel is closed.
            ValueError: the sink gave memory of another size; the channel is closed.
        """
        now = time.monotonic()
        wait_s = timeout_s if begin_s is None else min(timeout_s, begin_s)
        with self._use():
            self._wait(select.POLLIN, now + wait_s, "a frame")
            try:
                return self._next_frame(now + timeout_s, sink, max_header)
            except BaseException:
                self.close()  # the next bytes would not be the start of a frame
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
        """Ends the connection; threads that wait on the channel get ChannelClosed."""
        with self._state:
            if self._closed:
                return
            self._closed, idle = True, not self._users
        self.stream.end()
        if idle:
            self.stream.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keeps the socket's descriptor open while the context lasts.

        Counts the threads that use the descriptor. After `close`, the last of these
        threads closes the descriptor. So the system does not give the descriptor's
        number to another file while a thread still uses the number.

        Raises:
            ChannelClosed: the channel was closed on this host.
        """
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
        """Name of the peer for errors and logs: its address, and its host if known."""
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
        """Sends bytes without adding a header; used by the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`. If some of the
                bytes were sent, or under TLS may have been sent, the channel is closed.
        """
        with self._use():
            self._write(parts, deadline)

    def _write(self, parts: Sequence[Buffer], deadline: float) -> None:
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
                self.close()  # the peer has a part of a frame
            raise
        except OSError as error:
            self.close()
            raise self._ended(error) from error

    def read(self, size: int, *, deadline: float) -> bytearray:
        """Receives `size` bytes that have no header; used by the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`, or no byte arrived
                for `SILENCE_S` (10) seconds.
        """
        with self._use():
            return self._take(size, deadline)

    def _take(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        self._fill([memoryview(data)], deadline)
        return data

    def _fill(self, memory: Sequence[memoryview], deadline: float) -> None:
        rest = [part for part in memory if len(part)]
        rest.reverse()  # the next part to fill is the last of the list
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
