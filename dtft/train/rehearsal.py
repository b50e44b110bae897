"""Train steps that are compiled ahead, for formations that may follow the current one.

When a host is lost, the next formation is made of other devices, so JAX traces and
lowers its step again. XLA compiles it again only if JAX's compilation cache does not
have it: the first slot's process writes each program there, and all others load it,
whatever their devices (`share_cached_programs`). The leader knows which formations may
follow: one for each host that may be lost. A process makes their steps in the
background, one after the other, while it trains or waits as a spare.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import jax

from dtft.config import Experiment
from dtft.data import make_datasets
from dtft.parallel import TrainStep, make_mesh, scaled_mesh
from dtft.parallel.planning import planned_mesh, recorded_plan
from dtft.planner.plan import Plan
from dtft.train.loop import step_on
from dtft.train.world import World

logger = logging.getLogger(__name__)

_LOW_PRIORITY = 10


class Rehearsals:
    """The train steps that this process has compiled ahead."""

    def __init__(self, experiment: Experiment, world: World) -> None:
        """Compiles nothing yet."""
        self._experiment, self._world = experiment, world
        self._steps: dict[tuple[int, ...], TrainStep] = {}
        self._number = 0

    def begin(self, order: Mapping[str, Any]) -> None:
        """Starts to compile the steps of formations on a thread; forgets all others.

        An earlier thread ends after its current step. Does nothing for balanced loads,
        whose programs belong to the `Balancer`. Does nothing either before this process
        has joined the world: JAX may not look for devices yet, and the leader repeats
        the order for a process that has joined.

        Args:
            order: `turn` of the next formation (see `World.devices`), `formations`: for
                each one the index of the process of each slot, and `items`: the
                checkpoint items that record the run's plan, {} without a plan.
        """
        if self._experiment.balance.policy != "off" or not self._world.number:
            return
        self._number += 1
        self._steps = {}
        plan = recorded_plan(self._experiment, order["items"])
        args = self._number, order["turn"], order["formations"], plan
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def stop(self) -> None:
        """Compiles no other steps; those that are compiled stay.

        So the next formation, which may compile a step of its own, has the processor.
        """
        self._number += 1

    def step_on(self, mesh: jax.sharding.Mesh) -> TrainStep | None:
        """Returns the compiled step for exactly this mesh; None if there is none."""
        found = self._steps.get(_key(mesh))
        return found if found is not None and found.mesh == mesh else None

    def _run(
        self, number: int, turn: int, formations: list[list[int]], plan: Plan | None
    ) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        for indices in formations:
            if number != self._number:
                return
            try:
                step = self._compiled(indices, turn, plan)
            except Exception:  # the formation will report it, if it comes to it
                logger.exception("a step could not be compiled ahead")
                return
            if number != self._number:
                return
            self._steps[_key(step.mesh)] = step
        logger.info("%d formations are compiled ahead", len(formations))

    def _compiled(self, indices: list[int], turn: int, plan: Plan | None) -> TrainStep:
        experiment = self._experiment
        per_host = experiment.cluster.devices_per_host
        devices = self._world.devices(indices, turn, per_host)
        if plan is not None:
            mesh = planned_mesh(plan, devices)
        else:
            mesh = make_mesh(scaled_mesh(experiment, len(indices), per_host), devices)
        step = step_on(experiment, mesh, plan)
        data = make_datasets(experiment.data, experiment.seed).train
        rows = experiment.data.global_batch
        step.lower(
            {
                name: jax.ShapeDtypeStruct(
                    (rows, *column.shape[1:]),
                    column.dtype,
                    sharding=step.batch_sharding,
                )
                for name, column in data.batch([0]).items()
                if name != "id"
            }
        ).compile()
        return step


def _key(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)
