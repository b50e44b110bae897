"""A host's connection to the leading host: made, lost, made again.

Says whether the leader is provably dead (its port refuses); what follows from that is
the agent's business. Must not know what the messages mean.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.channel import no_payload
from dtft.checkpoint.transport import Channel, ChannelClosed, Credentials, connect
from dtft.checkpoint.wire import AuthenticationError
from dtft.elastic.roles import HostRecord

logger = logging.getLogger(__name__)

FOREVER_S = 86400.0
"""Orders may be days apart; a dead peer closes the connection."""


class Upward:
    """At most one connection; orders arrive as ("order", channel, message)."""

    def __init__(
        self,
        host: str,
        incarnation: str,
        credentials: Credentials,
        limit_s: float,
        emit: Callable[..., None],
    ) -> None:
        """Connects to nobody yet. Its end is emitted as ("leader_lost", channel)."""
        self._hello = {"op": "control", "host": host, "incarnation": incarnation}
        self._credentials, self._limit_s, self._emit = credentials, limit_s, emit
        self._channel: Channel | None = None

    def connect(self, leader: HostRecord) -> bool:
        """Connects unless it is connected; False if the leader is provably dead."""
        if self._channel is not None:
            return True
        try:
            channel = connect(
                leader.address, self._credentials, self._hello, self._limit_s
            )
        except ConnectionRefusedError:
            logger.warning("leader %s refuses connections: it is dead", leader.host)
            return False
        except AuthenticationError as error:
            logger.error("%s", error)
            return True
        except (OSError, ChannelClosed, TimeoutError) as error:
            logger.warning("cannot reach leader %s: %s", leader.host, error)
            return True
        self._channel = channel
        threading.Thread(target=self._hear, args=(channel,), daemon=True).start()
        return True

    def _hear(self, channel: Channel) -> None:
        try:
            while True:
                message, _ = channel.receive(FOREVER_S, no_payload)
                self._emit("order", channel, message)
        except (ChannelClosed, TimeoutError, OSError):
            self._emit("leader_lost", channel)

    def is_current(self, channel: Channel) -> bool:
        """Whether orders from this channel are to be obeyed."""
        return channel is self._channel

    def lost(self, channel: Channel) -> None:
        """A channel has ended; if it was the current one, there is none now."""
        channel.close()
        if channel is self._channel:
            self._channel = None

    def send(self, message: dict[str, Any]) -> None:
        """Sends a report; if that fails, the channel's end is noticed elsewhere."""
        if self._channel is not None:
            try:
                self._channel.send(message, timeout_s=10.0)
            except (OSError, ChannelClosed, TimeoutError) as error:
                logger.warning("report %s: %s", message["op"], error)

    def close(self) -> None:
        """Ends the connection."""
        if self._channel is not None:
            self.lost(self._channel)
