"""What commits and rendezvous cost at thousands of hosts: the leader's processor time,
messages and bytes, writes to the store.

All agents are real ones. Only the leader's events are timed, on its event loop; the
other hosts' views and checks of orders are cut short, which costs the simulation and
not the leader. The leader has a processor for itself: what it does within `TURN_S` is
done in one go, so that a thousand other agents do not empty its caches in between.
"""

import cProfile
import gc
import io
import pstats
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.timeouts import Timeouts
from dtft.elastic.host import agent as agent_module
from dtft.elastic.host import follower as follower_module
from dtft.elastic.store.api import KeyValue
from tests.simulation.memory import layout_from
from tests.simulation.trainers import Pace
from tests.simulation.world import Settings, World

COMMITS = 3
LEADER = "h0"
TURN_S = 0.05
LONG = Timeouts(
    stage=900.0,
    start=600.0,
    restore=300.0,
    replicate=300.0,
    save=500.0,
    step=200.0,
    export=900.0,
)
FOR_ALL = ("m/leader", "m/led", "m/era", "m/assignment", "m/result", "m/stop")


@dataclass(kw_only=True)
class Cost:
    """Of one phase, over all its times."""

    times: int = 0
    leader_s: float = 0.0
    messages: int = 0
    num_bytes: int = 0
    writes: int = 0
    written: int = 0
    by_function: Counter[str] = field(default_factory=Counter)
    by_op: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0


class Meter:
    """Adds up what happens to the phase that the job is in."""

    def __init__(self, world: World, profiled: bool) -> None:
        self._world = world
        self._phase = "join"
        self.cost = Cost()
        """Of the phase that the job is in."""
        self.costs = {self._phase: self.cost}
        self._begun = 0.0
        self._since_s = 0.0
        self._name = ""
        self.commits = 0
        self.profiles: dict[str, cProfile.Profile] = {}
        self._profiled = profiled
        world.clockwork.before, world.clockwork.after = self._before, self._after
        world.wire.sent = self._sent
        world.observers.append(self._journal)
        world.etcd.watchers.append(self._written)

    def enter(self, phase: str) -> None:
        """Another phase begins."""
        self.cost.virtual_s += self._world.now - self._since_s
        self._phase, self._since_s = phase, self._world.now
        self.cost = self.costs.setdefault(phase, Cost())
        self.cost.times += phase != "commits"

    def _before(self, host: str, function: Callable[..., None], args: tuple) -> None:
        if host == LEADER:
            self._name = getattr(function, "__qualname__", "?")
            for arg in args:
                if isinstance(arg, dict) and isinstance(arg.get("op"), str):
                    self._name += f" {arg['op']}"
            if self._profiled:
                self.profiles.setdefault(self._phase, cProfile.Profile()).enable()
            self._begun = time.process_time()

    def _after(self, host: str) -> None:
        if host == LEADER:
            took = time.process_time() - self._begun
            for profile in self.profiles.values():
                profile.disable()
            self.cost.leader_s += took
            self.cost.by_function[self._name] += int(took * 1e9)

    def _sent(self, host: str, op: str, data: bytes) -> None:
        cost = self.cost
        cost.messages += 1
        cost.num_bytes += len(data)
        cost.by_op[op] += len(data)

    def _written(self, writer: str, events: Any) -> None:
        if writer:
            self.cost.writes += 1
            self.cost.written += sum(len(event.kv.value) for event in events)

    def _journal(self, at: float, host: str, kind: str, fields: dict) -> None:
        if kind == "forming":
            self.enter("rendezvous" if self.commits else "first rendezvous")
        elif kind in ("started", "recovery"):
            self.enter("commits")
        elif kind == "commit":
            self.commits += 1
            if self._phase == "commits":
                self.cost.times += 1


class _CachedLayouts:
    """In place of `Layout` in followers: thousands read the same one here."""

    from_json = staticmethod(layout_from)


def measure(num_hosts: int, *, profiled: bool = False) -> Meter:
    """One job of so many hosts and one spare: steps, a dead trainer, a dead host."""
    world = World(
        Settings(
            seed=1,
            slots=num_hosts,
            spares=1,
            last_step=10_000,
            storage_interval=0,
            timeouts=LONG,
            large=True,
            pace=Pace(start_s=(0.1, 0.5), step_s=(2.0, 2.5)),
        )
    )
    meter = Meter(world, profiled)

    def concerns(process: Any, keys: list[str]) -> bool:
        if process.host == LEADER:
            return True
        return any(key.removeprefix("j/") in FOR_ALL for key in keys)

    def thin(process: Any, pairs: dict[str, KeyValue]) -> dict[str, KeyValue]:
        if process.host == LEADER:
            return pairs
        names = [*FOR_ALL, f"m/hosts/{LEADER}", f"m/hosts/{process.host}"]
        return {key: pairs[key] for it in names if (key := f"j/{it}") in pairs}

    world.etcd.concerns, world.etcd.thin = concerns, thin
    world.scheduler.at(0.0, world.start_host, LEADER)
    world.scheduler.at(0.0, _give_turns, world)
    for host in world.hosts[1:]:
        world.scheduler.at(1.0 + world.rng.uniform(0, 2.0), world.start_host, host)
    real_check, real_layout = agent_module.fault_of_order, follower_module.Layout
    agent_module.fault_of_order = lambda message, host: None
    follower_module.Layout = _CachedLayouts  # type: ignore[assignment,misc]
    try:
        _drive(world, meter)
    finally:
        agent_module.fault_of_order = real_check
        follower_module.Layout = real_layout  # type: ignore[misc]
    return meter


def _give_turns(world: World) -> None:
    world.nodes[LEADER].loop.rest_s = TURN_S


def _drive(world: World, meter: Meter) -> None:
    for until in (COMMITS, 2 * COMMITS, 3 * COMMITS):
        world.run(world.now + 3000.0, lambda until=until: meter.commits >= until)
        if world.violations:
            raise AssertionError(world.violations[0])
        victim = world.nodes[world.hosts[world.settings.slots // 2]]
        if until == COMMITS and victim.trainers.trainer is not None:
            victim.trainers.trainer.end(-9)
        elif until == 2 * COMMITS:
            victim.kill()


def report(sizes: list[int], *, profiled: bool) -> int:
    """Prints a table, and where the time goes."""
    for num_hosts in sizes:
        begun = time.monotonic()
        meter = measure(num_hosts, profiled=profiled)
        gc.collect()
        took = time.monotonic() - begun
        print(f"\n{num_hosts} hosts ({took:.0f} s of simulation)", flush=True)
        for phase, cost in meter.costs.items():
            _print(num_hosts, phase, cost)
            if profiled and phase in meter.profiles:
                stream = io.StringIO()
                stats = pstats.Stats(meter.profiles[phase], stream=stream)
                stats.sort_stats("cumulative").print_stats(22)
                print(stream.getvalue()[:4500])
    return 0


def _print(num_hosts: int, phase: str, cost: Cost) -> None:
    times = max(cost.times, 1)
    print(
        f"  {phase} ({cost.times} times, {cost.virtual_s / times:.1f} virtual s each): "
        f"leader {cost.leader_s * 1e3 / times:.1f} ms; per host "
        f"{cost.messages / times / num_hosts:.1f} messages, "
        f"{cost.num_bytes / times / num_hosts:.0f} bytes; store "
        f"{cost.writes / times:.1f} writes of {cost.written / times:.0f} bytes"
    )
    for name, ns in cost.by_function.most_common(6):
        print(f"    {ns / 1e6 / times:10.1f} ms  {name}")
    for op, num_bytes in cost.by_op.most_common(4):
        print(f"    {num_bytes / times / num_hosts:10.0f} bytes per host  {op}")
