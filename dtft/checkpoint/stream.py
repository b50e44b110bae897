"""The bytes under a channel: a TCP socket that never blocks, plain or under TLS.

Decides how bytes enter and leave one socket. TLS hides them; who the peer is, is proved
by the handshake of `transport.py`, which is bound to the server's certificate, so a
certificate that signs itself is enough. Must not know frames, deadlines or secrets.
"""

import contextlib
import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dtft.checkpoint.wire import Tls

_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_TLS_BYTES_PER_CALL = 1 << 18  # one call encrypts it all, holding the lock


class WouldBlock(Exception):
    """Nothing can be done until the socket has `event` (POLLIN or POLLOUT)."""

    def __init__(self, event: int) -> None:
        """Keeps what to poll for."""
        super().__init__(event)
        self.event = event


class Stream:
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


class TlsStream(Stream):
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
