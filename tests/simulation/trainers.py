"""Simulated trainers: processes that compute steps together, one for each slot.

A step is done when every trainer of a formation has computed it. One that dies breaks
the others' collectives, and they end soon after; one that is stopped makes them wait.
`SimTrainers` is what the real `Trainers` is for a follower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.managers.progress import Phase
from dtft.elastic.hang_detection import STOPPED, Observation
from tests.simulation.memory import layout_from, right
from tests.simulation.network import Process, Wire
from tests.simulation.scheduler import Scheduler
from tests.simulation.storage import Storage

ABSENT = -1
LAST_WORDS_S = 5.0
BROKEN = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
KILL_S = 10.0
Emit = Callable[..., None]


@dataclass(kw_only=True)
class Pace:
    """How long things take, in seconds."""

    start_s: tuple[float, float] = (0.3, 1.2)
    compile_s: tuple[float, float] = (0.1, 0.6)
    ahead_s: tuple[float, float] = (0.001, 0.3)
    step_s: tuple[float, float] = (0.4, 0.7)
    snapshot_s: tuple[float, float] = (0.005, 0.05)


@dataclass(kw_only=True)
class Job:
    """What all trainers of a run have in common."""

    scheduler: Scheduler
    wire: Wire
    storage: Storage
    layout: str
    last_step: int
    pace: Pace = field(default_factory=Pace)
    worlds: "dict[str, JaxWorld]" = field(default_factory=dict)
    idents: int = 0
    restored: Callable[["SimTrainer", str, int], None] = lambda *_: None
    wrong: Callable[[str], None] = lambda text: None
    released: Callable[[int], None] = lambda step: None
    happened: Callable[[str, str, int], None] = lambda what, host, step: None
    failing: dict[tuple[str, int], bool] = field(default_factory=dict)
    """(host, step) to whether the exception there comes every time."""


class JaxWorld:
    """The places of a world, with one coordination service or one for each."""

    def __init__(
        self, job: Job, process: Process | None, address: str, size: int
    ) -> None:
        self._job, self.process, self.address, self.size = job, process, address, size
        self.places: dict[int, SimTrainer] = {}
        self.ended = False
        self._formations: dict[int, Formation] = {}

    @property
    def serves(self) -> bool:
        """Whether the coordination service is there."""
        return not self.ended and (self.process is None or self.process.alive)

    def connect(self, trainer: "SimTrainer", index: int) -> None:
        """A trainer takes a place, also that of another."""
        if not 0 <= index < self.size:  # a lie about the size of the service
            trainer.exit_soon(1, 3.0)
        self.places[index] = trainer

    def formation(self, turn: int, size: int) -> "Formation":
        """The formation of a turn, made by the first trainer that asks."""
        if turn not in self._formations:
            self._formations[turn] = Formation(self._job, self, turn, size)
        found = self._formations[turn]
        if found.size != size:
            self._job.wrong(f"turn {turn} of {self.address} is used twice")
        return found

    def release(self, index: int) -> None:
        """The service gives up a process: it ends, and others can leave it."""
        trainer = self.places.get(index)
        for formation in self._formations.values():
            if trainer in formation.all:
                formation.open()
        if trainer is not None:
            trainer.abort()

    def end(self) -> None:
        """The service ends: the trainers of its world abort."""
        self.ended = True
        for one in list(self.places.values()):
            one.exit_soon(-6, 2.0)


class Formation:
    """The trainers that compute steps together."""

    def __init__(self, job: Job, world: JaxWorld, turn: int, size: int) -> None:
        self._job, self._world, self._turn, self.size = job, world, turn, size
        self.members: dict[int, SimTrainer] = {}
        self.broken = False
        self.is_open = world.process is None
        """Whether a trainer that computes can leave."""
        self.all: list[SimTrainer] = []
        """Also those that are there no more."""
        self._at: dict[int, set[int]] = {}

    def join(self, trainer: "SimTrainer") -> None:
        """A trainer wants to take part; all begin when all are there."""
        if not self._world.serves or self.broken:
            trainer.exit_soon(1, 5.0)
            return
        self.members[trainer.slot] = trainer
        self.all.append(trainer)
        if len(self.members) == self.size:
            pace = self._job.pace
            for one in self.members.values():
                # A later formation of a world was compiled ahead, perhaps.
                one.soon(pace.ahead_s if self._turn else pace.compile_s, one.joined)

    def open(self) -> None:
        """A process of it was given up: the others can leave."""
        self.is_open = True
        for one in list(self.all):
            one.freed()

    def lost(self, trainer: "SimTrainer") -> None:
        """A trainer has ended or left: the collectives of the others break."""
        if self.members.get(trainer.slot) is not trainer:
            return
        del self.members[trainer.slot]
        if trainer.done or self.broken:
            return
        self.broken = True
        for one in list(self.members.values()):
            here, there = trainer.host, one.host
            if not self._job.wire.parted(here, there):
                one.exit_soon(1, 1.5)

    def arrive(self, slot: int, step: int) -> None:
        """A trainer computes a step: it has it when all do."""
        here = self._at.setdefault(step, set())
        here.add(slot)
        if len(here) == self.size:
            del self._at[step]
            self._exchange(step)

    def _exchange(self, step: int) -> None:
        """The collective needs every pair of hosts for a moment."""
        hosts = [one.host for one in self.members.values()]
        wire, job = self._job.wire, self._job
        if len(self.members) < self.size:
            return
        if len(hosts) <= 16 and any(
            wire.parted(a, b) for a in hosts for b in hosts if a != b
        ):
            job.scheduler.after(0.5, self._exchange, step)
            return
        duration = job.scheduler.rng.uniform(*job.pace.step_s)
        for one in list(self.members.values()):
            one.later(duration, lambda one=one: one.computed(step))


class SimTrainer:
    """One trainer process."""

    def __init__(self, job: Job, trainers: "SimTrainers") -> None:
        job.idents += 1
        self.ident, self._job, self._trainers = job.idents, job, trainers
        self.host = trainers.process.host
        self.alive, self.stopped, self.attached = True, False, False
        self.code: int | None = None
        """With which it has ended."""
        self.immortal_s = 0.0
        """Seconds for which SIGKILL does not end it."""
        self.orders: list[tuple[str, Mapping[str, Any]]] = []
        self.world = self.place = 0
        """Number of the world and index in it, as the agent knows them."""
        self.has_joined = False
        """Whether it has joined this world, as the agent knows it."""
        self.given = self.done = self.failed = False
        self.slot = -1
        self._keys: set[str] = set()
        self._missing: set[str] = set()
        """Keys of other trainers that the first step needs, and that it lacks."""
        self._restored = False
        """Whether only these keys are missing."""
        self._connected: JaxWorld | None = None
        self._formation: Formation | None = None
        self._hears_at = 0.0
        self._life = 0
        """Number of formations that it has left."""
        self._held: list[Callable[[], None]] = []
        self._step = self._saved = self._released = 0
        self._asked: int | None = None
        self._room = self._ran = False
        self._stop_at: int | None = None
        self._wanted: int | None = None
        """Number of the order to leave, until it can."""
        self._waits_for = ""
        self.phase: Phase = ""
        self.since_s = 0.0
        self.computing = 0
        self.soon(job.pace.start_s, self._attach)

    def enter(self, phase: Phase) -> None:
        """What the agent sees on the board."""
        self.phase, self.since_s = phase, self._trainers.process.loop.now()

    def observe(self) -> Observation:
        """What the agent sees of this process."""
        return Observation(
            phase=self.phase,
            since=self.since_s,
            computing=self.computing,
            finished=self._step,
            state=STOPPED if self.stopped else "S",
        )

    # ------------------------------------------------------------------- time

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Has something done by this process, once it is not stopped.

        Nothing is done if it leaves its formation before.
        """
        self._job.scheduler.after(delay_s, self._do, function, self._life)

    def soon(self, between: tuple[float, float], function: Callable[[], None]) -> None:
        """As `later`, after a time in a range."""
        self.later(self._job.scheduler.rng.uniform(*between), function)

    def _do(self, function: Callable[[], None], life: int | None = None) -> None:
        if not self.alive or life not in (None, self._life):
            return
        if self.stopped:
            self._held.append(lambda: self._do(function, life))
        else:
            function()

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        held, self._held = self._held, []
        for function in held:
            function()

    # ------------------------------------------------------------- its end

    def exit_soon(self, code: int, within_s: float) -> None:
        """It ends by itself, because of an error elsewhere."""
        if self.done and code > 0:
            return  # it waits for its agent only
        if code > 0:
            self.soon((0.02, within_s), lambda: self.fail(BROKEN))
        else:
            self.soon((0.02, within_s), lambda: self.end(code))

    def abort(self) -> None:
        """Its coordination service has given it up: JAX ends it."""
        delay_s = self._job.scheduler.rng.uniform(0.02, 2.0)
        self._job.scheduler.after(delay_s, self._do, lambda: self.end(-6))

    def fail(self, error: str, phase: str = "step") -> None:
        """An exception ends it: its agent is told first."""
        if self._wanted is not None:
            self.freed()
            return
        if self.failed:
            return
        self.failed = True
        if self._formation is not None:
            self._formation.lost(self)
        step = self.computing
        self.say(
            "failed", step=step, phase=phase, error=error, traceback="", log="/sim/log"
        )
        self.later(LAST_WORDS_S, lambda: self.end(1))

    def end(self, code: int) -> None:
        """The process ends."""
        if not self.alive:
            return
        self.alive, self.code = False, code
        if self._formation is not None and not self.failed:
            self._formation.lost(self)
        trainers = self._trainers
        delay = self._job.scheduler.rng.uniform(0.001, 0.02)
        trainers.process.loop.beside(delay, lambda: trainers.ended(self, code))

    def kill(self) -> None:
        """SIGKILL; also of a stopped process."""
        delay = self._job.scheduler.rng.uniform(0.005, 0.05) + self.immortal_s
        self._job.scheduler.after(delay, self.end, -9)

    # --------------------------------------------------------------- messages

    def say(self, op: str, **fields: Any) -> None:
        """Sends a message to the agent."""
        trainers, delay = self._trainers, self._job.scheduler.rng.uniform(1e-4, 1e-3)
        message = {"op": op, **fields}
        trainers.process.loop.beside(delay, lambda: trainers.heard(self, message))

    def hear(self, op: str, fields: Mapping[str, Any]) -> None:
        """The agent sends a message; messages arrive in order."""
        scheduler = self._job.scheduler
        delay_s = scheduler.rng.uniform(1e-4, 1e-3)
        self._hears_at = max(self._hears_at + 1e-6, scheduler.now + delay_s)
        delay_s = self._hears_at - scheduler.now
        scheduler.after(delay_s, self._do, lambda: self._hear(op, fields))

    def _attach(self) -> None:
        self.attached = True
        trainers = self._trainers
        trainers.process.loop.beside(0.0005, lambda: trainers.begin(self))

    def _hear(self, op: str, fields: Mapping[str, Any]) -> None:
        if op == "start":
            self._begin(fields)
        elif op == "join":
            self._connect(fields["world"])
            self.say("joined", world=fields["world"]["number"])
        elif op == "leave":
            self._leave(fields["number"])
        elif op == "rehearse":
            told = {name: fields[name] for name in ("turn", "formations")}
            told["world"] = self.world
            self.soon(self._job.pace.compile_s, lambda: self.say("rehearsed", **told))
        elif op == "keys":
            self._find(fields["keys"])
        elif op == "restore":
            self._restore(fields)
        elif op == "room":
            if fields["step"] == self._asked:
                self._room = True
                self._write()
        elif op == "release":
            self._release(fields)

    # --------------------------------------------------------------- training

    def _begin(self, start: Mapping[str, Any]) -> None:
        self.slot, self._storage_step = start["slot"], start["storage_step"]
        world = self._connect(start["world"])
        if world is None:
            return
        self.enter("start")
        self._formation = world.formation(start["turn"], len(start["indices"]))
        self._formation.join(self)
        if not start["world"]["address"]:
            name = f"{start['world']['number']}.{start['turn']}"
            slots = range(len(start["indices"]))
            self._missing = {f"{name}/{it}" for it in slots if it != self.slot}
            self._missing -= self._keys
            self.say("keys", keys={f"{name}/{self.slot}": "00"})
        self.later(start["world"]["start_s"], self._late_start)

    def _connect(self, order: Mapping[str, Any]) -> JaxWorld | None:
        name = order["address"] or f"world {order['number']}"
        if self._connected is not None:
            if self._connected.address != name:
                self._job.wrong(f"{self.host} is to join a second world")
            return self._connected
        if not order["address"] and name not in self._job.worlds:
            made = JaxWorld(self._job, None, name, order["size"])
            self._job.worlds[name] = made
        world = self._job.worlds.get(name)
        if world is None:
            self.exit_soon(1, 3.0)
            return None
        self._connected = world
        world.connect(self, order["index"])
        return world

    def _leave(self, number: int) -> None:
        """Leaves its formation; goes on as it began, but connected."""
        self._wanted = number
        formation = self._formation
        if formation is None or self.failed or not self._ran or formation.is_open:
            self.freed()

    def freed(self) -> None:
        """It can leave its formation, if it is to."""
        if self._wanted is not None:
            number, self._wanted = self._wanted, None
            self._do(lambda: self._left(number))

    def _left(self, number: int) -> None:
        if self._formation is not None and not self.failed:
            self._formation.lost(self)
        self._life += 1
        self._formation, self.slot = None, -1
        self.given = self.done = self.failed = self._room = self._ran = False
        self._restored, self._missing = False, set()
        self._step = self._saved = self._released = self.computing = 0
        self._asked = self._stop_at = None
        self._waits_for = ""
        self.soon((0.001, 0.02), lambda: self.say("left_slot", number=number))

    def _late_start(self) -> None:
        if not self._ran:
            self.fail("TimeoutError: the agent did not answer", "start")

    def joined(self) -> None:
        """Every trainer is there and compiled."""
        self.say("layout", layout=self._job.layout)

    def _restore(self, order: Mapping[str, Any]) -> None:
        step, source = order["step"], order["source"]
        pieces = layout_from(self._job.layout).slices(self.slot)
        if source == "memory":
            good = [right(piece.key, step) for piece in pieces]
            if list(order["digests"]) != good:
                self._job.wrong(f"{self.host} restores wrong bytes as step {step}")
            if self._trainers.corrupt(step):
                self.fail("CorruptCopy: w", "restore")  # what is loaded is checked
                return
        elif source == "storage":
            stored = self._job.storage.steps.get(step)
            if stored is None or self._job.storage.away:
                self.fail("FileNotFoundError: no such step", "restore")
                return
            for piece in pieces:
                if stored.get(piece.key) != right(piece.key, step):
                    self._job.wrong(f"{self.host} reads a wrong step {step}")
        self._job.restored(self, source, step)
        self._step = self._saved = self._released = step
        if self._missing:
            self._restored = True
        else:
            self._compute()

    def _find(self, keys: Mapping[str, str]) -> None:
        """Other trainers' keys come; the first step needs those of all."""
        self._keys |= keys.keys()
        self._missing -= keys.keys()
        if self._restored and not self._missing:
            self._restored = False
            self._compute()

    def _compute(self) -> None:
        step = self._step + 1
        if self.failed:
            return
        if self._step >= self._job.last_step or self._stopping:
            self._finish()
            return
        assert self._formation is not None
        self.computing = step
        self.enter("step")
        always = self._job.failing.get((self.host, step))
        if always is not None:
            if not always:
                del self._job.failing[self.host, step]
            self._job.happened("exception", self.host, step)
            self.fail(f"RuntimeError: no sample {step}")
            return
        self._formation.arrive(self.slot, step)

    @property
    def _stopping(self) -> bool:
        return self._stop_at is not None and self._step >= self._stop_at

    def computed(self, step: int) -> None:
        """All have computed a step; it is saved when the one before is safe."""
        self._step = step
        self._waits_for = "turn"
        self.enter("save")
        self._job.happened("computed", self.host, step)
        self._turn()

    def _turn(self) -> None:
        if self._released < self._saved:
            return  # at most one step runs ahead of replication
        if self._waits_for == "end":
            self._waits_for, self.done = "", True
            self._tell_running()
            self.enter("")
            self.say("finished", step=self._step, summary={})
            return
        self._waits_for = "room"
        self._trainers.board("finished", self._step)
        self._tell_running()
        if self._asked != self._step:
            self._ask(self._step)
        self._write()

    def _tell_running(self) -> None:
        if not self._ran:
            self._ran = True
            self.say("running", step=self._step, bytes_from_storage=0)

    def _ask(self, step: int) -> None:
        self._asked, self._room = step, False
        self.say("stage", step=step)

    def _write(self) -> None:
        if self._waits_for == "room" and self._room and self._asked == self._step:
            self._waits_for = "writing"
            self.soon(self._job.pace.snapshot_s, self._written)

    def _written(self) -> None:
        step = self._step
        following = step + 1 if step < self._job.last_step else None
        self._saved, self._asked, self._room = step, following, False
        pieces = layout_from(self._job.layout).slices(self.slot)
        self.say(
            "staged",
            step=step,
            digests=[right(piece.key, step) for piece in pieces],
            kept=b"",
            items={"step": step},
            interval=1,
            window=None,
            following=following,
        )
        self._job.happened("staged", self.host, step)
        self._compute()

    def _release(self, fields: Mapping[str, Any]) -> None:
        self._released = max(self._released, fields["step"])
        self._job.released(fields["step"])
        self._stop_at = fields["stop_at"]
        room = fields["room"]
        if room is not None and room["step"] == self._asked:
            self._room = True
            self._write()
        if self._waits_for in ("turn", "end"):
            self._turn()

    def _finish(self) -> None:
        self._waits_for = "end"
        self.enter("save")
        self._turn()


class SimTrainers:
    """What `Trainers` is for a follower, in virtual time."""

    attachment = (ABSENT, 0)

    def __init__(self, job: Job, process: Process) -> None:
        self._job, self.process = job, process
        self._emit: Emit = lambda *event: None
        self._known: dict[int, SimTrainer] = {}
        self.trainer: SimTrainer | None = None
        self._active = 0
        self._code: int | None = None
        self._waiting: SimTrainer | None = None
        self._member: SimTrainer | None = None
        self._leaving: tuple[SimTrainer, int] | None = None
        self._dying: set[int] = set()
        self.cannot_start: Callable[[], bool] = lambda: False
        self.board: Callable[[Any, int], None] = lambda name, value: None
        self.corrupt: Callable[[int], bool] = lambda step: False

    def bind(self, emit: Emit) -> None:
        """See `Trainers.bind`."""
        self._emit = emit

    @property
    def waiting(self) -> int:
        """See `Trainers.waiting`."""
        found = self._next
        return found.ident if found else 0

    @property
    def membership(self) -> tuple[int, int, bool]:
        """See `Trainers.membership`."""
        if (found := self._member) is None:
            return 0, 0, False
        return found.world, found.place, found.has_joined

    @property
    def _next(self) -> SimTrainer | None:
        trainer = self.trainer
        return trainer if trainer is not None and not trainer.given else self._waiting

    @property
    def pid(self) -> int:
        """See `Trainers.pid`."""
        return self.trainer.ident if self.trainer is not None else 0

    def observe(self, pid: int) -> Observation | None:
        """What a trainer does now."""
        found = self._known.get(pid)
        return found.observe() if found is not None and found.alive else None

    def note(self, text: str) -> None:
        """Nobody attaches here."""

    def formed(self, **fields: Any) -> None:
        """Nobody attaches here."""

    def ensure_standby(self) -> None:
        """See `Trainers.ensure_standby`."""
        if self._waiting is None:
            self._waiting = self._spawn()

    def _spawn(self) -> SimTrainer:
        if self.cannot_start():
            raise OSError("no process can be started")
        trainer = SimTrainer(self._job, self)
        self._known[trainer.ident] = trainer
        return trainer

    def start(self, message: Mapping[str, Any]) -> None:
        """See `Trainers.start`."""
        world = message["world"]
        trainer = self._member_of(world) or self._next or self._spawn()
        if trainer is self._member:
            self._member = None
        else:
            self._waiting = None
        self.trainer = trainer
        self._active, self._code = trainer.ident, None
        trainer.given = True
        trainer.world, trainer.place = world["number"], world["index"]
        self._order(trainer, "start", dict(message))

    def _member_of(self, world: Mapping[str, Any]) -> SimTrainer | None:
        member, wanted = self._member, (world["number"], world["index"])
        if member is None or (member.world, member.place) == wanted:
            return member
        self._member = None
        self._kill(member)
        return None

    def join(self, world: Mapping[str, Any]) -> None:
        """See `Trainers.join`."""
        if self._member_of(world) is not None:
            return
        trainer, self._waiting = self._waiting or self._spawn(), None
        self._member = trainer
        trainer.world, trainer.place = world["number"], world["index"]
        self._order(self._member, "join", {"world": dict(world)})

    def rehearse(self, world: int, fields: Mapping[str, Any]) -> None:
        """See `Trainers.rehearse`."""
        for trainer in (self.trainer, self._member):
            if trainer is not None and trainer.world == world:
                self._order(trainer, "rehearse", fields)

    def share(self, keys: Mapping[str, str]) -> None:
        """See `Trainers.share`."""
        if self.trainer is not None:
            self._order(self.trainer, "keys", {"keys": dict(keys)})

    def leave(self, number: int, world: int) -> bool:
        """See `Trainers.leave`."""
        trainer = self.trainer
        if trainer is None or not trainer.attached or trainer.code is not None:
            return False
        if trainer.world != world:
            return False
        self.trainer, self._active = None, 0
        self._leaving, trainer.orders = (trainer, number), []
        trainer.hear("leave", {"number": number})
        return True

    def leaving_pid(self, number: int) -> int:
        """See `Trainers.leaving_pid`."""
        if self._leaving is not None and self._leaving[1] == number:
            return self._leaving[0].ident
        return 0

    def end_leaving(self, number: int) -> None:
        """See `Trainers.end_leaving`."""
        if self._leaving is not None and self._leaving[1] == number:
            self._kill(self._leaving[0])

    def _order(self, trainer: SimTrainer, op: str, fields: Mapping[str, Any]) -> None:
        trainer.orders.append((op, fields))
        self.begin(trainer)

    def begin(self, trainer: SimTrainer) -> None:
        """See `Trainers._begin`."""
        if not trainer.attached or self._dying:
            return
        orders, trainer.orders = trainer.orders, []
        for op, fields in orders:
            trainer.hear(op, fields)

    def is_active(self, ident: int) -> bool:
        """See `Trainers.is_active`."""
        return ident == self._active != 0

    def send(self, op: str, **fields: Any) -> None:
        """See `Trainers.send`."""
        if self.trainer is not None and self.trainer.attached:
            self.trainer.hear(op, fields)

    def heard(self, trainer: SimTrainer, message: dict[str, Any]) -> None:
        """A trainer has sent something."""
        if message["op"] == "left_slot":
            if self._leaving == (trainer, message["number"]):
                self._leaving, self._member = None, trainer
                trainer.has_joined = True
                self._emit("left_slot", message["number"], None)
        elif message["op"] == "joined":
            trainer.has_joined = True
            if trainer is self._member:
                self._emit("joined", trainer.world)
        elif message["op"] == "rehearsed":
            told = {key: value for key, value in message.items() if key != "op"}
            self._emit("rehearsed", told)
        else:
            self._emit("trainer", trainer.ident, dict(message))

    def ended(self, trainer: SimTrainer, code: int) -> None:
        """See `Trainers._ended`."""
        if self._known.pop(trainer.ident, None) is None:
            return
        was_killed = trainer.ident in self._dying
        self._dying.discard(trainer.ident)
        was_standby = trainer is self._waiting
        self._waiting = None if was_standby else self._waiting
        self.trainer = None if trainer is self.trainer else self.trainer
        self._member = None if trainer is self._member else self._member
        if self._leaving is not None and self._leaving[0] is trainer:
            number, self._leaving = self._leaving[1], None
            self._emit("left_slot", number, None if was_killed else code)
        self._code = code if trainer.ident == self._active else self._code
        for other in (self.trainer, self._member):
            if other is not None:
                self.begin(other)
        self._emit("trainer_exit", trainer.ident, code)
        if was_standby and not was_killed:
            self._emit("standby_exit", code)

    def exited(self, ident: int) -> bool:
        """See `Trainers.exited`."""
        was_active = self.is_active(ident)
        self._active = 0 if was_active else self._active
        return was_active

    def let_go(self, reason: str = "", *, waiting: bool = False) -> int | None:
        """See `Trainers.let_go`."""
        del reason
        code = self._code if self._active else None
        if self._active and self.trainer is not None:
            code = self.trainer.code
        trainer, self.trainer, self._active = self.trainer, None, 0
        if trainer is not None and trainer.given:
            self._kill(trainer)
        elif trainer is not None:
            self._waiting = trainer
        if waiting:
            leaving = self._leaving[0] if self._leaving is not None else None
            for idle in (self._waiting, self._member, leaving):
                if idle is not None:
                    self._kill(idle)
            self._waiting = self._member = None
        return code

    def _kill(self, trainer: SimTrainer) -> None:
        trainer.kill()
        trainer.orders = []
        if trainer.ident in self._known and trainer.ident not in self._dying:
            self._dying.add(trainer.ident)
            self.process.loop.beside(KILL_S, lambda: self.ended(trainer, -9))

    def all(self) -> list[SimTrainer]:
        """Every trainer process of this host."""
        return list(self._known.values())

    def close(self) -> None:
        """See `Trainers.close`."""
        for trainer in list(self._known.values()):
            trainer.end(-9)


class SimService:
    """JAX's coordination service beside a leader."""

    def __init__(self, job: Job, process: Process) -> None:
        self._job, self._process = job, process
        self._world: JaxWorld | None = None
        self._counter = 0

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """See `Service.start`."""
        self.end()
        self._counter += 1
        number = len(self._job.worlds) + 1
        address = f"{self._process.host}:{30000 + number}"
        world = JaxWorld(self._job, self._process, address, num_processes)
        self._world = self._job.worlds[address] = world
        loop, delay = self._process.loop, self._job.scheduler.rng.uniform(0.02, 0.3)

        def serves() -> None:
            if not world.ended:
                loop.post(ready, address)

        loop.beside(delay, serves)

    def give_up(self, places: Sequence[int]) -> None:
        """See `Service.release`."""
        if self._world is not None:
            for place in places:
                self._world.release(place)

    def end(self) -> None:
        """See `Service.end`."""
        world, self._world = self._world, None
        if world is not None:
            world.end()

    def close(self) -> None:
        """See `Service.close`."""
        self.end()
