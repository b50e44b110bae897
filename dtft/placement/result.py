"""The node and times of each task, as JSON, tables, HTML page and pictures."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dtft.planner import serialization
from dtft.planner.report import COLORS, block_html, legend, page_html, section_html
from dtft.planner.wording import Section, change, percent, seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The placement: which node runs what and when, with its JSON form.


SCHEMA = 1
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledTask:
    """The node of one task, and the task's start and end.

    `task` and `node` are indices into `Placement.tasks` and `Placement.nodes`. Times
    are in seconds from the start of the microbatch.
    """

    task: int
    node: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One value that is sent from one node to another.

    `source` and `target` are indices into `Placement.nodes`. Times are in seconds from
    the start of the microbatch.
    """

    value: int
    """Number of the value in `Graph.values`; without a program, in `Tasks.passed`."""
    source: int
    target: int
    num_bytes: float
    start_s: float
    end_s: float
    is_gradient: bool = False
    """Whether the transfer carries the gradient of the value, in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Node and times of each task, and seconds of a step.

    Equal inputs give equal placements.
    """

    nodes: tuple[str, ...]
    """Name of each node in the cluster's order, such as `h100:0` (type and number)."""
    types: tuple[str, ...]
    """Device type of each node; the node's own name if types are unknown."""
    platforms: tuple[str, ...] = ()
    """Platform of each node (`DeviceType.platform`); empty if types are unknown."""
    tasks: tuple[str, ...]
    """Name of each task. Backward tasks follow all forward tasks, in reverse order."""
    kinds: tuple[str, ...]
    """Kind of each task: an `OperatorKind`, `loop` or `block`."""
    node_of: tuple[int, ...]
    """Number of each task's node, an index into `nodes`."""
    operators: tuple[tuple[int, int], ...] = ()
    """First operator of each forward task, and the operator after its last. Empty if
    the tasks are of no program."""
    schedule: tuple[ScheduledTask, ...]
    """Tasks of one microbatch, ordered by start."""
    transfers: tuple[Transfer, ...]
    """Transfers of one microbatch, ordered by start. An argument is sent from the node
    of its first reader to the nodes of its other readers."""
    makespan_s: float
    """Seconds from the start of one microbatch to the end of its last task."""
    step_s: float
    """Seconds of a step: each microbatch after the first adds the busy seconds of the
    busiest node or port."""
    bound_s: float
    """Lower bound of `step_s` over all placements, in seconds."""
    microbatches: int = 1
    weights: tuple[float, ...]
    """Given weight of each node, by which the seconds of its tasks were divided."""
    baselines: Mapping[str, float]
    """Step seconds of each baseline: `one node` (the fastest node that can run all
    tasks), `contiguous` (stretches of the program), `random` (a random node for each
    task). Baselines that cannot run are left out."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Step seconds of placements on only the faster nodes, each task where it ends
    first. The keys are the names of the nodes left out, such as "cpu:0, cpu:1"."""
    speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Map from a kind of tasks to a map from a node type to the seconds of all these
    tasks on the fastest node of the type. A type without a node that can run all of
    them is left out."""
    memory_bytes: tuple[int, ...]
    """Peak bytes of each node: values that it made or received, and arguments."""
    capacity_bytes: tuple[int, ...]
    how: str
    """Text on the rule that found the placement, such as `everything on one node`."""
    notes: tuple[str, ...] = ()
    """Notes on pins of operators that the program lacks."""

    @property
    def gap(self) -> float:
        """Relative excess of `step_s` over `bound_s`: 0.1 is 10% more.

        The step time of an optimal placement lies between `bound_s` and `step_s`.
        The gap is 0 if `bound_s` is 0.
        """
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the nodes that have no task."""
        used = set(self.node_of)
        return tuple(n for at, n in enumerate(self.nodes) if at not in used)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds for which each node runs tasks, for one microbatch."""
        busy = [0.0] * len(self.nodes)
        for run in self.schedule:
            busy[run.node] += run.end_s - run.start_s
        return tuple(busy)

    @property
    def of_operator(self) -> tuple[int, ...]:
        """Number of the node (an index into `nodes`) of each operator of the program.

        () if the tasks are of no program.
        """
        forward = zip(self.operators, self.node_of, strict=False)
        return tuple(
            node for (start, stop), node in forward for _ in range(start, stop)
        )

    def table(self) -> str:
        """Returns all tables of the placement as text."""
        from dtft.planner import wording

        return wording.text(sections(self))

    def html(self) -> str:
        """Returns an HTML page with a picture of the schedule and all tables."""
        return html(self)

    def save_picture(self, path: str | Path, title: str = "") -> None:
        """Draws the schedule to a file, with a lane for each node.

        Received values are at the lower edge of a lane.

        Args:
            path: file to write, with the ending `.png`, `.svg` or `.pdf`.
            title: text above the picture.

        Raises:
            ValueError: the path has another ending, or its folder does not exist.
        """
        _check_picture(Path(path))
        figure([(title, self)]).savefig(path, dpi=120)

    def to_json(self) -> str:
        """Returns the placement as versioned JSON; equal placements give equal text."""
        return serialization.write_versioned(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """Reads a placement from the text of `to_json`.

        Raises:
            ValueError: the text is no JSON, has another version, or is no placement.
        """
        return serialization.read_versioned(
            text,
            Placement,
            name="placement",
            schema=SCHEMA,
            again="Make the placement again.",
            check=_check,
        )


def _check_picture(path: Path) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(
            f"path={str(path)!r} ends in {path.suffix!r}. Allowed: "
            f"{', '.join(_PICTURES)}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"path={str(path)!r}: there is no folder {str(path.parent)!r}. Make it "
            "first, or choose another."
        )


def _check(placement: Placement) -> None:
    """Raises a ValueError if the fields of a placement do not fit together.

    Checks the lengths of fields, that all nodes and tasks exist, and that the ranges in
    `operators` follow each other without gaps.
    """
    num_nodes, num_tasks = len(placement.nodes), len(placement.tasks)
    by_node = ("types", "weights", "memory_bytes", "capacity_bytes")
    by_node += ("platforms",) if placement.platforms else ()
    lengths = {name: num_nodes for name in by_node}
    lengths |= {"kinds": num_tasks, "node_of": num_tasks, "schedule": num_tasks}
    for name, length in lengths.items():
        if len(getattr(placement, name)) != length:
            raise ValueError(
                f"{name} has {len(getattr(placement, name))} entries instead of "
                f"{length}"
            )
    used = {
        "node_of": (placement.node_of, num_nodes),
        "node in schedule": ([run.node for run in placement.schedule], num_nodes),
        "task in schedule": ([run.task for run in placement.schedule], num_tasks),
        "source or target in transfers": (
            [node for one in placement.transfers for node in (one.source, one.target)],
            num_nodes,
        ),
    }
    for name, (numbers, count) in used.items():
        for number in numbers:
            if type(number) is not int or not 0 <= number < count:
                raise ValueError(f"{name} has {number!r}; allowed: 0 to {count - 1}")
    stops = [0]
    for start, stop in placement.operators:
        if start != stops[-1] or type(stop) is not int or stop <= start:
            raise ValueError(f"operators has {[start, stop]} after {stops[-1]}")
        stops.append(stop)
    if len(placement.operators) > num_tasks:
        raise ValueError(f"operators has more entries than the {num_tasks} tasks")


# Pictures, as inline SVG and as a matplotlib figure: a lane per node, tasks by kind,
# received values below.


_LANE, _THIN, _GAP, _WIDTH, _LETTER = 18, 5, 10, 720, 6.6
_SENT = "received"
_LEAST = 0.3
"""Least width of a bar in SVG units; narrower bars are merged with neighbours of the
same color (`_joined`)."""

Bar = tuple[int, str, float, float, str]
"""A bar: lane, kind (which sets the color), begin and end in seconds, and tooltip."""


def bars(placement: Placement, least_s: float = 0.0) -> list[Bar]:
    """Makes a bar for each task and each received value of the schedule.

    A bar shorter than `least_s` seconds is merged with its neighbour of the same color
    in the same lane, if the gap between them is shorter than `least_s` too.
    """
    tasks = (
        (run.node, placement.kinds[run.task], run.start_s, run.end_s,
         f"{placement.tasks[run.task]}, {seconds(run.end_s - run.start_s)}")
        for run in placement.schedule
    )  # fmt: skip
    received = (
        (one.target, _SENT, one.start_s, one.end_s,
         f"{'gradient of ' * one.is_gradient}value {one.value}, "
         f"{size(one.num_bytes)} from {placement.nodes[one.source]}")
        for one in placement.transfers
    )  # fmt: skip
    return [*_joined(tasks, least_s), *_joined(received, least_s)]


def svg(placement: Placement) -> str:
    """Returns the schedule as inline SVG, after a legend of its colors."""
    total = placement.makespan_s or 1.0
    begin = 16 + _LETTER * max(map(len, placement.nodes))
    scale = _WIDTH / total
    names = _names(placement)
    parts = []
    for lane, node in enumerate(placement.nodes):
        top = lane * (_LANE + _THIN + _GAP)
        parts.append(
            f'<text x="{begin - 8:.1f}" y="{top + _LANE - 5}" text-anchor="end">'
            f"{escape(node)}</text>"
            f'<rect x="{begin:.1f}" y="{top}" width="{_WIDTH}" height="{_LANE}" '
            'fill="#f4f4f4"/>'
        )
    for lane, name, start, end, words in bars(placement, _LEAST / scale):
        is_sent = name == _SENT
        top = lane * (_LANE + _THIN + _GAP) + (_LANE if is_sent else 0)
        parts.append(
            f'<rect x="{begin + start * scale:.2f}" y="{top}" '
            f'width="{max((end - start) * scale, _LEAST):.2f}" '
            f'height="{_THIN if is_sent else _LANE}" fill="{_color(names, name)}">'
            f"<title>{escape(words)}</title></rect>"
        )
    height = len(placement.nodes) * (_LANE + _THIN + _GAP) + 14
    parts += [
        f'<text x="{begin:.1f}" y="{height - 2}">0</text>',
        f'<text x="{begin + _WIDTH:.1f}" y="{height - 2}" text-anchor="end">'
        f"{escape(seconds(total))}</text>",
    ]
    width = begin + _WIDTH + 8
    return legend(names) + (
        f'<svg width="{width:.0f}" height="{height}" role="img" '
        f'viewBox="0 0 {width:.0f} {height}">{"".join(parts)}</svg>'
    )


def figure(placements: Sequence[tuple[str, Placement]]) -> "Figure":
    """Draws schedules one below the other, on the same time axis.

    Args:
        placements: pairs of a title and a placement.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = sum(len(one.nodes) + 1 for _, one in placements)
    made = Figure(figsize=(9, 0.45 * lanes + 0.8), layout="constrained")
    axes = made.subplots(len(placements), 1, squeeze=False, sharex=True)[:, 0]
    names = list(dict.fromkeys(n for _, one in placements for n in _names(one)))
    longest = max(one.makespan_s for _, one in placements) or 1.0
    for ax, (title, one) in zip(axes, placements, strict=True):
        for lane, name, start, end, _ in bars(one, longest / 3000):
            low, high = (0.38, 0.12) if name == _SENT else (-0.35, 0.7)
            span = [(1e3 * start, 1e3 * (end - start))]
            ax.broken_barh(span, (lane + low, high), color=_color(names, name))
        ax.set_yticks(range(len(one.nodes)), one.nodes)
        ax.set_ylim(len(one.nodes) - 0.4, -0.6)
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, 1e3 * longest)
    keys = [Patch(color=_color(names, name), label=name) for name in names]
    made.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False)
    return made


def _names(placement: Placement) -> list[str]:
    return list(dict.fromkeys((*placement.kinds, _SENT)))


def _color(names: Sequence[str], name: str) -> str:
    return COLORS[list(names).index(name) % len(COLORS)]


def _joined(some: Iterable[Bar], least_s: float) -> Iterable[Bar]:
    """Merges consecutive bars of one lane and color if one is shorter than `least_s`.

    Bars with a gap of `least_s` seconds or more are not merged.
    """
    last: dict[int, Bar] = {}
    for bar in some:
        lane, name, start, end, words = bar
        before = last.get(lane)
        if before is None:
            last[lane] = bar
            continue
        _, its_name, its_start, its_end, its_words = before
        is_short = min(end - start, its_end - its_start) < least_s
        if is_short and name == its_name and start - its_end < least_s:
            many = its_words if its_words.endswith(" more") else f"{its_words} and more"
            last[lane] = lane, name, its_start, max(end, its_end), many
            continue
        yield before
        last[lane] = lane, name, start, end, words
    yield from last.values()


def sections(placement: Placement) -> tuple[Section, ...]:
    """Returns all tables of a placement, the summary first."""
    return (
        summary(placement),
        nodes(placement),
        others(placement),
        classes(placement),
        sent(placement),
    )


def summary(placement: Placement) -> Section:
    """Makes the table of a step's seconds, their lower bound, and the relative gap."""
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
    """Makes the table of the tasks, busy seconds and peak memory of each node."""
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
    """Makes the table of the step seconds of other placements that were tried.

    These are the placements without the slower nodes (`Placement.dropped`), and the
    baselines (`Placement.baselines`).
    """
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
    """Makes the table of the kinds of tasks, with a column for each node type.

    A task's kind is that of its operator, such as `matmul`, or `loop` or `block`. A
    cell has the seconds that the fastest node of the type would take for all tasks of
    the kind, and in brackets how many of these tasks are placed on nodes of the type.
    The last column names the type with the least seconds.
    """
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
    """Makes the table of what each node sends to each other node in one microbatch.

    A row has the number of values, their bytes, and the seconds of their transfers.
    """
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
    """Makes an HTML page with the schedule and all tables. It loads no other files."""
    first, *rest = sections(placement)
    parts = [
        section_html(first, level=1),
        block_html("Schedule of one microbatch", svg(placement)),
        *map(section_html, rest),
    ]
    return page_html(first.title, parts)


def _list(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
