"""Computes which hosts write a step to storage, and which slices these hosts fetch.

A writing host writes the slices of its slot. With the setting `share="divided"` a host
copies only some of its slices at a snapshot; a writing host then fetches the missing
slices from peers. In a served job (whose processes the user starts), a step can also be
exported while no process runs: hosts that together hold the whole newest commit then
write it.
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
"""Host -> step -> slots of which the host holds verified copies of all slices."""


class NotExportable(RuntimeError):
    """Live hosts cannot write the newest commit; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class IdleExport:
    """The newest commit, and the hosts that write it to storage."""

    commit: Commit
    layout: Layout
    hosts: tuple[str, ...]
    """For each slot, a host that holds all slices of the slot. If there is no such host
    and the export does not need the slot: the host of the first needed slot."""


def plan_idle_export(
    commits: Sequence[Commit], layouts: Mapping[str, Layout], complete: Complete
) -> IdleExport:
    """Plans the export of the newest commit while no process runs.

    Args:
        commits: the recorded commits, newest first.
        layouts: the layouts (mesh and leaves of the state) that live hosts know, by
            digest; a commit names its layout by this digest.
        complete: live host -> step -> the slots of which the host holds all slices.

    Raises:
        NotExportable: no commit exists, no live host knows the commit's layout, or no
            live host is left for a slot that the export needs.
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
    """Assigns hosts to as many slots as possible, and no host to two slots.

    A host may hold the slices of two slots: its former slot, and a slot that it was
    about to take when the job was formed anew.

    Args:
        slots: the slots; earlier slots take precedence.
        able: host to the slots of which it holds all slices.

    Returns:
        Slot to host, in the order of slot numbers; slots without a host are left out.

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
        f"step {commit.step} cannot be written now: {names} had the slices of "
        f"slot {', '.join(map(str, lost))} and is gone. Peers' copies of these slices "
        "are used only when all processes attach: start an agent in its place and all "
        "processes, restore, and let `save(step, args=..., force=True)` or `close` "
        "write the state"
    )


Held = Mapping[str, Mapping[str, bytes]]
"""Host -> slice key -> digest, of the slices that the host holds of one step."""


def borrowed(
    layout: Layout,
    writers: Mapping[str, int],
    held: Held | None,
    alive: Collection[str],
) -> tuple[SliceTransfer, ...] | None:
    """Plans the transfers after which every writing host has all slices of its slot.

    Args:
        layout: the layout of the state (mesh and leaves).
        writers: the hosts that write to storage, with the slot of each.
        held: host -> slice key -> digest, of the slices that each host holds; None if
            every host has all slices of its slot.
        alive: the hosts that can send slices.

    Returns:
        The transfers; () if no writing host lacks a slice, as when `held` is None. None
        if a writing host lacks a slice that no host in `alive` holds.
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
    """Maps the key of each slice that `host` fetches for an export to its digest.

    Args:
        loans: the transfers to all writing hosts, as `borrowed` returns them.
        held: host -> slice key -> digest, of the slices that each host holds; None if
            nothing is fetched.
        host: the fetching host.
    """
    return {
        region.old.key: (held or {})[loan.source][region.old.key]
        for loan in loans
        if loan.target == host
        for region in loan.regions
    }
