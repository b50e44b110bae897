"""One host's agent: an event loop between store, peers, leader and trainers.

The agent passes events to `Follower` (this host's duties) and, while this host leads,
to the `Leader` in `Leadership`. The agent itself decides nothing about the job. This
module must never import JAX: a JAX client aborts its process when the coordination
service dies.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtft.checkpoint.replication import Commit
from dtft.elastic.admission import check_domain, check_job, claims_of, refuse_taken_name
from dtft.elastic.assignment import HostRecord, process_of
from dtft.elastic.host.edges import Asked, Edges, local_edges
from dtft.elastic.host.trainers import Trainers
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader import AGAIN, Answer, Leader, Leadership
from dtft.elastic.links import FollowerLinks, LeaderLink, described, moved
from dtft.elastic.messages import fault_of_order, order_fields
from dtft.elastic.network import Closed, ControlChannel, Heard, Message, PortState
from dtft.elastic.store import Membership, Store, View

logger = logging.getLogger(__name__)

TICK_S = 0.1
RANK_S = 0.02
"""Seconds by which a host delays its campaign for leadership, for each host whose name
sorts before its own. The whole delay is at most 1 s."""


class Agent:
    """One host's agent: runs until the job has a result or this host must leave."""

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        trainers: Trainers | None = None,
        edges: Edges | None = None,
    ) -> None:
        """Opens this host's port; does not register in the store yet.

        Args:
            config: settings of this host.
            store: the job's store.
            trainers: trainers whose socket is open already; made here by default. Not
                used if `edges` is given.
            edges: access to time, network, files and processes; by default this
                machine's.

        Raises:
            StoreUnavailable: the store does not answer.
            JobMismatch: a live host has this host's name.
            ValueError: the arena directory does not exist or is full, a live agent or
                another user has the memory directory, or the port cannot be opened.
        """
        if edges is None:
            refuse_taken_name(store, config)
            edges = local_edges(config, store, trainers)
        self._config, self._store, self._edges = config, store, edges
        self._loop, lease_s = edges.loop, config.timeouts.lease
        self._follower = edges.follower(self._emit, self._report)
        self._links = FollowerLinks(
            edges.network,
            self._loop,
            lease_s,
            on_connected=self._host_connected,
            on_report=self._host_reports,
            on_lost=self._host_lost,
            on_dead=self._host_dead,
            on_moved=self._leader_moved,
        )
        asked = Asked(
            export=self._export_wanted,
            scale=self._scaling_wanted,
            drain=self._draining_wanted,
        )
        try:
            self._server = edges.listen(self._follower.inbox(), self._accept, asked)
        except ValueError:
            self._follower.close()
            edges.close()
            raise
        self._membership = Membership(
            store,
            edges.mirrors,
            config.job,
            self._describe(),
            lease_s,
            self._loop,
            on_view=self._see,
            on_lapse=self._lapsed,
            on_store=self._store_changed,
            on_replaced=self._replaced,
        )
        self._leader_link = LeaderLink(
            lambda: self._membership.record,
            edges.network,
            self._loop,
            lease_s,
            on_order=self._obey_leader,
            on_dead=self._leader_dead,
            on_moved=self._leader_moved,
        )
        self._leadership = Leadership(
            config.host,
            self._membership,
            self._loop,
            lease_s,
            self._make_leader,
            on_begun=self._begin_to_lead,
            on_ended=self._let_followers_go,
        )
        self._service = edges.service()
        self._served: tuple[int, ...] = (0, 0)
        """(term, number) of the round of the last order about the coordination
        service."""
        self._departs = 0
        """Number of calls of `depart`."""
        self._leaves_by: float | None = None
        """Time at which this agent ends in any case; None before `depart`."""
        self._hint: tuple[int, HostRecord] | None = None
        """(term, record) of the newest leader that another host has named while the
        store did not answer; None before that."""
        self._seen: dict[str, HostRecord] = {}
        """Last known record of each host that the store lists or whose slot the
        assignment names."""
        self._resigned = False
        """Whether this host has let another host lead, because it leaves the job."""
        self._store_up = True
        self._leaderless_since: float | None = None
        self._isolated_since: float | None = None
        self._ticked_at = 0.0
        self._result = ""

    def _describe(self) -> HostRecord:
        """Builds the record of this host for the store."""
        return HostRecord(
            host=self._config.host,
            address=self._server.address,
            incarnation=secrets.token_hex(8),
            joined_ns=int(self._loop.wall() * 1e9),
            pid=os.getpid(),
            domain=self._config.domain,
        )

    # --------------------------------------------------------------------- run

    def run(self) -> str:
        """Serves until the job ends or this host must leave.

        Returns:
            The job's result as JSON; "" if this host left before the end.

        Raises:
            StoreUnavailable: the store cannot be reached at the start.
            JobMismatch: the secret, config or TLS setting differs from the job's, or
                the failure domain is inconsistent with the domains of other hosts.
        """
        try:
            check_job(self._store, self._config)
            check_domain(self._store, self._config)
            self.start()
            self._loop.run()
            return self._result
        finally:
            self.close()

    def start(self) -> None:
        """Registers this host in the store and starts the periodic tick.

        The tick, every 0.1 s, renews the lease, checks the connections and the trainer,
        connects to the leader, and campaigns for leadership if there is no leader. Also
        starts a standby trainer, unless the user starts the trainers.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
        self._membership.claims = claims_of(self._config)
        self._membership.start()
        self._follower.warm()
        self._ticked_at = self._loop.now()
        self._loop.call_later(TICK_S, self._tick)

    def leave(self) -> None:
        """Makes `run` return soon; safe in a signal handler."""
        self._loop.stop()

    def depart(self) -> None:
        """Makes `run` return once the job can do without this host.

        The job can do so once another host has taken this host's slot and a step is
        committed. `run` returns soon if this host has neither a slot nor copies of the
        state and does not lead, or if no other host can take the slot. It returns after
        the config's `timeouts.drain` seconds at the latest, and soon after a second
        call of this method. Safe in a signal handler.
        """
        self._departs += 1
        has_state = self._follower.has_slot or self._follower.has_copies
        needed = has_state or self._leadership.leader is not None
        if self._departs > 1 or not needed:
            self._loop.stop()

    def _watch_departure(self) -> None:
        """Tells the leader that this host leaves the job, if `depart` was called.

        Ends this agent if it still runs `timeouts.drain` seconds (config) later. Called
        at every tick.
        """
        if not self._departs:
            return
        now = self._loop.now()
        if self._leaves_by is None:
            self._leaves_by = now + self._config.timeouts.drain
            self._say_leaving()
        elif now > self._leaves_by:
            self._loop.stop()

    def _finish(self, result: str) -> None:
        self._result = result
        self._loop.stop()

    def close(self) -> None:
        """Ends this host's connections, its registration and the trainers it started.

        A process that the user started is not ended: it is told that this agent ends.
        """
        with contextlib.ExitStack() as parts:  # closes each, even if others fail
            parts.callback(self._edges.close)
            parts.callback(self._server.close)
            parts.callback(self._links.close)
            parts.callback(self._leader_link.close)
            parts.callback(self._membership.close)
            parts.callback(self._follower.close)
            parts.callback(self._service.close)
            parts.callback(self._leadership.close)

    def _tick(self) -> None:
        now = self._loop.now()
        late_s = now - self._ticked_at - TICK_S
        # Messages that arrived while this process was stopped are not read yet.
        paused_s = late_s if late_s > self._config.timeouts.lease / 5 else 0.0
        self._ticked_at = now
        self._membership.tick()
        self._links.tick(paused_s)
        self._leader_link.tick(paused_s)
        self._follower.tick()
        self._watch_departure()
        self._campaign_if_free()
        self._follow()
        if (leader := self._leadership.leader) is not None and not paused_s:
            leader.tick()
            self._step_down_if_isolated(leader)
        self._loop.call_later(TICK_S, self._tick)

    # ---------------------------------------------------------------- the store

    def _see(self, view: View) -> None:
        """Handles a new view (the job's records in the store).

        Ends this agent if the job has a result. Otherwise begins, continues or ends
        this host's leadership, connects to the leader, and gives up an outdated slot.
        """
        if view.result is not None:
            self._finish(view.result)
            return
        slots = view.assignment.slots if view.assignment is not None else ()
        left = {it: self._seen[it] for it in slots if it in self._seen}
        self._seen = left | view.hosts
        self._leadership.see(view)
        self._campaign_if_free()
        self._follow()
        self._follower.see(view.hosts.values())
        self._retire_if_replaced(view)

    def _retire_if_replaced(self, view: View) -> None:
        """Gives up the slot if a newer assignment does not contain this agent process.

        So a host that was stopped or cut off for a while becomes a spare.
        """
        newer = view.assignment
        if newer is None or newer.epoch <= self._follower.epoch:
            return
        me = process_of(self._membership.record.incarnation)
        members = {process_of(one) for one in newer.incarnations}
        if self._follower.epoch > (0, 0) and me not in members:
            logger.warning(
                "generation %d was formed without this host, which gives up its slot "
                "and becomes a spare",
                newer.generation,
            )
            self._follower.retire()

    def _lapsed(self) -> None:
        """Sends the leader this host's record, after this host's lease has expired.

        The record has the next incarnation.
        """
        self._tell_record()

    def _tell_record(self) -> None:
        record = self._membership.record
        if (leader := self._leadership.leader) is not None:
            leader.connected(record)
        else:
            self._leader_link.send(described(record))

    def describe(self, record: HostRecord) -> None:
        """Sends a changed record of this host to the leader.

        A later tick (see `start`) writes the record to the store.
        """
        self._membership.describe(record)
        self._tell_record()

    def _replaced(self, by: HostRecord) -> None:
        """Ends this agent because a later agent has taken this host's name."""
        logger.error(
            "host name %s is taken by process %d now: this agent ends", by.host, by.pid
        )
        self._loop.stop()

    def _store_changed(self, up: bool) -> None:
        self._store_up = up
        logger.warning(
            "the store %s",
            "answers again" if up else "does not answer; training goes on without it",
        )

    # ------------------------------------------------------------ who leads

    def _campaign_if_free(self) -> None:
        """Campaigns for leadership once the store has had no leader for a delay.

        The delay is longer for hosts whose names sort later, and while the last leader
        still answers (`campaign_delay_s`). It is 0 if this host still runs a `Leader`,
        because this host held the leader key last.
        """
        view, now = self._membership.view, self._loop.now()
        if view.leader is not None or not view.hosts:
            self._leaderless_since = None
            return
        if self._leaderless_since is None:
            self._leaderless_since = now
        if not self._leadership.may_campaign:
            return
        wait_s = 0.0
        if self._leadership.leader is None:
            lease_s, hears = self._config.timeouts.lease, self._leader_link.hears
            me = self._membership.record
            wait_s = campaign_delay_s(view, me, lease_s, hears=hears)
        if now >= self._leaderless_since + wait_s:
            self._membership.campaign()

    def _make_leader(self, view: View, commits: Sequence[Commit]) -> Leader:
        return Leader(
            self._config,
            self._membership,
            view,
            commits,
            self._loop,
            self._order,
            self._edges.journal(),
            self._edges.list_steps,
            committing=self._follower.committing,
            ended=self._finish,
            resign=self._resign,
        )

    def _begin_to_lead(self) -> None:
        leader = self._leadership.leader
        assert leader is not None
        self._leader_link.close()
        self._isolated_since = None
        for record in [self._membership.record, *self._links.records]:
            leader.connected(record)
        for record in unlisted(leader.view, self._seen):
            self._prove_end(leader, record)

    def _prove_end(self, leader: Leader, record: HostRecord) -> None:
        """Tries to connect to a host that has a slot, but is not listed in the store.

        If the host's port refuses connections, the host's agent has ended, and this
        host's `Leader` records that. Otherwise does nothing: the host may be cut off
        from the store alone, so the leader waits for the host to connect.

        Args:
            leader: the `Leader` that this host runs.
            record: the last record of the other host, with its address.
        """

        def answered(state: PortState) -> None:
            if state == "refused" and self._leadership.leader is leader:
                leader.agent_ended(record)

        self._edges.network.probe(record.address, answered)

    def _resign(self) -> None:
        """Gives up the leader key, because this host leaves the job.

        At a second call this agent ends instead: this host has been elected again, so
        no other host can lead. Does nothing if this host does not lead.
        """
        leader = self._leadership.leader
        if leader is None:
            return
        if self._resigned:
            self._loop.stop()
            return
        self._resigned = True
        self._say_leaving()
        self._leadership.let_go(leader.view, "this host leaves the job")

    def _say_leaving(self) -> None:
        self.describe(dataclasses.replace(self._membership.record, leaving=True))

    def _newest_leader(self) -> tuple[int, HostRecord] | None:
        """Returns (term, record) of the newest known leader; None if there is none.

        The term is the number of the leader's time in office. The leader is the one in
        this host's last view of the store. While the store does not answer, it is the
        leader that another host has named, if that leader's term is later.
        """
        view = self._membership.view
        if self._hint is not None and self._hint[0] > view.term and not self._store_up:
            return self._hint
        leader = view.hosts.get(view.leader or "")
        return (view.term, leader) if leader is not None else None

    def _moved_message(self) -> Message | None:
        """Makes the message that names the newest leader to other hosts.

        Returns None if this host leads or no leader is known.
        """
        newest = self._newest_leader()
        if newest is None or newest[1].host == self._config.host:
            return None
        return moved(*newest)

    def _let_followers_go(self) -> None:
        """Closes the links of the other hosts when this host stops leading.

        First sends these hosts the name and address of the new leader, if another host
        is known to lead.
        """
        self._links.close(self._moved_message())

    def _accept(
        self, hello: Message, channel: ControlChannel
    ) -> tuple[Heard, Closed] | None:
        """Accepts a host's control connection.

        If this host does not lead but knows which host does, sends a message that names
        that leader over the accepted connection. `hello` is the first message, with the
        connecting host's record.

        Returns:
            The callbacks for messages and for the end of the connection; None to refuse
            the connection (see `FollowerLinks.accept` for the reasons).
        """
        found = self._links.accept(hello, channel)
        last = self._moved_message() if self._leadership.leader is None else None
        if found is not None and last is not None:
            channel.post(last)
        return found

    def _step_down_if_isolated(self, leader: Leader) -> None:
        """Gives up the leader key if too few hosts stay connected to this leader.

        The connected hosts are too few if, with this host added, they are fewer than
        the job's slots and fewer than the hosts in the store. The key is given up once
        this has lasted for twice the duration of a lease.
        """
        needed = min(leader.num_slots, len(leader.view.hosts))
        if self._links.count + 1 >= needed:
            self._isolated_since = None
            return
        now = self._loop.now()
        if self._isolated_since is None:
            self._isolated_since = now
        if now > self._isolated_since + 2 * self._config.timeouts.lease:
            why = f"only {self._links.count + 1} of {needed} hosts are connected"
            self._leadership.let_go(leader.view, why)

    def _leader_moved(self, term: int, record: HostRecord) -> None:
        """Follows a leader that another host names; ends this host's own leadership.

        `record` is the named leader's record, and `term` the number of its time in
        office (term). Does nothing in these cases:

        * The store answers, so this host's view names the leader.
        * The term is not later than that in this host's last view.
        * Another host has named a leader with a later term before.
        """
        if self._store_up or term <= self._membership.view.term:
            return  # the store's view is as new or newer
        if self._hint is not None and term < self._hint[0]:
            return
        self._hint = term, record
        self._leadership.give_up()
        self._follow()

    def _follow(self) -> None:
        """Connects this host to the newest known leader, unless this host leads."""
        newest = self._newest_leader()
        if self._leadership.leader is not None or newest is None:
            return
        if newest[1].host != self._config.host:
            self._leader_link.follow(*newest)

    def _leader_dead(self, leader: HostRecord) -> None:
        """Revokes the store lease of a leader whose port refuses connections.

        Does nothing if the store no longer names this leader.
        """
        view = self._membership.view
        if view.leader == leader.host:
            self._membership.expel(view.leader_lease)

    # ------------------------------------------------------ towards the leader

    def _report(self, op: str, **fields: Any) -> None:
        """Sends a report of this host, of the kind `op`, to the leader.

        The leader may be this host. Without a link to the leader the report is dropped.
        """
        message = {"op": op, **fields}
        if self._leadership.leader is not None:
            self._loop.post(self._host_reports, self._config.host, message)
        else:
            self._leader_link.send(message)

    def _obey_leader(self, message: Message) -> None:
        """Obeys a valid order of the leader; an invalid order ends the connection."""
        fault = fault_of_order(message, self._config.host)
        if fault is not None:
            self._leader_link.refuse(fault)
            return
        self._obey({"op": message["op"], **order_fields(message)})

    def _order(self, host: str, op: str, **fields: Any) -> None:
        """Sends a leader's order of the kind `op` to a host, which may be this one."""
        message = {"op": op, **fields}
        if host == self._config.host:
            self._loop.post(self._obey, message)
        else:
            self._links.send(host, message)

    def _obey(self, message: Message) -> None:
        if message["op"] == "ended":
            self._finish(message["result"])
        elif message["op"] == "drained":
            # A spare may not know the current round.
            if tuple(message["ballot"]) >= self._follower.ballot:
                self._loop.stop()
        elif message["op"] == "serve":
            self._serve(
                **{name: message[name] for name in ("ballot", "server", "size")}
            )
        elif message["op"] == "give_up":
            # A late order of a former leader could name places of a newer formation.
            if tuple(message["ballot"]) >= self._follower.ballot:
                self._service.give_up(message["places"])
        else:
            self._follower.obey(message)

    def _serve(self, ballot: tuple[int, int], server: str, size: int) -> None:
        """Ends the former coordination service; starts one if this host is `server`.

        The leader orders this in each round, an attempt to form the job. An order of an
        earlier round than the latest one is ignored. Trainers connect to JAX's
        coordination service; the connected trainers form a new world, which replaces
        the former one.

        Args:
            ballot: (term, number) of the round.
            server: name of the host that runs the new service.
            size: number of processes of the world.
        """
        if tuple(ballot) < self._served:
            return
        self._served = tuple(ballot)
        if server != self._config.host:
            self._service.end()
            return

        def tell(address: str, error: str) -> None:
            self._report("serving", ballot=ballot, address=address, error=error)

        self._service.start(
            size, lambda address: tell(address, ""), lambda error: tell("", error)
        )

    def _emit(self, kind: str, *values: Any) -> None:
        """Has the event loop handle an event of this host; safe on any thread.

        `kind` names the event, such as "trainer_exit", and `values` belong to it.
        """
        self._loop.post(self._happened, kind, *values)

    def _happened(self, kind: str, *values: Any) -> None:
        if kind == "attachment":
            index, ident = self._follower.attachment
            record = self._membership.record
            self.describe(dataclasses.replace(record, process=index, attached_ns=ident))
        else:
            self._follower.happened(kind, *values)

    # --------------------------------------------------- from others (as leader)

    def _with_leader(self, act: Callable[[Leader], None]) -> None:
        if (leader := self._leadership.leader) is not None:
            act(leader)

    def _host_connected(self, record: HostRecord) -> None:
        self._with_leader(lambda leader: leader.connected(record))

    def _host_reports(self, host: str, message: Message) -> None:
        self._with_leader(lambda leader: leader.handle_report(host, message))

    def _host_lost(self, record: HostRecord, why: str) -> None:
        self._with_leader(lambda leader: leader.disconnected(record, why))

    def _host_dead(self, record: HostRecord) -> None:
        """Revokes the store lease of a host whose port refuses connections.

        `record` has the host's name and the address that was tried. A host that is now
        registered with another address keeps its lease. If this host leads, its
        `Leader` handles the loss.
        """
        view = self._membership.view
        known = view.hosts.get(record.host)
        if known is not None and known.address == record.address:
            self._membership.expel(view.leases.get(record.host, 0))
        why = "its connection closed, its port is dead"
        self._with_leader(lambda leader: leader.lost(record.host, why))

    def _export_wanted(self, answer: Answer) -> None:
        if (leader := self._leadership.leader) is None:
            text = f"{self._config.host} does not lead the job"
            answer({"error": text, "moved": True})
        else:
            leader.export_wanted(answer)

    def _draining_wanted(self, host: str, answer: Answer) -> None:
        if (leader := self._leadership.leader) is None:
            answer({"error": AGAIN, "again": True})
        else:
            leader.draining_wanted(host, answer)

    def _scaling_wanted(self, replicas: int, answer: Answer) -> None:
        if (leader := self._leadership.leader) is None:
            answer({"error": AGAIN, "again": True})
        else:
            leader.scaling_wanted(replicas, answer)


def campaign_delay_s(
    view: View, me: HostRecord, lease_s: float, *, hears: bool
) -> float:
    """Computes how long a host waits before it campaigns for the free leader key.

    The delay in seconds is the sum of these parts:

    * `RANK_S` (0.02 s) for each host whose name sorts before this host's, at most 1 s,
      so that hosts do not campaign all at once;
    * half a lease if this host `hears` the last leader, because that leader may only
      have lost its lease; 0 if the last leader leaves the job;
    * one lease if this host leaves the job.

    Args:
        view: the job's records in the store.
        me: this host's record.
        lease_s: duration of a lease in seconds.
        hears: whether the link to the last leader is open and not silent.

    The example has a lease of 5 s. Host b waits 0.02 s for the rank of host a before
    it, and 2.5 s because b hears the last leader, a. In `left` host a leaves the job:
    b waits for the rank alone, and a waits for one lease.

    >>> one, two = (
    ...     HostRecord(host=it, address="", incarnation="", joined_ns=0, pid=1)
    ...     for it in "ab")
    >>> view = View(hosts={"a": one, "b": two}, last_led="a")
    >>> campaign_delay_s(view, two, 5.0, hears=True)
    2.52
    >>> left = View(hosts={"a": dataclasses.replace(one, leaving=True), "b": two},
    ...     last_led="a")
    >>> campaign_delay_s(left, two, 5.0, hears=True)
    0.02
    >>> campaign_delay_s(left, left.hosts["a"], 5.0, hears=False)
    5.0
    """
    rank = sum(host < me.host for host in view.hosts)
    last = view.hosts.get(view.last_led)
    has_resigned = last is not None and last.leaving
    delay_s = min(rank * RANK_S, 1.0)
    if hears and not has_resigned:
        delay_s += lease_s / 2
    if me.leaving:
        delay_s += lease_s
    return delay_s


def unlisted(view: View, seen: Mapping[str, HostRecord]) -> list[HostRecord]:
    """Returns the records of hosts with a slot that are no longer in the store.

    The agents of these hosts have ended, or are cut off from the store. [] if no slots
    are assigned.

    Args:
        view: the job's records in the store.
        seen: maps each host that was ever in the store to its last record there.
    """
    if view.assignment is None:
        return []
    members = {process_of(it) for it in view.assignment.incarnations}
    return [
        record
        for host, record in sorted(seen.items())
        if host not in view.hosts and process_of(record.incarnation) in members
    ]
