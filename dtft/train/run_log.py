"""The output of a run: banner, log lines, metrics files, samples, summary.

Decides wording and file formats, and has no effect on the computation. Only the leading
process writes, except that each process writes the ids of the samples it used.
"""

import functools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TextIO

import dtft
from dtft.config import Disk, Experiment
from dtft.parallel import TrainStep
from dtft.parallel.planning import PLAN_TIMES_FILE, append_past_run, past_run
from dtft.train.runtime import Runtime

Record = tuple[int, dict[str, float]]
"""Number of a step, and the values of its metrics by name."""


class RunLog:
    """Writes one process's output during a run. A context manager."""

    def __init__(
        self,
        experiment: Experiment,
        runtime: Runtime,
        train_step: TrainStep,
        *,
        start: int,
    ) -> None:
        """Stores the arguments; `start` is the step that the run continues from."""
        self._experiment, self._runtime = experiment, runtime
        self._train_step = train_step
        self._start = self._timed_step = start
        self._timed_at = self._began = time.monotonic()
        self._leading = runtime.is_leading
        self._metrics = self._samples = self._board = self._bar = None
        self._ended, self._completed = "", False
        self._step_s: list[float] = []
        self._disk = Disk(runtime.run_directory)

    def __enter__(self) -> Self:
        """Prints the banner, writes plan.json if there is a plan, and opens the files.

        Only the leading process does this, except that with `log.sample_ids` every
        process opens its file of sample ids.
        """
        log, runtime = self._experiment.log, self._runtime
        if self._leading:
            self._metrics = self._disk.opened(runtime.run_directory / "metrics.jsonl")
            if log.tensorboard and self._disk.has_room():
                self._board = _tensorboard(
                    runtime.run_directory / "tensorboard", self._start
                )
            if runtime.choice is not None:
                path, text = runtime.run_directory / "plan.json", runtime.choice.text
                self._disk.attempt(lambda: _replace(path, text))
            for line in banner(
                self._experiment, runtime, self._train_step, self._start
            ):
                print(line, flush=True)
            if sys.stdout.isatty():
                self._bar = _Bar(self._start, self._experiment.stop.steps)
        if log.sample_ids:
            folder = runtime.run_directory / "samples"
            name = f"slot{runtime.slot}-g{runtime.generation}-a{runtime.attempt}.jsonl"
            self._samples = self._disk.opened(folder / name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the files; the leading process prints the outcome.

        The outcome is the line that `finish` stored, if `finish` was called. If the run
        is not completed, the command to resume the run follows.
        """
        for resource in (self._bar, self._metrics, self._samples, self._board):
            if resource is not None:
                self._disk.attempt(resource.close)
        if self._leading:
            if self._ended:
                print(self._ended, flush=True)
            if not self._completed:
                print(f"resume with: {self._runtime.resume_command}", flush=True)

    def samples(self, step: int, rows: Sequence[int], ids: Sequence[int]) -> None:
        """Writes to a file which rows and samples this slot used for a step.

        Does nothing without `log.sample_ids`.

        Args:
            step: number of the step.
            rows: numbers of the rows, counted over all steps and epochs.
            ids: number of each row's sample in the training set.
        """
        if self._samples is None:
            return
        record = {
            "generation": self._runtime.generation,
            "attempt": self._runtime.attempt,
            "step": step,
            "slot": self._runtime.slot,
            "rows": list(rows),
            "ids": list(ids),
        }
        self._append(json.dumps(record), self._samples)

    def write(self, records: Sequence[Record]) -> None:
        """Writes metrics to metrics.jsonl, TensorBoard and the console.

        A record has the number of a step, and the values of its metrics by name. Writes
        the records of the step `stop.steps` and of steps that are multiples of
        `log.every`; drops other records. Only the leading process writes.
        """
        for step, values in records:
            if step == self._start + 1:  # compilation is over: time from here
                self._timed_step, self._timed_at = step, time.monotonic()
            last = step == self._experiment.stop.steps
            due = step % self._experiment.log.every == 0 or last
            if self._leading and due:
                self._write(step, values)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, and the measured step times of a plan.

        Also stores the line that `__exit__` prints. Does nothing in a process that does
        not lead.
        """
        if not self._leading:
            return
        seconds = round(time.monotonic() - self._began, 3)
        path = self._runtime.run_directory / "summary.json"
        text = dumps({**summary, "wall_s": seconds}, indent=1) + "\n"
        self._disk.attempt(lambda: path.write_text(text))
        self._completed = summary["completed"]
        self._calibration()
        stop, head = self._experiment.stop, "done"
        if not self._runtime.stores_its_end:
            head = "training ended"  # the job goes on: its last step is not stored yet
        elif not self._completed:
            head = "stopped early"
        if self._completed and summary["step"] < stop.steps:
            head = f"converged ({stop.metric} gained nothing in {stop.patience} steps)"
        values = [
            f"{name} {value:.4f}"
            for name, value in summary.items()
            if isinstance(value, float)
        ]
        self._ended = "  ".join([f"{head} at step {summary['step']}", *values])

    def _calibration(self) -> None:
        """Appends the plan's measured step times to a file in the run directory.

        The file is plan_times.jsonl. `dtft calibrate --runs` reads it to correct the
        planner's predictions. A plan that was predicted for other devices is not
        logged, because its times cannot be compared with the prediction.
        """
        choice, path = self._runtime.choice, self._runtime.run_directory
        if choice is None or not choice.is_predicted or not self._step_s:
            return
        run = past_run(choice.plan, self._train_step.mesh, self._step_s)
        if run is not None:
            self._disk.attempt(lambda: append_past_run(path / PLAN_TIMES_FILE, run))

    def _append(self, line: str, file: TextIO | None) -> None:
        if file is not None:
            self._disk.attempt(lambda: print(line, file=file, flush=True))

    def _write(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        steps = step - self._timed_step
        seconds = (now - self._timed_at) / steps if steps > 0 else None
        self._timed_step, self._timed_at = step, now
        if seconds:
            self._step_s.append(seconds)
        unit, per_step = throughput_unit(self._experiment)
        timing = (
            {"step_ms": 1e3 * seconds, f"{unit}_per_s": per_step / seconds}
            if seconds
            else {}
        )
        record = {
            "step": step,
            "generation": self._runtime.generation,
            "attempt": self._runtime.attempt,
            **values,
            **timing,
        }
        self._append(dumps(record), self._metrics)
        # On a full disk TensorBoard's writer thread ends, and later calls block.
        if self._board is not None and self._disk.has_room():
            for name, value in {**values, **timing}.items():
                self._board.add_scalar(name, value, step)
        line = log_line(
            step, self._experiment.stop.steps, values, seconds, unit, per_step
        )
        if self._bar is None:
            self._append(line, sys.stdout)
        else:
            self._bar.show(step, line)


def throughput_unit(experiment: Experiment) -> tuple[str, int]:
    """Returns "tokens" or "examples", and the number of these in one step.

    Tokens are counted if the data config's `tokens_per_example` is above 0.
    """
    tokens = experiment.data.tokens_per_example
    batch = experiment.data.global_batch
    return ("tokens", batch * tokens) if tokens else ("examples", batch)


def log_line(
    step: int,
    last: int,
    values: Mapping[str, float],
    seconds: float | None,
    unit: str,
    per_step: int,
) -> str:
    """Formats one log line; with `seconds` also step time, throughput and ETA.

    Args:
        step: number of the step.
        last: number of the run's last step.
        values: the values of the step's metrics by name.
        seconds: seconds per step; None if they were not measured.
        unit: "tokens" or "examples", the unit of the throughput.
        per_step: number of tokens or examples in one step.

    >>> values = {"loss": 0.41234, "learning_rate": 1e-3, "grad_norm": 0.83}
    >>> log_line(120, 1000, values, 0.0124, "examples", 96)
    'step 120/1000  loss 0.4123  lr 1.0e-03  grad 0.83  12.4 ms  7.74k ex/s  eta 0:11'
    """
    parts = [
        f"step {step}/{last}",
        f"loss {values['loss']:.4f}",
        f"lr {values['learning_rate']:.1e}",
        f"grad {values['grad_norm']:.3g}",
    ]
    if seconds:
        rate, short = per_step / seconds, {"examples": "ex"}.get(unit, unit)
        minutes, rest = divmod(round((last - step) * seconds), 60)
        parts.append(f"{1e3 * seconds:.1f} ms")
        parts.append(
            f"{rate / 1e3:.3g}k {short}/s" if rate >= 1e3 else f"{rate:.0f} {short}/s"
        )
        parts.append(f"eta {minutes}:{rest:02d}")
    return "  ".join(parts)


def banner(
    experiment: Experiment, runtime: Runtime, train_step: TrainStep, start: int
) -> list[str]:
    """Returns the lines printed before the first step.

    The lines have versions, devices, mesh, batch size, plan, number of parameters,
    bytes of state, run directory and resume command. `start` is the step that the run
    continues from; 0 for a new run.
    """
    mesh = train_step.mesh
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    begin = f"continues at step {start}" if start else "no checkpoint: starts at step 0"
    planned = [f"  {runtime.choice.words}"] if runtime.choice else []
    return [
        f"dtft run {experiment.name}  ({packages})",
        f"  slots {runtime.num_slots}, devices {mesh.size} ({kind}), mesh {sizes}, "
        f"global batch {experiment.data.global_batch}",
        *planned,
        f"  {train_step.num_parameters:,} parameters, "
        f"{train_step.state_bytes_per_device / 2**20:.2f} MiB of state per device",
        f"  run directory {runtime.run_directory}, {begin}",
        f"  resume with: {runtime.resume_command}",
    ]


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the versions of dtft, jax, jaxlib, flax and optax, by package name."""
    from importlib.metadata import version

    names = ("jax", "jaxlib", "flax", "optax")
    return {"dtft": dtft.__version__, **{name: version(name) for name in names}}


def write_config(run_directory: Path, resolved: str, command: Sequence[str]) -> None:
    """Writes config.json and command.json; makes the run directory if it is missing.

    config.json gets the text `resolved`, the config as JSON. command.json gets the
    words of the command line, and the versions of dtft, jax, jaxlib, flax and optax.
    """
    record = {"command": list(command), "versions": versions()}
    run_directory.mkdir(parents=True, exist_ok=True)
    _replace(run_directory / "config.json", resolved + "\n")
    _replace(run_directory / "command.json", json.dumps(record, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically, so that a full disk leaves no truncated file.

    Does nothing if the file already has this text.
    """
    if not path.exists() or path.read_text() != text:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(path)


def dumps(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Formats a record as JSON; top-level NaN and infinities become strings.

    >>> dumps({"loss": float("nan"), "step": 3})
    '{"loss": "nan", "step": 3}'
    """
    safe = {
        key: str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in record.items()
    }
    return json.dumps(safe, indent=indent)


def _tensorboard(folder: Path, start: int) -> Any:
    from tensorboardX import SummaryWriter

    # Hides entries of a lost attempt after the restored step.
    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)


class _Bar:
    """A progress bar on a terminal; log lines scroll above it.

    Only one bar is shown at a time. A new bar closes the bar of an earlier run in this
    process, even if the thread of that run still computes.
    """

    _shown: "ClassVar[_Bar | None]" = None

    def __init__(self, start: int, total: int) -> None:
        from rich.progress import Progress

        if _Bar._shown is not None:
            _Bar._shown.close()
        _Bar._shown = self
        self._progress = Progress(transient=True)
        self._task = self._progress.add_task("training", total=total, completed=start)
        self._progress.start()

    def show(self, step: int, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()
