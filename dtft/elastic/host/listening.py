"""The port of one host: the requests that peers and users may make there.

Each kind of connection has one handler. Each connection is served on a separate thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dtft.checkpoint.transport import Channel, Credentials, TransportServer, WireError
from dtft.elastic.event_loop import Loop
from dtft.elastic.host.inspection import serve_inspection
from dtft.elastic.host.salvage import serve_salvage, write_address
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader import serve_change, serve_export
from dtft.elastic.network import Closed, Heard, TcpChannel
from dtft.elastic.transfer import Inbox, serve_digests, serve_fetch, serve_pushes

if TYPE_CHECKING:
    from dtft.elastic.host.edges import Accept, Asked


ACCEPT_S = 10.0
"""Seconds for the event loop to accept a connection before the connection is closed."""


def listen(
    config: AgentConfig,
    credentials: Credentials,
    inbox: Inbox,
    loop: Loop,
    accept: "Accept",
    asked: "Asked",
) -> TransportServer:
    """Opens the host's port; writes the port's address to a file, for salvage.

    Args:
        config: settings of this host's agent.
        credentials: the job's credentials.
        inbox: this host's state, from which pushes and fetches are answered.
        loop: the agent's event loop.
        accept: accepts a control connection, over which another host gets the leader's
            orders and sends its reports; called on the loop.
        asked: handlers of users' requests; called on the loop.

    Raises:
        ValueError: the address to listen at (`bind` of the config) is not one of this
            host that peers can reach, its port is taken, or the TLS certificate or key
            cannot be loaded.
    """

    try:
        found = handlers(config, inbox, loop, accept, asked)
        server = TransportServer(config.bind, credentials, found)
    except OSError as error:
        raise ValueError(
            f"--bind {config.bind}: {error.strerror or error}. Give an address of this "
            "host."
        ) from error
    tls = config.tls is not None
    write_address(config.memory_directory, server.address, tls=tls)
    return server


def handlers(
    config: AgentConfig,
    inbox: Inbox,
    loop: Loop,
    accept: "Accept",
    asked: "Asked",
) -> dict[str, Callable[[Channel], None]]:
    """Maps each kind of connection, such as "push" or "fetch", to its handler.

    Args:
        config: settings of this host's agent.
        inbox: this host's state, from which pushes and fetches are answered.
        loop: the agent's event loop.
        accept: accepts a control connection, over which another host gets the leader's
            orders and sends its reports; called on the loop.
        asked: handlers of users' requests; called on the loop.
    """

    def export(channel: Channel) -> None:
        serve_export(channel, config, lambda *it: loop.post(asked.export, *it))

    def scale(channel: Channel) -> None:
        serve_change(channel, "replicas", int, lambda *it: loop.post(asked.scale, *it))

    def drain(channel: Channel) -> None:
        serve_change(channel, "host", str, lambda *it: loop.post(asked.drain, *it))

    return {
        "push": lambda channel: serve_pushes(channel, inbox),
        "fetch": lambda channel: serve_fetch(channel, inbox),
        "digests": lambda channel: serve_digests(channel, inbox),
        "control": lambda channel: _serve_control(channel, loop, accept),
        "inspect": lambda channel: serve_inspection(channel, config, inbox),
        "export": export,
        "scale": scale,
        "drain": drain,
        "salvage": lambda channel: serve_salvage(channel, inbox),
    }


def _serve_control(raw: Channel, loop: Loop, accept: "Accept") -> None:
    """Serves `raw`, on which another host's agent follows this one, until it ends.

    Hands the connection to the event loop. Closes it if the loop has not accepted it
    within 10 s (`ACCEPT_S`).

    Raises:
        WireError: the connection is refused: `accept` returns None.
    """
    channel = TcpChannel(raw)
    taken: Future[tuple[Heard, Closed] | None] = Future()

    def take() -> None:
        if taken.set_running_or_notify_cancel():
            taken.set_result(accept(raw.peer, channel))

    loop.post(take)
    try:
        hearing = taken.result(ACCEPT_S)
    except TimeoutError:
        taken.cancel()
        channel.close()
        return
    if hearing is None:
        raise WireError(f"the control connection of {raw.address} was refused")
    channel.hear(loop, *hearing)
