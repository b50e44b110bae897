"""Which hosts write a step to storage, and what they fetch from peers for it. Pure.

Hosts write their own slices; where the work of copying is divided, a host lacks some of
them and borrows these. While no process of a served job runs, the newest commit is
written by hosts that together hold all of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dtft.checkpoint.replication import (
    Commit,
    Lost,
    SliceTransfer,
    inventory_of,
    plan_restore,
)
from dtft.checkpoint.state import Layout, nbytes_of
from dtft.checkpoint.storage import export_world

Complete = Mapping[str, Mapping[int, Collection[int]]]
"""Host -> step -> the slots whose own slices it has, all of them and verified."""


class NotExportable(RuntimeError):
    """No set of live hosts can write the newest commit; says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class IdleExport:
    """The newest commit, and who writes it."""

    commit: Commit
    layout: Layout
    hosts: tuple[str, ...]
    """Of each slot; a slot that nobody needs has the host of another."""


def plan_idle_export(
    commits: Sequence[Commit], layouts: Mapping[str, Layout], complete: Complete
) -> IdleExport:
    """The export of the newest commit.

    Args:
        commits: recorded ones, newest first.
        layouts: by digest, as far as live hosts know them.
        complete: what live hosts have.

    Raises:
        NotExportable: there is no commit, or some slot's host is gone.
    """
    if not commits:
        raise NotExportable("nothing is committed yet, so there is nothing to write")
    newest = commits[0]
    layout = layouts.get(newest.layout)
    if layout is None:
        raise NotExportable(
            f"step {newest.step} is not in the memory of a live host any more"
        )
    needed, every = export_world(layout).slots, range(layout.mesh.num_slots)
    found = match_slots(
        [*needed, *(slot for slot in every if slot not in needed)],
        {host: steps.get(newest.step, ()) for host, steps in complete.items()},
    )
    lost = [slot for slot in needed if slot not in found]
    if lost:
        raise NotExportable(_lost(newest, lost))
    hosts = tuple(found.get(slot, found[needed[0]]) for slot in every)
    return IdleExport(commit=newest, layout=layout, hosts=hosts)


def match_slots(
    slots: Sequence[int], able: Mapping[str, Collection[int]]
) -> dict[int, str]:
    """A host of its own for as many slots as can be.

    After a formation that was given up a host may be able to stand for two slots: the
    one that it had, and the one that it was to have.

    >>> match_slots((0, 1), {"a": {0, 1}, "b": {0}})
    {0: 'b', 1: 'a'}
    """
    found: dict[int, str] = {}

    def seat(slot: int, tried: set[str]) -> bool:
        for host in sorted(able):
            if slot not in able[host] or host in tried:
                continue
            tried.add(host)
            others = [other for other, taken in found.items() if taken == host]
            if not others or seat(others[0], tried):
                found[slot] = host
                return True
        return False

    for slot in slots:
        seat(slot, set())
    return dict(sorted(found.items()))


def _lost(commit: Commit, lost: Sequence[int]) -> str:
    names = ", ".join(dict.fromkeys(commit.holders[slot] for slot in lost))
    return (
        f"step {commit.step} cannot be written as it lies: {names} had the slices of "
        f"slot {', '.join(map(str, lost))} and is gone. What peers hold of them is "
        "brought together when the processes attach: start an agent in its place and "
        "all processes, restore, and let `save(step, args=..., force=True)` or `close` "
        "write the state"
    )


Held = Mapping[str, Mapping[str, bytes]]
"""Host -> slice key -> digest of what it has of one step."""


def borrowed(
    layout: Layout,
    writers: Mapping[str, int],
    held: Held | None,
    alive: Collection[str],
) -> tuple[SliceTransfer, ...] | None:
    """The transfers after which every writer has all slices of its slot.

    Args:
        layout: of the state.
        writers: the hosts that write, and their slots.
        held: what each host has; None if every host has all of its slot.
        alive: the hosts that can lend.

    Returns:
        None if nobody has a slice that a writer lacks.
    """
    if held is None:
        return ()
    holders: dict[str, list[str]] = {}
    for host in sorted(set(alive) & set(held)):
        for key in held[host]:
            holders.setdefault(key, []).append(host)
    slots: list[str | None] = [None] * layout.mesh.num_slots
    for host, slot in writers.items():
        slots[slot] = host
    plan = plan_restore(
        inventory_of(layout, holders),
        layout,
        slots=slots,
        alive=alive,
        whole_bytes=sum(nbytes_of(leaf) for leaf in layout.leaves),
    )
    return None if isinstance(plan, Lost) else plan.transfers


def digests_for(
    loans: Sequence[SliceTransfer], held: Held | None, host: str
) -> dict[str, bytes]:
    """Slice key to digest of what one writer borrows."""
    return {
        region.old.key: (held or {})[loan.source][region.old.key]
        for loan in loans
        if loan.target == host
        for region in loan.regions
    }
