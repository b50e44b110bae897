"""One of several unlike hosts that share every step's batch.

Arguments: RANK NUM_PROCESSES ADDRESS TASK (JSON of `Task`). All processes go through
the same phases; each answers with what it measured, and the first one leaves the rounds
of each search in `FOLDER/PHASE/balance.jsonl`.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

from dtft.balance import Microbatches, Policy, Speeds, allocate
from dtft.calibration import agreed
from dtft.config import BalanceConfig, Experiment, MaxAdaBeliefConfig, MeshConfig
from dtft.data import CharsConfig, make_datasets
from dtft.models.base import TransformerConfig
from dtft.parallel import make_mesh
from dtft.parallel.load_balancing import (
    BalanceLog,
    Balancer,
    Probe,
    SharedFeed,
    begin_balance,
    load_balanced_step,
    shared_by,
)
from experiments import worlds
from experiments.quotas import Quota

Shares = tuple[int, ...]
MICROBATCHES, ROWS_EACH = 64, 8
"""Of a step, over all hosts; rows of each."""
EVERY, PROBES = 8, 5
"""Steps of a round, and how many of them are timed."""
STEPS = 3
"""Of a turn of a comparison, after one that is not counted."""
NEAR, FEW = 6, 3
"""Shares one microbatch from those found that are candidates for the best; how many of
all candidates are compared again with those found and with equal ones: a best of many
noisy figures is too good."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the processes do."""

    folder: str
    """For `PHASE/balance.jsonl`."""
    quotas: list[str]
    """Paths of `Quota`, by rank."""
    cores: list[float]
    """Parts of a core, by rank."""
    slowed: int
    """Rank that becomes slower in mid-run."""
    slowed_to: float
    """Its part of a core then."""
    rounds: int
    """At most, of each search."""
    trials: int
    """Turns in which all candidates are compared."""
    repetitions: int
    """Turns in which the few that count are compared."""


def experiment() -> Experiment:
    """A transformer whose microbatch takes some milliseconds."""
    return Experiment(
        name="balance_unlike_hosts",
        model=TransformerConfig(context=64, num_layers=1, width=64, num_heads=4),
        data=CharsConfig(global_batch=MICROBATCHES * ROWS_EACH, context=64),
        optim=MaxAdaBeliefConfig(learning_rate=1e-3),
        balance=BalanceConfig(
            policy="exact", microbatches=MICROBATCHES, every=EVERY, probes=PROBES
        ),
    )


class Host:
    """The program on this host, and its state, through all phases."""

    def __init__(self, rank: int, task: Task) -> None:
        """Compiles all that is run later, before this host becomes slow."""
        self.rank, self.task, self.num_compiled = rank, task, 0
        trained = experiment()
        mesh = make_mesh(MeshConfig(), jax.devices())
        self.program = load_balanced_step(trained, mesh)
        self.probe = Probe(self.program)
        self.source = make_datasets(trained.data, 0).train
        self.config = trained.balance
        self.names = tuple(f"host-{index}" for index in range(len(task.quotas)))
        self.work: Microbatches = shared_by(self.program).sharing.work
        self.state = self.program.init()
        self.search(self.balancer("warm-up", "exact"), rounds=1)
        self.steps_per_s(self.work.by_weight(np.ones(len(self.names))).tolist())
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        Quota(path=task.quotas[rank]).enter()

    def balancer(self, phase: str, policy: Policy) -> Balancer:
        """One that begins with equal shares."""
        folder = Path(self.task.folder) / phase
        folder.mkdir(exist_ok=True)
        return Balancer(
            self.program,
            self.source,
            self.config,
            begin_balance(self.config.rules(policy), self.work, self.names, {}),
            self.names,
            BalanceLog(folder, {}, self.names, leading=self.rank == 0, say=_say),
            step=0,
            timing=self.probe,
        )

    def search(
        self, balancer: Balancer, rounds: int, *, after: int = 0, again: bool = False
    ) -> int:
        """Rounds until shares have settled; with `again`, after another change.

        Args:
            balancer: runs the steps.
            rounds: most rounds.
            after: rounds that it has had.
            again: whether shares are settled before.
        """
        for number in range(after * EVERY + 1, (after + rounds) * EVERY + 1):
            batch = balancer.feed.take(number)
            balancer.prepare(batch.arrays)
            self.state, _ = balancer.step(self.state, batch.arrays)
            balancer.feed.prepare(number + 1)
            now = balancer.balance
            if number % EVERY == 0 and now.judgement is not None:
                again = again and not now.judgement.changed
                if now.settled and not again:
                    break
        return balancer.balance.rounds - after

    def steps_per_s(self, shares: Sequence[int]) -> float:
        """Of ordinary steps with fixed shares, after one that is not counted; the same
        in all processes, which go on with what they find best."""
        feed, begun = SharedFeed(self.source, self.program, shares), 0.0
        for number in range(1, STEPS + 2):
            self.state, _ = self.program.step(self.state, feed.take(number).arrays)
            feed.prepare(number + 1)
            if number == 1:
                jax.block_until_ready(self.state)
                begun = time.perf_counter()
        jax.block_until_ready(self.state)
        return STEPS / agreed(time.perf_counter() - begun)

    def compared(self, vectors: Sequence[Shares], turns: int) -> dict[Shares, float]:
        """Steps per second of each: medians over turns, each in an order of its own."""
        found: dict[Shares, list[float]] = {it: [] for it in vectors}
        for turn in range(turns):
            order = np.random.default_rng(turn).permutation(len(found))
            for place in order:
                shares = list(found)[place]
                found[shares].append(self.steps_per_s(shares))
        return {shares: statistics.median(speeds) for shares, speeds in found.items()}

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        self.num_compiled += event.endswith("backend_compile_duration")


def neighbours(shares: Shares, speeds: Speeds, num: int) -> list[Shares]:
    """The best, by what hosts were found to need, of those one microbatch away.

    Args:
        shares: to start from.
        speeds: of the hosts.
        num: how many.
    """
    found: list[Shares] = []
    for giver, taker in itertools.permutations(range(len(shares)), 2):
        moved = list(shares)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] > 0:
            found.append(tuple(moved))
    return sorted(found, key=lambda it: speeds.needed(np.array(it)).max())[:num]


@dataclass(frozen=True, kw_only=True)
class Used:
    """CPU time until a moment, in seconds."""

    at: float
    machine_s: float
    """Of all cores, by anyone."""
    own_s: float
    """By this process."""

    @classmethod
    def now(cls) -> "Used":
        """At this moment."""
        user, nice, system, _, _, *others = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
        ticks = user + nice + system + sum(others)
        return cls(
            at=time.monotonic(),
            machine_s=ticks / os.sysconf("SC_CLK_TCK"),
            own_s=time.process_time(),
        )

    def since(self, before: "Used") -> dict[str, float]:
        """Seconds since another moment."""
        return {
            "wall_s": self.at - before.at,
            "machine_s": self.machine_s - before.machine_s,
            "own_s": self.own_s - before.own_s,
        }


def measured(host: Host) -> dict[str, Any]:
    """Both policies, what they found beside the best, and a host that slows down."""
    task, begun = host.task, Used.now()
    exact = host.balancer("exact", "exact")
    rounds = host.search(exact, task.rounds)
    proportional = host.balancer("proportional", "proportional")
    most = host.search(proportional, task.rounds)
    found = _shares(exact)
    vectors = {
        "even": tuple(host.work.by_weight(np.ones(len(task.cores))).tolist()),
        "proportional": _shares(proportional),
        "exact": found,
        "by cores": _by_cores(task.cores),
    }
    near = neighbours(found, exact.balance.tried.speeds(), NEAR)
    trials = host.compared([*vectors.values(), *near], task.trials)
    first = sorted(trials, key=lambda shares: -trials[shares])[:FEW]
    named = [vectors[name] for name in ("even", "proportional", "exact")]
    again = host.compared([*named, *first], task.repetitions)
    if host.rank == task.slowed:
        Quota(path=task.quotas[host.rank]).limit(task.slowed_to)
    slow_rounds = host.search(exact, task.rounds, after=rounds, again=True)
    cores = list(task.cores)
    cores[task.slowed] = task.slowed_to
    after = {"before": found, "after": _shares(exact), "by cores": _by_cores(cores)}
    slow = host.compared(list(after.values()), task.trials)
    return {
        "shares": vectors,
        "trials": list(trials.items()),
        "again": list(again.items()),
        "rounds": {"exact": rounds, "proportional": most, "slowed": slow_rounds},
        "settled": proportional.balance.settled,
        "slowed_shares": after,
        "slowed_steps_per_s": {name: slow[it] for name, it in after.items()},
        "recompilations": host.num_compiled,
        "used": Used.now().since(begun),
    }


def _by_cores(cores: Sequence[float]) -> Shares:
    """The shares that quotas suggest."""
    return tuple(allocate(1 / np.asarray(cores), MICROBATCHES).tolist())


def main(rank: int, num: int, address: str, task: str) -> None:
    """Joins, measures, answers."""
    worlds.join(rank, num, address)
    worlds.answer(measured(Host(rank, Task(**json.loads(task)))))


def _shares(balancer: Balancer) -> Shares:
    return tuple(balancer.balance.division.tolist())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
