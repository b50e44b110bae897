"""Who waits where for one late process, with each trigger of gradient reduction.

Starts four processes over gloo on this machine (`triggers_worker.py`), one of which is
late with the last gradient of its backward pass. Not a measure of speed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.elastic.processes import die_with_parent, free_port

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = 4
Events = dict[str, dict[str, float]]
"""Trigger -> event -> seconds; see `triggers_worker.py`."""
Gradients = dict[str, list[Any]]
"""Trigger -> reduced gradients, nested lists [L, D, D]."""
HEADER = (
    "trigger",
    "process",
    "own gradients ready [ms]",
    "layers reduced before the late one is ready",
    "reduction commanded [ms]",
    "all reduced [ms]",
    "waits [ms]",
    "waits for",
)


def record(delay_s: float, deadline_s: float) -> tuple[list[Events], list[Gradients]]:
    """Events and gradients of every process in order of rank; the last one is late.

    Args:
        delay_s: how long the late process waits once the others can do no more.
        deadline_s: for everything.

    Raises:
        RuntimeError: a process failed; with its last lines.
        TimeoutError: not all ended by the deadline.
    """
    end = time.monotonic() + deadline_s
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as directory:
        service = _start("dtft.elastic.coordination")
        processes = [service]
        try:
            assert service.stdin is not None
            service.stdin.write(f"{address} {NUM_PROCESSES} 20\n")
            service.stdin.flush()
            arguments = (str(NUM_PROCESSES), address, directory, str(delay_s))
            for rank in range(NUM_PROCESSES):
                module = "experiments.triggers_worker"
                processes.append(_start(module, str(rank), *arguments))
            answers = [_answer(process, end) for process in processes[1:]]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()
    return [a["events"] for a in answers], [a["gradients"] for a in answers]


def rows_of(worlds: list[Events]) -> list[tuple[object, ...]]:
    """One row per trigger and process; the clock starts with the step."""
    rows: list[tuple[object, ...]] = []
    for trigger in worlds[0]:
        begun = min(events[trigger]["begun"] for events in worlds)
        late = worlds[-1][trigger]["ready 0"]
        for rank, events in enumerate(worlds):
            own = events[trigger]
            early = [e for e, t in own.items() if e.startswith("reduced") and t < late]
            commanded = own.get("commanded")
            ended = commanded or own["done"]
            rows.append(
                (
                    trigger,
                    f"{rank} (late)" if rank == len(worlds) - 1 else rank,
                    _ms(own["ready 0"] - begun),
                    len(early),
                    "" if commanded is None else _ms(commanded - begun),
                    _ms(own["done"] - begun),
                    _ms(ended - own["ready 0"]),
                    "the command" if commanded else "its partners in the reduction",
                )
            )
    return rows


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        preexec_fn=die_with_parent,
    )


def _answer(process: subprocess.Popen[str], end: float) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"process {process.pid} did not end in time") from None
    if process.returncode:
        raise RuntimeError(f"process {process.pid} failed: {errors[-2000:]}")
    return json.loads(output.splitlines()[-1])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _figure(worlds: list[Events]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots(1, len(worlds[0]), sharey=True)
    for trigger, ax in zip(worlds[0], axes, strict=True):
        begun = min(events[trigger]["begun"] for events in worlds)
        for rank, events in enumerate(worlds):
            own = {name: time - begun for name, time in events[trigger].items()}
            waiting_to = own.get("commanded", own["done"])
            ax.barh(rank, own["ready 0"] - own["begun"], left=own["begun"], color="C0")
            width = waiting_to - own["ready 0"]
            ax.barh(rank, width, left=own["ready 0"], color="C3", alpha=0.5)
            for layer in (2, 1, 0):
                if f"reduced {layer}" in own:
                    ax.plot(own[f"reduced {layer}"], rank, "k|", markersize=14)
            ax.plot(own["done"], rank, "k.")
        ax.set(title=trigger, xlabel="s", yticks=range(len(worlds)))
    axes[0].set_ylabel("process (3 is late)")
    figure.suptitle("blue: own work; red: waiting; bars: a layer reduced; dot: done")
    return figure


def main() -> None:
    """Records, prints the table, and writes it unless `--quick`."""
    import report

    quick = "--quick" in sys.argv[1:]
    worlds, _ = record(delay_s=0.2 if quick else 1.0, deadline_s=120)
    rows = rows_of(worlds)
    if quick:
        print("\n".join(report.table(HEADER, rows)))
        return
    report.write(
        "triggers",
        title="Who waits where for one late process",
        command="python experiments/triggers.py",
        header=HEADER,
        rows=rows,
        figure=_figure(worlds),
        notes=(
            "Four processes over gloo, three stacked layers. The last process is late "
            "with its gradient of layer 0, by 1 s after the others can do no more. "
            "Times are since the first process began the step. host: the hosts wait, "
            "outside of any reduction, and the reduction is commanded when all are "
            "done. device: each device waits inside the one reduction. layer: the "
            "layers whose gradients exist everywhere are reduced already; only layer "
            "0 is waited for.",
        ),
    )


if __name__ == "__main__":
    main()
