"""Pure functions that assign hosts to slots and choose the number of slots.

A formation is one assignment of hosts to the job's slots, with one trainer per slot.
`fill_slots` assigns hosts to slots; `seat` does so when the number of slots may change.
`next_epoch` gives a formation its number, (generation, attempt). An incarnation names
an agent process and one of its registrations (see `process_of`). A replica group is the
smallest set of hosts that together hold whole copies of the model: one copy, or as many
copies as one host holds. `choose_slots` chooses the number of slots of a formation,
`size_for` computes the number of slots for a requested number of replicas, and
`resized` computes the state's layout for another number of replicas.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtft.checkpoint.replication import Spread, new_specs
from dtft.checkpoint.state import Layout, Leaf, MeshLayout

Source = Literal["memory", "storage", "init"]


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """The record under which a host is registered in the store."""

    host: str
    """Name, unique in the job."""
    address: str
    """host:port at which the host's agent accepts connections from other agents."""
    incarnation: str
    """PROCESS.NUMBER. PROCESS differs for every start of the agent, NUMBER for every
    registration of one agent process."""
    joined_ns: int
    """Wall-clock time of joining in nanoseconds. Of equally suitable spares, the first
    to join is taken."""
    pid: int
    """Process id of the agent, for messages."""
    domain: str = ""
    """Label of the host's failure domains, such as "power=p1,rack=r7"; "" for none."""
    process: int = -1
    """Index of the user's process that is attached to the agent; -1 for none."""
    attached_ns: int = 0
    """Wall-clock time in nanoseconds at which the process attached, which identifies
    the process; 0 for none."""
    leaving: bool = False
    """Whether the host is to leave the job as soon as the job can do without it."""

    def replaces(self, other: "HostRecord") -> bool:
        """Whether this record is of another agent process, which joined after `other`.

        Both records must have the same host name.
        """
        another = process_of(self.incarnation) != process_of(other.incarnation)
        return another and self.joined_ns > other.joined_ns

    def to_json(self) -> str:
        """Encodes the record as JSON; inverse of `from_json`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "HostRecord":
        """Parses the text of `to_json`.

        Raises:
            ValueError, TypeError: the text is not a record.
        """
        record = cls(**json.loads(text))
        for it in dataclasses.fields(cls):
            value = getattr(record, it.name)
            if type(value) is not it.type:
                raise ValueError(f"{it.name}={value!r} is not of type {it.type}")
        return record


@dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """The host of each slot, and the source of the restored state."""

    generation: int
    """Number that increases when the number of slots, the host of a slot, or the agent
    process of such a host changes."""
    attempt: int
    """Number of the attempt to form the job within this generation, from 1. It
    increases if the same hosts start again in the same slots."""
    slots: tuple[str, ...]
    """The host of each slot."""
    incarnations: tuple[str, ...]
    """The incarnation (see `HostRecord`) of each slot's host."""
    source: Source
    """Where the state comes from: host memory, storage, or a new initial state."""
    step: int
    """The restored step; 0 for the initial state."""
    rung: int | None
    """None for the first assignment of a job. 0 if the trainers of the remaining hosts
    keep their processes and the state is in memory. Otherwise where the recovery found
    the state: 1 in each host's own memory, 2 also in peers' memory, 3 in storage or the
    initial state. With `AgentConfig.share` "divided", where a host copies only some of
    its slices, the rung is 1 if every slot's host has copies of the step."""
    reason: str
    """Why the slots were assigned anew, for messages."""
    spread: Spread = field(default_factory=Spread)
    """The failure domains over which the slots' copies are spread."""
    asked_slots: int = 0
    """The number of slots that a user has requested; 0 without a request. Kept here in
    case the store loses the request."""
    world: tuple[int, int, int] = (0, 0, 0)
    """(number, size, turn) of the world: the JAX processes that are connected with each
    other, which can outlast an assignment. `number` identifies the world, `size` is the
    number of processes that it has room for, and `turn` counts its assignments from 0.
    See `leader.world_plan.WorldPlan`."""
    places: tuple[int, ...] = ()
    """The index, in the world, of each slot's process; () if an older version wrote the
    assignment."""
    service: tuple[str, str] = ("", "")
    """Host and address (host:port) of the world's coordination service; empty if each
    process has a service of its own."""

    @functools.cached_property
    def slot_of(self) -> dict[str, int]:
        """Maps the host of each slot to the slot's number."""
        return {host: slot for slot, host in enumerate(self.slots)}

    @property
    def epoch(self) -> tuple[int, int]:
        """The pair (generation, attempt); larger for every later assignment.

        The generation grows when a slot gets another host or agent process. The attempt
        counts the starts with the same hosts, from 1.
        """
        return self.generation, self.attempt

    def to_json(self) -> str:
        """Encodes the assignment as JSON; inverse of `from_json`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "SlotAssignment":
        """Parses the text of `to_json`."""
        raw = json.loads(text)
        return cls(
            **{
                **raw,
                "slots": tuple(raw["slots"]),
                "incarnations": tuple(raw["incarnations"]),
                "world": tuple(raw["world"]),
                "places": tuple(raw.get("places", ())),
                "service": tuple(raw.get("service", ("", ""))),
                "spread": Spread(
                    **{**raw["spread"], "domains": tuple(raw["spread"]["domains"])}
                ),
            }
        )


def process_of(incarnation: str) -> str:
    """Returns the part of an incarnation that names the agent process.

    An incarnation is PROCESS.NUMBER; PROCESS is returned. After its lease has expired,
    an agent process registers under the next NUMBER. Before its first registration, the
    incarnation is PROCESS alone.

    >>> process_of("9f3c.2"), process_of("9f3c")
    ('9f3c', '9f3c')
    """
    return incarnation.partition(".")[0]


Choose = Callable[
    [Sequence[HostRecord | None], Sequence[HostRecord]], tuple[HostRecord | None, ...]
]
"""Takes the host of each slot (None if empty) and the spare hosts in order of
preference; returns the host of each slot, None if no spare is left for it."""


def fill_slots(
    previous: Sequence[tuple[str, str]],
    hosts: Collection[HostRecord],
    num_slots: int,
    choose: Choose | None = None,
) -> tuple[HostRecord | None, ...]:
    """Keeps every live host in its slot and fills empty slots with spares.

    A host whose agent was started again since `previous` counts as a spare.

    Args:
        previous: previous (host, incarnation) of each slot; empty for a new job.
        hosts: the live hosts.
        num_slots: number of slots of a new job; ignored if `previous` is not empty.
        choose: called with the host of each slot (None for an empty slot) and the
            sorted spares; returns the host of each slot. None: empty slots get the
            spares in order.

    Returns:
        The host of each slot; None where no host is left. Spares are sorted by the time
        at which they joined; in a new job, by length of the name, then by name.
    """
    live = {(record.host, process_of(record.incarnation)): record for record in hosts}
    entries = [(host, process_of(incarnation)) for host, incarnation in previous]
    kept = [live.get(entry) for entry in entries] or [None] * num_slots
    taken = {record.host for record in kept if record}
    spares = sorted(
        (record for record in hosts if record.host not in taken),
        key=lambda record: (
            (record.joined_ns if previous else len(record.host)),
            record.host,
        ),
    )
    if choose is not None:
        return choose(kept, spares)
    queue = iter(spares)
    return tuple(record or next(queue, None) for record in kept)


def next_epoch(
    previous: SlotAssignment | None, filled: Sequence[HostRecord]
) -> tuple[int, int]:
    """Computes (generation, attempt) of a new assignment of hosts to slots.

    The attempt increases by 1 if every slot keeps its host and agent process.
    Otherwise the generation increases by 1, and the attempt becomes 1. The first
    assignment of a job (`previous` is None) gets (1, 1).

    Args:
        previous: the assignment before the new one.
        filled: the record of each slot's host in the new assignment.

    >>> next_epoch(None, [])
    (1, 1)
    """
    if previous is None:
        return 1, 1
    old = zip(previous.slots, map(process_of, previous.incarnations), strict=True)
    new = [(record.host, process_of(record.incarnation)) for record in filled]
    if new == list(old):
        return previous.generation, previous.attempt + 1
    return previous.generation + 1, 1


REPLICA_AXIS = "replica"
"""Name of the mesh axis along which jobs grow and shrink. The slots of a replica have
consecutive numbers."""


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """Limits a job's number of replicas: to a minimum, and to divisors of its batch."""

    min_replicas: int = 0
    """Fewest replicas with which the job continues when it has lost hosts and has no
    spare for them. 0: the job waits for a host instead."""
    global_batch: int = 0
    """Number of rows of the batch of one step, which must be divisible by the number of
    replicas times `ReplicaGroups.parts`. 0: the batch does not limit the number of
    replicas."""
    batch_axes: tuple[str, ...] = (REPLICA_AXIS,)
    """Mesh axes along which rows are divided."""
    row_parts: int = 1
    """Number of equal parts, such as microbatches, into which the rows of each position
    on the batch axes are divided."""


@dataclass(frozen=True, kw_only=True)
class WantedSize:
    """The number of replicas, and of slots, that a user has requested for the job."""

    replicas: int
    slots: int

    def to_json(self) -> str:
        """Encodes the size as JSON; inverse of `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "WantedSize":
        """Parses the text of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class ReplicaGroups:
    """The numbers of replicas and slots of a job, and its replica groups.

    A replica group is the smallest set of hosts that hold whole copies of the model.
    The rows (examples of the batch) of one replica are divided into `parts` equal
    parts: among devices, and into microbatches. In the example, the group is two
    replicas on one slot.
    >>> ReplicaGroups(replicas=4, slots=2, parts=1).group  # every host has two replicas
    (2, 1)
    """

    replicas: int
    slots: int
    parts: int
    """Number of equal parts into which the rows of one replica are divided: over the
    other batch axes, and by `SizeLimits.row_parts`."""

    @classmethod
    def of(cls, layout: Layout, limits: SizeLimits) -> "ReplicaGroups":
        """Reads these numbers from the layout of a running job's state.

        The number of parts of a replica's rows is the product of two numbers: the sizes
        of the mesh axes that divide the batch, without the replica axis, and the number
        of parts, such as microbatches, of each data slot's rows (`limits.row_parts`).
        """
        mesh = layout.mesh
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        others = [axis for axis in limits.batch_axes if axis != REPLICA_AXIS]
        return cls(
            replicas=sizes.get(REPLICA_AXIS, 1),
            slots=mesh.num_slots,
            parts=limits.row_parts * math.prod(sizes.get(axis, 1) for axis in others),
        )

    @property
    def group(self) -> tuple[int, int]:
        """Number of replicas and number of slots of one replica group.

        These are the job's numbers of replicas and slots, divided by their greatest
        common divisor.
        """
        common = math.gcd(self.replicas, self.slots)
        return self.replicas // common, self.slots // common

    def fits(self, replicas: int, limits: SizeLimits) -> bool:
        """Whether a job may have this many replicas.

        The replicas must fill whole replica groups. The number of rows of a step
        (`limits.global_batch`) must be divisible by the number of replicas times the
        number of parts of a replica's rows; 0 rows fit always. Does not check the
        smallest allowed number of replicas.
        """
        whole = replicas >= 1 and replicas % self.group[0] == 0
        return whole and limits.global_batch % (replicas * self.parts) == 0

    def slots_of(self, replicas: int) -> int:
        """Returns the number of slots for this many replicas.

        In the example, a replica has 6 / 2 = 3 slots.

        >>> ReplicaGroups(replicas=2, slots=6, parts=3).slots_of(3)
        9
        """
        return replicas * self.slots // self.replicas

    def replicas_on(self, slots: int) -> int:
        """Returns how many whole replicas fit on this many slots."""
        return slots * self.replicas // self.slots


def size_for(replicas: int, layout: Layout, limits: SizeLimits) -> WantedSize:
    """Returns the size of the job with `replicas` replicas, if the job may have it.

    Args:
        replicas: the requested number of replicas.
        layout: layout of the running job's state (its mesh and arrays).
        limits: the job's size limits.

    Returns:
        The number of replicas, and the number of slots for them.

    Raises:
        ValueError: the number is below the minimum (which the message has), it does not
            fit the replica groups or the batch (the message has the nearest numbers
            that do), or the state cannot be resized.
    """
    groups = ReplicaGroups.of(layout, limits)
    if replicas < max(1, limits.min_replicas):
        lowest = max(1, limits.min_replicas)
        raise ValueError(
            f"--replicas {replicas} is below {lowest}, the least that this job may "
            f"have (its --min-replicas is {limits.min_replicas}). Ask for {lowest} or "
            "more."
        )
    if not groups.fits(replicas, limits):
        raise ValueError(_unfit(replicas, groups, limits))
    new_specs(layout, resized(layout, replicas))
    return WantedSize(replicas=replicas, slots=groups.slots_of(replicas))


def _unfit(replicas: int, groups: ReplicaGroups, limits: SizeLimits) -> str:
    highest = limits.global_batch // groups.parts or 2 * replicas + groups.group[0]
    near = [n for n in range(1, highest + 1) if groups.fits(n, limits)]
    below = [n for n in near if limits.min_replicas <= n < replicas][-1:]
    allowed = " or ".join(map(str, below + [n for n in near if n > replicas][:1]))
    if replicas % groups.group[0]:
        why = f"is not whole hosts: each has {groups.group[0]} replicas"
    else:
        why = (
            f"does not divide the global batch of {limits.global_batch} rows evenly "
            f"(each replica's rows have {groups.parts} parts), and the batch stays "
            "what it is"
        )
    return f"--replicas {replicas} {why}. Nearest allowed: {allowed or 'none'}."


def resized(layout: Layout, replicas: int) -> Layout:
    """Computes the layout of the same state on a mesh with `replicas` replicas.

    A layout has the mesh, with the slot of each device, and the state's arrays. In the
    example, each slot has one device, and a second replica adds two devices and slots.

    Raises:
        ValueError: the mesh has no replica axis, an axis before it has a size above 1,
            or the devices are not in the order of the slots.

    >>> mesh = MeshLayout(
    ...     axis_names=("replica", "fsdp"), axis_sizes=(1, 2), slots=(0, 1))
    >>> resized(Layout(mesh=mesh, leaves=()), 2).mesh.slots
    (0, 1, 2, 3)
    """
    mesh = layout.mesh
    per_slot = len(mesh.slots) // mesh.num_slots
    before = _outermost(mesh)
    if before == 0 or mesh.slots != _in_order(mesh.num_slots, per_slot):
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        raise ValueError(
            f"mesh axes {sizes} over slots {mesh.slots[:8]}: a job grows and shrinks "
            f"only where {REPLICA_AXIS!r} is the first axis that divides anything, and "
            "devices are in the order of the slots."
        )
    slots = replicas * mesh.num_slots // before
    return Layout(
        mesh=MeshLayout(
            axis_names=mesh.axis_names,
            axis_sizes=tuple(
                replicas if name == REPLICA_AXIS else size
                for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
            ),
            slots=_in_order(slots, per_slot),
        ),
        leaves=tuple(_with_rows(leaf, before, replicas) for leaf in layout.leaves),
        config=layout.config,
    )


def _outermost(mesh: MeshLayout) -> int:
    """Returns the size of the mesh's replica axis; 0 if the mesh cannot be resized.

    The result is 0 without a replica axis, and if an axis before it has a size above 1.
    """
    for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        if name == REPLICA_AXIS:
            return size
        if size > 1:
            break
    return 0


def _in_order(slots: int, per_slot: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(slots) for _ in range(per_slot))


def _with_rows(leaf: Leaf, before: int, replicas: int) -> Leaf:
    """Returns a leaf with its shape in a job of `replicas` replicas.

    The shape changes only for a leaf with one entry for each replica along its first
    dim: this dim is divided by the replica axis and has the size `before`, the present
    number of replicas. A job with such a leaf cannot be resized, because a new replica
    would have no entry. `size_for` therefore calls `new_specs`, which raises an error
    that names a leaf of changed shape.
    """
    rows = leaf.spec[:1] == ((REPLICA_AXIS,),) and leaf.shape[:1] == (before,)
    return dataclasses.replace(
        leaf, shape=(replicas, *leaf.shape[1:]) if rows else leaf.shape
    )


def choose_slots(
    *,
    wanted: int,
    committed: int,
    available: int,
    groups: ReplicaGroups | None,
    limits: SizeLimits,
    unfit: Collection[int] = (),
) -> int:
    """Chooses the number of slots for the next assignment of hosts.

    The candidates are these numbers of slots, in this order:

    1. `wanted`;
    2. the smaller numbers that `limits` allows, largest first. There are none if
       `groups` is None, or if the limits have no smallest number of replicas (0);
    3. `committed`, so that a failed growth does not end the job.

    Candidates in `unfit` are left out. If no candidate is left, `committed` is the only
    candidate (`wanted` without a commit). The result is the first candidate of at most
    `available` slots. If every candidate needs more slots, the result is the smallest
    candidate, and the job waits for hosts.

    In the examples there are two hosts for three wanted slots. The job continues with
    two slots if the newest commit has two; otherwise it waits for a third host.

    Args:
        wanted: the requested number of slots, or the number at the job's start.
        committed: number of slots of the newest commit; 0 without a commit.
        available: number of hosts that can be given a slot.
        groups: replica groups of the running job; None if no live host knows its
            layout.
        limits: the job's size limits.
        unfit: numbers of slots that are excluded, because the job could not be restored
            or trained with them.

    >>> choose_slots(wanted=3, committed=2, available=2, groups=None,
    ...     limits=SizeLimits())
    2
    >>> choose_slots(wanted=3, committed=3, available=2, groups=None,
    ...     limits=SizeLimits())
    3
    """
    smaller: list[int] = []
    if groups is not None and limits.min_replicas:
        most = groups.replicas_on(wanted)
        smaller = [
            groups.slots_of(replicas)
            for replicas in range(most - 1, limits.min_replicas - 1, -1)
            if groups.fits(replicas, limits)
        ]
    sizes = [wanted, *smaller, *([committed] if committed else [])]
    fit = [size for size in sizes if size not in unfit] or [committed or wanted]
    return next((size for size in fit if size <= available), min(fit))


def seat(
    previous: Sequence[tuple[str, str]],
    hosts: Collection[HostRecord],
    num_slots: int,
    group_slots: int = 1,
    choose: Choose | None = None,
) -> tuple[HostRecord | None, ...]:
    """Assigns hosts to slots when the number of slots may have changed.

    A live host keeps its slot if the slot still exists. An empty slot is first given to
    a live host whose own slot no longer exists but had the same position in its replica
    group, because that host has the same slices. `fill_slots` fills the other slots.

    Args:
        previous: previous (host, incarnation) of each slot; empty for a new job.
        hosts: the live hosts.
        num_slots: new number of slots.
        group_slots: number of slots of a replica group.
        choose: called with the host of each slot (None for an empty slot) and the
            sorted spares; returns the host of each slot. None: empty slots get the
            spares in order.

    Returns:
        The host of each slot; None where no host is left.
    """
    if not previous or len(previous) == num_slots:
        return fill_slots(previous, hosts, num_slots, choose)
    live = {(record.host, process_of(record.incarnation)) for record in hosts}

    def is_live(entry: tuple[str, str]) -> bool:
        return (entry[0], process_of(entry[1])) in live

    nobody = [("", "")] * (num_slots - len(previous))
    kept = [*previous[:num_slots], *nobody]
    moving = [
        (slot, entry)
        for slot, entry in enumerate(previous)
        if slot >= num_slots and is_live(entry)
    ]
    for slot, entry in enumerate(kept):
        alike = [one for one in moving if one[0] % group_slots == slot % group_slots]
        if not is_live(entry) and alike:
            moving.remove(alike[0])
            kept[slot] = alike[0][1]
    return fill_slots(kept, hosts, num_slots, choose)
