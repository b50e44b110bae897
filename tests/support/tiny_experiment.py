"""A tiny experiment and a runtime in memory, for the tests of the loop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

from dtft.checkpoint.managers.progress import Phase
from dtft.config.experiment import (
    CheckpointConfig,
    Experiment,
    LogConfig,
    MeshConfig,
    StopConfig,
)
from dtft.config.optimizers import MaxAdaBeliefConfig
from dtft.data.datasets import DigitsConfig
from dtft.models.base import CNNConfig
from dtft.parallel.planning.choice import PlanChoice
from dtft.parallel.planning.planned_experiment import planned_mesh
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import Arrays, TrainStep


def tiny(tmp_path: Path, *, steps: int = 6, **changes: Any) -> Experiment:
    """A few steps of a small network on the digits."""
    experiment = Experiment(
        name="tiny",
        model=CNNConfig(channels=(4, 8), hidden=16),
        data=DigitsConfig(global_batch=16),
        optim=MaxAdaBeliefConfig(learning_rate=3e-3),
        stop=StopConfig(steps=steps),
        checkpoint=CheckpointConfig(storage_interval=2),
        log=LogConfig(every=2, tensorboard=False, run_dir=str(tmp_path)),
    )
    return replace(experiment, **changes)


def as_bytes(tree: Any) -> list[bytes]:
    """Every leaf's bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@dataclass
class MemoryRuntime:
    """A Runtime that remembers the order of calls and copies of states."""

    run_directory: Path
    num_devices: int = 1
    stop_at: int = -1
    interval: int = 1
    restored: tuple[int, Any, dict[str, Any]] | None = None
    calls: list[str] = field(default_factory=list)
    phases: list[tuple[Phase, int]] = field(default_factory=list)
    saved: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    slot: int = 0
    num_slots: int = 1
    every: int = 1
    """Boundaries at multiples of it are taken."""
    stores_its_end: bool = True
    hosts: Mapping[int, str] = field(default_factory=lambda: {0: "here"})
    generation: int = 0
    attempt: int = 0
    is_leading: bool = True
    resume_command: str = "dtft train tiny"
    choice: PlanChoice | None = None

    def mesh(self, experiment: Experiment) -> jax.sharding.Mesh:
        """A mesh over the first devices."""
        if self.choice is not None:
            return planned_mesh(self.choice.plan, jax.devices()[: self.num_devices])
        return make_mesh(experiment.mesh, jax.devices()[: self.num_devices])

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """What the test gave."""
        if self.restored is None:
            return None
        _, state, items = self.restored
        return jax.tree.map(
            lambda x, a: jax.device_put(x, a.sharding), state, abstract_state
        ), items

    def rehearsed(self, mesh: jax.sharding.Mesh) -> None:
        """Nothing is compiled ahead."""

    def compile(self, train_step: TrainStep, batch: Arrays) -> None:
        """Compiles the step."""
        train_step.lower(batch).compile()

    def await_peers(self) -> None:
        """There is no other process."""

    def entered(self, phase: Phase, step: int) -> None:
        """Remembers the phase."""
        self.phases.append((phase, step))

    def dispatched(self, step: int) -> None:
        """Remembers the call."""
        self.calls.append(f"dispatched {step}")

    def should_save(self, step: int) -> bool:
        """At multiples of the interval."""
        return step % self.interval == 0

    def takes(self, step: int) -> bool:
        """At multiples of `every`."""
        return step % self.every == 0

    def await_turn(self, step: int) -> None:
        """Remembers the call."""
        self.calls.append(f"await_turn {step}")

    def finished_step(self, step: int) -> None:
        """Remembers the call."""
        self.calls.append(f"finished_step {step}")

    def save(self, step: int, state: Any, items: dict[str, Any]) -> None:
        """Copies the state."""
        self.calls.append(f"save {step}")
        self.saved[step] = jax.tree.map(lambda x: np.array(x), state), items

    def should_stop(self, step: int) -> bool:
        """At the step the test gave."""
        return step == self.stop_at

    def finish(
        self, step: int, summary: dict[str, Any], state: Any, items: dict[str, Any]
    ) -> None:
        """Remembers the call, and copies the state."""
        self.calls.append(f"finish {step}")
        self.saved[step] = jax.tree.map(lambda x: np.array(x), state), items


__all__ = ["MemoryRuntime", "MeshConfig", "as_bytes", "tiny"]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the events of compiling that happen inside."""
    found: list[str] = []

    def heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
