"""The leader's registry of connected hosts, and its reactions when hosts join or leave.

A host is connected while its link (its connection to the leader) is open. When the link
ends, the host stays registered for one lease (`timeouts.lease` seconds), in which it
may reconnect; after that it is lost. A host is lost at once if it sent nothing on an
open link for a lease, or if its port refuses connections. A lost host that reconnects
is registered like any other.

A host that does not report its copies in time gets no slot until it reports them. To
form the job is to assign hosts to slots and to restore the state; `seat_policy` decides
which host gets which slot.
"""

from collections.abc import Collection, Mapping

from dtft.elastic.assignment import HostRecord, process_of
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.failure_budget import Failure
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.rendezvous_plan import RoundReason, leaving, lost
from dtft.elastic.messages import known_layout
from dtft.elastic.seat_policy import missing
from dtft.elastic.store import View

FIRST_ASK_S = 5.0
LONGEST_ASK_S = 300.0
"""Longest pause in seconds between two checks of whether a host that could not have a
slot can have one now; the first pause is `FIRST_ASK_S`."""
NOBODY_S = 2.0
"""Seconds for which no host can have a slot, after which a job that has not begun ends.
Shorter than `FIRST_ASK_S`, after which hosts that can have no slot are asked again."""
STRAY_S = 0.5
"""Seconds for which a new leader waits for hosts that have a slot in the last
assignment but are not in the store: they may be cut off only from the store."""


class HostRegistry:
    """The hosts connected to the leader, and which of them may be given a slot.

    All times are in seconds, on one clock.
    """

    def __init__(
        self, now: float, grace_s: float, former: Mapping[str, str] | None = None
    ) -> None:
        """Starts with no connected host.

        Args:
            now: the time in seconds.
            grace_s: seconds from `now` for which the leader waits for hosts that the
                store lists but that have not connected yet.
            former: for each host with a slot in the last assignment, its incarnation
                then: an id that names the agent process.
        """
        self._records: dict[str, HostRecord] = {}
        self._away: dict[str, float] = {}
        self._silent: set[str] = set()
        self.unfit: dict[str, str] = {}
        """Host to the reason why it can have no slot (too little memory, for example),
        until it reports that it can have one."""
        self._drained: set[str] = set()
        """Hosts that are to leave the job, and get no slot any more."""
        self._asked_at: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        """Host that can have no slot, to the pause in seconds between its last check,
        whose time is in `_asked_at`, and its next check."""
        self._gone: dict[str, str] = {}
        """Lost host to the identity of its agent process: its incarnation's PROCESS."""
        self._grace_until, self._stray_until = now + grace_s, now + STRAY_S
        self._former = dict(former or {})

    @property
    def connected(self) -> set[str]:
        """The hosts with an open link; orders reach only these hosts."""
        return set(self._records) - set(self._away)

    @property
    def away(self) -> set[str]:
        """The hosts whose link to the leader has ended and that may still reconnect."""
        return set(self._away)

    @property
    def records(self) -> dict[str, HostRecord]:
        """The records of the registered hosts, by name.

        A host is registered while it is connected, and for one lease after its link has
        ended.
        """
        return dict(self._records)

    def connect(self, record: HostRecord) -> bool:
        """Registers a host that has connected, or a newer record of a connected host.

        Returns:
            True if the host was not connected before, or if another agent process of
            the host was. False if only its record is newer.
        """
        old = self._records.get(record.host)
        self._records[record.host] = record
        self._gone.pop(record.host, None)
        was_away = self._away.pop(record.host, None) is not None
        known = old is not None and _process(old) == _process(record)
        if was_away or not known:
            self._silent.discard(record.host)
        if record.leaving:
            self._drained.add(record.host)
        elif not known:
            self._drained.discard(record.host)
        if not known:
            for told in (self.unfit, self._asked_at, self._pause_s):
                told.pop(record.host, None)
        return was_away or not known

    def same_process(self, record: HostRecord) -> bool:
        """Whether the host is registered with the agent process that `record` names."""
        old = self._records.get(record.host)
        return old is not None and _process(old) == _process(record)

    def disconnect(self, host: str, now: float) -> None:
        """Records that a host's link ended at the time `now`."""
        if host in self._records:
            self._away.setdefault(host, now)

    def overdue(self, now: float, limit_s: float) -> list[str]:
        """Returns the hosts whose link ended more than `limit_s` seconds ago."""
        return sorted(host for host, at in self._away.items() if now > at + limit_s)

    def lose(self, host: str) -> bool:
        """Removes a lost host; returns False if it was not registered."""
        record = self._records.pop(host, None)
        self._away.pop(host, None)
        if record is None:
            return False
        self._gone[host] = _process(record)
        return True

    @property
    def lost_hosts(self) -> set[str]:
        """The hosts that were lost, or whose agent has ended, and have not reconnected.

        Also contains the hosts that had a slot when this host began to lead and have
        not connected to it yet. A host in the result may be alive and reconnect.
        """
        return {*self._gone, *self._former} - self._records.keys()

    def leave_out(self, host: str) -> None:
        """Gives a host no slot until it reports the copies that it holds."""
        self._silent.add(host)

    def drain(self, host: str) -> None:
        """Gives a host no slot any more, because the host is to leave the job.

        A new agent process on the host ends this, and so does `keep`.
        """
        self._drained.add(host)

    def keep(self, host: str) -> None:
        """Undoes `drain`: the host stays in the job and may have a slot again."""
        self._drained.discard(host)

    @property
    def drained(self) -> set[str]:
        """The registered hosts that are to leave the job."""
        return self._drained & self._records.keys()

    def agent_ended(self, record: HostRecord) -> bool:
        """Records that a host's agent process has ended, if the host is not registered.

        The leader then no longer waits for an answer of this process before it decides
        which host gets which slot.

        Returns:
            False if the host is registered; then nothing changes.
        """
        if record.host in self._records:
            return False
        self._gone.setdefault(record.host, _process(record))
        return True

    def answered(self, host: str) -> None:
        """Undoes `leave_out`: the host has reported the copies that it holds."""
        self._silent.discard(host)

    def to_ask_again(self, now: float) -> list[str]:
        """Returns the connected hosts to ask now whether they can have a slot again.

        Only hosts without the right to a slot are asked: they have reported that they
        can have none, or did not report their copies in time. The first call that finds
        such a host does not return it, but begins a pause of 5 s. The host is returned
        when the pause is over. Every return doubles the next pause, up to 300 s
        (`LONGEST_ASK_S`), because some hosts can never have a slot.
        """
        found = []
        for host in [*self.unfit, *self._silent]:
            pause_s = self._pause_s.setdefault(host, FIRST_ASK_S)
            there = host in self._records and host not in self._away
            if there and now >= (self._asked_at.setdefault(host, now) + pause_s):
                self._asked_at[host] = now
                self._pause_s[host] = min(2 * pause_s, LONGEST_ASK_S)
                found.append(host)
        return sorted(found)

    def expected(self, registered: Mapping[str, HostRecord], now: float) -> set[str]:
        """Returns the hosts that must report their copies before slots are assigned.

        These are the connected hosts and those that may still connect (`is_expected`).

        Args:
            registered: the records of the hosts that the store lists.
            now: the time in seconds.
        """
        hosts = {*self._records, *registered, *self._former}
        return {host for host in hosts if self.is_expected(host, registered, now)}

    def is_expected(
        self, host: str, registered: Mapping[str, HostRecord], now: float
    ) -> bool:
        """Whether one host must report its copies before hosts are assigned to slots.

        False for a host that did not report in time before, until it reports. Otherwise
        true for these hosts:

        * a host that is connected, or whose link ended less than a lease ago;
        * a host that has not connected to this leader and is not known to have ended:
          for the grace time given at the start if the store lists it, and for 0.5 s
          (`STRAY_S`) if it has a slot in the last assignment. Both times begin when
          this host begins to lead.

        Args:
            host: the host.
            registered: the records of the hosts that the store lists.
            now: the time in seconds.
        """
        if host in self._silent:
            return False
        if host in self._records:
            return True
        gone = self._gone.get(host)
        if now <= self._grace_until and (record := registered.get(host)) is not None:
            if gone != _process(record):
                return True
        former = self._former.get(host) if now <= self._stray_until else None
        return former is not None and gone != process_of(former)

    def usable(self) -> list[HostRecord]:
        """Returns the records of the hosts that may have a slot, sorted by name."""
        hosts = self.connected - self._silent - self._drained - set(self.unfit)
        return [self._records[host] for host in sorted(hosts)]

    @property
    def num_usable(self) -> int:
        """The number of hosts that may have a slot.

        Counted without making a list, because it is needed whenever a host joins.
        """
        unusable = {*self._away, *self._silent, *self._drained, *self.unfit}
        return len(self._records) - len(unusable & self._records.keys())

    def why_nobody(self) -> str:
        """Returns the reasons that all hosts have reported for having no slot.

        Returns "" if no host is registered, or if not all hosts have reported that they
        can have no slot. Hosts that were lost and have not reconnected count, too.
        """
        hosts = self._records.keys() | self._gone.keys()
        if not self._records or hosts - self.unfit.keys():
            return ""
        return "; ".join(f"{host}: {why}" for host, why in sorted(self.unfit.items()))

    def unusable(self) -> dict[str, str]:
        """Returns the registered hosts that can have no slot now, with the reasons."""
        why = {host: "it does not answer" for host in self._silent}
        why |= {host: "it leaves the job" for host in self._drained}
        why |= {host: "its connection is cut" for host in self._away}
        why |= self.unfit
        return {host: why[host] for host in sorted(why) if host in self._records}


def _process(record: HostRecord) -> str:
    return process_of(record.incarnation)


class HostMonitor:
    """Reacts to hosts that join, disconnect or are lost. Runs on the event loop."""

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        rendezvous: Rendezvous,
        registry: HostRegistry,
        loop: Loop,
        journal: Journal,
    ) -> None:
        """Starts without forming the job; call `take_over` to form an old job anew."""
        self._config, self._records, self._rendezvous = config, records, rendezvous
        self._registry, self._loop, self._journal = registry, loop, journal

    def take_over(self) -> None:
        """Forms the job anew if it had a leader before this one.

        The job had a leader if the store has an assignment of hosts to slots, or has
        lost its data. A new job is not formed here, but later, when enough hosts have
        connected.

        The reason is printed. If the store has an assignment, but no longer lists some
        hosts of its slots, the reason is that these hosts are lost. (They may be alive:
        a lease also runs out while the store does not answer.) If it lists them all,
        the reason is that this host leads now. Hosts with a slot that are to leave the
        job, such as a drained leader, are a further reason. If the store has no
        assignment, the reason is that it has lost its data.
        """
        view = self._records.view
        if (old := view.assignment) is not None:
            how = "has no lease any more"
            losses = [
                lost(host, old, how=how) for host in old.slots if host not in view.hosts
            ]
            leads = f"{self._config.host} leads from now on"
            ends = [host for host, it in view.hosts.items() if it.leaving]
            departures = [leaving(it, old.slot_of) for it in ends if it in old.slot_of]
            self._rendezvous.form(*(losses or [leads]), *departures)
        elif view.era > 1:
            self._rendezvous.form("the store has lost its data")

    def see(self, view: View) -> None:
        """Handles a new view of the store (the job's records in it at one moment).

        If the job is being formed, hosts may now be assigned to slots. A host that the
        store no longer lists stays registered while it is connected.
        """
        self._records.see(view)
        self._rendezvous.gathered()

    def connected(self, record: HostRecord) -> None:
        """Handles a host that has connected, or a newer record of a connected host.

        A newer record is only stored. For a host that has connected, the first of these
        applies:

        * While the leader decides which host gets which slot, the host is asked for its
          copies.
        * If the host has a slot, the job is formed anew: messages to the host were
          lost.
        * If the job has begun and does not wait for hosts, the host becomes a spare.
        * If the job waits for hosts, it is formed anew.
        * If the job has not begun, it is formed once there is a host for each slot.

        In a served job (whose processes the user starts), the last two do not apply:
        the periodic `tick` forms the job.
        """
        was_there = self._registry.same_process(record)
        if not self._registry.connect(record):
            return
        self._journal.event("host_joined", host=record.host)
        slot = self._rendezvous.slot_of.get(record.host)
        if self._rendezvous.is_deciding:
            self._rendezvous.ask(record.host)
        elif slot is not None:
            # Messages sent while its link was cut are lost, even if the host was not.
            how = "was cut off for a moment" if was_there else "began anew"
            text = f"{record.host} (slot {slot}) {how}"
            self._rendezvous.form(RoundReason(text, hosts=(record.host,)))
        elif self._rendezvous.phase not in ("idle", "waiting"):
            self._rendezvous.admit(record.host)
            self._rendezvous.expect({record.host})
            self._say_spare(record.host)
        elif self._config.seats.begins_on_join:
            self._begin(record.host)

    def _say_spare(self, host: str) -> None:
        if self._config.seats.begins_on_join:
            self._journal.say(f"{host} is here, as a spare")

    def _begin(self, host: str) -> None:
        count, need = self._registry.num_usable, self._config.num_slots
        if self._rendezvous.phase == "waiting":
            self._journal.say(f"{host} has joined; the job was waiting for a host")
            self._rendezvous.form(f"{host} joined")
        elif count >= need:
            self._rendezvous.form("start of the job")
        else:
            self._journal.say(f"{count} of {need} hosts are here")

    def disconnected(self, record: HostRecord, why: str) -> None:
        """Handles the end of a host's link.

        If the link ended because the host was silent, the host is lost at once.
        Otherwise the host may reconnect within one lease.

        Args:
            record: the record of the host.
            why: why the link ended; begins with "silent" if the host was silent.
        """
        if not self._registry.same_process(record):
            return
        if why.startswith("silent"):
            self.lost(record.host, why)
        else:
            self._registry.disconnect(record.host, self._loop.now())

    def tick(self) -> None:
        """Drops hosts whose link ended a lease ago, and asks unusable hosts again.

        Called periodically. Unusable hosts can have no slot: they have reported so, or
        did not report their copies in time. Also forms a served job, whose processes
        the user starts, once all processes have attached.
        """
        lease_s = self._config.timeouts.lease
        for host in self._registry.overdue(self._loop.now(), lease_s):
            self.lost(host, f"not connected for {lease_s:.0f} s")
        for host in self._registry.to_ask_again(self._loop.now()):
            self._ask_again(host)
        if self._config.seats.begins_on_join:
            return
        if self._rendezvous.phase in ("idle", "waiting"):
            hosts = self._registry.usable()
            if not missing(hosts, self._config.num_slots):
                self._rendezvous.form("every process has attached")

    def lost(self, host: str, how: str) -> None:
        """Handles the loss of a host: forms the job anew if the host had a slot.

        Forms the job anew also if a host that is restoring fetches slices from it. If
        one host runs the coordination service for all trainers, it waits for the report
        of the restoring host instead, whose process can then be declared lost. Also
        forms the job anew, for any host, while a new assignment of slots is being
        recorded. While the leader still decides which host gets which slot, the loss is
        only added to the reasons; it also counts as a failure of the last attempt if
        the host had a slot in it or sent slices, as the consequences may be reported
        before their cause. Does nothing for a host that is not registered.

        Args:
            host: the lost host.
            how: how the loss was noticed, for people.
        """
        if not self._registry.lose(host):
            return
        self._journal.event("host_lost", host=host, how=how)
        rendezvous = self._rendezvous
        has_slot, is_sender = host in rendezvous.slot_of, rendezvous.is_sender(host)
        is_needed = has_slot or (is_sender and not rendezvous.world.server)
        if has_slot or is_sender or rendezvous.has_failed(host):
            rendezvous.failures.add(Failure(kind="lost", host=host, error=how))
        reason = lost(host, rendezvous.assignment, rendezvous.previous)
        if rendezvous.is_deciding and rendezvous.current is not None:
            rendezvous.current.reasons.append(reason)
            rendezvous.gathered()
        elif is_needed or rendezvous.phase == "assigning":
            rendezvous.form(reason)
        elif rendezvous.phase != "idle":
            self._journal.say(f"spare {host} was lost ({how})")

    def agent_ended(self, record: HostRecord) -> None:
        """Handles the end of an agent that is not connected to this leader.

        The leader then no longer waits for the report of the copies on the agent's
        host.
        """
        if self._registry.agent_ended(record):
            self._rendezvous.gathered()

    def unfit(self, host: str, why: str, layout: str = "") -> None:
        """Handles the report that a host cannot have a slot.

        If the host has a slot, the job is formed anew at the host's first such report.

        Args:
            host: the reporting host.
            why: the reason, for people.
            layout: the state's layout (mesh and leaves) as JSON, if the state did not
                fit into the host's memory; otherwise "".
        """
        is_new = host not in self._registry.unfit
        self._registry.unfit[host] = why
        if is_new:  # else it was asked again: only the free bytes in the reason changed
            self._became_unfit(host, why)
        if layout:
            others = self._registry.connected - self._registry.unfit.keys()
            self._rendezvous.refused(known_layout(layout), others)

    def _became_unfit(self, host: str, why: str) -> None:
        self._journal.event("host_unfit", host=host, why=why)
        self._journal.say(f"{host} cannot be used: {why}")
        slot = self._rendezvous.slot_of.get(host)
        if slot is not None:
            text = f"{host} (slot {slot}) cannot be used: {why}"
            self._rendezvous.form(RoundReason(text, hosts=(host,)))
        else:
            self._rendezvous.answered()

    def fit(self, host: str) -> None:
        """Handles the report that a host can have a slot again.

        Forms the job anew if the job waits for hosts. Does nothing if the host had not
        reported that it cannot have a slot.
        """
        if self._registry.unfit.pop(host, None) is None:
            return
        self._journal.say(f"{host} can be used again")
        if self._rendezvous.phase == "waiting":
            self._rendezvous.form(f"{host} can be used again")

    def _ask_again(self, host: str) -> None:
        """Sends another order to an unusable host, in case it can have a slot now.

        A host that did not report its copies is ordered to report them, but only while
        the job waits for hosts or the leader decides which host gets which slot. A host
        that reported that it cannot have a slot is ordered to allocate memory for one.
        If it is not known how much memory a slot needs, no order is sent, and the host
        may have a slot at once.
        """
        if host not in self._registry.unfit:
            if self._rendezvous.phase == "waiting" or self._rendezvous.is_deciding:
                self._rendezvous.ask(host)
        elif not self._rendezvous.expect_of(host):
            self.fit(host)

    def leave_out(self, answered: Collection[str]) -> None:
        """Gives no slot to the hosts that did not report their copies in time.

        The other hosts are then assigned to slots. A host that was left out may have a
        slot again once it answers.

        Args:
            answered: the hosts that have reported.
        """
        expected = self._registry.expected({}, self._loop.now())
        for host in sorted(expected - set(answered)):
            self._registry.leave_out(host)
            limit_s = self._config.timeouts.restore
            self._journal.say(
                f"{host} did not say in {limit_s:.0f} s what it holds and is left out; "
                "it is used again once it answers. Raise --timeouts.restore if its "
                "copies take longer to read"
            )
            if self._rendezvous.current is not None:
                reason = RoundReason(f"{host} did not answer in time", hosts=(host,))
                self._rendezvous.current.reasons.append(reason)
        self._rendezvous.gathered()
