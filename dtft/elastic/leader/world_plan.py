"""Pure decisions about the world: the JAX processes that train, or wait to train.

A world has a fixed number of places (process indices of JAX): one for each host with a
slot, and some for spares. A formation is an assignment of hosts to slots. A world can
last over several formations: when a host is lost, the processes of the other hosts stay
in the world, and the next formation is made of these processes and of a spare's process
(a hot swap). A place whose process has died can be taken by another process. Without
hot swaps a world has one formation.

With hot swaps on CPU, each process has a coordination service of its own
(`train.world`), so every process can leave its collectives by itself. Otherwise one
host's coordination service serves the whole world. On accelerators, a process can leave
a collective only if this service believes that another process in the collective is
lost. So the leader names the places that the service is to believe lost (`given_up`),
and the world ends with the host that serves it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.job import TURNS


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """A group of JAX processes (a world), and the number of the mesh that it forms.

    Each host's process has a place in it: its process index in JAX.
    """

    number: int
    """Identifies the world among all worlds of the job."""
    indices: Mapping[str, int]
    """Host to the place of its process."""
    size: int
    """Number of places."""
    server: str = ""
    """Name of the host of the coordination service; "" if each process has its own."""
    address: str = ""
    """host:port of the coordination service; "" until it serves, if each process has
    its own, and in a job whose processes the user starts."""
    turn: int = 0
    """Number of the current formation in this world, from 0."""
    because: str = ""
    """Why the processes of the previous world could not be kept; "" if they are kept.
    Not recorded in the store."""

    @property
    def record(self) -> tuple[int, int, int]:
        """The world's three numbers that every assignment of hosts to slots contains.

        They are (number, size, turn). The number identifies the world (group of JAX
        processes) in the job, the size is its number of process indices, and the turn
        is the number of its current mesh, from 0.
        """
        return self.number, self.size, self.turn

    def seat(self, host: str) -> dict[str, object]:
        """Returns the fields of an order with which a host's process joins the world.

        The fields are the world's "number", the "address" of its coordination service,
        its "size", and "index", the process index of the host.
        """
        return {
            "number": self.number,
            "address": self.address,
            "size": self.size,
            "index": self.indices[host],
        }


def recorded(assignment: SlotAssignment) -> WorldPlan:
    """Returns the world (group of JAX processes) that an assignment of slots records.

    The returned world has the process indices of the hosts with slots, not those of
    spares.
    """
    number, size, turn = assignment.world
    server, address = assignment.service
    return WorldPlan(
        number=number,
        indices=dict(zip(assignment.slots, assignment.places, strict=False)),
        size=size,
        turn=turn,
        server=server,
        address=address,
    )


MOST_SWAPS = 2
"""Number of formations in a row in one world that may fail to train. Then all trainers
are restarted in a new world."""
SPARE_PLACES = 8
"""Number of places of a world for spares."""


def new_world(
    number: int,
    slots: Sequence[str],
    *,
    lasts: bool,
    served: bool = False,
    because: str = "",
) -> WorldPlan:
    """Makes a world (group of JAX processes) with an index for each slot, in order.

    Args:
        number: identifies the world among all worlds of the job.
        slots: the host of each slot.
        lasts: whether the same processes can form several meshes, one after the other
            (hot swaps). Then there are 8 more indices for spares (`SPARE_PLACES`), and
            no host gets index 0: JAX's process 0 would wait until processes with all
            indices have connected, which never happens in a world with spares.
        served: whether the first slot's host runs JAX's coordination service for all.
        because: why the processes of the previous world could not be kept.
    >>> new_world(1, ("b", "a"), lasts=True).indices
    {'b': 1, 'a': 2}
    >>> new_world(1, ("b", "a"), lasts=False, served=True).indices
    {'b': 0, 'a': 1}
    """
    first = int(lasts)
    indices = {host: index for index, host in enumerate(slots, first)}
    size = first + len(slots) + SPARE_PLACES * first
    return WorldPlan(
        number=number,
        indices=indices,
        size=size,
        server=slots[0] if served else "",
        because=because,
    )


def why_restarted(
    world: WorldPlan,
    swaps: int,
    *,
    lasts: bool,
    fatal: bool,
    named: Collection[str] = (),
    lost: Collection[str] = (),
    is_training: bool = True,
) -> str:
    """Returns why all trainers restart when the job is formed anew; "" if they stay.

    Args:
        world: the JAX processes that have trained last.
        swaps: how often these processes have formed a mesh since all slots last
            trained. From 2 on (`MOST_SWAPS`), all trainers restart.
        lasts: whether processes of this job can form several meshes, one after the
            other (hot swaps).
        fatal: whether the same processes would fail again.
        named: the hosts that are the reason to form the job anew: lost, failed, or
            leaving.
        lost: the hosts in `named` that are lost.
        is_training: whether processes may be in collectives.

    In the last two examples host a runs the coordination service for all processes:
    the loss of host a restarts all trainers, and the loss of host b does not.

    >>> world = new_world(1, ("a", "b"), lasts=True)
    >>> why_restarted(world, 1, lasts=True, fatal=False)
    ''
    >>> why_restarted(world, 2, lasts=True, fatal=False)
    '2 formations in a row failed in the same processes'
    >>> served = new_world(1, ("a", "b"), lasts=True, served=True)
    >>> why_restarted(served, 1, lasts=True, fatal=False, named=("b",), lost=("b",))
    ''
    >>> why_restarted(served, 1, lasts=True, fatal=False, named=("a",), lost=("a",))
    "a, which served the trainers' processes, was lost"
    """
    if not lasts:
        return "cluster.hot_swap is off, or these devices cannot form a new mesh (TPU)"
    if not world.number:
        return "no formation was recorded before"
    if fatal:
        return "the same processes would fail again"
    if swaps >= MOST_SWAPS:
        return f"{MOST_SWAPS} formations in a row failed in the same processes"
    if world.server in lost:
        return f"{world.server}, which served the trainers' processes, was lost"
    if world.server and is_training and not given_up(world, named):
        return "no process is lost, and on accelerators others cannot leave without"
    return ""


def given_up(world: WorldPlan, named: Collection[str]) -> list[int]:
    """Returns the indices of the JAX processes that are to be declared lost.

    They are declared lost to the coordination service that serves all processes, so
    that the other processes can leave their collectives. Returns [] if each process has
    a coordination service of its own.

    Args:
        world: the JAX processes that have trained last.
        named: the hosts that are the reason to form the job anew: lost, failed, or
            leaving. Hosts that have no process in the world are ignored.

    >>> # A world that lasts gives index 0 to no host (`new_world`).
    >>> given_up(new_world(1, ("a", "b"), lasts=True, served=True), {"b", "z"})
    [2]
    """
    if not world.server:
        return []
    return sorted(at for host, at in world.indices.items() if host in named)


def why_over(world: WorldPlan, usable: Collection[str] = ()) -> str:
    """Returns why a world (group of JAX processes) cannot form a further mesh.

    Returns "" if it can. `usable` are the hosts that may have a slot. If one host runs
    the coordination service for all processes, it must be among them.
    """
    if world.server and world.server not in usable:
        return f"{world.server}, which served the trainers' processes, is gone"
    if not world.server and world.turn + 1 >= TURNS:
        return f"the world has had its {TURNS} formations"
    return ""


def swapped(
    world: WorldPlan,
    slots: Sequence[str],
    members: Collection[str],
    usable: Collection[str] = (),
) -> WorldPlan | str:
    """Decides whether the next mesh can be formed in the same world (hot swap).

    A world is the group of JAX processes that train, or wait to train.

    Args:
        world: the world.
        slots: the host of each slot from now on.
        members: the hosts whose processes are in the world; all have given up their
            slots.
        usable: the hosts that may have a slot (`why_over`).

    Returns:
        The world with a process index for every host in `slots`, and with `turn`, the
        number of its mesh, raised by 1; or the reason why a new world is needed.

    >>> world = admitted(new_world(1, ("a", "b"), lasts=True), "c", {"a", "b"})
    >>> swapped(world, ("a", "c"), {"a", "c"}).turn
    1
    >>> swapped(world, ("a", "d"), {"a", "c"}).indices  # d takes the place of b
    {'a': 1, 'c': 3, 'd': 2}
    >>> swapped(world, ("a", "c"), ())
    'no process of the slots is left in the world'
    """
    if not set(slots) & set(members):
        return "no process of the slots is left in the world"
    if why := why_over(world, usable):
        return why
    indices = {
        host: index
        for host, index in world.indices.items()
        if host in members or host in slots
    }
    free = iter(sorted(set(range(1, world.size)) - set(indices.values())))
    for host in slots:
        if host not in indices:
            index = next(free, None)
            if index is None:
                return f"all process indices of JAX are taken, and {host} has none"
            indices[host] = index
    return replace(world, indices=indices, turn=world.turn + 1, because="")


def sound(
    places: Mapping[str, int], size: int, slots: Collection[str]
) -> dict[str, int]:
    """Returns the reported JAX process indices that are valid, each for one host.

    A valid index is from 1 to `size` - 1, because no host gets index 0. Two hosts can
    report the same index if two leaders have given it to them. Then only one of the
    hosts is returned: a host in `slots` if there is one, and the first by name.

    Args:
        places: host to the process index that it has reported.
        size: number of process indices.
        slots: the hosts that are to have a slot.
    >>> sound({"a": 1, "b": 2, "c": 2, "d": 0, "e": 99}, 11, {"c"})
    {'c': 2, 'a': 1}
    """
    found: dict[str, int] = {}
    for host in sorted(places, key=lambda host: (host not in slots, host)):
        if 0 < places[host] < size and places[host] not in found.values():
            found[host] = places[host]
    return found


def admitted(world: WorldPlan, host: str, there: Collection[str]) -> WorldPlan | None:
    """Gives a joining spare host a free index among the JAX processes.

    If `host` has an index, it keeps it. Other hosts lose their indices, which are then
    free, unless they are in `there`: the hosts that may have a process in the world
    (the group of JAX processes). Returns the new world, or None if no index is free.
    """
    indices = {it: at for it, at in world.indices.items() if it in there or it == host}
    free = sorted(set(range(1, world.size)) - set(indices.values()))
    if host not in indices:
        if not free:
            return None
        indices[host] = free[0]
    return replace(world, indices=indices)
