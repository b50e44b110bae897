"""Who waits where for one late process, with each trigger of gradient reduction.

Starts four processes over gloo on this machine (`triggers_worker.py`), one of which is
late with the last gradient of its backward pass. Not a measure of speed.
"""

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from dtft.elastic.processes import free_port
from experiments import report
from experiments.worlds import run_world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    with tempfile.TemporaryDirectory() as directory:
        answers = run_world(
            "experiments.triggers_worker",
            [(directory, str(delay_s))] * NUM_PROCESSES,
            address=f"127.0.0.1:{free_port()}",
            deadline_s=deadline_s,
            environment={"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        )
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
    parser = argparse.ArgumentParser(description="Who waits where for a late process.")
    parser.add_argument("--quick", action="store_true", help="nothing is kept")
    quick = parser.parse_args().quick
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
