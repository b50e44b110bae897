"""Control links between a job's agents: every host has one to the leader.

Both ends send a heartbeat when they send nothing else. An end that receives nothing for
one lease closes the link. So both ends detect a stalled or cut-off peer, even if the
peer's kernel still acknowledges packets. `leader` and `host` decide how to react to a
lost link.
"""

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future

from dtft.checkpoint.transport import AuthenticationError
from dtft.elastic.assignment import HostRecord, process_of
from dtft.elastic.event_loop import Loop
from dtft.elastic.network import (
    Closed,
    ControlChannel,
    Heard,
    Message,
    Network,
    PortState,
)

logger = logging.getLogger(__name__)

PROOF_TRIES = 40
PROOF_PAUSE_S = 0.02
"""Seconds between two of the `PROOF_TRIES` attempts to connect to a host whose link has
ended. A dying process closes its sockets one after another, so one try is too few."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Longest pause in seconds between two attempts to reach the leader."""


class LeaderLink:
    """A host's connection to the newest leader; there is at most one connection."""

    def __init__(
        self,
        me: Callable[[], HostRecord],
        network: Network,
        loop: Loop,
        lease_s: float,
        *,
        on_order: Callable[[Message], None],
        on_dead: Callable[[HostRecord], None],
        on_moved: Callable[[int, HostRecord], None],
    ) -> None:
        """Opens no connection yet.

        Args:
            me: returns this host's record.
            network: connects to other agents.
            loop: the agent's event loop.
            lease_s: seconds of silence after which the link is closed and opened again.
            on_order: called with each order of the leader.
            on_dead: called with the leader's record when its port refuses connections.
            on_moved: called with the number of the term and the record of the leader
                that the host at the other end names, because that host does not lead.
        """
        self._on_moved = on_moved
        self._me, self._network, self._loop, self._lease_s = me, network, loop, lease_s
        self._on_order, self._on_dead = on_order, on_dead
        self.term = 0
        """The term of the leader that this host follows."""
        self._leader: HostRecord | None = None
        self._channel: ControlChannel | None = None
        self._dialing: HostRecord | None = None
        """The leader to which a connection is being opened; None for none."""
        self._heard_at = self._sent_at = self._opened_at = 0.0
        self._next_try, self._pause_s = 0.0, FIRST_PAUSE_S

    @property
    def hears(self) -> bool:
        """Whether the link is open and silent for less than a lease.

        The silence begins at the last message, or when the link was opened.
        """
        silent_s = self._loop.now() - self._heard_at
        return self._channel is not None and silent_s < self._lease_s

    def follow(self, term: int, leader: HostRecord) -> None:
        """Begins to connect to a leader, unless a link to it is open or being opened.

        Closes a link to another leader first. After a failed try, the periodic `tick`
        tries again once a pause is over. `term` is the number of the leader's time in
        office, which is sent with the first message.
        """
        known = self._leader
        if known is None or _who(known) != _who(leader):
            self._leave(term, leader)
            self._next_try, self._pause_s = 0.0, FIRST_PAUSE_S
            self._dialing = None
        self.term, self._leader = term, leader
        self._connect()

    def _leave(self, term: int, leader: HostRecord) -> None:
        """Ends the link to a former leader, if there is a link.

        First tells the former leader who leads now: `leader`, in the term with the
        number `term`.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.post(moved(term, leader))
            channel.close()

    def _connect(self) -> None:
        leader, now = self._leader, self._loop.now()
        if leader is None or self._channel is not None or self._dialing is not None:
            return
        if now < self._next_try:
            return
        self._dialing = leader
        me, term = self._me(), self.term
        self._network.dial(
            leader.address,
            {
                "op": "control",
                "host": me.host,
                "incarnation": me.incarnation,
                "record": me.to_json(),
                "term": term,
            },
            lambda outcome: self._opened(leader, outcome),
            self._heard,
            self._closed,
        )

    def _opened(self, leader: HostRecord, outcome: "Future[ControlChannel]") -> None:
        wanted, error = self._dialing is leader, outcome.exception()
        if wanted:
            self._dialing = None
        if error is None and wanted:
            self._channel = outcome.result()
            self._heard_at = self._sent_at = self._opened_at = self._loop.now()
        elif error is None:
            outcome.result().close()
        elif wanted:
            self._back_off()
            self._say(leader, error)
            if isinstance(error, ConnectionRefusedError):
                self._on_dead(leader)

    def _say(self, leader: HostRecord, error: BaseException) -> None:
        if isinstance(error, ConnectionRefusedError):
            logger.warning(
                "leader %s refuses connections: its agent has ended", leader.host
            )
        elif isinstance(error, AuthenticationError):
            logger.error("cannot connect to leader %s: %s", leader.host, error)
        else:
            logger.warning(
                "cannot reach leader %s: %s; trying again", leader.host, error
            )

    def _heard(self, channel: ControlChannel, message: Message) -> None:
        if channel is not self._channel:
            return
        self._heard_at = self._loop.now()
        if message["op"] == "moved":
            _tell_moved(message, self._on_moved)
        elif message["op"] != "beat":
            self._on_order(message)

    def _closed(self, channel: ControlChannel, reason: str) -> None:
        if channel is self._channel:
            logger.info(
                "the link to the leader has ended (%s): connecting again", reason
            )
            self._channel = None
            if self._loop.now() - self._opened_at > LONGEST_PAUSE_S:
                self._next_try, self._pause_s = 0.0, FIRST_PAUSE_S
            else:  # perhaps another process with this host's name also connects
                self._back_off()
            self._connect()

    def _back_off(self) -> None:
        self._next_try = self._loop.now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def refuse(self, reason: str) -> None:
        """Closes the link after an invalid order; a later `tick` connects again.

        Args:
            reason: the error in the order, for the log.
        """
        logger.error(
            "the leader sent an invalid order, so the link is closed, and opened again "
            "in %.0f s: %s",
            *(LONGEST_PAUSE_S, reason),
        )
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._next_try = self._loop.now() + LONGEST_PAUSE_S

    def tick(self, paused_s: float) -> None:
        """Sends heartbeats, closes a silent link and connects again when due.

        Args:
            paused_s: seconds for which this process was just stopped; they do not count
                as silence of the leader.
        """
        now = self._loop.now()
        self._heard_at += paused_s
        if self._channel is not None and now - self._heard_at > self._lease_s:
            channel, self._channel = self._channel, None
            logger.warning(
                "the leader was silent for %.0f s: closing the link, connecting again",
                self._lease_s,
            )
            channel.close()
        if now - self._sent_at >= self._lease_s / 5:
            self.send({"op": "beat"})
        self._connect()

    def send(self, message: Message) -> None:
        """Sends a report to the leader; drops the report if there is no link."""
        if self._channel is not None:
            self._sent_at = self._loop.now()
            self._channel.post(message)

    def close(self) -> None:
        """Ends the link; it opens again only when a leader is to be followed anew."""
        channel, self._channel, self._leader = self._channel, None, None
        self._dialing = None
        if channel is not None:
            channel.close()


def _who(leader: HostRecord) -> tuple[str, str, str]:
    """Returns what identifies an agent: host name, agent process and address."""
    return leader.host, process_of(leader.incarnation), leader.address


@dataclasses.dataclass(kw_only=True)
class _Follower:
    channel: ControlChannel
    record: HostRecord
    heard_at: float
    sent_at: float

    def post(self, message: Message, now: float) -> None:
        """Sends a message, which also counts as a heartbeat.

        `now` is the current time of the event loop, in seconds.
        """
        self.sent_at = now
        self.channel.post(message)


class FollowerLinks:
    """The connections from other hosts, which follow this host as the leader.

    Hosts may connect before this host leads. There is at most one connection for each
    host; a later connection of a host replaces its earlier one.
    """

    def __init__(
        self,
        network: Network,
        loop: Loop,
        lease_s: float,
        *,
        on_connected: Callable[[HostRecord], None],
        on_report: Callable[[str, Message], None],
        on_lost: Callable[[HostRecord, str], None],
        on_dead: Callable[[HostRecord], None],
        on_moved: Callable[[int, HostRecord], None],
    ) -> None:
        """Starts with no connection.

        Args:
            network: connects to other agents.
            loop: the agent's event loop.
            lease_s: seconds of silence after which a link is closed.
            on_connected: called with the record of a host that has connected, or whose
                record has changed.
            on_report: called with a host's name and its report.
            on_lost: called with a host's record and the reason when its connection has
                ended or was silent for `lease_s`, or when the same agent process has
                connected again.
            on_dead: called with the record of a host whose link ended and whose port
                now refuses connections.
            on_moved: called with the number of the term and the record of another
                leader, which a connected host names. If this host is cut off from the
                store, it learns of the other leader only in this way.
        """
        self._network, self._loop, self._lease_s = network, loop, lease_s
        self._on_connected, self._on_report = on_connected, on_report
        self._on_lost, self._on_dead, self._on_moved = on_lost, on_dead, on_moved
        self._links: dict[str, _Follower] = {}
        self._channels: dict[ControlChannel, _Follower] = {}
        self._looked_at = 0.0

    @property
    def records(self) -> tuple[HostRecord, ...]:
        """The records of the connected hosts."""
        return tuple(link.record for link in self._links.values())

    @property
    def count(self) -> int:
        """The number of connected hosts."""
        return len(self._links)

    def accept(
        self, hello: Message, channel: ControlChannel
    ) -> tuple[Heard, Closed] | None:
        """Handles a host's hello message on a new connection.

        Returns:
            The callbacks for messages and for the end of the connection; None to refuse
            the connection: its hello is invalid, or comes from an earlier agent process
            of a host that is connected.
        """
        try:
            record = HostRecord.from_json(hello["record"])
            named = hello["host"], hello["incarnation"]
        except (KeyError, TypeError, ValueError):
            logger.warning(
                "refused a connection from %s: its first message is invalid",
                channel.address,
            )
            return None
        if named != (record.host, record.incarnation):
            logger.warning(
                "refused a connection from %s: the host name and incarnation in its "
                "first message are not those of its record",
                channel.address,
            )
            return None
        known = self._links.get(record.host)
        if known is not None and known.record.replaces(record):
            logger.warning(
                "refused a connection of an earlier agent process of host %s",
                record.host,
            )
            return None
        self._connect(record, channel)
        return self._heard, self._closed

    def _connect(self, record: HostRecord, channel: ControlChannel) -> None:
        old = self._links.get(record.host)
        now = self._loop.now()
        link = _Follower(channel=channel, record=record, heard_at=now, sent_at=now)
        self._links[record.host] = self._channels[channel] = link
        if old is not None:
            self._end(old)
            if _who(old.record) == _who(record):  # messages to it may be lost
                self._on_lost(old.record, "it has made another connection")
        self._on_connected(record)

    def _end(self, link: _Follower) -> None:
        """Closes a link; later messages on the link are ignored."""
        if self._links.get(link.record.host) is link:
            del self._links[link.record.host]
        self._channels.pop(link.channel, None)
        link.channel.close()

    def _heard(self, channel: ControlChannel, message: Message) -> None:
        link = self._channels.get(channel)
        if link is None:
            return
        link.heard_at = self._loop.now()
        op = message["op"]
        if op == "moved":
            _tell_moved(message, self._on_moved)
        elif op == "described":
            self._described(link, message)
        elif op != "beat":
            self._on_report(link.record.host, message)

    def _described(self, link: _Follower, message: Message) -> None:
        """Replaces a connected host's record by the record in the host's message.

        Ignores an invalid record, and a record of another host.
        """
        try:
            record = HostRecord.from_json(message["record"])
        except (KeyError, TypeError, ValueError):
            return
        if record.host == link.record.host:
            link.record = record
            self._on_connected(record)

    def _closed(self, channel: ControlChannel, reason: str) -> None:
        link = self._channels.get(channel)
        if link is None:
            return
        self._end(link)
        self._on_lost(link.record, f"its connection ended: {reason}")
        self._prove(link.record, PROOF_TRIES)

    def _prove(self, record: HostRecord, tries: int) -> None:
        """Tries to find out whether a host's agent has ended.

        Connects to the agent's port, at most `tries` times, with pauses of 0.02 s
        (`PROOF_PAUSE_S`). A refused connection shows that the agent has ended; then
        calls `on_dead` of the constructor. Stops without this call once the host has
        connected again.
        """
        if record.host in self._links or not tries:
            return

        def answered(state: PortState) -> None:
            if record.host in self._links:
                return  # the host has connected again
            if state == "refused":
                self._on_dead(record)
            else:
                again = (self._prove, record, tries - 1)
                self._loop.call_later(PROOF_PAUSE_S, *again)

        self._network.probe(record.address, answered)

    def tick(self, paused_s: float) -> None:
        """Sends heartbeats and closes the links of silent hosts.

        Args:
            paused_s: seconds for which this process was just stopped; they do not count
                as silence of the hosts.
        """
        now = self._loop.now()
        if not paused_s and now < self._looked_at + self._lease_s / 20:
            return
        self._looked_at = now
        silent_s, quiet_s = self._lease_s, self._lease_s / 5
        for link in list(self._links.values()):
            link.heard_at += paused_s
            if now - link.heard_at > silent_s:
                self._end(link)
                self._on_lost(link.record, f"silent for {silent_s:.0f} s")
            elif now - link.sent_at >= quiet_s:
                link.post({"op": "beat"}, now)

    def send(self, host: str, message: Message) -> None:
        """Sends an order to a host; drops the order if the host is not connected."""
        if (link := self._links.get(host)) is not None:
            link.post(message, self._loop.now())

    def drop(self, host: str) -> None:
        """Ends the link to a host, if there is one; the host then connects again."""
        if (link := self._links.get(host)) is not None:
            self._end(link)

    def close(self, last: Message | None = None) -> None:
        """Ends every link; called when this host stops leading and when its agent ends.

        Args:
            last: message to send to every host first; None for none.
        """
        for link in list(self._links.values()):
            if last is not None:
                link.channel.post(last)
            self._end(link)


def moved(term: int, leader: HostRecord) -> Message:
    """Makes the message that names the new leader and the number of its term."""
    return {"op": "moved", "term": term, "leader": leader.to_json()}


def _tell_moved(message: Message, tell: Callable[[int, HostRecord], None]) -> None:
    try:
        term, leader = message["term"], HostRecord.from_json(message["leader"])
    except (KeyError, TypeError, ValueError):
        return
    if type(term) is int:
        tell(term, leader)


def described(record: HostRecord) -> Message:
    """Makes the message with a host's changed record.

    >>> record = HostRecord(
    ...     host="a", address="", incarnation="x.1", joined_ns=0, pid=1)
    >>> HostRecord.from_json(described(record)["record"]).host
    'a'
    """
    return {"op": "described", "record": record.to_json()}
