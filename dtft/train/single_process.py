"""`dtft train`: training in one process on all local devices.

Handles signals. Saves checkpoints to storage only, without copies in memory.
"""

import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.managers import Phase
from dtft.config import (
    ConfigError,
    Experiment,
    diff_configs,
    load_experiment,
    refuse,
    refuse_other,
    to_json,
)
from dtft.elastic.stop_signals import heard_signals
from dtft.parallel import check_input
from dtft.train.devices import devices_of
from dtft.train.run_directory import (
    config_to_continue,
    make_directory,
    only_run_in,
    with_run_dir,
)

if TYPE_CHECKING:
    from dtft.parallel.planning import PlanChoice


def train(config: str, overrides: Sequence[str]) -> int:
    """Runs an experiment in this process.

    Args:
        config: path or name of the config.
        overrides: words of the command line that override keys of the config.

    Returns:
        The exit code: 0 if the run is done or was stopped by a signal, 1 if it failed.

    Raises:
        SystemExit: with code 2 for wrong input, after a message on stderr; with code 0
            for `--help`.
    """
    asked = load_experiment(config, overrides, "dtft train")
    experiment = with_run_dir(asked)
    from dtft.train.loop import run
    from dtft.train.stop import NonFinite

    made = "" if asked.log.run_dir else experiment.log.run_dir
    resume = resume_command(config, overrides, made)
    runtime: LocalRuntime | None = None
    try:
        directory = Path(experiment.log.run_dir)
        storage = experiment.checkpoint.storage_path(directory)
        with only_run_in(directory, storage):
            runtime = LocalRuntime(experiment, resume)
            with runtime.signals():
                run(experiment, runtime)
    except ConfigError as error:
        refuse(error)
    except (NonFinite, UnreadableCheckpoint) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        where = runtime.crash_text() if runtime is not None else ""
        print(f"error: {type(error).__name__}: {error}{where}", file=sys.stderr)
        return 1
    return 0


def resume_command(config: str, overrides: Sequence[str], made: str) -> str:
    """Returns the command line that continues a run.

    The result has the words of the original command line, and `made` as the run
    directory.

    Args:
        config: path or name of the config.
        overrides: keys and values that override the config, as typed.
        made: the run directory, if neither config nor overrides name one; else empty.

    >>> resume_command("x", ["--seed", "1"], "runs/x-1")
    'dtft train x --seed 1 --log.run_dir runs/x-1'
    """
    words = ["--log.run_dir", made] if made else []
    return shlex.join(["dtft", "train", config, *overrides, *words])


class UnreadableCheckpoint(RuntimeError):
    """A checkpoint exists but cannot be loaded; nothing was changed."""


class LocalRuntime:
    """The `Runtime` of a single process, which saves checkpoints to storage only."""

    slot = 0
    num_slots = 1
    hosts: Mapping[int, str] = {0: "here"}
    generation = 0
    attempt = 0
    is_leading = True
    stores_its_end = True

    def __init__(self, experiment: Experiment, resume_command: str = "") -> None:
        """Finds the devices; makes the run directory with config.json and command.json.

        Args:
            experiment: the experiment; `log.run_dir` is the run directory.
            resume_command: the command line that continues this run, for messages.

        Raises:
            ConfigError: the experiment does not fit the devices, or the directory
                has checkpoints that this config cannot continue, or cannot be written
                to.
        """
        from dtft.checkpoint.storage import StorageTier

        self._devices = devices_of(experiment)
        count = len(self._devices)
        check_input(experiment, hosts=1, devices_per_host=count, memory_tier=False)
        self._experiment = experiment
        self.run_directory = Path(experiment.log.run_dir)
        self._checkpoints = experiment.checkpoint.storage_path(self.run_directory)
        self.resume_command = resume_command
        self.choice: PlanChoice | None = None
        self._stopping = False
        self._saved = -1
        self._resolved = to_json(experiment)
        self._refuse_other_config()
        make_directory(self.run_directory)
        make_directory(self._checkpoints, "checkpoint.storage_directory")
        from dtft.train.run_log import write_config

        write_config(self.run_directory, self._resolved, sys.argv)
        self._at: tuple[Phase, int] = "start", 0
        self._storage = StorageTier(
            self._checkpoints, max_to_keep=experiment.checkpoint.storage_keep
        )

    def mesh(self, experiment: Experiment) -> Any:
        """Chooses the plan, and makes the plan's mesh.

        If the config's `plan` is empty, makes the experiment's mesh.

        Raises:
            ConfigError: the requested plan cannot be found, or cannot run here.
            ValueError: the experiment's mesh does not fit the devices.
        """
        from dtft.parallel import make_mesh
        from dtft.parallel.planning import choose, planned_mesh

        step = self._storage.latest_step() if experiment.plan else None
        items = {} if step is None else self._storage.items(step)
        try:
            self.choice = choose(experiment, self._devices, items)
            if self.choice is not None:
                return planned_mesh(self.choice.plan, self._devices)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return make_mesh(experiment.mesh, self._devices)

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]] | None:
        """Restores the newest checkpoint in storage; None if storage has none.

        Returns the state, and the checkpoint's values that are not arrays.

        Args:
            abstract_state: shape, dtype and sharding of each array of the state.

        Raises:
            UnreadableCheckpoint: a checkpoint exists but cannot be loaded.
            ConfigError: the checkpoint was made by a config that differs in the model
                or another key that must be equal.
        """
        from dtft.checkpoint.state import (
            from_paths,
            to_paths,
            with_plain_keys,
            with_typed_keys,
        )

        step = self._storage.latest_step()
        if step is None:
            return None
        try:
            abstract = to_paths(abstract_state)
            arrays, items = self._storage.restore(step, with_plain_keys(abstract))
        except Exception as error:
            raise UnreadableCheckpoint(
                f"the checkpoint of step {step} cannot be loaded: {error} To start "
                "again, set --log.run_dir to a new directory."
            ) from error
        saved = items.pop("config", self._resolved)
        refuse_other(saved, self._resolved, self.run_directory)
        self._saved = step
        arrays = with_typed_keys(arrays, abstract)
        return from_paths(abstract_state, arrays), items

    def rehearsed(self, mesh: Any) -> None:
        """Returns None: nothing is compiled ahead."""
        del mesh

    def compile(self, train_step: Any, batch: Any) -> None:
        """Compiles a step for the batches of this run."""
        train_step.lower(batch).compile()

    def await_peers(self) -> None:
        """Returns at once: there is no other process."""

    def entered(self, phase: Phase, step: int) -> None:
        """Stores phase and step for the error text of a crash."""
        self._at = phase, step

    def crash_text(self) -> str:
        """Returns the text that follows a crash's error.

        The text has the phase and step of the crash, the path of the newest stored
        checkpoint (or why storage cannot be listed), and the resume command.
        """
        phase, step = self._at
        kept = "no checkpoint was stored"
        try:
            stored = self._storage.latest_step()
        except OSError as error:
            kept = f"{self._checkpoints} cannot be listed ({error})"
        else:
            if stored is not None:
                kept = f"the newest checkpoint is {self._checkpoints / str(stored)}"
        return f" (in phase {phase} of step {step}); {kept}; resume with: " + (
            self.resume_command
        )

    def dispatched(self, step: int) -> None:
        """Does nothing: this run has no agent."""

    def should_save(self, step: int) -> bool:
        """Whether `step` is a multiple of `checkpoint.interval`; True for `auto`."""
        interval = self._experiment.checkpoint.interval
        return interval == "auto" or step % interval == 0

    def takes(self, step: int) -> bool:
        """Whether `step` is a multiple of `checkpoint.storage_interval`.

        False if that interval is 0.
        """
        interval = self._experiment.checkpoint.storage_interval
        return interval > 0 and step % interval == 0

    def await_turn(self, step: int) -> None:
        """Does nothing: there is no snapshot in memory to wait for."""

    def finished_step(self, step: int) -> None:
        """Does nothing: this run has no agent."""

    def save(self, step: int, state: Any, items: dict[str, Any]) -> None:
        """Saves the state to storage at multiples of `checkpoint.storage_interval`."""
        if self.takes(step):
            self._store(step, state, items)

    def should_stop(self, step: int) -> bool:
        """Whether Ctrl-C, SIGTERM or SIGHUP has arrived, which `signals` handles."""
        return self._stopping

    def finish(
        self, step: int, summary: dict[str, Any], state: Any, items: dict[str, Any]
    ) -> None:
        """Saves the state unless it is stored already; closes storage after all writes.

        A state of step 0 is not saved.
        """
        if step != self._saved and step > 0:
            self._store(step, state, items)
        self._storage.wait_until_finished()
        self._storage.close()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles Ctrl-C, SIGTERM and SIGHUP in the body of the context manager.

        After a signal, the run ends at the next step for which `should_save` is True.
        The first Ctrl-C restores the former handler of Ctrl-C, so that a second Ctrl-C
        ends the run at once. The same holds for SIGTERM, but not for SIGHUP, because a
        closing terminal sends several. An ignored SIGHUP (nohup) stays ignored.
        """
        before = {number: signal.getsignal(number) for number in heard_signals()}

        def ask(number: int, frame: FrameType | None) -> None:
            del frame
            self._stopping = True
            if number != signal.SIGHUP:
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _store(self, step: int, state: Any, items: dict[str, Any]) -> None:
        from dtft.checkpoint.state import to_paths, with_plain_keys

        self._storage.wait_until_finished()  # raises an error of the last save
        arrays = with_plain_keys(to_paths(state))
        if self._devices[0].platform == "cpu":
            # The next step donates these buffers. Orbax copies an accelerator's buffers
            # before it returns, but reads the CPU's buffers while it writes.
            arrays = {path: array.copy() for path, array in arrays.items()}
        self._storage.save(step, arrays, {**items, "config": self._resolved})
        self._saved = step

    def _refuse_other_config(self) -> None:
        saved = config_to_continue(self._experiment, self.run_directory)
        for line in diff_configs(saved, self._resolved) if saved else ():
            if not line.startswith("log."):
                print(f"config changed since the last start: {line}")
