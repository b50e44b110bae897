"""The port of one host: what peers and people may ask for there.

One entry per kind of connection, each served on a thread of its own by the module that
knows the kind.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dtft.checkpoint.transport import Channel, Credentials, TransportServer, WireError
from dtft.elastic.event_loop import Loop
from dtft.elastic.host.inspection import serve_inspection
from dtft.elastic.host.salvage import serve_salvage, write_address
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader import serve_export, serve_scaling
from dtft.elastic.network import Closed, Heard, TcpChannel
from dtft.elastic.transfer import Inbox, serve_fetch, serve_pushes

if TYPE_CHECKING:
    from dtft.elastic.host.edges import Accept, Asked


ACCEPT_S = 10.0
"""An event loop that takes no new connection for so long leaves it to be made anew."""


def listen(
    config: AgentConfig,
    credentials: Credentials,
    inbox: Inbox,
    loop: Loop,
    accept: "Accept",
    asked: "Asked",
) -> TransportServer:
    """Opens the port.

    Args:
        config: of this host's agent.
        credentials: of the job.
        inbox: answers pushes and fetches.
        loop: of the agent.
        accept: takes a control connection, on the loop.
        asked: what people ask for, on the loop.

    Raises:
        ValueError: `config.bind` is not an address of this host.
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
    """What serves each kind of connection; see `listen`."""

    def export(channel: Channel) -> None:
        serve_export(channel, config, lambda *it: loop.post(asked.export, *it))

    def scale(channel: Channel) -> None:
        serve_scaling(channel, lambda *it: loop.post(asked.scale, *it))

    return {
        "push": lambda channel: serve_pushes(channel, inbox),
        "fetch": lambda channel: serve_fetch(channel, inbox),
        "control": lambda channel: _serve_control(channel, loop, accept),
        "inspect": lambda channel: serve_inspection(channel, config, inbox),
        "export": export,
        "scale": scale,
        "salvage": lambda channel: serve_salvage(channel, inbox),
    }


def _serve_control(raw: Channel, loop: Loop, accept: "Accept") -> None:
    """Hears one host until its connection ends.

    Raises:
        WireError: the peer does not say who it is.
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
        raise WireError(f"{raw.address} does not say which host it is")
    channel.hear(loop, *hearing)
