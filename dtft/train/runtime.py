"""The interface between the training loop and its process.

The loop runs the steps; a runtime decides where state is restored from and saved to.
The runtime of a launched job is in `worker`, the runtime of `dtft train` in
`single_process`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from dtft.checkpoint.managers import Phase
from dtft.config import Experiment
from dtft.parallel import Arrays, State, TrainStep
from dtft.parallel.planning import PlanChoice

Items = dict[str, Any]
"""The values of a checkpoint that are not arrays, and can be written as JSON."""


class Runtime(Protocol):
    """Interface of the training loop to the process that runs it.

    Only the training thread calls the methods.
    """

    @property
    def slot(self) -> int:
        """This process's number in the job, from 0. Mesh devices are in slot order."""
        ...

    @property
    def num_slots(self) -> int:
        """Number of slots: processes that train, one on each host."""
        ...

    @property
    def hosts(self) -> Mapping[int, str]:
        """Map from the index of each JAX process with a slot to its host's name.

        Load balancing records measured times by these names, so that the job finds its
        hosts' times after a restart.
        """
        ...

    @property
    def generation(self) -> int:
        """Number of the present assignment of slots to hosts.

        A new assignment has a larger number.
        """
        ...

    @property
    def attempt(self) -> int:
        """Number of this start of the trainers, counted within the generation."""
        ...

    @property
    def is_leading(self) -> bool:
        """Whether this process writes logs."""
        ...

    @property
    def run_directory(self) -> Path:
        """Path of the run directory, which exists."""
        ...

    @property
    def choice(self) -> PlanChoice | None:
        """The plan that `mesh` chose.

        None before `mesh` is called, or if the config's `plan` is empty.
        """
        ...

    @property
    def resume_command(self) -> str:
        """The command line that continues this run."""
        ...

    @property
    def stores_its_end(self) -> bool:
        """Whether storage has the run's last step as soon as `finish` returns.

        False in a launched job, whose agents write the last step to storage later.
        """
        ...

    def mesh(self, experiment: Experiment) -> jax.sharding.Mesh:
        """Connects to the other JAX processes, chooses the plan and makes the mesh.

        Raises:
            ValueError: no plan is found, or the plan or the mesh does not fit the
                devices.
        """
        ...

    def rehearsed(self, mesh: jax.sharding.Mesh) -> TrainStep | None:
        """Returns the step that this process compiled ahead for a mesh, or None."""
        ...

    def compile(self, train_step: TrainStep, batch: Arrays) -> None:
        """Compiles a step for the batches of this run, unless it is compiled."""
        ...

    def restore(self, abstract_state: State) -> tuple[State, Items] | None:
        """Returns the state to continue from; None to start at step 0.

        Also returns the checkpoint's items, the values that are not arrays.

        Args:
            abstract_state: shape, dtype and sharding of each array of the state.

        Raises:
            Exception: a state exists but cannot be loaded; nothing was changed.
        """
        ...

    def await_peers(self) -> None:
        """Waits until all processes are ready for the first step.

        Called when this process has compiled the programs of its steps.
        """
        ...

    def entered(self, phase: Phase, step: int) -> None:
        """Called when the loop enters a phase, such as "data" or "save", for `step`."""
        ...

    def dispatched(self, step: int) -> None:
        """Called after the computation of `step` is dispatched to the devices."""
        ...

    def should_save(self, step: int) -> bool:
        """Whether `step` is a boundary; equal on all processes.

        A boundary is a step after which a snapshot may be taken and the run may end.
        """
        ...

    def takes(self, step: int) -> bool:
        """Whether the loop waits for the state of `step` and saves it.

        Called at boundaries: steps after which a snapshot may be taken and the run may
        end.
        """
        ...

    def await_turn(self, step: int) -> None:
        """Blocks until the newest snapshot has its copies on other hosts.

        After this the snapshot of `step` may be taken.
        """
        ...

    def finished_step(self, step: int) -> None:
        """Called before `save`, when the devices have finished `step`."""
        ...

    def save(self, step: int, state: State, items: Items) -> None:
        """Takes a snapshot of `state`, whose arrays are ready.

        `items` has the checkpoint's values that are not arrays. The next step donates
        the arrays, so they must not be read after the return. Called at boundaries
        (steps after which a snapshot may be taken) for which `takes` is True, or at
        which the run may have reached its goal.
        """
        ...

    def should_stop(self, step: int) -> bool:
        """Whether the run ends early after `step`; equal on all processes.

        Called at boundaries: steps after which a snapshot may be taken and the run may
        end.
        """
        ...

    def finish(
        self, step: int, summary: dict[str, Any], state: State, items: Items
    ) -> None:
        """Called once after the run's last step, with the contents of summary.json.

        Either the run has reached its goal (the last step or a plateau), or
        `should_stop` was True.
        """
        ...
