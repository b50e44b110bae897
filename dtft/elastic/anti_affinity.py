"""Pure decisions that spread a formation's copies over failure domains.

Copies are placed by slot, once for the lifetime of the arenas: a host's copies must not
move because another host was replaced. So a spare is chosen that keeps the copies in
separate domains; if no spare does, people are told.
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
    """The failure domains from all hosts' labels, and any disagreement as text."""
    try:
        return domains_from_labels(
            {record.host: record.domain for record in records}
        ), ""
    except ValueError as error:
        return domains_from_labels({}), str(error)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The failure domains of a job, as read from a view."""

    assignment: SlotAssignment | None
    domains: FailureDomains
    names: Mapping[str, str]
    """Host to the domain in which its copy counts."""

    @classmethod
    def of(cls, view: View) -> "Surroundings":
        """The failure domains in the store's view."""
        domains, _ = known_domains(view.hosts.values())
        level = view.assignment.spread.level if view.assignment else "host"
        hosts = list(view.hosts)
        names = dict(zip(hosts, domains_at(domains, hosts, level), strict=True))
        return cls(assignment=view.assignment, domains=domains, names=names)

    @property
    def placed(self) -> tuple[str, ...]:
        """Per slot the domain by which copies were placed."""
        return self.assignment.spread.domains if self.assignment else ()

    def placed_on(self, layout: Layout | None) -> tuple[str, ...]:
        """As `placed`, if that is of a formation of this layout's size."""
        fits = layout is not None and layout.mesh.num_slots == len(self.placed)
        return self.placed if fits else ()

    def copies(self, layout: Layout | None) -> tuple[int, int, str]:
        """Copies asked for, effective ones, and why they differ; zeros if unknown."""
        now = self.assignment
        if now is None or layout is None or layout.mesh.num_slots != len(now.slots):
            return 0, 0, ""
        if not self.names.keys() >= set(now.slots):
            return 0, 0, ""  # a host is missing: the health of the commits tells
        placement = now.spread.place(layout)
        found = shortfall(now.spread, placement, now.slots, self.domains)
        return now.spread.copies, *found


def spread_over(slots: Sequence[str], domains: FailureDomains, copies: int) -> Spread:
    """The spread of a formation that starts without copies in memory."""
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
    """The former spread while copies stay in memory (`keep`), else a new one."""
    if keep and previous is not None and len(previous.slots) == len(slots):
        return previous.spread
    return spread_over(slots, domains, copies)


def preferred(
    previous: SlotAssignment | None,
    layout: Layout | None,
    seats: Sequence[HostRecord | None],
    spares: Sequence[HostRecord],
    domains: FailureDomains,
) -> tuple[HostRecord | None, ...]:
    """The host of each slot: those that have one, and spares that suit the others.

    Args:
        previous: the former assignment.
        layout: of its state; without it spares are taken in order.
        seats: the host of each slot, None where it is empty.
        spares: in the order in which they are taken otherwise.
        domains: of all hosts.
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
    )
    return tuple(
        record if at is None else spares[at]
        for record, at in zip(seats, taken, strict=True)
    )


def shortfall(
    spread: Spread,
    placement: CopyPlacement,
    slots: Sequence[str],
    domains: FailureDomains,
) -> tuple[int, str]:
    """Effective copies of a formation, and why they are fewer than asked for.

    Copies count at the level at which they are kept apart; where that is the host
    although hosts are labelled, at the narrowest level of the labels, for a rack fails
    as a whole.

    Returns:
        The number, and a line for people that is empty if nothing is missing.
    """
    level = spread.level
    if level == "host" and domains.levels:
        level = domains.levels[-1]
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
