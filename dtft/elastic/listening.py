"""The port of one host: what peers and people may ask for there.

One entry per kind of connection, each served on a thread of its own by the module that
knows the kind. Must not know what is said on them.
"""

from collections.abc import Callable

from dtft.checkpoint.transport import Credentials, TransportServer
from dtft.elastic.config import AgentConfig
from dtft.elastic.demands import serve_export
from dtft.elastic.inbox import Inbox, serve_fetch, serve_pushes
from dtft.elastic.inspection import serve_inspection
from dtft.elastic.peers import Peers
from dtft.elastic.scaling import serve_scaling


def listen(
    config: AgentConfig,
    credentials: Credentials,
    inbox: Inbox,
    peers: Peers,
    emit: Callable[..., None],
) -> TransportServer:
    """Opens the port; `emit` takes what is asked of the event loop.

    Raises:
        ValueError: `config.bind` is not an address of this host.
    """
    try:
        return TransportServer(
            config.bind,
            credentials,
            {
                "push": lambda channel: serve_pushes(channel, inbox),
                "fetch": lambda channel: serve_fetch(channel, inbox),
                "control": peers.serve,
                "inspect": lambda channel: serve_inspection(channel, config, inbox),
                "export": lambda channel: serve_export(channel, config, emit),
                "scale": lambda channel: serve_scaling(channel, emit),
            },
        )
    except OSError as error:
        raise ValueError(
            f"--bind {config.bind}: {error.strerror or error}. Give an address of this "
            "host."
        ) from error
