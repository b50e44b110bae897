"""The interface between the training loop and its process.

The loop decides steps; a runtime decides where state is restored from and saved to. The
elastic runtime is in `worker`, the runtime of `dtft train` in `single_process`.
"""

from pathlib import Path
from typing import Any, Protocol

import jax

from dtft.checkpoint.managers import Phase
from dtft.config import Experiment
from dtft.parallel import State
from dtft.parallel.planning import PlanChoice

Items = dict[str, Any]
"""A checkpoint's values that are not arrays, as JSON:"""


class Runtime(Protocol):
    """The loop's view of its process. Only the training thread calls the methods."""

    @property
    def slot(self) -> int:
        """This process's position in the mesh."""
        ...

    @property
    def num_slots(self) -> int:
        """Number of positions."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each position's host; shares are learned per host."""
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
        """The run directory, which exists."""
        ...

    @property
    def choice(self) -> PlanChoice | None:
        """The plan, once `mesh` was called; None where the config's mesh decides."""
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
        """The state to start from, or None for step 0.

        Raises:
            Exception: a state exists but cannot be loaded; nothing was changed.
        """
        ...

    def entered(self, phase: Phase, step: int) -> None:
        """The loop begins a phase of its work for state number `step`."""
        ...

    def dispatched(self, step: int) -> None:
        """The computation of state number `step` was handed to the devices."""
        ...

    def should_save(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`; equal on all processes."""
        ...

    def takes(self, step: int) -> bool:
        """Whether `save` keeps the state of this boundary, so that it is waited for."""
        ...

    def await_turn(self, step: int) -> None:
        """Blocks until the last snapshot is safe, so that `step` may be collected."""
        ...

    def finished_step(self, step: int) -> None:
        """The result of `step` is ready; called at boundaries, before `save`."""
        ...

    def save(self, step: int, state: State, items: Items) -> None:
        """Takes a snapshot: `state` is ready, and is donated once this returns.

        Not called at a boundary that this runtime does not take.
        """
        ...

    def should_stop(self, step: int) -> bool:
        """Whether to end after `step`, a boundary; equal on all processes."""
        ...

    def finish(
        self, step: int, summary: dict[str, Any], state: State, items: Items
    ) -> None:
        """The run has ended at `step`, at its goal or because `should_stop` said so."""
        ...
