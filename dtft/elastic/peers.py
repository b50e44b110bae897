"""The other hosts' connections to this one: heard while it leads, and how they die.

The death of a host is proved by a closed connection and a refused new one; what follows
from it is the agent's business. Must not know what the messages mean.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.channel import no_payload
from dtft.checkpoint.transport import Channel, ChannelClosed
from dtft.checkpoint.wire import WireError
from dtft.elastic.roles import HostRecord

logger = logging.getLogger(__name__)

FOREVER_S = 86400.0
"""Reports may be days apart; a dead peer closes the connection."""
PROOF_TRIES = 40
PROOF_PAUSE_S = 0.02


class Peers:
    """At most one control connection of each other host.

    Emits ("control", host, channel), ("control_lost", host, channel),
    ("report", host, message) and ("host_dead", record, channel).
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        """Knows nobody yet."""
        self._emit = emit
        self._channels: dict[str, Channel] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Who is connected."""
        return tuple(self._channels)

    def serve(self, channel: Channel) -> None:
        """Hears one host until its connection closes; runs on a thread of its own.

        Raises:
            WireError: the peer does not say who it is, or what it reports.
        """
        host = channel.peer.get("host")
        if not isinstance(host, str):
            raise WireError(f"{channel.address} does not say which host it is")
        self._emit("control", host, channel)
        try:
            while True:
                message, _ = channel.receive(FOREVER_S, no_payload)
                if not isinstance(message.get("op"), str):
                    raise WireError(f"{host} sent a report without an op")
                self._emit("report", host, message)
        except (ChannelClosed, TimeoutError, OSError):
            self._emit("control_lost", host, channel)

    def connected(self, host: str, channel: Channel) -> None:
        """A host has connected, or connected anew."""
        self._channels[host] = channel

    def lost(self, host: str, channel: Channel, record: HostRecord | None) -> None:
        """A connection has closed; whether its host (`record`) is dead is found out."""
        if self._channels.get(host) is not channel:
            return
        del self._channels[host]
        if record is not None:
            threading.Thread(
                target=self._prove_death, args=(record, channel), daemon=True
            ).start()

    def replaced(self, host: str, channel: Channel) -> bool:
        """Whether a host has another connection than this one."""
        return self._channels.get(host) not in (None, channel)

    def _prove_death(self, record: HostRecord, channel: Channel) -> None:
        """Tries a host's port until it refuses, or long enough to leave it alone.

        A dying process closes its sockets one after another, so one try is too few.
        """
        for _ in range(PROOF_TRIES):
            if not _answers(record.address):
                self._emit("host_dead", record, channel)
                return
            time.sleep(PROOF_PAUSE_S)

    def send(self, host: str, message: dict[str, Any]) -> None:
        """Sends an order to a host; its loss is noticed elsewhere."""
        channel = self._channels.get(host)
        if channel is not None:
            try:
                channel.send(message, timeout_s=10.0)
            except (OSError, ChannelClosed, TimeoutError) as error:
                logger.warning("order %s to %s: %s", message["op"], host, error)

    def close(self) -> None:
        """Ends every connection."""
        for channel in self._channels.values():
            channel.close()


def _answers(address: str) -> bool:
    """Whether a port can be connected to; only a refusal proves death."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
