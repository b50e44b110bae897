"""Control connections between agents: the `Network` protocol, and TCP.

Sending a message does not block. If the peer does not accept a message in time, the
connection ends, and the thread that receives on the connection reports the end.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from dtft.checkpoint.transport import (
    Channel,
    Credentials,
    Outbound,
    WireError,
    connect,
    dial,
    no_payload,
)
from dtft.elastic.event_loop import Loop

logger = logging.getLogger(__name__)

FOREVER_S = 86400.0
"""Receive timeout of control connections in seconds. This timeout never ends a
connection: `links` closes the connections of silent peers long before."""
PROBE_S = 1.0

Message = dict[str, Any]
PortState = Literal["open", "refused", "silent"]
"""Result of connecting to a port. refused: the machine answers, but no process listens.
silent: no answer, or another error."""


class ControlChannel(Protocol):
    """One connection to another agent."""

    @property
    def address(self) -> str:
        """Address of the peer, for log lines and error texts."""
        ...

    def post(self, message: Message) -> None:
        """Sends a message without blocking; drops it if the connection has ended."""
        ...

    def close(self) -> None:
        """Ends the connection; messages that still wait to be sent are lost."""
        ...


Heard = Callable[[ControlChannel, Message], None]
Closed = Callable[[ControlChannel, str], None]
"""Called once, with the reason, when a connection has ended."""


class Network(Protocol):
    """Connects an agent to other agents; runs all callbacks on the event loop."""

    def dial(
        self,
        address: str,
        hello: Message,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """Connects to an agent and receives its messages until the connection ends.

        Args:
            address: "host:port" at which the agent listens.
            hello: first message, which identifies this agent.
            opened: called with a finished future of the channel. If there is no
                connection, the future has an exception, such as ConnectionRefusedError
                (no process listens), AuthenticationError or TimeoutError.
            heard: called with the channel and each message.
            closed: called with channel and reason when an opened channel has ended.
        """
        ...

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """Connects to a port, disconnects and calls `then` with the result.

        The result is "open", "refused" (no process listens) or "silent" (no answer, or
        another error).
        """
        ...


class TcpChannel:
    """A `ControlChannel` on a TCP connection whose ends know the job's secret."""

    def __init__(self, channel: Channel) -> None:
        """Wraps a channel, which `close` closes."""
        self._channel = channel
        self._outbound = Outbound(channel)

    @property
    def address(self) -> str:
        """Address of the peer, for log lines and error texts."""
        return self._channel.address

    def post(self, message: Message) -> None:
        """Sends a message without blocking; see `ControlChannel.post`."""
        self._outbound.post(message)

    def close(self) -> None:
        """Ends the connection; messages that still wait to be sent are lost."""
        self._outbound.close()

    def hear(self, loop: Loop, heard: Heard, closed: Closed) -> None:
        """Receives messages until the connection ends; blocks.

        Posts `heard` to the loop for each message, and `closed` at the end.
        """
        reason = "it was closed"
        try:
            while True:
                message, _ = self._channel.receive(FOREVER_S, no_payload)
                if not isinstance(message.get("op"), str):
                    raise WireError(f"{self.address} sent a message without an op")
                loop.post(heard, self, message)
        except (WireError, OSError, TimeoutError) as error:
            reason = str(error)
        finally:
            self._channel.close()
            loop.post(closed, self, reason)


class TcpNetwork:
    """A `Network` of TCP connections with one thread for each connection."""

    def __init__(self, loop: Loop, credentials: Credentials, limit_s: float) -> None:
        """Opens no connection yet.

        Args:
            loop: event loop for the callbacks.
            credentials: the job's name and secret and this host's TLS settings, by
                which agents authenticate each other.
            limit_s: deadline for opening a connection, in seconds.
        """
        self._loop, self._credentials, self._limit_s = loop, credentials, limit_s

    def dial(
        self,
        address: str,
        hello: Message,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """Connects to an agent on a new thread; see `Network.dial`."""

        def work() -> None:
            outcome: Future[ControlChannel] = Future()
            try:
                raw = connect(address, self._credentials, hello, self._limit_s)
                channel = TcpChannel(raw)
            except Exception as error:  # without outcome the link would hang
                outcome.set_exception(error)
                self._loop.post(opened, outcome)
                return
            outcome.set_result(channel)
            self._loop.post(opened, outcome)
            channel.hear(self._loop, heard, closed)

        self._loop.aside(work)

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """Tries to connect to a port on a new thread; see `Network.probe`."""

        def work() -> PortState:
            try:
                dial(address, PROBE_S).close()
            except ConnectionRefusedError:
                return "refused"
            except (OSError, ValueError):
                return "silent"
            return "open"

        self._loop.aside(work, lambda outcome: then(outcome.result()))
