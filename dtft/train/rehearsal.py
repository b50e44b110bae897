"""Compiles train steps ahead, for formations that may follow the current formation.

A formation is an assignment of hosts to slots. After a host is lost, the next formation
has other devices, but the same train step. A process that has compiled the step for one
formation loads the program for the devices of another (`PortableProgram`). The step is
traced and lowered again only if no earlier step had the same mesh sizes and plan. XLA
compiles it again only if JAX's compilation cache does not have the program. The process
of the first slot writes each program to the cache, and all other processes load it
from there, whatever their devices (`share_cached_programs`).

The leader sends the formations that may follow: those after the loss of one host, and
those with the next number of slots while the job is being resized. A process compiles
their steps in the background, one after another, while it trains or waits as a spare.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dtft._jax_internals import PortableProgram
from dtft._priority import lower_priority
from dtft.config import Experiment
from dtft.data import make_datasets
from dtft.parallel import TrainStep, make_mesh, scaled_mesh
from dtft.parallel.planning import planned_mesh, recorded_plan
from dtft.planner.plan import Plan
from dtft.train.loop import step_on
from dtft.train.world import World

logger = logging.getLogger(__name__)


class Rehearsals:
    """Compiles train steps before they are needed, for other assignments of slots.

    Keeps the programs, so that a step for other devices need not be compiled again.
    """

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        done: Callable[[Mapping[str, Any]], None] = lambda order: None,
    ) -> None:
        """Stores the arguments; compiles nothing yet.

        Args:
            experiment: the experiment.
            world: this process's membership in the job's JAX processes.
            done: function that is called with the argument of `begin`, the leader's
                message, after the message's steps are compiled or an error has
                occurred. It is called on a background thread. It is not called if a
                later call of `begin` or `stop` came first.
        """
        self._experiment, self._world, self._done = experiment, world, done
        self._steps: dict[tuple[int, ...], _Rehearsed] = {}
        self._programs: list[_KnownProgram] = []
        self._number = 0

    def begin(self, order: Mapping[str, Any]) -> None:
        """Starts a thread that compiles the steps for several formations.

        A formation is an assignment of hosts to slots. Steps for other formations are
        forgotten. The thread of an earlier call ends after its current step. With load
        balancing no steps are compiled, because the `Balancer` has programs of its own.
        Does nothing before this process has joined the world (the job's JAX processes),
        because JAX may not look for devices yet; the leader repeats the message for a
        process that has joined.

        Args:
            order: a message of the leader with three fields. `turn`: how many
                formations the world has had, which selects the CPU devices (see
                `World.devices`). `formations`: for each formation the index of the JAX
                process of each slot. `items`: the checkpoint items that record the
                run's plan; {} without a plan.
        """
        if not self._world.number:
            return
        self._number += 1
        args = self._number, order
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def stop(self) -> None:
        """Ends the thread of `begin` after its current step; keeps the finished steps.

        Call it when this process gives up its slot, so that the processor is free for
        its next step.
        """
        self._number += 1

    def step_on(self, mesh: jax.sharding.Mesh, plan: Plan | None) -> TrainStep | None:
        """Returns the step that was compiled ahead for exactly this mesh and plan.

        Returns None if there is none.
        """
        found = self._steps.get(_key(mesh))
        is_it = found is not None and found.step.mesh == mesh and found.plan == plan
        return found.step if found is not None and is_it else None

    def compile(self, step: TrainStep, plan: Plan | None, batch: Any) -> None:
        """Compiles a step, or loads the program of an equal step on other CPU devices.

        An equal step is one with the same mesh sizes and plan. If its program cannot be
        loaded, the step is compiled. Sets `step.program`; does nothing if it is set.
        With `devices_per_host` -1, as on accelerators, the step is compiled, but
        `step.program` stays None.

        Args:
            step: the step.
            plan: the plan that the step was made with; None without a plan.
            batch: arrays or ShapeDtypeStructs of a batch.
        """
        mesh = step.mesh
        if step.program is not None:
            return
        if self._experiment.cluster.devices_per_host < 0:  # as on accelerators
            step.lower(batch).compile()
            return
        for known in self._programs:
            if known.mesh.shape == mesh.shape and known.plan == plan:
                try:
                    own, others = known.mesh.devices.flat, mesh.devices.flat
                    step.program = known.program.on(list(own), list(others))
                    return
                except Exception:  # such as a program that closes over arrays
                    logger.debug(
                        "a compiled step cannot be loaded for other devices; it is "
                        "compiled again",
                        exc_info=True,
                    )
                    self._programs.remove(known)
                    break
        program = PortableProgram(step.lower(batch))
        step.program = program.compiled
        self._programs.append(_KnownProgram(mesh, plan, program))

    def _run(self, number: int, order: Mapping[str, Any]) -> None:
        lower_priority()
        if self._experiment.balance.policy == "off":
            self._compile_all(number, order)
        if number == self._number:
            self._done(order)

    def _compile_all(self, number: int, order: Mapping[str, Any]) -> None:
        try:
            plan = recorded_plan(self._experiment, order["items"])
            turn, formations = order["turn"], order["formations"]
            meshes = [self._mesh(indices, turn, plan) for indices in formations]
            kept = {_key(it): self.step_on(it, plan) for it in meshes}
            if number != self._number:
                return
            self._steps = {
                key: _Rehearsed(step, plan) for key, step in kept.items() if step
            }
            for mesh in meshes:
                if number == self._number and _key(mesh) not in self._steps:
                    step = self._compiled(mesh, plan)
                    if number == self._number:
                        self._steps[_key(mesh)] = _Rehearsed(step, plan)
        except Exception:  # the formation will report it, if it comes to it
            logger.exception(
                "a step could not be compiled ahead; it is compiled when it is needed"
            )
            return
        if number == self._number:
            logger.info(
                "compiled the step ahead for %d assignments of hosts to slots that may "
                "come next",
                len(self._steps),
            )

    def _mesh(
        self, indices: Sequence[int], turn: int, plan: Plan | None
    ) -> jax.sharding.Mesh:
        per_host = self._experiment.cluster.devices_per_host
        devices = self._world.devices(indices, turn, per_host)
        if plan is not None:
            return planned_mesh(plan, devices)
        sizes = scaled_mesh(self._experiment, len(indices), per_host)
        return make_mesh(sizes, devices)

    def _compiled(self, mesh: jax.sharding.Mesh, plan: Plan | None) -> TrainStep:
        experiment = self._experiment
        step = step_on(experiment, mesh, plan)
        data = make_datasets(experiment.data, experiment.seed).train
        rows = experiment.data.global_batch
        batch = {
            name: jax.ShapeDtypeStruct(
                (rows, *column.shape[1:]), column.dtype, sharding=step.batch_sharding
            )
            for name, column in data.batch([0]).items()
            if name != "id"
        }
        self.compile(step, plan, batch)
        return step


@dataclass(frozen=True)
class _Rehearsed:
    """A step that was compiled ahead, and its plan."""

    step: TrainStep
    plan: Plan | None


@dataclass(frozen=True, eq=False)
class _KnownProgram:
    """A compiled step: the mesh that it was traced on, its plan, and its program."""

    mesh: jax.sharding.Mesh
    plan: Plan | None
    program: PortableProgram


def _key(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)
