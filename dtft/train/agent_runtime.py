"""The runtime of a trainer that an agent started: one slot of a job of many hosts.

Joins the JAX world of its formation, restores the step that it is told, and hands each
step to the agent at the end of a link. Must not decide who takes part or which step is
restored: its agent says so.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.managers import AgentLink, Phase, ProgressBoard
from dtft.checkpoint.replication import Experience, Window
from dtft.train.config import refuse_other, to_json
from dtft.train.drill_failure import DrillFailure
from dtft.train.experiment import Experiment
from dtft.train.window import AHEAD, WindowClock

if TYPE_CHECKING:
    from dtft.train.plan_choice import Choice

logger = logging.getLogger(__name__)

WARM_UP = 20
"""Steps left out of the measured wall time per step: compilation, cold caches."""


class AgentRuntime:
    """The loop's window on a job of many hosts: its agent, at the end of a link."""

    stores_its_end = False
    """The leading agent has the last step exported, and says so."""

    def __init__(
        self,
        experiment: Experiment,
        link: AgentLink,
        start: dict[str, Any],
        resume: str,
    ) -> None:
        """Takes the slot that `start` describes; joins nothing yet."""
        self.slot: int = start["slot"]
        self.num_slots: int = start["num_slots"]
        self.hosts: tuple[str, ...] = tuple(start["hosts"])
        self.generation: int = start["generation"]
        self.attempt: int = start["attempt"]
        self.is_leading = self.slot == 0
        self.run_directory = Path(start["run_directory"])
        self.resume_command = resume
        self.summary: dict[str, Any] = {}
        self.choice: Choice | None = None
        self._link, self._start = link, start
        self._resolved = to_json(experiment)
        self._board = ProgressBoard(Path(start["board"]))
        self._board.set("trainer_pid", os.getpid())
        self.at: tuple[str, int] = "start", 0
        """The phase, and the step that it makes; for whoever says what failed."""
        self._board.enter("start", time.monotonic_ns())
        self._drill = DrillFailure.from_environment()
        self._manager: Any = None
        self._step = 0
        self._running = False
        self._dispatched_at: list[float] = []
        self._checkpoint = experiment.checkpoint
        self._last_step = experiment.stop.steps
        self._clock = WindowClock()
        self._window: Window | None = None
        self._seen = Experience()

    def mesh(self, experiment: Experiment) -> Any:
        """Joins the JAX world of this formation; device order is slot order."""
        import jax

        from dtft import _jax_internals
        from dtft.train.fitting import scaled_mesh
        from dtft.train.plan_choice import choose
        from dtft.train.planned_program import planned_mesh
        from dtft.train.step import make_mesh

        _jax_internals.join_world(
            self._start["coordinator"],
            process_id=self.slot,
            num_processes=self.num_slots,
            heartbeat_s=self._start["heartbeat_s"],
            timeout_s=self._start["start_s"],
        )
        logger.info("joined the world")
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        self.choice = choose(experiment, devices, self._recorded())
        if self.choice is not None:
            return planned_mesh(self.choice.plan, devices)
        per_host = len(devices) // self.num_slots
        return make_mesh(scaled_mesh(experiment, self.num_slots, per_host), devices)

    def _recorded(self) -> dict[str, Any]:
        """What the checkpoint that will be restored holds beside arrays."""
        from dtft.checkpoint.storage import StorageTier

        step = self._start["storage_step"]
        if step is None:
            return self._start["items"]
        directory = Path(self._start["storage_directory"])
        storage = StorageTier(directory, read_only=True)
        try:
            return storage.items(step)
        finally:
            storage.close()

    def _restored_step(self) -> int:
        return self._start["storage_step"] or self._start["items"].get("step", 0)

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """The state and items that the leader chose, or None at the very start."""
        from dtft.checkpoint.managers import AgentCheckpointManager, RestoreArgs
        from dtft.checkpoint.state import (
            from_paths,
            to_paths,
            with_plain_keys,
            with_typed_keys,
        )
        from dtft.train.state_layout import layout_of

        layout = layout_of(abstract_state, range(self.num_slots), self._resolved)
        self._manager = AgentCheckpointManager(
            self._link,
            layout,
            slot=self.slot,
            chunk_bytes=self._start["chunk_bytes"],
            storage_directory=Path(self._start["storage_directory"]),
            deadline_s=self._start["start_s"],
            cadence=self._checkpoint.cadence,
            automatic=self._checkpoint.interval == "auto",
            last=self._last_step,
        )
        abstract = to_paths(abstract_state)
        wanted = RestoreArgs(abstract=with_plain_keys(abstract))
        logger.info("state is in memory")
        self.at = "restore", self._restored_step()
        found = self._manager.restore(args=wanted)
        logger.info("state is on the devices")
        if found is None:
            return None
        arrays, items = found
        saved = items.pop("config", self._resolved)
        refuse_other(saved, self._resolved, self.run_directory)
        self._step = items["step"]
        return from_paths(abstract_state, with_typed_keys(arrays, abstract)), items

    def entered(self, phase: Phase, step: int) -> None:
        """The agent reads the phase and its beginning on the board."""
        self._board.enter(phase, time.monotonic_ns())
        self.at = phase, step

    def dispatched(self, step: int) -> None:
        """The step is on its way to the devices."""
        self._board.set("computing", step)
        self._dispatched_at.append(time.monotonic())
        self._clock.dispatched(step, self._dispatched_at[-1])
        if step - AHEAD > self._step:
            self._finished(step - AHEAD)
        if self._drill is not None:
            self._drill.strike(self.slot, step)

    def should_save(self, step: int) -> bool:
        """Whether this step has a snapshot."""
        return self._manager.should_save(step)

    def takes(self, step: int) -> bool:
        """Every snapshot goes to memory."""
        del step
        return True

    def await_turn(self, step: int) -> None:
        """At most one step runs ahead of replication."""
        del step
        self._manager.wait_until_finished()

    def finished_step(self, step: int) -> None:
        """A boundary's result is here."""
        self._finished(step)
        stalls = self._manager.stalls_s
        self._window = self._clock.finished(
            step,
            time.monotonic(),
            released_at=self._manager.released_at,
            stall_s=stalls[-1] if stalls else 0.0,
        )
        if self._window is not None:
            self._seen = self._seen.and_window(self._window)

    def _finished(self, step: int) -> None:
        self._board.set("finished", step)
        self._step = step
        self._tell_running()

    def save(self, step: int, state: Any, items: dict[str, Any]) -> None:
        """One snapshot, at a step boundary."""
        from dtft.checkpoint.managers import SaveArgs
        from dtft.checkpoint.state import to_paths, with_plain_keys

        arrays = with_plain_keys(to_paths(state))
        args = SaveArgs(arrays=arrays, items=items, window=self._window)
        self._manager.save(step, args=args)

    def _tell_running(self) -> None:
        if not self._running:
            self._running = True
            logger.info("step %d finished", self._step)
            read = self._manager.bytes_from_storage
            self._link.send("running", step=self._step, bytes_from_storage=read)

    def should_stop(self, step: int) -> bool:
        """Whether all hosts stop after this step."""
        stop_at = self._manager.stop_at()
        return stop_at is not None and step >= stop_at

    def finish(
        self, step: int, summary: dict[str, Any], state: Any, items: dict[str, Any]
    ) -> None:
        """Training is over; what counts is already in the arena."""
        del step, state, items
        self._tell_running()
        self._manager.wait_until_finished()
        self.summary = summary
        summary |= speed(self._dispatched_at, self._manager.stalls_s)
        summary["interval"] = self._manager.interval()
        if (costs := self._seen.costs) is not None:
            summary |= {"quiet_step_s": costs.step_s, "snapshot_s": costs.snapshot_s}
        self._board.enter("", 0)


def speed(dispatched_at: Sequence[float], stalls_s: Sequence[float]) -> dict[str, Any]:
    """Wall time per step, warm-up left out, and of the last half; and per snapshot.

    >>> speed([float(t) for t in range(30)], [0.5])
    {'step_s': 1.0, 'late_step_s': 1.0, 'snapshots': 1, 'stall_s': 0.5}
    """
    warm, late = dispatched_at[WARM_UP:], dispatched_at[len(dispatched_at) // 2 :]
    figures: dict[str, Any] = {}
    if len(warm) > 1:
        figures["step_s"] = (warm[-1] - warm[0]) / (len(warm) - 1)
        figures["late_step_s"] = (late[-1] - late[0]) / (len(late) - 1)
    if stalls_s:
        figures |= {"snapshots": len(stalls_s), "stall_s": fmean(stalls_s)}
    return figures
