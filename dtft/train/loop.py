"""The training loop: runs steps from the initial or restored state to the last step.

Decides when a step is dispatched, when its metrics are checked and logged, and when its
state is saved. The `Runtime` contains everything that differs between one process and a
cluster. The `TrainStep` contains everything that depends on the model.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.managers import Phase
from dtft.config import ConfigError, Experiment
from dtft.data import Source, make_datasets
from dtft.parallel import (
    STAGE_AXIS,
    Feed,
    Metrics,
    State,
    TrainStep,
    evaluate,
    pipelined_step,
    sharded_step,
)
from dtft.parallel.load_balancing import (
    BalanceLog,
    Balancer,
    begin_balance,
    load_balanced_step,
    node_names,
    shared_by,
)
from dtft.parallel.planning import planned_train_step
from dtft.planner.plan import Plan
from dtft.train.run_log import Record, RunLog
from dtft.train.runtime import Items, Runtime
from dtft.train.stop import Plateau, observe


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run: its last step, the state after it, and the summary."""

    step: int
    """Number of the last step that was run."""
    state: State
    """The state after the last step."""
    summary: dict[str, Any]
    """The contents of summary.json."""


def run(experiment: Experiment, runtime: Runtime) -> Result:
    """Trains until the last step or a plateau, or until `runtime.should_stop` is True.

    The errors of the runtime's methods are not caught.

    Raises:
        NonFinite: the loss became NaN or infinite.
        ValueError: `stop.metric` is not a metric of this run.
        ConfigError: the checkpoint was made from other data or another batch size.
    """
    train_step = train_step_of(experiment, runtime)
    data = make_datasets(experiment.data, experiment.seed)
    restored = runtime.restore(train_step.abstract_state)
    items = restored[1] if restored else {}
    balancer = balancer_of(experiment, runtime, train_step, data.train, items)
    if balancer is None:
        feed = Feed(data.train, train_step, experiment.data.global_batch)
        run_step = train_step.step
    else:
        feed, run_step = balancer.feed, balancer.step
    watch = Watch(experiment, data.identity, items, runtime.should_save)
    if restored is None:
        runtime.entered("compile", watch.start)
    state, step = restored[0] if restored else train_step.init(), watch.start
    phase: Phase = "compile"  # the first call of a jitted step traces and compiles
    asked_to_stop = False
    planned = runtime.choice.items if runtime.choice else {}

    def items_of(step: int) -> Items:
        shared = balancer.items if balancer else {}
        return watch.items(step) | planned | shared

    with (
        contextlib.closing(feed),
        RunLog(experiment, runtime, train_step, start=step) as log,
    ):
        while not (watch.ended(step) or asked_to_stop):
            step += 1
            runtime.entered("data", step)
            batch = feed.take(step)
            runtime.entered(phase, step)
            if phase == "compile":
                runtime.compile(train_step, batch.arrays)
                if balancer is not None:
                    balancer.prepare(batch.arrays)
                runtime.await_peers()
            state, metrics = run_step(state, batch.arrays)
            runtime.entered("step", step)
            phase = "step"
            runtime.dispatched(step)
            # While the devices compute, log the last step and prepare the next rows.
            log.samples(step, batch.rows, batch.ids)
            log.write(watch.collect())
            watch.add(step, metrics)
            runtime.entered("data", step + 1)
            feed.prepare(step + 1)
            if not watch.at_boundary(step):
                continue
            if runtime.takes(step) or watch.ended(step):
                runtime.entered("save", step)
                runtime.await_turn(step)
                runtime.entered("step", step)
                jax.block_until_ready((state, metrics))
                log.write(watch.collect())  # log every step that can be restored
                runtime.finished_step(step)
                runtime.entered("save", step)
                runtime.save(step, state, items_of(step))
            asked_to_stop = runtime.should_stop(step)
        runtime.entered("step", step)
        log.write(watch.collect())
        summary: dict[str, Any] = {"step": step, "completed": watch.ended(step)}
        if summary["completed"]:
            batch_size = experiment.data.global_batch
            test = evaluate(
                *(train_step, state, data.test, batch_size),
                entered=lambda phase: runtime.entered(phase, step),
            )
            summary |= {f"test_{name}": value for name, value in test.items()}
        runtime.entered("save", step)
        runtime.finish(step, summary, state, items_of(step))
        log.finish(summary)
    return Result(step=step, state=state, summary=summary)


def train_step_of(experiment: Experiment, runtime: Runtime) -> TrainStep:
    """Makes the runtime's mesh, and returns the train step for this mesh.

    Returns the step that this process has compiled ahead for the mesh, or makes a new
    step if there is none.
    """
    mesh = runtime.mesh(experiment)
    plan = runtime.choice.plan if runtime.choice is not None else None
    return runtime.rehearsed(mesh) or step_on(experiment, mesh, plan)


def step_on(
    experiment: Experiment, mesh: jax.sharding.Mesh, plan: Plan | None
) -> TrainStep:
    """Makes the train step by a plan, or by the config if there is no plan.

    Without a plan the step is load-balanced if the config's `balance.policy` is not
    `off`, else pipelined if the mesh has several stages, else neither.
    """
    if plan is not None:
        return planned_train_step(experiment, mesh, plan)
    if experiment.balance.policy != "off":
        return load_balanced_step(experiment, mesh)
    if mesh.shape[STAGE_AXIS] > 1:
        return pipelined_step(experiment, mesh)
    return sharded_step(experiment, mesh)


def balancer_of(
    experiment: Experiment,
    runtime: Runtime,
    train_step: TrainStep,
    source: Source,
    items: Items,
) -> Balancer | None:
    """Makes the load balancer of a run; None if balancing is off.

    Args:
        experiment: the experiment, with the settings in the field `balance`.
        runtime: the runtime, after a call of `mesh`; has the names of the hosts.
        train_step: the result of `load_balanced_step`, unless balancing is off.
        source: the training data.
        items: the values (no arrays) of the checkpoint that the run continues from;
            empty at step 0.
    """
    config = experiment.balance
    if config.policy == "off":
        return None
    names = node_names(
        [
            [runtime.hosts[device.process_index] for device in devices.flat]
            for devices in train_step.mesh.devices
        ]
    )
    epoch = {"generation": runtime.generation, "attempt": runtime.attempt}
    return Balancer(
        train_step,
        source,
        config,
        begin_balance(
            config.rules(config.policy),
            shared_by(train_step).sharing.work,
            names,
            items,
        ),
        names,
        BalanceLog(runtime.run_directory, epoch, names, leading=runtime.is_leading),
        step=items.get("step", 0),
    )


class Watch:
    """Collects the metrics; decides which steps are boundaries and when the run ends.

    A boundary is a step after which a snapshot may be taken and the run may end. Every
    decision depends only on step numbers and on values equal on all processes.
    """

    def __init__(
        self,
        experiment: Experiment,
        identity: str,
        items: Items,
        should_save: Callable[[int], bool],
    ) -> None:
        """Continues from a checkpoint, or starts at step 0.

        Args:
            experiment: the experiment.
            identity: text that identifies the training data; checkpoints contain it.
            items: the values (no arrays) of the checkpoint; empty at step 0.
            should_save: function that returns whether a step is a boundary, a step
                after which a snapshot may be taken; called for steps below
                `stop.steps`.

        Raises:
            ConfigError: the checkpoint was made from other data or another batch size.
        """
        self._experiment, self._identity = experiment, identity
        self._should_save = should_save
        self._plateau = Plateau.from_items(items.get("stop", {}))
        self._pending: list[tuple[int, Metrics]] = []
        self.start: int = items.get("step", 0)
        self._saved = self.start
        expected = {"position": self._position(self.start), "data_identity": identity}
        for name, value in expected.items():
            if items and items[name] != value:
                raise ConfigError(
                    f"the checkpoint's {name} is {items[name]!r}, but this run's is "
                    f"{value!r}: its rows would not be those the run began with. Use "
                    "the same data and batch, or set --log.run_dir to a new directory."
                )

    def add(self, step: int, metrics: Metrics) -> None:
        """Stores the metrics of a dispatched step without waiting for the values."""
        self._pending.append((step, metrics))

    def collect(self) -> list[Record]:
        """Waits for the metrics added since the last call, and returns their values.

        Each record has the number of a step, and the values of its metrics by name.
        The values are also passed to `observe`, which detects a plateau.

        Raises:
            NonFinite: a loss is NaN or infinite.
            ValueError: `stop.metric` is not a metric of this run.
        """
        records: list[Record] = []
        for step, metrics in self._pending:
            values = {name: float(np.asarray(value)) for name, value in metrics.items()}
            records.append((step, values))
            self._plateau = observe(self._plateau, self._experiment.stop, step, values)
        self._pending.clear()
        return records

    def at_boundary(self, step: int) -> bool:
        """Whether `step` is a boundary; if so, remembers `step` as the newest boundary.

        Boundaries are the config's last step and the steps that `should_save` selects.
        """
        if step >= self._experiment.stop.steps or self._should_save(step):
            self._saved = step
        return self._saved == step

    def ended(self, step: int) -> bool:
        """Whether the run has reached its goal at `step`: the last step or a plateau.

        With a fixed `checkpoint.interval`, a plateau counts only at the newest boundary
        (a step after which a snapshot may be taken) and at the step that the run
        started from. With the interval `auto`, a plateau counts only at multiples of
        `checkpoint.max_interval`, so that the end does not depend on timing.

        Metrics that are not collected yet can change the result from True to False, but
        not from False to True.
        """
        stop, checkpoint = self._experiment.stop, self._experiment.checkpoint
        saved = step in (self.start, self._saved)
        if checkpoint.interval == "auto":
            saved = step % checkpoint.max_interval == 0
        plateau = saved and self._plateau.converged(stop, step, self.start)
        return step >= stop.steps or plateau

    def items(self, step: int) -> Items:
        """Returns the values of a checkpoint of `step` that are not arrays.

        The values are the step, the data position (the number of rows used so far), the
        data identity, and the best value of the metric that detects a plateau.
        """
        return {
            "step": step,
            "position": self._position(step),
            "stop": self._plateau.to_items(),
            "data_identity": self._identity,
        }

    def _position(self, step: int) -> int:
        return step * self._experiment.data.global_batch
