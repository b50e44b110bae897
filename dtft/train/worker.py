"""The trainer process of one host in a launched job.

An agent starts ``python -m dtft.train.worker CONFIG [overrides]``. The process imports
its modules, then waits on the agent's socket for orders, so that a spare host starts
training without delay. The process may be killed at any moment. The main orders are:

* ``join``: connect to the job's other JAX processes.
* ``start``: train in a slot, with the same loop as ``dtft train`` and an
  `AgentRuntime`.
* ``leave``: give up the slot, for example because another host was lost. Afterwards the
  process can start in a slot again.
"""

import contextlib
import gc
import io
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dtft._priority import lower_priority
from dtft.checkpoint.managers import (
    AgentGone,
    AgentLink,
    Dialogue,
    LinkClosed,
    Phase,
    ProgressBoard,
    hello,
)
from dtft.checkpoint.replication import Experience, Window
from dtft.config import ConfigError, Experiment, load_experiment, refuse_other, to_json
from dtft.elastic.job import TURNS
from dtft.elastic.stack_dump import accept_requests
from dtft.train.devices import keep_freed, leave_gpu_collectives
from dtft.train.drill_failure import DrillFailure
from dtft.train.stop import NonFinite

if TYPE_CHECKING:
    from dtft.parallel.planning import PlanChoice
    from dtft.train.rehearsal import Rehearsals
    from dtft.train.world import World


AHEAD = 2
"""Number of steps dispatched ahead: at the dispatch of step s, step s - AHEAD has
finished."""


class WindowClock:
    """Measures how much slower steps are while a snapshot is copied to other hosts.

    Steps are dispatched ahead: at the dispatch of step s the loop knows that step s - 2
    is finished. At a boundary, a step after which a snapshot is taken, the loop waits
    for all steps. From the times of these events the clock computes the number and the
    seconds of the steps while the snapshot is copied to other hosts (`affected`), and
    of the steps afterwards (`quiet`).

    In the example the boundaries are the steps 10 and 18, at 10.0 s and 18.5 s, and the
    snapshot of step 10 has its copies at 11.5 s. The first dispatch after that does not
    count, because a step that began earlier runs then. The quiet steps are those from
    the second dispatch, at 13.0 s, to the last dispatch, at 17.0 s: 4 steps in 4.0 s.
    The other 4 steps and 4.5 s count as affected.

    >>> clock = WindowClock()
    >>> clock.finished(10, 10.0, released_at=0.0, stall_s=0.0) is None
    True
    >>> for step in range(11, 19):
    ...     clock.dispatched(step, step - 1.0)
    >>> clock.finished(18, 18.5, released_at=11.5, stall_s=0.25)
    Window(affected_steps=4, affected_s=4.5, quiet_steps=4, quiet_s=4.0, stall_s=0.25)
    """

    def __init__(self) -> None:
        """Makes a clock without recorded steps."""
        self._last: tuple[int, float] | None = None
        self._dispatched: list[tuple[int, float]] = []

    def dispatched(self, step: int, now: float) -> None:
        """Records that a step was dispatched to the devices at the time `now`.

        `now` is monotonic time in seconds.
        """
        self._dispatched.append((step, now))

    def finished(
        self, step: int, now: float, *, released_at: float, stall_s: float
    ) -> Window | None:
        """Returns the counts and seconds of the steps since the last call, if any.

        Returns None at the first call. Call it at each boundary (a step after which a
        snapshot is taken).

        Args:
            step: the boundary, which the devices have finished.
            now: monotonic time in seconds.
            released_at: monotonic time at which the previous boundary's snapshot had
                its copies on other hosts.
            stall_s: seconds for which the previous boundary's snapshot blocked the
                training thread.

        Returns:
            The number and the seconds of the steps while the previous snapshot was
            copied (`affected`) and of the steps afterwards (`quiet`), and `stall_s`.
        """
        last, dispatched = self._last, self._dispatched
        self._last, self._dispatched = (step, now), []
        if last is None:
            return None
        begin, begun_at = last
        quiet = [
            (number, at)
            for number, at in dispatched
            if number > begin + AHEAD and at >= released_at
        ][1:]  # the step that ran at the first of these moments began before it
        quiet_steps = quiet[-1][0] - quiet[0][0] if quiet else 0
        quiet_s = quiet[-1][1] - quiet[0][1] if quiet else 0.0
        return Window(
            affected_steps=step - begin - quiet_steps,
            affected_s=now - begun_at - quiet_s,
            quiet_steps=quiet_steps,
            quiet_s=quiet_s,
            stall_s=stall_s,
        )


logger = logging.getLogger(__name__)

WARM_UP = 20
"""Number of a trainer's first steps that `speed` leaves out of `step_s`, because of
compilation and cold caches."""


class AgentRuntime:
    """What the training loop calls in a trainer that an agent started.

    The trainer fills one slot of a job of many hosts. Connects to the other JAX
    processes of the slot's generation, restores the step that the leader chose, reports
    each step to the agent, and hands snapshots to it.
    """

    stores_its_end = False
    """Always False: agents write the last step to storage after `finish`, by order of
    the leading agent."""

    def __init__(
        self,
        experiment: Experiment,
        dialogue: Dialogue,
        world: "World",
        rehearsals: "Rehearsals",
        start: dict[str, Any],
        resume: str,
    ) -> None:
        """Takes a slot; `mesh` connects to the other JAX processes later.

        Args:
            experiment: the experiment.
            dialogue: exchange of messages with the agent.
            world: this process's membership in the job's JAX processes.
            rehearsals: the train steps that this process compiled ahead.
            start: the agent's message that assigns the slot.
            resume: the command line that continues this run.
        """
        self.slot: int = start["slot"]
        self.num_slots: int = start["num_slots"]
        self._slots = {index: slot for slot, index in enumerate(start["indices"])}
        """Map from the index of a JAX process to its slot."""
        self.hosts = {
            index: start["hosts"][slot] for index, slot in self._slots.items()
        }
        self.generation: int = start["generation"]
        self.attempt: int = start["attempt"]
        self.is_leading = self.slot == 0
        self.run_directory = Path(start["run_directory"])
        self.resume_command = resume
        self.summary: dict[str, Any] = {}
        self.choice: PlanChoice | None = None
        self.may_be_left_behind = False
        """Whether the next formation (assignment of hosts to slots) can begin while the
        training thread of this runtime still computes; `mesh` sets it."""
        self._dialogue, self._world, self._start = dialogue, world, start
        self._rehearsals = rehearsals
        self._compiled = _COMPILED.number
        self._resolved = to_json(experiment)
        self._board = ProgressBoard(Path(start["board"]))
        self._board.set("trainer_pid", os.getpid())
        self.at: tuple[str, int] = "start", 0
        """Current phase and step of training, for error reports."""
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
        """Connects to the other JAX processes, chooses the plan and makes the mesh.

        Devices are in slot order.
        """
        from dtft.parallel import make_mesh, scaled_mesh
        from dtft.parallel.planning import choose, planned_mesh

        self._world.join(self._start["world"])
        self._world.write_compilation_cache(writes=self.is_leading)
        logger.info("connected to the other JAX processes")
        devices = self._world.devices(
            list(self._slots), self._start["turn"], experiment.cluster.devices_per_host
        )
        per_host = len(devices) // self.num_slots
        self.may_be_left_behind = self._world.has_room_beside(per_host)
        formation = f"{self.generation}.{self.attempt}"
        self.choice = choose(experiment, devices, self._recorded(), formation=formation)
        if self.choice is not None:
            return planned_mesh(self.choice.plan, devices)
        return make_mesh(scaled_mesh(experiment, self.num_slots, per_host), devices)

    def rehearsed(self, mesh: Any) -> Any:
        """Returns the step that this process compiled ahead for a mesh, or None."""
        return self._rehearsals.step_on(mesh, self._plan)

    def compile(self, train_step: Any, batch: Any) -> None:
        """Compiles a step, or loads the program of an equal step for other devices.

        An equal step has the same mesh sizes and plan, and was compiled by this process
        before.
        """
        self._rehearsals.compile(train_step, self._plan, batch)

    @property
    def _plan(self) -> Any:
        return self.choice.plan if self.choice is not None else None

    def _recorded(self) -> dict[str, Any]:
        """Returns the values (no arrays) of the checkpoint that will be restored.

        The values come from storage if the step is restored from storage, else from the
        agent.
        """
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
        """Restores state and items of the step that the leader chose.

        Returns None if the job starts from the initial state.

        Args:
            abstract_state: shape, dtype and sharding of each array of the state.

        Raises:
            ConfigError: the checkpoint was made by a config that differs in the model
                or another key that must be equal.
            ValueError: storage has other leaves than `abstract_state`.
            FileNotFoundError: storage does not have the step, or is not mounted.
            CorruptCopy: a copy in this host's memory is corrupt.
            CheckpointUnreadable: the step in storage cannot be read.
            TimeoutError: the agent sent no restore order in time.
            AgentGone: the agent has ended.
        """
        from dtft.checkpoint.managers import AgentCheckpointManager, RestoreArgs
        from dtft.checkpoint.state import (
            from_paths,
            to_paths,
            with_plain_keys,
            with_typed_keys,
        )
        from dtft.train.state_layout import layout_of

        layout = layout_of(abstract_state, self._slots, self._resolved)
        self._manager = AgentCheckpointManager(
            self._dialogue,
            slot=self.slot,
            chunk_bytes=self._start["chunk_bytes"],
            storage_directory=Path(self._start["storage_directory"]),
            cadence=self._checkpoint.cadence,
            automatic=self._checkpoint.interval == "auto",
            last=self._last_step,
        )
        self._manager.announce(layout)
        abstract = to_paths(abstract_state)
        wanted = RestoreArgs(abstract=with_plain_keys(abstract))
        logger.info("received the agent's restore order")
        self.at = "restore", self._restored_step()
        found = self._manager.restore(args=wanted)
        logger.info("restore is complete")
        if found is None:
            return None
        arrays, items = found
        saved = items.pop("config", self._resolved)
        refuse_other(saved, self._resolved, self.run_directory)
        self._step = items["step"]
        return from_paths(abstract_state, with_typed_keys(arrays, abstract)), items

    def take(self, message: dict[str, Any]) -> None:
        """Passes a message of the agent to the checkpoint manager.

        Does nothing before `restore`, which makes the manager.
        """
        if self._manager is not None:
            self._manager.take(message)

    def close(self) -> None:
        """Unmaps the arena (memory shared with the agent), if `restore` mapped it."""
        if self._manager is not None:
            self._manager.close()

    def await_peers(self) -> None:
        """Waits until the processes of all slots have compiled their steps.

        Without this wait, the first process that has compiled would wait for the others
        in the collective of the first step, which has a timeout of its own.

        Raises:
            TimeoutError: a process was not ready in time.
        """
        from dtft._jax_internals import meet

        name = f"dtft/ready/{self.generation}.{self.attempt}"
        limit_s = self._dialogue.deadline_s
        meet(name, list(self._slots), limit_s, self._dialogue.check)
        self._world.keys.hurry(limit_s)  # gloo connects in the first step

    def entered(self, phase: Phase, step: int) -> None:
        """Writes the phase and its start time to shared memory for the agent.

        Raises:
            LeaveOrdered: the agent has ordered this process to give up its slot.
        """
        with self._dialogue.condition:
            self._dialogue.check()
            self._board.enter(phase, time.monotonic_ns())
            self.at = phase, step

    def dispatched(self, step: int) -> None:
        """Reports to the agent that `step` is dispatched.

        Also reports that the step two steps earlier (`AHEAD`) is finished: the training
        loop waits for it before it dispatches `step`.

        Raises:
            LeaveOrdered: the agent has ordered this process to give up its slot.
            RuntimeError: a failure drill injects a failure at this step.
        """
        self._board.set("computing", step)
        self._dispatched_at.append(time.monotonic())
        self._clock.dispatched(step, self._dispatched_at[-1])
        if step - AHEAD > self._step:
            self._finished(step - AHEAD)
        if self._drill is not None:
            self._drill.strike(self.slot, step)

    def should_save(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`; equal on all hosts."""
        return self._manager.should_save(step)

    def takes(self, step: int) -> bool:
        """Always True: every snapshot goes to memory."""
        del step
        return True

    def await_turn(self, step: int) -> None:
        """Waits until the newest snapshot has its copies in other hosts' memory."""
        del step
        self._manager.wait_until_finished()

    def finished_step(self, step: int) -> None:
        """Reports to the agent that `step` is finished, before `save` is called for it.

        Also times the steps since the previous snapshot. The cost of snapshots is
        computed from these times.

        Raises:
            LeaveOrdered: the agent has ordered this process to give up its slot.
        """
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
        with self._dialogue.condition:
            self._dialogue.check()
            self._board.set("finished", step)
        self._step = step
        self._tell_running()

    def save(self, step: int, state: Any, items: dict[str, Any]) -> None:
        """Copies the state to this host's memory; agents copy it to other hosts."""
        from dtft.checkpoint.managers import SaveArgs
        from dtft.checkpoint.state import to_paths, with_plain_keys

        arrays = with_plain_keys(to_paths(state))
        args = SaveArgs(arrays=arrays, items=items, window=self._window)
        self._manager.save(step, args=args)

    def _tell_running(self) -> None:
        if not self._running:
            self._running = True
            self._world.keys.calm()
            logger.info(
                "step %d is finished; the training thread has compiled %d programs "
                "since it took the slot",
                *(self._step, _COMPILED.number - self._compiled),
            )
            read = self._manager.bytes_from_storage
            items = self.choice.items if self.choice is not None else {}
            self._dialogue.send(
                "running", step=self._step, bytes_from_storage=read, items=items
            )

    def should_stop(self, step: int) -> bool:
        """Whether the leader has ordered all hosts to stop at `step` or before."""
        stop_at = self._manager.stop_at()
        return stop_at is not None and step >= stop_at

    def finish(
        self, step: int, summary: dict[str, Any], state: Any, items: dict[str, Any]
    ) -> None:
        """Waits until the newest snapshot has its copies on other hosts.

        Also adds to `summary` the measured seconds of steps and of snapshots, and the
        interval of snapshots.
        """
        del step, state, items
        self._tell_running()
        self._manager.wait_until_finished()
        self.summary = summary
        summary |= speed(self._dispatched_at, self._manager.stalls_s)
        summary["interval"] = self._manager.interval()
        if (costs := self._seen.costs) is not None:
            summary |= {"quiet_step_s": costs.step_s, "snapshot_s": costs.snapshot_s}
        self._board.enter("", 0)


class _Compiled(threading.local):
    """Number of programs that the calling thread has compiled."""

    number = 0


_COMPILED = _Compiled()


def count_compilations() -> None:
    """Counts, from now on, the programs that each thread compiles.

    The count of the calling thread is `_COMPILED.number`. A program that is loaded from
    JAX's compilation cache does not count.
    """
    import jax

    def ended(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        _COMPILED.number += event.endswith("backend_compile_duration")

    def happened(event: str, **kwargs: str | int) -> None:
        del kwargs
        _COMPILED.number -= event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(ended)
    jax.monitoring.register_event_listener(happened)


def speed(dispatched_at: Sequence[float], stalls_s: Sequence[float]) -> dict[str, Any]:
    """Computes the mean seconds per step and the mean stall per snapshot in seconds.

    Args:
        dispatched_at: time at which each step was dispatched, in seconds.
        stalls_s: seconds for which each snapshot blocked the training thread.

    Returns:
        `step_s`: mean seconds per step, without the first 20 steps (`WARM_UP`).
        `late_step_s`: mean seconds per step over the last half of the steps.
        `snapshots`: number of snapshots. `stall_s`: mean of `stalls_s`. With 21 steps
        or fewer, `step_s` and `late_step_s` are missing. Without snapshots, `snapshots`
        and `stall_s` are missing.

    In the example 30 steps were dispatched, one each second.

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


FATAL = (ValueError, NonFinite)
"""Errors that would occur again on any host and therefore end the whole job."""
LAST_WORDS_S = 5.0
"""Seconds after which a failed trainer ends itself, if its agent has not ended it."""
ERROR_CHARACTERS = 2000
TRACEBACK_CHARACTERS = 8 << 10
"""Limits in characters of an exception's text and its traceback in a report; the log
has both in full."""


def main(arguments: Sequence[str]) -> None:
    """Waits for a slot, trains, reports the end or an error, and ends this process.

    Args:
        arguments: path or name of the config, and words that override its keys.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.WARNING)
    accept_requests()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
    _keep_stdout_for_people()
    config, *overrides = arguments
    experiment = load_experiment(config, overrides, prog="dtft.train.worker")
    link = AgentLink.connect(Path(os.environ["DTFT_AGENT_SOCKET"]), timeout_s=10.0)
    trainer = TrainerProcess(experiment, link, arguments)
    try:
        if experiment.cluster.devices_per_host > 0:
            # Before threads start, so that a planned step takes the predicted time.
            keep_freed(large=bool(experiment.plan))
        elif experiment.cluster.hot_swap:
            leave_gpu_collectives(os.environ)
        _at_low_priority(lambda: _import_everything(experiment))
        gc.freeze()  # so that a collection when a slot is given up takes milliseconds
        hello(link, {})
        logger.info("imports are done; waiting for a slot")
        trainer.serve()
    except (LinkClosed, AgentGone):
        os._exit(0)
    except FATAL as error:
        _log_error()
        told = {"message": str(error), "code": _code(error)}
        trainer.last_words("fatal", **told, **_evidence(error, trainer.at))
    except BaseException as error:  # SystemExit too: it also ends a trainer
        _log_error()
        trainer.last_words("failed", **failure(error, trainer.at))
        os._exit(1)
    os._exit(0)


def failure(error: BaseException, at: tuple[str, int]) -> dict[str, Any]:
    """Makes the fields of the message `failed`, which reports an exception.

    Args:
        error: the exception that has ended training, with its traceback.
        at: phase and step of the exception.

    Returns:
        `phase` and `step` of the exception, its type and text (`error`), the end of its
        `traceback`, and the path of this process's `log`.
    """
    phase, step = at
    text = "".join(traceback.format_exception(error))
    return {
        "step": step,
        "phase": phase,
        "error": _cut(f"{type(error).__name__}: {error}", ERROR_CHARACTERS),
        "traceback": text[-TRACEBACK_CHARACTERS:],
        "log": _log_path(),
    }


def _evidence(error: Exception, at: tuple[str, int]) -> dict[str, Any]:
    """Makes the fields of the message `fatal` that help to find an error's cause.

    The field `log` has the log's path. If the error may come from the user's code
    (model or data), the other fields of `failure`, such as the traceback, are added.
    Any error after the restore counts as such an error, except ConfigError and
    NonFinite, whose messages name the remedy.
    """
    of_user = at[0] not in ("start", "restore")
    if of_user and not isinstance(error, ConfigError | NonFinite):
        return failure(error, at)
    return {"log": _log_path()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _log_path() -> str:
    """Returns the path of the file that stderr writes to; "" if stderr is no file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


COMPUTING: frozenset[Phase] = frozenset({"compile", "step", "evaluate"})
"""Phases in which a training thread only computes. It can be left behind in these
phases, because its next call of the runtime raises LeaveOrdered."""
PATIENCE_S = 0.2
"""Seconds to wait, after the order to leave, for a training thread that still
computes."""


class LeaveOrdered(Exception):
    """The agent has ordered this process to give up its slot."""


class TrainingThread(threading.Thread):
    """The thread that trains in one slot, and the error that has ended it."""

    def __init__(
        self, train: Callable[[], None], condition: threading.Condition
    ) -> None:
        """Stores the arguments; `start` starts the thread.

        The thread runs `train`, and then wakes the threads that wait for `condition`.
        """
        super().__init__(name="training", daemon=True)
        self.has_ended = False
        self.error: BaseException | None = None
        self._train, self._condition = train, condition

    def run(self) -> None:
        """Calls `train`; stores its error in `error`, and sets `has_ended`."""
        try:
            self._train()
        except BaseException as error:  # SystemExit too: it also ends a trainer
            self.error = error
        with self._condition:
            self.has_ended = True
            self._condition.notify_all()


def _no_thread() -> TrainingThread | None:
    return None


class TrainerProcess:
    """Carries out the agent's orders in this process, one after another.

    Each slot that the process takes gets its own training thread. Another thread
    receives the messages. At the order to leave, the receiving thread interrupts the
    training thread and ends its collectives, because the training thread may be waiting
    in a collective or for the agent.

    A collective on CPU can hang although its connections are closed, because gloo loses
    a send that is the first to find a closed connection. Then the training thread is
    left behind: the process takes its next slot with another thread and another device.
    The thread that was left behind ends with an error after XLA's timeout of
    collectives. Its arrays stay in memory until then, so only one thread at a time may
    be left behind.
    """

    def __init__(
        self, experiment: Experiment, link: AgentLink, arguments: Sequence[str]
    ) -> None:
        """Stores the arguments; `serve` takes orders.

        Args:
            experiment: the experiment.
            link: connection to the agent.
            arguments: the words of the command line: the config, and its overrides.
        """
        self._experiment, self._arguments = experiment, arguments
        self._dialogue = Dialogue(link, experiment.timeouts.start)
        self._world: World | None = None
        self._rehearsals: Rehearsals | None = None
        self._runtime: AgentRuntime | None = None
        self._orders: list[dict[str, Any]] = []
        """Orders that wait to be carried out, oldest first."""
        self._is_leaving = False
        self._training: TrainingThread | None = None
        """The training thread of the slot, if there is a slot."""
        self._left_behind = _no_thread
        """Function that returns the thread that was left behind last, or None if there
        is none or it was freed. Such a thread's error holds the arrays of its slot."""

    def serve(self) -> None:
        """Carries out orders until the agent ends.

        Raises:
            AgentGone: the agent has ended.
            Exception: training has failed.
        """
        from dtft.train.rehearsal import Rehearsals
        from dtft.train.world import World

        self._world = world = World(
            lambda keys: self._dialogue.queue("keys", keys=keys)
        )
        self._rehearsals = Rehearsals(self._experiment, world, self._rehearsed)
        self._dialogue.start(self._take)
        while True:
            order = self._next()
            match order["op"]:
                case "start":
                    self._start(order)
                case "join":
                    world.join(order["world"])
                    self._dialogue.send("joined", world=world.number)
                case "leave":
                    self._leave(order)

    def _rehearsed(self, order: Mapping[str, Any]) -> None:
        assert self._world is not None
        told = {name: order[name] for name in ("turn", "formations")}
        with contextlib.suppress(AgentGone):
            self._dialogue.queue("rehearsed", world=self._world.number, **told)

    def _next(self) -> dict[str, Any]:
        with self._dialogue.condition:
            self._dialogue.condition.wait_for(
                lambda: self._orders or self._dialogue.gone
            )
            if not self._orders:
                raise AgentGone(self._dialogue.farewell)
            return self._orders.pop(0)

    def _take(self, message: dict[str, Any]) -> None:
        """Queues an order of the agent for `serve`; handles other messages at once.

        Other messages have keys of other processes, formations to compile steps for, or
        news for the checkpoint manager. The order `leave` also discards queued orders,
        interrupts training, ends this process's collectives, and stops compiling ahead.
        Called on the receiving thread, which holds the lock of the messages with the
        agent (`condition`).
        """
        op = message["op"]
        if op == "leave":
            self._orders = [message]  # an older order is void
            self._is_leaving = True
            if self._training is not None:
                self._dialogue.interrupt(self._training, LeaveOrdered)
            if self._world is not None and self._rehearsals is not None:
                self._world.leave()
                self._rehearsals.stop()
        elif op in ("start", "join"):
            self._orders.append(message)
        elif op == "keys" and self._world is not None:
            self._world.keys.take(message["keys"])
        elif op == "rehearse" and self._rehearsals is not None:
            self._rehearsals.begin(message)
        elif self._runtime is not None:
            self._runtime.take(message)

    def _start(self, order: dict[str, Any]) -> None:
        """Trains in a slot, until training ends or the slot is given up.

        Raises:
            Exception: training has failed, and the agent has not ordered to leave.
        """
        logger.info(
            "this trainer takes slot %d in generation %d",
            order["slot"],
            order["generation"],
        )
        condition = self._dialogue.condition
        training = TrainingThread(lambda: self.train(order), condition)
        with condition:
            if self._is_leaving:  # the order to leave is newer
                return
            self._training = training
        training.start()
        error = self._outcome(training)
        if error is None:
            return
        if not (isinstance(error, Exception) and self._survives(error)):
            raise error
        logger.info("this trainer gives up its slot: %s", _first_line(error))

    def _outcome(self, training: TrainingThread) -> BaseException | None:
        """Waits until the training thread has ended; returns its error, or None.

        After the order to leave, the thread has at least 0.2 s (`PATIENCE_S`) to end.
        If it is still running then, and the process may take its next slot beside it
        (`_can_leave_behind`), returns LeaveOrdered without waiting longer.

        Raises:
            AgentGone: the agent has ended, and training has not ended 5 s later
                (`LAST_WORDS_S`).
        """
        condition, dialogue = self._dialogue.condition, self._dialogue
        with condition:
            condition.wait_for(
                lambda: training.has_ended or self._is_leaving or dialogue.gone
            )
            while not (training.has_ended or dialogue.gone):
                condition.wait_for(lambda: training.has_ended, PATIENCE_S)
                if not training.has_ended and self._can_leave_behind():
                    self._left_behind = weakref.ref(training)
                    return LeaveOrdered("its thread still computes and is left behind")
            if not condition.wait_for(lambda: training.has_ended, LAST_WORDS_S):
                raise AgentGone(dialogue.farewell)
        training.join(LAST_WORDS_S)  # a thread that runs holds the arrays of its slot
        return training.error

    def _can_leave_behind(self) -> bool:
        """Whether the next slot may be taken while the old thread still computes.

        The slot may be taken if the training thread compiles, computes a step or
        evaluates, if the next formation (assignment of hosts to slots) uses other
        devices of this process, and if no other thread that was left behind still runs.
        The caller holds the lock of the messages with the agent (`condition`).
        """
        runtime, former = self._runtime, self._left_behind()
        return (
            (former is None or former.has_ended)
            and runtime is not None
            and runtime.may_be_left_behind
            and runtime.at[0] in COMPUTING
        )

    def _survives(self, error: Exception) -> bool:
        """Whether this process stays alive after a training error, for another slot.

        The process stays alive if the agent has ordered it to leave its slot. A broken
        collective or a corrupt copy can end training before this order arrives. The
        process then reports the error to the agent and waits for the order. If no order
        comes within the lease timeout plus 5 s (`LAST_WORDS_S`), or the agent has
        ended, the process exits with code 1. For other errors without an order the
        result is False.
        """
        from dtft.checkpoint.memory import CorruptCopy
        from dtft.train.world import broken_collective

        is_corrupt = isinstance(error, CorruptCopy)
        cause = error if is_corrupt else broken_collective(error)
        if not self._is_leaving and cause is not None:
            self._dialogue.send("failed", **failure(cause, self.at))
            limit_s = self._experiment.timeouts.lease + LAST_WORDS_S
            with self._dialogue.condition:
                self._dialogue.condition.wait_for(
                    lambda: self._is_leaving or self._dialogue.gone, limit_s
                )
            if not self._is_leaving:
                _log_error()
                os._exit(1)
        return self._is_leaving

    def _leave(self, order: dict[str, Any]) -> None:
        """Carries out the order `leave`: gives up the slot, and tells the agent.

        Also unmaps the arena, and frees the arrays of the training that has ended.
        Afterwards this process can start in a slot again.
        """
        if self._runtime is not None:
            self._runtime.close()
        with self._dialogue.condition:
            self._runtime, self._training, self._is_leaving = None, None, False
        if self._world is not None:
            self._world.left()
        # Not `send`: a step that was handed over before must not arrive after it.
        self._dialogue.queue("left_slot", at_once=True, number=order["number"])
        # Frees arrays of the former formation while the leader waits for other hosts.
        gc.collect()

    def last_words(self, op: str, **fields: Any) -> None:
        """Tells the agent that this process ends, and waits to be ended by it.

        Sends the message `ending`, then a message with the name `op` and the fields
        `fields`. Waits at most 5 s (`LAST_WORDS_S`), or until the agent is gone.
        """
        with contextlib.suppress(AgentGone):
            self._dialogue.queue("ending")
            self._dialogue.queue(op, **fields)
            with self._dialogue.condition:
                self._dialogue.condition.wait_for(
                    lambda: self._dialogue.gone, LAST_WORDS_S
                )

    @property
    def at(self) -> tuple[str, int]:
        """Current phase and step of training; ("start", 0) without a slot."""
        return self._runtime.at if self._runtime is not None else ("start", 0)

    def train(self, start: dict[str, Any]) -> None:
        """Trains in the slot that the order `start` assigns.

        Reports the end of training to the agent.
        """
        from dtft.config import Disk
        from dtft.train.loop import run
        from dtft.train.run_log import write_config

        usual = f"dtft agent {' '.join(self._arguments)}"
        resume = os.environ.get("DTFT_RESUME_COMMAND", usual)
        assert self._world is not None and self._rehearsals is not None
        runtime = AgentRuntime(
            *(self._experiment, self._dialogue, self._world, self._rehearsals),
            *(start, resume),
        )
        self._runtime = runtime
        if runtime.is_leading:
            where, config = runtime.run_directory, to_json(self._experiment)
            Disk(where).attempt(lambda: write_config(where, config, resume.split()))
        result = run(self._experiment, runtime)
        sys.stdout.flush()
        self._dialogue.send("finished", step=result.step, summary=runtime.summary)


def _keep_stdout_for_people() -> None:
    """Redirects file descriptor 1, where libraries such as gloo print, to stderr.

    Stderr is the log. `sys.stdout` still writes to the former stdout.
    """
    people = io.BufferedWriter(ForPeople(_without_waits(1)))
    sys.stdout = io.TextIOWrapper(people, line_buffering=True)
    os.dup2(2, 1)


def _without_waits(descriptor: int) -> int:
    """Returns a new descriptor of the same file, which does not block if possible.

    A pipe or terminal is opened again, with O_NONBLOCK. Set on `descriptor`, the flag
    would also hold for other processes, which share its open file. A regular
    file is only duplicated: opened again, it would be overwritten from its beginning.
    A file that cannot be opened again, such as a socket or another user's terminal, is
    only duplicated too. A write to it can block, if another process fills the buffer
    after `ForPeople` has found room in it.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    return os.dup(descriptor)


class ForPeople(io.RawIOBase):
    """A stdout stream that drops output that cannot be written now.

    So training goes on if the terminal is closed, or if the reader of stdout pauses.
    """

    def __init__(self, descriptor: int) -> None:
        """Stores the file descriptor that the stream writes to."""
        super().__init__()
        self._descriptor = descriptor
        self._is_dropping = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """The file descriptor of the stream."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, data: Any) -> int:
        """Writes at most PIPE_BUF bytes; returns how many were written.

        If writing fails or would wait, drops the bytes and returns their number. Logs a
        warning if the write before was not dropped.
        """
        content = memoryview(data)
        try:
            # A pipe that reports POLLOUT takes PIPE_BUF bytes without a wait.
            if any(events & select.POLLOUT for _, events in self._poll.poll(0)):
                written = os.write(self._descriptor, content[: select.PIPE_BUF])
                self._is_dropping = False
                return written
            reason = "nothing reads it"
        except OSError as error:
            reason = str(error)
        if not self._is_dropping:
            self._is_dropping = True
            logger.warning("stdout takes no output (%s); lines are left out", reason)
        return content.nbytes


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _log_error() -> None:
    traceback.print_exc()
    sys.stderr.flush()


def _code(error: Exception) -> int:
    return 1 if isinstance(error, NonFinite) else 2


def _at_low_priority(work: Callable[[], None]) -> None:
    """Runs `work` on a thread of low priority, and waits until it has ended.

    The low priority leaves the processor to trainers on the same machine that train
    meanwhile. Threads that `work` starts have the low priority, too.

    Raises:
        BaseException: what `work` has raised.
    """

    with ThreadPoolExecutor(1, initializer=lower_priority) as thread:
        thread.submit(work).result()


def _import_everything(experiment: Any) -> None:
    """Imports modules, makes datasets and configures JAX, before there is a slot.

    If `cluster.devices_per_host` is above 0, JAX uses only the CPU, with this number of
    devices; with `cluster.hot_swap` it has 16 times as many (`TURNS`), because each
    recovery needs devices that were not used before. JAX's compilation cache is the
    directory in DTFT_COMPILATION_CACHE, if the variable is set. Must not touch a
    device, because JAX must first connect to the job's other processes.
    """
    import jax

    import dtft.train.rehearsal  # noqa: F401
    from dtft import _jax_internals
    from dtft.checkpoint.managers import AgentCheckpointManager  # noqa: F401
    from dtft.data import make_datasets

    make_datasets(experiment.data, experiment.seed)
    count_compilations()

    if experiment.cluster.devices_per_host > 0:
        jax.config.update("jax_platforms", "cpu")
        turns = TURNS if experiment.cluster.hot_swap else 1
        devices = experiment.cluster.devices_per_host * turns
        jax.config.update("jax_num_cpu_devices", devices)
        _jax_internals.share_cached_programs()
    cache = os.environ.get("DTFT_COMPILATION_CACHE")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
