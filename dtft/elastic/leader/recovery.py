"""Computes what a recovery restores: the step, its source and the transfers.

Pure functions of the commits, the hosts' verified copies and the steps in storage. They
choose the step to restore, the rung (own memory, peers' memory or storage), and each
slice's sender and receiver.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from dtft.checkpoint.replication import (
    Commit,
    Holdings,
    Located,
    RestorePlan,
    SliceTransfer,
    inventory_of,
    locate,
    plan_restore,
)
from dtft.checkpoint.state import Layout
from dtft.checkpoint.tables import size_text
from dtft.elastic.assignment import REPLICA_AXIS, Source, resized


@dataclass(frozen=True, kw_only=True)
class RecoveryDecision:
    """The step to restore, its source, and why newer commits cannot be restored."""

    rung: int
    """Where the state was found: 1 in each host's own memory, 2 also in peers' memory,
    3 in storage or the initial state."""
    source: Source
    step: int
    located: Located | None = None
    """The commit to restore, with the holders and digests of its slices; set when the
    source is memory."""
    layout: Layout | None = None
    """The new formation's layout; set when the source is memory."""
    plan: RestorePlan | None = None
    """The slices that each host fetches, with senders; set when the source is
    memory."""
    passed_over: tuple[str, ...] = ()
    """A reason for each newer commit that cannot be restored; none for quarantined
    commits, which are not tried."""

    @property
    def sent(self) -> dict[str, int]:
        """Maps each host that sends slices to the number of bytes that it sends."""
        return dict(self.plan.sent) if self.plan is not None else {}


def decide(
    *,
    commits: Sequence[Commit],
    layout: Layout | None,
    holdings: Holdings,
    slots: Sequence[str],
    storage_steps: Collection[int],
    quarantined: Collection[int] = (),
    other_layouts: Collection[Layout] = (),
    placed: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
) -> RecoveryDecision:
    """Chooses the newest state that can be restored, from memory or from storage.

    Memory is preferred if both have the same step. Without a restorable step, the
    initial state is chosen.

    Args:
        commits: the recorded commits, newest first.
        layout: the running job's layout (mesh and leaves of the state); None if it is
            unknown or in `other_layouts`.
        holdings: live host -> step -> slice key -> digest, of the verified copies.
        slots: the host of each slot from now on; if there are more or fewer than in the
            commit's layout, the job has more or fewer replicas.
        storage_steps: the steps that storage holds.
        quarantined: the steps whose restore failed too often.
        other_layouts: other layouts that live hosts know, such as those from before a
            change of the number of slots.
        placed: for each slot, the failure domain by which the commits' copies were
            placed; empty if every slot was its own domain.
        domains: host to its failure domains, "power/rack"; near hosts are preferred as
            senders.
    """
    known = {one.digest: one for one in (layout, *other_layouts) if one is not None}
    usable = [c for c in commits if c.step not in quarantined]
    located, reasons = _newest(usable, known, holdings, placed)
    newest_stored = max(storage_steps, default=None)
    if located is not None:
        if newest_stored is None or newest_stored <= located.commit.step:
            before = known[located.commit.layout]
            return _from_memory(located, before, slots, tuple(reasons), domains)
    source: Source = "init" if newest_stored is None else "storage"
    return RecoveryDecision(
        rung=3, source=source, step=newest_stored or 0, passed_over=tuple(reasons)
    )


def _newest(
    commits: Sequence[Commit],
    known: Mapping[str, Layout],
    holdings: Holdings,
    placed: Sequence[str],
) -> tuple[Located | None, list[str]]:
    """Finds the newest commit that can be restored, and which hosts hold its slices.

    Args:
        commits: the commits, newest first.
        known: the layouts (mesh and leaves of the state) that live hosts know, by
            digest; a commit names its layout by this digest.
        holdings: live host -> step -> slice key -> digest, of the verified copies.
        placed: for each slot, the failure domain by which the copies were placed; empty
            if every slot was its own domain.

    Returns:
        The commit with the holders of its slices, or None if no commit can be restored;
        and the reasons why newer commits cannot be restored.
    """
    reasons: list[str] = []
    for commit in commits:
        layout = known.get(commit.layout)
        fits = layout is not None and len(placed) == layout.mesh.num_slots
        domains = placed if fits else ()
        located, passed_over = locate([commit], layout, holdings, domains)
        if located is not None:
            return located, reasons
        reasons += passed_over
    return None, reasons


def _from_memory(
    located: Located,
    before: Layout,
    slots: Sequence[str],
    reasons: tuple[str, ...],
    domains: Mapping[str, str] | None,
) -> RecoveryDecision:
    layout = layout_on(before, len(slots))
    here = {host for hosts in located.holders.values() for host in hosts}
    plan = plan_restore(
        inventory_of(before, located.holders),
        layout,
        slots=slots,
        alive=here,
        domains=domains,
    )
    assert isinstance(plan, RestorePlan), plan.reason
    # With divided copying, a host that lacks some of its slices has still kept its
    # memory.
    intact = located.commit.share == "divided" and set(slots) <= here
    return RecoveryDecision(
        rung=2 if plan.sent and not intact else 1,
        source="memory",
        step=located.commit.step,
        located=located,
        layout=layout,
        plan=plan,
        passed_over=reasons,
    )


def layout_on(layout: Layout, num_slots: int) -> Layout:
    """Computes a layout (mesh and leaves of the state) for another number of slots.

    The number of replicas changes in proportion. Returns `layout` itself if it has
    `num_slots` slots.

    Raises:
        ValueError: the mesh has no replica axis, an axis before it has a size above 1,
            or the devices are not in the order of the slots.
    """
    before = layout.mesh.num_slots
    if num_slots == before:
        return layout
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.axis_sizes, strict=True))
    return resized(layout, num_slots * sizes.get(REPLICA_AXIS, 1) // before)


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """Times, bytes and processes of one recovery, and what was restored.

    Used for `dtft drill --json` and for the printed line. Times are in seconds.
    """

    fault: str
    generation: int
    attempt: int
    rung: int
    source: Source
    restored_step: int
    last_finished_step: int
    detect_s: float
    restore_s: float
    total_s: float
    bytes_from_own_memory: int
    bytes_from_peers: int
    bytes_from_storage: int
    processes_restarted: int
    corrupt_copies: tuple[str, ...] = ()
    slots: int = 0
    slots_before: int = 0
    """The number of slots before the recovery, 0 if unknown; `slots` is the number
    after the recovery."""
    senders: Mapping[str, int] = field(default_factory=dict)
    """Host to the bytes that the plan has other hosts fetch from its memory. Includes
    slices that a spare had prefetched; they are not fetched again, and are not in
    `bytes_from_peers`."""
    survivors: int = 0
    """Number of hosts that had a slot before the recovery and have one after it,
    without the hosts that caused the recovery."""
    survivors_restarted: int = 0
    """Number of hosts in `survivors` whose trainers were restarted."""
    restarted_because: str = ""
    """Why all trainers, or trainers of hosts in `survivors`, were restarted; "" if
    neither is the case."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase, one after the other. "leave": until all hosts have given
    up their slots and reported their copies. "record": until the store has the
    assignment and JAX's coordination service serves. "restore": until every host has
    the slices of its slot. "first_step": until every slot has finished a step."""

    @property
    def steps_lost(self) -> int:
        """Number of steps to train again.

        The last step that any trainer finished, minus the restored step; at least 0.
        """
        return max(0, self.last_finished_step - self.restored_step)

    def line(self) -> str:
        """Formats the line that is printed after a recovery."""
        where = {
            "memory": f"{size_text(self.bytes_from_peers)} from peers' memory, "
            f"{size_text(self.bytes_from_own_memory)} from own memory",
            "storage": _from_storage(self.bytes_from_storage),
            "init": "the initial state (storage holds no step yet)",
        }[self.source]
        corrupt = (
            f", {len(self.corrupt_copies)} corrupt copies refused"
            if self.corrupt_copies
            else ""
        )
        size = ""
        if self.slots_before not in (0, self.slots):
            size = f"{self.slots} hosts train instead of {self.slots_before}; "
        why = f" ({self.restarted_because})" if self.survivors_restarted else ""
        return (
            f"recovered: {self.fault}; {size}generation {self.generation}; "
            f"rung {self.rung}; "
            f"step {self.restored_step} restored ({where}{corrupt}); "
            f"{self.steps_lost} steps lost; restored in {self.restore_s:.2f} s, "
            f"training again {self.total_s:.2f} s after it was noticed; "
            f"{self.survivors_restarted} of {self.survivors} survivors restarted{why}"
        )


def _from_storage(num_bytes: int) -> str:
    # A served process reads storage after this report, so the bytes are unknown.
    return f"{size_text(num_bytes)} from storage" if num_bytes else "from storage"


def fetches_for(
    plan: RestorePlan, addresses: Mapping[str, str], host: str
) -> dict[str, list[dict]]:
    """Computes which slices one host fetches from which hosts in a restore.

    Args:
        plan: the transfers of the whole restore.
        addresses: host to host:port.
        host: the fetching host.

    Returns:
        Two fields of the host's order to restore, each a list with an entry for each
        sending host. "transfers": the whole slices to fetch, named by their keys.
        "regions": the parts of old slices from which new slices are assembled. If any
        slice of the host is assembled from parts, all its slices are in "regions",
        also those in its own memory, and "transfers" is []. Otherwise "regions" is [].
    """
    if plan.moves_whole(host):
        transfers = transfers_to(plan.transfers_to(host), addresses, host)
        return {"transfers": transfers, "regions": []}
    return {"transfers": [], "regions": regions_to(plan, addresses, host)}


def transfers_to(
    transfers: Sequence[SliceTransfer], addresses: Mapping[str, str], host: str
) -> list[dict]:
    """Lists the whole slices that one host fetches, grouped by sending host.

    Args:
        transfers: the transfers, of which only those to `host` are listed.
        addresses: host to host:port.
        host: the fetching host.

    Returns:
        A dict for each sender: its name "host", its "address", and the "keys" of the
        slices.
    """
    return [
        {
            "host": transfer.source,
            "address": addresses[transfer.source],
            "keys": [region.old.key for region in transfer.regions],
        }
        for transfer in transfers
        if transfer.target == host
    ]


def regions_to(
    plan: RestorePlan, addresses: Mapping[str, str], host: str
) -> list[dict]:
    """Lists the parts of old slices for one host's new slices, by sending host.

    Old slices are those of the restored step, with the layout at its commit; new slices
    are those of the layout in which the job continues.

    Args:
        plan: the transfers of the whole restore.
        addresses: host to host:port.
        host: the host of the new slices.

    Returns:
        A dict for each sender: its name "host", its "address", and the "regions" (parts
        of old slices) to read from it. The host itself is the first sender.
    """
    sources = [(host, plan.own(host))]
    sources += [(it.source, it.regions) for it in plan.transfers_to(host)]
    return [
        {
            "host": source,
            "address": addresses[source],
            "regions": [asdict(region) for region in regions],
        }
        for source, regions in sources
    ]
