"""Control connections between agents: what the links ask of a network, and TCP.

A message is sent without waiting; one that the peer does not take in time ends the
connection, which the receiving side of this host then reports.
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
"""The links watch for silence themselves."""
PROBE_S = 1.0

Message = dict[str, Any]
PortState = Literal["open", "refused", "silent"]
"""refused: the machine answers, and nobody listens. silent: nothing answers."""


class ControlChannel(Protocol):
    """One connection to another agent."""

    @property
    def address(self) -> str:
        """Of the peer, for messages."""
        ...

    def post(self, message: Message) -> None:
        """Sends a message without waiting."""
        ...

    def close(self) -> None:
        """Ends the connection once what was posted is sent, or at once if it cannot."""
        ...


Heard = Callable[[ControlChannel, Message], None]
Closed = Callable[[ControlChannel, str], None]
"""Called once, with the reason, when a connection has ended."""


class Network(Protocol):
    """How an agent reaches others. What it calls is called on the event loop."""

    def dial(
        self,
        address: str,
        hello: Message,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """Connects to an agent and hears it until the connection ends.

        Args:
            address: "host:port" of the agent's transport.
            hello: who calls.
            opened: takes the channel, or ConnectionRefusedError (nobody listens
                there), or another OSError or TimeoutError.
            heard: takes each message.
            closed: called when a channel that was opened has ended.
        """
        ...

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """Reports the outcome of connecting to a port, whoever listens there."""
        ...


class TcpChannel:
    """A `ControlChannel` on an authenticated channel of the transport."""

    def __init__(self, channel: Channel) -> None:
        """Takes the channel over."""
        self._channel = channel
        self._outbound = Outbound(channel)

    @property
    def address(self) -> str:
        """See `ControlChannel.address`."""
        return self._channel.address

    def post(self, message: Message) -> None:
        """See `ControlChannel.post`."""
        self._outbound.post(message)

    def close(self) -> None:
        """See `ControlChannel.close`."""
        self._outbound.close()

    def hear(self, loop: Loop, heard: Heard, closed: Closed) -> None:
        """Hears the peer until the connection ends; blocks."""
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
    """A `Network` of TCP connections, a thread for each."""

    def __init__(self, loop: Loop, credentials: Credentials, limit_s: float) -> None:
        """`limit_s`: deadline for opening a connection, in seconds."""
        self._loop, self._credentials, self._limit_s = loop, credentials, limit_s

    def dial(
        self,
        address: str,
        hello: Message,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """See `Network.dial`."""

        def work() -> None:
            outcome: Future[ControlChannel] = Future()
            try:
                raw = connect(address, self._credentials, hello, self._limit_s)
                channel = TcpChannel(raw)
            except Exception as error:  # unanswered, the link would wait for ever
                outcome.set_exception(error)
                self._loop.post(opened, outcome)
                return
            outcome.set_result(channel)
            self._loop.post(opened, outcome)
            channel.hear(self._loop, heard, closed)

        self._loop.aside(work)

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """See `Network.probe`."""

        def work() -> PortState:
            try:
                dial(address, PROBE_S).close()
            except ConnectionRefusedError:
                return "refused"
            except (OSError, ValueError):
                return "silent"
            return "open"

        self._loop.aside(work, lambda outcome: then(outcome.result()))
