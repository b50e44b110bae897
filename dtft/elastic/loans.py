"""What hosts that write a step to storage have to borrow from their peers. Pure.

Only where the work of copying is divided does a host lack some of its own slices. Must
not know how bytes travel, nor when a step is due.
"""

from collections.abc import Collection, Mapping, Sequence

from dtft.checkpoint.replication import Lost, SliceTransfer, inventory_of, plan_restore
from dtft.checkpoint.state import Layout, nbytes_of

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
