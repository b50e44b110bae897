"""One job in simulation: real agents on simulated hosts, and what can happen to them.

Makes the edges of each agent, starts and restarts agents as an operator would, and
offers every fault as a method. Invariants look on (`invariants.py`); which faults
happen when is `faults.py`'s.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtft.checkpoint.timeouts import Timeouts
from dtft.checkpoint.transport.protocol import Credentials
from dtft.elastic.admission import JobMismatch, check_domain, check_job
from dtft.elastic.host import agent as agent_module
from dtft.elastic.host.agent import Agent
from dtft.elastic.host.edges import Edges
from dtft.elastic.host.follower import Follower, HostParts
from dtft.elastic.job import AgentConfig
from dtft.elastic.network import PortState
from dtft.elastic.store import membership as membership_module
from dtft.elastic.store.api import StoreUnavailable
from dtft.elastic.store.view import job_key
from tests.simulation.memory import SimCopies, SimHolder, job_layout
from tests.simulation.network import Wire
from tests.simulation.scheduler import Clockwork, Scheduler, SimLoop
from tests.simulation.storage import SimExportDesk, Storage
from tests.simulation.store import STORE, Client, Etcd, kinds
from tests.simulation.trainers import Job, Pace, SimService, SimTrainers

SECRET = b"0123456789abcdef"
STOP_S = 0.1
TIMEOUTS = Timeouts(
    stage=25.0,
    data=10.0,
    evaluate=10.0,
    save=12.0,
    replicate=8.0,
    restore=8.0,
    start=20.0,
    export=10.0,
)


class SimBoard:
    """What `Board` is asked for."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def set(self, field: str, value: int) -> None:
        """See `Board.set`."""
        self._values[field] = value

    def get(self, field: str) -> int:
        """See `Board.get`."""
        return self._values.get(field, 0)

    def enter(self, phase: str, now_ns: int) -> None:
        """See `Board.enter`: here a trainer is asked itself for its phase."""

    def close(self) -> None:
        """See `Board.close`."""


class SimJournal:
    """What `Journal` is asked for."""

    def __init__(self, world: "World", host: str) -> None:
        self._world, self._host = world, host
        self._said: dict[str, str] = {}
        self.last_commit = 0

    def say(self, text: str) -> None:
        """See `Journal.say`."""
        self._world.journal(self._host, "message", {"text": text})

    def say_once(self, topic: str, text: str) -> None:
        """See `Journal.say_once`."""
        if text and self._said.get(topic) != text:
            self.say(text)
        self._said[topic] = text

    def event(self, kind: str, **fields: Any) -> None:
        """See `Journal.event`."""
        self._world.journal(self._host, kind, fields)

    def committed(self, step: int, root: str) -> None:
        """See `Journal.committed`."""
        self.last_commit = step
        self.event("commit", step=step, root=root)

    def recovery(self, report: Any, detected: float, ended: float) -> None:
        """See `Journal.recovery`."""
        del detected, ended
        self.event("recovery", line=report.line(), step=report.restored_step)

    def close(self, limit_s: float = 1.0) -> None:
        """See `Journal.close`."""


class _Mirrors:
    def __init__(self, etcd: Etcd, node: "Node") -> None:
        self._etcd, self._node = etcd, node

    def mirror(self, prefix: str, changed: Any) -> Callable[[], None]:
        """See `MirrorSource.mirror`."""
        return self._etcd.mirror(self._node, prefix, changed)


class _Network:
    def __init__(self, wire: Wire, node: "Node", limit_s: float) -> None:
        self._wire, self._node, self._limit_s = wire, node, limit_s

    def dial(self, address: Any, hello: Any, opened: Any, heard: Any, closed: Any):
        """See `Network.dial`."""
        limit_s = self._limit_s
        self._wire.dial(self._node, address, hello, limit_s, opened, heard, closed)

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """See `Network.probe`."""
        self._wire.probe(self._node, address, then)


class Node:
    """One agent process on a host."""

    def __init__(self, world: "World", host: str, number: int) -> None:
        self.world, self.host, self.number = world, host, number
        self.alive = True
        self.left = False
        """It has ended by itself, with a result or without."""
        self.result = ""
        rng = world.scheduler.rng
        skewed = world.settings.skew
        self.loop = SimLoop(
            host,
            world.clockwork,
            rate=rng.uniform(0.98, 1.02) if skewed else 1.0,
            offset_s=rng.uniform(0, 1000) if skewed else 0.0,
            stopped=self._ended,
        )
        self.trainers = SimTrainers(world.job, self)
        self.copies: SimCopies
        self.store = Client(world.etcd, self)
        self.agent = self._make()

    def _make(self) -> Agent:
        world, config = self.world, self.world.config(self.host)
        edges = Edges(
            loop=self.loop,
            mirrors=_Mirrors(world.etcd, self),
            network=_Network(world.wire, self, config.timeouts.connect),
            follower=lambda emit, report: self._follower(config, emit, report),
            listen=lambda inbox, accept, asked: world.wire.listen(self, inbox, accept),
            journal=lambda: SimJournal(world, self.host),  # type: ignore[return-value]
            service=lambda: SimService(world.job, self),
            list_steps=world.storage.list_steps,
            close=lambda: None,
        )
        return Agent(config, self.store, edges=edges)

    def _follower(self, config: AgentConfig, emit: Any, report: Any) -> Follower:
        world, board = self.world, SimBoard()
        copies = self.copies = SimCopies(config, self, world.wire)
        copies.full = lambda: self.host in world.memory_full
        copies.most = world.settings.arenas
        self.trainers.cannot_start = lambda: self.host in world.no_processes
        self.trainers.board = board.set
        self.trainers.corrupt = self._corrupt
        made: list[Follower] = []
        desk = SimExportDesk(
            config,
            board,  # type: ignore[arg-type]
            emit,
            lambda step, ok, error: made[0].exported(step, ok, error),
            world.storage,
            self,
        )
        desk.wrong = world.wrong
        parts = HostParts(
            board=board,  # type: ignore[arg-type]
            trainers=self.trainers,  # type: ignore[arg-type]
            copies=copies,
            exports=desk,
            resharding=None,
            restore=copies.restore,  # type: ignore[arg-type]
            probe=lambda address, then: world.wire.probe(self, address, then),
            free_port=world.free_port,
            observe=self.trainers.observe,
            dump_stack=lambda pid, log: f"stack of {pid} in {log}",
        )
        credentials = Credentials(job=config.job, secret=SECRET)
        made.append(Follower(config, credentials, parts, self.loop, emit, report))
        return made[0]

    def _corrupt(self, step: int) -> bool:
        holder = self.copies.holder
        if not isinstance(holder, SimHolder):
            return False
        return any((step, piece.key) in holder.corrupt for piece in holder.own_slices)

    def start(self) -> None:
        """As `Agent.run` does before its loop.

        Raises:
            StoreUnavailable: the store cannot be reached.
            JobMismatch: it is not the same job.
        """
        config = self.world.config(self.host)
        check_job(self.store, config)
        if not self.world.settings.large:
            check_domain(self.store, config)  # reads what all others have said
        self.agent.start()

    def _ended(self) -> None:
        """The loop was stopped: as the end of `Agent.run`."""
        if self.left or not self.alive:
            return
        self.left, self.result = True, self.agent._result
        try:
            self.agent.close()
        except Exception as error:
            self.world.clockwork.failed(self.host, "Agent.close", error)
        self.kill()
        self.world.node_left(self)

    def kill(self) -> None:
        """The process is gone, and what it has started."""
        self.alive = False
        self.loop.kill()
        for trainer in self.trainers.all():
            trainer.end(-9)
        for world in list(self.world.job.worlds.values()):
            if world.process is self and not world.ended:
                world.end()
        self.world.wire.process_ended(self)
        self.world.etcd.forget(self)

    @property
    def leader(self) -> Any:
        """The `Leader`, if this host leads."""
        return self.agent._leadership.leader


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run."""

    seed: int
    slots: int = 3
    spares: int = 1
    last_step: int = 20
    storage_interval: int = 7
    skew: bool = False
    pace: Pace = field(default_factory=Pace)
    timeouts: Timeouts = TIMEOUTS
    hot_swap: bool = True
    cpu_devices: int = 16
    arenas: int = 0
    """How many arenas each host has memory for; 0: any number."""
    large: bool = False
    """Thousands of hosts: what only costs the simulation is left out."""
    known: tuple[str, ...] = ()
    """Parts of violations that are known: they do not end a run."""
    trace: bool = False
    """Whether every event goes into a digest."""


class _Tokens:
    """In place of `secrets`: names that follow from the seed."""

    def __init__(self, rng: Any) -> None:
        self._rng = rng

    def token_hex(self, nbytes: int) -> str:
        """See `secrets.token_hex`."""
        return self._rng.randbytes(nbytes).hex()


class World:
    """See the module's text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings.seed)
        self.rng = self.scheduler.rng
        self.clockwork = Clockwork(self.scheduler)
        self.clockwork.failed = self._failed
        self.wire = Wire(self.scheduler)
        self.wire.large = settings.large
        self.etcd = Etcd(self.clockwork, self.wire)
        self.storage = Storage(self.scheduler)
        self.layout = job_layout(settings.slots)
        self.job = Job(
            scheduler=self.scheduler,
            wire=self.wire,
            storage=self.storage,
            layout=self.layout.to_json(),
            last_step=settings.last_step,
            pace=settings.pace,
        )
        self.job.wrong = self.wrong
        self.job.happened = self._happened
        self.storage.began = lambda step: self.notify("exporting")
        self.hosts = [f"h{n}" for n in range(settings.slots + settings.spares)]
        self.nodes: dict[str, Node] = {}
        self.starting: dict[str, int] = {}
        """Host to the number of its start that is under way."""
        self._number = 0
        self.memory_full: set[str] = set()
        self.no_processes: set[str] = set()
        self.mutating = False
        """Whether some host lies."""
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []
        self.violations: list[str] = []
        self.known: set[str] = set()
        self.listeners: list[Callable[[str], None]] = []
        self.observers: list[Callable[[float, str, str, dict[str, Any]], None]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.print: Callable[[str], None] | None = None
        if settings.trace:
            self.clockwork.before = self._trace
        self.etcd.watchers.append(self._store_changed)
        self._configs: dict[str, AgentConfig] = {}

    def free_port(self) -> int:
        """A port that nothing has used."""
        self._number += 1
        return 10000 + self._number % 50000

    def config(self, host: str) -> AgentConfig:
        """Of one host's agent."""
        if host not in self._configs:
            self._configs[host] = AgentConfig(
                job="j",
                host=host,
                store="etcd:2379",
                secret=SECRET,
                num_slots=self.settings.slots,
                trainer_command=(),
                run_directory=Path("/sim/run"),
                storage_directory=Path("/sim/run/checkpoints"),
                config_digest="",
                arena_directory=Path("/sim"),
                last_step=self.settings.last_step,
                storage_interval=self.settings.storage_interval,
                timeouts=self.settings.timeouts,
                hot_swap=self.settings.hot_swap,
                cpu_devices=self.settings.cpu_devices,
            )
        return self._configs[host]

    # ---------------------------------------------------------------- telling

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.scheduler.now

    def wrong(self, text: str) -> None:
        """An invariant does not hold."""
        for known in self.settings.known:
            if known in text:
                self.known.add(known)
                return
        if len(self.violations) < 20:
            self.violations.append(f"{self.now:.3f} {text}")
            self.note("VIOLATION", text)
        self.scheduler.halted = True

    def _failed(self, host: str, what: str, error: Exception) -> None:
        import traceback

        lines = traceback.format_exception(error)
        self.wrong(f"{host}: {what} raised {error!r}\n" + "".join(lines[-6:]))

    def note(self, what: str, text: str) -> None:
        """A line of the trace."""
        if self.settings.trace:
            self._hash.update(f"{self.now:.6f} {what} {text}\n".encode())
        if self.print is not None:
            self.print(f"{self.now:9.3f} {what:12} {text}")

    def _trace(self, host: str, function: Callable[..., None], args: tuple) -> None:
        name = getattr(function, "__qualname__", "?")
        detail = ""
        for arg in args:
            if isinstance(arg, dict) and "op" in arg:
                detail = str(arg["op"])
            elif isinstance(arg, str):
                detail += arg
        self._hash.update(f"{self.now:.6f} {host} {name} {detail}\n".encode())

    @property
    def trace_hash(self) -> str:
        """Digest of everything that happened."""
        return self._hash.hexdigest()

    def journal(self, host: str, kind: str, fields: dict[str, Any]) -> None:
        """A leader's journal says something."""
        self.events.append((self.now, host, kind, fields))
        self.note(f"{host} {kind}", str(fields))
        for observer in self.observers:
            observer(self.now, host, kind, fields)
        if kind == "forming":
            self.notify("recovery")
        elif kind == "end":
            self.notify("end")

    def _happened(self, what: str, host: str, step: int) -> None:
        if self.print is not None and what != "computed":
            self.note(f"{host} {what}", str(step))
        if what == "staged":
            self.notify("staging")
            self.scheduler.after(0.004, self.notify, "replicating")

    def notify(self, phase: str) -> None:
        """A phase of the job has come: faults may wait for it."""
        for listener in list(self.listeners):
            listener(phase)

    def _store_changed(self, writer: str, events: Any) -> None:
        if self.print is not None:
            self.note("store", f"by {writer or 'etcd'}: {', '.join(kinds(events))}")
        if any(event.kv.key.endswith("c/commits") for event in events):
            self.notify("committing")
            self.notify("steady")

    # ------------------------------------------------------------------ hosts

    def start_all(self) -> None:
        """Starts every host's agent."""
        for host in self.hosts:
            self.scheduler.after(self.rng.uniform(0, 0.3), self.start_host, host)
        if not self.settings.large:
            self.scheduler.after(1.0, self._keep_past)

    def _keep_past(self) -> None:
        self.etcd.remember()
        self.scheduler.after(2.0, self._keep_past)

    def start_host(self, host: str, number: int | None = None) -> None:
        """Starts an agent, once its former name is free and the store answers."""
        if number is None:
            number = self.starting[host] = self.starting.get(host, 0) + 1
        if self.starting.get(host) != number or self.result is not None:
            return
        node = self.nodes.get(host)
        if node is not None and node.alive:
            return
        key = job_key("j", f"m/hosts/{host}")
        reachable = not (
            self.etcd.down
            or self.etcd.paused
            or self.wire.blocked(host, STORE)
            or self.wire.blocked(STORE, host)
        )
        if (
            host in self.wire.gone
            or not reachable
            or key in self.etcd.twin.listing(key)
        ):
            self.scheduler.after(0.5, self.start_host, host, number)
            return
        self._number += 1
        node = Node(self, host, self._number)
        try:
            node.start()
        except (StoreUnavailable, JobMismatch) as error:
            self.note(f"{host} start", repr(error))
            node.alive = False
            node.loop.kill()
            node.kill()
            self.scheduler.after(0.5, self.start_host, host, number)
            return
        self.nodes[host] = node
        self.note(f"{host} start", node.agent._membership.record.incarnation)

    def node_left(self, node: Node) -> None:
        """An agent has ended by itself."""
        self.note(f"{node.host} left", node.result)

    @property
    def result(self) -> str | None:
        """The job's result as an agent or the store has it."""
        for node in self.nodes.values():
            if node.left and node.result:
                return node.result
        return None

    @property
    def ended(self) -> bool:
        """Every agent that lives has ended with the job."""
        return bool(self.nodes) and self.result is not None and not self.live

    @property
    def live(self) -> list[Node]:
        """The agents that run."""
        return [node for node in self.nodes.values() if node.alive]

    @property
    def leading(self) -> list[Node]:
        """Agents that lead, or believe so."""
        return [node for node in self.live if node.leader is not None]

    def store_leader(self) -> str:
        """Who has the leader key."""
        pair = self.etcd.twin.listing(job_key("j", "m/leader"))
        return next((it.value.decode() for it in pair.values()), "")

    # ----------------------------------------------------------------- running

    @contextmanager
    def tokens(self) -> Iterator[None]:
        """Random names of the real code follow from the seed meanwhile."""
        modules: tuple[Any, ...] = agent_module, membership_module
        before = [module.secrets for module in modules]
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        for module in modules:
            module.secrets = _Tokens(self.rng)
        try:
            yield
        finally:
            logging.disable(disabled)
            for module, real in zip(modules, before, strict=True):
                module.secrets = real

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Runs until a time, a violation, or `stop`, which is asked now and then."""
        running = [True]

        def look() -> None:
            if running[0] and stop is not None:
                self.scheduler.halted |= stop()
                self.scheduler.after(STOP_S, look)

        with self.tokens():
            look()
            if not self.violations:
                self.scheduler.run(until)
        running[0] = False
