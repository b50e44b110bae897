"""The table and the figure of `balance_placed.py`: waits per round, steps as they ran.

Must not know how anything was measured.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments import report
from experiments.balance_placed_nodes import Tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("round", "layers", "weights", "max wait ms", "mean wait ms", "step ms")
HEADER += ("gain", "changed")


def show(found: dict[str, Any], *, write: bool) -> None:
    """Prints the rounds; `write`: also writes the table and the figure."""
    rows = [
        (
            f"{index + 1}{' slowed' if one['slowed'] else ''}",
            " + ".join(map(str, one["counts"])),
            " : ".join(f"{weight:.2f}" for weight in one["weights"]),
            *(f"{1e3 * one[k]:.0f}" for k in ("max_wait_s", "mean_wait_s", "step_s")),
            f"{one['gain']:.1%}",
            "yes" if one["changed"] else "",
        )
        for index, one in enumerate(found["rounds"])
    ]
    result = found["result"]
    ended, best = result["layers"], result["best"]
    words = (
        f"In the end {' + '.join(map(str, ended))} layers: "
        f"{1e3 * result['step_s']:.0f} ms a step, {result['over_best']:.3f} of the "
        f"best of {len(found['splits'])} contiguous splits "
        f"({' + '.join(map(str, best))}: {1e3 * result['best_step_s']:.0f} ms), "
        f"medians of {found['repeats']}, all splits in turn.",
        f"{sum(ended)} unlike layers, {found['microbatches']} microbatches, rounds of "
        f"{found['steps']} steps. Nodes are processes with "
        f"{', '.join(map(str, found['shares']))} of a core (cgroup v1 quota, period "
        f"10 ms); from the round marked slowed on the first has {found['slowed']}. "
        "Waits are medians over the steps of a round: what of a step a node does not "
        "compute, the pipeline's fill and drain included.",
    )
    if not write:
        print("\n".join([*report.table(HEADER, rows), *words]))
        return
    report.write(
        "balance_placed",
        title="Load balance of a placed model over unlike nodes",
        command="python -m experiments.balance_placed",
        header=HEADER,
        rows=rows,
        figure=_figure(found),
        notes=words,
    )


def _figure(found: dict[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8))
    grid = figure.add_gridspec(5, 1, height_ratios=(3, 1, 1, 1, 1), hspace=0.9)
    axes = figure.add_subplot(grid[0])
    numbers = range(1, len(found["rounds"]) + 1)
    for key, label in (("max_wait_s", "longest wait"), ("mean_wait_s", "mean wait")):
        waits = [1e3 * one[key] for one in found["rounds"]]
        axes.plot(numbers, waits, "o-", label=label)
    steps = [1e3 * one["step_s"] for one in found["rounds"]]
    axes.plot(numbers, steps, "k:", label="step")
    slowed = sum(not one["slowed"] for one in found["rounds"])
    axes.axvline(slowed + 0.5, color="0.7")
    axes.text(slowed + 0.55, 10, "node 0 slowed", size=8)
    axes.set(xlabel="round", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False, ncols=3, fontsize=8)
    for place, (title, step) in enumerate(found["gantt"].items()):
        _gantt(figure.add_subplot(grid[place + 1]), title, step)
    return figure


def _gantt(axes: Any, title: str, step: Sequence[Tasks]) -> None:
    colours = {"forward": "tab:blue", "backward": "tab:orange"}
    for node, tasks in enumerate(step):
        for name, microbatch, _, start, end in tasks:
            colour = colours.get(name.split()[0], "0.6")
            bar = [(1e3 * start, 1e3 * (end - start))]
            axes.broken_barh(bar, (node - 0.4, 0.8), color=colour, ec="white", lw=0.4)
            if microbatch is not None:
                middle = 5e2 * (start + end)
                axes.text(middle, node, microbatch, ha="center", va="center", size=6)
    axes.set_title(title, size=9, loc="left")
    axes.set(yticks=range(len(step)), ylabel="node", xlim=(0, None))
    axes.invert_yaxis()
