"""Changes uneven shares while training, in rounds of steps.

The last steps of a round are timed; then `dtft.balance` computes the next shares from
these times. The step number determines whether a step is timed, so all processes time
the same steps. The times of all processes are gathered. All processes use the shares
that the first replica's process computed, because other processors may round
differently.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from dtft.balance import Balance, Counts
from dtft.config import BalanceConfig
from dtft.data import Source
from dtft.parallel.functional_model import Metrics, State
from dtft.parallel.load_balancing import balance_log
from dtft.parallel.load_balancing.balance_log import BalanceLog, Begin, Cost
from dtft.parallel.load_balancing.step import (
    Probe,
    SharedFeed,
    TimedStep,
    gathered,
    own_replicas,
    shared_by,
)
from dtft.parallel.step import Arrays, TrainStep


class Timing(Protocol):
    """Interface of an object that compiles, runs and times steps, such as `Probe`."""

    def prepare(self, batch: Arrays) -> None:
        """Compiles the programs of a timed step for a batch."""
        ...

    def idle_at(self, state: State) -> float:
        """Waits until the devices have computed `state`; returns the time then.

        The time is in seconds, by `time.perf_counter()`.
        """
        ...

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics, TimedStep]:
        """Runs an optimizer step, and times this process's replicas.

        Returns the new state, the metrics, and the times of the step.
        """
        ...


class Balancer:
    """Runs the steps of `load_balanced_step`, and changes the shares after each round.

    A share is the number of microbatches that a replica takes in a step. A round is
    `BalanceConfig.every` steps, the last `BalanceConfig.probes` of which are timed.
    """

    def __init__(
        self,
        train_step: TrainStep,
        source: Source,
        config: BalanceConfig,
        begin: Begin,
        names: Sequence[str],
        log: BalanceLog,
        *,
        step: int,
        timing: Timing | None = None,
    ) -> None:
        """Logs the first shares; runs no step yet.

        Args:
            train_step: a step from `load_balanced_step`.
            source: the training data.
            config: the settings of load balancing.
            begin: the first shares, and measured times from the checkpoint.
            names: a name for each replica.
            log: the log of shares.
            step: number of the step that the run continues from; 0 for a new run.
            timing: what runs and times the timed steps; by default a `Probe`.
        """
        self._train_step, self._config, self._names = train_step, config, names
        self._balance, self._log, self._step = begin.balance, log, step
        self._num_own = len(own_replicas(train_step.mesh))
        self._timing, self._has_begun = timing or Probe(train_step), False
        self.feed = SharedFeed(source, train_step, begin.balance.division.tolist())
        """Feed that makes the batches with the current shares."""
        self.items: dict[str, Any] = balance_log.to_items(begin.balance, names)
        """Checkpoint items with the current shares and measured times, as of the end of
        the last round."""
        self._timed: list[TimedStep] = []
        self._free: tuple[int, float] | None = None
        self._untimed_s: float | None = None
        log.began(step, begin, shared_by(train_step).sharing)

    @property
    def balance(self) -> Balance[Counts]:
        """The current shares, and the measured times that determine the next shares."""
        return self._balance

    def prepare(self, batch: Arrays) -> None:
        """Compiles the programs of timed steps; runs none of them.

        Must be called before the first step. This function does not wait for other
        processes. `batch` is a batch of `feed`.
        """
        self._timing.prepare(batch)

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        """Runs the next step. `state` is donated, so it cannot be used afterwards.

        Returns the new state and the metrics.
        """
        self._step += 1
        if not self._has_begun:
            return self._first(state, batch)
        return self._next(state, batch)

    def _first(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        """Runs this process's first step.

        Before the step, it gathers zeros from all processes, once in place of times and
        once in place of shares. This compiles both gathers, so no later step includes
        their compilation. Returns the new state and the metrics.
        """
        for columns in (self._config.probes, len(self._names)):
            self._told(np.zeros((self._num_own, columns)))
        self._has_begun = True
        state, metrics = self._next(state, batch)
        if self._free is None:
            self._free = self._step, self._timing.idle_at(state)
        return state, metrics

    def _next(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        if not self._config.is_probe(self._step):
            return self._train_step.step(state, batch)
        state, metrics, timed = self._timing.step(state, batch)
        if self._free is not None and not self._timed:
            after, at = self._free
            steps = self._step - 1 - after
            self._untimed_s = (timed.began - at) / steps if steps else None
        self._timed.append(timed)
        self._free = self._step, timed.ended
        if self._config.ends_round(self._step):
            self._end_round()
        return state, metrics

    def _end_round(self) -> None:
        before, busy_s = self._balance, self._gathered()
        after = before.after(busy_s)
        told = np.tile(after.division, (self._num_own, 1))
        agreed = self._told(told)[0, 0].astype(np.int64)
        self._balance = replace(after, division=agreed)
        self._log.round(self._step, before, self._balance, busy_s, self._cost())
        self.items = balance_log.to_items(self._balance, self._names)
        self.feed.share(agreed.tolist())
        self._timed = []

    def _gathered(self) -> np.ndarray:
        """Gathers the seconds of each replica's local work, `[timed steps, replicas]`.

        The result is the same in all processes. The time of a replica is the longest
        time of its processes. The first round after a restart may have fewer timed
        steps than later rounds.
        """
        own = np.full((self._num_own, self._config.probes), np.nan)
        for column, timed in enumerate(self._timed):
            own[:, column] = timed.busy_s
        # A replica of several hosts takes as long as its slowest host.
        busy_s = self._told(own).max(1).T.astype(float)
        return busy_s[: len(self._timed)]

    def _told(self, own: np.ndarray) -> np.ndarray:
        """Gathers the values of all replicas from all processes.

        `own` has n values for each replica of this process, `[replicas here, n]`.
        Returns an array `[replicas, devices of a replica, n]`. A replica has one entry
        for each of its devices: the values that the device's process gave for the
        replica.
        """
        return gathered(self._train_step.mesh, own)

    def _cost(self) -> Cost:
        first, last = self._timed[0], self._timed[-1]
        return Cost(
            step_s=self._untimed_s,
            probe_s=(last.ended - first.began) / len(self._timed),
            probes=self._config.probes,
            steps=self._config.every,
        )
