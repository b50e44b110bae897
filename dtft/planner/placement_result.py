"""The placement: which node runs what and when, with its JSON form.

Values only. Decides nothing; must not know how a placement is found (`placement`),
shown (`placement_report`) or run (`dtft.train`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtft.planner import versioned

SCHEMA = 1
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One task in the schedule."""

    task: int
    node: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One value that goes from a node to another."""

    value: int
    """Its number in `Graph.values`; of tasks that are no program's, their number."""
    source: int
    target: int
    num_bytes: float
    start_s: float
    end_s: float
    is_gradient: bool = False
    """Whether it is a gradient of the value, on its way back."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Tasks on nodes, and what comes of it; the same for the same question."""

    nodes: tuple[str, ...]
    """Such as `h100:0`: type and number within the type, in the cluster's order."""
    types: tuple[str, ...]
    """Of each node."""
    platforms: tuple[str, ...] = ()
    """Of each node, as `DeviceType.platform`; empty where that is not known."""
    tasks: tuple[str, ...]
    """Name of each task; backward tasks come after all forward ones, in reverse."""
    kinds: tuple[str, ...]
    """What each task is: `graph.Kind`, `loop` or `block`."""
    node_of: tuple[int, ...]
    """Node of each task."""
    operators: tuple[tuple[int, int], ...] = ()
    """Of each forward task its first operator and the one after its last."""
    schedule: tuple[Run, ...]
    """By begin."""
    transfers: tuple[Transfer, ...]
    """By begin. An argument goes from the node that has it to others that read it."""
    makespan_s: float
    """Of one microbatch."""
    step_s: float
    """Of all: each further one takes what the fullest node, or port, needs for one."""
    bound_s: float
    """No placement's step is faster."""
    microbatches: int = 1
    weights: tuple[float, ...]
    """Of each node, as given: its seconds were divided by it."""
    baselines: Mapping[str, float]
    """Seconds of a step: `one node` (the fastest that can run everything),
    `contiguous`, `random`; those that cannot run are left out."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step of earliest finish without the slower nodes, by these."""
    speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Kind of tasks to type of node to the seconds of all of them on one such node;
    types that lack a kernel for one are left out."""
    memory_bytes: tuple[int, ...]
    """Most that each node holds at a time: values, arguments and what is received."""
    capacity_bytes: tuple[int, ...]
    how: str
    """Which rule found it."""
    notes: tuple[str, ...] = ()
    """What was asked for and is not in the program."""

    @property
    def gap(self) -> float:
        """How much slower than the bound, as a share of it; the optimum is between."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def idle(self) -> tuple[str, ...]:
        """Nodes that have no task."""
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
        """Node of each operator of the program."""
        forward = zip(self.operators, self.node_of, strict=False)
        return tuple(
            node for (start, stop), node in forward for _ in range(start, stop)
        )

    def table(self) -> str:
        """What it says of itself, as text."""
        from dtft.planner import placement_report, wording

        return wording.text(placement_report.sections(self))

    def html(self) -> str:
        """A page with the schedule drawn and all tables."""
        from dtft.planner import placement_report

        return placement_report.html(self)

    def save_picture(self, path: str | Path, title: str = "") -> None:
        """Draws the schedule: a lane for each node, what it receives below.

        Args:
            path: of a picture: `.png`, `.svg`, `.pdf`.
            title: stands above it.

        Raises:
            ValueError: another ending, or a folder that does not exist.
        """
        from dtft.planner import gantt

        _check_picture(Path(path))
        gantt.figure([(title, self)]).savefig(path, dpi=120)

    def to_json(self) -> str:
        """The placement as JSON, versioned; equal placements give equal text."""
        return versioned.write(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """The placement of `to_json`.

        Raises:
            ValueError: no JSON, another version, or not a placement.
        """
        return versioned.read(
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
    """Refuses numbers of nodes and tasks that there are not."""
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
