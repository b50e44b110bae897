"""What goes wrong, where, when and for how long; and schedules of it.

A fault strikes when the job comes to a phase for the first time after it was armed, and
ends after its seconds, if it ends. Who it strikes is decided then: whoever leads,
follows, or waits as a spare.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dtft.elastic.network import Message
from tests.simulation.memory import SimHolder
from tests.simulation.store import STORE
from tests.simulation.trainers import SimTrainer
from tests.simulation.world import Node, World

Role = Literal["leader", "follower", "spare", "etcd", "trainer", "storage"]
PHASES = (
    *("start", "steady", "staging", "replicating", "committing"),
    *("exporting", "recovery", "end"),
)
SECONDS = (2.0, 6.0, 10.0, 30.0, math.inf)
OF_HOSTS = (
    *("die", "vanish", "stop", "stop-host", "cut", "cut-out", "cut-in", "cut-store"),
    *("cut-peers", "cut-one", "split", "slow", "memory-full", "no-processes", "lie"),
    *("depart", "drain"),
)
OF_PAIRS = ("cut-pair", "cut-pair-out", "cut-copies")
"""Between two hosts with slots alone: both ways, one way, and so that trainers do not
feel it, but what agents send each other."""
OF_ETCD = ("stop", "die", "empty", "older", "slow", "flaky", "full")
OF_TRAINERS = ("die", "stop", "stuck-kill", "exception", "exception-always")
OF_STORAGE = ("away", "full", "hung", "slow")
DRAIN_S = 30.0
"""Seconds for which a user asks that a host leaves."""
DEPARTED_S = 5.0
"""Seconds after the agent's own limit until it must have ended."""
LONGEST_PAUSE_S = 40.0
"""Longer than any pause that ends: the agent's own limit begins when it runs again."""
AT_ONCE = ("reset", "corrupt", "exception")
"""Faults of a moment."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    who: Role
    what: str
    phase: str
    """When it strikes; "at" is a time alone."""
    after_s: float = 0.0
    """Seconds after that; of "at", after the start."""
    seconds: float = math.inf

    def text(self) -> str:
        """For people, and for `--only`."""
        return f"{self.who}:{self.what}@{self.phase}+{self.after_s:.2f}:{self.seconds}"


def may_end_with_error(faults: list[Fault]) -> bool:
    """Whether ending the job is a right answer to these."""
    found = [fault.what for fault in faults]
    if found.count("exception") > 1 or len(faults) > 3:
        return True
    return any(
        fault.what in ("exception-always", "lie", "no-processes", "corrupt")
        or fault.who == "storage"
        for fault in faults
    )


class FaultInjector:
    """Arms the faults of a schedule in a world, one after the other."""

    def __init__(self, world: World, faults: list[Fault]) -> None:
        self._world, self._rng = world, world.rng
        self._armed = list(faults)
        self.last_at = 0.0
        """When the last fault so far has struck or ended."""
        self._induced = False
        world.listeners.append(self._phase)
        for fault in [it for it in faults if it.phase in ("at", "start")]:
            self._armed.remove(fault)
            world.scheduler.after(fault.after_s, self._strike, fault)

    @property
    def done(self) -> bool:
        """Whether everything has struck."""
        return not self._armed

    def _phase(self, phase: str) -> None:
        for fault in [it for it in self._armed if it.phase == phase]:
            self._armed.remove(fault)
            self._world.scheduler.after(fault.after_s, self._strike, fault)
        wants = any(fault.phase == "recovery" for fault in self._armed)
        if phase == "steady" and wants and not self._induced:
            self._induced = True
            delay = self._rng.uniform(0.5, 3.0)
            self._world.scheduler.after(delay, self._kill_some_trainer)

    def _kill_some_trainer(self) -> None:
        if trainer := self._some_trainer():
            trainer.end(-9)

    # ------------------------------------------------------------------ targets

    def _some_trainer(self) -> SimTrainer | None:
        found = [
            node.trainers.trainer
            for node in self._world.live
            if node.trainers.trainer is not None
        ]
        return self._rng.choice(found) if found else None

    def _target(self, who: Role) -> Node | None:
        live = self._world.live
        if not live:
            return None
        leading = [n for n in live if n.host == self._world.store_leader()]
        leader = leading[0] if leading else live[0]
        training = [n for n in live if n.agent._follower.epoch > (0, 0)]
        if who == "leader":
            return leader
        if who == "spare":
            found = [n for n in live if n not in training and n is not leader]
        else:
            found = [n for n in training if n is not leader]
        found = found or [n for n in live if n is not leader]
        return self._rng.choice(found) if found else None

    # ------------------------------------------------------------------ striking

    def _strike(self, fault: Fault) -> None:
        world = self._world
        self.last_at = world.now
        if world.result is not None:
            return
        end = self._begin(fault)
        world.note("FAULT", fault.text())
        if end is not None and fault.seconds < math.inf:
            world.scheduler.after(fault.seconds, self._end, fault, end)
            self.last_at = world.now + fault.seconds

    def _end(self, fault: Fault, end: Callable[[], None]) -> None:
        self._world.note("END", fault.text())
        self.last_at = self._world.now
        end()

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Begins a fault; returns what ends it."""
        match fault.who:
            case "etcd":
                return self._strike_etcd(fault.what)
            case "storage":
                return self._strike_storage(fault.what)
            case "trainer":
                return self._strike_trainer(fault.what)
        node = self._target(fault.who)
        if node is None:
            return None
        self._world.note("target", node.host)
        return self._strike_host(fault.what, node)

    def _strike_host(self, what: str, node: Node) -> Callable[[], None] | None:
        world, host = self._world, node.host
        match what:
            case "die":
                node.kill()
                return lambda: world.start_host(host)
            case "vanish":
                world.wire.gone.add(host)
                node.kill()
                return lambda: self._power_on(host)
            case "stop":
                node.loop.pause()
                return lambda: node.loop.resume() if node.alive else None
            case "stop-host":
                return self._stop_host(node)
            case "slow":
                return self._slow(node)
            case "memory-full":
                world.memory_full.add(host)
                return lambda: world.memory_full.discard(host)
            case "no-processes":
                world.no_processes.add(host)
                return lambda: world.no_processes.discard(host)
            case "lie":
                return self._lie(host)
            case "depart":
                node.agent.depart()
                limit_s = world.settings.timeouts.drain + DEPARTED_S
                world.scheduler.after(limit_s, self._has_left, node)
                return lambda: world.start_host(host)
            case "drain":
                self._drain(host, world.now + DRAIN_S)
                return lambda: world.start_host(host)
            case "reset":
                world.wire.reset(host)
                return None
            case "corrupt":
                self._corrupt(node)
                return None
        return self._cut_pair(what, host) if what in OF_PAIRS else self._cut(what, host)

    def _has_left(self, node: Node, pause_s: float = LONGEST_PAUSE_S) -> None:
        """Looks whether an agent has ended, and again after `pause_s` if not."""
        if not node.alive or node.loop.paused or node.loop.slow_s:
            return
        if pause_s:
            self._world.scheduler.after(pause_s, self._has_left, node, 0.0)
        else:
            self._world.wrong(f"{node.host} was told to end and goes on")

    def _drain(self, host: str, until: float) -> None:
        """Asks who leads, as a user does, until the answer is final."""
        world = self._world

        def answer(reply: dict[str, Any]) -> None:
            world.note("drain", str(reply))
            if reply.get("again") and world.now < until:
                world.scheduler.after(0.5, self._drain, host, until)

        leading = [it for it in world.leading if it.host == world.store_leader()]
        if leading and not leading[0].loop.paused:
            leading[0].leader.draining_wanted(host, answer)
        else:
            answer({"error": "nobody leads", "again": True})

    def _power_on(self, host: str) -> None:
        self._world.wire.gone.discard(host)
        self._world.start_host(host)

    def _stop_host(self, node: Node) -> Callable[[], None]:
        node.loop.pause()
        stopped = node.trainers.all()
        for trainer in stopped:
            trainer.stopped = True

        def go_on() -> None:
            if node.alive:
                node.loop.resume()
            for trainer in stopped:
                trainer.go_on()

        return go_on

    def _slow(self, node: Node) -> Callable[[], None]:
        wire = self._world.wire
        node.loop.slow_s = self._rng.choice([0.02, 0.1, 0.3])
        wire.delay_s[node.host] = self._rng.choice([0.05, 0.5])

        def end() -> None:
            node.loop.slow_s = 0.0
            wire.delay_s.pop(node.host, None)

        return end

    def _cut(self, what: str, host: str) -> Callable[[], None]:
        wire, rng = self._world.wire, self._rng
        others = [it for it in self._world.hosts if it != host]
        out, back = True, True
        match what:
            case "cut-out":
                others, back = [*others, STORE], False
            case "cut-in":
                others, out = [*others, STORE], False
            case "cut-store":
                others = [STORE]
            case "cut-peers":
                pass
            case "cut-one":
                others = [rng.choice(others)]
            case "split":
                pass
            case "cut":
                others = [*others, STORE]
            case _:
                raise ValueError(f"what={what!r}: no such fault")
        here = [host]
        if (
            what == "split"
        ):  # the hosts fall into two parts; the store is in one or both
            here += [it for it in others if rng.random() < 0.5]
            others = [it for it in others if it not in here]
            others += [STORE] * rng.randint(0, 1)
            out, back = rng.choice([(True, True), (True, True), (True, False)])
        pairs = [(a, b) for a in here for b in others if out]
        pairs += [(b, a) for a in here for b in others if back]
        for pair in pairs:
            wire.cut(*pair)

        def end() -> None:
            for pair in pairs:
                wire.heal(*pair)

        return end

    def _cut_pair(self, what: str, host: str) -> Callable[[], None] | None:
        """Cuts a host off from one other that trains, and does not lead."""
        world, wire = self._world, self._world.wire
        others = [
            node.host
            for node in world.live
            if node.agent._follower.epoch > (0, 0)
            and node.host not in (host, world.store_leader())
        ]
        others = others or [it for it in world.hosts if it != host]
        other = self._rng.choice(others)
        world.note("target", other)
        pairs = [(host, other), (other, host)][: 1 if what == "cut-pair-out" else 2]
        for pair in pairs:
            wire.cut(*pair)
        if what == "cut-copies":
            wire.unfelt.update(pairs)

        def end() -> None:
            for pair in pairs:
                wire.heal(*pair)
            wire.unfelt.difference_update(pairs)

        return end

    def _corrupt(self, node: Node) -> None:
        holder = node.copies.holder
        if isinstance(holder, SimHolder) and holder.steps():
            step = self._rng.choice(holder.steps())
            keys = sorted(holder.here(step))
            if keys:
                holder.corrupt.add((step, self._rng.choice(keys)))

    def _lie(self, liar: str) -> Callable[[], None]:
        world, rng = self._world, self._rng
        world.mutating = True

        def mutate(host: str, message: Message) -> Message:
            if host != liar or rng.random() > 0.2:
                return message
            changed = dict(message)
            name = rng.choice(sorted(changed))
            changed[name] = _other_value(changed[name], rng)
            return changed

        world.wire.mutate = mutate

        def end() -> None:
            world.wire.mutate = None
            world.mutating = False

        return end

    def _strike_etcd(self, what: str) -> Callable[[], None] | None:
        etcd = self._world.etcd
        match what:
            case "stop":
                etcd.pause()
                return lambda: etcd.resume() if etcd.paused else None
            case "die" | "empty" | "older":
                etcd.kill()
                data = "kept" if what == "die" else what
                return lambda: etcd.restart(data) if etcd.down else None
            case "slow":
                etcd.slow_s = self._rng.choice([0.3, 1.5, 3.0])
                return lambda: setattr(etcd, "slow_s", 0.0)
            case "flaky":
                etcd.flaky = self._rng.choice([0.1, 0.5])
                return lambda: setattr(etcd, "flaky", 0.0)
            case "full":
                etcd.full = True
                return lambda: setattr(etcd, "full", False)
        raise ValueError(f"what={what!r}: no such fault")

    def _strike_storage(self, what: str) -> Callable[[], None]:
        storage = self._world.storage
        match what:
            case "away":
                storage.away = True
                return lambda: setattr(storage, "away", False)
            case "full":
                storage.full = True
                return lambda: setattr(storage, "full", False)
            case "hung":
                storage.hung = True
                return storage.unhang
            case "slow":
                storage.slow_s = 20.0
                return lambda: setattr(storage, "slow_s", 0.0)
        raise ValueError(f"what={what!r}: no such fault")

    def _well_again(self, key: tuple[str, int]) -> None:
        self._world.job.failing.pop(key, None)

    def _strike_trainer(self, what: str) -> Callable[[], None] | None:
        trainer = self._some_trainer()
        if trainer is None:
            return None
        self._world.note("target", trainer.host)
        match what:
            case "die":
                trainer.end(-9)
                return None
            case "stop":
                trainer.stopped = True
                return trainer.go_on
            case "stuck-kill":
                trainer.stopped, trainer.immortal_s = True, 25.0
                return trainer.go_on
            case "exception" | "exception-always":
                key = trainer.host, trainer._step + 2
                self._world.job.failing[key] = what == "exception-always"
                return lambda: self._well_again(key)
        raise ValueError(f"what={what!r}: no such fault")


def _other_value(value: Any, rng: random.Random) -> Any:
    """What a broken peer could say instead."""
    others: list[Any] = [None, -1, 0, 1 << 62, "", "x", b"", [], {}, True, 1.5]
    if isinstance(value, int):
        others += [value + 1, value - 1] * 3
    if isinstance(value, list | tuple) and value:
        others += [list(value)[:-1], [*value, value[0]]] * 2
    if isinstance(value, str) and value:
        others += [value[:-1], value + "}"]
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        others += [{it: value[it] for it in value if it != key}] * 2
    return rng.choice(others)


# ---------------------------------------------------------------------- schedules


def random_schedule(seed: int) -> tuple[dict[str, Any], list[Fault]]:
    """Sizes of the job and one to four faults, from a seed."""
    rng = random.Random(f"schedule {seed}")
    sizes = {
        "slots": rng.choice([2, 3, 3, 3, 4]),
        "spares": rng.choice([0, 0, 1, 1, 1, 2]),
        "last_step": rng.randint(8, 16),
        "storage_interval": rng.choice([0, 3, 7]),
        "skew": rng.random() < 0.3,
    }
    return sizes, [_random_fault(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]


def _random_fault(rng: random.Random) -> Fault:
    who: Role = rng.choice(
        [
            *("leader", "leader", "leader", "follower", "follower", "spare"),
            *("etcd", "etcd", "trainer", "storage"),
        ]
    )
    kinds = {
        "etcd": OF_ETCD,
        "trainer": OF_TRAINERS,
        "storage": OF_STORAGE,
    }.get(who, (*OF_HOSTS, "reset", "corrupt"))
    phase = rng.choice([*PHASES, "at", "at", "at"])
    late = phase in ("at", "start")
    seconds = rng.choice([0.5, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 30.0, math.inf])
    return Fault(
        who=who,
        what=rng.choice(kinds),
        phase=phase,
        after_s=rng.uniform(0, 12 if phase == "at" else 3)
        if late
        else rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 3)]),
        seconds=seconds * rng.uniform(0.8, 1.2),
    )


def matrix() -> Iterator[tuple[dict[str, Any], list[Fault]]]:
    """Every kind of fault, for whom, when, for how long, with spares and without."""
    hosts: tuple[Role, ...] = ("leader", "follower", "spare")
    kinds: list[tuple[Role, str]] = [
        *itertools.product(hosts, (*OF_HOSTS, "reset", "corrupt")),
        *(("etcd", what) for what in OF_ETCD),
        *(("trainer", what) for what in OF_TRAINERS),
        *(("storage", what) for what in OF_STORAGE),
    ]
    for (who, what), seconds, spares, phase in itertools.product(
        kinds, SECONDS, (0, 1), PHASES
    ):
        if who == "spare" and not spares:
            continue
        if what in AT_ONCE and seconds != SECONDS[0]:
            continue
        sizes = {"slots": 3, "spares": spares, "last_step": 12, "storage_interval": 5}
        yield sizes, [Fault(who=who, what=what, phase=phase, seconds=seconds)]
    yield from _matrix_of_pairs()


def _matrix_of_pairs() -> Iterator[tuple[dict[str, Any], list[Fault]]]:
    """Two hosts with slots that do not reach each other, while all others do."""
    ends: tuple[Role, ...] = ("leader", "follower")
    for who, what, seconds, spares, phase in itertools.product(
        ends, OF_PAIRS, (30.0, math.inf), (0, 1, 2), (*PHASES[1:], "at")
    ):
        sizes = {"slots": 3, "spares": spares, "last_step": 12, "storage_interval": 5}
        after_s = 0.8 * (phase == "at")  # trainers look for each other then
        fault = Fault(who=who, what=what, phase=phase, after_s=after_s, seconds=seconds)
        yield sizes, [fault]
        if phase == "steady" and spares:  # and once more, elsewhere
            again = Fault(who=who, what=what, phase="at", after_s=60.0, seconds=seconds)
            yield {**sizes, "last_step": 120}, [fault, again]
