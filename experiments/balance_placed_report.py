"""The table and the figure of `balance_placed.py`: waits and divisions per round.

Must not know how anything was measured.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import report
from experiments.balance_placed_nodes import Tasks
from experiments.balance_placed_ways import moved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("round", "divided", "division", "weights", "max wait ms", "mean wait ms")
HEADER += ("step ms", "gain", "moved operators then (from to)")
COLOURS = {"forward": "tab:purple", "backward": "tab:cyan", "update": "0.6"}
Rows = Sequence[Mapping[str, Any]]


def show(found: Mapping[str, Any], *, write: bool) -> None:
    """Prints the rounds; `write`: also writes the table and the figure."""
    rows = [row for name in found["results"] for row in _rows(_of(found, name))]
    words = [
        *(_ended(name, one, found) for name, one in found["results"].items()),
        f"{len(found['splits'])} contiguous splits of "
        f"{sum(found['splits'][0]['layers'])} unlike layers were measured in turn: "
        f"those that should take at most {found['near']} of the best's step, by what "
        "the nodes were found to take; the best of them once more, interleaved with "
        "both divisions; medians of steps. "
        f"{found['microbatches']} microbatches, rounds of {found['steps']} steps; a "
        f"change has to pay in a run of {found['run_steps']} steps.",
        "Operators are numbered as the program has them (layer n: 4n matmul, 4n + 1 "
        "tanh, 4n + 2 matmul, 4n + 3 add; then the loss). Nodes are processes with "
        f"{', '.join(map(str, found['shares']))} of a core (cgroup v1 quota, period "
        f"10 ms); from the round marked slowed on the first has {found['slowed']}. "
        "Waits are medians over the steps of a round: what of a step a node does not "
        "compute, the pipeline's fill and drain included.",
    ]
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


def _of(found: Mapping[str, Any], way: str) -> list[Mapping[str, Any]]:
    return [one for one in found["rounds"] if one["way"] == way]


def _rows(rounds: Rows) -> list[tuple[str, ...]]:
    then = [moved(a["nodes"], b["nodes"]) for a, b in pairwise(rounds)]
    return [
        (
            f"{index + 1}{' slowed' if one['slowed'] else ''}",
            one["way"],
            one["division"],
            " : ".join(f"{weight:.2f}" for weight in one["weights"]),
            *(f"{1e3 * one[k]:.0f}" for k in ("max_wait_s", "mean_wait_s", "step_s")),
            f"{one['gain']:.1%}",
            text,
        )
        for index, (one, text) in enumerate(zip(rounds, [*then, ""], strict=True))
    ]


def _ended(name: str, one: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    costs = [r["change_s"] for r in _of(found, name) if r["changed"]]
    took = f"{min(costs):.1f} to {max(costs):.1f} s" if costs else "nothing"
    return (
        f"Divided by {name}, in the end {one['division']}: "
        f"{1e3 * one['step_s']:.0f} ms a step, {one['over_best']:.3f} of the best "
        f"contiguous split ({' + '.join(map(str, one['best']))}: "
        f"{1e3 * one['best_step_s']:.0f} ms). "
        f"A change took {took} (compiling and moving state, at full speed). After "
        f"{one['steps']} steps and {len(costs)} changes no array of the parameters "
        f"differs by more than {one['off']:.1e} (relative norm) from the undivided run."
    )


def _figure(found: Mapping[str, Any]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 11))
    names = list(found["results"])
    grid = figure.add_gridspec(
        6, len(names), height_ratios=(2.5, 2, 1, 1, 1, 1), hspace=0.9, wspace=0.12
    )
    for column, name in enumerate(names):
        rounds = _of(found, name)
        axes = figure.add_subplot(grid[0, column])
        _waits(axes, rounds)
        axes.set_title(f"divided by {name}", size=11)
        _strips(figure.add_subplot(grid[1, column]), rounds)
        for place, (title, step) in enumerate(found["gantt"][name].items()):
            axes = figure.add_subplot(grid[place + 2, column])
            _gantt(axes, title, step)
        axes.set_xlabel("ms; numbers are microbatches")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    return figure


def _waits(axes: Any, rounds: Rows) -> None:
    numbers = range(1, len(rounds) + 1)
    for key, label in (("max_wait_s", "longest wait"), ("mean_wait_s", "mean wait")):
        axes.plot(numbers, [1e3 * one[key] for one in rounds], "o-", label=label)
    axes.plot(numbers, [1e3 * one["step_s"] for one in rounds], "k:", label="step")
    slowed = sum(not one["slowed"] for one in rounds)
    axes.axvline(slowed + 0.5, color="0.7")
    axes.text(slowed + 0.55, 10, "node 0 slowed", size=8)
    most = max(1e3 * one["step_s"] for one in rounds)
    axes.set(xlabel="round", ylabel="ms", ylim=(0, 1.25 * most))
    axes.legend(frameon=False, ncols=3, fontsize=8)


def _strips(axes: Any, rounds: Rows) -> None:
    """A row for each round: the node of each operator, by colour and number."""
    table = np.array([one["nodes"] for one in rounds])
    axes.imshow(table, aspect="auto", cmap="Set2", vmin=0, vmax=7)
    for row, nodes in enumerate(table):
        for operator, node in enumerate(nodes):
            axes.text(operator, row, node, ha="center", va="center", size=5)
    axes.set(xlabel="operator, coloured by its node", ylabel="round")
    axes.set_yticks(range(len(rounds)), range(1, len(rounds) + 1), size=7)


def _gantt(axes: Any, title: str, step: Sequence[Tasks]) -> None:
    for node, tasks in enumerate(step):
        for name, microbatch, _, start, end in tasks:
            colour = COLOURS.get(name.split()[0], COLOURS["update"])
            bar = [(1e3 * start, 1e3 * (end - start))]
            axes.broken_barh(bar, (node - 0.4, 0.8), color=colour, ec="white", lw=0.4)
            if microbatch is not None:
                middle = 5e2 * (start + end)
                axes.text(middle, node, microbatch, ha="center", va="center", size=5)
    axes.set_title(f"a step: {title}", size=9, loc="left")
    axes.set(yticks=range(len(step)), ylabel="node", xlim=(0, None))
    axes.invert_yaxis()
