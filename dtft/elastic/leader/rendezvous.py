"""Forms the job in rounds: at its start, after failures, and when its size changes.

A formation is an assignment of hosts to slots. A round is one attempt to make a
formation. In a round, hosts report the copies that they hold, and pure modules
(`rendezvous_plan`, `assignment`, `recovery`) decide which host gets which slot and what
the host restores. Then the assignment is recorded in the store, and each host is
ordered to prepare its slot.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtft.checkpoint.replication import Commit, FailureDomains
from dtft.checkpoint.state import Layout
from dtft.elastic.anti_affinity import known_domains, shortfall
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import TURNS, AgentConfig
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.failure_account import FailureAccount
from dtft.elastic.leader.failure_budget import Failure, RetryDecision
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous_plan import (
    Ballot,
    Round,
    RoundReason,
    assign,
    export_addresses,
    fill_with_ready,
    lost,
    main_reason,
    next_round,
    orders,
    ready_hosts,
    with_moves_undone,
)
from dtft.elastic.leader.sizes import JobSizes
from dtft.elastic.leader.storage import StorageHealth, StorageWatch
from dtft.elastic.leader.world_plan import (
    WorldPlan,
    admitted,
    given_up,
    new_world,
    recorded,
    sound,
    swapped,
    why_restarted,
)
from dtft.elastic.reachability import Reachability, peers_to_try, set_aside
from dtft.elastic.seat_policy import Seating

if TYPE_CHECKING:
    from dtft.elastic.leader.host_registry import HostRegistry


Phase = Literal[
    "idle",
    "gathering",
    "pausing",
    "ending",
    "waiting",
    "storage",
    "assigning",
    "preparing",
    "running",
]
MOST_REHEARSED = 8
"""Largest number of possible next formations for which a process compiles the step."""
BALLOTS = 1 << 20
"""Factor of the leader's term in the number of a new world. The number is the term
times this factor, plus the number of the leader's round, modulo 2**63: larger numbers
are not valid in messages. The number is only compared for equality."""
START_S = 1.0
"""Least number of seconds that the start of a trainer is assumed to take; the number
itself until this leader has measured a start."""
STORAGE_PAUSE_S = 5.0
"""Seconds between two listings of storage while the job waits for it: storage does not
answer, cannot be listed, or has lost its steps."""


@dataclass(kw_only=True)
class Resize:
    """An assignment with another number of slots, for which processes compile ahead.

    The job is formed with this assignment once the processes have compiled.
    """

    formation: tuple[int, ...]
    """The JAX process index of the trainer of each slot."""
    until: float
    """Time at which the job is formed in any case, in seconds on the monotonic
    clock."""
    ready: set[str] = field(default_factory=set)
    """The hosts whose processes have reported that they have compiled ahead."""


class Rendezvous:
    """The state machine that forms the job: it decides which host gets which slot.

    A round is one attempt to form the job.

    Attributes:
        phase: the current state. "idle": before the first round. "gathering": hosts
            report their copies. "pausing": a pause after failures. "ending": the job
            ends. "waiting": the job waits for hosts. "storage": it waits for storage.
            "assigning": the store records the assignment. "preparing": hosts restore
            and trainers start. "running": every slot trains.
        deadline: end of the phase in seconds, on the monotonic clock.
        current: the newest round; None before the first.
        previous: the last assignment of hosts to slots before the current round's; None
            if there is none.
        assignment: the current round's assignment, once recorded; None before.
        failures: counts the failures and decides whether to retry.
        coordinator: commits and exports the steps of the last recorded assignment; None
            until `open_coordinator` is called for this assignment.
        frozen: whether the job ends, so that no round begins any more.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        registry: "HostRegistry",
        loop: Loop,
        send: Callable[..., None],
        journal: Journal,
        health: StorageHealth,
        storage: StorageWatch,
        sizes: JobSizes,
    ) -> None:
        """Starts in phase "idle"; the first call of `form` begins to form the job.

        `send(host, op, **fields)` sends an order to a host.
        """
        self._config, self._records, self._registry = config, records, registry
        self._loop = loop
        self._sizes = sizes
        self._send, self._journal, self._health = send, journal, health
        self._storage = storage
        self._seats = config.seats
        self._counter, self._term = 0, records.view.term
        self.failures = FailureAccount(config, records, sizes, loop, journal)
        self._reach = Reachability()
        self._judged: Ballot | None = None
        """The ballot (number) of the round in which failures were judged last; None
        before."""
        self.give_up: Callable[[RetryDecision], None] = lambda decision: None
        """Called with the decision that ends the job."""
        self.phase: Phase = "idle"
        self.deadline = 0.0
        self.current: Round | None = None
        self.previous = records.view.assignment
        self.world = WorldPlan(number=0, indices={}, size=0)
        """The world of the last formation; its number is 0 before the first."""
        if self.previous is not None:
            sizes.formed(self.previous)
            self.world = recorded(self.previous)
        self.assignment: SlotAssignment | None = None
        self.coordinator: CommitCoordinator | None = None
        self.frozen = False
        self._refused: Layout | None = None
        """The newest layout for which a host had not enough memory; None if no host
        has reported this."""
        self._awaited = ""
        """The host whose answer was missing at the last check, or ""; the next check
        begins with this host, because checking all hosts takes longer."""
        self._storage_missed = self._fatal = False
        self._keep = 0
        """Number of the world whose trainers keep their processes in this round; 0 if
        no trainer keeps its process."""
        self._given_up: set[str] = set()
        """The hosts whose trainers do not keep their processes in this round, so that
        the trainers of other hosts can leave their collectives."""
        self._lost_places: list[int] = []
        """The process indices of the hosts in `_given_up`; [] unless one host runs
        JAX's coordination service for all processes."""
        self._because = ""
        """Why no trainer keeps its process in this round; "" if trainers do."""
        self._swaps = 0
        """Number of formations in the current world since every slot last trained."""
        self._start_s = START_S
        """Seconds from the order to restore and train until a trainer that had to start
        announced the layout of its state, which it does after the restore. Of the last
        such trainer whose host had all slices in memory, in a world that had trained
        before: no transfer and no first start of the job is in it."""
        self._ordered_at = 0.0
        """Time of the last of these orders, in seconds on the monotonic clock."""
        self._has_committed = False
        """Whether a step was committed since slots were last assigned."""
        self._attempted = False
        """Whether hosts were ordered to train, no step was committed since, and the
        failures were not judged yet."""
        self._senders: Collection[str] = ()
        """The hosts from which slices were to be fetched in the last attempt; () once
        every slot has trained."""
        self._resize: Resize | None = None
        """The formation of another size for which processes compile ahead, if any."""
        self._end: RetryDecision | None = None
        """The decision with which the job ends once the hosts have reported their
        copies; None if the job is not to end."""

    def end(self, decision: RetryDecision) -> None:
        """Ends the job with `decision`, once the hosts have reported their copies.

        The reports tell which hosts can export the last step. A decision to end that
        was made before is kept.
        """
        self._end = self._end or decision
        self.form(decision.message)

    def form(
        self, *reasons: RoundReason | str, fatal: bool = False, read: bool = False
    ) -> None:
        """Begins a round (an attempt to form the job).

        Orders the connected hosts to stop training and to report their copies. Once
        they have reported, hosts are assigned to slots. Does nothing while the job
        ends.

        Args:
            *reasons: why the job is formed anew, for people. A `RoundReason` also names
                the hosts that caused it; a plain text names none.
            fatal: whether the failure would repeat with the same processes; all
                trainers then restart.
            read: whether the hosts read their copies again and check the digests,
                because a copy is known to be corrupt.
        """
        if self.frozen or self.phase == "ending":
            return
        self._fatal = fatal
        self._counter += 1
        self._resize = None
        # While the key has expired the view has no leader's term; rounds go on.
        self._term = max(self._records.view.term, self._term)
        ballot = (self._term, self._counter)
        now, read = self._loop.wall(), read or self._seats.reads_copies
        whys = [RoundReason(it) if isinstance(it, str) else it for it in reasons]
        self.current = next_round(self.current, ballot, whys, now, read=read)
        if self.assignment is not None:
            self.previous, self.assignment = self.assignment, None
        texts = "; ".join(reason.text for reason in whys)
        named = {host for reason in whys for host in reason.hosts}
        # Without a world, an earlier round has ended it and has recorded the reason.
        if self.world.number or not self._because:
            self._because = self._why_restarted(whys, named)
        self._keep = 0 if self._because else self.world.number
        self._journal.event("forming", reason=texts, ballot=ballot, keeps=self._keep)
        self._lost_places = given_up(self.world, named) if self._keep else []
        self._given_up = named if self._lost_places else set()
        if not self._keep:
            self._end_world()
        self._storage.look()
        self.enter("gathering", self._config.timeouts.restore)
        server = self.world.server
        for host in sorted(self._registry.connected, key=lambda it: (it != server, it)):
            self.ask(host)

    def _why_restarted(
        self, reasons: Sequence[RoundReason], named: Collection[str]
    ) -> str:
        if not self._seats.has_coordination_service:
            return "the user starts the trainers"
        return why_restarted(
            self.world,
            self._swaps,
            lasts=self._config.hot_swap,
            fatal=self._fatal,
            named=named,
            lost={it for why in reasons if why.cause == "lost" for it in why.hosts},
            is_training=self.phase in ("idle", "preparing", "running"),
        )

    def _end_world(self) -> None:
        """Forgets the current world: the JAX processes that train or wait to train.

        If one host runs JAX's coordination service for all of them, orders it to end
        the service.
        """
        old, self.world = self.world, WorldPlan(number=0, indices={}, size=0)
        self._swaps = 0
        if old.server and self.current is not None:
            ballot = self.current.ballot
            self._send(old.server, "serve", ballot=ballot, server="", size=old.size)

    def trained(self) -> None:
        """Records that every slot trains.

        Also orders processes to compile ahead for a possible recovery (`rehearse`).
        """
        self._swaps, self._senders = 0, ()
        self.failures.trained()
        self.rehearse()

    def rehearse(self) -> None:
        """Orders the JAX processes to compile the step for meshes that may follow.

        These are the meshes after the loss of one host, and the mesh of another number
        of slots if the job is about to change its size. Does nothing unless all slots
        train and processes can compile ahead.
        """
        round_, old = self.current, self.assignment
        if round_ is None or old is None or not self._can_rehearse:
            return
        formations = self._after_losses(round_, old)
        if self._resize is not None:
            formations.insert(0, list(self._resize.formation))
        for host, index in self.world.indices.items():
            own = [it for it in formations if index in it]
            if own and host in self._registry.connected:
                self._send(
                    host,
                    "rehearse",
                    ballot=round_.ballot,
                    world=self.world.number,
                    turn=self.world.turn + 1,
                    formations=own[:MOST_REHEARSED],
                    items=round_.planned,
                )

    @property
    def _can_rehearse(self) -> bool:
        """Whether all slots train, and trainers can compile for a next mesh.

        Trainers can compile ahead only on CPU, and only if hot swaps are on: they then
        keep their processes in a recovery. The same processes can have at most 16
        meshes, one after the other. While they train on the last, no other can follow,
        and the result is False.
        """
        return (
            self.current is not None
            and self.current.reported
            and self._config.cpu_devices > 0
            and self.world.turn + 1 < TURNS
        )

    def rehearse_size(self, slots: int) -> bool:
        """Lets processes compile for another number of slots before the job has it.

        The first call orders the processes of the hosts that would get these slots to
        compile while they train. A later call only checks whether they have compiled;
        it orders anew if other hosts would get the slots by now.

        Returns:
            Whether the job can be formed with `slots` slots now: all those processes
            have reported that they have compiled, or the config's limit for the start
            of trainers is over. True at once in these cases, in which nothing is
            compiled ahead:

            * The processes cannot compile ahead: not all slots train, there is no hot
              swap, trainers have accelerators, or the processes form their last mesh.
            * There are fewer hosts than slots, or a host that would get a slot has no
              process among the JAX processes.
            * The job has a plan of the planner, which is valid for one number of slots.
        """
        round_, old, now = self.current, self.assignment, self._loop.now()
        if round_ is None or old is None or not self._can_rehearse or round_.planned:
            return True
        seating = replace(
            self._seating(round_, self._registry.usable()),
            previous=old,
            choose_size=lambda available, layout: slots,
        )
        formation = self._places(self._seats.fill(seating))
        if len(formation) != slots:
            return True
        if self._resize is None or self._resize.formation != formation:
            limit_s = self._config.timeouts.start
            self._resize = Resize(formation=formation, until=now + limit_s)
            self.rehearse()
        ready = {self.world.indices.get(host) for host in self._resize.ready}
        return set(formation) <= ready or now >= self._resize.until

    def joined(self, host: str) -> None:
        """Handles the report that the trainer of a spare host has joined the world.

        Orders all JAX processes of the world to compile ahead again (`rehearse`).
        """
        if self._resize is not None:
            self._resize.ready.discard(host)
        self.rehearse()

    def rehearsed(
        self, host: str, world: int, turn: int, formations: list[list[int]]
    ) -> None:
        """Handles the report that a host's process has compiled ahead.

        The report counts only while a change of the job's size waits for it, and only
        if it is about the mesh of this change. Other reports are ignored.

        Args:
            host: the reporting host.
            world: the number of the group of JAX processes (world) for which it
                compiled.
            turn: the number of the mesh for which it compiled. The meshes that this
                group forms, one after the other, are numbered from 0.
            formations: the meshes for which it compiled. Each is a list with the
                process index of each slot.
        """
        is_next = (world, turn) == (self.world.number, self.world.turn + 1)
        if self._resize is not None and is_next:
            if list(self._resize.formation) in formations:
                self._resize.ready.add(host)

    def _places(self, filled: Sequence[HostRecord | None]) -> tuple[int, ...]:
        """Returns the index of each slot's process among the JAX processes.

        Returns () if a slot has no host, or if a host has no such process.

        Args:
            filled: the record of each slot's host; None for a slot without a host.
        """
        hosts = [record.host for record in filled if record is not None]
        if len(hosts) < len(filled) or not set(hosts) <= self.world.indices.keys():
            return ()
        return tuple(self.world.indices[host] for host in hosts)

    def _after_losses(self, round_: Round, old: SlotAssignment) -> list[list[int]]:
        """Computes which processes would train after the loss of each host with a slot.

        Only the hosts of the first 8 slots are considered (`MOST_REHEARSED`). Leaves
        out a loss after which a slot would have no host with a JAX process.

        Args:
            round_: the current attempt to form the job.
            old: the assignment of hosts to slots from which a host is lost.

        Returns:
            For each loss, the index of each slot's process among the JAX processes.
        """
        usable = self._registry.usable()
        seating = self._seating(round_, usable)
        formations: list[list[int]] = []
        for victim in old.slots[:MOST_REHEARSED]:
            left = [record for record in usable if record.host != victim]
            filled = self._seats.fill(replace(seating, usable=left, previous=old))
            if len(places := self._places(filled)) == len(old.slots):
                formations.append(list(places))
        return formations

    def admit(self, host: str) -> None:
        """Orders a spare host to have its trainer join the world of JAX processes.

        First gives the trainer a process index. If no index is free, prints this and
        orders nothing. Does nothing if the job has no hot swaps (processes that outlast
        a recovery), or if the world's coordination service does not run yet.
        """
        if not (self._config.hot_swap and self.world.number) or not self.current:
            return
        if self.world.server and not self.world.address:
            return  # `assigned` admits the host
        there = self._registry.connected | self.slot_of.keys()
        world = admitted(self.world, host, there)
        if world is None:
            self._journal.say_once(
                "place",
                f"{host} cannot join the JAX processes before it has a slot: all "
                f"{self.world.size - 1} process indices are taken",
            )
            return
        self.world = world
        seat = world.seat(host)
        self._send(host, "join", ballot=self.current.ballot, world=seat)

    def ask(self, host: str) -> None:
        """Orders a host to stop training and report the copies in its memory.

        Called for the connected hosts when a round begins, and for a host that connects
        later. If the host runs JAX's coordination service for all processes, first
        orders it to declare some processes lost: those of hosts that were lost, failed
        or are to leave. The other processes can then leave their collectives.
        """
        assert self.current is not None
        ballot, places = self.current.ballot, self._lost_places
        if places and host == self.world.server:
            self._send(host, "give_up", ballot=ballot, places=places)
        reason = main_reason(self.current.reasons)
        commits, old = self._records.commits, self.previous
        self._send(
            host,
            "reform",
            ballot=ballot,
            reason=reason,
            fatal=self._fatal,
            read=self.current.read,
            epoch=old.epoch if old is not None else (0, 0),
            step=commits[0].step if commits else -1,
            reach=self._to_reach(host, self.current),
            keep=0 if host in self._given_up else self._keep,
        )

    @property
    def slot_of(self) -> Mapping[str, int]:
        """Maps each host to its slot in this round; {} before slots are recorded."""
        return self.assignment.slot_of if self.assignment is not None else {}

    def _to_reach(self, host: str, round_: Round) -> dict[str, str]:
        """Returns the peers to which a host must try to connect, with their addresses.

        Returns {} if no network cut between hosts is suspected or known, and always in
        a served job (whose processes the user starts).

        Args:
            host: the host.
            round_: the current attempt to form the job, in which the tries are noted.
        """
        doubted = self._reach.is_to_be_tried or self.failures.may_be_a_cut
        if not doubted or not self._seats.ends_by_itself:
            return {}
        if not round_.ring:
            round_.ring = dict(sorted(self._registry.records.items()))
        peers = peers_to_try(host, list(round_.ring), round_.ballot[1])
        round_.tried[host] = tuple(peers)
        return {peer: round_.ring[peer].address for peer in peers}

    def has_failed(self, host: str) -> bool:
        """Whether the loss of a host may have caused the failure of the last attempt.

        True until the leader judges the failures of this attempt, for the hosts that
        had slots in it, and for those from which slices were to be fetched. False if
        the attempt has committed a step.
        """
        slots = self._last_slots
        is_open = self.is_deciding and self._attempted
        return is_open and (host in slots or host in self._senders)

    def is_source(self, host: str) -> bool:
        """Whether a host without a slot has copies that the job may still need.

        True for the hosts that had slots at the newest commit, until a step is
        committed without them.
        """
        commits = self._records.commits
        is_over = self.assignment is not None and self._has_committed
        if is_over or not commits:
            return False
        return host in commits[0].holders and host not in self.slot_of

    def is_sender(self, host: str) -> bool:
        """Whether some host is restoring and fetches slices from this host."""
        round_ = self.current
        if round_ is None or round_.decision is None or self.phase != "preparing":
            return False
        plan = round_.decision.plan
        if plan is None or host not in plan.sent:
            return False
        return bool(plan.receivers(host) - round_.prepared.keys())

    @property
    def is_deciding(self) -> bool:
        """Whether the leader has still to decide which host gets which slot.

        True while hosts report their copies, while the job pauses after failures, and
        while the job waits for storage. A host that joins at such a time is asked for
        its copies.
        """
        return self.phase in ("gathering", "pausing", "storage")

    def enter(self, phase: Phase, limit_s: float) -> None:
        """Sets the phase and its deadline, `limit_s` seconds from now.

        If the job is in this phase already, only the deadline changes.
        """
        self.phase, self.deadline = phase, self._loop.now() + limit_s

    def answered(self) -> None:
        """Handles a host's report: assigns hosts to slots if no report is missing.

        If the job waits for hosts, this may end the wait.
        """
        if self.phase == "waiting":
            self.enter("gathering", self._config.timeouts.restore)
        self.gathered()

    def gathered(self) -> None:
        """Assigns hosts to slots once every expected host has reported its copies.

        If the last attempt to train failed, the job may pause or end instead. If there
        are too few hosts for the slots, the job waits for hosts. Does nothing in these
        cases:

        * The phase is not "gathering", or an expected report is missing.
        * Storage is being listed and may still answer in time.
        * A commit is being recorded, and the store answers.
        """
        round_, registered = self.current, self._records.view.hosts
        if self.phase != "gathering" or round_ is None or not self._storage.settled:
            return
        if self._awaits(round_, registered):
            return
        pending = self.coordinator is not None and self.coordinator.pending is not None
        if pending and not self._records.away:
            return  # a complete step is being recorded; then `gathered` is called again
        self._learn(round_)
        if not self._may_go_on(round_):
            return
        answered = [it for it in self._registry.usable() if it.host in round_.replies]
        commit = next(iter(self._records.commits), None)
        fill, server = self._seats.fill, self.world.server

        def without_moves(usable: list[HostRecord]) -> tuple[Seating, bool]:
            seating = self._seating(round_, usable)
            return with_moves_undone(seating, fill, commit, server)

        seating, has_moved = without_moves(answered)
        slots = seating.previous.slots if seating.previous is not None else ()
        if aside := self._set_aside([it.host for it in answered], slots):
            near = [it for it in answered if it.host not in aside]
            seating, has_moved = without_moves(near)
            slots = seating.previous.slots if seating.previous is not None else ()
        may_move = bool(self._keep) and not has_moved
        usable = {record.host for record in self._registry.usable()}
        filled = fill_with_ready(
            seating,
            fill,
            ready=ready_hosts(round_, self.world, slots, usable) if may_move else (),
            server=server,
            step=commit.step if commit is not None else -1,
            start_s=self._start_s,
            restore_s=self._config.timeouts.restore,
        )
        present = [record for record in filled if record is not None]
        if len(present) < len(filled):
            empty = [slot for slot, host in enumerate(filled) if host is None]
            self._wait_for_hosts(empty, aside)
        else:
            self._assign(round_, present, aside)

    @property
    def _last_slots(self) -> tuple[str, ...]:
        """The host of each slot in the last assignment; () if there is none."""
        return self.previous.slots if self.previous is not None else ()

    def _set_aside(self, hosts: list[str], slots: Sequence[str]) -> list[str]:
        """Returns which of `hosts` get no slot, so that all others reach each other.

        Uses the pairs of hosts that did not reach each other at their last try; without
        such a pair the result is [].

        Args:
            hosts: the hosts that could have a slot.
            slots: the host of each slot until now.
        """
        return set_aside(hosts, slots, self._reach.apart, self._config.host)

    def _awaits(self, round_: Round, registered: Mapping[str, HostRecord]) -> bool:
        """Whether some host that must report its copies has not done so yet.

        First checks only the host that the previous call found missing, because this is
        called at every report.

        Args:
            round_: the current attempt to form the job, with the reports.
            registered: the records of the hosts that the store lists.
        """
        replies, registry, now = round_.replies, self._registry, self._loop.now()
        last = self._awaited
        if last not in replies and registry.is_expected(last, registered, now):
            return True
        late = registry.expected(registered, now) - replies.keys()
        self._awaited = next(iter(late), "")
        return bool(late)

    def _may_go_on(self, round_: Round) -> bool:
        """Decides from the last attempt's failures whether slots may be assigned now.

        Decides once in a round. If the failures allow another attempt, a pause may come
        before it. Failures that would end the job do not end it if the hosts' reports
        show a new network cut between hosts with slots.

        Args:
            round_: the current attempt to form the job.

        Returns:
            False if a pause begins, or if the job ends: by the failures, or because
            `end` was called. Otherwise True: no pause is needed, this round has decided
            already, or the job is served (the user starts its processes).
        """
        if self._end is None and (
            self._judged == round_.ballot or not self._seats.ends_by_itself
        ):
            return True
        self._judged = round_.ballot
        self._reach.is_suspected |= self.failures.may_be_a_cut
        new = self._reach.learn(*round_.answers, self._loop.now())
        decision = self._end or self.failures.judge(self.previous)
        self._attempted = False
        slots = self._last_slots
        is_cut = any(a in slots and b in slots for a, b in new)
        if decision.action == "end" and (self._end is not None or not is_cut):
            self.enter("ending", float("inf"))
            self.give_up(decision)
            return False
        pause_s = decision.not_before - self._loop.now()
        if pause_s <= 0:
            return True
        self._journal.say(f"the next attempt to train begins in {pause_s:.0f} s")
        self.enter("pausing", pause_s)
        return False

    def go_on(self) -> None:
        """Ends the pause after failures, and assigns hosts to slots if possible."""
        self.enter("gathering", self._config.timeouts.restore)
        self.gathered()

    def _learn(self, round_: Round) -> None:
        """Takes newer assignments and commits from the hosts' reports.

        The store may have lost an assignment of slots or a commit that a host knows.
        """
        told = round_.assignment_told
        if told is not None and (
            self.previous is None or told.epoch > self.previous.epoch
        ):
            self.previous = told
            self._sizes.formed(told)
        self._records.learn(round_.commits_told)

    def _seating(self, round_: Round, usable: list[HostRecord]) -> Seating:
        return Seating(
            usable=usable,
            replies=round_.replies,
            num_slots=self._config.num_slots,
            choose_size=self._sizes.choose,
            previous=self.previous,
            layout=round_.layout_of(self._records.commits),
            limits=self._config.sizes,
            domains=self._domains(),
        )

    def _domains(self) -> FailureDomains:
        domains, problem = known_domains(self._hosts.values())
        if problem:
            problem = f"failure domains are not used: {problem}"
        self._journal.say_once("domains", problem)
        return domains

    @property
    def _hosts(self) -> dict[str, HostRecord]:
        """The records of the hosts that the store or this leader knows."""
        return {**self._records.view.hosts, **self._registry.records}

    def _wait_for_hosts(self, empty: list[int], aside: list[str]) -> None:
        config, old = self._config, self.previous
        former = old.slots if old else ()
        names = ", ".join(
            f"{slot} (was {former[slot]})" if slot < len(former) else str(slot)
            for slot in empty
        )
        line = self._seats.waiting_line(
            names, config.num_slots, config.job, config.store
        )
        for host, why in self._registry.unusable().items():
            line += f"; {host} cannot be used: {why}"
        for host in aside:
            line += f"; {self._reach.text(host)}, and the job goes on when they do"
        self._journal.say_once("waiting", line)
        self._journal.event(self._seats.waiting_event, slots=empty)
        self.enter("waiting", float("inf"))

    def _explain_aside(self, chosen: SlotAssignment, aside: list[str]) -> None:
        """Prints why some hosts have no slot: other hosts do not reach them.

        For a host that had a slot before, also prints which host gets this slot, if the
        number of slots stays.

        Args:
            chosen: the new assignment of hosts to slots.
            aside: the hosts without a slot.
        """
        former = self._last_slots
        for host in aside:
            why = self._reach.text(host)
            if host not in former:
                self._journal.say_once(f"apart {host}", f"{why}: {host} has no slot")
            elif len(former) == len(chosen.slots):
                heir = chosen.slots[former.index(host)]
                self._journal.say(f"{why}: {host}'s slot goes to {heir}")
            else:
                self._journal.say(f"{why}: {host} has no slot any more")

    @property
    def available(self) -> int:
        """The number of hosts that may have a slot and that all reach each other."""
        if not self._reach.apart:
            return self._registry.num_usable
        usable = [record.host for record in self._registry.usable()]
        return len(usable) - len(self._set_aside(usable, self._last_slots))

    def look_for_links(self) -> None:
        """Orders hosts that did not reach each other to try to connect again.

        Does nothing while the pause after the last try lasts, while the job ends, and
        while it neither trains nor waits for hosts.
        """
        settled = self.phase == "running" or self.phase == "waiting"
        if self.frozen or not settled or not self._reach.is_due(self._loop.now()):
            return
        assert self.current is not None
        records, ballot = self._registry.records, self.current.ballot
        for host, peers in self._reach.ask(self._registry.connected).items():
            reach = {peer: records[peer].address for peer in peers}
            self._send(host, "reach", ballot=ballot, reach=reach)

    def reached(self, host: str, missed: list[str]) -> None:
        """Handles a host's report on its tries to connect again to some peers.

        `missed` are the peers that it did not reach. After the last of these reports,
        pairs of hosts that reach each other again are printed, and a job that waits for
        hosts is formed anew.
        """
        for one, other in self._reach.answered(host, missed):
            self._journal.say(f"{one} and {other} reach each other again")
            if self.phase == "waiting":
                self.form(f"{one} and {other} reach each other again")

    def committed(self, commit: Commit) -> None:
        """Handles a commit.

        A commit ends the suspicion of a network cut between hosts. If its step is the
        highest so far, the count of failed attempts in a row and the counts of failures
        at lower steps are cleared. After the first commit of an assignment of slots,
        hosts that lost their slots free their copies and reserve memory for a slot.
        """
        self.failures.committed(commit.step)
        self._reach.committed()
        assignment, epoch = self.assignment, (commit.generation, commit.attempt)
        is_of_now = assignment is not None and assignment.epoch == epoch
        if is_of_now and not self._has_committed:
            self._has_committed, self._attempted = True, False
            self.expect(self._registry.connected)

    def _assign(
        self, round_: Round, filled: list[HostRecord], aside: list[str]
    ) -> None:
        world = self._next_world(round_, filled)
        assignment, decision = assign(
            round_,
            filled,
            previous=self.previous,
            commits=self._records.commits,
            storage_steps=self._storage.steps,
            quarantined=self.failures.quarantined,
            domains=self._domains(),
            copies=self._config.copies,
            asked_slots=self._sizes.asked,
            aside=aside,
            world=world,
        )
        if line := self._storage.news():
            self._journal.say(line)
        unseen = decision.source == "init" and bool(self._records.view.stored)
        if unseen or (decision.source != "memory" and self._storage.trouble):
            self._wait_for_storage(decision.passed_over)
            return
        self._journal.say_once("waiting", "")
        self._explain_aside(assignment, aside)
        round_.assignment, round_.decision = assignment, decision
        round_.decided = self._loop.wall()
        if not world.turn:
            self._end_world()
        self.world = world
        for host in decision.located.odd if decision.located else ():
            line = f"{host} holds other bytes of step {decision.step} than its peers"
            self._journal.say(f"{line}: its copies of slices that differ are not used")
        self._storage_missed = False
        if round_.assignment.rung == 3:
            self._explain_storage(round_.decision.passed_over, round_.assignment)
        self.enter("assigning", self._config.timeouts.restore)
        if not self._config.is_served_by_one or world.address:
            self._record(round_)
            return
        server = world.server
        for host in sorted(self._registry.connected):
            self._send(
                host, "serve", ballot=round_.ballot, server=server, size=world.size
            )

    def serving(self, host: str, address: str, error: str) -> None:
        """Handles a host's report on JAX's coordination service, which it had to start.

        Once the service serves, the assignment of hosts to slots is recorded. If it
        failed, the job is formed anew.

        Args:
            host: the reporting host.
            address: host:port of the service; "" if it failed.
            error: why the service failed; "" if it serves.
        """
        round_ = self.current
        if round_ is None or self.phase != "assigning" or self.world.address:
            return
        if error:
            text = f"no coordination service on {host}: {error}"
            self.failures.add(Failure(kind="late", host=host, error=text))
            self.form(text)
            return
        self.world = replace(self.world, address=address)
        self._record(round_)

    def keys(self, host: str, keys: Mapping[str, str]) -> None:
        """Passes a host's coordination-service entries to the hosts of other slots.

        With hot swaps on CPU, each JAX process has a coordination service of its own.
        By these entries the processes find each other.

        Args:
            host: the host whose service has the entries.
            keys: key to value of the entries.
        """
        assert self.current is not None
        for other in sorted(self.slot_of.keys() - {host}):
            self._send(other, "keys", ballot=self.current.ballot, keys=keys)

    def _record(self, round_: Round) -> None:
        assert round_.assignment is not None
        world, slots = self.world, round_.assignment.slots
        round_.assignment = replace(
            round_.assignment,
            world=world.record,
            places=tuple(world.indices[host] for host in slots),
            service=(world.server, world.address),
        )
        self._records.put(
            "assignment", round_.ballot, "assignment", round_.assignment.to_json()
        )

    def _next_world(self, round_: Round, filled: list[HostRecord]) -> WorldPlan:
        """Decides whether the JAX processes stay, or all of them start anew.

        A world is the group of JAX processes that train together, or wait to train.

        Args:
            round_: the current attempt to form the job.
            filled: the record of each slot's host.

        Returns:
            The same world with a process for each slot, or a new world.
        """
        slots = [record.host for record in filled]
        if self._keep:
            members = round_.members(self._keep)
            world = replace(self.world, indices=sound(members, self.world.size, slots))
            usable = {record.host for record in self._registry.usable()}
            found = swapped(world, slots, world.indices, usable)
            if isinstance(found, WorldPlan):
                return found
            self._because = found
        term, counter = round_.ballot
        return new_world(
            (term * BALLOTS + counter) % (1 << 63),
            slots,
            lasts=self._config.hot_swap,
            served=self._config.is_served_by_one,
            because=self._because,
        )

    def _wait_for_storage(self, reasons: tuple[str, ...]) -> None:
        """Waits 5 s, after which storage is listed again.

        Called if storage may hold a step to restore, but does not answer, cannot be
        listed, or no longer shows the steps that it had. The job must not start again
        from the initial state without the user's request. `reasons` says why newer
        steps cannot be restored from memory.
        """
        if not self._storage_missed:
            self._storage_missed = True
            for reason in reasons:
                self._journal.say(f"memory cannot restore {reason}")
            stored = self._records.view.stored
            why = self._storage.trouble or f"had step {stored} and shows no step now"
            self._journal.say(
                f"storage {self._config.storage_directory} {why}: the job waits for "
                "it. Mount it again or put it back; to begin anew use another --job"
            )
        self.enter("storage", STORAGE_PAUSE_S)

    def look_again(self) -> None:
        """Lists storage again, and then decides again what is restored.

        The hosts' reports of their copies are still used.
        """
        self._storage.look()
        self.enter("gathering", self._config.timeouts.restore)
        self.gathered()

    def _explain_storage(
        self, reasons: tuple[str, ...], chosen: SlotAssignment
    ) -> None:
        for reason in reasons:
            self._journal.say(f"memory cannot restore {reason}")
        interval = self._config.storage_interval
        source = (
            f"storage, which is written every {interval} steps"
            if chosen.source == "storage"
            else "the initial state: no step was committed or stored yet"
        )
        self._journal.say(f"rung 3: restoring step {chosen.step} from {source}")

    def delayed(self, ballot: tuple[int, int]) -> None:
        """Prints that training waits until the store has recorded who has which slot.

        `ballot` identifies the attempt to form the job; if a newer attempt has begun,
        nothing is printed.
        """
        round_ = self.current
        if round_ is not None and round_.ballot == ballot:
            self._journal.say_once(
                "assignment",
                f"{main_reason(round_.reasons)}: no step is trained until the store "
                f"{self._config.store} answers, which records who takes which slot",
            )

    def assigned(self, ballot: tuple[int, int]) -> None:
        """Orders hosts to restore and train, once the store has recorded their slots.

        The order is `prepare`. If a host of the assignment is not registered any more,
        the job is formed anew instead. `ballot` identifies the attempt to form the job;
        if a newer attempt has begun, nothing happens.
        """
        round_ = self.current
        if round_ is None or round_.ballot != ballot:
            return
        assert round_.assignment is not None
        self.assignment, self.coordinator = round_.assignment, None
        self._journal.say_once("assignment", "")
        self._journal.event("assignment", **json.loads(round_.assignment.to_json()))
        round_.restore_begun = self._loop.wall()
        assert round_.assignment is not None
        self._swaps += 1
        self._ordered_at, self._has_committed = self._loop.now(), False
        self._attempted = True
        self._senders = round_.decision.sent if round_.decision is not None else ()
        self.failures.begin(round_.assignment)
        self.enter("preparing", self._config.timeouts.start)
        try:
            prepared = orders(round_, self._hosts, self.world)
        except KeyError as error:
            self.form(lost(error.args[0]))
            return
        for host, order in prepared.items():
            self._send(host, "prepare", **order)
        for host in sorted(self._registry.connected - prepared.keys()):
            self.admit(host)

    def announced(self, host: str) -> None:
        """Measures how long a trainer took to start, once it announces its layout.

        `host` is the trainer's host. Does nothing if the trainer has kept its process,
        if its world is new, or if its host has fetched slices.
        """
        round_, assignment = self.current, self.assignment
        if round_ is None or assignment is None or not self.world.turn:
            return
        has_kept = host in round_.members(self.world.number)
        has_fetched = round_.prepared.get(host, {}).get("peers", 0) > 0
        if assignment.source == "memory" and not has_kept and not has_fetched:
            self._start_s = max(START_S, self._loop.now() - self._ordered_at)

    def open_coordinator(self, layout: Layout, assignment: SlotAssignment) -> None:
        """Creates the commit coordinator, which commits the steps of an assignment.

        Also prints a warning if the copies are in too few failure domains, and orders
        spare hosts to allocate memory for a slot (`expect`).

        Args:
            layout: the layout of the state (mesh and leaves).
            assignment: the host of each slot.
        """
        assert self.current is not None
        view, hosts = self._records.view, self._hosts
        self.coordinator = CommitCoordinator(
            self._config,
            layout,
            assignment,
            stored=max(self._storage.steps, default=-1),
            export_addresses=export_addresses(self.current, assignment, hosts),
            addresses={host: record.address for host, record in hosts.items()},
            record=self._records.commit,
            send=self._send,
            health=self._health,
            clock=self._loop.now,
        )
        self.coordinator.intervals.resumed(assignment, self._records.commits)
        self.coordinator.stopping = view.stop
        if hosts.keys() >= set(assignment.slots):  # else a lost host's label is unknown
            _, problem = shortfall(
                assignment.spread,
                self.coordinator.placement,
                assignment.slots,
                self._domains(),
            )
            self._journal.say_once("copies", problem)
        self.expect(self._registry.connected)

    def refused(self, layout: Layout, others: Collection[str]) -> None:
        """Handles the report that a host has not enough memory for a slot.

        Keeps the layout, from which the memory that a slot needs is computed. If no
        trainer has announced a layout yet, orders the hosts in `others` to allocate
        memory for a slot. Their own trainers may not tell them the layout any more,
        because the report may re-form the job, which stops all trainers.

        Args:
            layout: the layout of the state (mesh and leaves) that did not fit.
            others: the other hosts.
        """
        self._refused = layout
        if self.coordinator is None:
            for host in sorted(others):
                self.expect_of(host)

    def expect_of(self, host: str) -> bool:
        """Orders one host to allocate memory for a slot.

        The size of the memory follows from the layout of the state. If no layout is
        known, returns False and sends no order.
        """
        layout = self.coordinator.layout if self.coordinator is not None else None
        if layout is None and self.current is not None:
            layout = self.current.layout_of(self._records.commits)
        layout = layout or self._refused
        if layout is None:
            return False
        domains = self.previous.spread.domains if self.previous is not None else ()
        fits = len(domains) == layout.mesh.num_slots
        told = list(domains) if fits else []
        self._send(
            host, "expect", layout=layout.to_json(), domains=told, committed=False
        )
        return True

    def expect(self, hosts: Collection[str]) -> None:
        """Orders the hosts in `hosts` that have no slot to allocate memory for one.

        If a step was committed since slots were assigned, they first free the copies
        that they have of former slots, which are all of earlier assignments.

        Also orders all hosts without a slot to fetch ahead the slices that no step
        changes. Does nothing before the assignment of slots is recorded and a trainer
        has announced the state's layout.
        """
        if self.coordinator is not None and self.assignment is not None:
            text, domains = (
                self.coordinator.layout.to_json(),
                self.assignment.spread.domains,
            )
            for host in sorted(set(hosts) - self.slot_of.keys()):
                self._send(
                    host,
                    "expect",
                    layout=text,
                    domains=list(domains),
                    committed=self._has_committed,
                )
            self._order_prefetch(text, self.assignment)

    def _order_prefetch(self, layout: str, assignment: SlotAssignment) -> None:
        """Orders each spare host to fetch those slices of a slot that no step changes.

        The spare can then take this slot with fewer transfers. Spares are numbered in
        the order in which they joined, and spare n gets slot n modulo the number of
        slots. So a host that joins does not change the slots of earlier spares. A host
        that becomes a spare because its trainer has ended may change them. Does nothing
        in a served job (whose processes the user starts).

        Args:
            layout: the layout of the state (mesh and leaves) as JSON.
            assignment: the host of each slot.
        """
        if self._seats.attached:
            return
        hosts = self._hosts
        spares = sorted(
            self._registry.connected - self.slot_of.keys(),
            key=lambda host: (hosts[host].joined_ns, host),
        )
        for number, host in enumerate(spares):
            slot = number % len(assignment.slots)
            source = hosts.get(assignment.slots[slot])
            if source is not None:
                self._send(
                    host,
                    "prefetch",
                    layout=layout,
                    slot=slot,
                    address=source.address,
                    epoch=assignment.epoch,
                )
