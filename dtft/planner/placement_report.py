"""What a placement says of itself: tables for a terminal, a page with the schedule.

Decides only what is shown; numbers are the placement's own. Must not know how it was
found.
"""

from collections import Counter

from dtft.planner import gantt, page
from dtft.planner.placement_result import Placement
from dtft.planner.wording import Section, change, percent, seconds, size


def sections(placement: Placement) -> tuple[Section, ...]:
    """Everything, as tables."""
    return (
        summary(placement),
        nodes(placement),
        others(placement),
        classes(placement),
        sent(placement),
    )


def summary(placement: Placement) -> Section:
    """How long a step takes, and how much faster any could be."""
    rows = [
        ("step", seconds(placement.step_s)),
        ("one microbatch", seconds(placement.makespan_s)),
        ("microbatches", str(placement.microbatches)),
        ("no placement is below", seconds(placement.bound_s)),
        ("gap to that", percent(placement.gap)),
        ("found by", placement.how),
    ]
    if placement.idle:
        words = f"left idle, as a step is not faster with them: {_list(placement.idle)}"
    else:
        words = "every node has tasks"
    return Section(
        title=f"Placement of {len(placement.tasks)} tasks on "
        f"{len(placement.nodes)} nodes",
        columns=("", ""),
        rows=tuple(rows),
        notes=(words, *placement.notes),
    )


def nodes(placement: Placement) -> Section:
    """What each node has to do and to hold."""
    counts = Counter(placement.node_of)
    rows = []
    for node, (name, busy) in enumerate(
        zip(placement.nodes, placement.busy_s, strict=True)
    ):
        share = busy / placement.makespan_s if placement.makespan_s else 0.0
        used, has = placement.memory_bytes[node], placement.capacity_bytes[node]
        weight = f"{placement.weights[node]:g}"
        row = (name, weight, str(counts[node]), seconds(busy), percent(share))
        rows.append((*row, f"{size(used)} of {size(has)}"))
    columns = ("node", "weight", "tasks", "busy", "of a microbatch", "memory")
    return Section(title="Nodes", columns=columns, rows=tuple(rows))


def others(placement: Placement) -> Section:
    """Baselines, and placements without the slower nodes."""
    rows = [
        (f"without {name}", seconds(step), change(step, placement.step_s))
        for name, step in placement.dropped.items()
    ]
    for name in ("one node", "contiguous", "random"):
        if name not in placement.baselines:
            rows.append((name, "cannot run: kernels, pins or memory", ""))
            continue
        step = placement.baselines[name]
        rows.append((name, seconds(step), change(step, placement.step_s)))
    return Section(
        title="Other placements",
        columns=("placement", "step", "beside this one"),
        rows=tuple(rows),
    )


def classes(placement: Placement) -> Section:
    """Which type of node is fastest for which class of tasks, and which has them."""
    types = list(dict.fromkeys(placement.types))
    on = Counter(
        (placement.kinds[task], placement.types[node])
        for task, node in enumerate(placement.node_of)
    )
    rows = []
    for kind in dict.fromkeys(placement.kinds):
        speeds = placement.speeds.get(kind, {})
        best = min(speeds, key=lambda name: speeds[name], default="")
        cells = (
            f"{seconds(speeds[name])} ({on[kind, name]})"
            if name in speeds
            else f"- ({on[kind, name]})"
            for name in types
        )
        rows.append((kind, *cells, best))
    return Section(
        title="Classes of tasks by type of node",
        columns=("class", *types, "fastest"),
        rows=tuple(rows),
        notes=(
            "seconds of all tasks of the class on one such node, and in brackets how "
            "many are placed there; -: not all of them have a kernel there, or a pin "
            "forbids it",
        ),
    )


def sent(placement: Placement) -> Section:
    """What goes between which nodes, in one microbatch."""
    found: dict[tuple[int, int], list[float]] = {}
    for one in placement.transfers:
        row = found.setdefault((one.source, one.target), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += one.num_bytes
        row[2] += one.end_s - one.start_s
    rows = tuple(
        (placement.nodes[a], placement.nodes[b], f"{row[0]:g}", size(row[1]),
         seconds(row[2]))
        for (a, b), row in sorted(found.items())
    )  # fmt: skip
    return Section(
        title="What is sent",
        columns=("from", "to", "values", "bytes", "link taken"),
        rows=rows,
        notes=() if rows else ("nothing",),
    )


def html(placement: Placement) -> str:
    """A page with the schedule and all tables; it needs no network and no scripts."""
    first, *rest = sections(placement)
    parts = [
        page.section(first, level=1),
        page.block("Schedule of one microbatch", gantt.svg(placement)),
        *map(page.section, rest),
    ]
    return page.page(first.title, parts)


def _list(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
