"""Pure decisions that spread a formation's copies over failure domains.

A formation is one assignment of hosts to the job's slots. Which slots keep copies of
which slices is decided once for the lifetime of the arenas (the shared memory with the
copies), and does not change when the host of a slot is replaced. The spare that
replaces a host is therefore chosen by its failure domain: the copies of each slice
must stay in separate domains. If no spare allows this, `shortfall` returns a warning.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtft.checkpoint.replication import (
    CopyPlacement,
    FailureDomains,
    Spread,
    choose_spares,
    copy_groups,
    domains_at,
    domains_from_labels,
    domains_reached,
    separate_copies,
)
from dtft.checkpoint.state import Layout
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.store import View


def known_domains(records: Iterable[HostRecord]) -> tuple[FailureDomains, str]:
    """Returns the failure domains from all hosts' labels, and an error text or "".

    If the labels are inconsistent, all labels are ignored: each host is then its own
    domain, and the error text gives the reason.
    """
    try:
        return domains_from_labels(
            {record.host: record.domain for record in records}
        ), ""
    except ValueError as error:
        return domains_from_labels({}), str(error)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Which host has which slot of a job, and which hosts fail together.

    Read from a view, the job's records in the store at one moment.
    """

    assignment: SlotAssignment | None
    domains: FailureDomains
    names: Mapping[str, str]
    """Maps each host to its failure domain at the level (power, rack or host) over
    which the copies are spread."""

    @classmethod
    def of(cls, view: View) -> "Surroundings":
        """Reads the assignment of slots and the failure domains from a view."""
        domains, _ = known_domains(view.hosts.values())
        level = view.assignment.spread.level if view.assignment else "host"
        hosts = list(view.hosts)
        names = dict(zip(hosts, domains_at(domains, hosts, level), strict=True))
        return cls(assignment=view.assignment, domains=domains, names=names)

    @property
    def placed(self) -> tuple[str, ...]:
        """The failure domain of each slot's host when the job's copies were placed.

        Copies of a slice are placed on slots of different domains, as far as possible.
        The result is () if no host had a label then (each slot counted as its own
        domain), or if no slot has been assigned yet.
        """
        return self.assignment.spread.domains if self.assignment else ()

    def placed_on(self, layout: Layout | None) -> tuple[str, ...]:
        """Returns the failure domain of each slot's host when copies were placed.

        Returns () if no domains were recorded then, if `layout` (the mesh and arrays of
        the state) has another number of slots, or if it is None.
        """
        fits = layout is not None and layout.mesh.num_slots == len(self.placed)
        return self.placed if fits else ()

    def copies(self, layout: Layout | None) -> tuple[int, int, str]:
        """Computes in how many separate failure domains every slice has copies.

        Args:
            layout: layout of the job's state (its mesh and arrays); None if unknown.

        Returns:
            Three values. First, the requested number of copies of every slice. Second,
            the number of domains that hold a copy of a slice, counted for the slice
            with the fewest, but at most the first number. Third, a warning if the
            second number is smaller than the first, else "". The result is (0, 0, "")
            if no slot has been assigned yet, the layout is unknown or has another
            number of slots than the assignment, or the host of a slot is not
            registered.
        """
        now = self.assignment
        if now is None or layout is None or layout.mesh.num_slots != len(now.slots):
            return 0, 0, ""
        if not self.names.keys() >= set(now.slots):
            return 0, 0, ""  # a host is missing, which the commits' health shows
        placement = now.spread.place(layout)
        found = shortfall(now.spread, placement, now.slots, self.domains)
        return now.spread.copies, *found


def spread_over(slots: Sequence[str], domains: FailureDomains, copies: int) -> Spread:
    """Chooses the failure domains over which copies are spread.

    These are the domains of the widest level (power, rack) with at least `copies`
    domains, or else of the level "host". Copies that hosts have in memory already are
    not considered. If no host has a domain label, each slot is its own domain.

    Args:
        slots: the host of each slot.
        domains: failure domains of all hosts.
        copies: requested number of copies of every slice.

    Returns:
        `copies`, the chosen level and each slot's domain at this level.
    """
    if not domains.levels:
        return Spread(copies=copies)
    found = separate_copies(domains, slots, copies)
    return Spread(copies=copies, level=found.level, domains=found.domains)


def next_spread(
    previous: SlotAssignment | None,
    slots: Sequence[str],
    domains: FailureDomains,
    copies: int,
    *,
    keep: bool,
) -> Spread:
    """Returns the failure domains over which copies are spread after a new assignment.

    If the present copies stay in memory (`keep`) and the number of slots is the same,
    the previous domains are returned. Otherwise new domains are chosen (`spread_over`).

    Args:
        previous: the previous assignment; None if there is none.
        slots: the host of each slot in the new assignment.
        domains: failure domains of all hosts.
        copies: requested number of copies of every slice.
        keep: whether the new assignment restores its state from the copies in memory,
            which then stay where they are.
    """
    if keep and previous is not None and len(previous.slots) == len(slots):
        return previous.spread
    return spread_over(slots, domains, copies)


def preferred(
    previous: SlotAssignment | None,
    layout: Layout | None,
    seats: Sequence[HostRecord | None],
    spares: Sequence[HostRecord],
    domains: FailureDomains,
    prefetched: Mapping[str, Mapping[int, int]] | None = None,
) -> tuple[HostRecord | None, ...]:
    """Fills empty slots with spares, so that copies stay in separate domains.

    If several spares separate the copies equally well, the spare that has prefetched
    the most bytes of the slot is taken, and of equal spares the first. The copies are
    not considered if the previous assignment or the layout is unknown, or has another
    number of slots than `seats`.

    Args:
        previous: the previous assignment; None if there is none.
        layout: layout of the state; None if unknown.
        seats: the host of each slot; None for an empty slot.
        spares: spare hosts in order of preference.
        domains: failure domains of all hosts.
        prefetched: for each spare host, maps a slot to the number of bytes of this
            slot's slices that the host has fetched ahead. None: no host has any.

    Returns:
        The host of each slot; None for an empty slot for which no spare is left.
    """
    groups, wanted, level = (), 0, "host"
    sizes = {len(seats), len(previous.slots) if previous else 0}
    if previous and layout and sizes == {layout.mesh.num_slots}:
        placement = previous.spread.place(layout)
        groups, wanted = copy_groups(placement), placement.effective_copies
        level = previous.spread.level
    hosts = [record.host for record in (*seats, *spares) if record is not None]
    names = dict(zip(hosts, domains_at(domains, hosts, level), strict=True))
    taken = choose_spares(
        groups,
        [names[record.host] if record else None for record in seats],
        [names[record.host] for record in spares],
        wanted,
        [(prefetched or {}).get(record.host, {}) for record in spares],
    )
    return tuple(
        record if at is None else spares[at]
        for record, at in zip(seats, taken, strict=True)
    )


def separates_as_well(
    spread: Spread,
    placement: CopyPlacement,
    hosts: Sequence[str],
    instead: Sequence[str],
    domains: FailureDomains,
) -> bool:
    """Whether other hosts in the slots leave each slice's copies as well separated.

    True if no slice has copies in fewer failure domains than before. Domains beyond the
    requested number of copies do not count.

    Args:
        spread: the requested copies, and the level over which they are spread.
        placement: the slots that hold copies of each slice.
        hosts: the host of each slot.
        instead: the other hosts of the slots.
        domains: the failure domains of all hosts.
    """
    level, wanted = _counted_level(spread, domains), placement.effective_copies
    before, after = (domains_at(domains, names, level) for names in (hosts, instead))
    return all(
        len({after[slot] for slot in group})
        >= min(wanted, len({before[slot] for slot in group}))
        for group in copy_groups(placement)
    )


def _counted_level(spread: Spread, domains: FailureDomains) -> str:
    if spread.level == "host" and domains.levels:
        return domains.levels[-1]
    return spread.level


def shortfall(
    spread: Spread,
    placement: CopyPlacement,
    slots: Sequence[str],
    domains: FailureDomains,
) -> tuple[int, str]:
    """Computes in how many separate failure domains every slice has copies.

    Failure domains have levels: "power", "rack" and "host". Counts the domains of the
    level over which copies are spread. If this is "host" although hosts have labels,
    counts the domains of the narrowest level in the labels, because hosts of one such
    domain fail together.

    Args:
        spread: the requested copies, and the level over which they are spread.
        placement: the slots that hold copies of each slice.
        slots: the host of each slot.
        domains: the failure domains of all hosts.

    Returns:
        The number of domains that hold a copy of a slice, counted for the slice with
        the fewest, but at most the requested number of copies; and a warning if it is
        below the requested number, else "".
    """
    level = _counted_level(spread, domains)
    names = domains_at(domains, slots, level)
    reached = domains_reached(copy_groups(placement), names)
    effective = min(reached, spread.copies)
    if effective >= spread.copies:
        return effective, ""
    return effective, (
        f"degraded: {spread.copies} copies are asked for, but some slices are in "
        f"{effective} {level}{'s' * (effective != 1)} only (the job's "
        f"{len(slots)} hosts are in {len(set(names))}). Start spares in another "
        f"{level}, or lower --checkpoint.copies"
    )
