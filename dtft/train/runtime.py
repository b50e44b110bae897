"""The interface between the training loop and its process.

The loop runs the steps; a runtime decides where state is restored from and saved to.
The runtime of a launched job is in `worker`, the runtime of `dtft train` in
`single_process`.
"""

from pathlib import Path
from typing import Any, Protocol

import jax

from dtft.checkpoint.managers import Phase
from dtft.config import Experiment
from dtft.parallel import State
from dtft.parallel.planning import PlanChoice

Items = dict[str, Any]
"""The values of a checkpoint that are not arrays, and can be written as JSON."""


class Runtime(Protocol):
    """The process as the loop uses it. Only the training thread calls the methods."""

    @property
    def slot(self) -> int:
        """This process's position in the mesh."""
        ...

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of each slot's host; load balancing learns a share of rows per host."""
        ...

    @property
    def generation(self) -> int:
        """Number of the assignment of slots to hosts."""
        ...

    @property
    def attempt(self) -> int:
        """Number of this start of trainers within the generation."""
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
        """The plan that `mesh` chose; None before, and if the config's mesh is used."""
        ...

    @property
    def resume_command(self) -> str:
        """The command line that continues this run."""
        ...

    @property
    def stores_its_end(self) -> bool:
        """Whether storage has the last step when `finish` returns."""
        ...

    def mesh(self, experiment: Experiment) -> jax.sharding.Mesh:
        """Joins the world, chooses the plan and makes the mesh."""
        ...

    def restore(self, abstract_state: State) -> tuple[State, Items] | None:
        """Returns the state and items to continue from; None to start at step 0.

        Raises:
            Exception: a state exists but cannot be loaded; nothing was changed.
        """
        ...

    def entered(self, phase: Phase, step: int) -> None:
        """Called when the loop enters a phase of the work for `step`."""
        ...

    def dispatched(self, step: int) -> None:
        """Called after the computation of `step` is dispatched to the devices."""
        ...

    def should_save(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`; equal on all processes."""
        ...

    def takes(self, step: int) -> bool:
        """Whether `save` stores the state of the boundary `step`.

        If so, the loop waits for the state before it calls `save`.
        """
        ...

    def await_turn(self, step: int) -> None:
        """Blocks until the last snapshot is safe, so that the next one may be taken."""
        ...

    def finished_step(self, step: int) -> None:
        """Called at a boundary before `save`, when the result of `step` is ready."""
        ...

    def save(self, step: int, state: State, items: Items) -> None:
        """Takes a snapshot of `state`, whose arrays are ready.

        The next step donates the arrays, so they must not be read after the return.
        Called only when the run has ended and at boundaries for which `takes` is True.
        """
        ...

    def should_stop(self, step: int) -> bool:
        """Whether to end after `step`, a boundary; equal on all processes."""
        ...

    def finish(
        self, step: int, summary: dict[str, Any], state: State, items: Items
    ) -> None:
        """Called after the last step, at the goal or after `should_stop` was True."""
        ...
